"""The binary content mode: its signature covers the body alone, so a sender uses it only where it may, and nothing
that a header says makes a second event of one that was signed once.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from contracts.envelope import decode_structured
from contracts.limits import EVENT_BYTES_MAX, EXTENSIONS_MAX, RECEIVE_FIELD_BYTES_MAX, RECEIVE_HEADERS_MAX
from orchestrator.store import definitions
from orchestrator.store.definitions import Definition
from tests.contracts.conformance import Scenario, scenarios
from tests.receiver.world import (
    OTHER,
    SECRET,
    Connection,
    Pool,
    World,
    add_command,
    add_sender,
    add_wait,
    dump,
    event,
    in_headers,
    one,
    reply,
    request,
    running,
    signature,
)

HOSTILE = event(id="hostile-1", source="/hostile", type="hostile.made", data={"hostile": True})


@pytest.fixture
async def binary(pool: Pool, conn: Connection) -> AsyncIterator[World]:
    """A receiver with one sender, payments, that may use the binary content mode."""
    await add_sender(conn, binary_mode=True)
    async with running(pool, conn) as world:
        yield world


# ---- who may -----------------------------------------------------------------------------------------------------


async def test_who_may_not_use_the_mode_is_told_what_is_expected(world: World) -> None:
    answer = await world.refused(in_headers(HOSTILE))

    assert answer.status == 415
    assert answer.json["detail"] == (
        "expected an event as application/cloudevents+json: this sender may not use the binary content mode"
    )
    assert world.moments.count("request.refused", reason="binary-mode") == 1


async def test_who_proves_nothing_does_not_learn_who_may_use_the_mode(world: World) -> None:
    await add_sender(world.conn, "shipping", binary_mode=True)
    paths = [f"/events/default/{name}" for name in ("payments", "shipping")]

    answers = [await world.refused(in_headers(HOSTILE, path=path, secret=OTHER)) for path in paths]
    unknown = await world.refused(in_headers(HOSTILE, path="/events/default/nobody"))

    assert [answer.status for answer in answers] == [401, 401]
    assert answers[0].json == answers[1].json
    assert unknown.status == 404


async def test_the_mode_may_be_switched_on_while_the_receiver_runs(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    async with running(pool, conn) as world:
        assert (await world.send(in_headers(event()))).status == 415

        await conn.execute("update waypost.sender set binary_mode = true")
        world.receiver.senders.kept.clear()  # as time does

        assert (await world.send(in_headers(event()))).status == 202


async def test_who_may_use_the_mode_may_use_the_other(binary: World) -> None:
    assert (await binary.post(event())).status == 202


# ---- what an event is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", scenarios())
async def test_a_request_of_the_conformance_suite_is_stored(binary: World, scenario: Scenario) -> None:
    sent = request(scenario.body, more=scenario.headers, replace={"host": None, "content-type": None})

    answer = await binary.send(sent)

    assert (answer.status, answer.json) == (202, {"answer": "event"})
    row = await one(binary.conn, "select source, event_id, type, data, body from waypost.inbox")
    kept = decode_structured(row[4])
    attributes = {name: getattr(kept, name, "1.0") for name in scenario.attributes}
    assert row[:3] == tuple(scenario.attributes[name] for name in ("source", "id", "type"))
    assert row[3] == scenario.data
    assert attributes == scenario.attributes


async def test_an_event_in_headers_wakes_who_waits_for_its_key(binary: World) -> None:
    execution_id = await add_wait(binary.conn, type="payout.made", key="Euro € 😀")

    answer = await binary.send(in_headers(event(subject="Euro € 😀")))

    assert (answer.status, answer.json) == (202, {"answer": "event"})
    received = await one(
        binary.conn, "select mail_received from waypost.execution where execution_id = %s", execution_id
    )
    assert received == 1
    assert await one(binary.conn, "select data from waypost.inbox") == {"amount": 4200}


async def test_a_reply_in_headers_becomes_mail(binary: World) -> None:
    _, message_id = await add_command(binary.conn)

    answer = await binary.send(in_headers(reply(message_id)))

    assert (answer.status, answer.json) == (202, {"answer": "mail"})
    assert await one(binary.conn, "select data from waypost.inbox") == {
        "outcome": "done",
        "value": {"charge": "ch-1"},
    }


async def test_what_is_kept_has_every_attribute_and_the_bytes_that_were_signed(binary: World) -> None:
    signed = b'{"b": 1.10, "a": 9007199254740993}\n'

    await binary.send(in_headers(event(traceparent="00-a", dataschema="urn:x"), body=signed))

    kept = decode_structured(await one(binary.conn, "select body from waypost.inbox"))
    assert (kept.data, kept.datacontenttype, kept.dataschema) == (signed, "application/json", "urn:x")
    assert (kept.time, dict(kept.extensions)) == ("2026-11-30T12:00:00Z", {"traceparent": "00-a"})


async def test_data_that_is_not_json_is_kept_as_base64_and_an_empty_body_is_none(binary: World) -> None:
    await binary.send(in_headers(event(id="a"), body=b"\x00\xff", content_type="application/octet-stream"))
    await binary.send(in_headers(event(id="b"), body=b"{}", content_type=None))
    await binary.send(in_headers(event(id="c"), body=b""))

    rows = await (await binary.conn.execute("select data from waypost.inbox order by event_id")).fetchall()
    assert rows == [("AP8=",), ("e30=",), (None,)]


async def test_headers_beside_a_structured_body_mean_nothing(binary: World) -> None:
    foreign = [("ce-id", "2"), ("ce-type", "hostile.made"), ("ce-specversion", "9"), ("ce-id", "3")]

    answer = await binary.post(event(id="1"), more=[*foreign, ("ce-traceparent", "00-b")])

    assert answer.status == 202
    assert await one(binary.conn, "select event_id, type from waypost.inbox") == ("1", "payout.made")


async def test_a_trace_header_alone_makes_no_event_of_another_webhook(binary: World) -> None:
    answer = await binary.refused(
        request(b"{}", replace={"content-type": "application/json"}, more=[("ce-traceparent", "00-b")])
    )

    assert answer.status == 415
    assert answer.json["detail"] == "expected an event as application/cloudevents+json"


# ---- once --------------------------------------------------------------------------------------------------------


async def test_an_event_sent_in_both_modes_is_one(binary: World) -> None:
    sent = event(id="1", datacontenttype="application/json")
    await binary.post(sent, webhook_id="msg_1")
    before = await dump(binary.conn)
    in_header = {name: value for name, value in sent.items() if name != "datacontenttype"}

    again = await binary.send(in_headers(in_header, webhook_id="msg_2"))

    assert (again.status, again.headers["x-inbox"]) == (202, "duplicate")
    assert await dump(binary.conn) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "2"},
        {"source": "/other"},
        {"id": "2", "source": "/other"},
        {"id": "2", "time": "2027-01-01T00:00:00Z", "traceparent": "00-b"},
    ],
)
async def test_a_body_signed_once_is_no_second_event_under_another_name(
    binary: World, changes: dict[str, str]
) -> None:
    execution_id = await add_wait(binary.conn, type="payout.made", key="order-1042")
    first = await binary.send(in_headers(event(id="1"), webhook_id="msg_1"))
    before = await dump(binary.conn)

    again = await binary.send(in_headers(event(id="1") | changes, webhook_id="msg_1"))

    assert (again.status, again.json, again.headers["x-inbox"]) == (202, first.json, "duplicate")
    assert await dump(binary.conn) == before
    received = await one(
        binary.conn, "select mail_received from waypost.execution where execution_id = %s", execution_id
    )
    assert received == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "payout.failed"},
        {"subject": "order-1"},
        {"id": "2", "type": "payout.failed"},
        {"id": "2", "source": "/other", "subject": "order-1"},
        {"id": "2", "causationid": "0199a000-0000-7000-8000-000000000001"},
    ],
)
async def test_a_body_signed_once_says_nothing_else_later(binary: World, changes: dict[str, str]) -> None:
    await binary.send(in_headers(event(id="1"), webhook_id="msg_1"))

    answer = await binary.refused(in_headers(event(id="1") | changes, webhook_id="msg_1"))

    assert answer.status == 409


@pytest.mark.parametrize("kind", ["text/plain", "application/vnd.hostile+json", None])
async def test_a_body_signed_once_is_of_no_other_type_later(binary: World, kind: str | None) -> None:
    await binary.send(in_headers(event(id="1"), webhook_id="msg_1"))

    answer = await binary.refused(in_headers(event(id="1"), content_type=kind, webhook_id="msg_1"))

    assert answer.status == 409


async def test_a_reply_taken_once_does_not_answer_another_command(binary: World) -> None:
    _, first = await add_command(binary.conn)
    _, second = await add_command(binary.conn)
    done = reply(first, id="r-1")
    await binary.send(in_headers(done, webhook_id="msg_1"))

    answer = await binary.refused(
        in_headers(done | {"id": "r-2", "causationid": str(second)}, webhook_id="msg_1")
    )

    assert answer.status == 409


async def test_a_body_signed_in_one_mode_is_no_second_event_in_the_other(binary: World) -> None:
    inner = event(id="inner")
    text = json.dumps(inner).encode()
    await binary.post(inner, webhook_id="msg_1")
    await binary.send(in_headers(event(id="outer"), body=text, webhook_id="msg_2"))

    answers = [
        await binary.refused(in_headers(event(id="outer-2"), body=text, webhook_id="msg_1")),
        await binary.refused(request(text.replace(b"inner", b"other"), webhook_id="msg_2")),
        await binary.refused(request(json.dumps(event(id="2")).encode(), webhook_id="msg_2")),
    ]

    assert [answer.status for answer in answers] == [409, 409, 409]


async def test_a_body_signed_once_starts_one_execution_whatever_its_headers_say_later(binary: World) -> None:
    await definitions.publish(binary.conn, [Definition("billing", "1", on="payout.made")])
    await binary.send(in_headers(event(id="1", subject="order-1"), webhook_id="msg_1"))

    again = [
        await binary.send(in_headers(event(id="1", subject=key) | changes, webhook_id="msg_1"))
        for key in ("order-1", "order-2")
        for changes in ({"id": "2"}, {"id": "3", "source": "/other"})
    ]

    assert [answer.status for answer in again] == [202, 202, 409, 409]
    assert await one(binary.conn, "select count(*) from waypost.execution") == 1


async def test_thirty_names_at_once_for_a_body_signed_once_are_one_event(binary: World) -> None:
    requests = [in_headers(event(id=f"e-{n}"), webhook_id="msg_1") for n in range(30)]

    answers = await asyncio.gather(*map(binary.send, requests))

    assert {answer.status for answer in answers} == {202}
    assert sum("x-inbox" not in answer.headers for answer in answers) == 1
    assert await one(binary.conn, "select count(*) from waypost.inbox") == 1


# ---- what is refused ---------------------------------------------------------------------------------------------


def changed(**changes: str | None) -> bytes:
    """An event in headers some of which say something else, as it stands; or are not there."""
    plain = {name: value for name, value in HOSTILE.items() if name not in changes}
    said = [(f"ce-{name}", value) for name, value in changes.items() if value is not None]
    return in_headers(plain, more=said)


def of_json(body: bytes, content_type: str = "application/json") -> bytes:
    return in_headers(HOSTILE, body=body, content_type=content_type)


HEADERS: dict[str, tuple[int, list[str], bytes]] = {
    "no specversion": (400, ["specversion"], changed(specversion=None)),
    "no id": (400, ["id"], changed(id=None)),
    "nothing but an id": (
        400,
        ["specversion", "source", "type"],
        request(b"", replace={"content-type": None}, more=[("ce-id", "hostile")]),
    ),
    "specversion 0.3": (400, ["specversion"], changed(specversion="0.3")),
    "an empty id": (400, ["id"], changed(id="")),
    "an id twice": (400, ["id"], in_headers(HOSTILE, more=[("ce-id", "hostile-2")])),
    "the same id twice": (400, ["id"], in_headers(HOSTILE, more=[("CE-ID", "hostile-1")])),
    "an extension twice": (400, [], in_headers(HOSTILE, more=[("ce-hostile", "1"), ("ce-hostile", "1")])),
    "the content type twice": (400, [], in_headers(HOSTILE, more=[("content-type", "text/hostile")])),
    "an overlong form": (400, ["subject"], changed(subject="hostile%C0%A0")),
    "an encoded surrogate": (400, ["subject"], changed(subject="%ED%A0%80hostile")),
    "half a character": (400, ["subject"], changed(subject="hostile%E2%82")),
    "a stray percent sign": (400, ["subject"], changed(subject="100% hostile")),
    "an encoded line feed": (400, ["subject"], changed(subject="hostile%0D%0Ax: y")),
    "an encoded NUL": (400, ["id"], changed(id="hostile%00")),
    "an encoded escape": (400, ["type"], changed(type="%1B[2Jhostile")),
    "a raw letter of another alphabet": (400, ["subject"], changed(subject="hostile é")),
    "raw bytes that are no utf-8": (400, ["subject"], changed(subject="hostile \udce9")),
    "a quote that stays open": (400, ["subject"], changed(subject='"hostile')),
    "a quote in the middle": (400, ["subject"], changed(subject='hostile" "')),
    "no name": (400, [], in_headers(HOSTILE, more=[("ce-", "hostile")])),
    "a name with a dash": (400, [], in_headers(HOSTILE, more=[("ce-hostile-name", "x")])),
    "a name of 100 characters": (400, [], in_headers(HOSTILE, more=[(f"ce-{'hostile' * 15}", "x")])),
    "a content type of the event's own": (
        400,
        ["datacontenttype"],
        in_headers(HOSTILE, more=[("ce-datacontenttype", "text/hostile")]),
    ),
    "data in a header": (400, ["data"], in_headers(HOSTILE, more=[("ce-data", "hostile")])),
    "data in a header, encoded": (
        400,
        ["data_base64"],
        in_headers(HOSTILE, more=[("ce-data_base64", "AA==")]),
    ),
    "a source that is no reference": (400, ["source"], changed(source="hostile source")),
    "a source of ours": (403, [], changed(source="waypost:hostile")),
    "a type of 8 kB": (400, ["type"], changed(type="hostile" * 1_100)),
    "24 o'clock": (400, ["time"], changed(time="2026-11-30T24:00:00Z")),
    "never": (400, ["time"], changed(time="infinity")),
    "too many extensions": (
        400,
        [],
        in_headers(HOSTILE, more=[(f"ce-hostile{n}", "x") for n in range(EXTENSIONS_MAX + 1)]),
    ),
    "129 headers": (431, [], in_headers(HOSTILE, more=[(f"ce-h{n}", "hostile") for n in range(129)])),
    "one header more than there may be": (
        431,
        [],
        in_headers(HOSTILE, more=[(f"ce-h{n}", "hostile") for n in range(RECEIVE_HEADERS_MAX)]),
    ),
    "a header that is too long": (431, [], changed(subject="hostile" * (RECEIVE_FIELD_BYTES_MAX // 7 + 2))),
    "a content type that is none": (400, ["datacontenttype"], of_json(b"{}", "hostile")),
    "a format that we do not read": (415, [], of_json(b"hostile", "application/cloudevents+avro")),
    "json in utf-16": (
        400,
        ["datacontenttype"],
        of_json("{}".encode("utf-16"), "application/json;charset=utf-16"),
    ),
    "json in utf-16 that does not say so": (400, ["data"], of_json('{"hostile":1}'.encode("utf-16"))),
    "json that is none": (400, ["data"], of_json(b"hostile")),
    "NUL in json": (400, ["data"], of_json(b'"\\u0000hostile"')),
    "a lone surrogate in json": (400, ["data"], of_json(b'"\\ud800hostile"')),
    "200 000 levels": (400, ["data"], of_json(b"[" * 200_000)),
    "5000 digits": (400, ["data"], of_json(b"1" * 5000)),
    "NaN": (400, ["data"], of_json(b"NaN")),
    "a key twice": (400, ["data"], of_json(b'{"hostile": 1, "hostile": 2}')),
    "a gzip bomb": (
        415,
        [],
        in_headers(HOSTILE, body=gzip.compress(bytes(1 << 24)), more=[("content-encoding", "gzip")]),
    ),
    "a byte too many": (413, [], of_json(b'"' + b"x" * (EVENT_BYTES_MAX - 1) + b'"')),
    "a reply whose data is bytes": (
        400,
        ["data"],
        in_headers(reply("hostile"), body=b"hostile", content_type="text/plain"),
    ),
    "a reply without a code": (
        400,
        ["data"],
        in_headers(reply("hostile", type="payment.charge.refused", data={"hostile": 1})),
    ),
    "two framings": (400, [], in_headers(HOSTILE, more=[("transfer-encoding", "chunked")])),
    "no proof": (401, [], in_headers(HOSTILE, replace={"webhook-signature": None})),
    "another secret": (401, [], in_headers(HOSTILE, secret=OTHER)),
    "another body than was signed": (
        401,
        [],
        in_headers(
            HOSTILE,
            webhook_id="msg_1",
            replace={"webhook-signature": signature(SECRET, "msg_1", 0, b"{}")},
        ),
    ),
}


@pytest.mark.parametrize(("status", "attributes", "sent"), HEADERS.values(), ids=HEADERS.keys())
async def test_it_is_refused_in_binary_mode(
    binary: World, status: int, attributes: list[str], sent: bytes
) -> None:
    answer = await binary.refused(sent)

    assert (answer.status, answer.json.get("attributes", [])) == (status, attributes)
    assert binary.moments.count("request.refused", status=status) == 1
    assert binary.hints == []


async def test_a_reply_in_headers_for_somebody_else_s_command_is_refused(binary: World) -> None:
    await add_sender(binary.conn, "shipping", secret=OTHER, binary_mode=True)
    _, message_id = await add_command(binary.conn, endpoint="payments")

    answer = await binary.refused(
        in_headers(reply(message_id), path="/events/default/shipping", secret=OTHER)
    )

    assert answer.status == 403


async def test_as_many_and_as_long_headers_as_an_event_may_have_are_taken(binary: World) -> None:
    long = {f"ext{n}": "€" * 600 for n in range(EXTENSIONS_MAX)}

    answer = await binary.send(in_headers(event(subject="€" * 341, **long)))

    assert answer.status == 202
    kept = decode_structured(await one(binary.conn, "select body from waypost.inbox"))
    assert kept.extensions == long


# ---- memory ------------------------------------------------------------------------------------------------------

MIB = 1 << 20
HEAD = in_headers(HOSTILE).partition(b"\r\n\r\n")[0]


async def pour(world: World, head: bytes, piece: bytes, *, bytes_max: int) -> None:
    """Send `head`, then `piece` again and again, until the other side has enough or `bytes_max` are sent."""
    _, writer = await asyncio.open_connection("127.0.0.1", world.port)
    try:
        writer.write(head)
        for _ in range(bytes_max // len(piece)):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (HEAD + b"\r\n", b"ce-hostile: " + b"x" * 8000 + b"\r\n"),
        (HEAD + b"\r\nce-hostile: ", b"x" * 8192),
        (HEAD + b"\r\nce-", b"x" * 8192),
        (
            HEAD.replace(b"content-length", b"x-length") + b"\r\ntransfer-encoding: chunked\r\n\r\n",
            b"2000\r\n" + b"x" * 8192 + b"\r\n",
        ),
        (HEAD.replace(b"content-length: ", b"content-length: 9999999999") + b"\r\n\r\n", b"x" * 8192),
    ],
    ids=["headers", "a value", "a name", "chunks", "a body"],
)
async def test_what_never_ends_is_cut_before_it_fills_memory(
    binary: World, head: bytes, piece: bytes
) -> None:
    before = await dump(binary.conn)
    tracemalloc.start()
    try:
        await pour(binary, head, piece, bytes_max=64 * MIB)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 4 * MIB, "of 64 MiB that would have come"
    assert await dump(binary.conn) == before
    assert (await binary.send(in_headers(event()))).status == 202
