"""Secrets at rest: AES-256-GCM, each row's ciphertext bound to the row's own key columns.

A ciphertext that is moved to another row, another owner or another tenant does not open there.

Source: NIST SP 800-38D (96-bit nonce, never used twice with one key).
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from contracts import strict_json
from contracts.errors import BadSecret, VaultError

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12


def secret_context(*, tenant: int, owner_kind: str, owner_name: str, key_id: str) -> bytes:
    """The key columns of a row of `secret` as associated data; unlike columns never give like bytes."""
    return strict_json.encode([tenant, owner_kind, owner_name, key_id], what="secret's owner").encode()


class Vault:
    """Seals and opens with one key, which shows itself nowhere. Nonces are the caller's: 12 random bytes."""

    __slots__ = ("_cipher", "_macs")

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise BadSecret(f"vault key: expected {KEY_BYTES} bytes, found {len(key)}")
        self._cipher = AESGCM(key)
        self._macs = hmac.digest(key, b"waypost:mac", "sha256")

    @classmethod
    def from_text(cls, text: str) -> Vault:
        """Reads base64, padded or not. Raises BadSecret, which does not repeat the text."""
        encoded = text.strip().rstrip("=")
        try:
            key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise BadSecret(
                f"vault key: expected {KEY_BYTES} bytes as base64, found other characters"
            ) from None
        return cls(key)

    def seal(self, plain: bytes, *, nonce: bytes, associated: bytes) -> bytes:
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"expected a nonce of {NONCE_BYTES} bytes, found {len(nonce)}")
        return self._cipher.encrypt(nonce, plain, associated)

    def open(self, sealed: bytes, *, nonce: bytes, associated: bytes) -> bytes:
        """Raises VaultError, naming `associated`, when key, row and ciphertext do not belong together."""
        try:
            return self._cipher.decrypt(nonce, sealed, associated)
        except (InvalidTag, ValueError):
            raise VaultError(associated.decode("utf-8", "backslashreplace")) from None

    def mac(self, said: bytes) -> bytes:
        """Proves that who has the key said it: HMAC-SHA256, with a key that is made of it for nothing else."""
        return hmac.digest(self._macs, said, "sha256")

    def __repr__(self) -> str:
        return "Vault(…)"
