"""The tables of whom we call and who may call us, and of the secrets between us: one insert for each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, LiteralString

import psycopg

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


ADD_SENDER: Final[LiteralString] = """
    insert into waypost.sender (tenant_id, name)
    values (%(tenant)s::int, %(name)s::text)
        on conflict (tenant_id, name) do nothing
"""


async def add_sender(conn: Connection, name: str, *, tenant: int) -> bool:
    """Whether it was added; false when the name is taken."""
    cursor = await conn.execute(ADD_SENDER, {"tenant": tenant, "name": name})
    return cursor.rowcount == 1


SEAL: Final[LiteralString] = """
    insert into waypost.secret (tenant_id, owner_kind, owner_name, key_id, nonce, ciphertext)
    values (%(tenant)s::int, %(owner_kind)s::text, %(owner_name)s::text, %(key_id)s::text, %(nonce)s::bytea,
            %(ciphertext)s::bytea)
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
        },
    )
