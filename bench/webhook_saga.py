"""Sagas of three commands that services answer later: relay, three services, receiver and worker at once.

The order of the example shop reserves, charges and ships. Each command leaves through the outbox, is signed and
posted by the relay, verified, remembered and acted on by its service, whose signed reply the receiver stores before
it says 202, and wakes the worker. A client keeps a number of orders under way. What counts are executions that
ended within the window, as the database has them; afterwards all that were started must be there, each completed,
with three commands that were answered once.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, LiteralString

from bench.deployment import Deployment, deployed
from bench.report import Bar, Result
from bench.schedule import Say, Schedule, spread
from bench.server import Server
from examples.shop.flows import order_saga
from orchestrator import bootstrap

NAME: Final = "webhook_saga"
SAGAS_MIN: Final = 150.0
SUSTAINED_SECONDS: Final = 20.0
WARM_UP_SECONDS: Final = 5.0
IN_FLIGHT: Final = 64
LOOK_SECONDS: Final = 0.02
ENDED: Final = b'"event": "execution finished"'
DRAIN_MAX_SECONDS: Final = 60.0

SETTINGS: Final = {"track_commit_timestamp": "on"}
"""What the server keeps for this: the time of each commit, which no row can know."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one window came to. Times are seconds; `costs` is processor time per saga, by part."""

    rate: float
    worst: int
    step_p50: float
    step_p99: float
    costs: Mapping[str, float]


def run(server: Server, schedule: Schedule, say: Say) -> Result:
    """Measure `schedule.rounds` windows, each with a deployment and a database of its own."""
    warm_up, window = schedule.warm_up or WARM_UP_SECONDS, schedule.window or SUSTAINED_SECONDS
    found: list[Seen] = []
    for number in range(1, schedule.rounds + 1):
        seen = bootstrap.run(measure(server, warm_up=warm_up, window=window))
        found.append(seen)
        say(
            f"round {number}/{schedule.rounds}: {seen.rate:,.0f} sagas/s, a step {1000 * seen.step_p50:.0f} ms"
            f" (99 of 100: {1000 * seen.step_p99:.0f} ms); processor {1000 * sum(seen.costs.values()):.1f} ms a saga"
        )
    return judged(found, window)


async def measure(server: Server, *, warm_up: float, window: float) -> Seen:
    async with deployed(server) as deployment:
        starting = asyncio.create_task(keep_in_flight(deployment, IN_FLIGHT))
        await first_of(starting, warm_up)
        began, before = await clock(deployment), deployment.seconds()
        await first_of(starting, window)
        ended, after = await clock(deployment), deployment.seconds()
        starting.cancel()
        await asyncio.wait([starting])
        await drained(deployment)
        await verify(deployment)
        row = await one(deployment, SEEN, began=began, ended=ended)
    sagas, worst, p50, p99 = row
    return Seen(
        rate=sagas / (ended - began).total_seconds(),
        worst=worst,
        step_p50=p50,
        step_p99=p99,
        costs={part: (after[part] - before[part]) / sagas for part in after},
    )


async def first_of(working: asyncio.Task[None], seconds: float) -> None:
    """Let `seconds` pass; raise what `working` raises meanwhile."""
    done, _ = await asyncio.wait([working], timeout=seconds)
    for task in done:
        task.result()


async def keep_in_flight(deployment: Deployment, wanted: int) -> None:
    """Start an order for each that ended, until cancelled. The worker's log says how many have, at no cost."""
    started = ended = 0
    with deployment.parts.all["worker"].log.open("rb") as log:
        while True:
            ended += log.read().count(ENDED)
            new = [(order(number), None) for number in range(started, ended + wanted)]
            if new:
                started += len(await deployment.client.start_many(order_saga, new))
            await asyncio.sleep(LOOK_SECONDS)


def order(number: int) -> dict[str, Any]:
    lines = [{"sku": "lamp", "count": 1}]
    return {"id": f"order-{number}", "customer": "ada", "total": 4200, "lines": lines}


UNDER_WAY: Final[LiteralString] = """
    select (select count(*) from waypost.execution where finished_at is null)
         + (select count(*) from waypost.outbox where state in ('due', 'sending'))
"""


async def drained(deployment: Deployment) -> None:
    """Until nothing is under way. Raises TimeoutError after a minute."""
    async with asyncio.timeout(DRAIN_MAX_SECONDS):
        while True:
            [under_way] = await one(deployment, UNDER_WAY)
            if not under_way:
                return
            await asyncio.sleep(LOOK_SECONDS)


