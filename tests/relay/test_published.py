"""What applications publish: a signed event at each endpoint that subscribes, tried until it is taken or over."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb
from psycopg_pool import AsyncConnectionPool
from standardwebhooks import Webhook

from contracts.envelope import STRUCTURED, decode_structured
from contracts.limits import PUBLISHED_LIFE
from orchestrator import Event, errands, subscriptions
from orchestrator.subscriptions import (
    SubscriptionInvalid,
    TakesCommands,
    UnknownEndpoint,
    UnknownSubscription,
)
from tests.invariants import broken
from tests.relay import given
from tests.relay.given import SECRET, Connection
from tests.relay.hostile import answers, hostile, in_turn, then
from tests.relay.test_relay import relay

Pool = AsyncConnectionPool[psycopg.AsyncConnection[tuple[object, ...]]]


class Placed(Event, type="shop.order.placed", key="order"):
    order: str


async def subscriber(conn: Connection, url: str, name: str = "billing") -> None:
    await given.endpoint(conn, url, name=name)
    await conn.execute("update waypost.endpoint set kind = 'event' where name = %s", (name,))
    await subscriptions.subscribe(conn, "shop.order.placed", name)


async def messages(conn: Connection) -> list[tuple[object, ...]]:
    cursor = await conn.execute("select state, attempts, reached from waypost.outbox order by endpoint")
    return await cursor.fetchall()


async def test_what_an_application_publishes_arrives_signed_at_every_subscriber(
    conn: Connection, pool: Pool
) -> None:
    async with hostile(answers(202)) as billing, hostile(answers(200)) as audit:
        await subscriber(conn, billing.url)
        await subscriber(conn, audit.url, "audit")
        told = await errands.publish(conn, Placed(order="A"), source="/shop")

        assert await relay(pool).run_once() == 2

        requests = [*billing.requests, *audit.requests]
        for request in requests:
            Webhook(SECRET.text).verify(request.body, request.headers)
            event = decode_structured(request.body)
            assert (event.id, event.source, event.subject) == (told, "/shop", "A")
            assert event.data == {"order": "A"}
            assert request.headers["content-type"] == STRUCTURED
        assert len({request.headers["webhook-id"] for request in requests}) == 2
        assert await messages(conn) == [("delivered", 1, True)] * 2
        assert await broken(conn) == []


async def test_an_event_is_tried_again_under_the_same_identity(conn: Connection, pool: Pool) -> None:
    async with hostile(in_turn(then(503), then(202))) as server:
        await subscriber(conn, server.url)
        await errands.publish(conn, Placed(order="A"))

        await relay(pool).run_once()
        await conn.execute("update waypost.outbox set due_at = now()")
        await relay(pool).run_once()

        first, second = server.requests
        assert (first.body, first.headers["webhook-id"]) == (second.body, second.headers["webhook-id"])
        assert await messages(conn) == [("delivered", 2, True)]


@pytest.mark.parametrize(("status", "endpoint"), [(400, "enabled"), (301, "enabled"), (410, "disabled")])
async def test_an_event_that_is_not_taken_is_tried_again_and_nobody_is_told(
    conn: Connection, pool: Pool, status: int, endpoint: str
) -> None:
    async with hostile(answers(status)) as server:
        await subscriber(conn, server.url)
        await errands.publish(conn, Placed(order="A"))

        await relay(pool).run_once()

        assert [state for state, *_ in await messages(conn)] == ["due"]
        [(mail,)] = await (await conn.execute("select count(*) from waypost.inbox")).fetchall()
        assert mail == 0
        [(state,)] = await (await conn.execute("select state from waypost.endpoint")).fetchall()
        assert state == endpoint


async def test_an_event_whose_last_try_has_failed_is_a_dead_letter_with_its_reason(
    conn: Connection, pool: Pool
) -> None:
    async with hostile(in_turn(then(500), then(503))) as server:
        await subscriber(conn, server.url)
        await conn.execute(
            "update waypost.endpoint set schedule = %s", (Jsonb({"delays": [1], "attempts": 2}),)
        )
        await errands.publish(conn, Placed(order="A"))

        await relay(pool).run_once()
        await conn.execute("update waypost.outbox set due_at = now()")
        await relay(pool).run_once()

        assert await messages(conn) == [("dead", 2, True)]
        cursor = await conn.execute("select fault, ended_at is not null from waypost.outbox")
        assert await cursor.fetchall() == [("http-503", True)]


async def test_an_event_that_nobody_takes_is_over_after_three_days(conn: Connection, pool: Pool) -> None:
    async with hostile(answers(503)) as server:
        await subscriber(conn, server.url)
        await errands.publish(conn, Placed(order="A"))
        [(began,)] = await (await conn.execute("select due_at from waypost.outbox")).fetchall()

        await relay(pool).run_once(now=began + PUBLISHED_LIFE - timedelta(seconds=1))
        assert await messages(conn) == [("due", 1, True)]

        await relay(pool).run_once(now=began + PUBLISHED_LIFE)
        assert await messages(conn) == [("dead", 1, True)]
        assert await (await conn.execute("select fault from waypost.outbox")).fetchall() == [("expired",)]


async def test_a_claim_on_an_event_whose_relay_is_silent_expires(conn: Connection, pool: Pool) -> None:
    await subscriber(conn, "https://billing.test/")
    await errands.publish(conn, Placed(order="A"))
    await conn.execute(
        "update waypost.outbox set state = 'sending', attempts = 1, token = gen_random_uuid(), lease_until = now()"
    )

    await conn.execute("select waypost.expire_claims(10)")

    assert await messages(conn) == [("due", 1, True)]


# ---- subscriptions -------------------------------------------------------------------------------------------------


async def test_who_subscribes_gets_what_is_published_from_then_on_and_until_it_ends(conn: Connection) -> None:
    await errands.publish(conn, Placed(order="before"))
    await subscriber(conn, "https://billing.test/")
    await errands.publish(conn, Placed(order="while"))
    await subscriptions.unsubscribe(conn, "shop.order.placed", "billing")
    await errands.publish(conn, Placed(order="after"))

    cursor = await conn.execute(
        "select convert_from(body, 'UTF8')::jsonb #>> '{data,order}' from waypost.outbox"
    )
    assert await cursor.fetchall() == [("while",)]


async def test_subscribing_twice_is_said_and_changes_nothing(conn: Connection) -> None:
    await subscriber(conn, "https://billing.test/")

    assert await subscriptions.subscribe(conn, "shop.order.placed", "billing") is False


async def test_what_cannot_subscribe_is_named(conn: Connection) -> None:
    await given.endpoint(conn, "https://pay.test/", name="payments")

    with pytest.raises(UnknownEndpoint, match="no endpoint is named 'nobody'"):
        await subscriptions.subscribe(conn, "paid", "nobody")
    with pytest.raises(TakesCommands, match="expected one of the kind event, found one of the kind command"):
        await subscriptions.subscribe(conn, "paid", "payments")
    with pytest.raises(SubscriptionInvalid, match="type '': expected 1 to 512 bytes"):
        await subscriptions.subscribe(conn, "", "payments")
    with pytest.raises(UnknownSubscription, match="'payments' does not get events of type 'paid'"):
        await subscriptions.unsubscribe(conn, "paid", "payments")
