"""What a claim costs when many executions wait, beside a claim when none does.

Two databases on one server: in one, 100,000 executions wait, every other one for mail alone and every other one also
for a time to come; the other has as many that have ended. In pairs, first in the one and then in the other, new
executions become due, are claimed as a worker claims them, and end. Time is the worker's, round trip included;
pages are those that EXPLAIN (ANALYZE, BUFFERS) counts for the same call. Before each pair both tables are vacuumed,
else the count would depend on when autovacuum came by.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, LiteralString

from bench.given import BATCH, FLOW, HOUR, World
from bench.report import Bar, Result
from bench.schedule import Say, Schedule, spread
from bench.server import Server
from orchestrator.store import executions
from orchestrator.store.executions import Claim

NAME: Final = "claim_backlog"
SETTINGS: Final[Mapping[str, str]] = {}
WAITING: Final = 100_000
SIZES: Final = (1, 100)
"""Executions of one claim: the least, and a worker's most."""
PAIRS: Final = 20
NAMES: Final = ("none waits", f"{WAITING:,} wait")
TIMES_MAX: Final = 1.5
PAGES_MAX: Final = 1.1


@dataclass(slots=True)
class Seen:
    """Milliseconds and pages of each claim of one size in one database."""

    took: list[float] = field(default_factory=list[float])
    pages: list[int] = field(default_factory=list[int])


def run(server: Server, schedule: Schedule, say: Say) -> Result:
    """Measure PAIRS pairs of claims for each size and each round."""
    return asyncio.run(measure(server, schedule, say))


async def measure(server: Server, schedule: Schedule, say: Say) -> Result:
    async with AsyncExitStack() as stack:
        worlds: dict[str, World] = {}
        for name in NAMES:
            dsn = stack.enter_context(server.database(NAME))
            worlds[name] = world = await World.on(dsn)
            stack.push_async_callback(world.conn.close)
            say(f"{name}: making {WAITING:,} executions")
            await fill(world, waiting=name != NAMES[0])
            await world.conn.execute(ANALYZE)
        seen = {(size, name): Seen() for size in SIZES for name in worlds}
        for number in range(1, schedule.rounds + 1):
            for size in SIZES:
                for pair in range(PAIRS):
                    for name, world in list(worlds.items())[:: 1 if pair % 2 else -1]:
                        await claim_pair(world, size, seen[size, name])
            say(f"round {number}/{schedule.rounds}: " + ", ".join(in_words(seen, size) for size in SIZES))
    return judged(seen)


async def fill(world: World, *, waiting: bool) -> None:
    """WAITING executions that wait, or that have ended."""
    for batch in range(WAITING // BATCH):
        await world.start(BATCH)
        claims = await world.claim(BATCH)
        if waiting:
            await world.wait(claims, due=datetime.now(UTC) + 24 * HOUR if batch % 2 else None)
        else:
            await world.finish(claims)


ANALYZE: Final[LiteralString] = "vacuum (analyze) waypost.execution"
VACUUM: Final[LiteralString] = "vacuum waypost.execution"


async def claim_pair(world: World, size: int, seen: Seen) -> None:
    """Claim `size` new executions for the time, and as many again for the pages."""
    await world.start(size)
    await world.conn.execute(VACUUM)
    began = time.perf_counter()
    claims = await world.claim(size)
    seen.took.append(1000 * (time.perf_counter() - began))
    await finish(world, claims, size)

    await world.start(size)
    await world.conn.execute(VACUUM)
    seen.pages.append(await explained(world, size))
    await finish(world, await executions.owned_by(world.conn, me=world.me), size)


async def finish(world: World, claims: Sequence[Claim], size: int) -> None:
    assert len(claims) == size, f"expected {size} claimed, found {len(claims)}"
    await world.finish(claims)


EXPLAIN: Final[LiteralString] = """
    explain (analyze, buffers, format json)
     select * from waypost.claim_due(%(me)s::uuid, %(definitions)s::text[], %(versions)s::text[], %(n)s::int, null)
"""


async def explained(world: World, size: int) -> int:
    """How many pages a claim of `size` executions touches; it claims them."""
    parameters = {"me": world.me, "definitions": [FLOW[0]], "versions": [FLOW[1]], "n": size}
    row = await (await world.conn.execute(EXPLAIN, parameters)).fetchone()
    assert row is not None, "EXPLAIN answers one row"
    plan: dict[str, int] = row[0][0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def in_words(seen: Mapping[tuple[int, str], Seen], size: int) -> str:
    none, many = (seen[size, name] for name in NAMES)
    return (
        f"a claim of {size}: {times(none, many):.2f} times as long with {WAITING:,} waiting"
        f" ({statistics.median(none.took):.2f} and {statistics.median(many.took):.2f} ms), pages"
        f" {statistics.median(none.pages):g} and {statistics.median(many.pages):g}"
    )


def times(none: Seen, many: Seen) -> float:
    """The median over the pairs of how many times as long the claim took beside the backlog."""
    return statistics.median(b / a for a, b in zip(none.took, many.took, strict=True))


def judged(seen: Mapping[tuple[int, str], Seen]) -> Result:
    ratios = {size: times(*(seen[size, name] for name in NAMES)) for size in SIZES}
    pages = {(size, name): statistics.median(seen[size, name].pages) for size in SIZES for name in NAMES}
    return Result(
        name=NAME,
        unit=f"times as long as without, a claim of {max(SIZES)} with {WAITING:,} executions waiting",
        value=ratios[max(SIZES)],
        bars=[
            *(
                Bar(f"times as long, a claim of {size}", ratio, most=TIMES_MAX)
                for size, ratio in ratios.items()
            ),
            *(
                Bar(
                    f"times the pages, a claim of {size}",
                    pages[size, NAMES[1]] / pages[size, NAMES[0]],
                    most=PAGES_MAX,
                )
                for size in SIZES
            ),
        ],
        headings=("a claim of", *(f"ms, {name}" for name in NAMES), *(f"pages, {name}" for name in NAMES)),
        rows=[
            [
                str(size),
                *(spread(seen[size, name].took) for name in NAMES),
                *(spread(seen[size, name].pages) for name in NAMES),
            ]
            for size in SIZES
        ],
        notes=NOTES,
        figures={f"pages_{size}_{name.replace(' ', '_')}": count for (size, name), count in pages.items()},
    )


NOTES: Final = (
    (
        "Two databases with 100,000 executions each. In one all of them wait, every other batch for mail alone and "
        "every other also for a time to come; in the other all have ended. In turns, new ones become due in each, are "
        "claimed as a worker claims them, and end. The median (the lowest to the highest); times as long: the median "
        "over the pairs."
    ),
    (
        "Pages: what EXPLAIN (ANALYZE, BUFFERS) counts for the same call. Equal is judged as within a tenth: an index "
        "that has entries is a level deeper than an empty one, which is one page more for each descent, and where new "
        "versions of rows find room is chance."
    ),
    "Both tables are vacuumed before each claim, else the count would depend on when autovacuum came by.",
)
