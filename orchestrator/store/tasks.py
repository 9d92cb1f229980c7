"""Tasks as their workers and operators see them: claim, beat, settle, expire, read.

A claim commits before a worker begins; nothing is waited for with a transaction open; a report counts only under the
token of its claim, and once. What is true of a task is decided by functions of the database, under the locks that they
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, LiteralString
from uuid import UUID

from psycopg.rows import class_row

from orchestrator.store import arrays
from orchestrator.store.database import Connection

Json = Any
Verdict = Literal["taken", "repeated", "late"]


@dataclass(frozen=True, slots=True)
class Task:
    """A try that a worker has claimed: nobody else has it while its lease lasts.

    `payload` is the command in JSON, `attempt` counts tries from 1, `left` is what the try before said last. After
    `expires_at` nobody waits for it.
    """

    tenant_id: int
    task_id: UUID
    token: UUID
    execution_id: str
    path: str
    queue: str
    type: str
    payload: str
    key: str
    attempt: int
    traceparent: str | None
    available_at: datetime
    began_at: datetime
    expires_at: datetime
    left: Json


CLAIM: Final[LiteralString] = """
    select k.tenant_id, k.task_id, k.token, k.execution_id::text, k.path, k.queue, k.type, k.payload::text as payload,
           k.key, k.attempt, k.traceparent, k.available_at, k.began_at, k.expires_at, before.progress as left
      from waypost.claim_tasks(%(queues)s::text[], %(limit)s::int, %(owner)s::text, %(token)s::uuid,
                               %(lease)s::interval, %(now)s::timestamptz) k
      left join lateral
           (select p.progress
              from waypost.task p
             where k.attempt > 1
               and p.tenant_id = k.tenant_id
               and p.execution_id = k.execution_id
               and p.epoch = k.epoch
               and p.path = k.path
               and p.attempt = k.attempt - 1
             limit 1) before on true
"""


async def claim(
    conn: Connection,
    *,
    queues: Sequence[str],
    limit: int,
    owner: str,
    token: UUID,
    lease: timedelta,
    now: datetime | None = None,
) -> list[Task]:
    """Take up to `limit` tasks of `queues`, in equal shares for each queue and tenant that has some.

    Within its line the one with the highest priority comes first, then the longest due. Nothing may begin before the
    transaction has committed. `now` is for tests.
    """
    asked = {
        "queues": list(queues),
        "limit": limit,
        "owner": owner,
        "token": token,
        "lease": lease,
        "now": now,
    }
    async with conn.cursor(row_factory=class_row(Task)) as cursor:
        await cursor.execute(CLAIM, asked, prepare=False)
        return await cursor.fetchall()


# Few tasks run at a time, so no index for the token.
CLAIMED_UNDER: Final[LiteralString] = """
    select k.tenant_id, k.task_id, k.token, k.execution_id::text, k.path, k.queue, k.type, k.payload::text as payload,
           k.key, k.attempt, k.traceparent, k.available_at, k.began_at, k.expires_at, null::jsonb as left
      from waypost.task k
     where k.state in ('running', 'stopping')
       and k.token = %(token)s::uuid
"""


async def claimed_under(conn: Connection, *, token: UUID) -> list[Task]:
    """What a claim took whose commit was lost with the answer unknown."""
    async with conn.cursor(row_factory=class_row(Task)) as cursor:
        await cursor.execute(CLAIMED_UNDER, {"token": token}, prepare=False)
        return await cursor.fetchall()


BEAT: Final[LiteralString] = """
    select task_id, state
      from waypost.beat_tasks(%(tenant)s::int[], %(task)s::uuid[], %(token)s::uuid[], %(progress)s::jsonb[],
                              %(lease)s::interval, %(now)s::timestamptz)
"""


async def beat(
    conn: Connection,
    running: Sequence[tuple[Task, str | None]],
    *,
    lease: timedelta,
    now: datetime | None = None,
) -> dict[UUID, str]:
    """Say that tasks run, each with its progress in JSON where there is news: their leases last from now on.

    Returns the state of each that still has its claim: `stopping`, when nobody waits for it any more. What is missing
    is lost. `now` is for tests.
    """
    cursor = await conn.execute(
        BEAT,
        {
            "tenant": arrays.plain(task.tenant_id for task, _ in running),
            "task": arrays.plain(task.task_id for task, _ in running),
            "token": arrays.plain(task.token for task, _ in running),
            "progress": arrays.texts(progress for _, progress in running),
            "lease": lease,
            "now": now,
        },
        prepare=False,
    )
    return dict(await cursor.fetchall())


@dataclass(frozen=True, slots=True)
class Report:
    """What a try of `task` came to: the `state` that it ends in, and the outcome as mail has it, in JSON."""

    task: Task
    state: Literal["done", "refused", "failed", "lost"]
    answer: str


SETTLE: Final[LiteralString] = """
    select task_id, verdict, state
      from waypost.settle_tasks(%(tenant)s::int[], %(task)s::uuid[], %(token)s::uuid[], %(state)s::text[],
                                %(answer)s::jsonb[], %(now)s::timestamptz)
