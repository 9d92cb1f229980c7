"""Objects that were used lately, in memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from contracts.codec import Sealing, open_body, place, seal_body
from contracts.objects import ObjectDamaged, ObjectStore, Reference, digest_of

KEPT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of objects in memory, as they are in the store."""

PROBE: Final = b"waypost"
"""An object that says that a worker could write."""


class Kept:
    """A store that is asked once for what is wanted often. What is sealed there is sealed in memory too."""

    def __init__(self, store: ObjectStore, *, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self.store = store
        self.weight = 0
        self._bytes_max = bytes_max
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    async def check(self) -> None:
        """Put an object and get it again, so that a store that cannot be used is known at once.

        Raises StoreAway, StoreDenied, ObjectGone.
        """
        digest = digest_of(PROBE)
        await self.store.put(digest, PROBE)
        await self.store.get(digest, size=len(PROBE))

    async def put(self, tenant: int, plain: bytes) -> Reference:
        """Keep `plain`, sealed where payloads are. Raises StoreAway, StoreDenied."""
        data, key = await asyncio.to_thread(at_rest, tenant, plain)
        digest = await asyncio.to_thread(digest_of, data)
        await self.store.put(digest, data)
        self._keep(digest, data)
        return Reference(digest, len(data), key=key)

    async def get(self, tenant: int, one: Reference) -> bytes:
        """What `one` refers to, compared with it when it comes from the store.

        Raises ObjectGone, StoreAway, PayloadKeyMissing, PayloadUnreadable.
        """
        data = self._kept.get(one.sha256)
        if data is None:
            data = await self.store.get(one.sha256, size=one.size)
            self._keep(one.sha256, data)
        else:
            self._kept.move_to_end(one.sha256)
        if len(data) != one.size:
            raise ObjectDamaged(one.sha256, self.store.name, f"{len(data)} bytes instead of {one.size}")
        return data if one.key is None else await asyncio.to_thread(open_body, data, where(tenant))

    def _keep(self, digest: str, data: bytes) -> None:
        old = self._kept.pop(digest, b"")
        self._kept[digest] = data
        self.weight += len(data) - len(old)
        while self.weight > self._bytes_max:
            _, gone = self._kept.popitem(last=False)
            self.weight -= len(gone)


def where(tenant: int) -> str:
    """What the box of an object is bound to; the reference to it is bound to its row."""
    return place("object", tenant)


def at_rest(tenant: int, plain: bytes) -> tuple[bytes, str | None]:
    """`plain` as the store keeps it, and the key that seals it."""
    codec = Sealing.codec
    return (plain, None) if codec is None else (seal_body(codec, plain, where(tenant), {}), codec.newest)
