"""The tables of whom we call and who may call us, and of the secrets between us."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, LiteralString

import psycopg
from psycopg.rows import class_row

Connection = psycopg.AsyncConnection[Any]

OwnerKind = Literal["endpoint", "sender"]


@dataclass(frozen=True, slots=True)
class NewEndpoint:
    name: str
    url: str
    kind: Literal["command", "event"]
    timeout: timedelta
    replies_from: str | None


@dataclass(frozen=True, slots=True)
class SealedSecret:
    owner_kind: OwnerKind
    owner_name: str
    key_id: str
    nonce: bytes
    ciphertext: bytes
    algorithm: Literal["hmac", "ed25519"] = "hmac"


ADD_ENDPOINT: Final[LiteralString] = """
    insert into waypost.endpoint (tenant_id, name, url, kind, timeout, replies_from)
    values (%(tenant)s::int, %(name)s::text, %(url)s::text, %(kind)s::text, %(timeout)s::interval,
            %(replies_from)s::text)
        on conflict (tenant_id, name) do nothing
"""


async def add_endpoint(conn: Connection, endpoint: NewEndpoint, *, tenant: int) -> bool:
    """Whether it was added; false when the name is taken. Raises psycopg's CheckViolation for bad values."""
    cursor = await conn.execute(
        ADD_ENDPOINT,
        {
            "tenant": tenant,
            "name": endpoint.name,
            "url": endpoint.url,
            "kind": endpoint.kind,
            "timeout": endpoint.timeout,
            "replies_from": endpoint.replies_from,
        },
    )
    return cursor.rowcount == 1


REPLACE_ENDPOINT: Final[LiteralString] = """
    update waypost.endpoint
       set url = %(url)s::text,
           kind = %(kind)s::text,
           timeout = %(timeout)s::interval,
           replies_from = %(replies_from)s::text,
           state = 'enabled',
           paused_until = null
     where tenant_id = %(tenant)s::int
       and name = %(name)s::text
"""


async def replace_endpoint(conn: Connection, endpoint: NewEndpoint, *, tenant: int) -> None:
    """As if it were new: enabled and not paused."""
    await conn.execute(
        REPLACE_ENDPOINT,
        {
            "tenant": tenant,
            "name": endpoint.name,
            "url": endpoint.url,
            "kind": endpoint.kind,
            "timeout": endpoint.timeout,
            "replies_from": endpoint.replies_from,
        },
    )


@dataclass(frozen=True, slots=True)
class NewSender:
    """`settings` is JSON text: what is laid over the scheme's preset."""

    name: str
    binary_mode: bool
    scheme: str
    settings: str


ADD_SENDER: Final[LiteralString] = """
    insert into waypost.sender (tenant_id, name, binary_mode, scheme, settings)
    values (%(tenant)s::int, %(name)s::text, %(binary_mode)s::boolean, %(scheme)s::text, %(settings)s::jsonb)
        on conflict (tenant_id, name) do nothing
"""


async def add_sender(conn: Connection, sender: NewSender, *, tenant: int) -> bool:
    """Whether it was added; false when the name is taken."""
    return (await conn.execute(ADD_SENDER, {"tenant": tenant, **asdict(sender)})).rowcount == 1


REPLACE_SENDER: Final[LiteralString] = """
    update waypost.sender
       set state = 'enabled',
           binary_mode = %(binary_mode)s::boolean,
           scheme = %(scheme)s::text,
           settings = %(settings)s::jsonb
     where tenant_id = %(tenant)s::int
       and name = %(name)s::text
"""


async def replace_sender(conn: Connection, sender: NewSender, *, tenant: int) -> None:
    """As if it were new: enabled."""
    await conn.execute(REPLACE_SENDER, {"tenant": tenant, **asdict(sender)})


@dataclass(frozen=True, slots=True)
class Said:
    """What a sender's row says about how it posts."""

    scheme: str
    settings: Mapping[str, Any]
    binary_mode: bool
    state: str


