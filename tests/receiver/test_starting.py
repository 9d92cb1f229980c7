"""Events over HTTP that start flows: what was acknowledged has started what it starts, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest

from contracts import trace
from orchestrator.store import definitions
from orchestrator.store.definitions import Definition
from tests.invariants import broken
from tests.receiver.world import Connection, Pool, World, add_sender, add_wait, dump, event, one, running

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-03"


@pytest.fixture
async def billing(world: World) -> AsyncIterator[World]:
    """A receiver; `payout.made` starts the flow `billing`."""
    await definitions.publish(world.conn, [Definition("billing", "3", on="payout.made")])
    yield world


async def executions(conn: Connection) -> list[tuple[Any, ...]]:
    cursor = await conn.execute(
        "select e.execution_id, e.business_key, j.payload from waypost.execution e"
        "  join waypost.journal j using (tenant_id, execution_id) where definition = 'billing' order by events_after"
    )
    return await cursor.fetchall()


async def test_an_event_is_acknowledged_with_what_it_starts(billing: World) -> None:
    answer = await billing.post(event(id="e-1", data={"amount": 4200}))

    assert (answer.status, answer.json) == (202, {"answer": "event"})
    [(_, key, started)] = await executions(billing.conn)
    assert (key, started["input"], started["version"]) == ("order-1042", {"amount": 4200}, "3")
    assert (started["event"]["source"], started["event"]["id"]) == ("/payments", "e-1")
    assert billing.hints == ["execution"]
    assert await broken(billing.conn, scripted=True) == []


async def test_an_event_that_comes_again_is_acknowledged_and_starts_nothing(billing: World) -> None:
    """Under its id or under its webhook id, and by whichever connection."""
    first = event(id="e-1")
    await billing.post(first)
    before = await dump(billing.conn)

    answers = [await billing.post(first), await billing.post(first, webhook_id="another")]

    assert [(it.status, it.json) for it in answers] == [(202, {"answer": "event"})] * 2
    assert await dump(billing.conn) == before


async def test_another_event_of_the_key_is_acknowledged_and_starts_nothing(billing: World) -> None:
    await billing.post(event(id="e-1"))

    answer = await billing.post(event(id="e-2"))

    assert answer.status == 202
    assert len(await executions(billing.conn)) == 1


@pytest.mark.parametrize(
    ("given", "joins"), [(TRACEPARENT, True), ("no traceparent", False), (None, False), (17, False)]
)
async def test_an_execution_joins_the_trace_of_its_event(billing: World, given: Any, *, joins: bool) -> None:
    await billing.post(event(traceparent=given))

    [(execution, _, started)] = await executions(billing.conn)
    expected = trace.child(TRACEPARENT, str(execution)) if joins else trace.root(str(execution))
    assert started["traceparent"] == expected
    assert started["event"]["traceparent"] == (TRACEPARENT.replace("-03", "-01") if joins else None)


async def test_an_event_that_says_no_trace_is_in_the_one_of_its_request(billing: World) -> None:
    other = TRACEPARENT.replace("b7ad", "aaaa")
    await billing.post(event(id="1", subject="1"), more=[("traceparent", TRACEPARENT)])
    await billing.post(event(id="2", subject="2", traceparent=other), more=[("traceparent", TRACEPARENT)])

    said = [started["event"]["traceparent"] for _, _, started in await executions(billing.conn)]

    assert sorted(map(str, said)) == sorted(it.replace("-03", "-01") for it in (TRACEPARENT, other))


async def test_an_event_without_a_subject_starts_an_execution_without_a_key(billing: World) -> None:
    await billing.post(event(subject=None))
    await billing.post(event(subject=None))

    assert [key for _, key, _ in await executions(billing.conn)] == [None, None]


async def test_data_that_is_no_json_is_the_input_as_base64(billing: World) -> None:
    """The flow's input has fields, so the worker holds the execution; nothing of the event is lost."""
    await billing.post(event(data=None, data_base64="aGVsbG8="))

    [(_, _, started)] = await executions(billing.conn)
    assert started["input"] == "aGVsbG8="


async def test_who_waits_gets_the_event_too(billing: World) -> None:
    waits = await add_wait(billing.conn, type="payout.made", key="order-1042")

    await billing.post(event())

    assert len(await executions(billing.conn)) == 1
    assert (
        await one(billing.conn, "select mail_received from waypost.execution where execution_id = %s", waits)
        == 1
    )


async def test_two_receivers_start_an_execution_for_each_key_once(pool: Pool, conn: Connection) -> None:
    """Forty events of ten keys, posted to both at once; each key comes from two senders in two orders."""
    await add_sender(conn)
    await definitions.publish(conn, [Definition("billing", "3", on="payout.made", key="/order")])
    events = [
        event(id=f"{who} {n} {again}", subject=f"{who} {n}", data={"order": f"o{n}"})
        for again in range(2)
        for who, numbers in (("a", range(10)), ("b", reversed(range(10))))
        for n in numbers
    ]
    async with running(pool, conn) as one_receiver, running(pool, conn) as other:
        answers = await asyncio.gather(
            *(receiver.post(it) for it in events for receiver in (one_receiver, other))
        )

    assert {answer.status for answer in answers} == {202}
    found = await executions(conn)
    assert sorted(key for _, key, _ in found) == [f"o{n}" for n in range(10)]
    assert all(isinstance(execution, UUID) for execution, _, _ in found)
    assert await broken(conn, scripted=True) == []
