"""Order in lanes, with four relays that are processes, some of which are killed, and an endpoint that fails."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import UUID, uuid4

import pytest

from tests.cli.processes import Running, running, waypost
from tests.relay import given
from tests.relay.given import NEVER, NOON, Connection
from tests.relay.hostile import Exchange, hostile, response
from tests.waiting import until

RELAYS: Final = 4
EACH: Final = 16  # messages of a lane
EVENTS: Final = ("a", "b", "c")
COMMANDS: Final = ("d", "e", "f")
KILLED_AT: Final = (10, 25, 45, 70)  # requests that came
SECONDS: Final = 120.0


async def told(conn: Connection, lane: str, number: int, execution: UUID) -> None:
    """A message in `lane`: a command or an event."""
    command = lane in COMMANDS
    body = json.dumps({"id": "x", "type": "t", "lane": lane, "number": number}).encode()
    await conn.execute(
        """
        insert into waypost.outbox (tenant_id, message_id, execution_id, epoch, path, command, endpoint, lane, ordered,
                                    body, due_at, expires_at)
        values (1, %s, %s, %s, '', %s, 'payments', %s, true, %s, %s, %s)
        """,
        (uuid4(), *((execution, 0) if command else (None, None)), command, lane, body, NOON, NEVER),
    )


@dataclass(slots=True)
class Service:
    """Fails now and then, and kills a relay at some requests, while that one waits for the answer."""

    kill: Callable[[int], None]
    under_way: dict[str, int] = field(default_factory=dict[str, int])
    taken: dict[str, list[int]] = field(default_factory=lambda: {lane: [] for lane in EVENTS + COMMANDS})
    wrong: list[str] = field(default_factory=list[str])
    count: int = 0

    async def behave(self, exchange: Exchange) -> None:
        while True:
            said = json.loads((await exchange.read()).body)
            self.count += 1
            lane, number = said["lane"], said["number"]
            if self.under_way.get(lane, number) != number:
                self.wrong.append(f"{lane}: {number} while {self.under_way[lane]}")
            self.under_way[lane] = number
            if self.count in KILLED_AT:
                self.kill(KILLED_AT.index(self.count))
            await asyncio.sleep(0)
            fails = (number * 7 + self.count) % 6 == 0
            if not fails:
                self.taken[lane].append(number)
            self.under_way.pop(lane, None)
            await exchange.write(response(503 if fails else 204))


@dataclass(slots=True)
class Relays:
    """Processes of `waypost relay`, begun one after the other."""

    stack: ExitStack
    dsn: str
    folder: Path
    begun: list[Running] = field(default_factory=list[Running])

    def begin(self) -> None:
        environment = {
            "WAYPOST_DATABASE_URL": self.dsn,
            "WAYPOST_SECRET_KEY": b64encode(bytes(range(32))).decode(),
            "WAYPOST_ALLOW_ADDRESSES": "127.0.0.0/8",
            "WAYPOST_LEASE": "2s",
            "WAYPOST_HEALTH_ADDR": "off",
        }
        output = self.folder / f"relay-{len(self.begun)}"
        self.begun.append(
            self.stack.enter_context(running(waypost("relay"), environment=environment, output=output))
        )

    def replace(self, number: int) -> None:
        """Kill one, and begin another."""
        self.begun[number].process.kill()
        self.begin()


@pytest.mark.proof
async def test_order_holds_under_four_relay_processes_of_which_some_are_killed(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    """Elsewhere parallel deliverers broke a promised order (MassTransit 3512).

    A message may come again, as its relay died before it wrote that it had arrived. But none comes before the one ahead
    of it in its lane was taken, and none comes back after the one behind it was.
    """

    async def all_arrived() -> bool:
        cursor = await conn.execute("select count(*) from waypost.outbox where state <> 'delivered'")
        return await cursor.fetchone() == (0,)

    with ExitStack() as stack:
        relays = Relays(stack, dsn, tmp_path)
        service = Service(relays.replace)
        async with hostile(service.behave) as server:
            await given.endpoint(conn, server.url)
            await conn.execute(
                "update waypost.endpoint set schedule = '{\"delays\": [0.01]}', disable_after = null"
            )
            for _ in range(RELAYS):
                relays.begin()
            for relay in relays.begun:
                await asyncio.to_thread(relay.until_said, "relay.started")
            execution = await given.execution(conn)
            for number in range(EACH):
                for lane in EVENTS + COMMANDS:
                    await told(conn, lane, number, execution)
            await until(all_arrived, what="all messages, taken", seconds=SECONDS)

    assert service.wrong == []
    assert [relay.process.returncode for relay in relays.begun[: len(KILLED_AT)]] == [-9] * len(KILLED_AT)
    for lane, numbers in service.taken.items():
        assert numbers == sorted(numbers), lane
        assert set(numbers) == set(range(EACH)), lane
