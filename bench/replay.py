"""How long a replay of 10,000 facts takes: what a worker pays for an execution that is not in its memory.

No database: the journal is made by the machine that is measured, and told to another one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from bench.report import Bar, Result
from bench.schedule import Say, Schedule, spread
from bench.server import Server
from orchestrator import Context, workflow
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine

NAME: Final = "replay"
SETTINGS: Final[Mapping[str, str]] = {}
FACTS: Final = 10_000
MS_MAX: Final = 100.0
TIMES: Final = 10
NOON: Final = datetime(2027, 1, 15, 12, tzinfo=UTC)


def act(number: int) -> int:
    return number


@workflow(name="counts", version="1")
async def counts(ctx: Context, steps: int) -> int:
    for number in range(steps):
        await ctx.step(act, number)
    return steps


def run(_: Server, schedule: Schedule, say: Say) -> Result:
    """TIMES replays for each round."""
    journal = recorded()
    took: list[float] = []
    for number in range(1, schedule.rounds + 1):
        took += [replayed(journal) for _ in range(TIMES)]
        say(f"round {number}/{schedule.rounds}: {statistics.median(took):.1f} ms")
    median = statistics.median(took)
    return Result(
        name=NAME,
        unit=f"ms for {len(journal):,} facts, the median",
        value=median,
        bars=[Bar(f"ms for a replay of {len(journal):,} facts", median, most=MS_MAX)],
        headings=("facts", "milliseconds"),
        rows=[[f"{len(journal):,}", spread(took)]],
        notes=("Local steps one after the other, as they are in memory once a journal is loaded.",),
    )


def recorded() -> list[Fact]:
    """A journal of FACTS facts: the start, steps that were asked for and ended, the end."""
    machine = Machine(counts.program)
    machine.tell("started", "", {"input": FACTS // 2 - 1, "seed": "s"}, NOON)
    while machine.open:
        machine.tell("ended", next(iter(machine.open)), {"outcome": "done", "value": 1}, NOON)
    return machine.take_new()


def replayed(journal: list[Fact]) -> float:
    """Milliseconds of one replay."""
    machine = Machine(counts.program)
    began = time.perf_counter()
    machine.replay(journal)
    took = time.perf_counter() - began
    assert machine.position == len(journal), "it went through the whole journal"
    return 1000 * took
