"""All that the database says about one execution and what is around it, in one snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, LiteralString

from psycopg.rows import class_row

from contracts.limits import CHILDREN_MAX
from orchestrator.store import mutexes, reading
from orchestrator.store import tasks as task_store
from orchestrator.store.database import Connection
from orchestrator.store.kin import ChildRow, children
from orchestrator.store.mutexes import MutexRow
from orchestrator.store.reading import ExecutionRow, FactRow, MessageRow
from orchestrator.store.tasks import TaskRow
from orchestrator.store.tries import WorkerRow


@dataclass(frozen=True, slots=True)
class EndpointRow:
    """An endpoint that messages go to. `has_secret`: one with which they can be signed now. `open_until`: hardly
    anything got through, so one try at a time is made, the next one then.
    """

    name: str
    state: str
    paused_until: datetime | None
    has_secret: bool
    open_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class AheadRow:
    """An event that waits for the one before it, of a type and key that an execution waits for."""

    id: str
    type: str
    key: str
    due_at: datetime


@dataclass(frozen=True, slots=True)
class Around:
    """`now` is the database's; `holders` are living workers that have the flow in this version; `stuck` is what
    the view of that name says, None in normal life.
    """

    now: datetime
    holders: int
    stuck: str | None


@dataclass(frozen=True, slots=True)
class Situation:
    """What people may see: of what is Sensitive, REDACTED. `worker` is the row of the owner; None when nobody owns it,
    or that worker is not known any more. `mutexes` are those that it has or waits for, and who has what it waits for.
    `ahead` are events that it waits for, and that wait for others of their stream.
    """

    row: ExecutionRow
    facts: list[FactRow]
    messages: list[MessageRow]
    endpoints: list[EndpointRow]
    worker: WorkerRow | None
    around: Around
    children: list[ChildRow] = field(default_factory=list[ChildRow])
    mutexes: list[MutexRow] = field(default_factory=list[MutexRow])
    tasks: list[TaskRow] = field(default_factory=list[TaskRow])
    ahead: list[AheadRow] = field(default_factory=list[AheadRow])


SNAPSHOT: Final[LiteralString] = """
    set transaction isolation level repeatable read, read only
"""


async def situation(conn: Connection, execution_id: str, *, tenant: int) -> Situation | None:
    """None when there is no such execution. `conn` is in no transaction."""
    async with conn.transaction():
        await conn.execute(SNAPSHOT)
        row = await reading.execution(conn, execution_id, tenant=tenant)
        if row is None:
            return None
        facts = await reading.facts(conn, execution_id, tenant=tenant)
        by = await reading.redaction(conn, execution_id, facts, tenant=tenant)
        return Situation(
            row=row,
            facts=reading.shown(facts, by),
            messages=await reading.messages(conn, execution_id, tenant=tenant),
            endpoints=await endpoints(conn, execution_id, tenant=tenant),
            worker=await owner(conn, row.owner),
            around=await around(conn, execution_id, tenant=tenant),
            children=await children(conn, execution_id, tenant=tenant, limit=CHILDREN_MAX),
            mutexes=await mutexes.around(conn, execution_id, tenant=tenant),
            tasks=[
                task_store.shown(task, by)
                for task in await task_store.of_execution(conn, execution_id, tenant=tenant)
            ],
            ahead=await ahead(conn, execution_id, tenant=tenant),
        )


AHEAD: Final[LiteralString] = """
    select distinct 'q' || q.quarantine_id as id, q.type, q.key, q.due_at
      from waypost.wait w
     cross join lateral
           (select a.quarantine_id, a.type, a.key, a.due_at
              from waypost.quarantine a
             where a.tenant_id = w.tenant_id
               and a.type = w.type
               and a.key = w.key
               and a.due_at is not null
               and a.reason = 'ahead'
             order by a.sequence
             limit 1) q
     where w.tenant_id = %(tenant)s::int
       and w.execution_id = %(execution)s::uuid
       and w.inbox_id is null
"""


async def ahead(conn: Connection, execution_id: str, *, tenant: int) -> list[AheadRow]:
    """The first event in line of each type and key that it waits for."""
    async with conn.cursor(row_factory=class_row(AheadRow)) as cursor:
        await cursor.execute(AHEAD, {"tenant": tenant, "execution": execution_id})
        return await cursor.fetchall()


ENDPOINTS: Final[LiteralString] = """
    select p.name, p.state, p.paused_until,
           exists (select 1
                     from waypost.secret s
                    where s.tenant_id = p.tenant_id
                      and s.owner_kind = 'endpoint'
                      and s.owner_name = p.name
                      and (s.expires_at is null or s.expires_at > now())) as has_secret,
           p.open_until
      from waypost.endpoint p
     where p.tenant_id = %(tenant)s::int
       and p.name in (select o.endpoint
                        from waypost.outbox o
                       where o.tenant_id = %(tenant)s::int
                         and o.execution_id = %(execution)s::uuid)
"""


async def endpoints(conn: Connection, execution_id: str, *, tenant: int) -> list[EndpointRow]:
    """Those that the messages of an execution go to, as far as they are registered."""
    async with conn.cursor(row_factory=class_row(EndpointRow)) as cursor:
        await cursor.execute(ENDPOINTS, {"tenant": tenant, "execution": execution_id})
        return await cursor.fetchall()


OWNER: Final[LiteralString] = """
    select worker_id::text, host, started_at, lease_until, dead_at
      from waypost.worker
     where worker_id = %(owner)s::uuid
"""


async def owner(conn: Connection, worker: str | None) -> WorkerRow | None:
    async with conn.cursor(row_factory=class_row(WorkerRow)) as cursor:
        await cursor.execute(OWNER, {"owner": worker})
        return await cursor.fetchone()


AROUND: Final[LiteralString] = """
    select now() as now,
           (select count(*)
              from waypost.worker w
             where w.dead_at is null
               and w.lease_until > now()
               and e.definition || '@' || e.version = any(w.definitions)) as holders,
           (select s.because
              from waypost.stuck s
             where s.tenant_id = e.tenant_id
               and s.execution_id = e.execution_id) as stuck
      from waypost.execution e
     where e.tenant_id = %(tenant)s::int
       and e.execution_id = %(execution)s::uuid
"""


async def around(conn: Connection, execution_id: str, *, tenant: int) -> Around:
    async with conn.cursor(row_factory=class_row(Around)) as cursor:
        await cursor.execute(AROUND, {"tenant": tenant, "execution": execution_id})
        found = await cursor.fetchone()
    assert found is not None, "the snapshot has its row"
    return found


STUCK: Final[LiteralString] = """
    select execution_id::text, count(*) over ()
      from waypost.stuck
     order by tenant_id, execution_id
     limit %(limit)s::int
"""


async def stuck(conn: Connection, *, limit: int) -> tuple[int, list[str]]:
    """How many executions have no reason to move, and up to `limit` of them."""
    found = await (await conn.execute(STUCK, {"limit": limit}, prepare=False)).fetchall()
    return (found[0][1] if found else 0), [execution for execution, _ in found]


STUCK_BY: Final[LiteralString] = """
    select definition, because, count(*)
      from waypost.stuck
     group by definition, because
"""


async def stuck_by(conn: Connection) -> dict[tuple[str, str], int]:
    """How many executions of each flow have no reason to move, by what is broken."""
    found = await (await conn.execute(STUCK_BY, prepare=False)).fetchall()
    return {(flow, because): count for flow, because, count in found}
