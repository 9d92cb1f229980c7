"""Two transactions at once: the second is seen to wait, and finds under the lock what is true by then.

Each pair runs in both orders. What may come of it is written beside it, and every invariant holds afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from orchestrator.store import commits, workers
from tests.invariants import broken
from tests.store.world import (
    Connection,
    Held,
    Start,
    asked,
    begun,
    claim,
    claim_all,
    claim_message,
    commit,
    event,
    expire_claims,
    held,
    is_due,
    journal_of,
    mail_of,
    message,
    order,
    posted,
    race,
    reply,
    rows,
    run,
    sent,
    settle,
    start,
    state_of,
    wait,
    waiting,
    worker,
)

pytestmark = pytest.mark.postgres

BOTH = pytest.mark.parametrize("reverse", [False, True], ids=["as named", "reversed"])


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


async def held_with_message(conn: Connection) -> tuple[Held, UUID]:
    """An execution in a worker's hands, whose message is on its way."""
    holder = await held(conn)
    new = message("pay")
    assert await commit(conn, holder, holder.turn(asked("pay"), messages=[new], release=False))
    holder.position += 1
    return holder, new.message_id


@BOTH
async def test_a_reply_and_a_release_lose_no_wake_up(conn: Connection, dsn: str, *, reverse: bool) -> None:
    holder, message_id = await held_with_message(conn)

    [got], matched = await run(
        dsn,
        lambda c: posted(c, reply("r1", message_id)),
        lambda c: commit(c, holder, holder.turn()),
        reverse=reverse,
    )

    assert (got.outcome, matched) == ("stored", True)
    assert await is_due(conn, holder.execution)


@BOTH
async def test_a_reply_and_a_timeout_are_decided_by_the_row(
    conn: Connection, dsn: str, *, reverse: bool
) -> None:
    """A turn that fires a timeout carries guard: it does not commit over a reply that it has not read."""
    holder, message_id = await held_with_message(conn)
    timeout = holder.turn(("ended", "pay", {"outcome": "timed_out"}), guard=0)

    [got], matched = await run(
        dsn,
        lambda c: posted(c, reply("r1", message_id)),
        lambda c: commit(c, holder, timeout),
        reverse=reverse,
    )

    assert got.outcome == "stored"
    assert matched == reverse, "the timeout stands only if it was first"
    assert await is_due(conn, holder.execution) == reverse


@BOTH
async def test_a_release_to_paused_and_an_order_lose_no_order(
    conn: Connection, dsn: str, *, reverse: bool
) -> None:
    holder = await held(conn)

    _, matched = await run(
        dsn,
        lambda c: posted(c, order("o1", holder.execution)),
        lambda c: commit(c, holder, holder.turn(status="paused")),
        reverse=reverse,
    )

    assert matched
    assert await is_due(conn, holder.execution)


@BOTH
async def test_nothing_is_asked_after_an_order_that_was_acknowledged(
    conn: Connection, dsn: str, *, reverse: bool
) -> None:
    holder = await held(conn)
    asks = holder.turn(asked("pay"), messages=[message("pay")], asks=True)

    _, matched = await run(
        dsn,
        lambda c: posted(c, order("o1", holder.execution)),
        lambda c: commit(c, holder, asks),
        reverse=reverse,
    )

    assert matched == reverse
    assert len(await rows(conn, "select * from waypost.outbox")) == int(reverse)


@pytest.mark.parametrize(
    ("other", "outcome"),
    [({}, "duplicate"), ({"digest": b"\1" * 32}, "conflict")],
    ids=["same body", "another body"],
)
async def test_two_arrivals_of_one_reply_are_one_mail(
    conn: Connection, dsn: str, other: dict[str, Any], outcome: str
) -> None:
    execution, message_id = await sent(conn)
    one = reply("r1", message_id)

    [first], [second] = await run(
        dsn, lambda c: posted(c, one), lambda c: posted(c, replace(one, **other)), reverse=False
    )

    assert (first.outcome, second.outcome) == ("stored", outcome)
    assert second.inbox_id == first.inbox_id
    assert second.answer == "mail"
    assert await mail_of(conn, execution) == ["reply r1"]


