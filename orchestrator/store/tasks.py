"""Tasks as their workers and operators see them: claim, beat, settle, expire, read.

A claim commits before a worker begins; nothing is waited for with a transaction open; a report counts only under the
token of its claim, and once. What is true of a task is decided by functions of the database, under the locks that they
name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal, LiteralString
from uuid import UUID

from psycopg.rows import class_row

from contracts import arrays
from contracts.codec import PayloadKeyMissing, PayloadUnreadable, place, value_at_rest, value_opened
from contracts.mail import data_at_rest, mail_place
from contracts.sensitive import REDACTED
from orchestrator.core.redaction import Redaction
from orchestrator.store.database import Connection

Json = Any
Verdict = Literal["taken", "repeated", "late"]


def task_place(tenant: int, task: UUID | str, what: str) -> str:
    """Where a try's `payload` or `progress` stands, for who seals and opens it."""
    return place("task", tenant, task, what)


def answer_place(tenant: int, task: UUID | str) -> str:
    """Where a try's answer stands: under the name of the mail that it becomes, in which the database copies it."""
    return mail_place(tenant, "waypost", "waypost:task", f"{task}/ended")


@dataclass(frozen=True, slots=True)
class Task:
    """A try that a worker has claimed: nobody else has it while its lease lasts.

    `payload` is the command in JSON, or says where it is (`at`); `attempt` counts tries from 1, `left` is what the try
    before (`left_by`) said last; both as they lie there. After `expires_at` nobody waits for it.
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
    left_by: UUID | None

    @property
    def at(self) -> int | None:
        """The position of the fact of which its command is a part, in the payload store. It is opened already."""
        return json.loads(self.payload)[0] if self.payload.startswith("[") else None

    def opened(self) -> Task:
        """The same, opened where it is sealed. Raises PayloadKeyMissing, PayloadUnreadable."""
        left = self.left
        if left is not None and self.left_by is not None:
            left = progress_opened(self.tenant_id, self.left_by, left)
        where = task_place(self.tenant_id, self.task_id, "payload")
        return replace(self, payload=value_opened(self.payload, where), left=left)


def progress_opened(tenant: int, task: UUID | str, said: Json) -> Json:
    """What a try said. Raises PayloadKeyMissing, PayloadUnreadable."""
    return json.loads(value_opened(json.dumps(said), task_place(tenant, task, "progress")))


CLAIM: Final[LiteralString] = """
    select k.tenant_id, k.task_id, k.token, k.execution_id::text, k.path, k.queue, k.type, k.payload::text as payload,
           k.key, k.attempt, k.traceparent, k.available_at, k.began_at, k.expires_at, before.progress as left,
           before.task_id as left_by
      from waypost.claim_tasks(%(queues)s::text[], %(limit)s::int, %(owner)s::text, %(token)s::uuid,
                               %(lease)s::interval, %(now)s::timestamptz) k
      left join lateral
           (select p.progress, p.task_id
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
           k.key, k.attempt, k.traceparent, k.available_at, k.began_at, k.expires_at, null::jsonb as left,
           null::uuid as left_by
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
            "progress": arrays.texts(progress_at_rest(task, progress) for task, progress in running),
            "lease": lease,
            "now": now,
        },
        prepare=False,
    )
    return dict(await cursor.fetchall())


def progress_at_rest(task: Task, progress: str | None) -> str | None:
    """What a try says, in JSON, as its row keeps it."""
    if progress is None:
        return None
    return value_at_rest(progress, task_place(task.tenant_id, task.task_id, "progress"))


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
            "answer": arrays.texts(
                data_at_rest("result", one.answer, answer_place(one.task.tenant_id, one.task.task_id))
                for one in reports
            ),
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
    """A try of a task, without command and answer. `code` is that of its error. `progress` is what it said, as it is:
    people see it after `shown`.
    """

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
        return [readable(row, tenant) for row in await cursor.fetchall()]


SEALED_SHOWN: Final = "[sealed]"
"""Stands for what a try said where its key is not at hand."""


def readable(row: TaskRow, tenant: int) -> TaskRow:
    if row.progress is None:
        return row
    try:
        return replace(row, progress=progress_opened(tenant, row.task_id, row.progress))
    except (PayloadKeyMissing, PayloadUnreadable):
        return replace(row, progress=SEALED_SHOWN)


def shown(row: TaskRow, by: Redaction) -> TaskRow:
    """`row` as people may see it: what a try says has no class, so where anything of its task is sensitive, all is."""
    if row.progress is None:
        return row
    return replace(row, progress=REDACTED if by.marks(row.path) else by.text.data(row.progress))


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
        found = await cursor.fetchone()
        return found and readable(found, tenant)


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
    """The newest tries first, of this queue and in these states. What they said is left out."""
    asked = {"tenant": tenant, "queue": queue, "states": list(states) if states else None, "limit": limit}
    async with conn.cursor(row_factory=class_row(TaskRow)) as cursor:
        await cursor.execute(LISTED, asked)
        return [replace(row, progress=None) for row in await cursor.fetchall()]