LOCK_SENDER: Final[LiteralString] = """
    select scheme, settings, binary_mode, state
      from waypost.sender
     where tenant_id = %(tenant)s::int
       and name = %(name)s::text
       for update
"""


async def lock_sender(conn: Connection, name: str, *, tenant: int) -> Said | None:
    """What is said about a sender, until the transaction ends; None when nobody has that name."""
    row = await (await conn.execute(LOCK_SENDER, {"tenant": tenant, "name": name})).fetchone()
    return None if row is None else Said(*row)


SET_SENDER: Final[LiteralString] = """
    update waypost.sender
       set binary_mode = %(binary_mode)s::boolean,
           settings = %(settings)s::jsonb,
           state = %(state)s::text
     where tenant_id = %(tenant)s::int
       and name = %(name)s::text
"""


async def set_sender(
    conn: Connection, name: str, *, binary_mode: bool, settings: str, state: str, tenant: int
) -> None:
    await conn.execute(
        SET_SENDER,
        {"tenant": tenant, "name": name, "binary_mode": binary_mode, "settings": settings, "state": state},
    )


LOCK_ENDPOINT: Final[LiteralString] = """
    select 1
      from waypost.endpoint
     where tenant_id = %(tenant)s::int
       and name = %(name)s::text
       for no key update
"""


async def lock_endpoint(conn: Connection, name: str, *, tenant: int) -> bool:
    """Whether there is an endpoint of that name; nobody else gives it a secret before the transaction ends."""
    return await (await conn.execute(LOCK_ENDPOINT, {"tenant": tenant, "name": name})).fetchone() is not None


REFER: Final[LiteralString] = """
    insert into waypost.secret (tenant_id, owner_kind, owner_name, key_id, reference)
    values (%(tenant)s::int, 'endpoint', %(name)s::text, %(key_id)s::text, %(reference)s::text)
"""


async def add_reference(conn: Connection, name: str, key_id: str, reference: str, *, tenant: int) -> None:
    """An endpoint's secret that is kept elsewhere."""
    await conn.execute(REFER, {"tenant": tenant, "name": name, "key_id": key_id, "reference": reference})


EXPIRE_SECRETS: Final[LiteralString] = """
    update waypost.secret
       set expires_at = now() + %(grace)s::interval
     where tenant_id = %(tenant)s::int
       and owner_kind = %(owner_kind)s::text
       and owner_name = %(owner_name)s::text
       and expires_at is null
"""


async def expire_secrets(
    conn: Connection, kind: OwnerKind, name: str, *, grace: timedelta, tenant: int
) -> None:
    """Let all that have no end of their own end after `grace`; those that end already keep their end."""
    await conn.execute(
        EXPIRE_SECRETS, {"tenant": tenant, "owner_kind": kind, "owner_name": name, "grace": grace}
    )


COUNT_SECRETS: Final[LiteralString] = """
    select count(*)
      from waypost.secret
     where tenant_id = %(tenant)s::int
       and owner_kind = %(owner_kind)s::text
       and owner_name = %(owner_name)s::text
       and (expires_at is null or expires_at > now())
"""


async def count_secrets(conn: Connection, kind: OwnerKind, name: str, *, tenant: int) -> int:
    """How many of an owner are in use now."""
    parameters = {"tenant": tenant, "owner_kind": kind, "owner_name": name}
    row = await (await conn.execute(COUNT_SECRETS, parameters)).fetchone()
    assert row is not None, "a count has a row"
    return row[0]


FORGET_SECRETS: Final[LiteralString] = """
    delete from waypost.secret
     where tenant_id = %(tenant)s::int
       and owner_kind = %(owner_kind)s::text
       and owner_name = %(owner_name)s::text
"""


async def forget_secrets(conn: Connection, kind: OwnerKind, name: str, *, tenant: int) -> None:
    await conn.execute(FORGET_SECRETS, {"tenant": tenant, "owner_kind": kind, "owner_name": name})


