"""Large payloads: kept in an object store under the SHA-256 of their bytes, and named by a reference in the database.

A document (a fact, mail) whose part is too large for its row keeps the rest, and says where the part is:

    {"outcome": "done", "objects": {"value": {"sha256": "9f86…", "size": 1048576, "type": "application/json"}}}

Only parts that PARTS lists can be elsewhere, so nothing that somebody writes into a payload is taken for a reference.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Final, Protocol, cast

from contracts.errors import Unavailable, WaypostError, shown

Json = Any
Document = dict[str, Json]

OBJECTS: Final = "objects"
"""The member of a document that says which of its parts are elsewhere."""
PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "input": ("input",),
    "output": ("output",),
    "value": ("value",),
    "args.data": ("args", "data"),
    "undo.data": ("undo", "data"),
}
JSON_TYPE: Final = "application/json"
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
OBJECT_BYTES_MAX: Final = 22 * 1024 * 1024
"""Of an object as it is stored: the largest payload as base64 in a box."""


class ObjectGone(WaypostError):
    """An object that a row names cannot be had, and asking again would not help."""

    code: ClassVar[str] = "payload-unavailable"


class ObjectMissing(ObjectGone):
    """The store does not have it."""

    def __init__(self, digest: str, store: str) -> None:
        super().__init__(f"object {shown_digest(digest)}: expected it in {store}, found it missing")


class ObjectDamaged(ObjectGone):
    """What the store has under its name is something else."""

    def __init__(self, digest: str, store: str, found: str) -> None:
        super().__init__(f"object {shown_digest(digest)} in {store}: expected its bytes, found {found}")


class StoreDenied(ObjectGone):
    """The store does not let us."""

    def __init__(self, store: str, why: str) -> None:
        super().__init__(f"payload store {store}: expected to be let in, found {why}")


class StoreAway(Unavailable):
    """The store does not answer, or cannot now; it may later."""

    code: ClassVar[str] = "payload-store-away"

    def __init__(self, store: str, why: str) -> None:
        super().__init__(f"payload store {store} ({why})")


class ObjectStore(Protocol):
    """Bytes under their SHA-256, in hex. All of it raises StoreAway and StoreDenied."""

    @property
    def name(self) -> str:
        """What people call it; without a credential."""
        ...

    async def put(self, digest: str, data: bytes) -> None:
        """Keep `data`, unless they are there; then they count as new from now on. Durable when this returns."""
        ...

    async def get(self, digest: str, *, size: int) -> bytes:
        """The `size` bytes of `digest`, compared with both. Raises ObjectMissing, ObjectDamaged."""
        ...

    async def delete(self, digest: str, *, than: datetime) -> None:
        """Forget them, if they are there and were last put before `than`."""
        ...

    async def older(self, than: datetime, *, after: str, limit: int) -> list[str]:
        """Up to `limit` digests behind `after` (empty: from the first), in their order, last put before `than`."""
        ...


@dataclass(frozen=True, slots=True)
class Reference:
    """Which object a part is: digest and size are of the bytes in the store, `key` names what they are sealed with.

    It has no date on which it ends: an object is kept as long as a row names it.
    """

    sha256: str
    size: int
    type: str = JSON_TYPE
    key: str | None = None

    def as_json(self) -> dict[str, Json]:
        key = {} if self.key is None else {"key": self.key}
        return {"sha256": self.sha256, "size": self.size, "type": self.type, **key}


def reference(found: Json) -> Reference:
    """Raises ValueError for what is no reference: any client of the database may have written it."""
    if isinstance(found, dict):
        said = cast("Document", found)
        digest, size, kind, key = (said.get(name) for name in ("sha256", "size", "type", "key"))
        if (
            isinstance(digest, str)
            and DIGEST.fullmatch(digest)
            and type(size) is int
            and 0 < size <= OBJECT_BYTES_MAX
            and kind == JSON_TYPE
            and (key is None or isinstance(key, str))
        ):
            return Reference(digest, size, kind, key)
    raise ValueError(f"expected a reference to an object, found {shown(cast('object', found))}")


def references(said: Mapping[str, Json]) -> Iterator[tuple[tuple[str, ...], Reference]]:
    """Where each part of a document that is elsewhere would stand, and which object it is. Raises ValueError."""
    found = said.get(OBJECTS)
    if not isinstance(found, dict):
        raise ValueError(f"{OBJECTS}: expected an object, found {shown(cast('object', found))}")  # noqa: TRY004  # as any other
    for part, one in cast("Document", found).items():
        if part not in PARTS:
            raise ValueError(f"{OBJECTS}: expected one of {', '.join(PARTS)}, found {shown(part)}")
        yield PARTS[part], reference(one)


def part_of(said: Mapping[str, Json], at: tuple[str, ...]) -> Json:
    """What stands in a document there; None when nothing does."""
    found: Json = said
    for name in at:
        found = cast("Document", found).get(name) if isinstance(found, dict) else None
    return found


def with_part(said: Document, at: tuple[str, ...], value: Json) -> Document:
    """A copy of `said` that has `value` there."""
    if len(at) == 1:
        return {**said, at[0]: value}
    inner = said.get(at[0])
    return {
        **said,
        at[0]: with_part(cast("Document", inner) if isinstance(inner, dict) else {}, at[1:], value),
    }


def without_part(said: Document, at: tuple[str, ...]) -> Document:
    """A copy of `said` that has nothing there."""
    if len(at) == 1:
        return {name: item for name, item in said.items() if name != at[0]}
    return {**said, at[0]: without_part(said[at[0]], at[1:])}


def referred(said: Document) -> Document:
    """`said` for people: the reference stands where the part would. Raises ValueError."""
    for at, one in list(references(said)):
        said = with_part(said, at, {"object": one.as_json()})
    return said


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check(digest: str, size: int, data: bytes, store: str) -> bytes:
    """`data`, which are those of `digest`. Raises ObjectDamaged."""
    if len(data) != size:
        more = "more" if len(data) > size else f"{len(data)}"
        raise ObjectDamaged(digest, store, f"{more} bytes instead of {size}")
    if digest_of(data) != digest:
        raise ObjectDamaged(digest, store, "others")
    return data


def shown_digest(digest: str) -> str:
    return f"{digest[:12]}…"
