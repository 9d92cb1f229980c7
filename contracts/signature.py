"""Standard Webhooks: signatures over `id.timestamp.body`, with several keys at once so that they can rotate.

    v1     HMAC-SHA256; both sides have the same `Secret`
    v1a    ed25519; one side has the `SigningKey`, the other its `PublicKey`, which can sign nothing

What is signed is bytes as sent; nothing is decoded before it is verified. The sender chooses no algorithm: a key
accepts only signatures of its own version, and other versions are passed over.

Source: Standard Webhooks 1.0.0, "Signature scheme", "Webhook headers"; RFC 8032 (ed25519).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Sequence
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from contracts.errors import BadSecret, BadSignature
from contracts.limits import (
    IDENTITY_BYTES_MAX,
    SECRET_BYTES_MAX,
    SECRET_BYTES_MIN,
    SIGNATURES_MAX,
    TIMESTAMP_TOLERANCE_SECONDS,
)

PREFIX: Final = "whsec_"
SIGNING_PREFIX: Final = "whsk_"
PUBLIC_PREFIX: Final = "whpk_"
ED25519_LENGTH: Final = 32  # of a seed, and of a public key
MESSAGE_ID: Final = re.compile(rf"[!-\-/-~]{{1,{IDENTITY_BYTES_MAX}}}")
"""Visible ASCII without the dot: `a.1` at 5 and `a` at `1.5` would be signed alike."""
TIMESTAMP: Final = re.compile(r"[0-9]{1,12}")
"""ASCII digits and nothing else; Python's int() also takes blanks, signs, underscores and other alphabets."""


class Secret:
    """A signing key that shows itself nowhere but in `key` and `text`."""

    __slots__ = ("key",)

    def __init__(self, key: bytes) -> None:
        self.key = key

    @classmethod
    def of(cls, key: bytes, *, bytes_min: int = SECRET_BYTES_MIN) -> Secret:
        """Raises BadSecret unless `key` has `bytes_min` to 64 bytes."""
        if not max(bytes_min, 1) <= len(key) <= SECRET_BYTES_MAX:
            raise BadSecret(f"secret: expected {bytes_min} to {SECRET_BYTES_MAX} bytes, found {len(key)}")
        return cls(key)

    @classmethod
    def parse(cls, text: str, *, bytes_min: int = SECRET_BYTES_MIN) -> Secret:
        """Reads `whsec_…` or bare base64, padded or not. Raises BadSecret, which does not repeat the text.

        `bytes_min` may be lowered for a secret that somebody else issued; the specification asks for 24.
        """
        encoded = text.strip().removeprefix(PREFIX).rstrip("=")
        try:
            key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise BadSecret(f"secret: expected {PREFIX} and base64, found other characters") from None
        return cls.of(key, bytes_min=bytes_min)

    @property
    def text(self) -> str:
        return PREFIX + base64.b64encode(self.key).decode("ascii")

    def __repr__(self) -> str:
        return "Secret(…)"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self.key, other.key)

    def __hash__(self) -> int:
        return hash(self.key)


class PublicKey:
    """The half of an ed25519 key that everybody may know: it verifies, and signs nothing."""

    __slots__ = ("_key", "raw")

    def __init__(self, raw: bytes) -> None:
        """Raises BadSecret unless `raw` is a public key of 32 bytes."""
        if len(raw) != ED25519_LENGTH:
            raise BadSecret(f"public key: expected {ED25519_LENGTH} bytes, found {len(raw)}")
        self._key = Ed25519PublicKey.from_public_bytes(raw)
        self.raw = raw

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """Reads `whpk_…`. Raises BadSecret."""
        return cls(decoded(text, PUBLIC_PREFIX, "public key"))

    @property
    def text(self) -> str:
        return PUBLIC_PREFIX + base64.b64encode(self.raw).decode("ascii")

    def accepts(self, signature: bytes, signed: bytes) -> bool:
        try:
            self._key.verify(signature, signed)
        except InvalidSignature:
            return False
        return True

    def __repr__(self) -> str:
        return f"PublicKey({self.text})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)


class SigningKey:
    """An ed25519 key that shows itself nowhere but in `seed` and `text`. Who verifies needs `public` alone."""

    __slots__ = ("_key", "public", "seed")

    def __init__(self, seed: bytes) -> None:
        """Raises BadSecret unless `seed` has 32 bytes."""
        if len(seed) != ED25519_LENGTH:
            raise BadSecret(f"signing key: expected a seed of {ED25519_LENGTH} bytes, found {len(seed)}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed = seed
        self.public = PublicKey(self._key.public_key().public_bytes_raw())

    @classmethod
    def parse(cls, text: str) -> SigningKey:
        """Reads `whsk_…`: a seed, or a seed and its public key. Raises BadSecret, which does not repeat the text."""
        raw = decoded(text, SIGNING_PREFIX, "signing key")
        key = cls(raw[:ED25519_LENGTH])
        if raw[ED25519_LENGTH:] not in (b"", key.public.raw):
            raise BadSecret(
                "signing key: expected a seed and the public key that belongs to it, found another"
            )
        return key

    @property
    def text(self) -> str:
        return SIGNING_PREFIX + base64.b64encode(self.seed + self.public.raw).decode("ascii")

    def sign(self, signed: bytes) -> bytes:
        return self._key.sign(signed)

    def __repr__(self) -> str:
        return "SigningKey(…)"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SigningKey) and hmac.compare_digest(self.seed, other.seed)

    def __hash__(self) -> int:
        return hash(self.seed)


