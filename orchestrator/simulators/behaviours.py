"""What a server may do about a request: answer, or anything else. Each is told the connection and the request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from itertools import cycle
from typing import Final

from orchestrator.simulators.server import Behaviour, Exchange, Request, response

DRIP_SECONDS: Final = 1.0
"""Between two bytes of what drips."""

Step = Callable[[Exchange, Request], Awaitable[None]]
"""What is done about one request."""


def every(step: Step) -> Behaviour:
    """A connection all of whose requests get `step`, until either side closes it."""

    async def behave(exchange: Exchange) -> None:
        while True:
            request = await exchange.read()
            await step(exchange, request)
            if request.headers.get("connection", "").lower() == "close":
                return

    return behave


def then(status: int, *fields: str, body: bytes = b"") -> Step:
    """An answer, as it should be."""

    async def answer(exchange: Exchange, _request: Request) -> None:
        await exchange.write(response(status, *fields, body=body))

    return answer


async def hangs(exchange: Exchange, _request: Request) -> None:
    """No answer."""
    await exchange.left()


async def cuts(exchange: Exchange, _request: Request) -> None:
    """The connection is closed instead of an answer."""
    exchange.cut()


async def resets(exchange: Exchange, _request: Request) -> None:
    """The same by a reset."""
    exchange.reset()


def breaks_off(data: bytes) -> Step:
    """These bytes, then the connection is closed."""

    async def answer(exchange: Exchange, _request: Request) -> None:
        await exchange.write(data)
        exchange.writer.close()

    return answer


def says(data: bytes) -> Step:
    """These bytes, then nothing; the connection stays open."""

    async def answer(exchange: Exchange, _request: Request) -> None:
        await exchange.write(data)
        await exchange.left()

    return answer


def drips(head: bytes, text: bytes = b"x") -> Step:
    """`head`, and then `text`, over and over again, a byte a second."""

    async def answer(exchange: Exchange, _request: Request) -> None:
        await exchange.write(head)
        for byte in cycle(text):
            await exchange.write(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRIP_SECONDS):
                    await exchange.left()
                    return

    return answer


def endless(status: int) -> bytes:
    """The head of an answer whose body is longer than anybody waits for."""
    return f"HTTP/1.1 {status} OK\r\nContent-Length: 2000000000\r\n\r\n".encode()


def floods(status: int) -> Step:
    """A body without an end, as fast as it is read."""

    async def answer(exchange: Exchange, _request: Request) -> None:
        await exchange.write(endless(status))
        while True:
            await exchange.write(b"\x00" * 65536)

    return answer


def goes_stale(answer: Step) -> Step:
    """Each connection is answered once: what comes next over it is read, and the connection is cut."""

    async def once(exchange: Exchange, request: Request) -> None:
        await (answer if exchange.count == 1 else cuts)(exchange, request)

    return once
