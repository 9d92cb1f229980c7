"""HTTP/1.1 over raw sockets, for servers that misbehave: what a behaviour writes leaves as it is.

Nobody who connects takes more than a share: heads, bodies, connections, their lives and what is kept are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from contracts.limits import MESSAGE_BYTES_MAX

HEAD_BYTES_MAX: Final = 64 * 1024
"""Of a request's line and headers."""
CONNECTIONS_MAX: Final = 256
"""One more is closed at once."""
CONNECTION_SECONDS_MAX: Final = 600.0
"""However a connection is used: then it is cut."""
KEPT_MAX: Final = 10_000
"""Requests that a server remembers; the oldest are forgotten."""
KEPT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of their bodies."""
AT_ONCE: Final = struct.pack("ii", 1, 0)
"""As SO_LINGER: to close is to reset."""


class Unreadable(Exception):
    """What came is no request that is read here; `status` says why."""

    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """What came. Names of headers are in lower case; of several with one name the last counts."""

    line: str
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def target(self) -> str:
        return self.line.split(" ")[1] if self.line.count(" ") == 2 else ""

    @property
    def path(self) -> str:
        try:
            return urlsplit(self.target).path
        except ValueError:
            return ""


@dataclass(slots=True)
class Exchange:
    """One connection, told to a behaviour: `number` is which of its server, `count` how many requests it had."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    server: Server
    number: int = 0
    count: int = 0

    async def read(self) -> Request:
        """The next request. Raises Unreadable, or asyncio.IncompleteReadError when the client has left."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise Unreadable(431) from None
        line, *fields = head.decode("latin-1").rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in fields)}
        request = Request(line, headers, await self._body(headers))
        self.count += 1
        self.server.remember(request)
        return request

    async def _body(self, headers: dict[str, str]) -> bytes:
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers:
            raise Unreadable(411)
        if not (length.isascii() and length.isdigit()):
            raise Unreadable(400)
        if len(length) > 9 or int(length) > MESSAGE_BYTES_MAX:
            raise Unreadable(413)
        if headers.get("expect", "").lower() == "100-continue":
            await self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return await self.reader.readexactly(int(length))

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def left(self) -> None:
        """Return when the client has closed the connection."""
        while await self.reader.read(65536):
            pass

    def cut(self) -> None:
        """Close it in the middle of whatever it is in."""
        self.writer.transport.abort()

    def reset(self) -> None:
        """The same, so that the other side gets a reset."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self.cut()


Behaviour = Callable[[Exchange], Awaitable[None]]
"""What happens on one connection."""


@dataclass(slots=True)
class Server:
    """A server at work, and what it saw."""

    behaviour: Behaviour
    host: str = "127.0.0.1"
    port: int = 0
    scheme: str = "http"
    connections: int = 0
    requests: list[Request] = field(default_factory=list[Request])
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    open: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]], init=False)
    _kept: int = field(default=0, init=False)
    _ending: bool = field(default=False, init=False)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def remember(self, request: Request) -> None:
        self.requests.append(request)
        self._kept += len(request.body)
        while len(self.requests) > KEPT_MAX or self._kept > KEPT_BYTES_MAX:
            self._kept -= len(self.requests.pop(0).body)
        self.arrived.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self.open) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self.open.add(task)
        self.connections += 1
        exchange = Exchange(reader, writer, self, self.connections)
        try:
            await self._behave(exchange)
        except asyncio.CancelledError:
            if not self._ending:  # else it is what `end` wants, and nobody to be told of
                raise
        finally:
            self.open.discard(task)
            writer.close()

    async def _behave(self, exchange: Exchange) -> None:
        gone = (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError, TimeoutError)
        with contextlib.suppress(*gone):
            async with asyncio.timeout(CONNECTION_SECONDS_MAX):
                try:
                    await self.behaviour(exchange)
                except Unreadable as error:
                    await exchange.write(response(error.status, "Connection: close"))

    async def end(self) -> None:
        """Cut every connection."""
        self._ending = True
        for task in (tasks := list(self.open)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def listening(server: Server, *, tls: ssl.SSLContext | None = None) -> AsyncGenerator[Server]:
    """Serve within the block, at `server.host` and `server.port`; the port 0 becomes one that is free."""
    listener = await asyncio.start_server(
        server.serve, server.host, server.port, ssl=tls, limit=HEAD_BYTES_MAX
    )
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        await server.end()


def response(status: int, *fields: str, body: bytes = b"") -> bytes:
    head = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join([*head, "", ""]).encode() + body
