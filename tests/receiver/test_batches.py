"""Batches, and all content modes of the conformance suite, at the live receiver over a raw socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from contracts.envelope import decode_structured
from contracts.limits import RECEIVE_EVENTS_MAX
from orchestrator import inbox
from orchestrator.registry import set_sender
from orchestrator.store import inbox as store
from tests.contracts.conformance import events
from tests.receiver.world import (
    VAULT,
    Connection,
    Pool,
    World,
    add_command,
    add_sender,
    add_wait,
    dump,
    event,
    one,
    reply,
    request,
    running,
)

BATCH: Final = {"content-type": "application/cloudevents-batch+json; charset=utf-8"}
NAMES: Final = "select event_id from waypost.inbox order by inbox_id"


async def names(conn: Connection) -> list[str]:
    return [name for (name,) in await (await conn.execute(NAMES)).fetchall()]


def batch(*elements: Any, **how: Any) -> bytes:
    return request(json.dumps(list(elements)).encode(), replace=BATCH, **how)


def taken(count: int, duplicates: int = 0) -> dict[str, object]:
    return {"answer": "batch", "events": count, "duplicates": duplicates, "quarantined": 0}


async def test_all_events_of_a_batch_are_stored_and_wake_who_waits(world: World) -> None:
    execution_id = await add_wait(world.conn, type="payout.made", key="order-2")

    answer = await world.send(batch(event(id="b", subject="order-1"), event(id="a", subject="order-2")))

    assert (answer.status, answer.json) == (202, taken(2))
    assert sorted(await names(world.conn)) == ["a", "b"]
    assert await one(world.conn, "select execution_id from waypost.mail") == execution_id
    assert world.hints == ["execution"]


async def test_an_empty_batch_is_taken(world: World) -> None:
    answer = await world.send(batch())

    assert (answer.status, answer.json) == (202, taken(0))


async def test_copies_in_a_batch_are_one_event_and_the_batch_again_is_a_duplicate(world: World) -> None:
    twice = event(id="twice")

    answer = await world.send(batch(twice, twice))
    again = await world.send(batch(twice, twice))
    alone = await world.post(twice)

    assert (answer.json, "x-inbox" in answer.headers) == (taken(2, 1), False)
    assert (again.json, again.headers["x-inbox"]) == (taken(2, 2), "duplicate")
    assert (alone.status, alone.headers["x-inbox"]) == (202, "duplicate")
    assert await names(world.conn) == ["twice"]


async def test_two_batches_of_the_same_events_in_other_orders_are_both_answered(world: World) -> None:
    elements = [event(id=str(number), subject=f"order-{number}") for number in range(20)]
    sent = [batch(*(elements if turn % 2 else elements[::-1]), webhook_id=f"msg_{turn}") for turn in range(6)]

    answers = [answer.status for answer in await gathered(world, sent)]

    assert answers == [202] * 6
    assert sorted(await names(world.conn)) == sorted(str(number) for number in range(20))


async def gathered(world: World, requests: list[bytes]) -> list[Any]:
    return await asyncio.gather(*(world.send(sent) for sent in requests))


GOOD: Final = event(id="good", subject="order-1042")


@pytest.mark.parametrize(
    ("elements", "status"),
    [
        pytest.param([GOOD, event(id="hostile", specversion="0.9")], 400, id="mixed-specversion"),
        pytest.param([GOOD, event(id=None)], 400, id="without-id"),
        pytest.param([GOOD, "hostile"], 400, id="no-object"),
        pytest.param([GOOD, [GOOD]], 400, id="batch-in-batch"),
        pytest.param([GOOD, event(id="hostile", source="waypost:hostile")], 403, id="our-source"),
        pytest.param([GOOD, event(id="good", data={"hostile": True})], 409, id="one-name-two-contents"),
        pytest.param([GOOD] * (RECEIVE_EVENTS_MAX + 1), 413, id="too-many"),
    ],
)
async def test_a_batch_with_one_bad_element_stores_nothing(
    world: World, elements: list[Any], status: int
) -> None:
    answer = await world.refused(batch(*elements))

    assert answer.status == status


@pytest.mark.parametrize("body", [b"{}", b"null", b'"hostile"', b"[", b"[1,]", b""])
async def test_what_is_no_array_of_events_is_no_batch(world: World, body: bytes) -> None:
    assert (await world.refused(request(body, replace=BATCH))).status == 400


async def test_a_reply_that_its_sender_may_not_give_refuses_its_batch(world: World) -> None:
    _, message_id = await add_command(world.conn, endpoint="shipping")

    assert (await world.refused(batch(event(id="good"), reply(message_id)))).status == 403


async def test_an_event_whose_name_is_taken_by_another_refuses_its_batch(world: World) -> None:
    await world.post(event(id="1"))

    answer = await world.refused(batch(event(id="2"), event(id="1", data={"hostile": True})))

    assert answer.status == 409


async def test_an_id_has_no_dot_so_no_request_can_take_an_element_s_name(world: World) -> None:
    await world.send(batch(event(id="1"), webhook_id="msg"))

    assert (await world.post(event(id="2"), webhook_id="msg.0")).status == 400
    assert (await world.post(event(id="2"), webhook_id="msg")).status == 202


# ---- the conformance suite ---------------------------------------------------------------------------------------


@pytest.fixture
async def any_source(pool: Pool, conn: Connection) -> AsyncIterator[World]:
    await add_sender(conn, binary_mode=True)
    async with running(pool, conn) as world:
        yield world


def cases(name: str) -> list[tuple[str, Any]]:
    found = events(name)
    if found[0].values[0] is None:
        pytest.skip("the suite is not here")
    return [(str(it.id), it.values[0]) for it in found]


async def test_every_valid_event_of_the_suite_is_stored_alone_and_all_of_them_as_a_batch(
    any_source: World,
) -> None:
    valid = cases("valid-events.json")
    assert len(valid) >= 10

    for number, (name, it) in enumerate(valid):
        sent = {**it, "id": f"{it['id']}-{number}"}
        answer = await any_source.post(sent, webhook_id=f"msg_{number}")
        assert answer.status == 202, name
        body = await one(any_source.conn, "select body from waypost.inbox where event_id = %s", sent["id"])
        assert bytes(body) == json.dumps(sent).encode(), name
        assert decode_structured(body).id == sent["id"], name

    answer = await any_source.send(
        batch(*({**it, "id": f"b-{number}"} for number, (_, it) in enumerate(valid)))
    )
    assert (answer.status, answer.json) == (202, taken(len(valid)))


async def test_every_invalid_event_of_the_suite_is_refused_alone_and_in_a_batch(any_source: World) -> None:
    invalid = cases("invalid-events.json")
    assert len(invalid) >= 25
    before = await dump(any_source.conn)

    for name, it in invalid:
        assert (await any_source.post(it)).status == 400, name
        assert (await any_source.send(batch(event(), it))).status == 400, name

    assert await dump(any_source.conn) == before


# ---- in part -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def partial(pool: Pool, conn: Connection) -> AsyncIterator[World]:
    """A receiver whose sender wants its batches to be taken in part."""
    await add_sender(conn)
    await set_sender(conn, "payments", settings={"batch": "partial", "sources": ["/payments"]})
    async with running(pool, conn) as world:
        yield world


async def test_of_a_partial_batch_what_is_an_event_is_stored_and_the_rest_is_kept_apart(
    partial: World,
) -> None:
    await partial.post(event(id="taken"))
    sent = batch(
        event(id="a"), event(id=None), "no event", event(id="b", source="/others"), event(id="a2", specversion="0.9"),
        event(id="taken", data={"other": True}), event(id="c", expirytime="2026-01-01T00:00:00Z"), event(id="d"),
    )  # fmt: skip

    answer = await partial.send(sent)
    again = await partial.send(sent)

    apart = ["invalid", "invalid", "invalid", "invalid", "conflict", "expired"]
    assert (answer.status, "x-inbox" in answer.headers) == (202, False)
    assert answer.json == {
        "answer": "batch", "events": 2, "duplicates": 0, "quarantined": 6, "items": ["stored", *apart, "stored"],
    }  # fmt: skip
    assert (again.status, again.headers["x-inbox"]) == (202, "duplicate")
    assert again.json["items"] == ["duplicate", *apart, "duplicate"]
    assert sorted(await names(partial.conn)) == ["a", "d", "taken"]


async def test_what_a_partial_batch_might_not_say_is_let_in_when_it_may(partial: World) -> None:
    await partial.send(batch(event(id="b", source="/others")))
    [item] = await store.read(partial.conn, tenant=1, reason="invalid", limit=5)
    with pytest.raises(inbox.StillApart, match="source"):
        await inbox.redrive(partial.conn, VAULT, item.id, by="ada")

    await set_sender(partial.conn, "payments", settings={"sources": []})

    assert await inbox.redrive(partial.conn, VAULT, item.id, by="ada") == "stored"
    assert await names(partial.conn) == ["b"]


async def test_what_is_no_array_is_no_partial_batch_either(partial: World) -> None:
    assert (await partial.refused(request(b"{}", replace=BATCH))).status == 400
    assert (await partial.refused(batch(*[GOOD] * (RECEIVE_EVENTS_MAX + 1)))).status == 413
    assert (await partial.send(batch())).json["items"] == []