async def test_two_arrivals_under_one_webhook_id_are_one_event(conn: Connection, dsn: str) -> None:
    [first], [second] = await run(
        dsn,
        lambda c: posted(c, event("e1", webhook_id="w1")),
        lambda c: posted(c, event("e2", webhook_id="w1")),
        reverse=False,
    )

    assert (first.outcome, second.outcome) == ("stored", "duplicate")
    assert await rows(conn, "select event_id from waypost.inbox") == [("e1",)]


async def test_a_duplicate_of_what_was_rolled_back_is_the_first(conn: Connection, dsn: str) -> None:
    execution, message_id = await sent(conn)

    [first], [second] = await race(
        dsn,
        lambda c: posted(c, reply("r1", message_id)),
        lambda c: posted(c, reply("r1", message_id)),
        roll_back=True,
    )

    assert (first.outcome, second.outcome) == ("stored", "stored")
    assert await mail_of(conn, execution) == ["reply r1"]


@BOTH
async def test_batches_that_cross_do_not_deadlock(conn: Connection, dsn: str, *, reverse: bool) -> None:
    """Replies to two executions and events of two keys, in opposite orders."""
    one, to_one = await sent(conn)
    other, to_other = await sent(conn)
    items = [reply("r1", to_one), event("e2", key="b"), reply("r2", to_other), event("e1", key="a")]

    first, second = await run(
        dsn, lambda c: posted(c, *items), lambda c: posted(c, *reversed(items)), reverse=reverse
    )

    assert {got.outcome for got in (first if not reverse else second)} == {"stored"}
    assert {got.outcome for got in (second if not reverse else first)} == {"duplicate"}
    assert [await mail_of(conn, one), await mail_of(conn, other)] == [["reply r1"], ["reply r2"]]


@BOTH
async def test_an_event_goes_to_a_wait_once_whatever_came_first(
    conn: Connection, dsn: str, *, reverse: bool
) -> None:
    """Two events of one key, and one open wait: it is filled by one, and the other stays on the shelf."""
    execution = await waiting(conn, wait("a"))

    await run(dsn, lambda c: posted(c, event("e1")), lambda c: posted(c, event("e2")), reverse=reverse)

    first = "e2" if reverse else "e1"
    assert await mail_of(conn, execution) == [f"event {first}"]
    assert await rows(conn, "select event_id from waypost.inbox where not taken") == [
        ("e1" if reverse else "e2",)
    ]


@BOTH
async def test_taking_back_and_a_delivery_agree(conn: Connection, dsn: str, *, reverse: bool) -> None:
    holder, message_id = await held_with_message(conn)
    token = await claim_message(conn, message_id)
    back = holder.turn(("withdrawn", "pay", {}), take_back=[message_id])

    state, matched = await run(
        dsn,
        lambda c: settle(c, message_id, token, "delivered"),
        lambda c: commit(c, holder, back),
        reverse=reverse,
    )

    assert (state, matched) == ("delivered", True)
    assert await state_of(conn, message_id) == "delivered"
    assert await mail_of(conn, holder.execution) == ["unknown sent"]


@pytest.mark.parametrize(
    ("reached", "state", "mail"),
    [
        (True, "stopped", "unknown sent"),
        (False, "withdrawn", "refused never-sent"),
    ],
)
@BOTH
async def test_taking_back_and_a_try_that_failed_agree(
    conn: Connection, dsn: str, *, reverse: bool, reached: bool, state: str, mail: str
) -> None:
    """Whoever was first, the message is not sent again, and its execution learns once what is known."""
    holder, message_id = await held_with_message(conn)
    token = await claim_message(conn, message_id)
    back = holder.turn(("withdrawn", "pay", {}), take_back=[message_id])

    await run(
        dsn,
        lambda c: settle(c, message_id, token, "retry", reached=reached),
        lambda c: commit(c, holder, back),
        reverse=reverse,
    )

    assert await state_of(conn, message_id) == state
    assert await mail_of(conn, holder.execution) == [mail]
    assert await claim_message(conn, message_id) is None


@BOTH
async def test_taking_back_and_a_refusal_agree(conn: Connection, dsn: str, *, reverse: bool) -> None:
    holder, message_id = await held_with_message(conn)
    token = await claim_message(conn, message_id)
    back = holder.turn(("withdrawn", "pay", {}), take_back=[message_id])

    await run(
        dsn,
        lambda c: settle(c, message_id, token, "refused"),
        lambda c: commit(c, holder, back),
        reverse=reverse,
    )

    assert await state_of(conn, message_id) == "refused"
    assert await mail_of(conn, holder.execution) == ["refused no"]


