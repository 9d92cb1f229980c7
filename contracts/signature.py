"""Standard Webhooks v1: HMAC-SHA256 over `id.timestamp.body`, several secrets at once so that they can
rotate.

What is signed is bytes as sent; nothing is decoded before it is verified. The sender chooses no algorithm:
versions other than v1 are passed over.

Source: Standard Webhooks 1.0.0, "Signature scheme", "Webhook headers".
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Sequence
from typing import Final

from contracts.errors import BadSecret, BadSignature
from contracts.limits import (
    IDENTITY_BYTES_MAX,
    SECRET_BYTES_MAX,
    SECRET_BYTES_MIN,
    SIGNATURES_MAX,
    TIMESTAMP_TOLERANCE_SECONDS,
)

PREFIX: Final = "whsec_"
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


def sign(secrets: Sequence[Secret], *, message_id: str, timestamp: int, body: bytes) -> str:
    """The value of webhook-signature: one `v1,…` for each secret, in their order.

    Raises ValueError for an id that has a dot or other than visible ASCII characters, or without a secret.
    """
    if not MESSAGE_ID.fullmatch(message_id):
        raise ValueError(
            f"expected a message id of visible ASCII characters without a dot, found {message_id!a}"
        )
    if not secrets:
        raise ValueError("expected at least one secret to sign with, found none")
    signed = signed_bytes(message_id, str(timestamp), body)
    return " ".join("v1," + base64.b64encode(mac(secret, signed)).decode("ascii") for secret in secrets)


def verify(
    secrets: Sequence[Secret],
    *,
    message_id: str,
    timestamp: str,
    signature: str,
    body: bytes,
    now: int,
    tolerance: int = TIMESTAMP_TOLERANCE_SECONDS,
) -> None:
    """Return when one of the first 5 v1 signatures was made with one of `secrets`, no longer than `tolerance`
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
    candidates = candidates_of(signature)
    matched = False
    for secret in secrets:
        expected = mac(secret, signed)
        for candidate in candidates:
            matched |= hmac.compare_digest(expected, candidate)
    if not matched:
        raise BadSignature("mismatch")
    age = now - int(timestamp)
    if age > tolerance:
        raise BadSignature("stale")
    if age < -tolerance:
        raise BadSignature("ahead")


def candidates_of(signature: str) -> list[bytes]:
    """The first 5 signatures of version 1. What is no strict base64 is none."""
    candidates: list[bytes] = []
    parts = signature.split(" ", 8 * SIGNATURES_MAX)
    for part in [part for part in parts if part.startswith("v1,")][:SIGNATURES_MAX]:
        try:
            candidates.append(base64.b64decode(part[3:], validate=True))
        except (binascii.Error, ValueError):
            continue
    return candidates


def signed_bytes(message_id: str, timestamp: str, body: bytes) -> bytes:
    return f"{message_id}.{timestamp}.".encode("ascii") + body


def mac(secret: Secret, signed: bytes) -> bytes:
    return hmac.digest(secret.key, signed, "sha256")