"""


async def settle(
    conn: Connection, reports: Sequence[Report], *, now: datetime | None = None
) -> dict[UUID, tuple[Verdict, str]]:
    """Write what tries came to, and tell their executions: for each its verdict, and the state that it is in.

    `repeated`: it was reported before, and the first report counts. `late`: its lease was over, and an old attempt
    cannot overwrite a new one. `now` is for tests.
    """
    cursor = await conn.execute(
        SETTLE,
        {
            "tenant": arrays.plain(one.task.tenant_id for one in reports),
            "task": arrays.plain(one.task.task_id for one in reports),
            "token": arrays.plain(one.task.token for one in reports),
            "state": arrays.plain(one.state for one in reports),
            "answer": arrays.texts(one.answer for one in reports),
            "now": now,
        },
        prepare=False,
    )
    return {task: (verdict, state) for task, verdict, state in await cursor.fetchall()}


EXPIRE: Final[LiteralString] = """
    select waypost.expire_tasks(%(limit)s::int, %(now)s::timestamptz)
"""


async def expire(conn: Connection, *, limit: int, now: datetime | None = None) -> int:
    """End up to `limit` tries whose lease is over, and as many that waited until their time was over; how many were
    lost with their worker. `now` is for tests.
    """
    row = await (await conn.execute(EXPIRE, {"limit": limit, "now": now}, prepare=False)).fetchone()
    return row[0] if row else 0


# ---- what people ask -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A try of a task as people see it, without what may be Sensitive. `code` is that of its error."""

    task_id: str
    execution_id: str
    path: str
    queue: str
    type: str
    key: str
    attempt: int
    priority: int
    traceparent: str | None
    state: str
    owner: str | None
    lease_until: datetime | None
    available_at: datetime
    expires_at: datetime
    began_at: datetime | None
    ended_at: datetime | None
    progress: Json
    code: str | None


COLUMNS: Final[LiteralString] = """
    select k.task_id::text, k.execution_id::text, k.path, k.queue, k.type, k.key, k.attempt, k.priority,
           k.traceparent, k.state, k.owner, k.lease_until, k.available_at, k.expires_at, k.began_at, k.ended_at,
           k.progress, k.answer #>> '{error,code}' as code
      from waypost.task k
"""

OF_EXECUTION: Final[LiteralString] = (
    COLUMNS
    + """
     where k.tenant_id = %(tenant)s::int
       and k.execution_id = %(execution)s::uuid
     order by k.number
"""
)


async def of_execution(conn: Connection, execution_id: str, *, tenant: int) -> list[TaskRow]:
    """The tries of an execution's tasks, in the order in which they were asked for."""
    async with conn.cursor(row_factory=class_row(TaskRow)) as cursor:
        await cursor.execute(OF_EXECUTION, {"tenant": tenant, "execution": execution_id})
        return await cursor.fetchall()


ONE: Final[LiteralString] = (
    COLUMNS
    + """
     where k.tenant_id = %(tenant)s::int
       and k.task_id = %(task)s::uuid
"""
)


async def one(conn: Connection, task_id: UUID, *, tenant: int) -> TaskRow | None:
    """None when there is no such try."""
    async with conn.cursor(row_factory=class_row(TaskRow)) as cursor:
        await cursor.execute(ONE, {"tenant": tenant, "task": task_id})
        return await cursor.fetchone()


LISTED: Final[LiteralString] = (
    COLUMNS
    + """
     where k.tenant_id = %(tenant)s::int
       and (%(queue)s::text is null or k.queue = %(queue)s::text)
       and (%(states)s::text[] is null or k.state = any(%(states)s::text[]))
     order by k.number desc
     limit %(limit)s::int
"""
)


async def listed(
    conn: Connection, *, tenant: int, queue: str | None, states: Sequence[str] | None, limit: int
) -> list[TaskRow]:
    """The newest tries first, of this queue and in these states."""
    asked = {"tenant": tenant, "queue": queue, "states": list(states) if states else None, "limit": limit}
    async with conn.cursor(row_factory=class_row(TaskRow)) as cursor:
        await cursor.execute(LISTED, asked)
        return await cursor.fetchall()
