"""Executions that wait for events: what the database and the journal say afterwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from contracts import strict_json
from orchestrator.client import Client
from orchestrator.store.database import Connection
from receiver import inbox
from receiver.inbox import MailItem
from tests.engine.conftest import Working
from tests.engine.flows import CALLS, FLOWS
from tests.engine.test_worker import REMEMBERING, kinds
from tests.waiting import until

PAID = "payment.succeeded"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    yield


async def came(conn: Connection, type_: str, key: str, data: Any, *, event_id: str = "") -> None:
    """An event, as a receiver stores it."""
    text = strict_json.encode(data, what="event")
    await inbox.post(
        conn,
        [
            MailItem(
                kind="event", sender="bank", source="/bank", event_id=event_id or str(uuid4()), type=type_,
                key=key, digest=hashlib.sha256(text.encode()).digest(), data=text,
            )
        ],
    )  # fmt: skip


async def waits_for(conn: Connection, execution: UUID) -> list[tuple[str, str, str]]:
    cursor = await conn.execute(
        "select path, type, key from waypost.wait where execution_id = %s and inbox_id is null order by path",
        (execution,),
    )
    return await cursor.fetchall()  # pyright: ignore[reportReturnType]  # as the select says


async def until_it_waits(conn: Connection, execution: UUID, *paths: str) -> None:
    async def so() -> bool:
        return [path for path, _, _ in await waits_for(conn, execution)] == sorted(paths)

    await until(so, what=f"open waits at {paths}")


async def left(conn: Connection) -> int:
    cursor = await conn.execute("select count(*) from waypost.wait")
    row = await cursor.fetchone()
    assert row is not None
    return row[0]


@REMEMBERING
async def test_events_are_given_out_one_by_one_in_the_order_of_their_arrival(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    # Azure durable-extension 413, 573: events between two waits were dropped.
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("hears"), "A")
        await until_it_waits(conn, started.execution_id, "payment%2Esucceeded")
        for amount in (1, 2, 3):
            await came(conn, PAID, "A", {"order": "A", "amount": amount})
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.output) == ("completed", 12)
    assert await left(conn) == 0


@REMEMBERING
async def test_an_event_that_came_before_anybody_waited_is_taken_from_the_shelf(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    # Azure durable-extension 378, 1989, durabletask 720: an event before its instance, or for one that starts later.
    await came(conn, PAID, "A", {"order": "A", "amount": 4})
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("hears"), "A")
        await came(conn, PAID, "A", {"order": "A", "amount": 2})
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == 42


async def test_an_event_wakes_every_execution_that_waits_for_it(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        ids = [(await client.start(FLOWS.get("either"), "A")).execution_id for _ in range(3)]
        for one in ids:
            await until_it_waits(conn, one, "first.0/payment%2Esucceeded", "first.1/payment%2Efailed")
        await came(conn, PAID, "A", {"order": "A", "amount": 5})
        views = [await client.wait(one, seconds=30) for one in ids]

    assert [view.output for view in views] == ["paid 5"] * 3
    assert await left(conn) == 0


@REMEMBERING
async def test_the_waits_that_lost_are_gone_and_a_later_event_finds_nobody(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    # inngest-js 1617: a branch that lost kept its wait open, and took the next event.
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("either"), "A")
        await until_it_waits(
            conn, started.execution_id, "first.0/payment%2Esucceeded", "first.1/payment%2Efailed"
        )
        await came(conn, "payment.failed", "A", {"order": "A"})
        view = await client.wait(started.execution_id, seconds=30)
        await came(conn, PAID, "A", {"order": "A", "amount": 5})

    assert view.output == "declined"
    assert "withdrawn first.0/payment%2Esucceeded" in kinds(view)
    assert await left(conn) == 0
    cursor = await conn.execute("select taken from waypost.inbox order by inbox_id")
    assert await cursor.fetchall() == [(True,), (False,)]


@REMEMBERING
async def test_a_wait_that_timed_out_took_nothing_and_the_next_one_gets_the_event(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("hastens"), "A")
        await until_it_waits(conn, started.execution_id, "payment%2Esucceeded#2")
        await came(conn, PAID, "A", {"order": "A", "amount": 7})
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == "late 7"
    assert await left(conn) == 0


@REMEMBERING
async def test_events_come_to_an_execution_that_runs_a_step_beside_its_waits(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("beside"), "A")
        await came(conn, "other", "A", 9)
        await came(conn, PAID, "A", {"order": "A", "amount": 3})
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == [2, 3, 9]
    assert CALLS.count(("double", 1, True)) == 1
    assert await left(conn) == 0


async def test_what_does_not_fit_its_class_is_said_and_undone(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = await client.start(FLOWS.get("hears"), "A")
        await came(conn, PAID, "A", {"order": "A", "amount": "many"})
        view = await client.wait(started.execution_id, seconds=30)

    assert view.row.status == "failed"
    assert view.error is not None
    assert (view.error["code"], view.error["detail"].split(":")[0]) == ("reply-invalid", "at /amount")


async def test_the_journal_says_whose_event_it_was(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = await client.start(FLOWS.get("either"), "A")
        await came(conn, PAID, "A", {"order": "A", "amount": 5}, event_id="evt-1")
        view = await client.wait(started.execution_id, seconds=30)

    received = next(fact for fact in view.facts if fact.kind == "received")
    ended = next(fact for fact in view.facts if fact.kind == "ended")
    assert received.actor == "sender:bank"
    assert json.loads(received.payload or "") == {
        "type": PAID, "key": "A", "source": "/bank", "id": "evt-1", "data": {"order": "A", "amount": 5},
    }  # fmt: skip
    assert json.loads(ended.payload or "") == {"outcome": "done", "of": received.position}