Signer = Secret | SigningKey
Verifier = Secret | PublicKey


def signer(text: str) -> Signer:
    """The key that `text` is: `whsk_…` an ed25519 key, all else a secret. Raises BadSecret."""
    return SigningKey.parse(text) if text.strip().startswith(SIGNING_PREFIX) else Secret.parse(text)


def decoded(text: str, prefix: str, what: str) -> bytes:
    """The bytes behind `prefix`, which must be there. Raises BadSecret, which does not repeat the text."""
    marked, _, encoded = text.strip().rpartition(prefix)
    encoded = encoded.rstrip("=")
    problem = f"{what}: expected {prefix} and base64, found other characters"
    if marked or not text.strip().startswith(prefix):
        raise BadSecret(problem)
    try:
        return base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadSecret(problem) from None


def sign(keys: Sequence[Signer], *, message_id: str, timestamp: int, body: bytes) -> str:
    """The value of webhook-signature: one `v1,…` for each secret and one `v1a,…` for each signing key, in their order.

    Raises ValueError for an id that has a dot or other than visible ASCII characters, or without a secret.
    """
    if not MESSAGE_ID.fullmatch(message_id):
        raise ValueError(
            f"expected a message id of visible ASCII characters without a dot, found {message_id!a}"
        )
    if not keys:
        raise ValueError("expected at least one secret to sign with, found none")
    signed = signed_bytes(message_id, str(timestamp), body)
    return " ".join(signature_by(key, signed) for key in keys)


def signature_by(key: Signer, signed: bytes) -> str:
    version, made = ("v1", mac(key, signed)) if isinstance(key, Secret) else ("v1a", key.sign(signed))
    return f"{version},{base64.b64encode(made).decode('ascii')}"


def verify(
    keys: Sequence[Verifier],
    *,
    message_id: str,
    timestamp: str,
    signature: str,
    body: bytes,
    now: int,
    tolerance: int = TIMESTAMP_TOLERANCE_SECONDS,
) -> None:
    """Return when one of the first 5 signatures of a version was made with one of `keys`, no longer than `tolerance`
    ago.

    `now` and `tolerance` are in seconds. Raises BadSignature: `missing` (an empty value), `malformed` (an id
    or a timestamp that cannot be signed unambiguously), `mismatch`; and only of what is signed, `stale` or
    `ahead`. Takes the same time for any signature of equal length.
    """
    if not (message_id and timestamp and signature):
        raise BadSignature("missing")
    if not (MESSAGE_ID.fullmatch(message_id) and TIMESTAMP.fullmatch(timestamp)):
        raise BadSignature("malformed")
    signed = signed_bytes(message_id, timestamp, body)
    matched = False
    for key in keys:
        matched |= accepts(key, signature, signed)
    if not matched:
        raise BadSignature("mismatch")
    age = now - int(timestamp)
    if age > tolerance:
        raise BadSignature("stale")
    if age < -tolerance:
        raise BadSignature("ahead")


def accepts(key: Verifier, signature: str, signed: bytes) -> bool:
    """Whether one of the candidates for `key` is its signature; all of them are looked at."""
    matched = False
    if isinstance(key, Secret):
        expected = mac(key, signed)
        for candidate in candidates_of(signature):
            matched |= hmac.compare_digest(expected, candidate)
    else:
        for candidate in candidates_of(signature, "v1a,"):
            matched |= key.accepts(candidate, signed)
    return matched


def candidates_of(signature: str, version: str = "v1,") -> list[bytes]:
    """The first 5 signatures of a version. What is no strict base64 is none."""
    candidates: list[bytes] = []
    parts = signature.split(" ", 8 * SIGNATURES_MAX)
    for part in [part for part in parts if part.startswith(version)][:SIGNATURES_MAX]:
        try:
            candidates.append(base64.b64decode(part.removeprefix(version), validate=True))
        except (binascii.Error, ValueError):
            continue
    return candidates


def signed_bytes(message_id: str, timestamp: str, body: bytes) -> bytes:
    return f"{message_id}.{timestamp}.".encode("ascii") + body


def mac(secret: Secret, signed: bytes) -> bytes:
    return hmac.digest(secret.key, signed, "sha256")
