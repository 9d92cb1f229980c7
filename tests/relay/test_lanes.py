"""Lanes: what is in one arrives in the order in which it was made, whatever fails and however many relays there are."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg_pool import AsyncConnectionPool

from orchestrator.outbox import discard, put_back, send_again
from relay import outbox
from relay.delivery import Answer, Delivered
from relay.outbox import Message, Result
from relay.settings import RelaySettings
from tests.relay import given
from tests.relay.given import NEVER, NOON, Connection, Watcher
from tests.relay.hostile import Exchange, answers, hostile, in_turn, response, then
from tests.relay.test_relay import QUICK, relay, running

Pool = AsyncConnectionPool[Any]


async def event(
    conn: Connection,
    lane: str | None = "a",
    *,
    endpoint: str = "payments",
    at: datetime = NOON,
    number: int = 0,
) -> UUID:
    message_id = uuid4()
    body = json.dumps({"id": str(message_id), "type": "t", "lane": lane, "number": number}).encode()
    await conn.execute(
        """
        insert into waypost.outbox (tenant_id, message_id, path, command, endpoint, lane, ordered, body, due_at,
                                    expires_at)
        values (1, %s, '', false, %s, %s, %s, %s, %s, %s)
        """,
        (message_id, endpoint, lane, lane is not None, body, at, NEVER),
    )
    return message_id


async def claim(conn: Connection, *, at: datetime = NOON, limit: int = 100) -> list[Message]:
    return await outbox.claim(
        conn,
        token=uuid4(),
        limit=limit,
        room=100,
        busy={},
        timeout_max=timedelta(minutes=5),
        margin=timedelta(seconds=10),
        now=at,
    )


async def states(conn: Connection, *messages: UUID) -> list[str]:
    return [(await given.row(conn, message))["state"] for message in messages]


async def lanes(conn: Connection) -> list[UUID]:
    """The heads of all lanes."""
    cursor = await conn.execute("select head from waypost.lane order by lane")
    return [head for (head,) in await cursor.fetchall()]


@pytest.mark.postgres
async def test_only_the_head_of_a_lane_is_claimed(conn: Connection) -> None:
    first, second = await event(conn), await event(conn)
    other, free = await event(conn, "b"), await event(conn, None)

    taken = {message.message_id for message in await claim(conn)}

    assert taken == {first, other, free}
    assert await states(conn, second) == ["waiting"]
    assert await claim(conn, at=NOON + timedelta(days=1)) == []


@pytest.mark.postgres
async def test_a_claim_does_not_look_at_what_waits_in_lanes(conn: Connection) -> None:
    await conn.execute("alter table waypost.outbox set (autovacuum_enabled = off)")
    await conn.execute("vacuum analyze waypost.outbox")
    for _ in range(12):
        await claim(conn)
    await event(conn)
    await conn.execute(
        """
        insert into waypost.outbox (tenant_id, message_id, path, command, endpoint, lane, ordered, body, state, due_at)
        select 1, gen_random_uuid(), '', false, 'payments', 'a', true, '', 'waiting', %s
          from generate_series(1, 10000)
        """,
        (NOON,),
    )

    async with conn.transaction():
        taken = await claim(conn, limit=10)
        await outbox.deliver(conn, [Result(taken[0], Answer(status=204, reached=True), Delivered(), NOON)])
        await outbox.advance(conn, commands=False, limit=10, now=NOON)
        again = await claim(conn, limit=10)
        cursor = await conn.execute(
            "select seq_tup_read, idx_tup_fetch from pg_stat_xact_user_tables where relname = 'outbox'"
        )
        read = await cursor.fetchone()

    assert (len(taken), len(again)) == (1, 1)
    assert read is not None
    assert read[0] == 0
    assert read[1] < 100


@pytest.mark.postgres
async def test_numbers_of_a_lane_grow_in_the_order_of_commits(conn: Connection, dsn: str) -> None:
    """The second waits for the lane before it gets a number, so it cannot commit first with a smaller one."""
    async with await Connection.connect(dsn, autocommit=True) as other, conn.transaction():
        first = await event(conn)
        second = asyncio.create_task(event(other))
        async with await Connection.connect(dsn, autocommit=True) as watch:
            await blocked(watch, other)
        third = await event(conn)
    async with await Connection.connect(dsn, autocommit=True) as conn2:
        cursor = await conn2.execute("select message_id from waypost.outbox order by number")
        found = [message for (message,) in await cursor.fetchall()]

    assert found == [first, third, await second]


async def blocked(watch: Connection, other: Connection) -> None:
    async with asyncio.timeout(given.PATIENCE):
        while True:
            cursor = await watch.execute("select pg_blocking_pids(%s)", (other.info.backend_pid,))
            if (await cursor.fetchone() or ([],))[0]:
                return


@pytest.mark.postgres
async def test_a_transaction_that_is_rolled_back_leaves_no_head(conn: Connection) -> None:
    with pytest.raises(ZeroDivisionError):
        async with conn.transaction():
            await event(conn)
            raise ZeroDivisionError

    assert await lanes(conn) == []
    assert await states(conn, await event(conn)) == ["due"]


async def test_a_retry_is_not_overtaken(conn: Connection, pool: Pool) -> None:
    async with hostile(in_turn(then(500), then(500), then(204))) as server:
        await given.endpoint(conn, server.url)
        first, second, third = [await event(conn, number=n) for n in range(3)]
        subject = relay(pool)
        now = NOON
        for _ in range(5):
            await subject.run_once(now=now)
            now += timedelta(hours=5)

        got = [json.loads(request.body)["number"] for request in server.requests]
        assert got == [0, 0, 0, 1, 2]
        assert await states(conn, first, second, third) == ["delivered"] * 3
        await subject.run_once(now=now)
        assert await lanes(conn) == []


async def test_the_next_goes_at_once_and_not_with_the_next_look(conn: Connection, pool: Pool) -> None:
    watcher = Watcher()
    settings = replace(QUICK, poll=timedelta(hours=1), sweep=timedelta(hours=1))
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        messages = [await event(conn, number=n) for n in range(10)]

        async with running(pool, watcher, settings=settings):
            for message in messages:
                await watcher.until("message.tried", message=message, outcome="delivered")

        assert [json.loads(request.body)["number"] for request in server.requests] == [*range(10)]


async def test_order_holds_under_four_relays_whose_endpoint_fails_at_random(
    conn: Connection, dsn: str
) -> None:
    """Each lane's messages arrive in order, and none is sent while another of its lane is under way."""
    under_way: set[str] = set()
    got: dict[str, list[int]] = {}
    wrong: list[str] = []

    async def behave(exchange: Exchange) -> None:
        for count in range(1_000):
            said = json.loads((await exchange.read()).body)
            lane = said["lane"]
            if lane in under_way:
                wrong.append(f"{lane}: two at once")
            under_way.add(lane)
            await asyncio.sleep(0)
            under_way.discard(lane)
            fails = (said["number"] * 7 + count + len(exchange.server.requests)) % 5 == 0
            if not fails:
                got.setdefault(lane, []).append(said["number"])
            await exchange.write(response(503 if fails else 204))

    watcher = Watcher()
    quick = RelaySettings(
        allow=QUICK.allow, poll=timedelta(milliseconds=20), sweep=timedelta(milliseconds=50), batch=7
    )
    async with hostile(behave) as server:
        await given.endpoint(conn, server.url)
        await conn.execute(
            "update waypost.endpoint set schedule = '{\"delays\": [0.01]}', disable_after = null"
        )
        messages = [await event(conn, lane, number=n) for n in range(12) for lane in "abcde"]
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                pool = AsyncConnectionPool[Any](
                    dsn, min_size=1, max_size=4, open=False, kwargs={"autocommit": True}
                )
                await stack.enter_async_context(pool)
                await stack.enter_async_context(running(pool, watcher, settings=quick))
            for message in messages:
                await watcher.until("message.tried", message=message, outcome="delivered")

    assert wrong == []
    assert got == {lane: [*range(12)] for lane in "abcde"}


