"""Removing objects of the payload store that no row names."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

from contracts.objects import ObjectStore
from orchestrator.store import objects
from orchestrator.store.database import Connection

PAGE_MAX: Final = 200
"""Objects that are looked at together."""
AGE_MIN: Final = timedelta(days=1)
"""An object that is younger may belong to a commit that is under way: it stays, whoever asks."""


async def sweep(
    conn: Connection,
    store: ObjectStore,
    *,
    age: timedelta,
    dry: bool = False,
    progress: Callable[[int, int], None],
) -> int:
    """Delete what was last put before `age` and no row names, a page at a time; how many that are. `dry`: only count.

    `progress` is told how many were looked at, and how many of them nobody names. It may be interrupted, and begun
    again. Raises StoreAway, StoreDenied.
    """
    assert age >= AGE_MIN, "whoever asks was told"
    than = await objects.before(conn, age)
    looked = gone = 0
    after = ""
    while page := await store.older(than, after=after, limit=PAGE_MAX):
        named = await objects.named(conn, page)
        unnamed = [digest for digest in page if digest not in named]
        for digest in unnamed if not dry else ():
            await store.delete(digest, than=than)
        after = page[-1]
        looked, gone = looked + len(page), gone + len(unnamed)
        progress(looked, gone)
    return gone
