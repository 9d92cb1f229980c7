"""Three local durable steps per execution, in one worker process: Waypost, DBOS and absurd.

Every cell (a system, how it is run, how many in flight) is measured once per round, each time in a
process and a database of its own, and rounds follow one another, so that what disturbs the machine
disturbs all. A cell's figure is the median of its rounds; a system's is its best cell.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, LiteralString

from bench import verify
from bench.environment import ROOT, peers_python
from bench.measure import Count, reported
from bench.report import Bar, Result
from bench.schedule import Say, Schedule, spread
from bench.server import Server

NAME: Final = "local_steps"
IN_FLIGHT: Final = (20, 64, 200)
TIMES_MIN: Final[Mapping[str, float]] = {"dbos": 20, "absurd": 8}
SETTINGS: Final[Mapping[str, str]] = {}
WARM_UP_SECONDS: Final = 1.5
WINDOW_SECONDS: Final = 4.0
START_AND_DRAIN_MAX_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class System:
    """What is measured: a module that follows `bench.measure`, and what its database must hold afterwards.

    The best of its `variants` is its figure. What is `beyond` its documentation is shown, and is not its figure.
    """

    name: str
    module: str
    variants: Sequence[str]
    proof: LiteralString
    note: str
    beyond: Sequence[str] = ()


WAYPOST: Final = System(
    "waypost",
    "bench.waypost_steps",
    ("worker",),
    verify.WAYPOST,
    (
        "waypost: one worker with its defaults. Fence-checked and projected: every execution's row is "
        "compared with its journal in status, position and fence."
    ),
)
DBOS: Final = System(
    "dbos",
    "bench.peers.dbos_steps",
    ("async", "threads"),
    verify.DBOS,
    (
        "dbos 3.4.0: `async` is its async API with a pool of 20 and as many threads; `threads` is its "
        "sync API with a pool and an executor of 6, which suit two cores. Both: its defaults otherwise, no "
        "logging, direct starts, no polling."
    ),
)
ABSURD: Final = System(
    "absurd",
    "bench.peers.absurd_steps",
    ("worker",),
    verify.ABSURD,
    (
        "absurd 0.5.1, async SDK on uvloop, polling every 10 ms: `worker` is one worker as documented, "
        "with room for all that is in flight; `workers` is eight of them in the one process, with a "
        "connection each, which its documentation does not speak of: shown, and not its figure. Both: the "
        "client is told of the end in the process, it does not poll for it."
    ),
    beyond=("workers",),
)
SYSTEMS: Final = (WAYPOST, DBOS, ABSURD)


@dataclass(frozen=True, slots=True)
class Cell:
    system: System
    variant: str
    in_flight: int

    def __str__(self) -> str:
        return f"{self.system.name} ({self.variant}), {self.in_flight} in flight"


class Broken(Exception):
    """A measurement ended with an error; its last words are in the message."""

    def __init__(self, cell: Cell, last_words: str) -> None:
        super().__init__(f"{cell}: {last_words.strip()[-2000:]}")


def run(server: Server, schedule: Schedule, say: Say) -> Result:
    """Measure all cells. Raises Broken, and verify.NotDone when a database does not hold what was counted."""
    warm_up, window = schedule.warm_up or WARM_UP_SECONDS, schedule.window or WINDOW_SECONDS
    say("installing the peers into .waypost/bench, if they are not there")
    peers = peers_python()
    cells = [
        Cell(system, variant, in_flight)
        for in_flight in IN_FLIGHT
        for system in SYSTEMS
        for variant in (*system.variants, *system.beyond)
    ]
    rates: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for number in range(1, schedule.rounds + 1):
        for place, cell in enumerate(cells, 1):
            python = Path(sys.executable) if cell.system is WAYPOST else peers
            rate = measure(server, python, cell, warm_up=warm_up, window=window).rate
            rates[cell].append(rate)
            where = f"round {number}/{schedule.rounds}, {place:2}/{len(cells)}"
            say(f"{where}: {cell!s:36} {rate:8,.0f} executions/s")
    return judged(rates, warm_up=warm_up, window=window)


def measure(server: Server, python: Path, cell: Cell, *, warm_up: float, window: float) -> Count:
    """One measurement of one cell, proved by its database."""
    with server.database(f"{cell.system.name}_{cell.in_flight}") as dsn:
        command = [
            *(python, "-m", cell.system.module, "--dsn", dsn, "--variant", cell.variant),
            *("--in-flight", str(cell.in_flight)),
            *("--warm-up", str(warm_up), "--window", str(window)),
        ]
        limit = START_AND_DRAIN_MAX_SECONDS + warm_up + window
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=limit, cwd=ROOT)
        if ended.returncode != 0:
            raise Broken(cell, ended.stderr or ended.stdout)
        count = reported(ended.stdout)
        verify.verify(str(cell), cell.system.proof, dsn, count)
        return count


def judged(rates: Mapping[Cell, Sequence[float]], *, warm_up: float, window: float) -> Result:
    """What the rounds come to."""
    best = {
        system.name: max(
            statistics.median(found)
            for cell, found in rates.items()
            if cell.system is system and cell.variant in system.variants
        )
        for system in SYSTEMS
    }
    ours = best[WAYPOST.name]
    versus = {peer: ours / best[peer] for peer in TIMES_MIN}
    rounds = min(map(len, rates.values()))
    return Result(
        name=NAME,
        unit="executions/s",
        value=ours,
        versus=versus,
        bars=[Bar(f"times {peer}", versus[peer], least=times) for peer, times in TIMES_MIN.items()],
        headings=("system, how", *(f"{in_flight} in flight" for in_flight in IN_FLIGHT)),
        rows=[
            row(system, variant, rates)
            for system in SYSTEMS
            for variant in (*system.variants, *system.beyond)
        ],
        notes=(
            (
                f"The median of {rounds} rounds (the lowest to the highest); a window of {window:g} s after "
                f"{warm_up:g} s of warming up; a new database each time."
            ),
            *NOTES,
            *(system.note for system in SYSTEMS),
        ),
    )


NOTES: Final = (
    (
        "Three trivial steps one after the other, each returning a small JSON that is durable before the "
        "next begins."
    ),
    (
        "One process each, its garbage collector set alike: it leaves out what was imported, and runs each "
        "50,000 new objects."
    ),
    (
        "Client and worker share one process, for every system. What is counted is afterwards found in "
        "the database: each execution completed, with three step records."
    ),
)


def row(system: System, variant: str, rates: Mapping[Cell, Sequence[float]]) -> list[str]:
    """One line of the table."""
    found = [rates[Cell(system, variant, in_flight)] for in_flight in IN_FLIGHT]
    return [
        f"{system.name}, {variant}" + (" (beyond)" if variant in system.beyond else ""),
        *map(spread, found),
    ]
