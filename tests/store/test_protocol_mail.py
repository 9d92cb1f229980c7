"""`post_mail`: what is stored, who gets it, and whom it wakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from receiver.inbox import MailItem
from tests.invariants import broken
from tests.store.world import (
    NOON,
    Connection,
    Start,
    begun,
    claim,
    commit,
    event,
    held,
    is_due,
    mail_of,
    order,
    posted,
    reply,
    rows,
    sent,
    settle,
    start,
    state_of,
    wait,
    waiting,
    waits_of,
    worker,
)

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


async def test_a_reply_reaches_the_execution_that_sent_the_message_and_wakes_it(conn: Connection) -> None:
    execution, message = await sent(conn, state="sending")
    assert not await is_due(conn, execution)

    [got] = await posted(conn, reply("r1", message, body=b"as it came"))

    assert (got.outcome, got.answer) == ("stored", "mail")
    assert await mail_of(conn, execution) == ["reply r1"]
    assert await is_due(conn, execution)
    assert await rows(
        conn,
        "select m.mail_number, m.epoch, m.path, i.body, i.data->>'outcome'"
        "  from waypost.mail m join waypost.inbox i using (inbox_id)",
    ) == [(1, 0, "pay", b"as it came", "done")]


async def test_a_duplicate_gets_the_first_answer_and_changes_nothing(conn: Connection) -> None:
    execution, message = await sent(conn)
    [first] = await posted(conn, reply("r1", message))
    before = await rows(conn, "select xmin, * from waypost.execution")

    [again] = await posted(conn, reply("r1", message))

    assert (again.outcome, again.answer, again.inbox_id) == ("duplicate", "mail", first.inbox_id)
    assert await mail_of(conn, execution) == ["reply r1"]
    assert await rows(conn, "select xmin, * from waypost.execution") == before


@pytest.mark.parametrize(
    "other",
    [
        {"event_id": "e1", "webhook_id": None},
        {"event_id": "e1", "webhook_id": "w2"},
        {"event_id": "e2", "webhook_id": "w1"},
    ],
    ids=["same id", "same id, other webhook id", "same webhook id"],
)
async def test_another_body_under_a_known_identity_is_a_conflict(
    conn: Connection, other: dict[str, Any]
) -> None:
    await posted(conn, event("e1", webhook_id="w1"))

    [got] = await posted(conn, replace(event("e1", data='{"n": 2}'), **other))

    assert got.outcome == "conflict"
    assert await rows(conn, "select event_id, data->>'n' from waypost.inbox") == [("e1", None)]


async def test_a_webhook_id_names_a_repetition_too(conn: Connection) -> None:
    await posted(conn, event("e1", webhook_id="w1"))

    [got] = await posted(conn, event("e2", webhook_id="w1"))

    assert (got.outcome, got.answer) == ("duplicate", "event")


async def test_the_second_of_two_equal_items_in_one_batch_is_a_duplicate(conn: Connection) -> None:
    execution, message = await sent(conn)

    got = await posted(
        conn,
        reply("r1", message),
        reply("r1", message),
        reply("r1", message, data='{"outcome": "failed"}'),
        event("e1"),
    )

    assert [one.outcome for one in got] == ["stored", "duplicate", "conflict", "stored"]
    assert await mail_of(conn, execution) == ["reply r1"]


async def test_a_reply_to_nothing_of_ours_is_kept_as_unmatched(conn: Connection) -> None:
    [got] = await posted(conn, reply("r1", uuid4()))

    assert (got.outcome, got.answer) == ("stored", "unmatched")
    assert await rows(conn, "select kind, answer from waypost.inbox") == [("reply", "unmatched")]


async def test_senders_sources_and_tenants_keep_their_ids_apart(conn: Connection) -> None:
    await conn.execute("insert into waypost.tenant (tenant_id, name) values (2, 'other')")
    items = [event("e1"), event("e1", sender="bank"), event("e1", source="/else"), event("e1", tenant=2)]

    got = await posted(conn, *items)

    assert [one.outcome for one in got] == ["stored"] * 4


async def test_a_reply_does_not_cross_tenants(conn: Connection) -> None:
    execution, message = await sent(conn)

    [got] = await posted(conn, reply("r1", message, tenant=2))

    assert got.answer == "unmatched"
    assert await mail_of(conn, execution) == []


async def test_an_event_that_nobody_waits_for_goes_on_the_shelf(conn: Connection) -> None:
    [got] = await posted(conn, event("e1"), now=NOON)

    assert (got.outcome, got.answer) == ("stored", "event")
    assert await rows(conn, "select taken, shelf_until, received_at from waypost.inbox") == [
        (False, NOON + timedelta(days=7), NOON)
    ]


async def test_an_event_fills_the_oldest_open_wait_of_each_execution(conn: Connection) -> None:
    one = await waiting(conn, wait("a"), wait("b"))
    other = await waiting(conn, wait("c"))
    elsewhere = await waiting(conn, wait("d", key="another"))

    await posted(conn, event("e1"))

    assert await waits_of(conn, one) == [("a", "e1"), ("b", None)]
    assert await waits_of(conn, other) == [("c", "e1")]
    assert await waits_of(conn, elsewhere) == [("d", None)]
    assert [await mail_of(conn, which) for which in (one, other, elsewhere)] == [
        ["event e1"],
        ["event e1"],
        [],
    ]


async def test_events_of_one_batch_fill_waits_in_their_order_and_the_rest_stays_on_the_shelf(
    conn: Connection,
) -> None:
    one = await waiting(conn, wait("a"), wait("b"))
    other = await waiting(conn, wait("c"))

    await posted(conn, event("e1"), event("e2"), event("e3"))

    assert await waits_of(conn, one) == [("a", "e1"), ("b", "e2")]
    assert await waits_of(conn, other) == [("c", "e1")]
    assert await rows(conn, "select event_id, taken from waypost.inbox order by inbox_id") == [
        ("e1", True),
        ("e2", True),
        ("e3", False),
    ]
    # Both keep an event on the shelf that the next wait will find; these two wait no more.
    await conn.execute(
        "update waypost.execution set events_after = (select max(inbox_id) from waypost.inbox)"
    )


async def test_a_filled_wait_gets_no_second_event(conn: Connection) -> None:
    execution = await waiting(conn, wait("a"))
    await posted(conn, event("e1"))

    await posted(conn, event("e2"))

    assert await mail_of(conn, execution) == ["event e1"]


async def test_mail_numbers_have_no_gap(conn: Connection) -> None:
    execution, message = await sent(conn)

    await posted(conn, order("o1", execution), reply("r1", message), order("o2", execution))
    await posted(conn, reply("r1", message), order("o3", execution))

    assert await rows(conn, "select mail_number from waypost.mail order by 1") == [(1,), (2,), (3,), (4,)]
    assert await mail_of(conn, execution) == ["reply r1", "order o1", "order o2", "order o3"]
    assert await rows(conn, "select mail_received, orders_received from waypost.execution") == [(4, 3)]


@pytest.mark.parametrize("status", ["paused", "held"])
async def test_only_an_order_wakes_who_is_paused_or_held(conn: Connection, status: str) -> None:
    holder = await held(conn)
    execution = holder.execution
    assert await commit(conn, holder, holder.turn(status=status, waits=[wait("a")]))

    await posted(conn, event("e1"))
    assert not await is_due(conn, execution)

    await posted(conn, order("o1", execution))
    assert await is_due(conn, execution)
    assert await mail_of(conn, execution) == ["event e1", "order o1"]


async def test_mail_for_who_has_finished_is_counted_and_wakes_nobody(conn: Connection) -> None:
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn(("finished", "", {}), status="completed"))

    [got] = await posted(conn, order("o1", holder.execution))

    assert got.answer == "mail"
    assert await rows(conn, "select status, mail_received, wake_at from waypost.execution") == [
        ("completed", 1, None)
    ]


async def test_mail_for_an_owned_execution_leaves_it_to_its_owner(conn: Connection) -> None:
    holder = await held(conn)

    await posted(conn, order("o1", holder.execution))

    [(owner,)] = await rows(conn, "select owner::text from waypost.execution")
    assert owner == holder.me


async def test_mail_never_wakes_later_than_was_due(conn: Connection) -> None:
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn(due=NOON))

    await posted(conn, order("o1", holder.execution), now=NOON + timedelta(hours=1))

    assert await rows(conn, "select wake_at from waypost.execution") == [(NOON,)]


@pytest.mark.parametrize(
    ("state", "then"), [("due", "delivered"), ("expired", "delivered"), ("sending", "sending")]
)
async def test_a_reply_ends_its_message(conn: Connection, state: Any, then: str) -> None:
    execution, message = await sent(conn, state=state)

    await posted(conn, reply("r1", message))

    assert await state_of(conn, message) == then
    assert await rows(conn, "select replied from waypost.outbox") == [(True,)]
    assert await mail_of(conn, execution) == ["reply r1"]


async def test_a_try_that_ends_after_the_reply_says_nothing_more(conn: Connection) -> None:
    execution, message = await sent(conn, state="sending")
    [(token,)] = await rows(conn, "select token from waypost.outbox")
    await posted(conn, reply("r1", message))

    assert await settle(conn, message, token, "refused") == "delivered"

    assert await mail_of(conn, execution) == ["reply r1"]


@pytest.mark.parametrize(
    ("sender", "source"), [("payments", "waypost:outbox"), ("waypost", "/payments")], ids=["source", "sender"]
)
async def test_what_is_reserved_for_us_is_refused_to_others(
    conn: Connection, sender: str, source: str
) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="reserved"):
        await posted(conn, replace(event("e1"), sender=sender, source=source))

    assert await rows(conn, "select * from waypost.inbox") == []


@pytest.mark.parametrize("level", [2, 3], ids=["repeatable read", "serializable"])
async def test_any_isolation_but_read_committed_is_refused(conn: Connection, level: int) -> None:
    await conn.set_isolation_level(psycopg.IsolationLevel(level + 1))

    async def post_inside() -> None:
        async with conn.transaction():
            await posted(conn, event("e1"))

    with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="READ COMMITTED"):
        await post_inside()
    await conn.set_isolation_level(None)


async def test_mail_from_an_execution_needs_the_fact_it_comes_from(conn: Connection) -> None:
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn())
    target = await begun(conn)
    true = from_fact(target, holder.execution, position=2, fence=holder.fence)

    got = await posted(
        conn,
        replace(true, event_id="right"),
        replace(true, event_id="later", from_position=3),
        replace(true, event_id="other fence", from_fence=holder.fence + 1),
    )

    assert [one.outcome for one in got] == ["stored", "stale", "stale"]
    assert await mail_of(conn, target) == ["child right"]


def from_fact(target: UUID, sender: UUID, *, position: int, fence: int) -> MailItem:
    return MailItem(
        kind="child",
        sender="waypost",
        source="waypost:execution",
        event_id="",
        digest=b"\0",
        data="{}",
        execution=target,
        epoch=0,
        path="child",
        from_execution=sender,
        from_position=position,
        from_fence=fence,
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"event_id": ""},
        {"event_id": "e" * 1025},
        {"source": "/" * 1025},
        {"key": "k" * 1025},
        {"key": None},
        {"data": "{"},
        {"data": '"\\u0000"'},
        {"body": b"x" * (1024 * 1024 + 1)},
    ],
    ids=lambda bad: next(iter(bad)),
)
async def test_bad_data_in_one_item_writes_nothing_of_the_batch(
    conn: Connection, bad: dict[str, Any]
) -> None:
    with pytest.raises((psycopg.DataError, psycopg.IntegrityError)):
        await posted(conn, event("good"), replace(event("bad"), **bad))

    assert await rows(conn, "select * from waypost.inbox") == []


async def test_an_execution_that_was_told_by_a_test_clock_is_due_by_it(conn: Connection) -> None:
    [(_, execution)] = await start(conn, Start(), now=NOON)
    holder = await claim(conn, await worker(conn), execution)
    assert await commit(conn, holder, holder.turn())

    await posted(conn, order("o1", execution), now=NOON)

    assert await rows(conn, "select created_at, wake_at from waypost.execution") == [(NOON, NOON)]
