"""A wire between processes and their database that can swallow one answer.

A process that is about to commit something says so on the control port, with the port of its connection. From then
on the server's messages on it are looked at: what is before the statement's own answer goes through; that answer,
and all after it, is dropped, and the connection is reset, when the server has said that it is done. So what was
asked is committed, and who asked does not know.

Source: PostgreSQL documentation, 55.2 and 55.7 (message flow and formats).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from psycopg.conninfo import conninfo_to_dict, make_conninfo

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter

COMMAND_COMPLETE: Final = ord("C")
ERROR: Final = ord("E")
READY: Final = ord("Z")
ROW: Final = ord("D")
IDLE: Final = b"I"  # of READY: outside of any transaction
HEAD_BYTES: Final = 5
CHUNK_BYTES: Final = 65536


@dataclass(slots=True)
class Deafness:
    """Of the process `part` on one connection. With `rows` it only begins with an answer that has some."""

    part: str
    rows: bool
    received: bytearray = field(default_factory=bytearray)

    def hears(self, data: bytes) -> tuple[bytes, bool | None]:
        """What of `data` still gets through, and what then: True deaf, False not this time, None not known yet."""
        self.received += data
        through = bytearray()
        for cycle in cycles(self.received):
            kinds = {kind for kind, _ in messages(cycle)}
            done = COMMAND_COMPLETE in kinds and cycle.endswith(IDLE)
            if done and ERROR not in kinds and (not self.rows or ROW in kinds):
                return bytes(through), True
            through += cycle
            del self.received[: len(cycle)]
            if kinds & {COMMAND_COMPLETE, ERROR}:
                return bytes(through + self.received), False
        return bytes(through), None


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The whole messages that `data` begins with: kind, and all of it."""
    begin = 0
    while len(data) - begin >= HEAD_BYTES:
        end = begin + 1 + int.from_bytes(data[begin + 1 : begin + HEAD_BYTES])
        if end > len(data):
            return
        yield data[begin], data[begin:end]
        begin = end


def cycles(data: bytes | bytearray) -> Iterator[bytes]:
    """`data` up to each READY in it: the answers to one request each."""
    cycle = bytearray()
    for kind, message in messages(bytes(data)):
        cycle += message
        if kind == READY:
            yield bytes(cycle)
            cycle.clear()


class Proxy:
    """Forwards connections to the database at `dsn`. In `folder` it turns `<part>.trap` into `<part>.fired`."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self._target = conninfo_to_dict(dsn)
        self._dsn = dsn
        self._folder = folder
        self._deaf: dict[int, Deafness] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._ports: list[int] = []

    @property
    def dsn(self) -> str:
        """The database by way of this proxy."""
        return make_conninfo(self._dsn, host="127.0.0.1", port=self._ports[0])

    @property
    def control(self) -> int:
        """Where a process says what it does not want to hear."""
        return self._ports[1]

    def deafen(self, part: str, port: int, *, rows: bool) -> None:
        """Swallow the next answer to the connection that `part` has made from `port`."""
        self._deaf[port] = Deafness(part, rows)

    async def start(self) -> None:
        for serve in (self._forward, self._take_orders):
            server = await asyncio.start_server(self._serving(serve), "127.0.0.1", 0)
            self._servers.append(server)
            self._ports.append(server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _serving(
        self, serve: Callable[[Reader, Writer], Coroutine[Any, Any, None]]
    ) -> Callable[[Reader, Writer], None]:
        """What begins to serve a connection. The tasks are ours: asyncio complains of one that is cancelled."""

        def begin(reader: Reader, writer: Writer) -> None:
            task = asyncio.create_task(serve(reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        return begin

    async def _take_orders(self, reader: Reader, writer: Writer) -> None:
        async with closing(writer):
            said = json.loads(await reader.readline())
            self.deafen(said["part"], said["port"], rows=said["rows"])
            writer.write(b"ok")

    async def _forward(self, reader: Reader, writer: Writer) -> None:
        async with closing(writer):
            server_reader, server_writer = await asyncio.open_connection(
                str(self._target["host"]), int(str(self._target["port"]))
            )
            async with closing(server_writer):
                await self._pump(reader, server_writer, server_reader, writer)

    async def _pump(
        self,
        client_reader: Reader,
        server_writer: Writer,
        server_reader: Reader,
        client_writer: Writer,
    ) -> None:
        """Carry bytes both ways until one side ends."""
        ways = [
            asyncio.create_task(ask(client_reader, server_writer)),
            asyncio.create_task(self._answer(server_reader, client_writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _answer(self, server: Reader, client: Writer) -> None:
        port: int = client.get_extra_info("peername")[1]
        self._deaf.pop(port, None)
        while data := await server.read(CHUNK_BYTES):
            deaf = self._deaf.get(port)
            if deaf is None:
                client.write(data)
                continue
            through, swallowed = deaf.hears(data)
            client.write(through)
            if swallowed is None:
                continue
            del self._deaf[port]
            if swallowed and self._fire(deaf.part):
                client.transport.abort()
                return
            client.write(bytes(deaf.received) if swallowed else b"")

    def _fire(self, part: str) -> bool:
        """Whether this is the first time: a trap that has fired is gone."""
        with suppress(FileNotFoundError):
            (self._folder / f"{part}.trap").rename(self._folder / f"{part}.fired")
            return True
        return False


async def ask(client: Reader, server: Writer) -> None:
    while data := await client.read(CHUNK_BYTES):
        server.write(data)


@asynccontextmanager
async def closing(writer: Writer) -> AsyncGenerator[None]:
    """Close it in the end. That the other side is gone by then is nobody's fault."""
    try:
        yield
    except ConnectionError:
        pass
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def proxied(dsn: str, folder: Path) -> AsyncGenerator[Proxy]:
    """A proxy before the database at `dsn`, while inside."""
    proxy = Proxy(dsn, folder)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
