"""How many executions a client starts per second, one at a time and a hundred at a time, over one connection.

Each start validates its input, and returns when the execution and its first fact are durable.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Final, LiteralString

import psycopg

from bench.report import Result
from bench.schedule import Say, Schedule, spread
from bench.server import Server
from examples.shop.flows import order_saga
from migrations import runner
from orchestrator import bootstrap
from orchestrator.client import Client
from orchestrator.store import definitions
from orchestrator.store.database import Connection, connection_arguments

NAME: Final = "starts"
SETTINGS: Final[Mapping[str, str]] = {}
SIZES: Final = (1, 100)
WARM_UP_SECONDS: Final = 0.5
WINDOW_SECONDS: Final = 3.0


class NotStored(Exception):
    """The database does not hold what was said to be started."""


def run(server: Server, schedule: Schedule, say: Say) -> Result:
    """Measure each size once per round, in turns, each time in a database of its own."""
    rates: dict[int, list[float]] = {size: [] for size in SIZES}
    for number in range(1, schedule.rounds + 1):
        for size in SIZES:
            with server.database(NAME) as dsn:
                rates[size].append(bootstrap.run(measure(dsn, size, schedule)))
        found = ", ".join(f"{of[-1]:,.0f}/s in batches of {size}" for size, of in rates.items())
        say(f"round {number}/{schedule.rounds}: {found}")
    single, batched = SIZES
    return Result(
        name=NAME,
        unit=f"executions/s started, {batched} in a batch",
        value=statistics.median(rates[batched]),
        bars=[],
        headings=("in a batch", "executions/s"),
        rows=[[str(size), spread(of)] for size, of in rates.items()],
        notes=(
            "One client, one connection; the next batch begins when the last is durable. Orders of the example shop.",
        ),
        figures={"singly": statistics.median(rates[single])},
    )


COUNT: Final[LiteralString] = """
    select count(*)
      from waypost.execution e
      join waypost.journal j on j.tenant_id = e.tenant_id and j.execution_id = e.execution_id
     where j.kind = 'started'
"""


async def measure(dsn: str, size: int, schedule: Schedule) -> float:
    """Executions started per second. Raises NotStored unless the database holds all of them."""
    with psycopg.connect(dsn, autocommit=True) as found:
        runner.migrate(found)
    async with await Connection.connect(dsn, **connection_arguments(dsn, name="bench")) as conn:
        await definitions.publish(conn, [definitions.Definition(order_saga.name, order_saga.version)])
        client = Client(conn)
        warm_up = await start_for(client, size, schedule.warm_up or WARM_UP_SECONDS)
        began = time.perf_counter()
        started = await start_for(client, size, schedule.window or WINDOW_SECONDS)
        took = time.perf_counter() - began
        row = await (await conn.execute(COUNT)).fetchone()
    if row != (warm_up + started,):
        raise NotStored(f"{warm_up + started} were started; the database holds {row}")
    return started / took


async def start_for(client: Client, size: int, seconds: float) -> int:
    """Start batch after batch for so long; how many executions."""
    until, started = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        orders = [
            ({"id": f"order-{started + n}", "customer": "ada", "total": 4200}, None) for n in range(size)
        ]
        started += len(await client.start_many(order_saga, orders))
    return started
