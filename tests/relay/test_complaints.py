"""What went wrong elsewhere, as people reported it: each must not happen here."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from psycopg_pool import AsyncConnectionPool

from orchestrator import Event, errands, subscriptions
from orchestrator.outbox import explained, put_back, see
from tests.relay import given
from tests.relay.given import NOON, Connection
from tests.relay.hostile import answers, hostile, in_turn, says, then
from tests.relay.test_relay import relay

Pool = AsyncConnectionPool[Any]


class Placed(Event, type="shop.order.placed", key="order"):
    order: str


async def subscriber(
    conn: Connection, url: str, name: str, of: str = "shop.order.placed", **more: Any
) -> None:
    await given.endpoint(conn, url, name=name)
    await conn.execute("update waypost.endpoint set kind = 'event' where name = %s", (name,))
    await subscriptions.subscribe(conn, of, name, **more)


async def test_retries_of_one_event_to_two_endpoints_do_not_replace_each_other(
    conn: Connection, pool: Pool
) -> None:
    """Elsewhere a retry was named after the event alone, and one of the two was lost."""
    async with hostile(in_turn(then(500), then(200))) as one, hostile(in_turn(then(500), then(200))) as two:
        await subscriber(conn, one.url, "one")
        await subscriber(conn, two.url, "two")
        await errands.publish(conn, Placed(order="A"))

        await relay(pool).run_once()
        await conn.execute("update waypost.outbox set due_at = now()")
        await relay(pool).run_once()

        for server in (one, two):
            first, second = server.requests
            assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert one.requests[0].headers["webhook-id"] != two.requests[0].headers["webhook-id"]


async def test_an_answer_that_is_no_text_under_an_encoding_that_it_has_not_is_still_a_delivery(
    conn: Connection, pool: Pool
) -> None:
    """Elsewhere it could not be stored, so the message was delivered for ever."""
    body = b"\x00\xff\xfe no gzip"
    async with hostile(answers(200, "Content-Encoding: gzip", body=body)) as server:
        await given.endpoint(conn, server.url)
        message = await given.message(conn, await given.execution(conn))

        await relay(pool).run_once(now=NOON)

        assert (await given.row(conn, message))["state"] == "delivered"
        cursor = await conn.execute("select response from waypost.delivery")
        assert await cursor.fetchall() == [(body,)]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_of_an_event_is_a_failure_and_nothing_else_is_asked(
    conn: Connection, pool: Pool, status: int
) -> None:
    """Elsewhere it became a GET, whose 200 counted as a delivery."""
    async with hostile(answers(200)) as other, hostile(answers(status, f"Location: {other.url}")) as server:
        await subscriber(conn, server.url, "one")
        await errands.publish(conn, Placed(order="A"))

        await relay(pool).run_once()

        assert (len(server.requests), len(other.requests)) == (1, 0)
        [(state, attempts)] = await (
            await conn.execute("select state, attempts from waypost.outbox")
        ).fetchall()
        assert (state, attempts) == ("due", 1)


async def test_an_error_page_of_many_lines_does_not_spoil_the_dead_letter(
    conn: Connection, pool: Pool
) -> None:
    page = b"<html>\r\n<h1>Oops</h1>\r\nwebhook-id: evil\r\n\r\n</html>"
    async with hostile(in_turn(then(500, body=page), then(204))) as server:
        await given.endpoint(conn, server.url)
        await conn.execute('update waypost.endpoint set schedule = \'{"delays": [1], "attempts": 1}\'')
        await conn.execute(
            "insert into waypost.outbox (tenant_id, message_id, path, command, endpoint, body, due_at)"
            " values (1, gen_random_uuid(), '', false, 'payments', '{}', %s)",
            (NOON,),
        )
        [(message,)] = await (await conn.execute("select message_id from waypost.outbox")).fetchall()
        await relay(pool).run_once(now=NOON)

        seen = await see(conn, message)
        assert "its last try ended with http-500" in explained(seen)
        assert seen.tries[0].response == page
        await put_back(conn, [message])
        await relay(pool).run_once(now=NOON + timedelta(days=36_500))
        assert (await given.row(conn, message))["state"] == "delivered"


async def test_five_hundred_events_of_one_transaction_all_arrive_once(conn: Connection, pool: Pool) -> None:
    """Elsewhere the rows of one transaction were split in two under one name, and the second half was lost."""
    async with hostile(answers(204)) as server:
        await subscriber(conn, server.url, "one")
        async with conn.transaction():
            for number in range(500):
                await errands.publish(conn, Placed(order=str(number)))

        subject = relay(pool)
        while await subject.run_once():
            pass

        orders = [json.loads(request.body)["data"]["order"] for request in server.requests]
        assert sorted(orders, key=int) == [str(number) for number in range(500)]
        assert len({request.headers["webhook-id"] for request in server.requests}) == 500


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 999 What\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
        b"not http at all\r\n\r\n",
    ],
    ids=["status", "lengths", "smuggling", "header", "nothing"],
)
async def test_what_is_no_answer_of_http_is_a_visible_try_and_comes_again(
    conn: Connection, pool: Pool, answer: bytes
) -> None:
    """Elsewhere such errors were taken for faults of the relay, and nobody saw them; or for a 400 of the service."""
    async with hostile(says(answer)) as server:
        await given.endpoint(conn, server.url, within=timedelta(seconds=2))
        message = await given.message(conn, await given.execution(conn))

        await relay(pool).run_once(now=NOON)

        [(_, outcome, status, code)] = await given.deliveries(conn, message)
        assert (outcome, status, code) == ("retry", None, "protocol-error")
        assert (await given.row(conn, message))["state"] == "due"


# Who gets which events


@pytest.mark.parametrize(
    ("pattern", "gets"),
    [
        ("shop.order.placed", True),
        ("shop.order.*", True),
        ("shop.*", True),
        ("*", True),
        ("shop.order.placed.*", False),
        ("shop.ord*", None),
        ("*.placed", None),
        ("shop.order", False),
        ("shop.paid.*", False),
    ],
)
async def test_a_pattern_is_the_beginning_of_a_type_up_to_a_dot(
    conn: Connection,
    pattern: str,
    gets: bool | None,  # a column of the table
) -> None:
    if gets is None:
        with pytest.raises(subscriptions.SubscriptionInvalid):
            await subscriber(conn, "https://one.test/", "one", of=pattern)
        return
    await subscriber(conn, "https://one.test/", "one", of=pattern)

    await errands.publish(conn, Placed(order="A"))

    [(count,)] = await (await conn.execute("select count(*) from waypost.outbox")).fetchall()
    assert count == gets


async def test_an_endpoint_gets_an_event_once_by_the_longest_type_that_fits(conn: Connection) -> None:
    await subscriber(conn, "https://one.test/", "one", of="*")
    await subscriptions.subscribe(conn, "shop.*", "one", ordered_by="key")

    await errands.publish(conn, Placed(order="A"))

    rows = await (await conn.execute("select lane, ordered from waypost.outbox")).fetchall()
    assert rows == [("A", True)]


async def test_attributes_choose_among_events_of_a_type(conn: Connection) -> None:
    await subscriber(conn, "https://one.test/", "one", attributes={"source": "/shop", "subject": "A"})

    for order, source in (("A", "/shop"), ("B", "/shop"), ("A", "/else")):
        await errands.publish(conn, Placed(order=order), source=source)

    rows = await (
        await conn.execute("select convert_from(body, 'UTF8')::jsonb from waypost.outbox")
    ).fetchall()
    assert [(event["subject"], event["source"]) for (event,) in rows] == [("A", "/shop")]
    with pytest.raises(subscriptions.SubscriptionInvalid):
        await subscriptions.subscribe(conn, "*", "one", attributes={"data": "x"})
