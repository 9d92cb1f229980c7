"""A neighbour that is ill takes its own room, and what is meant for others arrives meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from psycopg_pool import AsyncConnectionPool

from tests.relay import given
from tests.relay.given import Connection, Watcher
from tests.relay.hostile import Behaviour, Exchange, hangs, hostile, response
from tests.relay.test_relay import QUICK, running

Pool = AsyncConnectionPool[Any]
Neighbour = Callable[[asyncio.Event], Behaviour]

ROOM = 3
ILL = replace(QUICK, endpoint_concurrency=ROOM, concurrency=2 * ROOM, batch=4, drain=timedelta(0))


def dripping(before: bytes) -> Neighbour:
    """Says `before`, and one byte more whenever the other endpoint was asked something: it is never at an end."""

    def neighbour(beat: asyncio.Event) -> Behaviour:
        async def behave(exchange: Exchange) -> None:
            await exchange.read()
            await exchange.write(before)
            while True:
                await beat.wait()
                beat.clear()
                await exchange.write(b"x")

        return behave

    return neighbour


@asynccontextmanager
async def two(conn: Connection, neighbour: Behaviour, beat: asyncio.Event) -> AsyncGenerator[None]:
    async def well(exchange: Exchange) -> None:
        while True:
            await exchange.read()
            beat.set()
            await exchange.write(response(204))

    async with hostile(neighbour) as ill, hostile(well) as other:
        await given.endpoint(conn, ill.url, name="ill")
        await given.endpoint(conn, other.url, name="well")
        yield


@pytest.mark.parametrize(
    "neighbour",
    [
        dripping(b"HTTP/1.1 200 OK\r\nx-slow: "),
        dripping(b"HTTP/1.1 500 No\r\nContent-Length: 1000\r\n\r\n"),
    ],
    ids=["its-header", "a-body"],
)
async def test_others_are_delivered_to_while_a_neighbour_drips(
    conn: Connection, pool: Pool, neighbour: Neighbour
) -> None:
    watcher, beat = Watcher(), asyncio.Event()
    async with two(conn, neighbour(beat), beat):
        execution = await given.execution(conn)
        stuck = [await given.message(conn, execution, endpoint="ill") for _ in range(20)]
        others = [await given.message(conn, execution, endpoint="well") for _ in range(30)]

        async with running(pool, watcher, settings=ILL):
            for message in others:
                await watcher.until("message.tried", message=message, outcome="delivered")
            tried = [told for told in watcher.named("message.tried") if told["endpoint"] == "ill"]
            states = [(await given.row(conn, message))["state"] for message in stuck]

    assert tried == []
    assert sorted(states) == ["due"] * (20 - ROOM) + ["sending"] * ROOM


async def test_others_are_delivered_to_while_a_neighbour_is_dead(conn: Connection, pool: Pool) -> None:
    """Nothing gets through to it, so its circuit opens; from then on it takes one try now and then."""
    watcher, beat = Watcher(), asyncio.Event()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and nobody listens there
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/"
        async with two(conn, hangs, beat):
            await conn.execute("update waypost.endpoint set url = %s where name = 'ill'", (url,))
            await conn.execute("update waypost.endpoint set schedule = '{\"delays\": [0]}'")
            execution = await given.execution(conn)
            stuck = [await given.message(conn, execution, endpoint="ill") for _ in range(50)]

            async with running(pool, watcher, settings=ILL):
                await watcher.until("circuit.opened", endpoint="ill")
                others = [await given.message(conn, execution, endpoint="well") for _ in range(30)]
                for message in others:
                    await watcher.until("message.tried", message=message, outcome="delivered")

            states = {(await given.row(conn, message))["state"] for message in stuck}

        assert states <= {"due", "sending"}
        tried = [told["error"] for told in watcher.named("message.tried") if told["endpoint"] == "ill"]
        assert set(tried) == {"connection-refused"}
