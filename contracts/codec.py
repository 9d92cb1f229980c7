"""Payloads at rest: what nobody has to search by is ciphertext in the database, AES-256-GCM, with keys that rotate.

A document keeps its public members, and those that are private lie in one box:

    {"kind": "call", "name": "charge", "args": {"do": "call", "endpoint": "payments", "name": "payment.charge"},
     "sealed": {"key": "2026-12", "box": "…"}}

Which members are public is a list; whatever it does not name is private. The box is bound to where it stands: one that
is moved to another row, execution or tenant does not open there. It names its key, so that old ones open while new ones
are sealed with the newest.

Source: NIST SP 800-38D (96-bit nonce, never used twice with one key).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from contracts import strict_json
from contracts.errors import WaypostError, shown
from contracts.vault import KEY_BYTES, NONCE_BYTES

Json = Any
Document = dict[str, Json]

SEALED: Final = "sealed"
KEY_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,32}")
KEYS_MAX: Final = 16
"""Keys of which one process knows: the newest, and those that old payloads were sealed with."""
PREFIX: Final = b'{"sealed":{"key":"'
"""How a body begins that is sealed; none that is signed begins so."""

PUBLIC: Final = frozenset(
    {
        *("kind", "name", "due", "effect", "known", "undoes_at", "outcome", "verdict", "of", "attempt"),
        *("next_at", "undone", "stands", "definition", "version", "seed", "key", "traceparent", "deadline"),
        *("epoch", "event", "mail", "code", "by", "early", "orders", "order", "choice", "type", "source"),
        *("id", "sensitive", "again", "parent", "starter", "root", "depth", "execution", "status", "objects"),
    }
)
"""Members by which facts and mail are found, counted and read by the database's own functions."""
INSIDE: Final[Mapping[str, frozenset[str]]] = {
    "args": frozenset(
        {"do", "endpoint", "name", "type", "key", "sensitive", "effect", "queue", "priority"}
        | {"flow", "execution"}
        | {"subject", "who", "choices", "request", "number", "reminds"}
    ),
    "undo": frozenset({"do", "endpoint", "name", "sensitive", "effect"}),
    "error": frozenset({"code", "class", "type", "status"}),
    "unfit": frozenset({"code"}),
}
"""Members that are objects, of which some are public."""
DECISION: Final = frozenset({"choice", "by", "reason"})
"""What a person's decision says: names and words of people, which the view of approvals shows."""


class PayloadKeyMissing(WaypostError):
    """A payload is sealed with a key that this process does not have."""

    code = "payload-key-missing"

    def __init__(self, key: str) -> None:
        super().__init__(f"payload key {shown(key)}: expected it in WAYPOST_PAYLOAD_KEYS, found it missing")
        self.key = key


class PayloadUnreadable(WaypostError):
    """A payload does not open where it stands: it was changed, or moved, or another key has this name."""

    code = "payload-unreadable"

    def __init__(self, key: str, where: str) -> None:
        super().__init__(f"a payload of {shown(where)}, sealed with key {shown(key)}, does not open there")
        self.key = key


class Codec:
    """Seals with the newest of `keys` (the first) and opens with all; shows none. `chance` gives random bytes."""

    __slots__ = ("_chance", "_ciphers", "newest")

    def __init__(self, keys: Sequence[tuple[str, bytes]], chance: Callable[[int], bytes]) -> None:
        self.newest = keys[0][0]
        self._ciphers = {name: AESGCM(key) for name, key in keys}
        self._chance = chance

    def __repr__(self) -> str:
        return f"Codec({self.newest})"

    def seal(self, plain: bytes, where: str) -> dict[str, str]:
        nonce = self._chance(NONCE_BYTES)
        box = self._ciphers[self.newest].encrypt(nonce, plain, bound(self.newest, where))
        return {"key": self.newest, "box": base64.b64encode(nonce + box).decode("ascii")}

    def open(self, sealed: Mapping[str, Json], where: str) -> bytes:
        """Raises PayloadKeyMissing, which names the key; PayloadUnreadable."""
        key, box = str(sealed.get("key")), sealed.get("box")
        cipher = self._ciphers.get(key)
        if cipher is None:
            raise PayloadKeyMissing(key)
        try:
            raw = base64.b64decode(box if isinstance(box, str) else "", validate=True)
            return cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], bound(key, where))
        except (InvalidTag, binascii.Error, ValueError):
            raise PayloadUnreadable(key, where) from None


NO_KEYS: Final = Codec([("", bytes(KEY_BYTES))], bytes)
"""Opens nothing, and says which key is missing."""


