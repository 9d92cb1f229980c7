"""Three local durable steps in DBOS, in both of its faces.

`async`: the async API, as its documentation shows it, with a thread for each connection of the pool. `threads`:
the sync API, with its executor and its pool kept small, since more threads only fight for the interpreter. For
both: its defaults otherwise, no logging below errors, LISTEN/NOTIFY on, direct starts (its queues poll once a
second), and the result taken from the handle of the same process, which does not poll.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from dbos import DBOS, DBOSConfig

from bench.measure import Count, Plan, keep_in_flight, plan, report, tune

THREADS: Final = 6
POOL: Final = 20  # its default


def configure(dsn: str, *, threads: int, pool: int) -> None:
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": dsn,
        "log_level": "ERROR",
        "sys_db_pool_size": pool,
        "max_executor_threads": threads,
    }
    DBOS(config=config)


async def with_async_api(plan: Plan) -> Count:
    # DBOS reaches its database with asyncio.to_thread; asyncio's own six threads would starve a pool of 20.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(POOL))

    @DBOS.step()
    async def reserve(order: dict[str, Any]) -> dict[str, Any]:
        return {"reserved": order["number"]}

    @DBOS.step()
    async def charge(order: dict[str, Any]) -> dict[str, Any]:
        return {"charged": order["number"]}

    @DBOS.step()
    async def ship(order: dict[str, Any]) -> dict[str, Any]:
        return {"shipped": order["number"]}

    @DBOS.workflow()
    async def fulfil(order: dict[str, Any]) -> dict[str, Any]:
        await reserve(order)
        await charge(order)
        return await ship(order)

    DBOS.launch()

    async def run_one(number: int) -> None:
        handle = await DBOS.start_workflow_async(fulfil, {"number": number})
        await handle.get_result()

    return await keep_in_flight(plan, run_one)


def with_threads(plan: Plan) -> Count:
    """The sync API; a thread per execution in flight, since its calls block."""

    @DBOS.step()
    def reserve(order: dict[str, Any]) -> dict[str, Any]:
        return {"reserved": order["number"]}

    @DBOS.step()
    def charge(order: dict[str, Any]) -> dict[str, Any]:
        return {"charged": order["number"]}

    @DBOS.step()
    def ship(order: dict[str, Any]) -> dict[str, Any]:
        return {"shipped": order["number"]}

    @DBOS.workflow()
    def fulfil(order: dict[str, Any]) -> dict[str, Any]:
        reserve(order)
        charge(order)
        return ship(order)

    DBOS.launch()
    over = threading.Event()
    ended = [0] * plan.in_flight

    def client(place: int) -> None:
        while not over.is_set():
            DBOS.start_workflow(fulfil, {"number": ended[place]}).get_result()
            ended[place] += 1

    clients = [threading.Thread(target=client, args=(place,)) for place in range(plan.in_flight)]
    for thread in clients:
        thread.start()
    time.sleep(plan.warm_up)
    before, began = sum(ended), time.perf_counter()
    time.sleep(plan.window)
    after, until = sum(ended), time.perf_counter()
    over.set()
    for thread in clients:
        thread.join()
    return Count(after - before, until - began, sum(ended))


def main() -> None:
    given = plan()
    tune()
    if given.variant == "threads":
        configure(given.dsn, threads=THREADS, pool=THREADS)
        count = with_threads(given)
    else:
        configure(given.dsn, threads=POOL, pool=POOL)
        count = asyncio.run(with_async_api(given))
    report(count)
    sys.stdout.flush()
    DBOS.destroy()


if __name__ == "__main__":
    main()
