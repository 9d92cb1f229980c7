"""What went wrong elsewhere, as people reported it: each must not happen here.

The cases are numbered as where they were collected; each names what protects from it.

     2  keys in another order: test_complaints.test_bytes_survive_a_retry_a_restart_and_being_put_back
     3  an answer too large for the log:
        test_relay.test_what_an_endpoint_pours_out_is_kept_in_part_and_never_stops_the_settlement,
        test_relay.test_a_try_that_cannot_be_recorded_is_settled_all_the_same
     4  an answer that is no text:
        test_complaints.test_an_answer_that_is_no_text_under_an_encoding_that_it_has_not_is_still_a_delivery
     6  one retry for two endpoints:
        test_complaints.test_retries_of_one_event_to_two_endpoints_do_not_replace_each_other
     7  errors that nobody sees:
        test_complaints.test_what_the_network_says_is_a_visible_try_with_a_time_for_the_next,
        test_complaints.test_what_is_no_answer_of_http_is_a_visible_try_and_comes_again,
        test_relay.test_an_endpoint_that_cannot_be_used_is_a_try_that_reached_nothing
     8  a second rotation: test_particulars.test_a_second_rotation_leaves_each_old_secret_its_own_end
    10  success on the last try: test_health.test_success_on_the_last_try_of_a_message_keeps_its_endpoint_enabled
    11  one event, published by several at once:
        test_complaints.test_who_publishes_one_event_at_the_same_moment_sends_one
    12  an endpoint slower than the claim:
        test_complaints.test_an_endpoint_that_is_slower_than_the_claim_gets_one_request_for_a_try
    14  addresses that are not to be called: test_addresses.test_a_blocked_address_is_never_dialled,
        test_addresses.test_a_name_that_changes_its_mind_is_caught_at_the_next_connection
    15  redirects: test_complaints.test_a_redirect_of_an_event_is_a_failure_and_nothing_else_is_asked
    16  the time of a retry: test_wire.test_each_attempt_has_a_timestamp_and_signature_of_its_own_over_the_same_bytes
    18  an error page of many lines:
        test_complaints.test_an_error_page_of_many_lines_does_not_spoil_the_dead_letter
    19  order, deaths, a database that is away:
        test_four_processes.test_order_holds_under_four_relay_processes_of_which_some_are_killed,
        test_lanes.test_order_holds_under_four_relays_whose_endpoint_fails_at_random,
        test_lanes.test_a_relay_that_dies_after_it_settled_leaves_no_lane_behind,
        test_relay.test_results_wait_for_a_database_that_is_away
    20  sent before the commit, or late: test_complaints.test_what_a_transaction_takes_back_is_never_sent,
        test_errands.test_workers_and_the_relay_are_told_after_the_commit,
        test_relay.test_a_hint_wakes_the_relay_before_its_poll
    22  numbers and commits: test_complaints.test_what_commits_late_is_not_lost_behind_what_committed_before,
        test_lanes.test_numbers_of_a_lane_grow_in_the_order_of_commits,
        test_lanes_of_commands.test_commands_of_one_key_are_in_the_order_of_their_commits
    23  many of one transaction: test_complaints.test_five_hundred_events_of_one_transaction_all_arrive_once
    24  a restored database:
        test_complaints.test_what_is_pending_goes_out_of_a_database_that_was_restored_on_another_server
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
from collections.abc import Generator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from psycopg_pool import AsyncConnectionPool
from standardwebhooks import Webhook

from orchestrator import Event, errands, subscriptions
from orchestrator.embedded import EmbeddedPostgres, embedded_binaries
from orchestrator.outbox import explained, put_back, see
from orchestrator.store import database
from tests.cluster import fast_folder
from tests.relay import given
from tests.relay.given import NOON, SECRET, Connection, Watcher
from tests.relay.hostile import answers, hangs, hostile, in_turn, says, then
from tests.relay.test_relay import QUICK, relay, running

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


async def test_bytes_survive_a_retry_a_restart_and_being_put_back(conn: Connection, pool: Pool) -> None:
    """Elsewhere a column of jsonb put keys into another order, and no signature fitted any more."""
    body = b'{"id":"x","type":"t","b":1,"a":2,"b":1.0,"n":1e2,"s":"\\u0000\\ud800","o":"\xc3\xa9"}'
    async with hostile(in_turn(then(503), then(404), then(204))) as server:
        await given.endpoint(conn, server.url)
        await conn.execute('update waypost.endpoint set schedule = \'{"delays": [1], "attempts": 2}\'')
        [(message,)] = await (
            await conn.execute(
                "insert into waypost.outbox (tenant_id, message_id, path, command, endpoint, body, due_at)"
                " values (1, gen_random_uuid(), '', false, 'payments', %s, %s) returning message_id",
                (body, NOON),
            )
        ).fetchall()

        await relay(pool).run_once(now=NOON)
        await relay(pool).run_once(now=NOON + timedelta(seconds=2))
        assert await put_back(conn, [message]) == [str(message)]
        await relay(pool).run_once()

        assert [request.body for request in server.requests] == [body] * 3
        for request in server.requests:
            Webhook(SECRET.text).verify(request.body, request.headers)


class Nowhere(AbstractResolver):
    """Knows no name."""

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:
        raise OSError(f"no such name: {host}")

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("url", "code"),
    [("http://127.0.0.1:{port}/", "connection-refused"), ("https://nobody.test:{port}/", "dns-failed")],
)
async def test_what_the_network_says_is_a_visible_try_with_a_time_for_the_next(
    conn: Connection, pool: Pool, url: str, code: str
) -> None:
    """Elsewhere it was taken for a fault of the relay, went into its own queue of errors, and nobody saw it."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and nobody listens there
        await given.endpoint(conn, "http://127.0.0.1:8/")
        await conn.execute(
            "update waypost.endpoint set url = %s", (url.format(port=nobody.getsockname()[1]),)
        )
        message = await given.message(conn, await given.execution(conn))

        await relay(pool, resolver=Nowhere()).run_once(now=NOON)

    assert await given.deliveries(conn, message) == [(1, "retry", None, code)]
    found = await given.row(conn, message)
    assert (found["state"], found["spared"], found["reached"]) == ("due", 0, False)
    assert found["due_at"] > NOON


