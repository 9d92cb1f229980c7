from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool
from standardwebhooks import Webhook

from contracts.signature import Secret
from contracts.vault import Vault
from orchestrator.store import database
from relay import outbox
from relay.outbox import Message
from relay.relay import Relay
from relay.settings import RelaySettings
from tests.cluster import Cluster
from tests.relay import given
from tests.relay.given import HERE, LOOPBACK, NOON, PATIENCE, SECRET, VAULT, Connection, Watcher
from tests.relay.hostile import (
    Exchange,
    Request,
    answers,
    cuts_after_reading,
    drips,
    floods,
    hangs,
    hostile,
    in_turn,
    response,
    then,
)

Pool = AsyncConnectionPool[Any]

QUICK = replace(
    HERE, endpoint_cache=timedelta(0), poll=timedelta(milliseconds=20), sweep=timedelta(milliseconds=20)
)


def relay(
    pool: Pool, *, settings: RelaySettings = QUICK, watcher: Watcher | None = None, **more: Any
) -> Relay:
    return Relay(pool, vault=VAULT, settings=settings, observer=watcher or Watcher(), **more)


@contextlib.asynccontextmanager
async def running(pool: Pool, watcher: Watcher, **more: Any) -> AsyncGenerator[asyncio.Event]:
    """A relay at work. Leaving stops it and waits until it has drained."""
    stop = asyncio.Event()
    task = asyncio.create_task(relay(pool, watcher=watcher, **more).run(stop))
    try:
        yield stop
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE):
            await task


# What becomes of a message


async def test_a_command_is_delivered_signed_and_recorded(conn: Connection, pool: Pool) -> None:
    async with hostile(answers(202, body=b"thank you")) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        message = await given.message(conn, execution)

        sent = await relay(pool).run_once(now=NOON)

        [request] = server.requests
        Webhook(SECRET.text).verify(request.body, request.headers)
        found = await given.row(conn, message)
        assert sent == 1
        assert request.body == given.body_of(message, execution)
        assert (found["state"], found["attempts"], found["reached"]) == ("delivered", 1, True)
        assert await given.deliveries(conn, message) == [(1, "delivered", 202, None)]
        assert await given.mail(conn, execution) == []


async def test_the_claim_is_committed_before_a_byte_is_sent(conn: Connection, pool: Pool) -> None:
    """Looked at from the endpoint's side, through another connection, while the request is open."""
    seen: list[dict[str, Any]] = []

    async def look(exchange: Exchange, request: Request) -> None:
        seen.append(await given.row(conn, message))
        await exchange.write(b"HTTP/1.1 204 OK\r\n\r\n")

    async with hostile(in_turn(look)) as server:
        await given.endpoint(conn, server.url)
        message = await given.message(conn, await given.execution(conn))

        await relay(pool).run_once(now=NOON)

    [row] = seen
    assert (row["state"], row["attempts"]) == ("sending", 1)
    assert row["token"] is not None
    assert row["lease_until"] > NOON + timedelta(seconds=15)


async def test_no_transaction_is_open_while_a_request_is(conn: Connection, pool: Pool) -> None:
    async def look(exchange: Exchange, request: Request) -> None:
        cursor = await conn.execute(
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and backend_type = 'client backend'"
            " and xact_start is not null and pid <> pg_backend_pid()"
        )
        open_transactions.append((await cursor.fetchone() or (None,))[0])
        await exchange.write(b"HTTP/1.1 204 OK\r\n\r\n")

    open_transactions: list[int | None] = []
    async with hostile(in_turn(look)) as server:
        await given.endpoint(conn, server.url)
        await given.message(conn, await given.execution(conn))

        await relay(pool).run_once(now=NOON)

    assert open_transactions == [0]


async def test_every_attempt_has_the_same_bytes_and_id_and_a_fresh_signature(
    conn: Connection, pool: Pool
) -> None:
    times = iter([NOON, NOON + timedelta(seconds=1)])
    async with hostile(in_turn(then(503), then(202))) as server:
        await given.endpoint(conn, server.url)
        message = await given.message(conn, await given.execution(conn))
        subject = relay(pool, clock=lambda: next(times))

        await subject.run_once(now=NOON)
        await subject.run_once(now=NOON + timedelta(seconds=1))

        first, second = server.requests
        assert first.body == second.body
        assert first.headers["webhook-id"] == second.headers["webhook-id"] == str(message)
        assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
        assert first.headers["webhook-timestamp"] != second.headers["webhook-timestamp"]
        assert first.headers["webhook-signature"] != second.headers["webhook-signature"]
        assert [r.headers["waypost-attempt"] for r in server.requests] == ["1", "2"]
        assert await given.deliveries(conn, message) == [(1, "retry", 503, None), (2, "delivered", 202, None)]


