"""Versions of flows as people see them, the shares that new executions are given out by, and what is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, LiteralString

from psycopg.rows import class_row

from contracts import arrays
from orchestrator.store.database import Connection


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version of a flow. `percent` is its own share, None when it has none; `starts` what it gets of a hundred new
    executions as things stand; `open` its executions that are not at an end, `held` those of them that need a person;
    `workers` are alive and hold it. `fingerprint` says which code it is, in hexadecimal. A share of a version that no
    worker has made known has no `known_at`.
    """

    name: str
    version: str
    state: str
    percent: int | None
    starts: int
    open: int
    held: int
    workers: int
    event: str | None
    fingerprint: str | None
    known_at: datetime | None


VERSIONS: Final[LiteralString] = """
    with k as (
        select d.tenant_id, d.name, d.version, d.state, d.fingerprint, d.created_at, d.number
          from waypost.definition d
         where d.tenant_id = %(tenant)s::int
         union all
        select s.tenant_id, s.definition, s.version, 'awaited', null, null, null
          from waypost.share s
         where s.tenant_id = %(tenant)s::int
           and not exists (select 1
                             from waypost.definition d
                            where d.tenant_id = s.tenant_id
                              and d.name = s.definition
                              and d.version = s.version)
    ),
    o as materialized (
        -- Three partial indexes, as in OPEN.
        select i.definition, i.version, count(*) as open, count(*) filter (where i.status = 'held') as held
          from (select e.definition, e.version, e.status
                  from waypost.execution e
                 where e.tenant_id = %(tenant)s::int
                   and e.owner is not null
                 union all
                select e.definition, e.version, e.status
                  from waypost.execution e
                 where e.tenant_id = %(tenant)s::int
                   and e.owner is null
                   and e.wake_at is not null
                 union all
                select e.definition, e.version, e.status
                  from waypost.execution e
                 where e.tenant_id = %(tenant)s::int
                   and e.owner is null
                   and e.wake_at is null
                   and e.finished_at is null) i
         group by 1, 2
    ),
    p as materialized (
        select f.name, v.version, count(*) as starts
          from (select distinct k.name from k) f
         cross join generate_series(0, 99) n
         cross join lateral (select waypost.version_drawn(%(tenant)s::int, f.name, null, n) as version) v
         group by 1, 2
    )
    select k.name, k.version, k.state, s.percent::int, coalesce(p.starts, 0)::int as starts,
           coalesce(o.open, 0)::int as open, coalesce(o.held, 0)::int as held,
           (select count(*)
              from waypost.worker w
             where w.dead_at is null
               and w.lease_until > now()
               and k.name || '@' || k.version = any(w.definitions))::int as workers,
           g.type as event, encode(k.fingerprint, 'hex') as fingerprint, k.created_at as known_at
      from k
      left join waypost.share s on s.tenant_id = k.tenant_id and s.definition = k.name and s.version = k.version
      left join waypost.trigger g on g.tenant_id = k.tenant_id and g.definition = k.name and g.version = k.version
      left join o on o.definition = k.name and o.version = k.version
      left join p on p.name = k.name and p.version = k.version
     where %(flow)s::text is null
        or k.name = %(flow)s::text
     order by k.name, k.number
     limit %(limit)s::int
"""


async def versions(conn: Connection, *, tenant: int, flow: str | None = None, limit: int) -> list[VersionRow]:
    """By flow, in the order in which they became known, at most `limit`."""
    async with conn.cursor(row_factory=class_row(VersionRow)) as cursor:
        await cursor.execute(VERSIONS, {"tenant": tenant, "flow": flow, "limit": limit})
        return await cursor.fetchall()


DRAWN: Final[LiteralString] = """
    select waypost.version_drawn(%(tenant)s::int, %(flow)s::text, null, waypost.draw_of(%(word)s::text))
"""