CLOCK: Final[LiteralString] = "select clock_timestamp()"


async def clock(deployment: Deployment) -> datetime:
    return (await one(deployment, CLOCK))[0]


SEEN: Final[LiteralString] = """
    with ended as (
        select execution_id, finished_at
          from waypost.execution
         where finished_at >= %(began)s and finished_at < %(ended)s
    ),
    second as (
        select s.n, count(ended.execution_id) as sagas
          from generate_series(0, floor(extract(epoch from %(ended)s - %(began)s))::int - 1) as s(n)
          left join ended on floor(extract(epoch from ended.finished_at - %(began)s)) = s.n
         group by s.n
    ),
    step as (
        select extract(epoch from pg_xact_commit_timestamp(e.xmin) - pg_xact_commit_timestamp(a.xmin)) as took
          from ended
          join waypost.journal a on a.tenant_id = 1 and a.execution_id = ended.execution_id and a.kind = 'asked'
          join waypost.journal e on e.tenant_id = 1 and e.execution_id = ended.execution_id and e.kind = 'ended'
                                and e.path = a.path
    )
    select (select count(*) from ended),
           (select min(sagas) from second),
           percentile_cont(0.5) within group (order by took)::float8,
           percentile_cont(0.99) within group (order by took)::float8
      from step
"""
"""What ended within the window; a step lasts from the commit of `asked` to that of `ended`."""

PROOF: Final[LiteralString] = """
    with fact as (
        select execution_id, count(*) filter (where kind = 'ended' and payload ->> 'outcome' = 'done') as steps
          from waypost.journal
         group by execution_id
    ),
    message as (
        select execution_id,
               count(*) filter (where state = 'delivered' and command) as answered,
               count(*) as sent
          from waypost.outbox
         group by execution_id
    ),
    post as (
        select execution_id, count(*) as mail
          from waypost.mail
         group by execution_id
    )
    select count(*) filter (where e.status = 'completed' and fact.steps = 3 and message.answered = 3
                              and message.sent = 3 and post.mail = 3),
           count(*)
      from waypost.execution e
      left join fact using (execution_id)
      left join message using (execution_id)
      left join post using (execution_id)
"""


class NotDone(Exception):
    """The database does not hold what was started."""


async def verify(deployment: Deployment) -> None:
    done, there = await one(deployment, PROOF)
    if done != there:
        raise NotDone(
            f"{there} orders were started; {done} completed with three commands, each answered once"
        )


async def one(deployment: Deployment, query: LiteralString, **values: object) -> tuple[Any, ...]:
    """The one row that a query finds."""
    row = await (await deployment.conn.execute(query, values)).fetchone()
    assert row is not None, "each of these answers one row"
    return row


def judged(found: Sequence[Seen], window: float) -> Result:
    rate = statistics.median(seen.rate for seen in found)
    p50, p99 = (
        1000 * statistics.median(of) for of in zip(*((s.step_p50, s.step_p99) for s in found), strict=True)
    )
    costs = {part: [1000 * seen.costs[part] for seen in found] for part in found[0].costs}
    return Result(
        name=NAME,
        unit="sagas/s",
        value=rate,
        bars=[Bar(f"sagas/s over {window:g} s", rate, least=SAGAS_MIN)],
        headings=("what", "median (lowest to highest)"),
        rows=[
            ["sagas/s", spread([seen.rate for seen in found])],
            ["sagas in the slowest second", spread([seen.worst for seen in found])],
            ["step, median, ms", spread([1000 * seen.step_p50 for seen in found])],
            ["step, 99 of 100, ms", spread([1000 * seen.step_p99 for seen in found])],
            ["processor ms per saga, all", spread([1000 * sum(seen.costs.values()) for seen in found])],
            *([f"processor ms per saga, {part}", spread(of)] for part, of in costs.items()),
        ],
        notes=NOTES,
        figures={"step_p50_ms": p50, "step_p99_ms": p99, "slowest_second": min(seen.worst for seen in found)},
    )


NOTES: Final = (
    (
        "Three commands one after the other, each answered by a signed reply that its service posts to the receiver. "
        f"{IN_FLIGHT} sagas under way; worker, relay, receiver and three services, a process each with their defaults, "
        "PostgreSQL, and the client that starts the sagas, all on this machine."
    ),
    (
        "A step lasts from the commit of the fact `asked` to that of `ended`, by the database "
        "(track_commit_timestamp): out through outbox and relay, the service, back through receiver and mail."
    ),
    "All that was started is afterwards found completed, with three commands that were answered once each.",
)
