"""What a sender is told: the statuses that it wants, and those that are told whatever it wants."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from psycopg.conninfo import make_conninfo

from orchestrator import inbox
from orchestrator.registry import set_sender
from orchestrator.store import database
from orchestrator.telemetry import instruments
from orchestrator.telemetry.meters import Meters
from tests.receiver.test_batches import batch
from tests.receiver.test_providers import CHALLENGE, known, sent
from tests.receiver.test_quarantine import PAYOUT
from tests.receiver.world import OTHER, Connection, Pool, add_sender, event, one, request, running
from tests.telemetry.test_meters import found

KEEP: Final = {"connection": "keep-alive"}


async def answering(conn: Connection, **answers: Any) -> None:
    await add_sender(conn)
    await set_sender(conn, "payments", settings={"answers": answers})


@pytest.mark.parametrize("ack", [200, 204])
async def test_what_is_taken_is_acknowledged_as_its_sender_wants(
    pool: Pool, conn: Connection, ack: int
) -> None:
    await answering(conn, ack=ack)
    over = event(expirytime="2026-01-01T00:00:00Z")
    async with running(pool, conn) as world:
        twice = request(event(), replace=KEEP)
        kept = await world.send(twice + twice + request(event()))
        answers = [await world.post(over), await world.post(over), await world.send(batch(event()))]

    heads = [head for head in kept.raw.split(b"HTTP/1.1 ") if head]
    assert [int(head[:3]) for head in heads] == [ack] * 3
    assert [b"X-Inbox: duplicate" in head for head in heads] == [False, True, False]
    assert [answer.status for answer in answers] == [ack] * 3
    if ack == 204:
        assert all(head.endswith(b"\r\n\r\n") and b"Content-" not in head for head in heads)
        assert all(answer.raw.endswith(b"\r\n\r\n") for answer in answers)
    else:
        assert all(answer.json["answer"] in {"quarantined", "batch"} for answer in answers)


async def test_a_challenge_is_answered_200_whatever_events_are_answered(pool: Pool, conn: Connection) -> None:
    # hookdeck/webhook-skills 185: an acknowledgement is no answer to a challenge.
    await known(conn, "slack", {"answers": {"ack": 204}})
    async with running(pool, conn) as world:
        answer = await world.send(sent("slack", CHALLENGE))

    assert (answer.status, answer.raw.rpartition(b"\r\n")[2].decode()) == (200, CHALLENGE["challenge"])


async def test_what_is_kept_apart_may_be_told_with_its_status(pool: Pool, conn: Connection) -> None:
    await answering(conn, conflict=202, contract=422)
    await inbox.add_contract(conn, "payout.made", PAYOUT)
    async with running(pool, conn) as world:
        await world.post(event(id="1", data={"amount": 1}))
        conflict = await world.post(event(id="1", data={"amount": 2}))
        contract = await world.post(event(id="hostile", data={"amount": "hostile"}))

    assert (conflict.status, conflict.json) == (202, {"answer": "quarantined"})
    assert (contract.status, b"hostile" in contract.raw) == (422, False)
    assert await one(conn, "select array_agg(reason order by quarantine_id) from waypost.quarantine") == [
        "conflict",
        "contract",
    ]


async def test_a_webhook_whose_name_is_taken_may_be_told_409(pool: Pool, conn: Connection) -> None:
    rules = {"source": "=/acme", "id": "/id", "type": "=payout.made"}
    await add_sender(conn)
    await set_sender(conn, "payments", settings={"event": rules, "answers": {"conflict": 409}})
    plain = {"content-type": "application/json"}
    async with running(pool, conn) as world:
        answers = [
            await world.send(request(json.dumps({"id": "1", "n": n}).encode(), replace=plain)) for n in (1, 2)
        ]

    assert [answer.status for answer in answers] == [202, 409]


@pytest.mark.parametrize(
    ("origin", "status"),
    [("hooks.acme.example", 202), ("hooks.acme.example.hostile.example", 403), (None, 403)],
)
async def test_a_sender_whose_origin_must_be_allowed_names_one(
    pool: Pool, conn: Connection, origin: str | None, status: int
) -> None:
    await add_sender(conn)
    settings = {"origins": ["hooks.acme.example"], "origin_required": True}
    await set_sender(conn, "payments", settings=settings)
    made = request(event(), replace={"webhook-request-origin": origin})
    async with running(pool, conn) as world:
        answer = await (world.send(made) if status == 202 else world.refused(made))

    assert answer.status == status


async def test_who_waits_too_long_for_a_lock_is_told_when_to_come_again(dsn: str, conn: Connection) -> None:
    """Whoever holds the key of an event keeps others waiting: they hear 503, and are stored when they come again."""
    await add_sender(conn)
    brief = make_conninfo(dsn, options="-c lock_timeout=20")
    made = request(event(id="1"))
    async with database.pool(brief, size=2, name="test") as pool, running(pool, conn) as world:
        async with conn.transaction():
            await conn.execute(
                "select waypost.lock_keys(array[1], array['payout.made'], array['order-1042'])"
            )
            answer = await world.send(made)
        again = await world.send(made)

    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert (again.status, "x-inbox" in again.headers) == (202, False)


async def test_each_request_is_counted_once_with_what_became_of_it(pool: Pool, conn: Connection) -> None:
    rules = {"source": "=/acme", "id": "/id", "type": "=payout.made"}
    challenge = {"at": "/type", "value": "ping", "answer": "/answer"}
    settings = {
        "event": rules,
        "challenge": challenge,
        "origins": ["acme.example"],
        "answers": {"contract": 422},
    }
    await add_sender(conn)
    await set_sender(conn, "payments", settings=settings)
    await inbox.add_contract(conn, "payout.made", PAYOUT)
    plain = {"content-type": "application/json"}
    asks = {"webhook-request-origin": "acme.example"}
    first = event(id="1", data={"amount": 1})
    requests: dict[tuple[str, str, str], bytes] = {
        ("payments", "accepted", ""): request(first),
        ("payments", "duplicate", ""): request(first),
        ("payments", "quarantined", "conflict"): request(event(id="1", data={"amount": 2})),
        ("payments", "quarantined", "contract"): request(event(data={"amount": 0})),
        ("payments", "quarantined", "mapping"): request(b"{}", replace=plain),
        ("payments", "quarantined", "expired"): request(event(expirytime="2026-01-01T00:00:00Z")),
        ("payments", "asked", ""): request(b'{"type": "ping", "answer": "pong"}', replace=plain),
        ("payments", "empty", ""): batch(),
        ("", "rejected", "no-consent"): request(b"", method="OPTIONS"),
        ("", "rejected", "method"): request(b"", method="GET"),
        ("", "rejected", "route"): request(b"", path="/nowhere"),
        ("", "rejected", "unknown-sender"): request(first, path="/events/default/nobody"),
        ("", "rejected", "signature-mismatch"): request(first, secret=OTHER),
        ("", "rejected", "malformed-event"): request(event(id="")),
        ("", "rejected", "content-type"): request(
            first, replace={"content-type": "application/cloudevents+avro"}
        ),
        ("", "rejected", "header-count"): request(first, more=[("x-more", "1")] * 64),
        ("", "rejected", "no-http"): b"no HTTP at all\r\n\r\n",
    }
    async with running(pool, conn) as world:
        for became, made in requests.items():
            meters = Meters("receiver")
            world.moments.all.clear()
            await world.send(made)
            for moment, fields in world.moments.all:
                meters.saw(moment, **fields)
            counted = found(meters, instruments.RECEIVED)
            meters.close()
            assert counted == {became: 1}
        world.moments.all.clear()
        await world.send(request(b"", method="OPTIONS", replace=asks))
        assert world.moments.count("sender.consented", sender="payments") == 1