async def test_a_command_is_tried_after_1_2_5_10_30_seconds_then_each_minute_until_it_expires(
    conn: Connection, pool: Pool
) -> None:
    expires_at = NOON + timedelta(minutes=5)
    async with hostile(answers(500)) as server:
        await given.endpoint(conn, server.url)
        message = await given.message(conn, await given.execution(conn), expires_at=expires_at)
        subject = relay(pool)
        now, tries = NOON, list[datetime]()

        while now < expires_at:
            assert await subject.run_once(now=now) == 1
            tries.append(now)
            now = (await given.row(conn, message))["due_at"]
        sent_after_the_end = await subject.run_once(now=now)

    waits = [(after - before).total_seconds() for before, after in pairwise(tries)]
    assert waits == [1, 2, 5, 10, 30, 60, 60, 60, 60]
    assert sent_after_the_end == 0
    assert (await given.row(conn, message))["state"] == "expired"


async def test_a_refusal_becomes_mail_with_its_code(conn: Connection, pool: Pool) -> None:
    hints: list[str] = []
    async with hostile(answers(422, body=b'{"no": "thanks"}')) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        message = await given.message(conn, execution)

        await relay(pool, hint=hints.append).run_once(now=NOON)

        [told] = await given.mail(conn, execution)
        assert told["outcome"] == "refused"
        assert told["error"]["code"] == "http-422"
        assert told["error"]["data"] == {"status": 422}
        assert (await given.row(conn, message))["state"] == "refused"
        assert await given.deliveries(conn, message) == [(1, "refused", 422, None)]
        assert hints == ["execution"]


async def test_a_refusal_after_a_try_that_may_have_acted_is_an_unknown_outcome(
    conn: Connection, pool: Pool
) -> None:
    async with hostile(in_turn(then(500), then(422))) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        message = await given.message(conn, execution)
        watcher = Watcher()
        subject = relay(pool, watcher=watcher)

        await subject.run_once(now=NOON)
        await subject.run_once(now=NOON + timedelta(seconds=1))

        assert [told["outcome"] for told in await given.mail(conn, execution)] == ["unknown"]
        assert (await given.row(conn, message))["state"] == "refused"
        assert [told["message"] for told in watcher.named("retry.unprocessable")] == [message]


async def test_404_for_a_short_while_and_then_still_a_definite_refusal(conn: Connection, pool: Pool) -> None:
    async with hostile(answers(404)) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        message = await given.message(conn, execution)
        subject = relay(pool)

        for seconds in (0, 1, 3, 8, 18):
            assert await subject.run_once(now=NOON + timedelta(seconds=seconds)) == 1

        [told] = await given.mail(conn, execution)
        assert (told["outcome"], told["error"]["code"]) == ("refused", "http-404")
        assert len(await given.deliveries(conn, message)) == 5


@pytest.mark.parametrize("reached", [True, False])
async def test_a_command_to_be_sent_once_is_never_sent_again(
    conn: Connection, pool: Pool, *, reached: bool
) -> None:
    async with hostile(cuts_after_reading) as server:
        await given.endpoint(conn, server.url if reached else "http://127.0.0.1:65535/")
        execution = await given.execution(conn)
        message = await given.message(conn, execution, at_most_once=True)
        subject = relay(pool)

        await subject.run_once(now=NOON)
        again = await subject.run_once(now=NOON + timedelta(hours=1))

        told = await given.mail(conn, execution)
        assert again == 0
        assert told == (
            [{"outcome": "unknown", "code": "sent"}]
            if reached
            else [{"outcome": "refused", "code": "never-sent"}]
        )
        assert (await given.row(conn, message))["state"] == ("dead" if reached else "refused")


# Endpoints


