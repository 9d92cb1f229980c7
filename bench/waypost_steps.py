"""Three local durable steps in Waypost: a worker with its defaults and a client, in one process."""

from __future__ import annotations

import asyncio
from typing import Final

import psycopg
import uvloop

from bench.inside import EXPECTED, Failed
from bench.measure import Count, Plan, keep_in_flight, plan, report, tune
from bench.waypost_flow import Order, fulfil
from migrations import runner
from orchestrator.client import Client
from orchestrator.flows import Flows
from orchestrator.store.database import pool
from orchestrator.store.hints import Hints, running
from orchestrator.worker import Worker

CONNECTIONS: Final = 6


class Ends:
    """Hears from the worker that an execution has ended, as every observer does; the client may ask earlier."""

    def __init__(self) -> None:
        self.awaited: dict[str, asyncio.Future[None]] = {}
        self.unexpected: list[str] = []

    def saw(self, moment: str, /, **fields: object) -> None:
        if moment == "execution finished":
            self.of(str(fields["execution"])).set_result(None)
        elif moment not in EXPECTED:
            self.unexpected.append(f"{moment} {fields}")

    def of(self, execution: str) -> asyncio.Future[None]:
        return self.awaited.setdefault(execution, asyncio.get_running_loop().create_future())

    async def wait(self, execution: str) -> None:
        await self.of(execution)
        del self.awaited[execution]


class Starts:
    """Starts that are asked for while others are under way go together, in one `start_many`."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.waiting: list[tuple[Order, asyncio.Future[str]]] = []
        self.wanted = asyncio.Event()

    async def start(self, order: Order) -> str:
        started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.append((order, started))
        self.wanted.set()
        return await started

    async def run(self) -> None:
        while True:
            await self.wanted.wait()
            self.wanted.clear()
            together, self.waiting = self.waiting, []
            found = await self.client.start_many(fulfil, [(order, None) for order, _ in together])
            for (_, started), one in zip(together, found, strict=True):
                started.set_result(str(one.execution_id))


async def measure(plan: Plan) -> Count:
    ends, stop, hints = Ends(), asyncio.Event(), Hints(plan.dsn)
    async with pool(plan.dsn, size=CONNECTIONS, name="bench") as connections, running(hints):
        worker = Worker(connections, Flows([fulfil]), dsn=plan.dsn, hints=hints, observer=ends)
        async with connections.connection() as conn, asyncio.TaskGroup() as tasks:
            working = tasks.create_task(worker.run(stop))
            starts = Starts(Client(conn, hint=hints.give))
            starting = tasks.create_task(starts.run())

            async def run_one(number: int) -> None:
                await ends.wait(await starts.start({"number": number}))

            count = await keep_in_flight(plan, run_one)
            starting.cancel()
            stop.set()
            await working
    if ends.unexpected:
        raise Failed("; ".join(ends.unexpected[:5]))
    return count


def main() -> None:
    given = plan()
    with psycopg.connect(given.dsn, autocommit=True) as conn:
        runner.migrate(conn)
    tune()
    report(uvloop.run(measure(given)))


if __name__ == "__main__":
    main()