@pytest.mark.parametrize("policy", ["block", "skip"])
async def test_a_dead_letter_stops_its_lane_or_is_skipped(conn: Connection, pool: Pool, policy: str) -> None:
    async with hostile(in_turn(then(500), then(204))) as server:
        await given.endpoint(conn, server.url)
        await conn.execute(
            'update waypost.endpoint set schedule = \'{"delays": [1], "attempts": 1}\', on_dead = %s',
            (policy,),
        )
        first, second = await event(conn, number=0), await event(conn, number=1)
        other = await event(conn, "b", number=2, at=NOON + timedelta(seconds=1))
        subject = relay(pool)

        for seconds in range(4):
            await subject.run_once(now=NOON + timedelta(seconds=seconds))

        assert await states(conn, first, second, other) == [
            "dead",
            "waiting" if policy == "block" else "delivered",
            "delivered",
        ]


async def stopped(conn: Connection, count: int = 3) -> list[UUID]:
    """A lane whose head is a dead letter."""
    messages = [await event(conn, number=n) for n in range(count)]
    await conn.execute(
        "update waypost.outbox set state = 'dead', attempts = 1 where message_id = %s", (messages[0],)
    )
    await outbox.advance(conn, commands=False, limit=10, now=NOON)
    assert await states(conn, *messages) == ["dead", *["waiting"] * (count - 1)]
    return messages