async def test_a_message_that_is_being_claimed_is_taken_back_as_being_sent(
    conn: Connection, dsn: str
) -> None:
    holder, message_id = await held_with_message(conn)
    back = holder.turn(("withdrawn", "pay", {}), take_back=[message_id])

    await run(dsn, lambda c: claim_message(c, message_id), lambda c: commit(c, holder, back), reverse=False)

    assert await state_of(conn, message_id) == "stopping"
    assert await mail_of(conn, holder.execution) == []


async def test_a_claim_does_not_wait_for_who_takes_back(conn: Connection, dsn: str) -> None:
    holder, message_id = await held_with_message(conn)
    back = holder.turn(("withdrawn", "pay", {}), take_back=[message_id])

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other, other.transaction():
        assert await commit(other, holder, back)
        assert await claim_message(conn, message_id) is None

    assert await state_of(conn, message_id) == "withdrawn"


@BOTH
async def test_a_reply_and_a_refusal_of_its_message_agree(
    conn: Connection, dsn: str, *, reverse: bool
) -> None:
    execution, message_id = await sent(conn)
    token = await claim_message(conn, message_id)

    [got], state = await run(
        dsn,
        lambda c: posted(c, reply("r1", message_id)),
        lambda c: settle(c, message_id, token, "refused"),
        reverse=reverse,
    )

    assert got.outcome == "stored"
    assert state == ("refused" if reverse else "delivered")
    assert await mail_of(conn, execution) == (["refused no", "reply r1"] if reverse else ["reply r1"])


@BOTH
async def test_a_reply_and_a_claim_that_expires_agree(conn: Connection, dsn: str, *, reverse: bool) -> None:
    execution, message_id = await sent(conn, at_most_once=True)
    await claim_message(conn, message_id, lease=timedelta(seconds=-1))

    await run(dsn, lambda c: posted(c, reply("r1", message_id)), expire_claims, reverse=reverse)

    assert await state_of(conn, message_id) == ("dead" if reverse else "delivered")
    assert await mail_of(conn, execution) == (["unknown sent", "reply r1"] if reverse else ["reply r1"])


@BOTH
async def test_a_settlement_and_the_expiry_of_its_claim_count_once(
    conn: Connection, dsn: str, *, reverse: bool
) -> None:
    execution, message_id = await sent(conn)
    token = await claim_message(conn, message_id, lease=timedelta(seconds=-1))

    state, expired = await run(
        dsn, lambda c: settle(c, message_id, token, "refused"), expire_claims, reverse=reverse
    )

    assert (state, expired) == ((None, 1) if reverse else ("refused", 0))
    assert await state_of(conn, message_id) == ("due" if reverse else "refused")
    assert await mail_of(conn, execution) == ([] if reverse else ["refused no"])


async def test_two_relays_expire_a_claim_once(conn: Connection, dsn: str) -> None:
    execution, message_id = await sent(conn, at_most_once=True)
    await claim_message(conn, message_id, lease=timedelta(seconds=-1))

    assert await run(dsn, expire_claims, expire_claims, reverse=False) == (1, 0)

    assert await mail_of(conn, execution) == ["unknown sent"]


async def buried(conn: Connection) -> tuple[Held, UUID]:
    holder, message_id = await held_with_message(conn)
    await workers.retire(conn, me=holder.me)
    return holder, message_id


async def test_a_stale_commit_waits_for_the_takeover_and_writes_nothing(conn: Connection, dsn: str) -> None:
    holder, message_id = await buried(conn)
    turn = holder.turn(("ended", "a", {}), take_back=[message_id])

    taken, matched = await run(
        dsn, lambda c: workers.take_over(c, limit=10), lambda c: commit(c, holder, turn), reverse=False
    )

    assert taken == [str(holder.execution)]
    assert not matched
    assert await journal_of(conn, holder.execution) == ["started", "asked", "orphaned"]
    assert await state_of(conn, message_id) == "due"


