from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from contracts.envelope import Envelope, encode_structured
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


def reply(message: UUID, **changes: Any) -> MailItem:
    """A reply of the payments service to a command of type `payment.charge`."""
    plain = replace(
        EVENT, kind="reply", causation=message, command="payment.charge", data='{"outcome":"done"}'
    )
    return replace(plain, **{"event_id": str(uuid4()), **changes})


@pytest.mark.postgres
async def test_a_reply_is_stored_when_its_sender_may_answer_and_it_fits_the_command(conn: Connection) -> None:
    _, own = await add_command(conn, endpoint="payments")
    _, other = await add_command(conn, endpoint="cards", replies_from="gateway")

    posted = await inbox.post(conn, [reply(own), reply(other, sender="gateway")])

    assert [(one.outcome, one.answer) for one in posted] == [("stored", "mail")] * 2


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"sender": "shipping"}, "foreign"),
        ({"sender": "shipping", "command": "payment.refund"}, "foreign"),
        ({"sender": "shipping", "kind": "event", "command": ""}, "foreign"),
        ({"command": "payment.refund"}, "misfit"),
        ({"command": "payment.charg"}, "misfit"),
        ({"command": "payment"}, "misfit"),
        ({"command": 'payment.charge","subject":"'}, "misfit"),
        ({"kind": "event", "command": ""}, "misfit"),
        ({"kind": "event", "command": "payment.charge"}, "misfit"),
    ],
)
async def test_a_reply_that_does_not_fit_is_not_stored_and_those_beside_it_are(
    conn: Connection, changes: dict[str, Any], outcome: str
) -> None:
    _, message = await add_command(conn)

    posted = await inbox.post(conn, [EVENT, reply(message, **changes), reply(message, event_id="good")])

    assert [one.outcome for one in posted] == ["stored", outcome, "stored"]
    assert (posted[1].inbox_id, posted[1].answer) == (None, None)
    assert await one(conn, "select array_agg(event_id order by event_id) from waypost.inbox") == ["1", "good"]
    assert await one(conn, "select mail_received from waypost.execution") == 1


@pytest.mark.postgres
async def test_a_reply_to_what_we_never_sent_matches_nothing(conn: Connection) -> None:
    _, message = await add_command(conn)
    strangers = [reply(uuid4()), reply(message, tenant=2), reply(uuid4(), kind="event", command="")]

    posted = await inbox.post(conn, strangers)

    assert [(one.outcome, one.answer) for one in posted] == [
        ("stored", "unmatched"),
        ("stored", "unmatched"),
        ("stored", "event"),
    ]


@pytest.mark.postgres
async def test_a_reply_to_an_event_that_we_published_matches_nothing(conn: Connection) -> None:
    _, message = await add_command(conn)
    await conn.execute("update waypost.outbox set command = false, execution_id = null, epoch = null")

    [posted] = await inbox.post(conn, [reply(message)])

    assert (posted.outcome, posted.answer) == ("stored", "unmatched")
    assert await one(conn, "select replied from waypost.outbox") is False


@pytest.mark.postgres
@pytest.mark.parametrize(
    "event",
    [
        Envelope(id="1", source="/a", type="t"),
        Envelope(id=',"type":"u"', source="/a", type="t", data={"type": "u"}),
        Envelope(id="1", source="/a", type="t", subject=',"type":"u",', data='{"x":1,"type":"u"}'),
        Envelope(id="1", source="/a", type='a"b\\c/d', extensions={"kind": "u"}),
        Envelope(id="1", source="/ä", type="zahlung.größe.\U0001f600", data={"a": {"b": 1, "type": "u"}}),
    ],
)
async def test_the_type_of_a_message_is_read_as_we_write_it(conn: Connection, event: Envelope) -> None:
    async def fits(named: str) -> bool:
        return await one(conn, "select waypost.is_of_type(%s, %s)", encode_structured(event), named)

    assert await fits(event.type)
    others = ("u", "", event.type[:-1], event.type + "x", event.type + '"')
    assert not any([await fits(other) for other in others])


@pytest.mark.postgres
async def test_what_is_no_event_is_of_no_type(conn: Connection) -> None:
    for body in (b"", b"{}", b'{"type":"t"}', b"\xff"):
        assert not await one(conn, "select waypost.is_of_type(%s, 't')", body)


async def test_posting_nothing_is_nothing(conn: Connection) -> None:
    assert await inbox.post(conn, []) == []