async def delivered(conn: Connection, pool: Pool) -> list[int]:
    """What arrives, in order, when all that may go is sent."""
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        subject = relay(pool)
        while await subject.run_once(now=NOON + timedelta(days=4000)):
            pass
        return [json.loads(request.body)["number"] for request in server.requests]


async def test_what_is_put_back_goes_before_what_waits_behind_it(conn: Connection, pool: Pool) -> None:
    first, *_ = await stopped(conn)

    assert await put_back(conn, [first]) == [str(first)]
    assert await put_back(conn, [first]) == []

    assert await delivered(conn, pool) == [0, 1, 2]


async def test_dead_letters_of_a_lane_are_put_back_in_their_order(conn: Connection, pool: Pool) -> None:
    messages = [await event(conn, number=n) for n in range(4)]
    for message in messages:
        await conn.execute("update waypost.outbox set state = 'dead' where message_id = %s", (message,))
    await conn.execute("delete from waypost.lane")

    assert await put_back(conn, [messages[n] for n in (2, 0, 3, 1)]) == [str(message) for message in messages]

    assert await states(conn, *messages) == ["due", "waiting", "waiting", "waiting"]
    assert await delivered(conn, pool) == [0, 1, 2, 3]


async def test_what_is_sent_again_goes_before_what_waits_and_behind_what_is_under_way(
    conn: Connection, pool: Pool
) -> None:
    messages = [await event(conn, number=n) for n in range(4)]
    for message in messages[:2]:
        await conn.execute("update waypost.outbox set state = 'delivered' where message_id = %s", (message,))
        await outbox.advance(conn, commands=False, limit=10, now=NOON)
    assert await states(conn, *messages) == ["delivered", "delivered", "due", "waiting"]

    assert await send_again(conn, messages) == [str(message) for message in messages[:2]]

    assert await states(conn, *messages) == ["waiting", "waiting", "due", "waiting"]
    assert await delivered(conn, pool) == [2, 0, 1, 3]


async def test_what_is_discarded_lets_its_lane_go_on(conn: Connection, pool: Pool) -> None:
    first, *_ = await stopped(conn)

    assert await discard(conn, [first]) == [str(first)]

    assert await delivered(conn, pool) == [1, 2]


async def test_a_message_that_was_there_already_does_not_stop_its_lane(conn: Connection, pool: Pool) -> None:
    """An insert that does nothing has opened the lane for a message that has long arrived."""
    message = await event(conn, number=0)
    assert await delivered(conn, pool) == [0]
    await outbox.advance(conn, commands=False, limit=10)

    await conn.execute(
        """
        insert into waypost.outbox (tenant_id, message_id, path, command, endpoint, lane, ordered, body)
        values (1, %s, '', false, 'payments', 'a', true, '') on conflict do nothing
        """,
        (message,),
    )
    await outbox.advance(conn, commands=False, limit=10)

    assert await lanes(conn) == []
    assert await states(conn, await event(conn)) == ["due"]


async def test_a_relay_that_dies_after_it_settled_leaves_no_lane_behind(conn: Connection, pool: Pool) -> None:
    """What is left of it is a row that says where to look."""
    first, second = await event(conn, number=0), await event(conn, number=1)
    await conn.execute("update waypost.outbox set state = 'delivered' where message_id = %s", (first,))
    assert await states(conn, second) == ["waiting"]

    assert await delivered(conn, pool) == [1]
