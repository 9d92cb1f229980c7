"""What a database must hold after a measurement, or the measurement does not count.

Each statement answers one row: executions that completed with exactly three step records, and all executions.
"""

from __future__ import annotations

from typing import Final, LiteralString

import psycopg

from bench.measure import Count

WAYPOST: Final[LiteralString] = """
    with fact as (
        select tenant_id, execution_id,
               count(*) filter (where kind = 'ended'
                                  and payload ->> 'outcome' = 'done')     as steps,
               count(*) filter (where kind = 'finished')                  as finished,
               count(*)                                                   as facts,
               max(position)                                              as last,
               max(fence)                                                 as fence,
               bool_or(kind = 'started' and position = 1)                 as begun
          from waypost.journal
         group by tenant_id, execution_id
    )
    select count(*) filter (
               where e.status = 'completed'
                 and e.finished_at is not null
                 and e.owner is null
                 and f.begun
                 and f.steps = 3
                 and f.finished = 1
                 and f.facts = f.last
                 and e.position = f.last
                 and e.fence = f.fence
                 and e.fence > 0),
           count(*)
      from waypost.execution e
      left join fact f using (tenant_id, execution_id)
"""
"""Projected: the row says what the journal says, under the fence of the journal's last fact."""

DBOS: Final[LiteralString] = """
    with step as (
        select workflow_uuid, count(*) as steps
          from dbos.operation_outputs
         where error is null and output is not null
         group by workflow_uuid
    )
    select count(*) filter (where s.status = 'SUCCESS' and step.steps = 3), count(*)
      from dbos.workflow_status s
      left join step using (workflow_uuid)
"""

ABSURD: Final[LiteralString] = """
    with step as (
        select task_id, count(*) as steps
          from absurd.c_default
         where status = 'committed'
         group by task_id
    )
    select count(*) filter (where t.state = 'completed' and step.steps = 3), count(*)
      from absurd.t_default t
      left join step using (task_id)
"""


class NotDone(Exception):
    """What a system said it did is not what its database holds."""

    def __init__(self, system: str, said: int, done: int, there: int) -> None:
        super().__init__(
            f"{system} said {said} executions completed; its database holds {there},"
            f" of which {done} completed with three step records"
        )


def verify(system: str, statement: LiteralString, dsn: str, count: Count) -> None:
    """Raise NotDone unless every execution that was counted completed, and none besides."""
    with psycopg.connect(dsn) as conn:
        row = conn.execute(statement).fetchone()
    assert row is not None, "an aggregate answers one row"
    done, there = row
    if not count.total == done == there:
        raise NotDone(system, count.total, done, there)
