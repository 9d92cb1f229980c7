"""What other receivers were reported for, each as a test named after what it protects.

Those of one part stand beside the others of that part, with the report's name in a comment: signatures in
test_schemes.py, forms, limits, challenges and origins in test_providers.py, waits in tests/engine/test_events.py. What
no report is about, but what breaks parsers (NUL, surrogates, depth, digits, bombs, headers), is in test_refusals.py,
test_binary.py and test_listener.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any, Final

import pytest

from contracts.codec import Codec, Sealing
from contracts.envelope import decode_structured
from orchestrator.registry import set_sender
from receiver.settings import ReceiverSettings
from tests.receiver.test_intake import failing
from tests.receiver.world import (
    NOW,
    Connection,
    Pool,
    World,
    add_command,
    add_sender,
    add_wait,
    event,
    in_headers,
    one,
    request,
    running,
)


async def test_a_capture_from_a_clock_that_is_ahead_is_one_event_as_long_as_it_is_fresh(world: World) -> None:
    # Coolhand-Labs/coolhand-ruby 123 (a): a memory of ids that ends with the tolerance, counted from the first request.
    sent = request(event(), at=NOW + 300)

    answers = [await world.send(sent)]
    for later in (301, 599, 600, 601, 86_400):
        world.receiver.clock = lambda later=later: NOW + later
        answers.append(await world.send(sent))

    assert [answer.status for answer in answers] == [202] * 6
    assert [answer.headers.get("x-inbox") for answer in answers] == [None, *["duplicate"] * 5]
    assert await one(world.conn, "select count(*) from waypost.inbox") == 1


async def test_a_request_that_failed_has_claimed_nothing_so_its_retry_is_taken(world: World) -> None:
    # Coolhand-Labs/coolhand-ruby 123 (b): an id that was claimed before the work failed made each retry a replay.
    await failing(world.conn, times=1, errcode="P0001")
    sent = request(event())

    answers = [await world.send(sent) for _ in range(3)]

    assert [answer.status for answer in answers] == [500, 202, 202]
    assert [answer.headers.get("x-inbox") for answer in answers[1:]] == [None, "duplicate"]


TYPES: Final = ("order.created", "order.updated", "order.closed")


@pytest.mark.parametrize("order", list(permutations(range(3))))
async def test_events_in_any_order_and_twice_come_to_the_same(world: World, order: Sequence[int]) -> None:
    # webrenew/memories 396, stripe-cli 418, stripe-firebase-extensions 119, FormSG 6022: `updated` before `created`.
    execution_id, _ = await add_command(world.conn)
    for type_ in TYPES:
        await world.conn.execute(
            "insert into waypost.wait (tenant_id, execution_id, path, type, key) values (1, %s, %s, %s, '7')",
            (execution_id, type_, type_),
        )
    events = [event(id=type_, type=type_, subject="7", data=type_) for type_ in TYPES]

    answers = [await world.post(events[index]) for index in (*order, *reversed(order))]

    assert {answer.status for answer in answers} == {202}
    mail = await (
        await world.conn.execute("""
        select m.path, i.event_id, i.data
          from waypost.mail m
          join waypost.inbox i using (inbox_id)
         order by m.path
        """)
    ).fetchall()
    assert mail == [(type_, type_, type_) for type_ in sorted(TYPES)]
    assert await one(world.conn, "select mail_received from waypost.execution") == 3


@pytest.mark.parametrize(("body", "data"), [(b'"x"', "x"), (b"true", True), (b"7", 7), (b"null", None)])
async def test_json_that_is_no_object_is_json_in_headers_too(world: World, body: bytes, data: Any) -> None:
    # cloudevents/spec 558: a string without its quotes.
    await set_sender(world.conn, "payments", binary_mode=True)

    answer = await world.send(in_headers(event(), body=body))
    bare = await world.refused(in_headers(event(id="hostile"), body=b"x"))

    assert (answer.status, bare.status, bare.json["attributes"]) == (202, 400, ["data"])
    stored, kept = await one(world.conn, "select data, body from waypost.inbox")
    assert (stored, decode_structured(kept).data) == (data, body)


@pytest.mark.parametrize("payload_keys", [False, True])
async def test_a_stranger_cannot_send_what_looks_sealed(
    world: World, payload_keys: bool
) -> None:  # a parameter
    """Whoever waits for it would be held for a key that nobody has."""
    Sealing.codec = Codec([("k", bytes(32))], bytes) if payload_keys else None
    try:
        answer = await world.refused(request(event(data={"sealed": {"key": "x", "box": "y"}})))
        beside = await world.post(event(id="e2", data={"sealed": {"key": "x", "box": "y"}, "order": 1}))
    finally:
        Sealing.codec = None

    assert (answer.status, answer.json["attributes"], beside.status) == (400, ["data"], 202)


async def test_an_event_is_acknowledged_before_anybody_acts_on_it(pool: Pool, conn: Connection) -> None:
    # Shopify 543046: whoever acts first and acknowledges then is sent the event again after five seconds.
    await add_sender(conn)
    execution_id = await add_wait(conn, type="payout.made", key="order-1042")
    async with running(pool, conn, settings=ReceiverSettings(wait_seconds=5)) as world:
        answer = await world.post(event())

    assert answer.status == 202
    got = await one(
        conn,
        "select mail_received, mail_read, owner from waypost.execution where execution_id = %s",
        execution_id,
    )
    assert got == (1, 0, None)
