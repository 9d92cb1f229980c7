"""One execution that maps over 1,000 local steps, a hundred at once: how many steps a second it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Final, LiteralString

from bench.inside import Inside, inside
from bench.report import Result
from bench.schedule import Say, Schedule, spread
from bench.server import Server
from orchestrator import Context, bootstrap, workflow

NAME: Final = "many_items"
SETTINGS: Final[Mapping[str, str]] = {}
ITEMS: Final = 1_000
AT_ONCE: Final = 100
TIMES: Final = 3
SECONDS_MAX: Final = 120.0


async def act(item: int) -> int:
    return item + 1


@workflow(name="many-items", version="1")
async def many_items(ctx: Context, items: int) -> int:
    async def one(item: int) -> int:
        return await ctx.step(act, item)

    return sum(await ctx.map(range(items), one, concurrency=AT_ONCE))


class NotStored(Exception):
    """The journal does not hold what was said to be done."""


def run(server: Server, schedule: Schedule, say: Say) -> Result:
    """TIMES executions for each round, one after the other."""
    rates: list[float] = []
    for number in range(1, schedule.rounds + 1):
        with server.database(NAME) as dsn:
            rates += bootstrap.run(measure(dsn))
        say(f"round {number}/{schedule.rounds}: {rates[-1]:,.0f} steps/s")
    return Result(
        name=NAME,
        unit="steps/s of one execution",
        value=statistics.median(rates),
        bars=[],
        headings=("items", "at once", "steps/s"),
        rows=[[f"{ITEMS:,}", str(AT_ONCE), spread(rates)]],
        notes=(
            "Each step is remembered: asked and ended, in commits with fsync. One worker, in the bench's process.",
        ),
    )


async def measure(dsn: str) -> list[float]:
    async with inside(dsn, [many_items]) as it:
        await one(it, 1)
        found = [await one(it, number) for number in range(2, 2 + TIMES)]
        row = await (await it.conn.execute(ENDED)).fetchone()
    if row != (ITEMS * (1 + TIMES),):
        raise NotStored(f"{ITEMS * (1 + TIMES)} steps ended; the journal holds {row}")
    return found


ENDED: Final[LiteralString] = "select count(*) from waypost.journal where kind = 'ended'"


async def one(it: Inside, number: int) -> float:
    began = time.perf_counter()
    await it.client.start(many_items, ITEMS)
    await it.ends.until(number, seconds=SECONDS_MAX)
    return ITEMS / (time.perf_counter() - began)
