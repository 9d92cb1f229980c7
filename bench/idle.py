"""How soon an idle system moves: one saga at a time through all parts, when nothing else happens.

Hints are what makes it quick: without them each part would look twice a second. A turn has begun when the worker has
claimed the execution and read its mail; the time of that, by the database's clock, is what its `ended` fact carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, LiteralString

from bench.deployment import Deployment, deployed
from bench.report import Result, figure
from bench.schedule import Say, Schedule
from bench.server import Server
from bench.webhook_saga import SETTINGS, drained, one, order, verify
from examples.shop.flows import order_saga
from orchestrator import bootstrap

__all__ = ["NAME", "SETTINGS", "run"]

NAME: Final = "idle"
SAGAS: Final = 100
WARM_UP: Final = 5
LOOK_SECONDS: Final = 0.02


def run(server: Server, schedule: Schedule, say: Say) -> Result:
    """SAGAS sagas for each round, one after the other."""
    return bootstrap.run(measure(server, schedule, say))


async def measure(server: Server, schedule: Schedule, say: Say) -> Result:
    async with deployed(server) as deployment:
        for number in range(WARM_UP):
            await saga(deployment, number)
        [began] = await one(deployment, CLOCK)
        for number in range(1, schedule.rounds + 1):
            for saga_number in range(SAGAS):
                await saga(deployment, number * SAGAS + saga_number)
            say(f"round {number}/{schedule.rounds}: {SAGAS} sagas, one after the other")
        await verify(deployment)
        return judged([await one(deployment, query, began=began) for query in SPANS.values()])


async def saga(deployment: Deployment, number: int) -> None:
    await deployment.client.start(order_saga, order(number))
    await drained(deployment)


CLOCK: Final[LiteralString] = "select clock_timestamp()"

TO_TURN: Final[LiteralString] = """
    select percentile_cont(array[0.5, 0.99]) within group (
               order by extract(epoch from e.at - pg_xact_commit_timestamp(m.xmin)))::float8[]
      from waypost.mail m
      join waypost.journal e using (tenant_id, execution_id, path)
     where e.kind = 'ended' and e.at >= %(began)s
"""
TO_POST: Final[LiteralString] = """
    select percentile_cont(array[0.5, 0.99]) within group (
               order by extract(epoch from d.started_at - pg_xact_commit_timestamp(a.xmin)))::float8[]
      from waypost.journal a
      join waypost.outbox o using (tenant_id, execution_id, path)
      join waypost.delivery d using (tenant_id, message_id)
     where a.kind = 'asked' and a.at >= %(began)s
"""
STEP: Final[LiteralString] = """
    select percentile_cont(array[0.5, 0.99]) within group (
               order by extract(epoch from pg_xact_commit_timestamp(e.xmin) - pg_xact_commit_timestamp(a.xmin))
           )::float8[]
      from waypost.journal a
      join waypost.journal e using (tenant_id, execution_id, path)
     where a.kind = 'asked' and e.kind = 'ended' and a.at >= %(began)s
"""
SPANS: Final[Mapping[str, LiteralString]] = {
    "mail committed to turn begun": TO_TURN,
    "command committed to its post begun": TO_POST,
    "step: asked committed to ended committed": STEP,
}


def judged(found: Sequence[tuple[Any, ...]]) -> Result:
    in_ms = [[1000 * seconds for seconds in percentiles] for [percentiles] in found]
    return Result(
        name=NAME,
        unit="ms from mail committed to turn begun, the median",
        value=in_ms[0][0],
        bars=[],
        headings=("milliseconds", "median", "99 of 100"),
        rows=[[name, figure(p50), figure(p99)] for name, (p50, p99) in zip(SPANS, in_ms, strict=True)],
        notes=(
            "One saga at a time through worker, relay, three services and receiver; nothing else happens.",
            "Moments of commits are the database's (track_commit_timestamp): taken just before the commit is flushed.",
        ),
        figures={
            "mail_to_turn_p99_ms": in_ms[0][1],
            "step_p50_ms": in_ms[2][0],
            "step_p99_ms": in_ms[2][1],
        },
    )