class Sealing:
    """The codec of this process: set once, where settings become parts. None: payloads are in the clear."""

    codec: Codec | None = None

    @classmethod
    def opener(cls) -> Codec:
        return cls.codec or NO_KEYS


def bound(key: str, where: str) -> bytes:
    return f"{key}\n{where}".encode()


def place(*names: object) -> str:
    """Where a payload stands, as text; unlike names never give like texts."""
    return strict_json.encode([str(name) for name in names], what="place")


def keys_of(text: str) -> list[tuple[str, bytes]]:
    """`ID:BASE64,ID:BASE64`, the newest first. Raises ValueError, which does not repeat what it found."""
    found: dict[str, bytes] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, _, encoded = part.partition(":")
        try:
            key = base64.b64decode(encoded.rstrip("=") + "=" * (-len(encoded.rstrip("=")) % 4), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if not KEY_ID.fullmatch(name) or len(key) != KEY_BYTES or name in found:
            raise ValueError(
                "expected ID:KEY,ID:KEY of different ids, each key 32 bytes as base64, found something else"
            )
        found[name] = key
    if not 0 < len(found) <= KEYS_MAX:
        raise ValueError(f"expected 1 to {KEYS_MAX} keys, found {len(found)}")
    return list(found.items())


# ---- documents -------------------------------------------------------------------------------------------------


def seal_document(codec: Codec, text: str, where: str, *, decides: bool = False) -> str:
    """The document in `text`, with its private members in a box; `decides`: its value is a person's decision."""
    said = cast("Document", json.loads(text))
    public: Document = {}
    private: list[tuple[list[str], Json]] = []
    for name, item in said.items():
        if name in PUBLIC or (decides and (name in DECISION or name == "value")):
            public[name] = item
        elif name in INSIDE and isinstance(item, dict):
            inner = cast("Document", item)
            public[name] = {at: one for at, one in inner.items() if at in INSIDE[name]}
            private += [([name, at], one) for at, one in inner.items() if at not in INSIDE[name]]
        else:
            private.append(([name], item))
    if private:
        public[SEALED] = codec.seal(strict_json.encode(private, what="payload").encode(), where)
    return strict_json.encode(public, what="payload")


def open_document(said: Document, where: str) -> Document:
    """`said` whole. Raises PayloadKeyMissing, PayloadUnreadable."""
    if not is_sealed(said.get(SEALED)):
        return said
    found: Document = {name: copied(item) if name in INSIDE else item for name, item in said.items()}
    box = cast("Document", found.pop(SEALED))
    private: list[tuple[list[str], Json]] = json.loads(Sealing.opener().open(box, where))
    for names, item in private:
        into = found
        for name in names[:-1]:
            into = cast("Document", into[name])
        into[names[-1]] = item
    return found


def copied(value: Json) -> Json:
    return dict(cast("Document", value)) if isinstance(value, dict) else value


def seal_value(codec: Codec, text: str, where: str) -> str:
    """Any JSON in `text` as a box alone."""
    return strict_json.encode({SEALED: codec.seal(text.encode(), where)}, what="payload")


def is_box(value: Json) -> bool:
    """Whether `value` is a box alone."""
    if not isinstance(value, dict):
        return False
    found = cast("Document", value)
    return len(found) == 1 and is_sealed(found.get(SEALED))


def is_sealed(found: Json) -> bool:
    return isinstance(found, dict) and set(cast("Document", found)) == {"key", "box"}


def open_value(value: Document, where: str) -> str:
    """The JSON text in a box alone. Raises PayloadKeyMissing, PayloadUnreadable."""
    return Sealing.opener().open(value[SEALED], where).decode()


def value_at_rest(text: str, where: str) -> str:
    """The JSON in `text` as the database keeps it: a box alone, where payloads are sealed."""
    return text if Sealing.codec is None else seal_value(Sealing.codec, text, where)


def value_opened(text: str, where: str) -> str:
    """The JSON that `value_at_rest` kept as `text`. Raises PayloadKeyMissing, PayloadUnreadable."""
    said: Json = json.loads(text)
    return open_value(cast("Document", said), where) if is_box(said) else text


# ---- bodies ----------------------------------------------------------------------------------------------------


def seal_body(codec: Codec, body: bytes, where: str, public: Mapping[str, Json]) -> bytes:
    """`body` as a box, with what the database reads of it beside it: the type first, as `is_of_type` looks for it."""
    return strict_json.encode({SEALED: codec.seal(body, where), **public}, what="body").encode()


def open_body(body: bytes, where: str) -> bytes:
    """The very bytes that were sealed; `body` as it is, when it is not. Raises PayloadKeyMissing, PayloadUnreadable."""
    if not body.startswith(PREFIX):
        return body
    return Sealing.opener().open(json.loads(body)[SEALED], where)