SEAL: Final[LiteralString] = """
    insert into waypost.secret (tenant_id, owner_kind, owner_name, key_id, nonce, ciphertext, algorithm)
    values (%(tenant)s::int, %(owner_kind)s::text, %(owner_name)s::text, %(key_id)s::text, %(nonce)s::bytea,
            %(ciphertext)s::bytea, %(algorithm)s::text)
"""


async def add_secret(conn: Connection, secret: SealedSecret, *, tenant: int) -> None:
    """Raises psycopg's UniqueViolation when the owner has a secret of that key id already."""
    await conn.execute(
        SEAL,
        {
            "tenant": tenant,
            "owner_kind": secret.owner_kind,
            "owner_name": secret.owner_name,
            "key_id": secret.key_id,
            "nonce": secret.nonce,
            "ciphertext": secret.ciphertext,
            "algorithm": secret.algorithm,
        },
    )


@dataclass(frozen=True, slots=True)
class EndpointRow:
    """An endpoint as it stands. `secrets` counts those that sign now."""

    name: str
    url: str
    kind: str
    state: str
    timeout: timedelta
    replies_from: str
    fault: str | None
    paused_until: datetime | None
    open_until: datetime | None
    failing_since: datetime | None
    rate: float | None
    secrets: int
    created_at: datetime


READ_ENDPOINTS: Final[LiteralString] = """
    select e.name, e.url, e.kind, e.state, e.timeout, coalesce(e.replies_from, e.name) as replies_from, e.fault,
           case when e.paused_until > now() then e.paused_until end as paused_until, e.open_until, e.failing_since,
           e.rate,
           (select count(*)
              from waypost.secret s
             where s.tenant_id = e.tenant_id
               and s.owner_kind = 'endpoint'
               and s.owner_name = e.name
               and (s.expires_at is null or s.expires_at > now())) as secrets,
           e.created_at
      from waypost.endpoint e
     where e.tenant_id = %(tenant)s::int
     order by e.name
     limit %(limit)s::int
"""


async def read_endpoints(conn: Connection, *, tenant: int, limit: int) -> list[EndpointRow]:
    """By name, at most `limit`."""
    async with conn.cursor(row_factory=class_row(EndpointRow)) as cursor:
        await cursor.execute(READ_ENDPOINTS, {"tenant": tenant, "limit": limit})
        return await cursor.fetchall()


@dataclass(frozen=True, slots=True)
class SenderRow:
    """A sender as it stands. `secrets` counts those that prove it now."""

    name: str
    scheme: str
    state: str
    binary_mode: bool
    settings: Mapping[str, Any]
    secrets: int
    created_at: datetime


READ_SENDERS: Final[LiteralString] = """
    select d.name, d.scheme, d.state, d.binary_mode, d.settings,
           (select count(*)
              from waypost.secret s
             where s.tenant_id = d.tenant_id
               and s.owner_kind = 'sender'
               and s.owner_name = d.name
               and (s.expires_at is null or s.expires_at > now())) as secrets,
           d.created_at
      from waypost.sender d
     where d.tenant_id = %(tenant)s::int
     order by d.name
     limit %(limit)s::int
"""


async def read_senders(conn: Connection, *, tenant: int, limit: int) -> list[SenderRow]:
    """By name, at most `limit`."""
    async with conn.cursor(row_factory=class_row(SenderRow)) as cursor:
        await cursor.execute(READ_SENDERS, {"tenant": tenant, "limit": limit})
        return await cursor.fetchall()


@dataclass(frozen=True, slots=True)
class Newest:
    tenant_id: int
    secret: SealedSecret


READ_NEWEST: Final[LiteralString] = """
    select tenant_id, owner_kind, owner_name, key_id, nonce, ciphertext
      from waypost.secret
     where ciphertext is not null
       and (expires_at is null or expires_at > now())
     order by created_at desc
     limit 1
"""


async def read_newest(conn: Connection) -> Newest | None:
    """The newest of all that are in use and here."""
    row = await (await conn.execute(READ_NEWEST)).fetchone()
    return None if row is None else Newest(row[0], SealedSecret(*row[1:]))
