"""Group commit: who shares a transaction, and what one arrival can do to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from psycopg import sql

from receiver.settings import ReceiverSettings
from tests.receiver.world import (
    Answer,
    Connection,
    Pool,
    World,
    add_command,
    add_sender,
    dump,
    event,
    one,
    reply,
    running,
    until,
)

Posts = list[Awaitable[Answer]]


async def together(world: World, *posts: Awaitable[Answer]) -> list[Answer]:
    """The answers to requests that gather while the first of them holds up the writer."""
    async with world.conn.transaction():
        await world.conn.execute("lock table waypost.inbox in exclusive mode")
        tasks = [asyncio.ensure_future(post) for post in posts]
        await until(lambda: world.receiver.at_work == len(posts))
    return await asyncio.gather(*tasks)


async def failing(conn: Connection, *, times: int, errcode: str) -> None:
    """Make the next `times` inserts into the inbox fail. A sequence counts, since it forgets no rollback."""
    await conn.execute("create sequence tries")
    await conn.execute(
        sql.SQL(
            """
            create function fail() returns trigger language plpgsql as $$
            begin
                if nextval('tries') <= {} then
                    raise exception 'on purpose' using errcode = {};
                end if;
                return new;
            end $$
            """
        ).format(times, errcode)
    )
    await conn.execute(
        "create trigger fail before insert on waypost.inbox for each row execute function fail()"
    )


async def test_arrivals_that_gather_share_a_transaction(world: World) -> None:
    answers = await together(world, *(world.post(event()) for _ in range(40)))

    assert {answer.status for answer in answers} == {202}
    assert world.moments.count("post.batch") <= 3
    assert await one(world.conn, "select count(distinct xmin::text) from waypost.inbox") <= 3


async def test_the_first_of_equal_events_in_one_transaction_counts(world: World) -> None:
    posts = [world.post(event(id="same", data=n), webhook_id=f"msg_{n}") for n in range(8)]

    answers = await together(world, *posts)

    assert sorted(answer.status for answer in answers) == [202] + [409] * 7
    assert await one(world.conn, "select count(*) from waypost.inbox") == 1


async def test_replies_and_events_and_wrongs_go_together_and_each_gets_its_own_answer(world: World) -> None:
    _, message_id = await add_command(world.conn)

    answers = await together(
        world,
        world.post(reply(message_id)),
        world.post(event()),
        world.post(reply(message_id, type="payment.charge.maybe")),
        world.post(event(source="waypost:x")),
        world.post(reply("nobody")),
    )

    assert [answer.status for answer in answers] == [202, 202, 400, 403, 202]
    assert answers[0].json == {"answer": "mail"}


async def test_an_arrival_that_the_database_refuses_fails_alone(world: World) -> None:
    await world.conn.execute("alter table waypost.inbox add constraint good check (event_id <> 'bad')")
    posts = [world.post(event(id="bad" if n == 5 else f"good-{n}")) for n in range(16)]

    answers = await together(world, *posts)

    assert [answer.status for answer in answers] == [400 if n == 5 else 202 for n in range(16)]
    assert await one(world.conn, "select count(*) from waypost.inbox") == 15
    assert world.moments.count("event.unstorable") == 1


@pytest.mark.parametrize("errcode", ["40001", "40P01", "55P03", "57014"])
async def test_what_passes_is_tried_again(world: World, errcode: str) -> None:
    await failing(world.conn, times=2, errcode=errcode)

    answer = await world.post(event())

    assert answer.status == 202
    assert world.moments.count("post.failed") == 2


async def test_what_does_not_pass_is_put_off_until_the_sender_comes_again(world: World) -> None:
    await failing(world.conn, times=1_000, errcode="40001")
    before = await dump(world.conn)

    answer = await world.post(event())

    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert await dump(world.conn) == before


async def test_what_nobody_foresaw_is_our_fault_and_over_with_its_cause(world: World) -> None:
    await failing(world.conn, times=1, errcode="P0001")

    assert (await world.post(event())).status == 500
    assert (await world.post(event())).status == 202


async def test_an_answer_that_the_database_owes_too_long_is_put_off(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    async with running(pool, conn, settings=ReceiverSettings(wait_seconds=0.2)) as world:
        async with conn.transaction():
            await conn.execute("lock table waypost.inbox in exclusive mode")
            late = await world.post(event(id="late"))
        again = await world.post(event(id="late"))

    assert (late.status, late.headers["retry-after"]) == (503, "1")
    assert again.status == 202
    assert await one(conn, "select count(*) from waypost.inbox") == 1


async def test_an_arrival_during_the_return_of_the_connection_is_not_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.post(event(id="known by now"))
    returning, go_on = asyncio.Event(), asyncio.Event()
    putconn: Callable[[Any], Awaitable[None]] = world.receiver.intake.pool.putconn

    async def slow(conn: Any) -> None:
        returning.set()
        await go_on.wait()
        await putconn(conn)

    monkeypatch.setattr(world.receiver.intake.pool, "putconn", slow)
    await world.post(event(id="first"))
    await returning.wait()
    second = asyncio.create_task(world.post(event(id="second")))
    await until(lambda: len(world.receiver.intake.queue) == 1)
    go_on.set()

    assert (await second).status == 202


async def test_several_writers_may_be_at_work(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    async with running(pool, conn, settings=ReceiverSettings(writers=3, batch_max=5)) as world:
        answers = await together(world, *(world.post(event()) for _ in range(40)))

    assert {answer.status for answer in answers} == {202}
    assert await one(conn, "select count(*) from waypost.inbox") == 40