async def test_who_publishes_one_event_at_the_same_moment_sends_one(conn: Connection, dsn: str) -> None:
    """Elsewhere two looked whether it was there, and both wrote it."""
    await subscriber(conn, "http://127.0.0.1:8/", "one")
    ready = asyncio.Barrier(4)

    async def publishes() -> None:
        async with await Connection.connect(dsn) as mine:
            await errands.publish(mine, Placed(order="A"), id="order-A")
            await ready.wait()

    await asyncio.gather(*(publishes() for _ in range(4)))

    cursor = await conn.execute("select count(*) from waypost.outbox")
    assert await cursor.fetchone() == (1,)


async def test_an_endpoint_that_is_slower_than_the_claim_gets_one_request_for_a_try(
    conn: Connection, pool: Pool
) -> None:
    """Elsewhere the lease was shorter than the try, and a second worker sent beside the first."""
    watcher = Watcher()
    settings = replace(QUICK, claim_lease=timedelta(milliseconds=600), drain=timedelta(0))
    async with hostile(hangs) as server:
        await given.endpoint(conn, server.url, within=timedelta(minutes=5))
        await conn.execute("update waypost.endpoint set schedule = '{\"delays\": [3600]}'")
        message = await given.message(conn, await given.execution(conn))

        async with running(pool, watcher, settings=settings), running(pool, watcher, settings=settings):
            await watcher.until("message.tried", message=message)

    assert len(server.requests) == 1
    assert watcher.named("claims.expired") == []
    assert await given.deliveries(conn, message) == [(1, "retry", None, "timeout")]


