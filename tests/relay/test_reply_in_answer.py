"""A reply in the HTTP answer to a command: as good as one that is posted, and one with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool

from contracts import Command
from contracts.envelope import STRUCTURED, decode_structured
from contracts.limits import EVENT_BYTES_MAX
from orchestrator import Context, workflow
from orchestrator.client import Client
from orchestrator.flows import Flows
from orchestrator.store import database
from orchestrator.store.hints import Hints
from orchestrator.store.hints import running as hinting
from orchestrator.worker import Worker
from receiver import inbox
from receiver.arrivals import Arrival, mail_of
from receiver.senders import Sender
from relay import outbox
from relay.relay import Relay
from relay.replies import POST_BYTES_MAX, in_parts, read
from tests.moments import Moments
from tests.relay import given
from tests.relay.given import HERE, NOON, SECRET, VAULT, Connection, Watcher
from tests.relay.hostile import Exchange, Request, hostile, in_turn, response
from tests.waiting import until

pytestmark = pytest.mark.postgres

Pool = AsyncConnectionPool[Any]
Behave = Callable[[Exchange, Request], Awaitable[None]]

QUICK: Final = replace(HERE, endpoint_cache=timedelta(0), poll=timedelta(milliseconds=20))
AFTER_THE_CLAIM: Final = NOON + timedelta(minutes=1)
DONE: Final = {"outcome": "done", "value": {"charge": "ch-1"}}


def relay(pool: Pool, watcher: Watcher | None = None, **more: Any) -> Relay:
    return Relay(pool, vault=VAULT, settings=QUICK, observer=watcher or Watcher(), **more)


def reply_to(command: bytes, **changes: object) -> bytes:
    """A reply, the same however often it is made; what is None is left out."""
    asked = json.loads(command)
    event: dict[str, object] = {
        "specversion": "1.0",
        "id": f"reply to {asked['id']}",
        "source": "/payments",
        "type": f"{asked['type']}.done",
        "causationid": asked["id"],
        "data": {"charge": "ch-1"},
        **changes,
    }
    return json.dumps({name: value for name, value in event.items() if value is not None}).encode()


def replies(status: int = 200, content_type: str = STRUCTURED, **changes: object) -> Behave:
    async def behave(exchange: Exchange, request: Request) -> None:
        body = reply_to(request.body, **changes)
        await exchange.write(response(status, f"Content-Type: {content_type}", body=body))

    return behave


def says(body: bytes) -> Behave:
    async def behave(exchange: Exchange, _: Request) -> None:
        await exchange.write(response(200, f"Content-Type: {STRUCTURED}", body=body))

    return behave


async def breaks_off(exchange: Exchange, request: Request) -> None:
    """The reply without its last byte."""
    whole = response(200, f"Content-Type: {STRUCTURED}", body=reply_to(request.body))
    await exchange.write(whole[:-1])
    exchange.writer.close()


async def commanded(conn: Connection, url: str, **more: Any) -> tuple[UUID, UUID]:
    """An execution and the command that it sent to the endpoint at `url`."""
    await given.endpoint(conn, url)
    execution = await given.execution(conn)
    return execution, await given.message(conn, execution, **more)


async def stored(conn: Connection) -> list[tuple[Any, ...]]:
    """(kind, sender, source, event_id, type, answer) of each row of the inbox that came from outside."""
    cursor = await conn.execute(
        "select kind, sender, source, event_id, type, answer from waypost.inbox where sender <> 'waypost'"
    )
    return await cursor.fetchall()


async def post_to_receiver(conn: Connection, body: bytes, *, sender: str = "payments") -> inbox.Posted:
    """What the receiver does with the same event, once it is authentic."""
    arrival = Arrival.of(Sender(1, sender, "enabled", (SECRET,)), "msg_1", decode_structured(body), body)
    [posted] = await inbox.post(conn, [mail_of(arrival)])
    return posted


# What an answer says


@pytest.mark.parametrize("status", [200, 201])
@pytest.mark.parametrize("content_type", [STRUCTURED, f"{STRUCTURED}; charset=utf-8"])
async def test_a_reply_in_the_answer_is_mail_and_wakes_its_execution(
    conn: Connection, pool: Pool, status: int, content_type: str
) -> None:
    hints: list[str] = []
    async with hostile(in_turn(replies(status, content_type))) as server:
        execution, message = await commanded(conn, server.url)

        await relay(pool, hint=hints.append).run_once(now=NOON)

        assert await given.mail(conn, execution) == [DONE]
        assert await stored(conn) == [
            ("reply", "payments", "/payments", f"reply to {message}", "payment.charge.done", "mail")
        ]
        assert (await given.row(conn, message))["state"] == "delivered"
        assert await given.deliveries(conn, message) == [(1, "delivered", status, None)]
        assert hints == ["execution"]


@pytest.mark.parametrize("end", ["refused", "failed"])
async def test_an_answer_can_say_that_it_was_not_done(conn: Connection, pool: Pool, end: str) -> None:
    data = {"code": "declined", "message": "no", "detail": {"limit": 7}}
    async with hostile(in_turn(replies(type=f"payment.charge.{end}", data=data))) as server:
        execution, message = await commanded(conn, server.url)

        await relay(pool).run_once(now=NOON)

        error = {"code": "declined", "detail": "no", "data": {"limit": 7}}
        assert await given.mail(conn, execution) == [{"outcome": end, "error": error}]
        assert (await given.row(conn, message))["state"] == "delivered"


@pytest.mark.parametrize(
    ("status", "content_type"),
    [
        (202, STRUCTURED),
        (206, STRUCTURED),
        (200, "application/json"),
        (200, "application/cloudevents-batch+json"),
    ],
)
async def test_any_other_answer_means_that_the_reply_comes_later(
    conn: Connection, pool: Pool, status: int, content_type: str
) -> None:
    async with hostile(in_turn(replies(status, content_type))) as server:
        execution, message = await commanded(conn, server.url)

        await relay(pool).run_once(now=NOON)

        assert await given.mail(conn, execution) == []
        assert await given.deliveries(conn, message) == [(1, "delivered", status, None)]


async def test_the_answer_to_an_event_is_no_reply(conn: Connection, pool: Pool) -> None:
    async with hostile(in_turn(replies())) as server:
        execution, message = await commanded(conn, server.url)
        await conn.execute("update waypost.outbox set command = false")

        await relay(pool).run_once(now=NOON)

        assert (await given.mail(conn, execution), await stored(conn)) == ([], [])
        assert await given.deliveries(conn, message) == [(1, "delivered", 200, None)]


# Faults: the service has the command, and the log of tries says what was wrong


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"type": "payment.charge.maybe"}, "reply-malformed-event"),
        ({"type": "payment.refund.done"}, "reply-malformed-event"),
        ({"causationid": "019b2c4f-3f00-7d54-8f12-9b3a50c1d2e3"}, "reply-malformed-event"),
        ({"causationid": 7}, "reply-malformed-event"),
        ({"type": "payment.charge.refused", "data": None}, "reply-malformed-event"),
        ({"type": "payment.charge.refused", "data": {"code": ""}}, "reply-malformed-event"),
        ({"id": None}, "reply-malformed-event"),
        ({"data": None, "data_base64": "AA=="}, "reply-malformed-event"),
        ({"data": float("nan")}, "reply-malformed-json"),
        ({"source": "waypost:outbox"}, "reply-not-allowed"),
        ({"data": "x" * EVENT_BYTES_MAX}, "reply-too-large"),
    ],
)
async def test_a_reply_that_breaks_the_contract_is_none_and_its_fault_is_said(
    conn: Connection, pool: Pool, changes: dict[str, Any], code: str
) -> None:
    async with hostile(in_turn(replies(**changes))) as server:
        execution, message = await commanded(conn, server.url)

        await relay(pool).run_once(now=NOON)

        assert (await given.mail(conn, execution), await stored(conn)) == ([], [])
        assert (await given.row(conn, message))["state"] == "delivered"
        assert await given.deliveries(conn, message) == [(1, "delivered", 200, code)]


async def test_what_is_wrong_with_a_reply_is_told_without_what_it_says(conn: Connection, pool: Pool) -> None:
    watcher = Watcher()
    async with hostile(in_turn(says(b'{"secret": "\x1b[31m'))) as server:
        _, message = await commanded(conn, server.url)

        await relay(pool, watcher).run_once(now=NOON)

        [moment] = watcher.named("reply.unfit")
        assert (moment["message"], moment["endpoint"]) == (message, "payments")
        assert str(moment["error"]).isprintable()


async def test_nobody_speaks_as_waypost_itself(conn: Connection, pool: Pool) -> None:
    async with hostile(in_turn(replies())) as server:
        execution, message = await commanded(conn, server.url)
        await conn.execute("update waypost.endpoint set replies_from = 'waypost'")

        await relay(pool).run_once(now=NOON)

        assert await given.mail(conn, execution) == []
        assert await given.deliveries(conn, message) == [(1, "delivered", 200, "reply-not-allowed")]


async def test_a_name_that_another_reply_has_is_a_conflict(conn: Connection, pool: Pool) -> None:
    async with hostile(in_turn(replies(id="always the same"))) as server:
        execution, message = await commanded(conn, server.url)
        other = await given.message(conn, execution, at=NOON + timedelta(seconds=1))
        subject = relay(pool)

        await subject.run_once(now=NOON)
        await subject.run_once(now=NOON + timedelta(seconds=1))

        assert await given.mail(conn, execution) == [DONE]
        assert await given.deliveries(conn, message) == [(1, "delivered", 200, None)]
        assert await given.deliveries(conn, other) == [(1, "delivered", 200, "reply-conflict")]


async def test_a_reply_that_the_database_refuses_does_not_keep_the_others_from_being_stored(
    conn: Connection, pool: Pool
) -> None:
    await conn.execute("alter table waypost.inbox add check (source <> '/unstorable')")
    async with hostile(in_turn(replies(source="/unstorable"), replies(), replies())) as server:
        execution, _ = await commanded(conn, server.url)
        await given.message(conn, execution)
        await given.message(conn, execution)

        await relay(pool).run_once(now=NOON)

        cursor = await conn.execute("select outcome, error_code from waypost.delivery order by error_code")
        assert await cursor.fetchall() == [
            ("delivered", "reply-unstorable"), ("delivered", None), ("delivered", None)
        ]  # fmt: skip
        assert await given.mail(conn, execution) == [DONE, DONE]


# Size, and answers that break off


@pytest.mark.parametrize("sizes", [[], [9], [4, 4], [3, 1, 1], [1, 9, 1, 1, 1, 1, 1]])
def test_no_transaction_stores_more_than_its_share_unless_one_reply_is_larger(sizes: list[int]) -> None:
    """Sizes in MiB. Nothing is lost, and nothing changes its place."""
    message = UUID("019b2c4f-3f00-7d54-8f12-9b3a50c1d2e3")
    command = given.body_of(message, message)
    small = read(reply_to(command), tenant_id=1, message_id=message, command=command, replies_from="payments")
    told = [replace(small, body=bytes(size * 1024 * 1024)) for size in sizes]

    parts = [list(part) for part in in_parts(told)]

    assert [one for part in parts for one in part] == told
    assert all(part for part in parts)
    assert all(len(part) == 1 or sum(len(one.body) for one in part) <= POST_BYTES_MAX for part in parts)
    assert all(
        sum(len(one.body) for one in [*before, after[0]]) > POST_BYTES_MAX
        for before, after in pairwise(parts)
    )


async def test_a_large_reply_is_read_whole_and_kept_short_in_the_log_of_tries(
    conn: Connection, pool: Pool
) -> None:
    text = "x" * (EVENT_BYTES_MAX - 1024)
    async with hostile(in_turn(replies(data=text))) as server:
        execution, _ = await commanded(conn, server.url)

        await relay(pool).run_once(now=NOON)

        cursor = await conn.execute("select octet_length(response) from waypost.delivery")
        assert await given.mail(conn, execution) == [{"outcome": "done", "value": text}]
        assert await cursor.fetchall() == [(HERE.response_max,)]


async def test_a_reply_that_breaks_off_is_asked_for_again(conn: Connection, pool: Pool) -> None:
    async with hostile(in_turn(breaks_off, replies())) as server:
        execution, message = await commanded(conn, server.url)
        subject = relay(pool)

        await subject.run_once(now=NOON)
        between = await given.row(conn, message)
        await subject.run_once(now=between["due_at"])

        assert (between["state"], between["reached"]) == ("due", True)
        assert await given.mail(conn, execution) == [DONE]
        assert await given.deliveries(conn, message) == [
            (1, "retry", 200, "reply-cut"),
            (2, "delivered", 200, None),
        ]


# At most once


async def test_a_command_that_is_sent_once_gets_its_reply(conn: Connection, pool: Pool) -> None:
    async with hostile(in_turn(replies())) as server:
        execution, message = await commanded(conn, server.url, at_most_once=True)
        subject = relay(pool)

        await subject.run_once(now=NOON)
        again = await subject.run_once(now=AFTER_THE_CLAIM)

        assert (again, len(server.requests)) == (0, 1)
        assert await given.mail(conn, execution) == [DONE]
        assert (await given.row(conn, message))["state"] == "delivered"


async def test_a_command_that_is_sent_once_is_unknown_when_its_reply_breaks_off(
    conn: Connection, pool: Pool
) -> None:
    async with hostile(in_turn(breaks_off, replies())) as server:
        execution, message = await commanded(conn, server.url, at_most_once=True)
        subject = relay(pool)

        await subject.run_once(now=NOON)
        again = await subject.run_once(now=AFTER_THE_CLAIM)

        assert (again, len(server.requests)) == (0, 1)
        assert await given.mail(conn, execution) == [{"outcome": "unknown", "code": "sent"}]
        assert (await given.row(conn, message))["state"] == "dead"


# One reply, by both ways


@pytest.mark.parametrize("replies_from", [None, "bank"])
@pytest.mark.parametrize("first", ["answer", "receiver"])
async def test_a_reply_that_is_posted_as_well_is_one(
    conn: Connection, pool: Pool, first: str, replies_from: str | None
) -> None:
    posted: list[str] = []

    async def by_both_ways(exchange: Exchange, request: Request) -> None:
        if first == "receiver":
            posted.append((await post_to_receiver(conn, reply_to(request.body), sender=sender)).outcome)
        await replies()(exchange, request)

    sender = replies_from or "payments"
    async with hostile(in_turn(by_both_ways)) as server:
        execution, message = await commanded(conn, server.url)
        await conn.execute("update waypost.endpoint set replies_from = %s", (replies_from,))

        await relay(pool).run_once(now=NOON)
        if first == "answer":
            body = reply_to(server.requests[0].body, time="2026-11-30T10:15:00Z")
            posted.append((await post_to_receiver(conn, body, sender=sender)).outcome)

        assert posted == ["duplicate" if first == "answer" else "stored"]
        assert await given.mail(conn, execution) == [DONE]
        assert [row[1] for row in await stored(conn)] == [sender]
        assert await given.deliveries(conn, message) == [(1, "delivered", 200, None)]


async def test_a_reply_that_names_no_command_answers_the_one_in_whose_answer_it_stands(
    conn: Connection, pool: Pool
) -> None:
    async with hostile(in_turn(replies(causationid=None))) as server:
        execution, _ = await commanded(conn, server.url)

        await relay(pool).run_once(now=NOON)
        named = await post_to_receiver(conn, reply_to(server.requests[0].body))

        assert named.outcome == "duplicate"
        assert await given.mail(conn, execution) == [DONE]


async def test_a_relay_that_waits_for_a_receiver_with_the_same_reply_holds_nothing_of_its_execution(
    conn: Connection, pool: Pool, dsn: str
) -> None:
    """The receiver's row of the inbox comes before the execution's in the order of locks."""
    async with hostile(in_turn(replies(id="r-1"))) as server:
        execution, message = await commanded(conn, server.url)
        async with await psycopg.AsyncConnection.connect(dsn) as other:
            await other.execute(
                """
                insert into waypost.inbox
                       (tenant_id, kind, sender, source, event_id, digest, answer, received_at)
                values (1, 'reply', 'payments', '/payments', 'r-1', ''::bytea, 'mail', now())
                """
            )
            task = asyncio.create_task(relay(pool).run_once(now=NOON))

            async def waits() -> bool:
                cursor = await conn.execute(
                    "select 1 from pg_stat_activity where %s = any(pg_blocking_pids(pid))",
                    (other.info.backend_pid,),
                )
                return await cursor.fetchone() is not None

            await until(waits, what="the relay to wait for the receiver")
            free = await conn.execute(
                """
                select e.execution_id, o.message_id
                  from waypost.execution e
                  join waypost.outbox o using (tenant_id, execution_id)
                   for update nowait
                """
            )
            found = await free.fetchall()
            await other.rollback()
            await task

        assert found == [(execution, message)]
        assert await given.mail(conn, execution) == [DONE]


# Claims that expire


async def test_a_reply_that_comes_after_its_claim_has_expired_counts(conn: Connection, pool: Pool) -> None:
    async def is_late(exchange: Exchange, request: Request) -> None:
        expired.append(await outbox.expire_claims(conn, limit=10, now=AFTER_THE_CLAIM))
        await replies()(exchange, request)

    expired: list[int] = []
    async with hostile(in_turn(is_late)) as server:
        execution, message = await commanded(conn, server.url)
        subject = relay(pool)

        await subject.run_once(now=NOON)
        again = await subject.run_once(now=AFTER_THE_CLAIM)

        assert (expired, again, len(server.requests)) == ([1], 0, 1)
        assert await given.mail(conn, execution) == [DONE]
        assert (await given.row(conn, message))["state"] == "delivered"


class Killed(BaseException):
    """The process is gone."""


async def test_a_relay_that_dies_between_the_reply_and_its_settlement_leaves_nothing_to_send(
    conn: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object, **__: object) -> None:
        raise Killed

    async with hostile(in_turn(replies())) as server:
        execution, message = await commanded(conn, server.url)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(outbox, "settle", dies)
            await relay(pool).run_once(now=NOON)
        died = await given.row(conn, message)

        await relay(pool).run_once(now=AFTER_THE_CLAIM)

        assert died["state"] == "sending"
        assert (await given.row(conn, message))["state"] == "delivered"
        assert len(server.requests) == 1
        assert await given.mail(conn, execution) == [DONE]


async def test_a_relay_that_dies_before_it_stored_the_reply_is_answered_again(
    conn: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object, **__: object) -> None:
        raise Killed

    async with hostile(in_turn(replies())) as server:
        execution, message = await commanded(conn, server.url)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr("relay.replies.post", dies)
            await relay(pool).run_once(now=NOON)
        unheard = await given.mail(conn, execution)

        await relay(pool).run_once(now=AFTER_THE_CLAIM)

        assert (unheard, await given.mail(conn, execution)) == ([], [DONE])
        assert len(server.requests) == 2
        assert (await given.row(conn, message))["state"] == "delivered"


async def test_a_reply_is_stored_and_settled_once_more_when_the_answer_to_the_first_time_is_lost(
    conn: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was stored is a duplicate then, and no fault."""
    real = outbox.settle

    async def fails_once(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(outbox, "settle", real)
        raise psycopg.OperationalError("the connection is gone")

    watcher, stop = Watcher(), asyncio.Event()
    monkeypatch.setattr(outbox, "settle", fails_once)
    async with hostile(in_turn(replies())) as server:
        execution, message = await commanded(conn, server.url)
        task = asyncio.create_task(relay(pool, watcher).run(stop))
        await watcher.until("message.tried", message=message, state="delivered")
        stop.set()
        await task

        assert [moment["stored"] for moment in watcher.named("replies.posted")] == [1, 0]
        assert await given.mail(conn, execution) == [DONE]
        assert await given.deliveries(conn, message) == [(1, "delivered", 200, None)]


async def test_what_was_answered_with_a_reply_before_is_not_made_unknown_by_a_cut(
    conn: Connection, pool: Pool
) -> None:
    """The reply came to the receiver while the answer broke off."""

    async def posts_and_cuts(exchange: Exchange, request: Request) -> None:
        await post_to_receiver(conn, reply_to(request.body))
        await breaks_off(exchange, request)

    async with hostile(in_turn(posts_and_cuts)) as server:
        execution, message = await commanded(conn, server.url, at_most_once=True)

        await relay(pool).run_once(now=NOON)

        assert await given.mail(conn, execution) == [DONE]
        assert (await given.row(conn, message))["state"] == "delivered"


# End to end


class Charge(Command[dict[str, str]], endpoint="payments", type="payment.charge"):
    order: str


@workflow(name="paid", version="1")
async def paid(ctx: Context, order: str) -> str:
    charged = await ctx.call(Charge(order=order))
    return charged["charge"]


async def test_a_flow_goes_on_with_what_the_answer_said(conn: Connection, pool: Pool, dsn: str) -> None:
    watcher, stop, hinted = Moments(), asyncio.Event(), asyncio.Event()
    async with hostile(in_turn(replies())) as server, hinting(Hints(dsn)) as hints:
        await given.endpoint(conn, server.url)
        worker = Worker(
            pool, Flows([paid]), dsn=dsn, hints=hints, lease=timedelta(seconds=10), observer=watcher
        )
        async with database.pool(dsn, size=4, name="relay") as others, asyncio.TaskGroup() as group:
            group.create_task(worker.run(stop))
            group.create_task(relay(others, hint=hints.give, hinted=hinted).run(stop))
            client = Client(conn, hint=hints.give)
            started = await client.start(paid, "order-1")
            view = await client.wait(started.execution_id, seconds=30)
            stop.set()

    assert (view.row.status, view.output, len(server.requests)) == ("completed", "ch-1", 1)
