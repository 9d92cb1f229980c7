"""Ending an execution without its program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, LiteralString

from orchestrator.store.database import Connection


@dataclass(frozen=True, slots=True)
class Terminated:
    """`outcome` is `terminated`, `over` when the execution had ended before, and None when there is none."""

    outcome: str | None
    stands: list[str]


TERMINATE: Final[LiteralString] = """
    with done as materialized (
        select outcome, position, stands
          from waypost.terminate(%(tenant)s::int, %(execution)s::uuid, %(by)s::text, %(reason)s::text)
    ),
    mark as (
        insert into waypost.span_due (part, tenant_id, execution_id, position, facts, began_at)
        select 'worker', %(tenant)s::int, %(execution)s::uuid, done.position - 1, 1, now()
          from done
         where %(traced)s::boolean
           and done.outcome = 'terminated'
    )
    select outcome, stands
      from done
"""

# A statement of its own, so that it sees what was asked for until the row was locked. Rows of mutexes come last.
LET_GO: Final[LiteralString] = """
    delete from waypost.mutex
     where tenant_id = %(tenant)s::int
       and execution_id = %(execution)s::uuid
"""


async def terminate(
    conn: Connection, execution_id: str, *, tenant: int, by: str, reason: str, traced: bool
) -> Terminated:
    """End an execution at once, whatever its state; the function `waypost.terminate` says how. With `traced`, its end
    is marked as to be exported. A transaction of its own.
    """
    asked = {"tenant": tenant, "execution": execution_id, "by": by, "reason": reason, "traced": traced}
    async with conn.transaction():
        row = await (await conn.execute(TERMINATE, asked)).fetchone()
        assert row is not None, "the function says something"
        done = Terminated(*row)
        if done.outcome == "terminated":
            await conn.execute(LET_GO, {"tenant": tenant, "execution": execution_id})
    return done
