"""Three local durable steps in absurd, in the async SDK.

`worker`: one worker over one connection with room for all that is in flight, as its documentation shows it.
`workers`: several such workers side by side in the process, each with a connection of its own; nothing in
its documentation says so, and it is faster. For both: uvloop, a poll each 10 ms instead of 250, and clients
that are told of an end in the process, where its own `await_task_result` would poll for it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import absurdctl
import psycopg
import uvloop
from absurd_sdk import AsyncAbsurd, AsyncTaskContext, ClaimedTask

from bench.measure import Count, Plan, keep_in_flight, plan, report, tune

QUEUE: Final = "default"
POLL_SECONDS: Final = 0.01
WORKERS: Final = 8
CLIENTS: Final = 4


class Worker(AsyncAbsurd):
    """A worker that tells when an execution has ended: after its completion is committed, without a query."""

    def __init__(self, dsn: str, ends: Ends) -> None:
        super().__init__(dsn, QUEUE)
        self.ends = ends

    async def _execute_task(self, task: ClaimedTask, claim_timeout: int) -> None:
        await super()._execute_task(task, claim_timeout)
        self.ends.of(str(task["task_id"])).set_result(None)


class Ends:
    """The end of each execution; a worker may know it before the client does."""

    def __init__(self) -> None:
        self.awaited: dict[str, asyncio.Future[None]] = {}

    def of(self, task_id: str) -> asyncio.Future[None]:
        return self.awaited.setdefault(task_id, asyncio.get_running_loop().create_future())

    async def wait(self, task_id: str) -> None:
        await self.of(task_id)
        del self.awaited[task_id]


async def measure(plan: Plan) -> Count:
    ends = Ends()
    many = plan.variant == "workers"
    workers = [Worker(plan.dsn, ends) for _ in range(WORKERS if many else 1)]
    clients = [AsyncAbsurd(plan.dsn, QUEUE) for _ in range(CLIENTS)]
    await clients[0].create_queue()
    for client in clients:
        await client.list_queues()  # connects
    for worker in workers:
        worker.register_task("fulfil")(fulfil)
    room = -(-plan.in_flight // len(workers))
    running = [
        asyncio.create_task(worker.start_worker(concurrency=room, poll_interval=POLL_SECONDS))
        for worker in workers
    ]

    async def run_one(number: int) -> None:
        spawned = await clients[number % CLIENTS].spawn("fulfil", {"number": number}, queue=QUEUE)
        await ends.wait(str(spawned["task_id"]))

    count = await keep_in_flight(plan, run_one)
    for worker in workers:
        worker.stop_worker()
    await asyncio.gather(*running)
    for app in (*workers, *clients):
        await app.close()
    return count


async def fulfil(order: dict[str, Any], ctx: AsyncTaskContext) -> dict[str, Any]:
    async def reserve() -> dict[str, Any]:
        return {"reserved": order["number"]}

    async def charge() -> dict[str, Any]:
        return {"charged": order["number"]}

    async def ship() -> dict[str, Any]:
        return {"shipped": order["number"]}

    await ctx.step("reserve", reserve)
    await ctx.step("charge", charge)
    return await ctx.step("ship", ship)


def main() -> None:
    given = plan()
    with psycopg.connect(given.dsn, autocommit=True) as conn:
        conn.execute(
            absurdctl.BUNDLED_SCHEMA_SQL
        )  # what `absurdctl init` applies, which asks for a psql program
    tune()
    report(uvloop.run(measure(given)))


if __name__ == "__main__":
    main()
