"""Local steps with a worker and a database: tries that are ended, probes, and threads that do not come back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from orchestrator import CannotSay, Context, Done, Retry, attempt, local, seconds, workflow
from orchestrator.client import Client
from orchestrator.engine import attempt as attempt_module
from orchestrator.flows import Flows
from orchestrator.store.database import Connection
from tests.engine.conftest import LIMITS, Working
from tests.engine.test_worker import REMEMBERING, kinds
from tests.waiting import until

CALLS: list[str] = []
GO_ON = threading.Event()
SOON = Retry.fixed(seconds(0.01), attempts=3)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    GO_ON.clear()
    yield
    GO_ON.set()


async def reads_pages(pages: int) -> Any:
    """Silent after its second page; the next try goes on where that one was."""
    now = attempt()
    page = now.left or 0
    while page < pages:
        page += 1
        now.heartbeat(page)
        if page == 2:
            await asyncio.Event().wait()
    return {"pages": page, "try": now.number}


def charges(order: str) -> str:
    CALLS.append(f"charge {order}")
    raise ConnectionError("the answer was lost")


async def looks(order: str) -> Done[str] | CannotSay:
    CALLS.append(f"look {order}")
    return Done("charged") if CALLS.count(f"look {order}") == 2 else CannotSay()


def blocks(name: str) -> str:
    CALLS.append(f"{name} begins")
    assert GO_ON.wait(60)
    CALLS.append(f"{name} ends")
    return f"{name}, try {attempt().number}"


def tidies(name: str) -> None:
    CALLS.append(f"{name} undone")


async def greets(name: str) -> str:
    return f"hello {name}"


@workflow(name="pages", version="1")
async def pages(ctx: Context, n: int) -> Any:
    return await ctx.step(reads_pages, n, heartbeat=seconds(0.05), retry=SOON)


@workflow(name="charged", version="1")
async def charged(ctx: Context, order: str) -> str:
    return await ctx.step(charges, order, probe=looks, retry=SOON)


@workflow(name="blocked", version="1")
async def blocked(ctx: Context, name: str) -> str:
    return await ctx.step(blocks, name)


@workflow(name="stuck", version="1")
async def stuck(ctx: Context, name: str) -> str:
    return await ctx.step(blocks, name, attempt_timeout=seconds(0.01), undo=local(tidies, name))


@workflow(name="greeted", version="1")
async def greeted(ctx: Context, name: str) -> str:
    return await ctx.step(greets, name)


FLOWS = Flows([pages, charged, blocked, stuck, greeted])


async def said(word: str) -> None:
    """Until a function has said `word`."""

    async def heard() -> bool:
        return word in CALLS

    await until(heard, what=word)


async def done(client: Client, name: str, argument: Any) -> Any:
    started = await client.start(FLOWS.get(name), argument)
    view = await client.wait(started.execution_id, seconds=30)
    assert view.row.status == "completed", view.facts[-1].payload
    return view.output


@REMEMBERING
async def test_a_step_whose_heartbeat_stops_is_ended_and_the_next_try_has_what_it_left(
    working: Working, client: Client, forgetful: bool
) -> None:
    async with working(flows=FLOWS, forgetful=forgetful):
        started = await client.start(pages, 3)
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == {"pages": 3, "try": 2}
    assert kinds(view) == [
        "started",
        "asked reads_pages",
        "attempted reads_pages",
        "ended reads_pages",
        "finished",
    ]
    attempted = json.loads(view.facts[2].payload or "")
    assert (attempted["error"]["code"], attempted["left"]) == ("heartbeat-lost", 2)


@REMEMBERING
async def test_a_probe_finds_out_what_a_try_did_before_it_is_made_again(
    working: Working, client: Client, forgetful: bool
) -> None:
    async with working(flows=FLOWS, forgetful=forgetful):
        output = await done(client, "charged", "A")

    assert (output, CALLS) == ("charged", ["charge A", "look A", "look A"])


async def test_a_blocked_thread_loses_no_lease_and_stops_nobody_else(
    working: Working, client: Client, conn: Connection
) -> None:
    async def lease_until() -> float:
        cursor = await conn.execute("select max(extract(epoch from lease_until)) from waypost.worker")
        row = await cursor.fetchone()
        return float(row[0]) if row is not None and row[0] is not None else 0.0

    async with working(flows=FLOWS, lease=seconds(1)) as moments:
        started = await client.start(blocked, "one")
        await said("one begins")
        first = await lease_until()

        async def renewed() -> bool:
            return await lease_until() > first + 1

        await until(renewed, what="a lease beyond the first one")
        assert await done(client, "greeted", "ann") == "hello ann"
        GO_ON.set()
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.output, kinds(view)[2:]) == ("one, try 1", ["ended blocks", "finished"])
    assert moments.count("worker lost its lease") == 0


async def test_a_blocked_thread_keeps_nothing_that_its_worker_has_lost(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS) as moments:
        started = await client.start(blocked, "one")
        await said("one begins")
        await until(lambda: asked(client, started.execution_id), what="its asking")
        await conn.execute("update waypost.worker set dead_at = clock_timestamp()")
        await moments.until("worker started", times=2)

        async def twice() -> bool:
            return CALLS.count("one begins") == 2

        await until(twice, what="another try by the new owner")
        GO_ON.set()
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == "one, try 2"
    assert kinds(view) == ["started", "asked blocks", "orphaned", "ended blocks", "finished"]


async def asked(client: Client, execution: UUID) -> bool:
    return "asked blocks" in kinds(await client.show(execution))


async def test_a_thread_whose_time_is_over_lets_its_flow_go_on_and_is_undone_when_it_has_ended(
    working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "STOP_SECONDS", 0.0)

    async with working(flows=FLOWS):
        started = await client.start(stuck, "one")

        async def over() -> bool:
            return "ended blocks" in kinds(await client.show(started.execution_id))

        await until(over, what="the end of the step")
        assert CALLS == ["one begins"]
        GO_ON.set()
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, CALLS) == ("compensated", ["one begins", "one ends", "one undone"])
    assert kinds(view)[2:5] == ["ended blocks", "late blocks", "asked blocks/undo"]


async def test_no_more_plain_functions_run_at_once_than_there_are_threads(
    working: Working, client: Client
) -> None:
    async with working(flows=FLOWS, limits=replace(LIMITS, threads_max=1)):
        one = await client.start(blocked, "one")
        await said("one begins")
        two = await client.start(blocked, "two")
        await until(lambda: asked(client, two.execution_id), what="the second one's asking")
        await done(client, "greeted", "ann")
        assert CALLS == ["one begins"]
        GO_ON.set()
        for started in (one, two):
            await client.wait(started.execution_id, seconds=30)

    assert CALLS == ["one begins", "one ends", "two begins", "two ends"]
