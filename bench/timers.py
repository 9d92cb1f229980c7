"""Ten thousand executions whose sleeps end at one moment: how soon each of them goes on."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, LiteralString

from bench.inside import inside
from bench.report import Result
from bench.schedule import Say, Schedule, spread
from bench.server import Server
from orchestrator import Context, bootstrap, workflow

NAME: Final = "timers"
SETTINGS: Final[Mapping[str, str]] = {}
TIMERS: Final = 10_000
BATCH: Final = 100
AHEAD: Final = timedelta(seconds=25)
"""Long enough for all to have gone to sleep; a bench whose executions were not asleep in time says so."""
SECONDS_MAX: Final = 120.0


@workflow(name="sleeper", version="1")
async def sleeper(ctx: Context, until: str) -> None:
    await ctx.sleep_until(datetime.fromisoformat(until))


class NotAsleep(Exception):
    """Some execution went to sleep when the moment was past already."""


def run(server: Server, schedule: Schedule, say: Say) -> Result:
    """TIMERS sleeps for each round, each time in a database of its own."""
    seen: list[tuple[float, float, float]] = []
    for number in range(1, schedule.rounds + 1):
        with server.database(NAME) as dsn:
            seen.append(bootstrap.run(measure(dsn)))
        say(f"round {number}/{schedule.rounds}: the last of {TIMERS:,} went on {seen[-1][2]:.2f} s late")
    half, most, last = ([one[which] for one in seen] for which in range(3))
    return Result(
        name=NAME,
        unit=f"timers/s, {TIMERS:,} due at one moment",
        value=TIMERS / statistics.median(last),
        bars=[],
        headings=("of all", "seconds after it was due"),
        rows=[["the half", spread(half)], ["99 of 100", spread(most)], ["the last", spread(last)]],
        notes=(
            "When an execution went on is when its `ended` was told to it. One worker, in the bench's process.",
        ),
        figures={"last_seconds": statistics.median(last), "half_seconds": statistics.median(half)},
    )


LATE: Final[LiteralString] = """
    select percentile_cont(array[0.5, 0.99, 1.0]) within group (
               order by extract(epoch from e.at - (a.payload ->> 'due')::timestamptz))::float8[],
           count(*) filter (where a.at >= (a.payload ->> 'due')::timestamptz)
      from waypost.journal a
      join waypost.journal e using (tenant_id, execution_id, path)
     where a.kind = 'asked' and e.kind = 'ended'
"""


async def measure(dsn: str) -> tuple[float, float, float]:
    """How late the half, 99 of 100 and the last went on, in seconds."""
    async with inside(dsn, [sleeper]) as it:
        until = (datetime.now(UTC) + AHEAD).isoformat()
        for _ in range(0, TIMERS, BATCH):
            await it.client.start_many(sleeper, [(until, None)] * BATCH)
        await it.ends.until(TIMERS, seconds=AHEAD.total_seconds() + SECONDS_MAX)
        row = await (await it.conn.execute(LATE)).fetchone()
    assert row is not None, "an aggregate has a row"
    (half, most, last), awake = row
    if awake:
        raise NotAsleep(
            f"{awake} of {TIMERS} went to sleep when their time was past; the machine is too slow"
        )
    return half, most, last
