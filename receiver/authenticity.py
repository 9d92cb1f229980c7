"""Whether a request was made by its sender: one verifier, which interprets what `schemes.py` says about a sender.

All live secrets are compared with all signatures of a header, up to a few, and none of it takes longer or shorter
for what is compared. What cannot be read is no signature, and never an error of ours.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from contracts.errors import BadSecret, BadSignature
from contracts.limits import (
    FOREIGN_SECRET_BYTES_MIN,
    SHARED_SECRET_BYTES_MAX,
    SIGNATURES_MAX,
    TIMESTAMP_TOLERANCE_SECONDS,
)
from contracts.signature import MESSAGE_ID, PUBLIC_PREFIX, TIMESTAMP, PublicKey, Secret
from receiver.schemes import PLACEHOLDER, Proving

HEX: Final = re.compile(r"(?:[0-9a-fA-F]{2})+")
URL_SAFE: Final = str.maketrans("-_", "+/")
DECOY: Final = Secret(b"compared for senders that do not exist, so that they take as long")


Key = Secret | PublicKey


def parse_secret(form: Proving, text: str) -> Key:
    """What somebody wrote down as a secret of such a sender. Raises BadSecret, which does not repeat it."""
    text = text.strip()
    if form.public and text.startswith(PUBLIC_PREFIX):
        return PublicKey.parse(text)
    match form.spelling:
        case "whsec":
            return Secret.parse(text, bytes_min=FOREIGN_SECRET_BYTES_MIN)
        case "base64":
            return bounded(from_base64(text))
        case "hex":
            if not HEX.fullmatch(text):
                raise BadSecret("secret: expected pairs of hexadecimal digits, found other characters")
            return bounded(bytes.fromhex(text))
        case _:
            return bounded(text.encode("utf-8", "surrogateescape"))


def written(form: Proving, secret: Key) -> str:
    """The secret as people write it down."""
    if isinstance(secret, PublicKey) or form.spelling == "whsec":
        return secret.text
    match form.spelling:
        case "base64":
            return base64.b64encode(secret.key).decode("ascii")
        case "hex":
            return secret.key.hex()
        case _:
            return secret.key.decode("utf-8", "backslashreplace")


def bounded(key: bytes) -> Secret:
    if not 1 <= len(key) <= SHARED_SECRET_BYTES_MAX:
        raise BadSecret(f"secret: expected 1 to {SHARED_SECRET_BYTES_MAX} bytes, found {len(key)}")
    return Secret(key)


def from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadSecret("secret: expected base64, found other characters") from None


class Proof(NamedTuple):
    """What a request's headers say about who made it, as it stands there; empty where they say nothing."""

    message_id: str
    timestamp: str
    signature: str


