"""How many messages a relay delivers to 1, 10 and 100 endpoints, and what one that is ill costs the others.

One relay, and in the same process a server that answers 204 as soon as it has read a request, so a figure includes that
server. For deliveries MESSAGES are due at once. For isolation events come one by one to nine endpoints, and time is
counted from their commit to the moment at which the server has read them: once with nothing else, and once each while a
thousand messages wait for a tenth endpoint that hangs (it takes connections and never answers), drips (it says a byte
of its answer each second) or is dead (nobody listens there).
"""

from __future__ import annotations

import asyncio
import re
import socket
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any, Final, Literal, LiteralString, get_args
from uuid import UUID, uuid4

import psycopg
from psycopg_pool import AsyncConnectionPool

from bench.report import Bar, Result, figure
from bench.schedule import Say, Schedule, spread
from bench.server import Server
from contracts.vault import Vault
from migrations import runner
from orchestrator import registry
from orchestrator.store.database import Connection, connection_arguments
from relay.relay import Relay
from relay.settings import RelaySettings

NAME: Final = "relay_isolation"
SETTINGS: Final[Mapping[str, str]] = {}
ENDPOINTS: Final = (1, 10, 100)
MESSAGES: Final = 3_000
BACKLOG: Final = 1_000
PACE: Final = 0.005  # seconds between two events
SECONDS: Final = 4.0
RATIO_MAX: Final = 2.0
DRIP: Final = 1.0  # seconds between two bytes
VAULT: Final = Vault(b"k" * 32)
HERE: Final = [ip_network("127.0.0.0/8")]
ID: Final = re.compile(rb"webhook-id: ([0-9a-f-]{36})")
ANSWER: Final = b"HTTP/1.1 204 No Content\r\n\r\n"

Illness = Literal["hangs", "drips", "is dead"]
ILLNESSES: Final[tuple[Illness, ...]] = get_args(Illness)


@dataclass(slots=True)
class Sink(asyncio.Protocol):
    """Answers each request at once, and notes when it came; or never answers, or a byte at a time."""

    seen: dict[UUID, float]
    news: asyncio.Event
    illness: Illness | None = None
    transport: asyncio.WriteTransport | None = None
    waiting: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # pyright: ignore[reportAttributeAccessIssue]  # a server's transports are such

    def data_received(self, data: bytes) -> None:
        if self.illness is not None:
            if self.illness == "drips" and not self.waiting:
                asyncio.get_running_loop().call_later(DRIP, self.drip, 0)
            self.waiting = data
            return
        self.waiting += data
        head, end, rest = self.waiting.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if not end or length is None or len(rest) < int(length[1]):
            return
        self.waiting = rest[int(length[1]) :]
        found = ID.search(head)
        assert found is not None, "a message has an id"
        self.seen[UUID(found[1].decode())] = time.perf_counter()
        self.news.set()
        assert self.transport is not None, "it is connected"
        self.transport.write(ANSWER)

    def drip(self, number: int) -> None:
        if self.transport is not None and not self.transport.is_closing() and number < len(ANSWER):
            self.transport.write(ANSWER[number : number + 1])
            asyncio.get_running_loop().call_later(DRIP, self.drip, number + 1)


@dataclass(slots=True)
class World:
    """A database with endpoints, a relay at work, and what has arrived."""

    conn: Connection
    hinted: asyncio.Event
    seen: dict[UUID, float] = field(default_factory=dict[UUID, float])
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, arrived: Callable[[], bool]) -> None:
        while not arrived():
            self.news.clear()
            await self.news.wait()


@asynccontextmanager
async def world(dsn: str, endpoints: int, *, illness: Illness | None = None) -> AsyncGenerator[World]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        runner.migrate(conn)
    async with await Connection.connect(dsn, **connection_arguments(dsn, name="bench")) as conn:
        it = World(conn, asyncio.Event())
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Sink(it.seen, it.news), "127.0.0.1", 0)
        silent = await loop.create_server(lambda: Sink(it.seen, it.news, illness), "127.0.0.1", 0)
        nobody = socket.socket()
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        for number in range(endpoints):
            await add(it, f"e{number}", server.sockets[0].getsockname()[1])
        await add(it, "ill", (nobody if illness == "is dead" else silent.sockets[0]).getsockname()[1])
        if illness is not None:
            await fill(it, BACKLOG, 1, name="ill")
        pool = AsyncConnectionPool[Any](dsn, min_size=4, max_size=4, open=False, kwargs={"autocommit": True})
        stop = asyncio.Event()
        async with pool:
            settings = RelaySettings(allow=tuple(HERE))
            relay = asyncio.ensure_future(
                Relay(pool, vault=VAULT, settings=settings, hinted=it.hinted).run(stop)
            )
            yield it
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)
        server.close()
        silent.close()
        nobody.close()


