"""One measurement: a process that is client and worker in one keeps N executions in flight, and counts.

Every system runs this same loop, in its own environment, so nothing here imports more than the standard
library. The client lives in the worker's process for every system: it learns of an end without asking the
database, and the processor time of starting an execution is paid by all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Final

STEPS: Final = ("reserve", "charge", "ship")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `warm_up` and `window` are seconds; only ends within the window count."""

    dsn: str
    variant: str
    in_flight: int
    warm_up: float
    window: float


@dataclass(frozen=True, slots=True)
class Count:
    """What was seen: `completed` executions within `seconds`; `total` from first start to last end."""

    completed: int
    seconds: float
    total: int

    @property
    def rate(self) -> float:
        """Executions per second."""
        return self.completed / self.seconds


def plan() -> Plan:
    """The plan that the command line gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--warm-up", type=float, required=True)
    parser.add_argument("--window", type=float, required=True)
    parser.add_argument("--variant", default="")
    given = parser.parse_args()
    return Plan(given.dsn, given.variant, given.in_flight, given.warm_up, given.window)


def report(count: Count) -> None:
    """Tell the process that started us. The last line of our output is what it reads."""
    print(json.dumps(asdict(count)), flush=True)


def reported(output: str) -> Count:
    """What `report` told."""
    return Count(**json.loads(output.splitlines()[-1]))


def tune() -> None:
    """What a server in Python does about its garbage collector, done for every system alike.

    What was imported is left out of it, and it runs each 50,000 new objects, as in a worker, instead of each 700.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def keep_in_flight(plan: Plan, run_one: Callable[[int], Awaitable[None]]) -> Count:
    """Keep `plan.in_flight` calls of `run_one(number)` running, each an execution from its start to its end.

    After the window nothing new is started and all that runs is awaited: every start is counted in `total`.
    """
    loop_over = Loop()
    clients = [asyncio.create_task(loop_over.client(run_one)) for _ in range(plan.in_flight)]
    await asyncio.sleep(plan.warm_up)
    before, began = loop_over.ended, time.perf_counter()
    await asyncio.sleep(plan.window)
    after, ended = loop_over.ended, time.perf_counter()
    loop_over.open = False
    await asyncio.gather(*clients)
    return Count(after - before, ended - began, loop_over.ended)


@dataclass(slots=True)
class Loop:
    """Clients that start again as soon as they are done, while it is open."""

    open: bool = True
    started: int = 0
    ended: int = 0

    async def client(self, run_one: Callable[[int], Awaitable[None]]) -> None:
        while self.open:
            self.started += 1
            await run_one(self.started)
            self.ended += 1
