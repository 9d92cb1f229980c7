"""Leases of worker processes: one row each, whatever the number of their executions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, LiteralString

import psycopg

from contracts import arrays
from orchestrator.store.database import Connection

REGISTER: Final[LiteralString] = """
    insert into waypost.worker (worker_id, lease_until, host, definitions)
    values (%(me)s::uuid, clock_timestamp() + %(lease)s::interval, %(host)s, %(definitions)s::text[])
"""


async def register(
    conn: Connection, *, me: str, lease: timedelta, host: str, definitions: Sequence[str]
) -> None:
    """A new worker, alive for `lease`. A process that lost its lease registers again under a new identity."""
    parameters = {"me": me, "lease": lease, "host": host, "definitions": arrays.texts(definitions)}
    await conn.execute(REGISTER, parameters)


RENEW: Final[LiteralString] = """
    update waypost.worker
       set lease_until = clock_timestamp() + %(lease)s::interval
     where worker_id = %(me)s::uuid
       and dead_at is null
       and lease_until > clock_timestamp()
 returning lease_until
"""


def renew(conn: psycopg.Connection[tuple[Any, ...]], *, me: str, lease: timedelta) -> bool:
    """Stay alive for another `lease`; False when that is too late. Runs in the lease's own thread."""
    return conn.execute(RENEW, {"me": me, "lease": lease}).fetchone() is not None


RETIRE: Final[LiteralString] = """
    update waypost.worker
       set dead_at = clock_timestamp(),
           lease_until = least(lease_until, clock_timestamp())
     where worker_id = %(me)s::uuid
       and dead_at is null
"""


async def retire(conn: Connection, *, me: str) -> None:
    """Leave: whatever we still own may be taken over at once."""
    await conn.execute(RETIRE, {"me": me})


BURY: Final[LiteralString] = """
      with d as materialized (
             select worker_id
               from waypost.worker
              where dead_at is null
                and lease_until < now()
              order by worker_id
                for no key update skip locked)
    update waypost.worker w
       set dead_at = now()
      from d
     where w.worker_id = d.worker_id
       and w.dead_at is null
 returning w.worker_id::text
"""


async def bury(conn: Connection) -> list[str]:
    """Declare dead whose lease is over. From then on its renewals are refused, so it cannot come back."""
    return [row[0] for row in await (await conn.execute(BURY)).fetchall()]


TAKE_OVER: Final[LiteralString] = """
      with v as materialized (
             select e.tenant_id, e.execution_id, e.owner,
                    (select coalesce(min(l.back) - 1, 8)
                       from (select j.kind, row_number() over (order by j.position desc) as back
                               from waypost.journal j
                              where j.tenant_id = e.tenant_id and j.execution_id = e.execution_id
                              order by j.position desc
                              limit 8) l
                      where l.kind <> 'orphaned') as deaths
               from waypost.execution e
               join waypost.worker w on w.worker_id = e.owner and w.dead_at is not null
              order by e.tenant_id, e.execution_id
              limit %(n)s
                for no key update of e skip locked),
           u as (
             update waypost.execution e
                set owner = null,
                    fence = e.fence + 1,
                    position = e.position + 1,
                    wake_at = coalesce(%(now)s::timestamptz, now())
                              + case when v.deaths = 0 then interval '0'
                                     else least(60, 2 ^ v.deaths) * random() * interval '1 s' end
               from v
              where e.tenant_id = v.tenant_id
                and e.execution_id = v.execution_id
          returning e.tenant_id, e.execution_id, e.position, e.fence, v.owner),
           j as (
             insert into waypost.journal (tenant_id, execution_id, position, fence, kind, payload, actor, at)
             select tenant_id, execution_id, position, fence, 'orphaned', jsonb_build_object('by', owner), 'worker',
                    coalesce(%(now)s::timestamptz, now())
               from u),
           m as (
             insert into waypost.span_due (part, tenant_id, execution_id, position, facts)
             select 'worker', tenant_id, execution_id, position - 1, 1
               from u
              where %(traced)s::boolean)
    select execution_id::text
      from u
"""


async def take_over(
    conn: Connection, *, limit: int, traced: bool = False, now: datetime | None = None
) -> list[str]:
    """Free up to `limit` executions of buried workers: owner null, fence + 1, and a fact that says so. With `traced`,
    that is to be exported.

    What was taken over before, with nothing written since, waits a while that grows and varies: should one of
    them be what kills its workers, the others get through before it does so again.

    The join to buried workers is positive on purpose: "its owner has no row" would be an anti-join, which does
    not see a row that is inserted meanwhile.
    """
    cursor = await conn.execute(TAKE_OVER, {"n": limit, "traced": traced, "now": now}, prepare=False)
    return [row[0] for row in await cursor.fetchall()]


FORGET: Final[LiteralString] = """
    delete from waypost.worker w
     where w.dead_at < now() - interval '1 day'
       and not exists (select 1 from waypost.execution e where e.owner = w.worker_id)
"""


async def forget(conn: Connection) -> None:
    """Drop what was buried a day ago and owns nothing any more."""
    await conn.execute(FORGET)
