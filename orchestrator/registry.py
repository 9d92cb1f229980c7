"""Making endpoints and senders known, each with a secret that is shown once and kept only sealed.

Nothing can show a secret again: the caller gets it here, and nowhere else. A name is registered together with
its secret or not at all.
"""

from __future__ import annotations

import dataclasses
import re
import secrets as chance
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal

import psycopg

from contracts import strict_json
from contracts.addresses import Network
from contracts.errors import (
    Conflict,
    ContractViolation,
    LimitExceeded,
    NotFound,
    VaultError,
    WaypostError,
    shown,
)
from contracts.limits import NAME_BYTES_MAX, SECRETS_MAX
from contracts.signature import PublicKey, Secret, Signer, SigningKey
from contracts.vault import NONCE_BYTES, Vault, secret_context
from orchestrator.store import registry as store
from orchestrator.store.registry import NewEndpoint, NewSender, OwnerKind, SealedSecret
from receiver.authenticity import Key, parse_secret, written
from receiver.schemes import ISSUED, Policy, policy_of
from relay.addresses import check_url

Connection = psycopg.AsyncConnection[Any]

TENANT: Final = 1
SECRET_BYTES: Final = 32  # of a new one; Standard Webhooks allows 24 to 64
KEY_ID_BYTES: Final = 6
TIMEOUT: Final = timedelta(seconds=15)
GRACE: Final = timedelta(days=1)
GRACE_MAX: Final = timedelta(days=7)
TIMEOUT_MIN: Final = timedelta(milliseconds=1)
TIMEOUT_MAX: Final = timedelta(minutes=5)
REFERENCE: Final = re.compile(r"[a-z][a-z0-9]{0,31}:[\x21-\x7e]{1,900}")
NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._~-]{{0,{NAME_BYTES_MAX - 1}}}")
OURS: Final = "waypost"
STANDARD: Final = "standard-webhooks"


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


class UnknownEndpoint(NotFound):
    """No endpoint has that name."""

    code = "unknown-endpoint"

    def __init__(self, name: str) -> None:
        super().__init__(f"no endpoint is named {shown(name)}; `waypost endpoint list` shows them")
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
    """What was registered. Its secret is nowhere else from here on."""

    kind: OwnerKind
    name: str
    key_id: str
    secret: Key
    text: str = field(repr=False)
    """The secret as people write it down."""

    @property
    def shared(self) -> Secret:
        """The secret, which both sides have. Raises TypeError for a public key."""
        if isinstance(self.secret, PublicKey):
            raise TypeError("expected a secret, found a public key")
        return self.secret


@dataclass(frozen=True, slots=True)
class Rotated:
    """The new secret of an endpoint, which is nowhere else from here on; None when it is kept elsewhere."""

    name: str
    key_id: str
    secret: Signer | None


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
    scheme: str = STANDARD,
    settings: Mapping[str, Any] | None = None,
    secret: Key | None = None,
    binary_mode: bool = False,
    replace: bool = False,
    tenant: int = TENANT,
) -> Registered:
    """Register who may post to us, how it proves itself, and what it signs with (a new secret by default).

    `settings` are laid over the preset that `scheme` names. With `binary_mode` it may send events whose attributes are
    in headers, which the signature does not cover. With `replace` a name that is taken keeps nothing but what is said
    here. Raises NotRegistered, SettingsInvalid, NameTaken, WrongKey.
    """
    policy = policy_of(scheme, settings or {})
    problems = name_problems(name)
    if name == OURS:
        problems.append(f"expected another name than {OURS}, which is ourselves")
    if secret is None and scheme in ISSUED:
        problems.append(
            f"secret: expected the one that {scheme} shows where the webhook is set up, found none"
        )
    if problems:
        raise NotRegistered(f"sender {shown(name)}", problems)
    if not replace:
        await check_key(conn, vault)
    new = NewSender(name, binary_mode, scheme, strict_json.encode(dict(settings or {}), what="settings"))
    async with conn.transaction():
        if not await store.add_sender(conn, new, tenant=tenant):
            if not replace:
                raise NameTaken("sender", name)
            await store.replace_sender(conn, new, tenant=tenant)
            await store.forget_secrets(conn, "sender", name, tenant=tenant)
        return await add_sender_secret(conn, vault, policy, name=name, secret=secret, tenant=tenant)


async def set_sender(
    conn: Connection,
    name: str,
    *,
    binary_mode: bool | None = None,
    settings: Mapping[str, Any] | None = None,
    state: str | None = None,
    tenant: int = TENANT,
) -> None:
    """Change what is not None; receivers know within seconds. Raises UnknownSender, SettingsInvalid."""
    async with conn.transaction():
        said = await store.lock_sender(conn, name, tenant=tenant)
        if said is None:
            raise UnknownSender(name)
        if settings is not None:
            policy_of(said.scheme, settings)
        await store.set_sender(
            conn,
            name,
            binary_mode=said.binary_mode if binary_mode is None else binary_mode,
            settings=strict_json.encode(
                dict(said.settings if settings is None else settings), what="settings"
            ),
            state=state or said.state,
            tenant=tenant,
        )


