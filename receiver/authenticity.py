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
from itertools import zip_longest
from typing import Final, NamedTuple, Protocol

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
INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))
"""What RFC 2104 makes of the key's bytes."""

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
    """Verifies requests of one sender. What its form says is looked up once, here, and not for each request."""

    __slots__ = (
        *("_head", "_is_known", "_keys", "_label", "_macs", "_places", "_public", "_signatures"),
        *("_signs_id", "_signs_time", "_tail", "_tolerance", "verify"),
    )

    def __init__(self, form: Proving, secrets: Sequence[Key]) -> None:
        self._public = [secret for secret in secrets if isinstance(secret, PublicKey)]
        keys = [secret.key for secret in secrets if not isinstance(secret, PublicKey)]
        self._is_known = bool(keys)
        self._keys = keys or [DECOY.key]
        self._macs = [mac_of(key, form.digest) for key in self._keys]
        self._places = list(zip_longest(form.header, form.id, form.timestamp, fillvalue=""))
        self._signs_id, self._signs_time = form.signs_id, form.signs_time
        head, _, tail = form.template.partition("{body}")
        self._head, self._tail = fillable(head), fillable(tail)
        self._signatures = reader_of(form, public=bool(self._public))
        self._label, self._tolerance = form.label, form.tolerance
        self.verify: Verifying = self._verify_token if form.kind == "token" else self._verify_signature

    def proof(self, headers: Mapping[str, str]) -> Proof:
        """The proof in headers, whose names have no case. Raises BadSignature when some of it is not there."""
        for name, of_id, of_timestamp in self._places:
            if signature := headers.get(name):
                message_id = headers.get(of_id, "") if of_id else ""
                timestamp = headers.get(of_timestamp, "") if of_timestamp else ""
                if (self._signs_id and not message_id) or (
                    of_timestamp and self._signs_time and not timestamp
                ):
                    break
                return Proof(message_id, timestamp, signature)
        raise BadSignature("missing")

    def _verify_signature(
        self, proof: Proof, body: bytes, *, now: int, tolerance: int = TIMESTAMP_TOLERANCE_SECONDS
    ) -> None:
        timestamp, candidates, public = self._signatures(proof)
        if self._signs_id and not MESSAGE_ID.fullmatch(proof.message_id):
            raise BadSignature("malformed")
        if self._signs_time and not TIMESTAMP.fullmatch(timestamp):
            raise BadSignature("malformed")
        signed = self._head.format(proof.message_id, timestamp).encode("ascii") + body
        if self._tail:
            signed += self._tail.format(proof.message_id, timestamp).encode("ascii")
        if not self._has_signed(signed, candidates, public):
            raise BadSignature("mismatch")
        if self._signs_time:
            age, tolerance = now - int(timestamp), self._tolerance or tolerance
            if age > tolerance:
                raise BadSignature("stale")
            if age < -tolerance:
                raise BadSignature("ahead")

    def _has_signed(self, signed: bytes, candidates: Sequence[bytes], public: Sequence[bytes]) -> bool:
        """Whether one of the secrets made one of the signatures. All are compared with all."""
        matched = False
        for mac in self._macs:
            expected = mac(signed)
            for candidate in candidates:
                matched |= hmac.compare_digest(expected, candidate)
        matched &= self._is_known
        for key in self._public:
            matched |= any(key.accepts(candidate, signed) for candidate in public)
        return matched

    def _verify_token(
        self, proof: Proof, body: bytes, *, now: int, tolerance: int = TIMESTAMP_TOLERANCE_SECONDS
    ) -> None:
        """Hashes are compared, so that not even a length is told."""
        del body, now, tolerance
        header = proof.signature
        given = header.removeprefix(self._label) if header.startswith(self._label) else ""
        found = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        matched = False
        for key in self._keys:
            matched |= hmac.compare_digest(hashlib.sha256(key).digest(), found)
        if not (matched and self._is_known and given):
            raise BadSignature("mismatch")


def mac_of(key: bytes, digest: str) -> Callable[[bytes], bytes]:
    """The HMAC (RFC 2104) of texts with `key`. What depends on the key alone is hashed once, here."""
    inner, outer = hashlib.new(digest), hashlib.new(digest)
    block = (hashlib.new(digest, key).digest() if len(key) > inner.block_size else key).ljust(
        inner.block_size, b"\0"
    )
    inner.update(block.translate(INNER))
    outer.update(block.translate(OUTER))

    def mac(text: bytes) -> bytes:
        within, around = inner.copy(), outer.copy()
        within.update(text)
        around.update(within.digest())
        return around.digest()

    return mac


class Verifying(Protocol):
    """Returns when `body`, as it was sent, was signed with one of the secrets, at most `tolerance` ago.

    `now` and `tolerance` are in seconds, the latter for those whose settings name none.

    Raises BadSignature: `malformed` (an id or a timestamp that cannot be signed unambiguously), `mismatch`; and only of
    what is signed, `stale` or `ahead`.
    """

    def __call__(self, proof: Proof, body: bytes, *, now: int, tolerance: int = ...) -> None: ...


def fillable(part: str) -> str:
    """Part of a template as `str.format` takes it: 0 is the id, 1 the timestamp."""
    names = {"{id}": "{0}", "{timestamp}": "{1}"}
    return "".join(
        names.get(piece) or piece.replace("{", "{{").replace("}", "}}") for piece in PLACEHOLDER.split(part)
    )


Candidates = tuple[str, list[bytes], list[bytes]]
"""The timestamp, and the signatures: made with a shared secret, made with a private key."""


def reader_of(form: Proving, *, public: bool) -> Callable[[Proof], Candidates]:
    """What finds the signatures in a header of that layout; with `public`, those of private keys too."""
    decode = DECODERS[form.encoding]

    def bare(proof: Proof) -> Candidates:
        text = proof.signature
        found = decoded(decode, [text.removeprefix(form.label)] if text.startswith(form.label) else [])
        return proof.timestamp, found, []

    def listed(proof: Proof) -> Candidates:
        parts = proof.signature.split(" ", 8 * SIGNATURES_MAX)
        return proof.timestamp, labelled(parts, shared), labelled(parts, private) if public else []

    shared, private, public = f"{form.label},", f"{form.public},", public and bool(form.public)

    def labelled(parts: Sequence[str], head: str) -> list[bytes]:
        if len(parts) == 1:  # almost always
            return decoded(decode, [parts[0][len(head) :]]) if parts[0].startswith(head) else []
        return decoded(decode, [part[len(head) :] for part in parts if part.startswith(head)])

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
    return binascii.a2b_base64(text, strict_mode=True)


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
