"""The view of what is stuck lists what nothing will move, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import UUID, uuid4

import psycopg
import pytest

from orchestrator.store import mutexes, workers
from orchestrator.store.commits import NewMutex
from orchestrator.store.situation import stuck
from tests.store.world import (
    Connection,
    asked,
    asked_mutex,
    begun,
    claim,
    claim_message,
    commit,
    held,
    message,
    order,
    posted,
    reply,
    rows,
    sent,
    settle,
    wait,
    waiting,
    worker,
)

pytestmark = pytest.mark.postgres


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        yield conn


async def listed(conn: Connection) -> list[tuple[UUID, str]]:
    return [(row[0], row[1]) for row in await rows(conn, "select execution_id, because from waypost.stuck")]


async def test_what_is_new_owned_due_or_asleep_is_not_stuck(conn: Connection) -> None:
    await begun(conn)
    holder = await held(conn)
    assert await listed(conn) == []

    [(now,)] = await rows(conn, "select now()")
    assert await commit(conn, holder, holder.turn(due=now + timedelta(days=1)))

    assert await listed(conn) == []


@pytest.mark.parametrize("state", ["due", "sending"])
async def test_a_message_on_its_way_is_a_reason(conn: Connection, state: str) -> None:
    _, pay = await sent(conn)
    if state == "sending":
        assert await claim_message(conn, pay) is not None

    assert await listed(conn) == []


async def test_a_message_that_is_being_taken_back_is_a_reason(conn: Connection) -> None:
    holder = await held(conn)
    pay = message("pay")
    assert await commit(conn, holder, holder.turn(asked("pay"), messages=[pay], release=False))
    token = await claim_message(conn, pay.message_id)
    holder.position += 1
    assert await commit(conn, holder, holder.turn(take_back=[pay.message_id]))
    assert await listed(conn) == []

    await settle(conn, pay.message_id, token, "retry")

    assert await listed(conn) == []


async def test_a_delivered_message_without_a_deadline_is_none(conn: Connection) -> None:
    execution, _ = await sent(conn, state="delivered")

    assert await listed(conn) == [(execution, "no-reason")]


async def test_a_reply_takes_the_message_s_reason_away_and_is_one_itself(conn: Connection) -> None:
    execution, pay = await sent(conn, state="sending")
    await posted(conn, reply("r1", pay))
    assert await listed(conn) == []

    await conn.execute("update waypost.execution set wake_at = null where execution_id = %s", (execution,))

    assert await listed(conn) == [(execution, "lost-wake-up")]


async def test_an_open_wait_for_an_event_is_a_reason_and_a_filled_one_is_not(conn: Connection) -> None:
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn())
    assert await listed(conn) == [(holder.execution, "no-reason")]

    waits = await waiting(conn, wait("w"))
    assert await listed(conn) == [(holder.execution, "no-reason")]

    await conn.execute("update waypost.wait set inbox_id = 1")
    assert set(await listed(conn)) == {(holder.execution, "no-reason"), (waits, "no-reason")}


async def test_who_waits_for_a_mutex_has_a_reason_unless_whoever_has_it_has_ended(conn: Connection) -> None:
    first, second = await held(conn), await held(conn)
    for holder in (first, second):
        turn = holder.turn(asked_mutex("weld/mutex"), mutexes=[NewMutex("weld/mutex", "step", "line-7")])
        assert await commit(conn, holder, turn)
    assert await listed(conn) == []  # nobody has it: a worker gives it

    assert await mutexes.grant(conn, limit=10) == (1, False)
    assert await listed(conn) == []

    await conn.execute(
        "update waypost.execution set status = 'failed', wake_at = null, finished_at = now() where execution_id = %s",
        (first.execution,),
    )
    assert await listed(conn) == [(second.execution, "mutex-stranded")]
    assert await mutexes.grant(conn, limit=10) == (1, False)
    assert await listed(conn) == []


async def test_what_is_held_or_finished_needs_no_reason(conn: Connection) -> None:
    for status in ("held", "paused", "completed"):
        holder = await held(conn)
        assert await commit(conn, holder, holder.turn(status=status))

    assert await listed(conn) == []


async def test_an_order_that_nobody_will_read_is_listed(conn: Connection) -> None:
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn(status="held"))
    await posted(conn, order("o1", holder.execution))
    assert await listed(conn) == []

    await conn.execute("update waypost.execution set wake_at = null")

    assert await listed(conn) == [(holder.execution, "lost-order")]


async def test_an_owner_that_is_gone_for_long_or_unknown_is_listed(conn: Connection) -> None:
    execution = await begun(conn)
    me = await worker(conn)
    await claim(conn, me, execution)
    await workers.retire(conn, me=me)
    assert await listed(conn) == []

    await conn.execute("update waypost.worker set dead_at = now() - interval '6 minutes'")
    assert await listed(conn) == [(execution, "owner-gone")]

    await conn.execute("update waypost.execution set owner = %s", (uuid4(),))
    assert await listed(conn) == [(execution, "owner-gone")]


async def test_all_are_counted_and_some_are_named(conn: Connection) -> None:
    found = sorted([str((await sent(conn, state="delivered"))[0]) for _ in range(3)])

    assert await stuck(conn, limit=2) == (3, found[:2])