async def test_429_pauses_the_endpoint_and_no_try_of_others_is_counted(conn: Connection, pool: Pool) -> None:
    async with hostile(in_turn(then(429, "Retry-After: 90"), then(202))) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        await given.message(conn, execution, at=NOON)
        waiting = await given.message(conn, execution, at=NOON + timedelta(seconds=1))
        subject = relay(pool)

        first = await subject.run_once(now=NOON)
        during = await subject.run_once(now=NOON + timedelta(seconds=89))
        untouched = await given.row(conn, waiting)
        after = await subject.run_once(now=NOON + timedelta(seconds=90))

        assert (first, during, after) == (1, 0, 2)
        assert untouched["attempts"] == 0


async def test_410_refuses_and_disables_the_endpoint(conn: Connection, pool: Pool) -> None:
    watcher = Watcher()
    async with hostile(answers(410)) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        await given.message(conn, execution, at=NOON)
        later = await given.message(conn, execution, at=NOON + timedelta(seconds=1))
        subject = relay(pool, watcher=watcher)

        await subject.run_once(now=NOON)
        sent = await subject.run_once(now=NOON + timedelta(hours=1))

        [told] = await given.mail(conn, execution)
        assert (told["outcome"], told["error"]["code"]) == ("refused", "http-410")
        assert sent == 0
        assert (await given.row(conn, later))["state"] == "due"
        assert watcher.named("endpoint.disabled") == [{"reason": "gone", "tenant": 1, "endpoint": "payments"}]


async def unknown(_conn: Connection) -> None:
    """No endpoint of that name."""


async def without_secret(conn: Connection) -> None:
    await given.endpoint(conn, "http://127.0.0.1:65535/", secret=None)


async def with_an_expired_secret(conn: Connection) -> None:
    await given.endpoint(conn, "http://127.0.0.1:65535/", secret=None)
    await given.add_secret(conn, SECRET, expires_at=NOON)


async def with_a_secret_of_another_key(conn: Connection) -> None:
    await given.endpoint(conn, "http://127.0.0.1:65535/", secret=None)
    await given.add_secret(conn, SECRET, vault=Vault(b"another key than the relay's own"))


async def with_a_bad_url(conn: Connection) -> None:
    await given.endpoint(conn, "https://user:pass@example.com/")


async def on_a_closed_address(conn: Connection) -> None:
    await given.endpoint(conn, "https://192.168.0.1/")


async def where_nobody_listens(conn: Connection) -> None:
    await given.endpoint(conn, "http://127.0.0.1:65535/")


@pytest.mark.parametrize(
    ("prepare", "code"),
    [
        (unknown, "unknown-endpoint"),
        (without_secret, "no-secret"),
        (with_an_expired_secret, "no-secret"),
        (with_a_secret_of_another_key, "secret-unreadable"),
        (with_a_bad_url, "bad-url"),
        (on_a_closed_address, "bad-url"),
        (where_nobody_listens, "connection-refused"),
    ],
)
async def test_an_endpoint_that_cannot_be_used_is_a_try_that_reached_nothing(
    conn: Connection, pool: Pool, prepare: Any, code: str
) -> None:
    await prepare(conn)
    execution = await given.execution(conn)
    message = await given.message(conn, execution)

    await relay(pool).run_once(now=NOON)

    found = await given.row(conn, message)
    assert (found["state"], found["attempts"], found["reached"]) == ("due", 1, False)
    assert found["due_at"] == NOON + timedelta(seconds=1)
    ours = code != "connection-refused"
    assert await given.deliveries(conn, message) == [(1, "spared" if ours else "retry", None, code)]
    assert found["spared"] == ours
    assert await given.mail(conn, execution) == []


async def test_both_secrets_of_a_rotation_sign_and_one_that_cannot_be_opened_does_not_stop_the_other(
    conn: Connection, pool: Pool
) -> None:
    new, broken = Secret.of(b"n" * 32), Secret.of(b"b" * 32)
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        await given.add_secret(conn, new, key_id="second", created_at=NOON + timedelta(days=1))
        await given.add_secret(conn, broken, key_id="third", vault=Vault(b"x" * 32))
        await given.message(conn, await given.execution(conn))

        await relay(pool).run_once(now=NOON)

        [request] = server.requests
        for secret in (new, SECRET):
            Webhook(secret.text).verify(request.body, request.headers)
        assert len(request.headers["webhook-signature"].split()) == 2