async def test_what_a_transaction_takes_back_is_never_sent(conn: Connection, pool: Pool) -> None:
    """Elsewhere an event was sent before its transaction had committed, or although it failed."""
    async with hostile(answers(204)) as server:
        await subscriber(conn, server.url, "one")
        with pytest.raises(ZeroDivisionError):
            async with conn.transaction():
                await errands.publish(conn, Placed(order="A"))
                assert await relay(pool).run_once() == 0
                raise ZeroDivisionError

        assert await relay(pool).run_once() == 0
        assert server.requests == []


async def test_what_commits_late_is_not_lost_behind_what_committed_before(
    conn: Connection, dsn: str, pool: Pool
) -> None:
    """Elsewhere a reader went on behind the highest number that it had seen, and a lower one came after that."""
    async with hostile(answers(204)) as server:
        await subscriber(conn, server.url, "one")
        async with await Connection.connect(dsn) as late:
            await errands.publish(late, Placed(order="first"))
            await late.execute("set constraints all immediate")  # its rows have their numbers now
            await errands.publish(conn, Placed(order="second"))
            assert await relay(pool).run_once() == 1
            await late.commit()

        assert await relay(pool).run_once() == 1

        orders = [json.loads(request.body)["data"]["order"] for request in server.requests]
        assert orders == ["second", "first"]


@pytest.mark.proof
async def test_what_is_pending_goes_out_of_a_database_that_was_restored_on_another_server(
    conn: Connection, dsn: str, pool: Pool
) -> None:
    """Elsewhere numbers of transactions began anew below those that were stored, and nothing was delivered any more."""
    async with hostile(in_turn(then(503), then(204))) as server:
        await subscriber(conn, server.url, "one", ordered_by="key")
        await given.endpoint(conn, server.url)
        await conn.execute("update waypost.endpoint set schedule = '{\"delays\": [0]}'")
        for _ in range(3):
            await errands.publish(conn, Placed(order="A"))
        await given.message(conn, await given.execution(conn))
        await relay(pool, settings=replace(QUICK, batch=1)).run_once()  # one of them has had a try
        before = len(server.requests)
        dump = await asyncio.to_thread(dumped, dsn)

        with begun() as other:
            await asyncio.to_thread(restore, other, dump)
            async with database.pool(other.dsn(), size=4, name="test") as there:
                subject = relay(there)
                while await subject.run_once():
                    pass
                async with there.connection() as now:
                    cursor = await now.execute("select distinct state from waypost.outbox")
                    assert await cursor.fetchall() == [("delivered",)]
                    assert await put_back(now, []) == []

        ids = [request.headers["webhook-id"] for request in server.requests[before:]]
        assert len(ids) == len(set(ids)) == 4


@contextlib.contextmanager
def begun() -> Generator[EmbeddedPostgres]:
    """A server of its own, which is gone afterwards."""
    server = EmbeddedPostgres.temporary(within=fast_folder())
    try:
        server.start()
        yield server
    finally:
        server.remove()


def dumped(dsn: str) -> bytes:
    """The database at `dsn`, as its own pg_dump writes it."""
    return called("pg_dump", "--dbname", dsn, "--no-owner")


def restore(server: EmbeddedPostgres, dump: bytes) -> None:
    called("psql", "--dbname", server.dsn(), "--set", "ON_ERROR_STOP=1", "--quiet", stdin=dump)


def called(program: str, *arguments: str, stdin: bytes = b"") -> bytes:
    """What a program of the embedded PostgreSQL says."""
    command = [str(embedded_binaries().bin / program), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_every_case_of_the_list_above_has_its_tests() -> None:
    named = re.findall(r"\b(test_\w+)\.(test_\w+)", __doc__ or "")

    assert {int(case) for case in re.findall(r"^  +(\d+)  ", __doc__ or "", re.MULTILINE)} == {
        2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 18, 19, 20, 22, 23, 24,
    }  # fmt: skip
    for file, test in named:
        texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].glob(f"*/{file}.py")]
        assert any(f"def {test}(" in text for text in texts), f"{file}.{test}"
