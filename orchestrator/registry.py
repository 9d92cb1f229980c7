"""Making endpoints and senders known, each with a secret that is shown once and kept only sealed.

Nothing can show a secret again: the caller gets it here, and nowhere else. A name is registered together with
its secret or not at all.
"""

from __future__ import annotations

import re
import secrets as chance
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

import psycopg

from contracts.errors import Conflict, ContractViolation, NotFound, VaultError, WaypostError, shown
from contracts.limits import NAME_BYTES_MAX
from contracts.signature import Secret
from contracts.vault import NONCE_BYTES, Vault, secret_context
from orchestrator.store import registry as store
from orchestrator.store.registry import NewEndpoint, OwnerKind, SealedSecret
from relay.addresses import Network, check_url

Connection = psycopg.AsyncConnection[Any]

TENANT: Final = 1
SECRET_BYTES: Final = 32  # of a new one; Standard Webhooks allows 24 to 64
KEY_ID_BYTES: Final = 6
TIMEOUT: Final = timedelta(seconds=15)
TIMEOUT_MIN: Final = timedelta(milliseconds=1)
TIMEOUT_MAX: Final = timedelta(minutes=5)
NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._~-]{{0,{NAME_BYTES_MAX - 1}}}")
OURS: Final = "waypost"


class NotRegistered(ContractViolation):
    """What should be registered is not as it must be; each problem is a sentence."""

    code = "not-registered"
    http_status = 422

    def __init__(self, what: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{what}: " + "; ".join(self.problems))


class NameTaken(Conflict):
    """The name is registered already. Its secret cannot be shown again."""

    code = "name-taken"

    def __init__(self, kind: OwnerKind, name: str) -> None:
        super().__init__(
            f"{kind} {shown(name)}: expected a new name, found one that is registered;"
            " its secret cannot be shown again: when it is lost, --replace makes a new one"
        )
        self.kind = kind
        self.name = name


class UnknownSender(NotFound):
    """Nobody of that name may post to us."""

    code = "unknown-sender"

    def __init__(self, name: str) -> None:
        super().__init__(f"no sender is named {shown(name)}; `waypost sender list` shows who is")
        self.name = name


class WrongKey(WaypostError):
    """The key at hand does not open what is stored: nothing could be signed or verified with it."""

    code = "wrong-key"

    def __init__(self, kind: OwnerKind, name: str) -> None:
        super().__init__(
            f"WAYPOST_SECRET_KEY: expected the key that sealed the secret of {kind} {shown(name)}, found another;"
            f" if that one is lost, `waypost {kind} add … --replace` gives each a new secret"
        )


async def check_key(conn: Connection, vault: Vault) -> None:
    """Open the newest secret that is stored. Raises WrongKey; nothing stored is well."""
    found = await store.read_newest(conn)
    if found is None:
        return
    it = found.secret
    owner = secret_context(
        tenant=found.tenant_id, owner_kind=it.owner_kind, owner_name=it.owner_name, key_id=it.key_id
    )
    try:
        vault.open(it.ciphertext, nonce=it.nonce, associated=owner)
    except VaultError:
        raise WrongKey(it.owner_kind, it.owner_name) from None


@dataclass(frozen=True, slots=True)
class Registered:
    """What was registered. `secret` is nowhere else from here on."""

    kind: OwnerKind
    name: str
    key_id: str
    secret: Secret


async def add_endpoint(
    conn: Connection,
    vault: Vault,
    *,
    name: str,
    url: str,
    kind: Literal["command", "event"] = "command",
    patience: timedelta = TIMEOUT,
    replies_from: str | None = None,
    secret: Secret | None = None,
    allow: Iterable[Network] = (),
    replace: bool = False,
    tenant: int = TENANT,
) -> Registered:
    """Register where messages to `name` are posted, and what they are signed with (a new secret by default).

    `patience` is the timeout of one try, its answer included. `replies_from` is the sender that may answer
    (default: of the same name). `allow` are the networks that the relay may reach although they are private.
    With `replace` a name that is taken stands for this from now on, and its old secrets are gone.
    Raises NotRegistered with every problem, NameTaken, WrongKey.
    """
    problems = [
        *name_problems(name),
        *(f"url: {problem}" for problem in check_url(url, allow=allow)),
        *(f"replies-from: {problem}" for problem in name_problems(replies_from or name)),
    ]
    if not TIMEOUT_MIN <= patience <= TIMEOUT_MAX:
        problems.append("timeout: expected 1ms to 5m")
    if problems:
        raise NotRegistered(f"endpoint {shown(name)}", dict.fromkeys(problems))
    if not replace:
        await check_key(conn, vault)
    async with conn.transaction():
        new = NewEndpoint(name, url, kind, patience, replies_from)
        if not await store.add_endpoint(conn, new, tenant=tenant):
            if not replace:
                raise NameTaken("endpoint", name)
            await store.replace_endpoint(conn, new, tenant=tenant)
            await store.forget_secrets(conn, "endpoint", name, tenant=tenant)
        return await add_secret(conn, vault, kind="endpoint", name=name, secret=secret, tenant=tenant)


async def add_sender(
    conn: Connection,
    vault: Vault,
    *,
    name: str,
    secret: Secret | None = None,
    binary_mode: bool = False,
    replace: bool = False,
    tenant: int = TENANT,
) -> Registered:
    """Register who may post to us, and what it signs with (a new secret by default).

    With `binary_mode` it may send events whose attributes are in headers, which the signature does not cover.
    With `replace` a name that is taken keeps nothing but what is said here. Raises NotRegistered, NameTaken,
    WrongKey.
    """
    problems = name_problems(name)
    if name == OURS:
        problems.append(f"expected another name than {OURS}, which is ourselves")
    if problems:
        raise NotRegistered(f"sender {shown(name)}", problems)
    if not replace:
        await check_key(conn, vault)
    async with conn.transaction():
        if not await store.add_sender(conn, name, binary_mode=binary_mode, tenant=tenant):
            if not replace:
                raise NameTaken("sender", name)
            await store.replace_sender(conn, name, binary_mode=binary_mode, tenant=tenant)
            await store.forget_secrets(conn, "sender", name, tenant=tenant)
        return await add_secret(conn, vault, kind="sender", name=name, secret=secret, tenant=tenant)


async def set_sender(conn: Connection, name: str, *, binary_mode: bool, tenant: int = TENANT) -> None:
    """Say whether a sender may use the binary content mode; receivers know within seconds. Raises UnknownSender."""
    if not await store.set_sender(conn, name, binary_mode=binary_mode, tenant=tenant):
        raise UnknownSender(name)


async def add_secret(
    conn: Connection,
    vault: Vault,
    *,
    kind: OwnerKind,
    name: str,
    secret: Secret | None = None,
    tenant: int = TENANT,
) -> Registered:
    """Give an endpoint or a sender one more secret, beside those it has."""
    secret = secret or Secret.of(chance.token_bytes(SECRET_BYTES))
    key_id = chance.token_hex(KEY_ID_BYTES)
    nonce = chance.token_bytes(NONCE_BYTES)
    owner = secret_context(tenant=tenant, owner_kind=kind, owner_name=name, key_id=key_id)
    sealed = SealedSecret(kind, name, key_id, nonce, vault.seal(secret.key, nonce=nonce, associated=owner))
    await store.add_secret(conn, sealed, tenant=tenant)
    return Registered(kind, name, key_id, secret)


def name_problems(name: str) -> list[str]:
    """A name stands in URLs and logs, so it is made of letters that no one has to escape."""
    if NAME.fullmatch(name):
        return []
    form = f"1 to {NAME_BYTES_MAX} letters, digits and . _ ~ -, the first a letter or digit"
    return [f"expected a name of {form}, found {shown(name)}"]
