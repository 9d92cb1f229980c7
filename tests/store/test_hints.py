"""Hints come early, late, many at once, or while nobody can hear them: who works is woken, or looks by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, LiteralString
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from orchestrator.client import Client
from orchestrator.store import executions, hints
from orchestrator.store.database import Pool
from orchestrator.store.ending import end
from orchestrator.store.executions import Claim
from orchestrator.store.hints import Hints, running
from orchestrator.worker import Worker, WorkerLimits
from tests.engine.flows import FLOWS
from tests.moments import Moments
from tests.waiting import until

Connection = psycopg.AsyncConnection[Any]

PATIENCE_SECONDS = 30.0
NEVER = timedelta(hours=1)


async def comes(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await event.wait()


class Ear:
    """Who hears every NOTIFY, in order."""

    def __init__(self) -> None:
        self._heard = asyncio.Queue[str]()

    async def listen(self, conn: Connection) -> None:
        async for notification in conn.notifies():
            self._heard.put_nowait(notification.payload)

    async def next(self) -> str:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._heard.get()

    async def up_to(self, topic: str) -> list[str]:
        heard = [await self.next()]
        while heard[-1] != topic:
            heard.append(await self.next())
        return heard


@pytest.fixture
async def ear(dsn: str) -> AsyncIterator[Ear]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute(sql.SQL("listen {}").format(sql.Identifier(hints.CHANNEL)))
        ear = Ear()
        listening = asyncio.create_task(ear.listen(conn))
        yield ear
        await end([listening])


@asynccontextmanager
async def listening(dsn: str, *topics: str) -> AsyncGenerator[Hints]:
    """Hints that are heard by now: whoever begins to listen is told to look, and that is over."""
    found = Hints(dsn)
    events = [found.event(topic) for topic in topics]
    async with running(found):
        for event in events:
            await comes(event)
            event.clear()
        yield found


END: LiteralString = """
    select pg_terminate_backend(pid)
      from pg_stat_activity
     where application_name = 'waypost-hints'
       and datname = current_database()
       and query like %s
"""


async def cut(conn: Connection, which: str) -> None:
    """End the connections for hints whose last statement is like that."""
    assert (await conn.execute(END, (which,))).rowcount == 1


# ---- from process to process ---------------------------------------------------------------------------------------


async def test_a_hint_is_for_this_process_at_once_and_for_every_other_by_the_database(dsn: str) -> None:
    async with listening(dsn, "execution") as here, listening(dsn, "execution") as there:
        here.give("execution")

        assert here.event("execution").is_set()
        await comes(there.event("execution"))


async def test_a_hint_that_was_given_before_there_is_a_connection_is_sent_when_there_is_one(
    dsn: str, ear: Ear
) -> None:
    early = Hints(dsn)
    early.give("outbox")

    async with running(early):
        assert await ear.next() == "outbox"


async def test_many_hints_become_one(dsn: str, ear: Ear) -> None:
    async with running(Hints(dsn)) as giver:
        giver.give("execution")
        await ear.next()

        for _ in range(1000):
            giver.give("execution")
            giver.give("outbox")
        heard = await ear.up_to("outbox")

        giver.give("end")
        assert (heard, await ear.up_to("end")) == (["execution", "outbox"], ["end"])


async def test_a_hint_that_comes_while_another_is_on_its_way_is_sent_after_it(
    dsn: str, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on its way may be heard before the commit that the second one tells of."""
    sent = asyncio.Event()
    execute = psycopg.AsyncConnection[Any].execute

    async def slow(conn: Connection, query: Any, *args: Any, **more: Any) -> Any:
        found = await execute(conn, query, *args, **more)
        if query == hints.NOTIFY and not sent.is_set():
            sent.set()
            giver.give("execution")
        return found

    monkeypatch.setattr(psycopg.AsyncConnection, "execute", slow)
    giver = Hints(dsn)
    giver.give("execution")

    async with running(giver):
        assert [await ear.next(), await ear.next()] == ["execution", "execution"]


# ---- while the connection is away ----------------------------------------------------------------------------------


async def test_who_could_not_listen_for_a_while_looks_at_everything(dsn: str, conn: Connection) -> None:
    async with listening(dsn, "execution", "outbox") as listener:
        await cut(conn, "listen%")

        await comes(listener.event("execution"))
        await comes(listener.event("outbox"))


async def test_a_hint_whose_connection_is_gone_is_sent_by_the_next_one(
    dsn: str, conn: Connection, ear: Ear
) -> None:
    async with running(Hints(dsn)) as giver:
        giver.give("execution")
        await ear.up_to("execution")
        await cut(conn, "%pg_notify%")

        giver.give("outbox")

        assert await ear.up_to("outbox") == ["outbox"]


# ---- beside a worker -----------------------------------------------------------------------------------------------


class Looks:
    """What a worker's looks for due executions found, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[int] = []
        self.late: UUID | None = None
        self.client: Client | None = None
        self._claim = executions.claim
        monkeypatch.setattr(executions, "claim", self.claim)

    async def claim(self, conn: Connection, **arguments: Any) -> list[Claim]:
        """`client` starts a flow when a look has just found nothing, before the worker knows."""
        found = await self._claim(conn, **arguments)
        client, self.client = (None, self.client) if found else (self.client, None)
        if client is not None:
            self.late = (await client.start(FLOWS.get("three"), 2)).execution_id
        self.found.append(len(found))
        return found

    async def again(self) -> None:
        """Until the worker has looked once more, from its beginning to its end."""
        seen = len(self.found)

        async def has_looked() -> bool:
            return len(self.found) > seen + 1

        await until(has_looked, what="a look")


@asynccontextmanager
async def worker(dsn: str, pool: Pool, given: Hints, *, poll: timedelta) -> AsyncGenerator[Moments]:
    moments, stop = Moments(), asyncio.Event()
    limits = WorkerLimits(poll=poll)
    task = asyncio.create_task(
        Worker(pool, FLOWS, dsn=dsn, hints=given, observer=moments, limits=limits).run(stop)
    )
    try:
        yield moments
    finally:
        stop.set()
        await task


async def test_what_is_committed_while_a_worker_looks_is_taken_without_a_poll(
    dsn: str, pool: Pool, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found nothing, and begins to wait after the hint has come."""
    looks = Looks(monkeypatch)
    async with listening(dsn, "execution") as given:
        looks.client = Client(conn, hint=lambda topic: given.event(topic).set())
        async with worker(dsn, pool, given, poll=NEVER):

            async def was_started() -> bool:
                return looks.late is not None

            await until(was_started, what="the start")
            assert looks.late is not None
            done = await Client(conn).wait(looks.late, seconds=PATIENCE_SECONDS)

    assert done.row.status == "completed"


async def test_a_hint_before_its_commit_costs_a_poll_and_no_more(
    dsn: str, pool: Pool, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    async with running(Hints(dsn)) as given, worker(dsn, pool, given, poll=timedelta(milliseconds=20)):
        async with conn.transaction():
            early = await Client(conn, hint=given.give).start(FLOWS.get("three"), 2)
            await looks.again()
            assert sum(looks.found) == 0, "nobody sees what is not committed"

        done = await Client(conn).wait(early.execution_id, seconds=PATIENCE_SECONDS)

    assert done.row.status == "completed"