async def test_a_changed_endpoint_is_noticed(conn: Connection, pool: Pool) -> None:
    async with hostile(answers(503)) as old, hostile(answers(204)) as new:
        await given.endpoint(conn, old.url)
        message = await given.message(conn, await given.execution(conn))
        subject = relay(pool)

        await subject.run_once(now=NOON)
        await conn.execute("update waypost.endpoint set url = %s", (new.url,))
        await subject.run_once(now=NOON + timedelta(seconds=1))

        assert (len(old.requests), len(new.requests)) == (1, 1)
        assert (await given.row(conn, message))["state"] == "delivered"


async def test_an_endpoint_that_hangs_holds_its_own_room_and_no_more(conn: Connection, pool: Pool) -> None:
    watcher = Watcher()
    settings = replace(QUICK, endpoint_concurrency=2, concurrency=4, drain=timedelta(0))
    async with hostile(hangs) as slow, hostile(answers(204)) as quick:
        await given.endpoint(conn, slow.url, name="slow")
        await given.endpoint(conn, quick.url, name="quick")
        execution = await given.execution(conn)
        stuck = [await given.message(conn, execution, endpoint="slow") for _ in range(5)]
        others = [await given.message(conn, execution, endpoint="quick") for _ in range(20)]

        async with running(pool, watcher, settings=settings):
            for message in others:
                await watcher.until("message.tried", message=message, outcome="delivered")
            states = [(await given.row(conn, message))["state"] for message in stuck]

        assert sorted(states) == ["due", "due", "due", "sending", "sending"]


async def test_what_waits_for_a_closed_endpoint_is_not_in_the_way_of_others(
    conn: Connection, pool: Pool
) -> None:
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url, name="open")
        await given.endpoint(conn, server.url, name="closed")
        await conn.execute("update waypost.endpoint set state = 'disabled' where name = 'closed'")
        execution = await given.execution(conn)
        for _ in range(10):
            await given.message(conn, execution, endpoint="closed", at=NOON - timedelta(hours=1))
        wanted = await given.message(conn, execution, endpoint="open")

        sent = await relay(pool, settings=replace(QUICK, batch=1)).run_once(now=NOON)

        assert sent == 1
        assert (await given.row(conn, wanted))["state"] == "delivered"


# What goes wrong


async def test_a_relay_killed_in_the_middle_of_a_try_is_followed_by_another_under_the_same_identity(
    conn: Connection, pool: Pool
) -> None:
    watcher = Watcher()
    async with hostile(hangs) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        message = await given.message(conn, execution)
        killed = asyncio.create_task(relay(pool, watcher=watcher).run(asyncio.Event()))
        async with asyncio.timeout(PATIENCE):
            await server.arrived.wait()
        killed.cancel()
        await asyncio.gather(killed, return_exceptions=True)
        left = await given.row(conn, message)
        server.behaviour = answers(422)
        too_early = await relay(pool).run_once(now=left["lease_until"])

        sent = await relay(pool).run_once(now=left["lease_until"] + timedelta(seconds=1))

        first, second = server.requests
        assert (left["state"], left["attempts"]) == ("sending", 1)
        assert (too_early, sent) == (0, 1)
        assert first.body == second.body
        assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert second.headers["waypost-attempt"] == "2"
        assert [told["outcome"] for told in await given.mail(conn, execution)] == ["unknown"]


async def test_a_killed_try_of_a_command_to_be_sent_once_ends_unknown(conn: Connection, pool: Pool) -> None:
    async with hostile(hangs) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        message = await given.message(conn, execution, at_most_once=True)
        killed = asyncio.create_task(relay(pool).run(asyncio.Event()))
        async with asyncio.timeout(PATIENCE):
            await server.arrived.wait()
        killed.cancel()
        await asyncio.gather(killed, return_exceptions=True)
        lease_until = (await given.row(conn, message))["lease_until"]
        hints: list[str] = []

        sent = await relay(pool, hint=hints.append).run_once(now=lease_until + timedelta(seconds=1))

        assert sent == 0
        assert len(server.requests) == 1
        assert await given.mail(conn, execution) == [{"outcome": "unknown", "code": "sent"}]
        assert hints == ["execution"]


