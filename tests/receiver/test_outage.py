from __future__ import annotations

import asyncio

from orchestrator.store import database
from receiver.settings import ReceiverSettings
from tests.receiver.proxy import proxy
from tests.receiver.world import (
    PATIENCE_SECONDS,
    Connection,
    World,
    add_sender,
    dump,
    event,
    one,
    request,
    running,
)


async def until_accepted(world: World, sent: bytes) -> None:
    """Send as a sender does: again, when asked to come later."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (answer := await world.send(sent)).status != 202:
            assert answer.status == 503
            await asyncio.sleep(0.1)


async def until_stored(conn: Connection, event_id: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        query = "select count(*) from waypost.inbox where event_id = %s"
        while not await one(conn, query, event_id):  # noqa: ASYNC110  # another process stores it
            await asyncio.sleep(0.01)


async def test_without_its_database_the_receiver_says_come_later_and_recovers_by_itself(
    dsn: str, conn: Connection
) -> None:
    await add_sender(conn)
    async with (
        proxy(dsn) as wire,
        database.pool(wire.through, size=2, name="test") as pool,
        running(pool, conn) as world,
    ):
        assert (await world.post(event(id="before"))).status == 202

        await wire.cut()
        before = await dump(conn)
        answers = await asyncio.gather(*(world.post(event()) for _ in range(5)))
        assert {answer.status for answer in answers} == {503}
        assert {answer.headers["retry-after"] for answer in answers} == {"1"}
        assert await dump(conn) == before

        await wire.mend()
        await until_accepted(world, request(event(id="after")))
        assert await one(conn, "select array_agg(event_id order by inbox_id) from waypost.inbox") == [
            "before",
            "after",
        ]


async def test_a_sender_that_has_to_be_looked_up_without_a_database_is_not_unknown(
    dsn: str, conn: Connection
) -> None:
    await add_sender(conn)
    async with (
        proxy(dsn) as wire,
        database.pool(wire.through, size=2, name="test") as pool,
        running(pool, conn) as world,
    ):
        await wire.cut()

        answer = await world.post(event())

        assert (answer.status, answer.headers.get("retry-after")) == (503, "1")


async def test_a_commit_whose_answer_was_lost_is_answered_all_the_same(dsn: str, conn: Connection) -> None:
    await add_sender(conn)
    async with (
        proxy(dsn) as wire,
        database.pool(wire.through, size=2, name="test") as pool,
        running(pool, conn) as world,
    ):
        wire.deafen_at = b"post_mail"
        posted = asyncio.create_task(world.post(event(id="lost")))
        await until_stored(conn, "lost")
        await wire.cut()
        await wire.mend()
        answer = await posted

        assert (answer.status, answer.json) == (202, {"answer": "event"})
        assert await one(conn, "select count(*) from waypost.inbox where event_id = 'lost'") == 1


async def test_a_database_that_falls_silent_costs_each_sender_a_bounded_time(
    dsn: str, conn: Connection
) -> None:
    await add_sender(conn)
    settings = ReceiverSettings(wait_seconds=0.3)
    async with (
        proxy(dsn) as wire,
        database.pool(wire.through, size=2, name="test") as pool,
        running(pool, conn, settings=settings) as world,
    ):
        assert (await world.post(event())).status == 202

        wire.deaf = True
        silent = await world.post(event())
        await wire.cut()
        await wire.mend()

        assert (silent.status, silent.headers.get("retry-after")) == (503, "1")
        await until_accepted(world, request(event()))
