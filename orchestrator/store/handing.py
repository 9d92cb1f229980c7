"""Events that were emitted, given to the flows of the same installation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, LiteralString

from psycopg.rows import class_row

from orchestrator.store.database import Connection

HANDED_MAX: Final = 200
"""Events that one transaction gives: each locks a key."""

HAND: Final[LiteralString] = """
    select type, key, source, event_id, hops, outcome, looped
      from waypost.hand_events(%(most)s::int)
"""


@dataclass(frozen=True, slots=True)
class Handed:
    """An event that was given away: `outcome` is stored, duplicate or conflict; `looped`: it would have started a flow,
    but too many starts by events (`hops`) have led to it.
    """

    type: str
    key: str
    source: str
    event_id: str
    hops: int
    outcome: str
    looped: bool


async def hand_on(conn: Connection, *, most: int = HANDED_MAX) -> list[Handed]:
    """Give some of the events that were committed before this; none are left when it returns none."""
    async with conn.cursor(row_factory=class_row(Handed)) as cursor:
        await cursor.execute(HAND, {"most": most})
        return await cursor.fetchall()