async def rotate_endpoint(
    conn: Connection,
    vault: Vault,
    name: str,
    *,
    secret: Signer | None = None,
    reference: str | None = None,
    grace: timedelta = GRACE,
    tenant: int = TENANT,
) -> Rotated:
    """Give an endpoint one more secret, and let those that it has end after `grace`; all of them sign until then.

    `secret` is the new one (a new one by default), or `reference` names one that is kept elsewhere, which is not
    looked at here. Those that end already keep their end. Raises UnknownEndpoint, NotRegistered, WrongKey,
    LimitExceeded.
    """
    problems: list[str] = []
    if not timedelta() <= grace <= GRACE_MAX:
        problems.append("grace: expected 0s to 168h")
    if reference is not None and not REFERENCE.fullmatch(reference):
        problems.append("reference: expected a kind, a colon and a name, such as env:NAME or file:/PATH")
    if problems:
        raise NotRegistered(f"endpoint {shown(name)}", problems)
    await check_key(conn, vault)
    async with conn.transaction():
        if not await store.lock_endpoint(conn, name, tenant=tenant):
            raise UnknownEndpoint(name)
        await store.expire_secrets(conn, "endpoint", name, grace=grace, tenant=tenant)
        live = await store.count_secrets(conn, "endpoint", name, tenant=tenant)
        if live >= SECRETS_MAX:
            raise LimitExceeded(f"live secrets of endpoint {shown(name)}", live + 1, SECRETS_MAX)
        key_id = chance.token_hex(KEY_ID_BYTES)
        if reference is not None:
            await store.add_reference(conn, name, key_id, reference, tenant=tenant)
            return Rotated(name, key_id, None)
        new = secret or Secret.of(chance.token_bytes(SECRET_BYTES))
        nonce = chance.token_bytes(NONCE_BYTES)
        owner = secret_context(tenant=tenant, owner_kind="endpoint", owner_name=name, key_id=key_id)
        plain, algorithm = (new.seed, "ed25519") if isinstance(new, SigningKey) else (new.key, "hmac")
        sealed = vault.seal(plain, nonce=nonce, associated=owner)
        await store.add_secret(
            conn, SealedSecret("endpoint", name, key_id, nonce, sealed, algorithm), tenant=tenant
        )
        return Rotated(name, key_id, new)


def signing_key() -> SigningKey:
    """A new ed25519 key."""
    return SigningKey(chance.token_bytes(SECRET_BYTES))


async def rotate_sender(
    conn: Connection,
    vault: Vault,
    name: str,
    *,
    text: str | None = None,
    grace: timedelta = GRACE,
    tenant: int = TENANT,
) -> Registered:
    """Give a sender one more secret, and let those that it has end after `grace`; all of them prove it until then.

    `text` is the new one as somebody wrote it down; a new one by default. Those that end already keep their end.
    Raises UnknownSender, NotRegistered, BadSecret, WrongKey, LimitExceeded.
    """
    if not timedelta() <= grace <= GRACE_MAX:
        raise NotRegistered(f"sender {shown(name)}", ["grace: expected 0s to 168h"])
    await check_key(conn, vault)
    async with conn.transaction():
        said = await store.lock_sender(conn, name, tenant=tenant)
        if said is None:
            raise UnknownSender(name)
        policy = policy_of(said.scheme, said.settings)
        secret = None if text is None else parse_secret(policy.signature, text)
        if secret is None and said.scheme in ISSUED:
            raise NotRegistered(f"sender {shown(name)}", [f"secret: expected one that {said.scheme} issued"])
        await store.expire_secrets(conn, "sender", name, grace=grace, tenant=tenant)
        live = await store.count_secrets(conn, "sender", name, tenant=tenant)
        if live >= SECRETS_MAX:
            raise LimitExceeded(f"live secrets of sender {shown(name)}", live + 1, SECRETS_MAX)
        return await add_sender_secret(conn, vault, policy, name=name, secret=secret, tenant=tenant)


async def add_sender_secret(
    conn: Connection, vault: Vault, policy: Policy, *, name: str, secret: Key | None, tenant: int
) -> Registered:
    """A secret as the sender's scheme has them; `text` is as its people write it down."""
    form = policy.signature
    if secret is None and form.spelling == "text":
        secret = parse_secret(form, chance.token_urlsafe(SECRET_BYTES))
    added = await add_secret(conn, vault, kind="sender", name=name, secret=secret, tenant=tenant)
    return dataclasses.replace(added, text=written(form, added.secret))


async def add_secret(
    conn: Connection,
    vault: Vault,
    *,
    kind: OwnerKind,
    name: str,
    secret: Key | None = None,
    tenant: int = TENANT,
) -> Registered:
    """Give an endpoint or a sender one more secret, beside those it has."""
    secret = secret or Secret.of(chance.token_bytes(SECRET_BYTES))
    key_id = chance.token_hex(KEY_ID_BYTES)
    nonce = chance.token_bytes(NONCE_BYTES)
    owner = secret_context(tenant=tenant, owner_kind=kind, owner_name=name, key_id=key_id)
    sealed = SealedSecret(
        kind,
        name,
        key_id,
        nonce,
        vault.seal(
            secret.raw if isinstance(secret, PublicKey) else secret.key, nonce=nonce, associated=owner
        ),
        "ed25519" if isinstance(secret, PublicKey) else "hmac",
    )
    await store.add_secret(conn, sealed, tenant=tenant)
    return Registered(kind, name, key_id, secret, secret.text)


def name_problems(name: str) -> list[str]:
    """A name stands in URLs and logs, so it is made of letters that no one has to escape."""
    if NAME.fullmatch(name):
        return []
    form = f"1 to {NAME_BYTES_MAX} letters, digits and . _ ~ -, the first a letter or digit"
    return [f"expected a name of {form}, found {shown(name)}"]