async def add(it: World, name: str, port: int) -> None:
    await registry.add_endpoint(
        it.conn, VAULT, name=name, url=f"http://127.0.0.1:{port}/", kind="event", allow=HERE
    )


FILL: Final[LiteralString] = """
    insert into waypost.outbox (tenant_id, message_id, path, command, endpoint, body)
    select 1, gen_random_uuid(), '', false, %(name)s::text || case when %(endpoints)s > 1 or %(name)s = 'e'
                                                                  then (g %% %(endpoints)s)::text else '' end,
           '{"specversion":"1.0","id":"x","source":"/bench","type":"bench.told","data":{"number":1}}'
      from generate_series(1, %(count)s) g
"""
ONE: Final[LiteralString] = """
    insert into waypost.outbox (tenant_id, message_id, path, command, endpoint, body)
    values (1, %s, '', false, %s, '{"specversion":"1.0","id":"x","source":"/bench","type":"bench.told","data":1}')
"""


async def fill(it: World, count: int, endpoints: int, *, name: str = "e") -> None:
    await it.conn.execute(FILL, {"name": name, "endpoints": endpoints, "count": count})


async def rate(dsn: str, endpoints: int) -> float:
    """Messages delivered a second."""
    async with world(dsn, endpoints) as it:
        await fill(it, MESSAGES, endpoints)
        began = time.perf_counter()
        it.hinted.set()
        await it.until(lambda: len(it.seen) >= MESSAGES)
        return MESSAGES / (time.perf_counter() - began)


async def p99(dsn: str, seconds: float, *, illness: Illness | None) -> float:
    """Milliseconds from the commit of an event to its arrival: 99 of 100 take no longer."""
    async with world(dsn, 9, illness=illness) as it:
        await asyncio.sleep(0.5)
        told: dict[UUID, float] = {}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            message = uuid4()
            await it.conn.execute(ONE, (message, f"e{len(told) % 9}"))
            told[message] = time.perf_counter()
            it.hinted.set()
            await asyncio.sleep(PACE)
        await it.until(lambda: told.keys() <= it.seen.keys())
        took = [it.seen[message] - at for message, at in told.items()]
        return statistics.quantiles(took, n=100)[98] * 1_000


def run(server: Server, schedule: Schedule, say: Say) -> Result:
    rates: dict[int, list[float]] = {count: [] for count in ENDPOINTS}
    found: dict[Illness | None, list[float]] = {illness: [] for illness in (None, *ILLNESSES)}
    seconds = schedule.window or SECONDS
    for number in range(1, schedule.rounds + 1):
        for count in ENDPOINTS:
            with server.database(NAME) as dsn:
                rates[count].append(asyncio.run(rate(dsn, count)))
        for illness, took in found.items():
            with server.database(NAME) as dsn:
                took.append(asyncio.run(p99(dsn, seconds, illness=illness)))
        each = ", ".join(f"{figure(done[-1])}/s to {count}" for count, done in rates.items())
        beside = ", ".join(f"{found[illness][-1]:.1f} beside one that {illness}" for illness in ILLNESSES)
        say(f"round {number}/{schedule.rounds}: {each}; p99 {found[None][-1]:.1f} ms, {beside}")
    return judged(rates, found)


def judged(rates: Mapping[int, Sequence[float]], p99s: Mapping[Illness | None, Sequence[float]]) -> Result:
    calm = statistics.median(p99s[None])
    ratios = {illness: statistics.median(p99s[illness]) / calm for illness in ILLNESSES}
    rows = [
        [f"{count} endpoints" if count > 1 else "1 endpoint", spread(found)] for count, found in rates.items()
    ]
    rows.append(["p99 of nine endpoints, ms", spread(p99s[None])])
    rows += [[f"the same beside one that {illness}, ms", spread(p99s[illness])] for illness in ILLNESSES]
    return Result(
        NAME,
        "times the p99",
        max(ratios.values()),
        [
            Bar(f"times the p99 of others, beside an endpoint that {illness}", ratio, most=RATIO_MAX)
            for illness, ratio in ratios.items()
        ],
        ["what", "messages/s, or ms"],
        rows,
        ["One relay, and the server in its process."],
        figures={f"deliveries_{count}": statistics.median(found) for count, found in rates.items()},
    )
