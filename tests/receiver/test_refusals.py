"""Every refusal leaves the database as it was and repeats nothing of what was sent: `World.refused` checks both."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from contracts.limits import EVENT_BYTES_MAX
from receiver.authenticity import Proof
from receiver.senders import NOBODY
from tests.receiver.world import (
    NOW,
    OTHER,
    SECRET,
    World,
    add_command,
    add_sender,
    add_tenant,
    add_wait,
    event,
    one,
    reply,
    request,
    signature,
)

HOSTILE = event(id="hostile-1", source="/hostile", type="hostile.made", data={"hostile": True})


def text(body: str | bytes) -> bytes:
    """An event whose data is this JSON, or whatever it is."""
    head = b'{"specversion":"1.0","id":"hostile","source":"/hostile","type":"hostile.made","data":'
    return head + (body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")) + b"}"


AUTHENTICITY: dict[str, tuple[int, bytes]] = {
    "no signature": (401, request(HOSTILE, replace={"webhook-signature": None})),
    "no timestamp": (401, request(HOSTILE, replace={"webhook-timestamp": None})),
    "no id": (401, request(HOSTILE, replace={"webhook-id": None})),
    "an empty signature": (401, request(HOSTILE, replace={"webhook-signature": ""})),
    "a signature of another secret": (401, request(HOSTILE, secret=OTHER)),
    "a signature of another body": (
        401,
        request(
            HOSTILE, replace={"webhook-signature": signature(SECRET, "msg_1", NOW, b"{}")}, webhook_id="msg_1"
        ),
    ),
    "a hundred signatures": (
        401,
        request(HOSTILE, replace={"webhook-signature": " ".join(["v1,aG9zdGlsZQ=="] * 100)}),
    ),
    "an unknown version": (401, request(HOSTILE, replace={"webhook-signature": "none,"})),
    "garbage for a signature": (401, request(HOSTILE, replace={"webhook-signature": "v1hostile,,  ,"})),
    "a signature that is no ascii": (
        401,
        request(HOSTILE, replace={"webhook-signature": "v1,\udcffhostile"}),
    ),
    "301 s old": (401, request(HOSTILE, at=NOW - 301)),
    "301 s ahead": (401, request(HOSTILE, at=NOW + 301)),
    "an old one under a fresh timestamp": (
        401,
        request(HOSTILE, at=NOW - 900, replace={"webhook-timestamp": str(NOW)}),
    ),
    "a timestamp in other digits": (400, request(HOSTILE, replace={"webhook-timestamp": "\uff11\uff17"})),
    "a timestamp with underscores": (400, request(HOSTILE, replace={"webhook-timestamp": "1_796_000_000"})),
    "a timestamp with a sign": (400, request(HOSTILE, replace={"webhook-timestamp": f"+{NOW}"})),
    "a dot in the id": (400, request(HOSTILE, webhook_id="hostile.1")),
    "the dot of an id in the timestamp": (
        400,
        request(HOSTILE, replace={"webhook-timestamp": f"hostile.{NOW}"}),
    ),
    "a timestamp of 13 digits": (400, request(HOSTILE, replace={"webhook-timestamp": "1" * 13})),
    "a blank in the id": (400, request(HOSTILE, webhook_id="hostile 1")),
    "the id twice": (400, request(HOSTILE, more=[("webhook-id", "hostile")])),
    "the signature twice": (400, request(HOSTILE, more=[("Webhook-Signature", "v1,hostile")])),
    "the timestamp twice": (400, request(HOSTILE, more=[("webhook-timestamp", str(NOW))])),
    "the content type twice": (400, request(HOSTILE, more=[("content-type", "text/hostile")])),
}

ROUTES: dict[str, tuple[int, bytes]] = {
    "an unknown sender": (404, request(HOSTILE, path="/events/default/hostile")),
    "an unknown tenant": (404, request(HOSTILE, path="/events/hostile/payments")),
    "a name that no row could have": (404, request(HOSTILE, path="/events/default/hostile%00")),
    "a very long name": (404, request(HOSTILE, path="/events/default/" + "hostile" * 100)),
    "a broken signature for an unknown sender": (
        404,
        request(HOSTILE, path="/events/default/hostile", replace={"webhook-timestamp": "x"}),
    ),
    "another path": (404, request(HOSTILE, path="/hostile")),
    "a longer path": (404, request(HOSTILE, path="/events/default/payments/hostile")),
    "an absolute target": (404, request(HOSTILE, path="http://hostile.test/events/default/hostile")),
    "a query for a path": (404, request(HOSTILE, path="/events?/default/payments")),
    "dots in the path": (404, request(HOSTILE, path="/events/default/payments/../hostile")),
    "a path that is no path": (404, request(HOSTILE, path="*", method="OPTIONS")),
    "GET": (405, request(b"", method="GET")),
    "OPTIONS": (405, request(HOSTILE, method="OPTIONS")),
    "PROPFIND": (405, request(HOSTILE, method="PROPFIND")),
    "a method that HTTP does not have": (400, request(HOSTILE, method="HOSTILE")),
}

CONTENT: dict[str, tuple[int, bytes]] = {
    "json that is no event": (415, request(HOSTILE, replace={"content-type": "application/json"})),
    "no content type": (415, request(HOSTILE, replace={"content-type": None})),
    "a batch": (400, request(HOSTILE, replace={"content-type": "application/cloudevents-batch+json"})),
    "avro": (415, request(HOSTILE, replace={"content-type": "application/cloudevents+avro"})),
    "binary mode, whose headers nobody signed": (
        415,
        request(
            b"{}",
            replace={"content-type": "application/json"},
            more=[
                ("ce-id", "hostile"),
                ("ce-source", "/hostile"),
                ("ce-type", "t"),
                ("ce-specversion", "1.0"),
            ],
        ),
    ),
    "gzip": (415, request(gzip.compress(json.dumps(HOSTILE).encode()), more=[("content-encoding", "gzip")])),
    "a gzip bomb": (415, request(gzip.compress(bytes(1 << 24)), more=[("content-encoding", "gzip")])),
    "gzip in deflate": (415, request(HOSTILE, more=[("content-encoding", "deflate, gzip")])),
    "gzip in gzip": (415, request(HOSTILE, more=[("content-encoding", "gzip, gzip")])),
    "brotli": (415, request(HOSTILE, more=[("content-encoding", "br")])),
    "an expectation that we do not know": (417, request(HOSTILE, more=[("expect", "hostile")])),
    "a byte too many": (413, request(b"x" * (EVENT_BYTES_MAX + 1))),
    "a length that is far too long": (413, request(b"hostile", replace={"content-length": str(1 << 40)})),
    "chunks that are too many": (
        413,
        request(b"", replace={"content-length": None}, more=[("transfer-encoding", "chunked")])
        + b"10000\r\n"
        + b"x" * 0x10000
        + b"\r\n"
        + b"10000\r\n"
        + b"x" * 0x10000
        + b"\r\n"
        + b"10000\r\n"
        + b"x" * 0x10000
        + b"\r\n"
        + b"10001\r\n"
        + b"x" * 0x10001
        + b"\r\n0\r\n\r\n",
    ),
}

JSON: dict[str, tuple[int, bytes]] = {
    "a thousand levels": (400, request(text("[" * 1_000 + "]" * 1_000))),
    "a hundred thousand levels": (400, request(text("[" * 100_000))),
    "deep objects": (400, request(text('{"a":' * 1_000 + "1" + "}" * 1_000))),
    "4301 digits": (400, request(text("1" * 4301))),
    "1e400": (400, request(text("1e400"))),
    "-1e400": (400, request(text("-1e400"))),
    "NaN": (400, request(text("NaN"))),
    "Infinity": (400, request(text("-Infinity"))),
    "a key twice": (400, request(text('{"hostile": 1, "hostile": 2}'))),
    "an attribute twice": (400, request(b'{"id":"hostile",' + text("1")[1:])),
    "NUL, escaped": (400, request(text('"\\u0000"'))),
    "NUL": (400, request(text('"\0"'))),
    "a lone surrogate, escaped": (400, request(text('"\\ud800"'))),
    "a lone surrogate in bytes": (400, request(text('"\ud800"'))),
    "an overlong form": (400, request(text(b'"\xc0\xaf"'))),
    "utf-16": (400, request(json.dumps(HOSTILE).encode("utf-16"))),
    "a byte order mark": (400, request(b"\xef\xbb\xbf" + text("1"))),
    "the bytes of a surrogate pair": (400, request(text(b'"\xed\xa0\xbd\xed\xb8\x80"'))),
    "what follows the event": (400, request(text("1") + b" hostile")),
    "two documents": (400, request(text("1") + text("1"))),
    "a comment": (400, request(text("1 // hostile"))),
    "single quotes": (400, request(b"{'hostile': 1}")),
    "nothing": (400, request(b"")),
    "an array": (400, request(b"[" + text("1") + b"]")),
    "a string": (400, request(b'"hostile"')),
}

EVENTS: dict[str, tuple[int, bytes]] = {
    "no specversion": (400, request(event(specversion=None))),
    "specversion 0.3": (400, request(event(specversion="0.3"))),
    "no id": (400, request(event(id=None))),
    "an empty id": (400, request(event(id=""))),
    "a numeric id": (400, request(event(id=7))),
    "a source that is no reference": (400, request(event(source="hostile source"))),
    "a type of 10 kB": (400, request(event(type="hostile" * 1_500))),
    "a subject of 2 kB": (400, request(event(subject="hostile" * 300))),
    "200 extensions": (400, request(event(**{f"hostile{n}": "x" for n in range(200)}))),
    "an attribute in capitals": (400, request(event(ID="hostile"))),
    "a control character": (400, request(event(subject="hostile\x1b[2J"))),
    "24 o'clock": (400, request(event(time="2026-11-30T24:00:00Z"))),
    "never": (400, request(event(time="infinity"))),
    "data twice": (400, request(event(data_base64="AA=="))),
    "a source of ours": (403, request(event(source="waypost:outbox"))),
    "a reply that names no code": (
        400,
        request(reply("hostile", type="payment.charge.refused", data={"message": "hostile"})),
    ),
    "a reply whose error is no object": (400, request(reply("hostile", type="x.failed", data="hostile"))),
    "a reply in base64": (400, request(reply("hostile", data=None, data_base64="AA=="))),
}

CASES = AUTHENTICITY | ROUTES | CONTENT | JSON | EVENTS


@pytest.mark.parametrize(("status", "sent"), CASES.values(), ids=CASES.keys())
async def test_it_is_refused(world: World, status: int, sent: bytes) -> None:
    answer = await world.refused(sent)

    assert answer.status == status
    assert world.moments.count("request.refused", status=status) == 1
    assert world.hints == []


async def test_another_method_is_told_the_right_one(world: World) -> None:
    answer = await world.refused(request(b"", method="GET"))

    assert answer.headers["allow"] == "POST"


async def test_a_malformed_event_is_told_which_attributes_are_at_fault(world: World) -> None:
    answer = await world.refused(request(event(id="", source="hostile source", hostile=1.5)))

    assert answer.json == {
        "title": "Bad Request",
        "status": 400,
        "attributes": ["id", "source"],
        "detail": "id: expected a non-empty string; source: expected a URI reference",
    }


async def test_of_many_faults_all_are_named_and_some_are_explained(world: World) -> None:
    broken = dict.fromkeys(("id", "source", "type", "subject", "time", "dataschema"), "hostile\x1b")

    answer = await world.refused(request(event(**broken, specversion="hostile")))

    assert answer.json["attributes"] == ["specversion", *broken]
    assert answer.json["detail"] == (
        "specversion: expected '1.0'; id: expected no control characters; source: expected no control characters"
    )


async def test_what_a_reply_should_have_been_is_told(world: World) -> None:
    _, message_id = await add_command(world.conn)

    answer = await world.refused(request(reply(message_id, type="payment.hostile.done")))

    assert answer.json["detail"] == "type: expected the command's type and one of .done, .refused, .failed"


async def test_all_that_is_not_authentic_gets_one_body(world: World) -> None:
    answers = [await world.refused(sent) for status, sent in AUTHENTICITY.values() if status == 401]

    assert len({answer.raw.partition(b"\r\n\r\n")[2] for answer in answers}) == 1


async def test_operators_see_why(world: World) -> None:
    await world.refused(AUTHENTICITY["301 s old"][1])
    await world.refused(AUTHENTICITY["a signature of another secret"][1])
    await world.refused(ROUTES["an unknown sender"][1])

    reasons = [fields["reason"] for moment, fields in world.moments.all if moment == "request.refused"]
    assert reasons == ["signature-stale", "signature-mismatch", "unknown-sender"]


async def test_the_same_id_with_another_body_is_a_conflict(world: World) -> None:
    await world.post(event(id="1", data={"amount": 1}))

    answer = await world.refused(request(event(id="1", data={"amount": 2}, hostile="x")))

    assert answer.status == 409
    assert world.moments.count("event.conflict", sender="payments") == 1


@pytest.mark.parametrize("changes", [{"type": "payout.cancelled"}, {"subject": "order-7"}, {"data": None}])
async def test_what_makes_an_event_another_one_makes_it_a_conflict(
    world: World, changes: dict[str, Any]
) -> None:
    await world.post(event(id="1"))

    assert (await world.refused(request(event(id="1", **changes)))).status == 409


async def test_the_same_signed_id_with_another_event_is_a_conflict(world: World) -> None:
    await world.post(event(id="1"), webhook_id="msg_1")

    answer = await world.refused(request(event(id="2", data={"amount": 2}), webhook_id="msg_1"))

    assert answer.status == 409


async def test_a_sender_that_does_not_speak_for_the_endpoint_is_not_allowed(world: World) -> None:
    await add_sender(world.conn, "shipping", secret=OTHER)
    _, message_id = await add_command(world.conn, endpoint="payments")

    answer = await world.refused(request(reply(message_id), path="/events/default/shipping", secret=OTHER))

    assert answer.status == 403


async def test_an_endpoint_that_names_another_sender_does_not_speak_for_itself(world: World) -> None:
    _, message_id = await add_command(world.conn, endpoint="payments", replies_from="gateway")

    assert (await world.refused(request(reply(message_id)))).status == 403


@pytest.mark.parametrize(
    "kind", ["payment.charge", "payment.charge.maybe", "payment.refund.done", "done", ".done"]
)
async def test_a_reply_to_our_command_is_named_after_it(world: World, kind: str) -> None:
    _, message_id = await add_command(world.conn)

    answer = await world.refused(request(reply(message_id, type=kind)))

    assert (answer.status, answer.json["attributes"]) == (400, ["type"])


async def test_an_event_of_one_tenant_is_not_authentic_for_another(world: World) -> None:
    await add_tenant(world.conn, 2, "acme")
    await add_sender(world.conn, tenant=2, secret=OTHER)

    assert (await world.refused(request(event(), path="/events/acme/payments"))).status == 401
    assert (await world.post(event(), path="/events/acme/payments", secret=OTHER)).status == 202


async def test_an_event_of_one_tenant_is_no_mail_of_another_whatever_key_it_names(world: World) -> None:
    await add_tenant(world.conn, 2, "acme")
    await add_sender(world.conn, tenant=2, secret=OTHER)
    await add_wait(world.conn, type="payout.made", key="order-1042")

    answer = await world.post(event(), path="/events/acme/payments", secret=OTHER)

    assert answer.status == 202
    assert await one(world.conn, "select count(*) from waypost.mail") == 0
    assert await one(world.conn, "select tenant_id from waypost.inbox") == 2


async def test_nobody_s_request_is_verified_like_anybody_s(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[bytes] = []
    verify = NOBODY.verifier.verify

    def recorded(proof: Proof, body: bytes, *, now: int, tolerance: int = 0) -> None:
        verified.append(body)
        verify(proof, body, now=now, tolerance=tolerance)

    monkeypatch.setattr(NOBODY.verifier, "verify", recorded)
    for path in ("/events/default/hostile", "/events/hostile/payments"):
        assert (await world.refused(request(b"hostile", path=path))).status == 404

    assert verified == [b"hostile"] * 2


async def test_a_sender_that_is_switched_off_is_asked_to_come_later(world: World) -> None:
    await add_sender(world.conn, "off", state="disabled")

    answer = await world.refused(request(event(), path="/events/default/off"))

    assert (answer.status, answer.headers["retry-after"]) == (503, "60")


async def test_a_retired_sender_is_told_so_if_it_proves_itself(world: World) -> None:
    await add_sender(world.conn, "old", state="retired")

    assert (await world.refused(request(event(), path="/events/default/old"))).status == 410
    assert (await world.refused(request(event(), path="/events/default/old", secret=OTHER))).status == 401


async def test_a_sender_without_secrets_is_never_authentic(world: World) -> None:
    await world.conn.execute("delete from waypost.secret")

    assert (await world.refused(request(event()))).status == 401


async def test_a_secret_that_cannot_be_opened_is_our_fault(world: World) -> None:
    await world.conn.execute("update waypost.secret set key_id = 'moved'")

    answer = await world.refused(request(event()))

    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert world.moments.count("secret.unreadable") == 1
