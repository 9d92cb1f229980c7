"""Who may post to us, and the secrets that prove it: read from the database, kept for seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, LiteralString

import psycopg
from psycopg_pool import AsyncConnectionPool

from contracts.errors import BadSecret, VaultError, WaypostError, shown
from contracts.json_schema import Checker, SchemaInvalid
from contracts.limits import NAME_BYTES_MAX, SECRETS_MAX, SENDERS_KEPT_MAX
from contracts.observer import Observer
from contracts.signature import PublicKey, Secret
from contracts.vault import Vault, secret_context
from receiver.authenticity import Key, Verifier
from receiver.schemes import Policy, SettingsInvalid, policy_of
from receiver.settings import ReceiverSettings

CONNECTION_SECONDS: Final = 2.0
"""To wait for a connection; a database that is away is then said to be, so that senders come back later."""

Connection = psycopg.AsyncConnection[Any]
Pool = AsyncConnectionPool[Any]
Name = tuple[str, str]
"""Of a tenant and of a sender of that tenant, as the URL has them."""


STANDARD: Final = policy_of("standard-webhooks", {})

SINGLE_HEADERS: Final = ("content-type", "content-encoding", "content-length")
"""Headers that say one thing, whoever sends them."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Somebody who may post. `unreadable`: some secret of it, or its settings, could not be read, which is our fault;
    `fault` says what was found in the settings, or in a contract, then.

    `binary_mode`: it may send events whose attributes are in headers, which its signature does not cover. `contracts`
    are those of its tenant, by type and dataschema. `single` are the headers that it may send once only.
    """

    tenant_id: int
    name: str
    state: Literal["enabled", "disabled", "retired"]
    secrets: tuple[Key, ...]
    unreadable: bool = False
    fault: str = ""
    binary_mode: bool = False
    policy: Policy = STANDARD
    contracts: Mapping[tuple[str, str], Checker] = field(default_factory=dict[tuple[str, str], Checker])
    verifier: Verifier = field(init=False, compare=False, repr=False)
    single: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        policy = self.policy
        mapped = policy.event.headers() if policy.event else ()
        object.__setattr__(self, "verifier", Verifier(policy.signature, self.secrets))
        object.__setattr__(self, "single", (*SINGLE_HEADERS, *policy.signature.headers(), *mapped))


NOBODY: Final = Sender(0, "", "retired", (), policy=policy_of("svix", {}))
"""Who stands for a sender that does not exist. It has no secrets, so it proves nothing."""


SENDER: Final[LiteralString] = """
    select s.tenant_id, s.state, s.binary_mode, s.scheme, s.settings,
           (select jsonb_agg(jsonb_build_array(c.type, c.dataschema, c.schema))
              from waypost.contract c
             where c.tenant_id = s.tenant_id) as contracts,
           k.key_id, k.algorithm, k.nonce, k.ciphertext
      from waypost.tenant t
      join waypost.sender s using (tenant_id)
      left join waypost.secret k on k.tenant_id = s.tenant_id and k.owner_kind = 'sender' and k.owner_name =
      s.name
                                and (k.expires_at is null or k.expires_at > now())
     where t.name = %(tenant)s and s.name = %(sender)s
     order by k.created_at desc, k.key_id
     limit %(secrets_max)s
"""


async def read(conn: Connection, name: Name, *, vault: Vault, observer: Observer) -> Sender | None:
    """The sender of that name with its live secrets, newest first; None when there is none."""
    tenant, sender = name
    parameters = {"tenant": tenant, "sender": sender, "secrets_max": SECRETS_MAX}
    rows = await (await conn.execute(SENDER, parameters)).fetchall()
    if not rows:
        return None
    tenant_id, state, binary_mode, scheme, settings, contracts = rows[0][:6]
    try:
        policy = policy_of(scheme, settings)
        checkers = {(type_, dataschema): Checker(schema) for type_, dataschema, schema in contracts or ()}
    except (SettingsInvalid, SchemaInvalid) as error:
        observer.saw("sender.unreadable", sender=sender, error=str(error))
        return Sender(tenant_id, sender, state, (), unreadable=True, fault=str(error))
    secrets: list[Key] = []
    unreadable = False
    for key_id, algorithm, nonce, ciphertext in (row[6:] for row in rows if row[6] is not None):
        owner = secret_context(tenant=tenant_id, owner_kind="sender", owner_name=sender, key_id=key_id)
        try:
            key = vault.open(ciphertext, nonce=nonce, associated=owner)
            secrets.append(PublicKey(key) if algorithm == "ed25519" else Secret(key))
        except (VaultError, BadSecret) as error:
            unreadable = True
            observer.saw("secret.unreadable", error=error)
    return Sender(
        tenant_id,
        sender,
        state,
        tuple(secrets),
        unreadable,
        binary_mode=binary_mode,
        policy=policy,
        contracts=checkers,
    )


class SenderUnreadable(WaypostError):
    """The settings of a sender, or a contract, are not understood here, so nothing of it can be let in."""

    code = "sender-unreadable"
    http_status = 503


def check_settings(sender: Sender) -> None:
    """Raise SenderUnreadable when its settings, or a contract, could not be read."""
    if sender.fault:
        raise SenderUnreadable(
            f"sender {shown(sender.name)}: expected settings and contracts that are understood here,"
            f" found {shown(sender.fault)}"
        )


class Senders:
    """Senders by name. Concurrent questions for one name are one query; unknown names are remembered too.

    A change in the database is seen within `senders_fresh_seconds`, a new sender within
    `senders_unknown_seconds`. While the database is away, what has grown old is not used: nothing could be
    stored then anyway.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        vault: Vault,
        settings: ReceiverSettings,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.vault = vault
        self.settings = settings
        self.observer = observer
        self.clock = clock
        self.kept: dict[Name, tuple[float, Sender | None]] = {}
        self.asking: dict[Name, asyncio.Task[Sender | None]] = {}

    def fresh(self, name: Name) -> Sender | None:
        """The sender of that name, when it was read a moment ago."""
        known = self.kept.get(name)
        return known[1] if known is not None and self.clock() < known[0] else None

    async def get(self, name: Name) -> Sender | None:
        """The sender of that name, or None. Raises what the database raises when it has to be asked."""
        known = self.kept.get(name)
        if known is not None and self.clock() < known[0]:
            return known[1]
        if not is_name(name[0]) or not is_name(name[1]):
            return None
        asking = self.asking.get(name)
        if asking is None:
            asking = self.asking[name] = asyncio.create_task(self._ask(name))
            asking.add_done_callback(lambda task: self._asked(name, task))
        return await asyncio.shield(asking)

    def _asked(self, name: Name, task: asyncio.Task[Sender | None]) -> None:
        self.asking.pop(name, None)
        if not task.cancelled():
            task.exception()  # whoever still waits gets it; it is not to be reported as forgotten

    async def _ask(self, name: Name) -> Sender | None:
        async with (
            asyncio.timeout(self.settings.wait_seconds),
            self.pool.connection(CONNECTION_SECONDS) as conn,
        ):
            sender = await read(conn, name, vault=self.vault, observer=self.observer)
        fresh = (
            self.settings.senders_unknown_seconds if sender is None else self.settings.senders_fresh_seconds
        )
        if len(self.kept) >= SENDERS_KEPT_MAX:
            self.kept.clear()  # strangers try names; whoever is real is read again at once
        self.kept[name] = (self.clock() + fresh, sender)
        return sender


def is_name(text: str) -> bool:
    """Whether a name could be in the table; what could not be is not asked for."""
    return text.isprintable() and 0 < len(text.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX
