from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Final

import pytest

from contracts.signature import Secret
from orchestrator.registry import set_sender
from receiver.ingress import RECALLS_MAX
from tests.receiver.world import (
    NOON,
    NOW,
    OTHER,
    SECRET,
    World,
    add_command,
    add_sender,
    add_tenant,
    add_wait,
    dump,
    event,
    in_headers,
    one,
    reply,
    request,
)


async def test_a_reply_becomes_mail_and_wakes_the_execution(world: World) -> None:
    execution_id, message_id = await add_command(world.conn)

    answer = await world.post(reply(message_id, source="/svc", id="r-1"))

    assert (answer.status, answer.json) == (202, {"answer": "mail"})
    received, wakes = await one(
        world.conn,
        "select mail_received, wake_at <= now() from waypost.execution where execution_id = %s",
        execution_id,
    )
    assert (received, wakes) == (1, True)
    kind, sender, data = await one(world.conn, "select kind, sender, data from waypost.inbox")
    assert (kind, sender) == ("reply", "payments")
    assert data == {"outcome": "done", "value": {"charge": "ch-1"}}
    path, order = await one(world.conn, "select path, is_order from waypost.mail")
    assert (path, order) == ("charge", False)
    assert await one(world.conn, "select replied or state = 'delivered' from waypost.outbox")
    assert world.hints == ["execution"]


@pytest.mark.parametrize("kind", ["refused", "failed"])
async def test_a_reply_that_is_not_done_carries_its_error(world: World, kind: str) -> None:
    _, message_id = await add_command(world.conn)
    error = {"code": "declined", "message": "no money", "detail": {"limit": 3}}

    answer = await world.post(reply(message_id, type=f"payment.charge.{kind}", data=error))

    assert answer.status == 202
    assert await one(world.conn, "select data from waypost.inbox") == {
        "outcome": kind,
        "error": {"code": "declined", "detail": "no money", "data": {"limit": 3}},
    }


async def test_a_reply_without_data_is_done_with_nothing(world: World) -> None:
    _, message_id = await add_command(world.conn)

    await world.post(reply(message_id, data=None))

    assert await one(world.conn, "select data from waypost.inbox") == {"outcome": "done", "value": None}


async def test_an_event_wakes_who_waits_for_its_key(world: World) -> None:
    execution_id = await add_wait(world.conn, type="payout.made", key="order-1042")

    answer = await world.post(event())

    assert (answer.status, answer.json) == (202, {"answer": "event"})
    got = await one(
        world.conn, "select mail_received from waypost.execution where execution_id = %s", execution_id
    )
    assert got == 1
    assert await one(world.conn, "select data from waypost.inbox") == {"amount": 4200}


async def test_an_event_that_nobody_waits_for_is_kept_with_the_bytes_that_were_signed(world: World) -> None:
    sent = json.dumps(event(data={"b": 1, "a": 0.1, "__proto__": 2, "$ref": "#"}), indent=3).encode()

    answer = await world.post(sent)

    assert answer.json == {"answer": "event"}
    body, key = await one(world.conn, "select body, key from waypost.inbox")
    assert (body, key) == (sent, "order-1042")


async def test_an_event_without_subject_has_the_empty_key(world: World) -> None:
    await world.post(event(subject=None))

    assert await one(world.conn, "select key from waypost.inbox") == ""


async def test_binary_data_is_kept_as_base64_and_absent_data_as_none(world: World) -> None:
    await world.post(event(id="a", data=None, data_base64="AP8="))
    await world.post(event(id="b", data=None))

    assert await one(world.conn, "select data from waypost.inbox where event_id = 'a'") == "AP8="
    assert await one(world.conn, "select data from waypost.inbox where event_id = 'b'") is None


async def test_a_duplicate_gets_the_first_answer_and_changes_nothing(world: World) -> None:
    _, message_id = await add_command(world.conn)
    sent = request(reply(message_id))
    first = await world.send(sent)
    before = await dump(world.conn)

    again = await world.send(sent)

    assert await dump(world.conn) == before
    assert (again.status, again.json) == (first.status, first.json)
    assert again.headers["x-inbox"] == "duplicate"
    assert "x-inbox" not in first.headers
    assert world.hints == ["execution"]


async def test_a_reply_sent_again_with_another_time_and_signature_is_a_duplicate(world: World) -> None:
    _, message_id = await add_command(world.conn)
    await world.post(reply(message_id, id="r-1"), webhook_id="msg_1")

    later = reply(message_id, id="r-1", time="2026-11-30T12:09:00Z", traceparent="00-x")
    again = await world.post(later, webhook_id="msg_2", at=NOW + 60)

    assert (again.status, again.headers["x-inbox"]) == (202, "duplicate")


async def test_fifty_copies_at_once_are_one_mail(world: World) -> None:
    _, message_id = await add_command(world.conn)
    sent = request(reply(message_id))

    answers = await asyncio.gather(*(world.send(sent) for _ in range(50)))

    assert {(answer.status, answer.json["answer"]) for answer in answers} == {(202, "mail")}
    assert sum("x-inbox" not in answer.headers for answer in answers) == 1
    assert await one(world.conn, "select count(*) from waypost.mail") == 1
    assert await one(world.conn, "select sum(mail_received) from waypost.execution") == 1


async def test_many_events_at_once_share_transactions_and_all_are_stored(world: World) -> None:
    answers = await asyncio.gather(*(world.post(event()) for _ in range(60)))

    assert {answer.status for answer in answers} == {202}
    assert await one(world.conn, "select count(*) from waypost.inbox") == 60
    assert world.moments.count("post.batch") < 60


async def test_events_of_one_id_from_two_sources_are_two(world: World) -> None:
    await world.post(event(id="1", source="/a"))

    answer = await world.post(event(id="1", source="/b"))

    assert "x-inbox" not in answer.headers
    assert await one(world.conn, "select count(*) from waypost.inbox") == 2


async def test_events_of_one_id_from_two_senders_are_two(world: World) -> None:
    await add_sender(world.conn, "shipping", secret=OTHER)
    await world.post(event(id="1"))

    answer = await world.post(event(id="1"), path="/events/default/shipping", secret=OTHER)

    assert (answer.status, answer.headers.get("x-inbox")) == (202, None)


async def test_a_reply_to_a_command_that_we_never_sent_matches_nothing(world: World) -> None:
    for cause in (
        "0199a000-0000-7000-8000-000000000001",
        "hostile",
        "{0199a000-0000-7000-8000-000000000001}",
    ):
        answer = await world.post(reply(cause))

        assert (answer.status, answer.json) == (202, {"answer": "unmatched"})
    assert await one(world.conn, "select count(*) from waypost.mail") == 0
    assert world.hints == []


async def test_a_causation_that_is_not_ours_leaves_other_events_what_they_are(world: World) -> None:
    execution_id = await add_wait(world.conn, type="payout.made", key="order-1042")

    await world.post(event(causationid="their-event-7"))

    got = await one(
        world.conn, "select mail_received from waypost.execution where execution_id = %s", execution_id
    )
    assert got == 1


async def test_a_command_of_another_tenant_is_none(world: World) -> None:
    await add_tenant(world.conn, 2, "acme")
    execution_id, message_id = await add_command(world.conn, tenant=2)

    answer = await world.post(reply(message_id))

    assert answer.json == {"answer": "unmatched"}
    got = await one(
        world.conn, "select mail_received from waypost.execution where execution_id = %s", execution_id
    )
    assert got == 0


async def test_the_sender_that_an_endpoint_names_speaks_for_it(world: World) -> None:
    await add_sender(world.conn, "gateway", secret=OTHER)
    _, message_id = await add_command(world.conn, endpoint="cards", replies_from="gateway")

    answer = await world.post(reply(message_id), path="/events/default/gateway", secret=OTHER)

    assert answer.json == {"answer": "mail"}