class Verifier:
    """Verifies requests of one sender."""

    __slots__ = ("_candidates", "_form", "_keys", "_public", "_signed")

    def __init__(self, form: Proving, secrets: Sequence[Key]) -> None:
        self._form = form
        self._public = [secret for secret in secrets if isinstance(secret, PublicKey)]
        self._keys = [secret.key for secret in secrets if not isinstance(secret, PublicKey)]
        self._signed = [part for part in PLACEHOLDER.split(form.template) if part]
        self._candidates = reader_of(form)

    def proof(self, headers: Mapping[str, str]) -> Proof:
        """The proof in headers, whose names have no case. Raises BadSignature when some of it is not there."""
        form = self._form
        for index, name in enumerate(form.header):
            signature = headers.get(name)
            if signature:
                message_id = headers.get(form.id[index], "") if form.id else ""
                timestamp = headers.get(form.timestamp[index], "") if form.timestamp else ""
                if (form.signs_id and not message_id) or (
                    form.timestamp and form.signs_time and not timestamp
                ):
                    break
                return Proof(message_id, timestamp, signature)
        raise BadSignature("missing")

    def verify(
        self, proof: Proof, body: bytes, *, now: int, tolerance: int = TIMESTAMP_TOLERANCE_SECONDS
    ) -> None:
        """Return when `body`, as it was sent, was signed with one of the secrets, at most `tolerance` ago.

        `now` and `tolerance` are in seconds, the latter for those whose settings name none.

        Raises BadSignature: `malformed` (an id or a timestamp that cannot be signed unambiguously), `mismatch`; and
        only of what is signed, `stale` or `ahead`.
        """
        form = self._form
        if form.kind == "token":
            self._verify_token(proof.signature)
            return
        timestamp, candidates, public = self._candidates(proof)
        if form.signs_id and not MESSAGE_ID.fullmatch(proof.message_id):
            raise BadSignature("malformed")
        if form.signs_time and not TIMESTAMP.fullmatch(timestamp):
            raise BadSignature("malformed")
        signed = self._bytes(proof.message_id, timestamp, body)
        if not self._has_signed(signed, candidates, public):
            raise BadSignature("mismatch")
        if form.signs_time:
            age, tolerance = now - int(timestamp), form.tolerance or tolerance
            if age > tolerance:
                raise BadSignature("stale")
            if age < -tolerance:
                raise BadSignature("ahead")

    def _has_signed(self, signed: bytes, candidates: Sequence[bytes], public: Sequence[bytes]) -> bool:
        """Whether one of the secrets made one of the signatures. All are compared with all."""
        matched = False
        for key in self._keys or (DECOY.key,):
            expected = hmac.digest(key, signed, self._form.digest)
            for candidate in candidates:
                matched |= hmac.compare_digest(expected, candidate)
        matched &= bool(self._keys)
        for key in self._public:
            matched |= any(key.accepts(candidate, signed) for candidate in public)
        return matched

    def _verify_token(self, header: str) -> None:
        """Hashes are compared, so that not even a length is told."""
        given = header.removeprefix(self._form.label) if header.startswith(self._form.label) else ""
        found = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        matched = False
        for key in self._keys or (DECOY.key,):
            matched |= hmac.compare_digest(hashlib.sha256(key).digest(), found)
        if not (matched and self._keys and given):
            raise BadSignature("mismatch")

    def _bytes(self, message_id: str, timestamp: str, body: bytes) -> bytes:
        head: list[str] = []
        for index, part in enumerate(self._signed):
            if part == "{body}":
                tail = "".join(self._filled(self._signed[index + 1 :], message_id, timestamp))
                return "".join(head).encode("ascii") + body + tail.encode("ascii")
            head.append(message_id if part == "{id}" else timestamp if part == "{timestamp}" else part)
        raise AssertionError("a template has a body")

    @staticmethod
    def _filled(parts: Sequence[str], message_id: str, timestamp: str) -> list[str]:
        return [{"{id}": message_id, "{timestamp}": timestamp}.get(part, part) for part in parts]


Candidates = tuple[str, list[bytes], list[bytes]]
"""The timestamp, and the signatures: made with a shared secret, made with a private key."""


def reader_of(form: Proving) -> Callable[[Proof], Candidates]:
    """What finds the signatures in a header of that layout."""
    decode = DECODERS[form.encoding]

    def bare(proof: Proof) -> Candidates:
        text = proof.signature
        found = decoded(decode, [text.removeprefix(form.label)] if text.startswith(form.label) else [])
        return proof.timestamp, found, []

    def listed(proof: Proof) -> Candidates:
        parts = proof.signature.split(" ", 8 * SIGNATURES_MAX)
        return proof.timestamp, labelled(parts, form.label), labelled(parts, form.public)

    def labelled(parts: Sequence[str], label: str) -> list[bytes]:
        head = label + ","
        return (
            decoded(decode, [part[len(head) :] for part in parts if part.startswith(head)]) if label else []
        )

    def fields(proof: Proof) -> Candidates:
        pairs = [part.strip(" ").partition("=") for part in proof.signature.split(",", 8 * SIGNATURES_MAX)]
        stamps = [value for name, _, value in pairs if name == form.stamp]
        timestamp = proof.timestamp if not form.stamp else stamps[0] if len(stamps) == 1 else ""
        return timestamp, decoded(decode, [value for name, _, value in pairs if name == form.label]), []

    return {"bare": bare, "list": listed, "fields": fields}[form.layout]


def decoded(decode: Callable[[str], bytes], texts: Sequence[str]) -> list[bytes]:
    """The first 5 signatures; what cannot be decoded is none."""
    found: list[bytes] = []
    for text in texts[:SIGNATURES_MAX]:
        try:
            found.append(decode(text))
        except ValueError:
            continue
    return found


def strict_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def strict_base64url(text: str) -> bytes:
    if "+" in text or "/" in text:
        raise ValueError("expected the alphabet of URLs")
    bare = text.rstrip("=").translate(URL_SAFE)
    return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)


def strict_hex(text: str) -> bytes:
    if not HEX.fullmatch(text):
        raise ValueError("expected pairs of hexadecimal digits")
    return bytes.fromhex(text)


DECODERS: Final[Mapping[str, Callable[[str], bytes]]] = {
    "hex": strict_hex,
    "base64": strict_base64,
    "base64url": strict_base64url,
}
