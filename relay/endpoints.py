"""Where messages go and with which secrets they are signed, kept open for a moment so that a busy relay asks
once.
"""

import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, LiteralString

from psycopg import AsyncConnection

from contracts.addresses import Network
from contracts.backoff import BadSchedule, Schedule
from contracts.errors import BadSecret, VaultError
from contracts.limits import SECRETS_MAX
from contracts.observer import Observer
from contracts.signature import Secret, Signer, SigningKey
from contracts.vault import Vault, secret_context
from relay.addresses import check_url
from relay.delivery import REMOVED
from relay.outbox import EndpointKey
from relay.particulars import Certificates, header_problems, tls_problems
from relay.references import KNOWN, Manager, resolve

Connection = AsyncConnection[Any]

ENDPOINTS_MAX: Final = 10_000  # kept in memory; more, and all are read again


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to post and how to sign: with every live secret, newest first, so that both sides of a rotation verify.
    `schedule` is when to try again, if the endpoint says it; `headers` are its own, `idempotency` is how it wants its
    key (`bare`, `quoted`, `off`), `mode` how it wants an event (`structured`, `binary`), and `tls` has its
    certificates, if it has some.
    """

    url: str
    secrets: tuple[Signer, ...]
    schedule: Schedule | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    idempotency: str = "bare"
    mode: str = "structured"
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class Unusable:
    """An endpoint that nothing can be sent to now; `error_code` says why."""

    error_code: str


@dataclass(frozen=True, slots=True)
class Row:
    """An endpoint as the table has it."""

    url: str
    schedule: Any
    headers: Any
    idempotency: str
    mode: str
    tls: Any
    sealed: list["Sealed"]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A live secret: sealed, or named by a reference."""

    key_id: str
    nonce: bytes | None
    ciphertext: bytes | None
    algorithm: str
    reference: str | None


READ: Final[LiteralString] = """
    select e.tenant_id, e.name, e.url, e.schedule, e.headers, e.idempotency, e.mode, e.tls, s.key_id, s.nonce,
           s.ciphertext, s.algorithm, s.reference
      from unnest(%(tenant)s::int[], %(name)s::text[]) as t(tenant_id, name)
      join waypost.endpoint e
        on e.tenant_id = t.tenant_id
       and e.name = t.name
      left join lateral
           (select secret.key_id, secret.nonce, secret.ciphertext, secret.created_at, secret.algorithm,
                   secret.reference
              from waypost.secret
             where secret.tenant_id = e.tenant_id
               and secret.owner_kind = 'endpoint'
               and secret.owner_name = e.name
               and (secret.expires_at is null or secret.expires_at > coalesce(%(now)s::timestamptz, now()))
             order by secret.created_at desc, secret.key_id
             limit %(secrets_max)s) s
        on true
     order by e.tenant_id, e.name, s.created_at desc, s.key_id
"""


class Endpoints:
    """A cache over the tables `endpoint` and `secret`; absence is kept too. What it holds is at
    most `keep` old.

    `clock` is monotonic, in seconds. `managers` are those who keep secrets elsewhere, by the kind of reference.
    """

    def __init__(
        self,
        *,
        vault: Vault,
        allow: Iterable[Network],
        keep: timedelta,
        clock: Callable[[], float],
        observer: Observer,
        managers: Mapping[str, Manager] = KNOWN,
    ) -> None:
        self._managers = managers
        self._certificates = Certificates()
        self._vault = vault
        self._allow = tuple(allow)
        self._keep = keep.total_seconds()
        self._clock = clock
        self._observer = observer
        self._known: dict[EndpointKey, tuple[float, Endpoint | Unusable]] = {}

    async def look_up(
        self, conn: Connection, keys: Iterable[EndpointKey], *, now: datetime | None = None
    ) -> dict[EndpointKey, Endpoint | Unusable]:
        """Every one of `keys`, from memory where that is fresh. What the database raises, it raises."""
        wanted = set(keys)
        oldest = self._clock() - self._keep
        missing = sorted(key for key in wanted if key not in self._known or self._known[key][0] <= oldest)
        if missing:
            await self._read(conn, missing, now)
        return {key: self._known[key][1] for key in wanted}

    async def _read(self, conn: Connection, keys: list[EndpointKey], now: datetime | None) -> None:
        rows: dict[EndpointKey, Row] = {}
        cursor = await conn.execute(
            READ,
            {
                "tenant": [tenant_id for tenant_id, _ in keys],
                "name": [name for _, name in keys],
                "secrets_max": SECRETS_MAX,
                "now": now,
            },
        )
        async for tenant_id, name, url, schedule, headers, idempotency, mode, tls, *secret in cursor:
            row = rows.setdefault((tenant_id, name), Row(url, schedule, headers, idempotency, mode, tls, []))
            if secret[0] is not None:
                row.sealed.append(Sealed(*secret))
        if len(self._known) + len(keys) > ENDPOINTS_MAX:
            self._known.clear()
        read_at = self._clock()
        for key in keys:
            self._known[key] = (
                read_at,
                await self._open(key, rows[key]) if key in rows else Unusable(REMOVED),
            )

    async def _open(self, key: EndpointKey, row: Row) -> Endpoint | Unusable:
        if problems := check_url(row.url, allow=self._allow):
            return self._unusable(key, "bad-url", "; ".join(problems))
        try:
            schedule = None if row.schedule is None else Schedule.of(row.schedule)
            problems = [*header_problems(row.headers), *tls_problems(row.tls)]
            tls = None if problems else self._certificates.context(row.tls)
        except (BadSchedule, OSError, ssl.SSLError) as error:
            problems, schedule, tls = [str(error)], None, None
        if problems:
            return self._unusable(key, "bad-settings", "; ".join(problems))
        if not row.sealed:
            return Unusable("no-secret")
        secrets = [secret for one in row.sealed if (secret := await self._secret(key, one)) is not None]
        if not secrets:
            return Unusable("secret-unreadable")
        return Endpoint(row.url, tuple(secrets), schedule, row.headers, row.idempotency, row.mode, tls)

    def _unusable(self, key: EndpointKey, code: str, reason: str) -> Unusable:
        self._observer.saw("endpoint.unusable", tenant=key[0], endpoint=key[1], reason=reason)
        return Unusable(code)

    async def _secret(self, key: EndpointKey, sealed: Sealed) -> Signer | None:
        """None when it cannot be opened: a message signed with the others is still worth sending."""
        key_id = sealed.key_id
        context = secret_context(tenant=key[0], owner_kind="endpoint", owner_name=key[1], key_id=key_id)
        try:
            if sealed.reference is not None:
                return await resolve(sealed.reference, self._managers)
            plain = self._vault.open(sealed.ciphertext or b"", nonce=sealed.nonce or b"", associated=context)
            return SigningKey(plain) if sealed.algorithm == "ed25519" else Secret.of(plain)
        except (VaultError, BadSecret) as error:
            self._observer.saw(
                "secret.unreadable", tenant=key[0], endpoint=key[1], key_id=key_id, error=str(error)
            )
            return None
