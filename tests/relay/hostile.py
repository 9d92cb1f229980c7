"""An HTTP server over raw sockets that does what it is told, however rude, and remembers what it saw."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from tests.relay.certificates import HOST


@dataclass(frozen=True, slots=True)
class Request:
    line: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Exchange:
    """One connection, told to a behaviour."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    server: Hostile

    async def read(self) -> Request:
        head = await self.reader.readuntil(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in fields)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(line, headers, body)
        self.server.requests.append(request)
        self.server.arrived.set()
        return request

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def left(self) -> None:
        """Return when the client has closed the connection."""
        while await self.reader.read(65536):
            pass


Behaviour = Callable[[Exchange], Awaitable[None]]


@dataclass(slots=True)
class Hostile:
    behaviour: Behaviour
    port: int = 0
    scheme: str = "http"
    connections: int = 0
    requests: list[Request] = field(default_factory=list[Request])
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{HOST if self.scheme == 'https' else '127.0.0.1'}:{self.port}/hook?a=b"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
                await self.behaviour(Exchange(reader, writer, self))
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def hostile(behaviour: Behaviour, *, tls: ssl.SSLContext | None = None) -> AsyncGenerator[Hostile]:
    """A server on a port of its own, on 127.0.0.1."""
    server = Hostile(behaviour, scheme="https" if tls else "http")
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


def answers(status: int, *fields: str, body: bytes = b"") -> Behaviour:
    """Every request of a connection gets this answer."""

    async def behave(exchange: Exchange) -> None:
        while True:
            await exchange.read()
            await exchange.write(response(status, *fields, body=body))

    return behave


def response(status: int, *fields: str, body: bytes = b"") -> bytes:
    head = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join([*head, "", ""]).encode() + body


def in_turn(*behaviours: Callable[[Exchange, Request], Awaitable[None]]) -> Behaviour:
    """The first request gets the first behaviour, and so on; the last one goes on for ever."""
    count = 0

    async def behave(exchange: Exchange) -> None:
        nonlocal count
        while True:
            request = await exchange.read()
            count += 1
            await behaviours[min(count, len(behaviours)) - 1](exchange, request)

    return behave


def then(status: int, *fields: str, body: bytes = b"") -> Callable[[Exchange, Request], Awaitable[None]]:
    async def behave(exchange: Exchange, _request: Request) -> None:
        await exchange.write(response(status, *fields, body=body))

    return behave


async def hangs(exchange: Exchange) -> None:
    await exchange.read()
    await exchange.left()


async def cuts_before_reading(exchange: Exchange) -> None:
    exchange.writer.transport.abort()


async def cuts_after_reading(exchange: Exchange) -> None:
    await exchange.read()


async def cuts_inside_the_status_line(exchange: Exchange) -> None:
    await exchange.read()
    await exchange.write(b"HTTP/1.1 20")


def drips(status: int) -> Behaviour:
    """A status and one byte of the body; the rest never comes."""

    async def behave(exchange: Exchange) -> None:
        await exchange.read()
        await exchange.write(f"HTTP/1.1 {status} OK\r\nContent-Length: 1000000\r\n\r\nx".encode())
        await exchange.left()

    return behave


def floods(status: int) -> Behaviour:
    """A body without an end, as fast as it is read."""

    async def behave(exchange: Exchange) -> None:
        await exchange.read()
        await exchange.write(f"HTTP/1.1 {status} OK\r\nContent-Length: 2000000000\r\n\r\n".encode())
        while True:
            await exchange.write(b"\x00" * 65536)

    return behave


def says(data: bytes) -> Behaviour:
    """These bytes, then nothing; the connection stays open."""

    async def behave(exchange: Exchange) -> None:
        await exchange.read()
        await exchange.write(data)
        await exchange.left()

    return behave
