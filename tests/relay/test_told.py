"""Who subscribes to it is told that an endpoint was disabled or enabled; and what becomes of one that is removed."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from psycopg_pool import AsyncConnectionPool

from orchestrator import endpoints, errands
from orchestrator.outbox import explained, see
from orchestrator.registry import UnknownEndpoint
from tests.relay import given
from tests.relay.given import Connection
from tests.relay.hostile import Exchange, Request, answers, hostile, in_turn
from tests.relay.test_complaints import Placed, subscriber
from tests.relay.test_relay import relay

Pool = AsyncConnectionPool[Any]


async def told(conn: Connection, name: str = "ops") -> list[tuple[str, dict[str, Any]]]:
    """What was written for an endpoint: type and data of each, in order."""
    cursor = await conn.execute(
        "select body from waypost.outbox where endpoint = %s order by number", (name,)
    )
    bodies = [json.loads(body) for (body,) in await cursor.fetchall()]
    return [(body["type"].removeprefix("waypost.endpoint."), body["data"]) for body in bodies]


async def test_who_subscribes_is_told_of_a_410_and_of_what_an_operator_does(
    conn: Connection, pool: Pool
) -> None:
    async with hostile(answers(410)) as server:
        await subscriber(conn, server.url, "audit")
        await subscriber(conn, server.url, "ops", of="waypost.endpoint.*")
        await errands.publish(conn, Placed(order="A"))

        await relay(pool).run_once()

    assert await told(conn) == [("disabled", {"endpoint": "audit", "reason": "gone"})]
    for _ in range(2):  # said again it is no news
        await endpoints.enable(conn, "audit")
    for _ in range(2):
        await endpoints.disable(conn, "audit")
    assert (await told(conn))[1:] == [
        ("enabled", {"endpoint": "audit"}),
        ("disabled", {"endpoint": "audit", "reason": "operator"}),
    ]


async def test_what_is_told_is_an_event_that_arrives(conn: Connection, pool: Pool) -> None:
    async with hostile(answers(204)) as server:
        await subscriber(conn, server.url, "ops", of="waypost.endpoint.disabled", ordered_by="key")
        await given.endpoint(conn, server.url, name="billing")
        await endpoints.disable(conn, "billing")

        await relay(pool).run_once()

    [request] = server.requests
    event = json.loads(request.body)
    assert {name: event[name] for name in ("specversion", "source", "type", "subject", "data")} == {
        "specversion": "1.0",
        "source": "waypost:endpoint",
        "type": "waypost.endpoint.disabled",
        "subject": "billing",
        "data": {"endpoint": "billing", "reason": "operator"},
    }


async def test_where_nobody_subscribes_nothing_is_written(conn: Connection) -> None:
    await given.endpoint(conn, "http://127.0.0.1:8/")

    await endpoints.disable(conn, "payments")

    assert await told(conn, "payments") == []


async def test_what_waits_for_an_endpoint_that_is_removed_is_discarded_and_others_get_it(
    conn: Connection, pool: Pool
) -> None:
    """Elsewhere the first endpoint of many that was missing stopped the rest (convoy 2746)."""

    async def removes(exchange: Exchange, request: Request) -> None:
        """One more event is being sent to it when it goes."""
        await endpoints.remove(conn, "audit")
        await exchange.write(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")

    async with hostile(in_turn(removes)) as going, hostile(answers(204)) as staying:
        await subscriber(conn, going.url, "audit")
        await subscriber(conn, staying.url, "billing")
        await endpoints.change(conn, "audit", {"concurrency": 1})
        for order in "AB":
            await errands.publish(conn, Placed(order=order))

        await relay(pool).run_once()
        await conn.execute("update waypost.outbox set due_at = now() where state = 'due'")
        await relay(pool).run_once()

    cursor = await conn.execute(
        "select message_id, state from waypost.outbox where endpoint = 'audit' order by state"
    )
    rows = await cursor.fetchall()
    assert [state for _, state in rows] == ["dead", "discarded"]
    for message, _ in rows:
        assert "its endpoint was removed" in explained(await see(conn, message))
    assert len(staying.requests) == 2
    assert await (await conn.execute("select endpoint from waypost.subscription")).fetchall() == [
        ("billing",)
    ]
    with pytest.raises(UnknownEndpoint):
        await endpoints.remove(conn, "audit")


async def test_a_command_to_an_endpoint_that_is_removed_waits_until_its_time_is_over(
    conn: Connection, pool: Pool
) -> None:
    """Its flow is told then; and should the endpoint come back, it is sent."""
    await given.endpoint(conn, "http://127.0.0.1:8/")
    message = await given.message(conn, await given.execution(conn))
    await endpoints.remove(conn, "payments")

    await relay(pool).run_once(now=given.NOON + timedelta(seconds=1))

    found = await given.row(conn, message)
    assert (found["state"], found["attempts"], found["spared"]) == ("due", 1, 1)