async def test_mail_for_a_paused_execution_is_counted_and_does_not_wake_it(world: World) -> None:
    execution_id, message_id = await add_command(world.conn, status="paused")

    await world.post(reply(message_id))

    received, wakes = await one(
        world.conn,
        "select mail_received, wake_at from waypost.execution where execution_id = %s",
        execution_id,
    )
    assert (received, wakes) == (1, None)


async def test_each_secret_of_a_sender_counts_until_it_expires(world: World) -> None:
    old, gone = Secret.of(b"an older secret, still live"), Secret.of(b"an older secret, expired")
    await add_sender(world.conn, secret=old, key_id="2", expires_at=NOON + timedelta(days=36_500))
    await add_sender(world.conn, secret=gone, key_id="3", expires_at=NOON - timedelta(days=36_500))

    statuses = [(await world.post(event(), secret=secret)).status for secret in (SECRET, old, gone)]

    assert statuses == [202, 202, 401]


@pytest.mark.parametrize("at", [NOW - 300, NOW + 300])
async def test_a_clock_may_differ_by_five_minutes(world: World, at: int) -> None:
    assert (await world.post(event(), at=at)).status == 202


@pytest.mark.parametrize(
    "changes",
    [
        {"time": "2016-12-31T23:59:60Z"},
        {"time": "0001-01-01T00:00:00+14:00"},
        {"time": "9999-12-31T23:59:59-12:00"},
        {"expirytime": "9999-12-31T23:59:59-12:00"},
        {"datacontenttype": "application/json; charset=utf-7"},
        {"dataschema": "http://169.254.169.254/"},
        {"data": {"exact": 9007199254740993}},
        {"id": "urn:ü:€"},
    ],
)
async def test_what_looks_odd_but_is_an_event_is_taken(world: World, changes: dict[str, object]) -> None:
    assert (await world.post(event(**changes))).status == 202


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": 9007199254740993, "b": 0.100000000000000005551115123126, "c": 1.10}',
        b'{"__proto__": {"admin": true}, "constructor": 1, "$ref": "file:///etc/passwd", "@type": "x"}',
        b'{"b": 1,\n\t"a": 2}',
    ],
)
async def test_data_is_kept_to_the_byte_and_none_of_it_is_obeyed(world: World, data: bytes) -> None:
    body = b'{"specversion":"1.0","id":"1","source":"/payments","type":"payout.made","data":%s}' % data

    assert (await world.post(body)).status == 202
    stored, kept = await one(world.conn, "select data, body from waypost.inbox")
    assert bytes(kept) == body
    assert list(stored) == sorted(json.loads(data), key=lambda name: (len(name), name))


async def test_the_content_type_may_have_parameters_and_any_case(world: World) -> None:
    answer = await world.post(
        event(), replace={"content-type": "Application/CloudEvents+JSON; charset=UTF-8"}
    )

    assert answer.status == 202


@pytest.mark.parametrize(
    "path",
    [
        "/events/default/payments?token=x",
        "/events/default/pay%6Dents",
        "http://receiver.test/events/default/payments",
    ],
)
async def test_a_sender_may_be_named_in_any_form_of_its_path(world: World, path: str) -> None:
    assert (await world.post(event(), path=path)).status == 202


async def test_a_body_that_comes_in_pieces_is_whole(world: World) -> None:
    sent = request(event(data="x" * 100_000))
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)

    for start in range(0, len(sent), 9_000):
        writer.write(sent[start : start + 9_000])
        await writer.drain()

    assert (await reader.readline()).startswith(b"HTTP/1.1 202")
    writer.close()


