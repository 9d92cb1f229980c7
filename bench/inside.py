"""A worker in this process, with its defaults, and a client beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

from contracts.observer import COUNTED
from migrations import runner
from orchestrator import bootstrap
from orchestrator.client import Client
from orchestrator.flows import Flows
from orchestrator.store.database import Connection, pool
from orchestrator.store.hints import Hints, running
from orchestrator.worker import Worker
from orchestrator.workflow import Workflow

CONNECTIONS: Final = 8
EXPECTED: Final = frozenset({"worker started", "worker draining", "worker stopped", *COUNTED})


class Failed(Exception):
    """The worker saw something that must not happen in a measurement."""


@dataclass(slots=True)
class Ends:
    """Counts executions that have ended, as every observer hears of them."""

    ended: int = 0
    unexpected: list[str] = field(default_factory=list[str])
    _wanted: int = 0
    _reached: asyncio.Event = field(default_factory=asyncio.Event)

    def saw(self, moment: str, /, **fields: object) -> None:
        if moment == "execution finished":
            self.ended += 1
            if self.ended >= self._wanted:
                self._reached.set()
        elif moment not in EXPECTED:
            self.unexpected.append(f"{moment} {fields}")

    async def until(self, ended: int, *, seconds: float) -> None:
        """Until so many have ended. Raises TimeoutError."""
        self._wanted = ended
        self._reached.clear()
        if self.ended < ended:
            async with asyncio.timeout(seconds):
                await self._reached.wait()


@dataclass(frozen=True, slots=True)
class Inside:
    conn: Connection
    client: Client
    ends: Ends


@asynccontextmanager
async def inside(dsn: str, flows: Sequence[Workflow[Any, Any]]) -> AsyncGenerator[Inside]:
    """A worker at work on `flows`, on a fresh database. Raises Failed when it saw anything that is not well."""
    with psycopg.connect(dsn, autocommit=True) as found:
        runner.migrate(found)
    bootstrap.collect_less()
    ends, stop, hints = Ends(), asyncio.Event(), Hints(dsn)
    async with pool(dsn, size=CONNECTIONS, name="bench") as connections, running(hints):
        worker = Worker(connections, Flows(flows), dsn=dsn, hints=hints, observer=ends)
        async with connections.connection() as conn, asyncio.TaskGroup() as tasks:
            working = tasks.create_task(worker.run(stop))
            yield Inside(conn, Client(conn, hint=hints.give), ends)
            stop.set()
            await working
    if ends.unexpected:
        raise Failed("; ".join(ends.unexpected[:5]))
