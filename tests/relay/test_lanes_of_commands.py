"""Lanes of commands: where an endpoint wants it, commands of one execution or of one key arrive in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import pytest
from psycopg_pool import AsyncConnectionPool

from orchestrator import endpoints
from orchestrator.registry import NotRegistered
from orchestrator.store import commits
from orchestrator.store.terminating import terminate
from relay import outbox
from tests.invariants import broken
from tests.relay import given
from tests.relay.given import Connection
from tests.relay.hostile import Hostile, answers, hostile, in_turn, then
from tests.relay.test_lanes import blocked, event
from tests.relay.test_relay import relay
from tests.store import world
from tests.store.world import Held, Start

Pool = AsyncConnectionPool[Any]
Order = Literal["execution", "key"]

LATER = timedelta(minutes=1)


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


async def wants(conn: Connection, order: Order | None, *, url: str = "http://127.0.0.1:9/") -> None:
    """The endpoint `payments`, which wants its commands so."""
    await given.endpoint(conn, url)
    await endpoints.change(conn, "payments", {"ordered_by": order})


async def held(conn: Connection, key: str | None = None) -> Held:
    [(_, execution)] = await world.start(conn, Start(key=key))
    return await world.claim(conn, await world.worker(conn), execution)


async def asks(
    conn: Connection, holder: Held, *paths: str, at_most_once: bool = False, at: datetime | None = None
) -> list[UUID]:
    """A turn that asks for commands at these paths; their messages."""
    messages = [world.message(path, at_most_once=at_most_once, expires_at=at) for path in paths]
    turn = holder.turn(*(world.asked(path) for path in paths), messages=messages, release=False)
    assert await world.commit(conn, holder, turn)
    holder.position += len(paths)
    return [message.message_id for message in messages]


async def seen(conn: Connection, messages: Sequence[UUID]) -> list[tuple[Any, ...]]:
    """(lane, ordered, state) of each."""
    return [
        (
            await world.rows(
                conn, "select lane, ordered, state from waypost.outbox where message_id = %s", one
            )
        )[0]
        for one in messages
    ]


def ids(server: Hostile) -> list[UUID]:
    """The messages that arrived, in order, retries too."""
    return [UUID(request.headers["webhook-id"]) for request in server.requests]


async def run(pool: Pool, times: int) -> None:
    """As many looks of a relay, one after the other, each a minute later."""
    subject = relay(pool)
    now = datetime.now(UTC)
    for number in range(1, times + 1):
        await subject.run_once(now=now + LATER * number)


@pytest.mark.postgres
async def test_commands_are_in_lanes_only_where_their_endpoint_wants_it(conn: Connection) -> None:
    await given.endpoint(conn, "http://127.0.0.1:9/")

    messages = await asks(conn, await held(conn, "order-7"), "pay", "ship")

    assert await seen(conn, messages) == [("pay", False, "due"), ("ship", False, "due")]
    assert await world.rows(conn, "select * from waypost.lane") == []


@pytest.mark.postgres
async def test_where_no_endpoint_wants_an_order_a_commit_reads_no_endpoint(conn: Connection) -> None:
    await given.endpoint(conn, "http://127.0.0.1:9/")
    holder = await held(conn)

    async with conn.transaction():
        await asks(conn, holder, "pay", "ship")
        read = await world.rows(
            conn,
            "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables where relname = 'endpoint'",
        )

    assert read == [(0,)]


@pytest.mark.postgres
@pytest.mark.parametrize("order", ["execution", "key"])
async def test_only_the_head_of_a_lane_of_commands_is_due(conn: Connection, order: Order) -> None:
    await wants(conn, order)
    holder = await held(conn, "order-7")

    messages = [*await asks(conn, holder, "pay", "ship"), *await asks(conn, holder, "tell")]

    lane = "order-7" if order == "key" else str(holder.execution)
    assert await seen(conn, messages) == [(lane, True, state) for state in ("due", "waiting", "waiting")]


@pytest.mark.postgres
async def test_without_a_key_the_lane_is_that_of_the_execution(conn: Connection) -> None:
    await wants(conn, "key")
    one, other = await held(conn), await held(conn)

    messages = [*await asks(conn, one, "pay"), *await asks(conn, other, "pay")]

    assert await seen(conn, messages) == [(str(it.execution), True, "due") for it in (one, other)]


async def test_a_command_that_is_tried_again_is_not_overtaken(conn: Connection, pool: Pool) -> None:
    async with hostile(in_turn(then(503), then(503), then(204))) as server:
        await wants(conn, "execution", url=server.url)
        first, second, third = await asks(conn, await held(conn), "pay", "ship", "tell")

        await run(pool, 5)

        assert ids(server) == [first, first, first, second, third]


async def test_commands_of_one_key_are_in_the_order_of_their_commits(
    conn: Connection, dsn: str, pool: Pool
) -> None:
    """The second execution waits for the lane before its command gets a number."""
    async with hostile(answers(204)) as server:
        await wants(conn, "key", url=server.url)
        one = await held(conn, "order-7")
        [(_, execution)] = await world.start(conn, Start(key="order-7", definition="invoice"))
        me = await world.worker(conn)
        await conn.execute(
            "update waypost.execution set owner = %s, fence = fence + 1 where execution_id = %s",
            (me, execution),
        )
        other = Held(execution, me, 1, 1, 0, 0, 0)
        async with await Connection.connect(dsn, autocommit=True) as second, conn.transaction():
            first_id = await asks(conn, one, "pay")
            asking = asyncio.create_task(asks(second, other, "bill"))
            async with await Connection.connect(dsn, autocommit=True) as watch:
                await blocked(watch, second)
            third_id = await asks(conn, one, "ship")
        sent = [*first_id, *third_id, *await asking]

        await run(pool, 4)

        assert ids(server) == sent


@pytest.mark.postgres
@pytest.mark.parametrize("end", ["refused", "expired", "dead", "stopped"])
async def test_the_lane_goes_on_however_its_head_ends(conn: Connection, end: str) -> None:
    """The flow was told of it, and went on; so `--on-dead block` is not for commands."""
    await wants(conn, "execution")
    holder = await held(conn)
    over = datetime.now(UTC) - LATER if end == "expired" else None
    [head] = await asks(conn, holder, "pay", at_most_once=end == "dead", at=over)
    behind = await asks(conn, holder, "ship", "tell")

    if end == "expired":
        assert await outbox.expire_due(conn, limit=10) == 1
    else:
        token = await world.claim_message(conn, head)
        if end == "stopped":
            await withdraw(conn, holder, head)
        await world.settle(conn, head, token, "refused" if end == "refused" else "unknown")
    await outbox.advance(conn, limit=10, commands=True)

    assert [state for _, _, state in await seen(conn, [head, *behind])] == [end, "due", "waiting"]


async def withdraw(conn: Connection, holder: Held, *messages: UUID) -> None:
    """A turn of the execution that takes these back."""
    assert await world.commit(
        conn, holder, holder.turn(("withdrawn", "pay", {}), take_back=messages, release=False)
    )
    holder.position += 1


@pytest.mark.postgres
async def test_what_is_taken_back_while_it_waits_in_its_lane_was_never_sent(conn: Connection) -> None:
    await wants(conn, "execution")
    holder = await held(conn)
    head, middle, last = await asks(conn, holder, "pay", "ship", "tell")

    await withdraw(conn, holder, middle)

    assert await world.outbox_mail(conn, holder.execution) == ["refused never-sent"]
    token = await world.claim_message(conn, head)
    await world.settle(conn, head, token, "delivered")
    await outbox.advance(conn, limit=10, commands=True)
    assert [state for _, _, state in await seen(conn, [head, middle, last])] == [
        "delivered",
        "withdrawn",
        "due",
    ]


@pytest.mark.postgres
async def test_what_waits_in_a_lane_never_leaves_when_its_execution_is_terminated(conn: Connection) -> None:
    await wants(conn, "execution")
    holder = await held(conn)
    messages = await asks(conn, holder, "pay", "ship")

    await terminate(conn, str(holder.execution), by="ann", reason="enough", tenant=1, traced=False)

    assert [state for _, _, state in await seen(conn, messages)] == ["withdrawn", "withdrawn"]
    await outbox.advance(conn, limit=10, commands=True)
    assert await world.rows(conn, "select * from waypost.lane") == []


@pytest.mark.postgres
async def test_commands_and_events_of_one_name_are_in_lanes_of_their_own(conn: Connection) -> None:
    await wants(conn, "key")
    holder = await held(conn, "order-7")

    events = [await event(conn, "order-7"), await event(conn, "order-7")]
    commands = await asks(conn, holder, "pay", "ship")

    states = [state for _, _, state in await seen(conn, [*commands, *events])]
    assert states == ["due", "waiting", "due", "waiting"]
    await world.settle(conn, commands[0], await world.claim_message(conn, commands[0]), "delivered")
    assert await outbox.advance(conn, limit=10, commands=False) == 0
    assert await outbox.advance(conn, limit=10, commands=True) == 1
    states = [state for _, _, state in await seen(conn, [*commands, *events])]
    assert states == ["delivered", "due", "due", "waiting"]


async def test_commands_of_a_turn_lock_their_lanes_sorted_whatever_their_order(conn: Connection) -> None:
    """Else two turns that ask the same two endpoints the other way round would lock each other out."""
    for name in ("b", "a"):
        await given.endpoint(conn, "http://127.0.0.1:9/", name=name)
        await endpoints.change(conn, name, {"ordered_by": "key"})
    holder = await held(conn, "order-7")
    messages = [world.message(path, endpoint=name) for path, name in (("x", "b"), ("y", "a"), ("z", "c"))]

    facts = [world.asked(message.path) for message in messages]
    await commits.commit(conn, [holder.turn(*facts, messages=messages)], me=holder.me)

    found = await world.rows(conn, "select endpoint from waypost.lane order by ctid")
    assert found == [("a",), ("b",)]


async def test_an_endpoint_for_events_has_no_order_of_its_own(conn: Connection) -> None:
    await given.endpoint(conn, "http://127.0.0.1:9/")
    await conn.execute("update waypost.endpoint set kind = 'event'")

    with pytest.raises(NotRegistered, match="subscription add"):
        await endpoints.change(conn, "payments", {"ordered_by": "key"})
