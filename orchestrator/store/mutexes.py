"""Who has which mutex, and who waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, LiteralString

from psycopg.rows import class_row

from orchestrator.store.database import Connection

GRANT: Final[LiteralString] = """
    select granted, again
      from waypost.grant_mutexes(%(limit)s::int, %(now)s::timestamptz)
"""


async def grant(conn: Connection, *, limit: int, now: datetime | None = None) -> tuple[int, bool]:
    """Give up to `limit` mutexes that nobody has to those who wait for them: how many, and whether there may be more.
    A transaction of its own. `now` is for tests; the function `waypost.grant_mutexes` says how.
    """
    row = await (await conn.execute(GRANT, {"limit": limit, "now": now}, prepare=True)).fetchone()
    assert row is not None, "the function says something"
    return row[0], row[1]


@dataclass(frozen=True, slots=True)
class MutexRow:
    """An ask of an execution for the mutex `key` of a `step` or of a whole `flow` (`kind`): granted, or waiting behind
    `ahead` others and the holder. `waiting` counts those who wait for it.
    """

    kind: str
    key: str
    path: str
    execution_id: str
    definition: str
    version: str
    status: str
    asked_at: datetime
    granted_at: datetime | None
    ahead: int
    waiting: int


ROWS: Final[LiteralString] = """
    select m.kind, m.key, m.path, m.execution_id::text, e.definition, e.version, e.status, m.asked_at, m.granted_at,
           case when m.granted_at is null
                then (select count(*)
                        from waypost.mutex o
                       where o.tenant_id = m.tenant_id
                         and o.kind = m.kind
                         and o.key = m.key
                         and o.granted_at is null
                         and o.ticket < m.ticket)
                else 0 end as ahead,
           (select count(*)
              from waypost.mutex o
             where o.tenant_id = m.tenant_id
               and o.kind = m.kind
               and o.key = m.key
               and o.granted_at is null) as waiting
      from waypost.mutex m
      join waypost.execution e
        on e.tenant_id = m.tenant_id
       and e.execution_id = m.execution_id
     where m.tenant_id = %(tenant)s::int
"""

LISTED: Final[LiteralString] = (
    ROWS
    + """
       and m.granted_at is not null
     order by m.granted_at, m.ticket
     limit %(limit)s::int
"""
)


async def held(conn: Connection, *, tenant: int, limit: int) -> list[MutexRow]:
    """Who has one, those for longest first, at most `limit`."""
    async with conn.cursor(row_factory=class_row(MutexRow)) as cursor:
        await cursor.execute(LISTED, {"tenant": tenant, "limit": limit})
        return await cursor.fetchall()


OF_KEY: Final[LiteralString] = (
    ROWS
    + """
       and m.key = %(key)s::text
     order by m.kind, m.granted_at is null, m.ticket
     limit %(limit)s::int
"""
)


async def of_key(conn: Connection, key: str, *, tenant: int, limit: int) -> list[MutexRow]:
    """Who has the mutexes `key`, of flows and of steps, and who waits for them, in the order of their turns."""
    async with conn.cursor(row_factory=class_row(MutexRow)) as cursor:
        await cursor.execute(OF_KEY, {"tenant": tenant, "key": key, "limit": limit})
        return await cursor.fetchall()


AROUND: Final[LiteralString] = (
    ROWS  # noqa: S608  # constants of this file
    + """
       and (m.kind, m.key) in (select o.kind, o.key
                                 from waypost.mutex o
                                where o.tenant_id = %(tenant)s::int
                                  and o.execution_id = %(execution)s::uuid)
       and (m.execution_id = %(execution)s::uuid or m.granted_at is not null)
     order by m.ticket
"""
)


async def around(conn: Connection, execution_id: str, *, tenant: int) -> list[MutexRow]:
    """What an execution has or waits for, and who has what it waits for."""
    async with conn.cursor(row_factory=class_row(MutexRow)) as cursor:
        await cursor.execute(AROUND, {"tenant": tenant, "execution": execution_id})
        return await cursor.fetchall()