async def drawn(conn: Connection, flow: str, word: str, *, tenant: int) -> str | None:
    """The version that a new execution of a flow begins with, `word` deciding between shares; None when no worker has
    made one known that takes starts.
    """
    row = await (await conn.execute(DRAWN, {"tenant": tenant, "flow": flow, "word": word})).fetchone()
    return None if row is None else row[0]


ALONE: Final[LiteralString] = """
    select waypost.lock_keys(array[%(tenant)s::int], array['waypost:share'], array[%(flow)s::text])
"""

SHARED: Final[LiteralString] = """
    select coalesce(sum(percent), 0)::int
      from waypost.share
     where tenant_id = %(tenant)s::int
       and definition = %(flow)s::text
       and version <> %(version)s::text
"""

SHARE: Final[LiteralString] = """
    insert into waypost.share as s (tenant_id, definition, version, percent)
    values (%(tenant)s::int, %(flow)s::text, %(version)s::text, %(percent)s::smallint)
        on conflict (tenant_id, definition, version) do update
       set percent = excluded.percent, changed_at = now()
"""


async def share(conn: Connection, flow: str, version: str, percent: int, *, tenant: int) -> int:
    """Give a version so much of a hundred new executions; what the others have. When both together are more than a
    hundred, nothing is written.
    """
    said = {"tenant": tenant, "flow": flow, "version": version, "percent": percent}
    async with conn.transaction():
        await conn.execute(ALONE, said)
        row = await (await conn.execute(SHARED, said)).fetchone()
        others: int = 0 if row is None else row[0]
        if others + percent <= 100:
            await conn.execute(SHARE, said)
    return others


UNSHARE: Final[LiteralString] = """
    delete from waypost.share
     where tenant_id = %(tenant)s::int
       and definition = %(flow)s::text
       and version = %(version)s::text
"""


async def unshare(conn: Connection, flow: str, version: str, *, tenant: int) -> bool:
    """Whether it had a share of its own."""
    cursor = await conn.execute(UNSHARE, {"tenant": tenant, "flow": flow, "version": version})
    return cursor.rowcount == 1


@dataclass(frozen=True, slots=True)
class OpenRow:
    """An execution that was not at an end."""

    execution_id: str
    definition: str
    version: str
    business_key: str | None
    status: str


# What is open is owned, or has a time, or neither: each is a partial index, and what is at an end is in none of them.
OPEN: Final[LiteralString] = """
    select o.execution_id::text
      from (select e.execution_id, e.definition
              from waypost.execution e
             where e.tenant_id = %(tenant)s::int
               and e.owner is not null
             union all
            select e.execution_id, e.definition
              from waypost.execution e
             where e.tenant_id = %(tenant)s::int
               and e.owner is null
               and e.wake_at is not null
             union all
            select e.execution_id, e.definition
              from waypost.execution e
             where e.tenant_id = %(tenant)s::int
               and e.owner is null
               and e.wake_at is null
               and e.finished_at is null) o
     where o.definition = any(%(flows)s::text[])
     order by o.execution_id
"""


async def open_executions(conn: Connection, flows: Sequence[str], *, tenant: int) -> list[str]:
    """The executions of these flows that are not at an end, the oldest first."""
    cursor = await conn.execute(OPEN, {"tenant": tenant, "flows": list(flows)})
    return [execution for (execution,) in await cursor.fetchall()]


ROWS: Final[LiteralString] = """
    select e.execution_id::text, e.definition, e.version, e.business_key, e.status
      from unnest(%(executions)s::uuid[]) with ordinality as t(execution_id, ord)
      join waypost.execution e
        on e.tenant_id = %(tenant)s::int
       and e.execution_id = t.execution_id
     order by t.ord
"""


async def rows(conn: Connection, of: Sequence[str], *, tenant: int) -> list[OpenRow]:
    """These executions, in this order."""
    async with conn.cursor(row_factory=class_row(OpenRow)) as cursor:
        await cursor.execute(ROWS, {"tenant": tenant, "executions": arrays.plain(of)})
        return await cursor.fetchall()