async def test_a_takeover_skips_what_is_being_committed_and_takes_it_later(
    conn: Connection, dsn: str
) -> None:
    holder, _ = await buried(conn)

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other, other.transaction():
        assert await commit(other, holder, holder.turn(release=False))
        assert await workers.take_over(conn, limit=10) == []

    assert await workers.take_over(conn, limit=10) == [str(holder.execution)]
    assert await journal_of(conn, holder.execution) == ["started", "asked", "ended", "orphaned"]


async def test_a_takeover_and_mail_agree(conn: Connection, dsn: str) -> None:
    holder, message_id = await buried(conn)

    taken, [got] = await run(
        dsn,
        lambda c: workers.take_over(c, limit=10),
        lambda c: posted(c, reply("r1", message_id)),
        reverse=False,
    )

    assert (taken, got.outcome) == ([str(holder.execution)], "stored")
    assert await is_due(conn, holder.execution)


async def test_two_workers_claim_nothing_twice(conn: Connection, dsn: str) -> None:
    """Claims skip what another has locked, and never wait."""
    execution, later = await begun(conn), await begun(conn)
    one, other = await worker(conn), await worker(conn)

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as c, c.transaction():
        await c.execute("select 1 from waypost.execution where execution_id = %s for update", (execution,))
        assert (await claim(conn, one, later)).execution == later
        assert await claim_all(conn, other) == []

    assert (await claim(conn, other, execution)).execution == execution


@pytest.mark.parametrize(("again", "outcome"), [(1, "exists"), (2, "conflict")], ids=["same", "other input"])
async def test_two_starts_of_one_key_are_one_execution(
    conn: Connection, dsn: str, again: int, outcome: str
) -> None:
    [(first, created)], [(second, found)] = await run(
        dsn,
        lambda c: start(c, Start(key="order-1", input=1)),
        lambda c: start(c, Start(key="order-1", input=again)),
        reverse=False,
    )

    assert (first, second) == ("started", outcome)
    assert created == found
    assert await rows(conn, "select count(*) from waypost.execution") == [(1,)]


async def test_starts_that_cross_do_not_deadlock(conn: Connection, dsn: str) -> None:
    first, second = await run(
        dsn,
        lambda c: start(c, Start(key="a"), Start(key="b")),
        lambda c: start(c, Start(key="b"), Start(key="a")),
        reverse=False,
    )

    assert [outcome for outcome, _ in first] == ["started", "started"]
    assert [outcome for outcome, _ in second] == ["exists", "exists"]


async def test_turns_that_cross_do_not_deadlock(conn: Connection, dsn: str) -> None:
    """Two executions: one transaction commits both, the other mails both in the opposite order."""
    one, to_one = await held_with_message(conn)
    other, to_other = await held_with_message(conn)
    await conn.execute("update waypost.execution set owner = %s", (one.me,))
    turns = [other.turn(), one.turn()]

    matched, got = await run(
        dsn,
        lambda c: commits.commit(c, turns, me=one.me),
        lambda c: posted(c, reply("r1", to_one), reply("r2", to_other)),
        reverse=False,
    )

    assert set(matched) == {str(one.execution), str(other.execution)}
    assert [post.outcome for post in got] == ["stored", "stored"]
    assert await is_due(conn, one.execution)
    assert await is_due(conn, other.execution)


async def test_a_storm_of_everything_at_once_holds_every_invariant(conn: Connection, dsn: str) -> None:
    """Ten executions: replies, orders, settlements, expiries and turns that take back, at the same time."""
    world = [await held_with_message(conn) for _ in range(10)]
    tokens = [await claim_message(conn, message_id) for _, message_id in world]
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as one,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as third,
    ):

        async def replies() -> None:
            await posted(one, *(reply(f"r{n}", m) for n, (_, m) in enumerate(world)))
            await posted(one, *(order(f"o{n}", h.execution) for n, (h, _) in enumerate(reversed(world))))

        async def turns() -> None:
            for holder, message_id in reversed(world):
                await commit(other, holder, holder.turn(("withdrawn", "pay", {}), take_back=[message_id]))

        async def relay() -> None:
            for (_, message_id), token in zip(world, tokens, strict=True):
                await settle(third, message_id, token, "retry")
            await expire_claims(third)

        await asyncio.gather(replies(), turns(), relay())

    for holder, message_id in world:
        assert await is_due(conn, holder.execution)
        assert await state_of(conn, message_id) in {"delivered", "stopped"}
