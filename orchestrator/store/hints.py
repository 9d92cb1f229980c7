"""NOTIFY as a hint: "look now", never "this happened". Losing one costs a poll interval, nothing else.

A commit with NOTIFY takes a lock of the whole database cluster, so hints are sent outside of every write
path, by a connection of their own. The first goes at once; those within a moment after it become one.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, LiteralString

import psycopg
from psycopg import sql
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from orchestrator.store.database import Connection, connection_arguments
from orchestrator.store.ending import end

CHANNEL: Final = "waypost"
COALESCE_SECONDS: Final = 0.01
"""The least time between two NOTIFYs of one process: the first hint goes at once, those that follow become one."""

NOTIFY: Final[LiteralString] = "select pg_notify('waypost', t) from unnest(%(topics)s::text[]) as t"


class Hints:
    """Gives and takes hints on `dsn` (a direct one: LISTEN does not work through a transaction pooler)."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._events: dict[str, asyncio.Event] = {}
        self._given: set[str] = set()
        self._giving = asyncio.Event()

    def give(self, topic: str) -> None:
        """Hint every process that there may be work of `topic`; this one at once."""
        self.event(topic).set()
        if topic not in self._given:
            self._given.add(topic)
            self._giving.set()

    def event(self, topic: str) -> asyncio.Event:
        """Set whenever there may be work of `topic`; who waits on it clears it before looking."""
        return self._events.setdefault(topic, asyncio.Event())

    async def run(self) -> None:
        """Listen and notify until cancelled; a lost connection is made again, and then everybody looks."""
        async for attempt in AsyncRetrying(
            wait=wait_random_exponential(multiplier=0.1, max=5),
            retry=retry_if_exception_type((psycopg.Error, OSError, ConnectionError)),
        ):
            with attempt:
                await self._session()

    async def _session(self) -> None:
        arguments = connection_arguments(self._dsn, name="hints")
        async with (
            await Connection.connect(self._dsn, **arguments) as listening,
            await Connection.connect(self._dsn, **arguments) as notifying,
        ):
            await listening.execute(sql.SQL("listen {}").format(sql.Identifier(CHANNEL)))
            for event in self._events.values():
                event.set()
            both = [
                asyncio.ensure_future(self._take(listening)),
                asyncio.ensure_future(self._send(notifying)),
            ]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end(both)
                results = await asyncio.gather(*both, return_exceptions=True)
            for result in results:
                if isinstance(result, psycopg.Error | OSError):
                    raise result
        raise ConnectionError("the connection for hints ended")

    async def _take(self, conn: Connection) -> None:
        async for notification in conn.notifies():
            self.event(notification.payload).set()

    async def _send(self, conn: Connection) -> None:
        while True:
            await self._giving.wait()
            self._giving.clear()
            topics, self._given = sorted(self._given), set()
            try:
                await conn.execute(NOTIFY, {"topics": topics})
            except BaseException:
                self._given.update(topics)
                self._giving.set()
                raise
            await asyncio.sleep(COALESCE_SECONDS)


@contextlib.asynccontextmanager
async def running(hints: Hints):  # noqa: ANN201  # a context manager
    """`hints`, taken and given while inside."""
    task = asyncio.create_task(hints.run(), name="hints")
    try:
        yield hints
    finally:
        await end([task])
