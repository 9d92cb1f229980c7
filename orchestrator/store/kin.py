"""Who is whose child."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, LiteralString

from psycopg.rows import class_row

from orchestrator.store.database import Connection


@dataclass(frozen=True, slots=True)
class ChildRow:
    """An execution that another one waits for, or waited for, at `path`; `state` as people see it."""

    execution_id: str
    definition: str
    version: str
    business_key: str | None
    path: str
    state: str


CHILDREN: Final[LiteralString] = """
    select c.execution_id::text, c.definition, c.version, c.business_key, c.parent_path as path,
           case when c.status <> 'open' then c.status
                when c.owner is not null then 'running'
                when c.wake_at <= now() then 'ready'
                else 'waiting' end as state
      from waypost.execution c
     where c.tenant_id = %(tenant)s::int
       and c.parent = %(execution)s::uuid
     order by c.finished_at is not null, c.created_at desc, c.parent_path
     limit %(limit)s::int
"""


async def children(conn: Connection, execution_id: str, *, tenant: int, limit: int) -> list[ChildRow]:
    """The children of an execution, those that have not ended first, then the newest."""
    async with conn.cursor(row_factory=class_row(ChildRow)) as cursor:
        await cursor.execute(CHILDREN, {"tenant": tenant, "execution": execution_id, "limit": limit})
        return await cursor.fetchall()


DESCENDANTS: Final[LiteralString] = """
    with recursive family as (
        select e.tenant_id, e.execution_id, 0 as depth, e.created_at
          from waypost.execution e
         where e.tenant_id = %(tenant)s::int
           and e.execution_id = %(execution)s::uuid
         union all
        select c.tenant_id, c.execution_id, f.depth + 1, c.created_at
          from family f
          join waypost.execution c
            on c.tenant_id = f.tenant_id
           and c.parent = f.execution_id
    )
    select execution_id::text
      from family
     where depth > 0
     order by depth, created_at, execution_id
     limit %(limit)s::int
"""


async def descendants(conn: Connection, execution_id: str, *, tenant: int, limit: int) -> list[str]:
    """The children of an execution, then theirs, and so on: at most `limit` of them."""
    asked = {"tenant": tenant, "execution": execution_id, "limit": limit}
    return [found for (found,) in await (await conn.execute(DESCENDANTS, asked, prepare=False)).fetchall()]