async def test_a_result_that_comes_after_its_claim_is_over_is_forgotten(conn: Connection, pool: Pool) -> None:
    watcher = Watcher()

    async def lose(exchange: Exchange, _request: Request) -> None:
        await conn.execute("select waypost.expire_claims(10, %s)", (NOON + timedelta(days=1),))
        await exchange.write(b"HTTP/1.1 422 No\r\nContent-Length: 0\r\n\r\n")

    async with hostile(in_turn(lose)) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        message = await given.message(conn, execution)

        await relay(pool, watcher=watcher).run_once(now=NOON)

        assert watcher.named("message.tried")[0]["state"] == "claim lost"
        assert (await given.row(conn, message))["state"] == "due"
        assert await given.mail(conn, execution) == []


async def test_results_wait_for_a_database_that_is_away(
    conn: Connection, pool: Pool, dsn: str, cluster: Cluster
) -> None:
    """The database goes while the request is open, and comes back after the answer could not be settled."""
    watcher = Watcher()
    admin = given.Administrator(cluster.dsn("postgres"), conn.info.dbname)
    pool.timeout = 0.5  # of asking for a connection; what is tested is what comes after

    async def vanish(exchange: Exchange, _request: Request) -> None:
        await admin.close_database()
        await exchange.write(b"HTTP/1.1 202 OK\r\nContent-Length: 0\r\n\r\n")

    async with hostile(in_turn(vanish)) as server:
        await given.endpoint(conn, server.url)
        message = await given.message(conn, await given.execution(conn))
        async with running(pool, watcher):
            await watcher.until("database.failed", part="settlement")
            await admin.open_database()
            tried = await watcher.until("message.tried", message=message)

    async with await AsyncConnection.connect(dsn) as again:
        assert tried["state"] == "delivered"
        assert len(server.requests) == 1
        assert await given.deliveries(again, message) == [(1, "delivered", 202, None)]


