from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from contracts.replies import Asked
from receiver import inbox
from receiver.inbox import MailItem
from tests.receiver.world import NOON, Connection, add_command, one

EVENT = MailItem(
    kind="event",
    sender="payments",
    source="/p",
    event_id="1",
    digest=b"1",
    data='{"n": 1}',
    type="t",
    key="k",
)
ORDER = MailItem(
    kind="order", sender="waypost", source="waypost:orders", event_id="o", digest=b"1", data="null"
)


@pytest.mark.postgres
async def test_answers_come_in_the_order_of_the_items(conn: Connection) -> None:
    items = [
        replace(EVENT, event_id=name, digest=digest)
        for name, digest in (("b", b"1"), ("a", b"1"), ("b", b"2"))
    ]

    first = await inbox.post(conn, items)
    again = await inbox.post(conn, items)

    assert [posted.outcome for posted in first] == ["stored", "stored", "conflict"]
    assert [posted.outcome for posted in again] == ["duplicate", "duplicate", "conflict"]
    assert [posted.inbox_id for posted in again] == [posted.inbox_id for posted in first]
    assert {posted.answer for posted in again} == {"event"}


@pytest.mark.postgres
async def test_mail_from_inside_is_addressed_by_execution_epoch_and_path(conn: Connection) -> None:
    execution_id, _ = await add_command(conn)

    [posted] = await inbox.post(conn, [replace(ORDER, execution=execution_id, epoch=2, path="pay")], now=NOON)

    assert (posted.outcome, posted.answer) == ("stored", "mail")
    row = await one(conn, "select epoch, path, is_order from waypost.mail")
    assert row == (2, "pay", True)
    assert await one(conn, "select received_at from waypost.inbox") == NOON
    assert await one(conn, "select wake_at from waypost.execution") == NOON


@pytest.mark.postgres
async def test_mail_of_a_fact_that_was_never_written_is_stale(conn: Connection) -> None:
    execution_id, _ = await add_command(conn)
    item = replace(ORDER, execution=execution_id, from_execution=execution_id, from_position=7, from_fence=1)

    [posted] = await inbox.post(conn, [item])

    assert (posted.outcome, posted.inbox_id, posted.answer) == ("stale", None, None)
    assert await one(conn, "select count(*) from waypost.inbox") == 0


@pytest.mark.postgres
async def test_an_event_is_on_the_shelf_for_a_week(conn: Connection) -> None:
    await inbox.post(conn, [EVENT], now=NOON)

    assert await one(conn, "select shelf_until from waypost.inbox") == NOON + timedelta(days=7)


@pytest.mark.postgres
async def test_a_command_is_known_by_type_and_by_who_may_answer_it(conn: Connection) -> None:
    _, own = await add_command(conn, endpoint="payments")
    _, other = await add_command(conn, endpoint="cards", replies_from="gateway")
    stranger = EVENT.tenant, own.__class__(int=7)

    known = await inbox.asked(conn, [(1, own), (1, other), (2, own), stranger])

    assert known == {
        (1, own): Asked("payment.charge", "payments"),
        (1, other): Asked("payment.charge", "gateway"),
    }


async def test_posting_nothing_is_nothing(conn: Connection) -> None:
    assert await inbox.post(conn, []) == []
