"""What people ask about the processes at work: each try to send a message, and each worker."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, LiteralString

from psycopg.rows import class_row

from orchestrator.store.database import Connection

SHOWN_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class TryRow:
    """One try to send a message. `outcome`, `status` and `error_code` are the relay's words."""

    message_id: str
    path: str
    attempt: int
    started_at: datetime
    duration: timedelta
    outcome: str
    status: int | None
    error_code: str | None


TRIES: Final[LiteralString] = """
    select d.message_id::text, o.path, d.attempt, d.started_at, d.duration, d.outcome, d.status, d.error_code
      from waypost.outbox o
      join waypost.delivery d
        on d.tenant_id = o.tenant_id
       and d.message_id = o.message_id
     where o.tenant_id = %(tenant)s::int
       and o.execution_id = %(execution)s::uuid
     order by o.number, d.attempt
     limit %(limit)s::int
"""


async def tries(conn: Connection, execution_id: str, *, tenant: int) -> list[TryRow]:
    """The tries to send what an execution sends, by message and attempt."""
    async with conn.cursor(row_factory=class_row(TryRow)) as cursor:
        await cursor.execute(TRIES, {"tenant": tenant, "execution": execution_id, "limit": SHOWN_MAX})
        return await cursor.fetchall()


@dataclass(frozen=True, slots=True)
class WorkerRow:
    worker_id: str
    host: str
    started_at: datetime
    lease_until: datetime
    dead_at: datetime | None


SERVED: Final[LiteralString] = """
    select exists
           (select 1
              from waypost.worker w
             where w.dead_at is null
               and w.lease_until > clock_timestamp()
               and %(definition)s::text = any(w.definitions))
"""


async def served(conn: Connection, definition: str, version: str) -> bool:
    """Whether a worker lives that runs this flow in this version."""
    row = await (await conn.execute(SERVED, {"definition": f"{definition}@{version}"})).fetchone()
    return row is not None and bool(row[0])


WORKERS: Final[LiteralString] = """
    select worker_id::text, host, started_at, lease_until, dead_at
      from waypost.worker
     order by started_at, worker_id
     limit %(limit)s::int
"""


async def workers(conn: Connection) -> list[WorkerRow]:
    """The workers that live, and those that died not long ago, in the order of their start."""
    async with conn.cursor(row_factory=class_row(WorkerRow)) as cursor:
        await cursor.execute(WORKERS, {"limit": SHOWN_MAX})
        return await cursor.fetchall()
