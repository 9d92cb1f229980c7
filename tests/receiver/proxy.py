"""A wire between the receiver and its database that a test can cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class Proxy:
    """Forwards connections to a database.

    `deafen_at` is what a client says after which it hears nothing any more.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.port = 0
        self.deafen_at: bytes | None = None
        self.deaf = False
        self.whole = True
        self.server: asyncio.Server | None = None
        self.pumps: set[asyncio.Task[None]] = set()

    @property
    def through(self) -> str:
        """The DSN of the database by way of this proxy."""
        return make_conninfo(self.dsn, host="127.0.0.1", port=self.port)

    async def mend(self) -> None:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        self.whole, self.deaf, self.deafen_at = True, False, None

    async def cut(self) -> None:
        """Break every connection, and refuse new ones."""
        self.whole = False
        if self.server is not None:
            self.server.close()
        for pump in self.pumps:
            pump.cancel()
        await asyncio.gather(*self.pumps, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = conninfo_to_dict(self.dsn)
        there_reader, there_writer = await asyncio.open_connection(
            str(target["host"]), int(str(target["port"]))
        )
        if not self.whole:
            there_writer.close()
            writer.close()
            return
        for source, sink, answers in ((reader, there_writer, False), (there_reader, writer, True)):
            pump = asyncio.create_task(self._pump(source, sink, answers=answers))
            self.pumps.add(pump)
            pump.add_done_callback(self.pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        try:
            while data := await source.read(65536):
                if answers and self.deaf:
                    continue
                if not answers and self.deafen_at is not None and self.deafen_at in data:
                    self.deaf = True
                sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()
            with suppress(ConnectionError):
                await sink.wait_closed()


@asynccontextmanager
async def proxy(dsn: str) -> AsyncGenerator[Proxy]:
    wire = Proxy(dsn)
    await wire.mend()
    try:
        yield wire
    finally:
        await wire.cut()