async def test_a_client_that_expects_to_be_told_to_continue_is(world: World) -> None:
    sent = request(event(), more=[("expect", "100-continue")])
    head, _, body = sent.partition(b"\r\n\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)

    writer.write(head + b"\r\n\r\n")
    assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
    writer.write(body)

    assert b"HTTP/1.1 202" in await reader.read()
    writer.close()


@pytest.mark.parametrize("again", [False, True])
async def test_an_answer_on_a_kept_connection_says_what_any_answer_says(world: World, again: bool) -> None:
    kept, closed = event(), event()
    if again:
        await world.post(kept)
        await world.post(closed)

    first = await world.send(request(kept, replace={"connection": "keep-alive"}) + request(event()))
    only = await world.post(closed)

    assert first.status == only.status == 202
    assert json.loads(first.raw.split(b"\r\n\r\n")[1].partition(b"HTTP")[0]) == only.json
    said, others = first.headers, only.headers
    dates = [parsedate_to_datetime(one.pop("date")) for one in (said, others)]
    assert abs(dates[0] - dates[1]) < timedelta(minutes=1)
    assert others.pop("connection") == "close"
    assert said == others
    assert ("x-inbox" in said) == again


async def test_one_connection_carries_many_requests(world: World) -> None:
    keep = {"connection": "keep-alive"}

    answer = await world.send(
        request(event(), replace=keep) + request(event(), replace=keep) + request(event())
    )

    assert answer.raw.count(b"HTTP/1.1 202") == 3


# ---- a late retry under its first signature ------------------------------------------------------------------------

OLD: Final = NOW - 900


async def stored_before(world: World, sent: bytes) -> None:
    """Store what `sent` says while its signature was new."""
    world.receiver.clock = lambda: OLD
    assert (await world.send(sent)).status == 202
    world.receiver.clock = lambda: NOW


@pytest.mark.parametrize(
    "kind", ["event", "binary", "batch", "apart", "batch with one apart", "partial batch"]
)
async def test_a_late_retry_with_an_old_signature_is_acknowledged_when_it_is_stored(
    world: World, kind: str
) -> None:
    # Coolhand-Labs/coolhand-ruby 123, and providers that sign once and repeat that for hours.
    batch = "partial" if kind == "partial batch" else "atomic"
    await set_sender(world.conn, "payments", binary_mode=True, settings={"batch": batch})
    plain = event(expirytime="2026-01-01T00:00:00Z") if "apart" in kind else event()
    elements = [plain, event(), event(id=None)][: 3 if kind == "partial batch" else 2]
    several = request(
        json.dumps(elements).encode(),
        at=OLD,
        replace={"content-type": "application/cloudevents-batch+json"},
    )
    sent = (
        several
        if "batch" in kind
        else in_headers(plain, at=OLD)
        if kind == "binary"
        else request(plain, at=OLD)
    )
    await stored_before(world, sent)
    before = await dump(world.conn)

    answer = await world.send(sent)

    assert (answer.status, answer.headers["x-inbox"]) == (202, "duplicate")
    assert await dump(world.conn) == before
    assert world.moments.count("request.refused") == 0


async def test_an_old_signature_proves_nothing_that_is_not_stored_as_it_is(world: World) -> None:
    await set_sender(world.conn, "payments", binary_mode=True)
    said = event(id="1")
    await stored_before(world, request(said, at=OLD))
    await stored_before(world, in_headers(event(id="2"), at=OLD))
    batch = {"content-type": "application/cloudevents-batch+json"}

    for hostile in (
        request({**said, "id": "hostile"}, at=OLD),
        request({**said, "data": "hostile"}, at=OLD),
        in_headers(event(id="hostile"), at=OLD),
        request(json.dumps([said, event(id="hostile")]).encode(), at=OLD, replace=batch),
        request(b"[]", at=OLD, replace=batch),
        request(b"hostile", at=OLD),
        request({"id": "hostile"}, at=OLD),
        request(said, at=OLD, secret=OTHER),
        request(said, at=NOW + 301),
    ):
        assert (await world.refused(hostile)).status == 401


async def test_few_old_signatures_are_looked_up_at_once_and_nobody_s_rate_pays_for_it(world: World) -> None:
    await set_sender(world.conn, "payments", settings={"rate": 0.01, "burst": 2})
    sent = request(event(), at=OLD)
    await stored_before(world, sent)

    answers = [(await world.send(sent)).status for _ in range(5)]
    world.receiver.recalling = RECALLS_MAX
    busy = await world.send(sent)

    assert answers == [202] * 5
    assert (busy.status, busy.headers["retry-after"]) == (429, "1")
    assert (await world.post(event())).status == 202
