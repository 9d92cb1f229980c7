"""Events that flows emit: what leaves with a turn, and to whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator import subscriptions
from orchestrator.client import Client
from orchestrator.store.database import Connection
from tests.engine.conftest import Working
from tests.engine.flows import CALLS, FLOWS
from tests.engine.test_worker import REMEMBERING
from tests.invariants import broken

TYPE = "shop.order.packed"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    yield


async def subscriber(conn: Connection, name: str, of: str = TYPE) -> None:
    await conn.execute(
        "insert into waypost.endpoint (tenant_id, name, url, kind) values (1, %s, 'https://a.test/', 'event')",
        (name,),
    )
    await subscriptions.subscribe(conn, of, name)


async def sent(conn: Connection) -> list[tuple[str, dict[str, Any]]]:
    """Endpoint and event of each message, in the order in which they were written."""
    rows = await conn.execute(
        "select endpoint, convert_from(body, 'UTF8') from waypost.outbox where not command order by number"
    )
    return [(endpoint, json.loads(body)) for endpoint, body in await rows.fetchall()]


@REMEMBERING
async def test_what_a_flow_emits_leaves_once_for_each_who_subscribes(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    await subscriber(conn, "billing")
    await subscriber(conn, "audit")
    await subscriber(conn, "others", of="shop.order.placed")

    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("tells"), "A", key="order-A")
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.output) == ("completed", 2)
    found = await sent(conn)
    told = [(endpoint, event["data"]["boxes"]) for endpoint, event in found]
    assert sorted(told) == [("audit", 1), ("audit", 2), ("billing", 1), ("billing", 2)]
    assert len({event["id"] for _, event in found}) == 2
    for _, event in found:
        assert (event["type"], event["subject"]) == (TYPE, "A")
        assert event["source"].endswith(f"/executions/{started.execution_id}")
        assert event["correlationid"] == str(started.execution_id)
    [(messages,)] = await (
        await conn.execute("select count(distinct message_id) from waypost.outbox")
    ).fetchall()
    assert messages == 4
    assert await broken(conn) == []


async def test_what_nobody_subscribes_to_is_written_down_and_goes_nowhere(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = await client.start(FLOWS.get("tells"), "A")
        view = await client.wait(started.execution_id, seconds=30)

    assert view.row.status == "completed"
    assert await sent(conn) == []
    rows = await conn.execute(
        "select payload #>> '{args,data,boxes}' from waypost.journal where kind = 'noted' order by position"
    )
    assert await rows.fetchall() == [("1",), ("2",)]


async def test_an_event_is_in_the_trace_of_its_execution(
    working: Working, client: Client, conn: Connection
) -> None:
    await subscriber(conn, "billing")

    async with working():
        started = await client.start(FLOWS.get("tells"), "A")
        await client.wait(started.execution_id, seconds=30)

    rows = await conn.execute("select payload ->> 'traceparent' from waypost.journal where position = 1")
    [(traceparent,)] = await rows.fetchall()
    assert {event["traceparent"][:35] for _, event in await sent(conn)} == {traceparent[:35]}


async def test_a_turn_that_is_not_committed_emits_nothing(
    working: Working, client: Client, conn: Connection
) -> None:
    """Its journal is full when it would emit."""
    await subscriber(conn, "billing")
    await conn.execute("alter table waypost.outbox add constraint none check (command)")

    async with working():
        started = await client.start(FLOWS.get("tells"), "A")
        view = await client.wait(started.execution_id, seconds=30)

    assert view.row.status == "held"
    assert await sent(conn) == []
    rows = await conn.execute("select kind from waypost.journal order by position")
    assert await rows.fetchall() == [("started",), ("held",)]