async def test_a_claim_whose_commit_got_no_answer_is_given_back_unsent(
    conn: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = Watcher()
    claim = outbox.claim

    async def claim_and_lose_the_answer(_conn: Connection, **arguments: Any) -> list[Message]:
        await claim(conn, **arguments)  # committed by another connection than the one that fails
        raise psycopg.OperationalError("the connection is lost")

    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        message = await given.message(conn, await given.execution(conn))
        subject = relay(pool, watcher=watcher)
        with monkeypatch.context() as patch, pytest.raises(psycopg.OperationalError):
            patch.setattr(outbox, "claim", claim_and_lose_the_answer)
            await subject.run_once(now=NOON)
        lost = await given.row(conn, message)

        await subject.run_once(now=NOON)
        returned = await given.row(conn, message)
        await subject.run_once(now=NOON)

        assert (lost["state"], lost["attempts"]) == ("sending", 1)
        assert (returned["state"], returned["reached"], returned["spared"]) == ("due", False, 1)
        assert watcher.named("claims.returned") == [{"count": 1}]
        assert await given.deliveries(conn, message) == [(2, "delivered", 204, None)]


@pytest.mark.parametrize(("behaviour", "stored"), [(floods(500), b"\x00" * 16384), (drips(500), b"x")])
async def test_what_an_endpoint_pours_out_is_kept_in_part_and_never_stops_the_settlement(
    conn: Connection, pool: Pool, behaviour: Any, stored: bytes
) -> None:
    async with hostile(behaviour) as server:
        await given.endpoint(conn, server.url, within=timedelta(milliseconds=300))
        message = await given.message(conn, await given.execution(conn))

        await relay(pool).run_once(now=NOON)

        cursor = await conn.execute("select response from waypost.delivery where message_id = %s", (message,))
        assert await cursor.fetchone() == (stored,)
        assert (await given.row(conn, message))["state"] == "due"


async def test_a_try_that_cannot_be_recorded_is_settled_all_the_same(conn: Connection, pool: Pool) -> None:
    watcher = Watcher()
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        message = await given.message(conn, await given.execution(conn))
        await conn.execute("alter table waypost.delivery add constraint nothing_fits check (false)")

        await relay(pool, watcher=watcher).run_once(now=NOON)

        assert (await given.row(conn, message))["state"] == "delivered"
        assert watcher.named("deliveries.lost") == [{"count": 1, "error": "CheckViolation"}]


async def test_one_result_that_cannot_be_written_does_not_stop_the_others(
    conn: Connection, pool: Pool
) -> None:
    watcher = Watcher()
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        messages = [await given.message(conn, execution) for _ in range(5)]
        cursed = messages[2]
        await conn.execute(
            f"alter table waypost.outbox add check (message_id <> '{cursed}' or state <> 'delivered')"  # pyright: ignore[reportArgumentType, reportCallIssue]  # a uuid of ours
        )

        await relay(pool, watcher=watcher).run_once(now=NOON)

        states = [(await given.row(conn, message))["state"] for message in messages]
        assert states == ["delivered", "delivered", "sending", "delivered", "delivered"]
        assert [moment["message"] for moment in watcher.named("settlement.failed")] == [cursed]


# Running


async def test_a_hint_wakes_the_relay_before_its_poll(conn: Connection, pool: Pool) -> None:
    watcher = Watcher()
    hinted = asyncio.Event()
    settings = replace(QUICK, poll=timedelta(hours=1))
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        first = await given.message(conn, execution)
        async with running(pool, watcher, settings=settings, hinted=hinted):
            await watcher.until("message.tried", message=first)
            second = await given.message(conn, execution)
            hinted.set()

            await watcher.until("message.tried", message=second, outcome="delivered")


async def test_a_command_whose_kept_connection_is_cut_goes_again_by_a_new_one_at_once(
    conn: Connection, pool: Pool
) -> None:
    """Within the same try, under the same name."""
    watcher, hinted = Watcher(), asyncio.Event()

    async def cut(exchange: Exchange, _request: Request) -> None:
        exchange.writer.transport.abort()

    async with hostile(in_turn(then(204), cut, then(204))) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        first = await given.message(conn, execution)
        settings = replace(QUICK, keepalive=timedelta(hours=1))
        async with running(pool, watcher, settings=settings, hinted=hinted):
            await watcher.until("message.tried", message=first)
            second = await given.message(conn, execution)
            hinted.set()
            await watcher.until("message.tried", message=second, outcome="delivered")

    assert await given.deliveries(conn, second) == [(1, "delivered", 204, None)]
    assert [request.headers["webhook-id"] for request in server.requests[1:]] == [str(second)] * 2
    assert server.connections == 2


async def test_no_more_connections_are_made_to_an_endpoint_than_it_may_have_tries(
    conn: Connection, pool: Pool
) -> None:
    watcher = Watcher()
    settings = replace(QUICK, endpoint_concurrency=3, keepalive=timedelta(hours=1))
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        messages = [await given.message(conn, execution) for _ in range(20)]
        async with running(pool, watcher, settings=settings):
            for message in messages:
                await watcher.until("message.tried", message=message, outcome="delivered")

    assert len(server.requests) == 20
    assert server.connections <= 3


async def test_a_removed_endpoint_keeps_no_connection_and_gets_no_message(
    conn: Connection, pool: Pool
) -> None:
    watcher, closed = Watcher(), asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        await exchange.read()
        await exchange.write(response(204))
        await exchange.left()
        closed.set()

    async with hostile(behave) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        first = await given.message(conn, execution)
        settings = replace(QUICK, keepalive=timedelta(milliseconds=20))
        async with running(pool, watcher, settings=settings):
            await watcher.until("message.tried", message=first)
            await conn.execute("delete from waypost.endpoint")
            second = await given.message(conn, execution)

            await watcher.until("message.tried", message=second, error="unknown-endpoint")
            async with asyncio.timeout(PATIENCE):
                await closed.wait()

    assert len(server.requests) == 1


# Its connections to the database, which it keeps while they work


CUT = """
    select pg_terminate_backend(pid)
      from pg_stat_activity
     where application_name = 'waypost-relay'
       and datname = current_database()
"""


async def test_a_relay_at_work_needs_three_connections_and_takes_others_when_they_are_cut(
    conn: Connection, dsn: str
) -> None:
    watcher, hinted = Watcher(), asyncio.Event()
    async with hostile(answers(204)) as server, database.pool(dsn, size=3, name="relay") as three:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        first = await given.message(conn, execution)
        async with running(three, watcher, hinted=hinted):
            await watcher.until("message.tried", message=first, outcome="delivered")
            assert (await (await conn.execute(CUT)).fetchall()) != []

            second = await given.message(conn, execution)
            hinted.set()
            await watcher.until("message.tried", message=second, outcome="delivered")
            await watcher.until("database.failed", part="claim")

    assert [request.headers["webhook-id"] for request in server.requests] == [str(first), str(second)]


async def test_stopping_lets_what_is_in_flight_end_and_claims_nothing_more(
    conn: Connection, pool: Pool
) -> None:
    watcher = Watcher()
    answer_now = asyncio.Event()

    async def waits(exchange: Exchange, _request: Request) -> None:
        await answer_now.wait()
        await exchange.write(b"HTTP/1.1 204 OK\r\n\r\n")

    async with hostile(in_turn(waits)) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        in_flight = await given.message(conn, execution)
        async with running(pool, watcher) as stop:
            async with asyncio.timeout(PATIENCE):
                await server.arrived.wait()
            stop.set()
            await watcher.until("relay.draining", in_flight=1)
            too_late = await given.message(conn, execution)
            answer_now.set()

        assert (await given.row(conn, in_flight))["state"] == "delivered"
        assert (await given.row(conn, too_late))["attempts"] == 0
        assert watcher.moments[-1] == ("relay.stopped", {})


@pytest.mark.parametrize("at_most_once", [False, True])
async def test_what_does_not_end_in_time_is_given_up_and_may_have_arrived(
    conn: Connection, pool: Pool, *, at_most_once: bool
) -> None:
    """It is due for another relay at once, and has all its tries; what is sent once has an unknown outcome."""
    watcher = Watcher()
    settings = replace(QUICK, drain=timedelta(0))
    async with hostile(hangs) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        message = await given.message(conn, execution, at_most_once=at_most_once)
        async with running(pool, watcher, settings=settings) as stop:
            async with asyncio.timeout(PATIENCE):
                await server.arrived.wait()
            stop.set()

        found = await given.row(conn, message)
        assert (found["state"], found["reached"]) == ("dead" if at_most_once else "due", True)
        assert found["attempts"] - found["spared"] == (1 if at_most_once else 0)
        assert [told[1:] for told in await given.deliveries(conn, message)] == [
            ("retry" if at_most_once else "spared", None, "relay-stopped")
        ]
        assert await given.mail(conn, execution) == (
            [{"outcome": "unknown", "code": "sent"}] if at_most_once else []
        )


async def test_what_cannot_be_given_up_is_left_to_its_claim(
    conn: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.relay.RELEASE_SECONDS", 0)
    settings = replace(QUICK, drain=timedelta(0))
    async with hostile(hangs) as server:
        await given.endpoint(conn, server.url)
        message = await given.message(conn, await given.execution(conn))
        async with running(pool, Watcher(), settings=settings) as stop:
            async with asyncio.timeout(PATIENCE):
                await server.arrived.wait()
            stop.set()

        assert (await given.row(conn, message))["state"] == "sending"


async def test_two_relays_never_send_the_same_try(conn: Connection, pool: Pool) -> None:
    one, two = Watcher(), Watcher()
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        execution = await given.execution(conn)
        messages = [await given.message(conn, execution) for _ in range(60)]

        async with running(pool, one), running(pool, two):
            async with asyncio.timeout(PATIENCE):
                while len(server.requests) < len(messages):
                    server.arrived.clear()
                    await server.arrived.wait()

        ids = [request.headers["webhook-id"] for request in server.requests]
        assert sorted(ids) == sorted(str(message) for message in messages)


async def test_the_claim_outlives_the_longest_try(conn: Connection, pool: Pool) -> None:
    """A timeout that does not fit is cut, so that a second relay never sends beside the first."""
    settings = RelaySettings(allow=(LOOPBACK,), claim_lease=timedelta(milliseconds=400))
    async with hostile(hangs) as server:
        await given.endpoint(conn, server.url, within=timedelta(minutes=5))
        message = await given.message(conn, await given.execution(conn))

        await relay(pool, settings=settings).run_once(now=NOON)

        [delivery] = await given.deliveries(conn, message)
        assert delivery == (1, "retry", None, "timeout")
        assert (await given.row(conn, message))["reached"]


async def test_secrets_show_up_nowhere(conn: Connection, pool: Pool) -> None:
    watcher = Watcher()
    async with hostile(answers(422)) as server:
        await given.endpoint(conn, server.url)
        await given.add_secret(conn, Secret.of(b"x" * 32), key_id="other", vault=Vault(b"y" * 32))
        await given.message(conn, await given.execution(conn))

        await relay(pool, watcher=watcher).run_once(now=NOON)

        told = repr(watcher.moments) + repr(server.requests[0].headers) + json.dumps(str(vars(relay(pool))))
        assert SECRET.text not in told
        assert repr(SECRET.key) not in told
