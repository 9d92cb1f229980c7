"""Mutexes of real executions: one at a time, in turn, and let go whatever ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final
from uuid import UUID

import pytest

from orchestrator import Context, Refused, Retry, StepRefused, local, seconds, workflow
from orchestrator.client import Client
from orchestrator.explanation import Code
from orchestrator.flows import Flows
from orchestrator.store import mutexes
from orchestrator.store.database import Connection
from orchestrator.store.situation import stuck
from tests.engine.conftest import Working
from tests.engine.test_why import until_told
from tests.invariants import broken
from tests.waiting import until

GATE: Final[dict[str, asyncio.Event]] = {}
"""What a step waits for, by the name of its order."""

SAID: Final[list[str]] = []


@pytest.fixture(autouse=True)
async def fresh() -> AsyncIterator[None]:
    GATE.clear()
    SAID.clear()
    yield


def gate(order: str) -> asyncio.Event:
    return GATE.setdefault(order, asyncio.Event())


async def weld(order: str) -> str:
    SAID.append(f"{order} begins")
    await gate(order).wait()
    SAID.append(f"{order} ends")
    if order == "bad":
        raise Refused("crooked")
    return order


def unweld(order: str) -> None:
    SAID.append(f"{order} is undone")


@workflow(name="welds", version="1")
async def welds(ctx: Context, order: str) -> str:
    return await ctx.step(weld, order, mutex="line-7")


@workflow(name="paints", version="1", mutex=lambda order: order[0])
async def paints(ctx: Context, order: str) -> str:
    await ctx.step(unweld, order, undo=local(unweld, order))
    return await ctx.step(weld, order, retry=Retry(attempts=1))


@workflow(name="goes-on", version="1", mutex=lambda left: "one")
async def goes_on(ctx: Context, left: int) -> int:
    await ctx.step(weld, str(left))
    if left:
        ctx.continue_as_new(left - 1)
    return left


@workflow(name="paints-inside", version="1", mutex=lambda order: order[0])
async def paints_inside(ctx: Context, order: str) -> list[str]:
    """Its first child has no mutex, but a child of that would have one; so would its second."""
    found = [await ctx.child(hands_on, order)]
    try:
        await ctx.child(paints, order)
    except StepRefused as error:
        found.append(error.code)
    return found


@workflow(name="hands-on", version="1")
async def hands_on(ctx: Context, order: str) -> str:
    try:
        return await ctx.child(paints, order)
    except StepRefused as error:
        return error.code


FLOWS: Final = Flows([welds, paints, goes_on, paints_inside, hands_on])


async def until_said(*said: str) -> None:
    async def is_said() -> bool:
        return [*said] == SAID

    await until(is_said, what=f"{said}, so far {SAID}")


async def begun(client: Client, conn: Connection, *orders: str, flow: Any = welds) -> list[UUID]:
    """An execution for each of `orders`; the first has begun its step, and the others wait in this order."""
    started: list[UUID] = []
    for order in orders:
        started.append((await client.start(flow, order)).execution_id)
        if len(started) == 1:
            await until_said(f"{order} begins")
        else:
            await until_told(conn, started[-1], Code.AWAITING_MUTEX)
    return started


async def finished(client: Client, *executions: UUID) -> list[Any]:
    return [(await client.wait(one, seconds=30)).output for one in executions]


async def test_one_goes_on_at_a_time_in_the_order_of_asking(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        started = await begun(client, conn, "a", "b", "c")
        rows = await mutexes.of_key(conn, "line-7", tenant=1, limit=10)
        assert [(row.execution_id, row.granted_at is None, row.ahead) for row in rows] == [
            (str(started[0]), False, 0), (str(started[1]), True, 0), (str(started[2]), True, 1),
        ]  # fmt: skip
        assert await stuck(conn, limit=10) == (0, [])

        for order in "abc":
            gate(order).set()

        assert await finished(client, *started) == ["a", "b", "c"]

    assert SAID == ["a begins", "a ends", "b begins", "b ends", "c begins", "c ends"]
    assert await mutexes.of_key(conn, "line-7", tenant=1, limit=10) == []
    assert await broken(conn) == []


async def cancels(client: Client, execution: UUID) -> None:
    await client.cancel(execution, by="ann", reason="enough")


async def terminates(client: Client, execution: UUID) -> None:
    await client.terminate(execution, by="ann", reason="enough")


@pytest.mark.parametrize("end", [cancels, terminates])
async def test_who_waits_and_is_ended_is_passed_over(
    working: Working, client: Client, conn: Connection, end: Callable[[Client, UUID], Any]
) -> None:
    async with working(flows=FLOWS):
        first, second, third = await begun(client, conn, "a", "b", "c")

        await end(client, second)
        await client.wait(second, seconds=30)
        gate("a").set()
        gate("c").set()

        assert await finished(client, first, third) == ["a", "c"]

    assert SAID == ["a begins", "a ends", "c begins", "c ends"]
    assert await broken(conn) == []


@pytest.mark.parametrize("end", [cancels, terminates])
async def test_who_has_it_and_is_ended_lets_it_go(
    working: Working, client: Client, conn: Connection, end: Callable[[Client, UUID], Any]
) -> None:
    async with working(flows=FLOWS):
        first, second = await begun(client, conn, "a", "b")

        gate("b").set()
        await end(client, first)

        assert await finished(client, second) == ["b"]

    assert await broken(conn) == []


async def test_a_worker_that_is_gone_leaves_the_mutex_to_its_execution(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS, lease=seconds(1), orphans=True):
        first, second = await begun(client, conn, "a", "b")

    gate("a").set()
    gate("b").set()
    async with working(flows=FLOWS, lease=seconds(1), orphans=True):
        assert await finished(client, first, second) == ["a", "b"]

    assert SAID == ["a begins", "a begins", "a ends", "b begins", "b ends"]
    assert await broken(conn) == []


async def test_a_flow_has_its_mutex_until_all_is_undone_and_other_keys_do_not_wait(
    working: Working, client: Client, conn: Connection
) -> None:
    """The key of these flows is the first letter of their order."""
    async with working(flows=FLOWS):
        bad = (await client.start(paints, "bad")).execution_id
        await until_said("bad is undone", "bad begins")
        other = (await client.start(paints, "boat")).execution_id
        await until_told(conn, other, Code.AWAITING_MUTEX)
        free = (await client.start(paints, "car")).execution_id
        gate("car").set()
        assert await finished(client, free) == ["car"]

        SAID.clear()
        gate("bad").set()
        gate("boat").set()
        assert await finished(client, bad, other) == [None, "boat"]

    assert SAID == ["bad ends", "bad is undone", "boat is undone", "boat begins", "boat ends"]
    assert await broken(conn) == []


async def test_two_families_that_would_wait_for_the_mutexes_of_each_other_do_not(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        families = [(await client.start(paints_inside, order)).execution_id for order in ("ab", "ba")]
        assert await finished(client, *families) == [["mutex-inside"] * 2] * 2

        alone = (await client.start(hands_on, "car")).execution_id
        gate("car").set()
        assert await finished(client, alone) == ["car"]

    assert await broken(conn) == []


async def test_a_flow_that_continues_as_new_lets_nobody_in_between(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        first = (await client.start(goes_on, 2)).execution_id
        await until_said("2 begins")
        second = (await client.start(goes_on, 0)).execution_id
        await until_told(conn, second, Code.AWAITING_MUTEX)

        for order in "210":
            gate(order).set()

        assert await finished(client, first, second) == [0, 0]

    assert [said for said in SAID if said.endswith("begins")] == [f"{n} begins" for n in (2, 1, 0, 0)]
    assert await broken(conn) == []


async def test_replays_after_each_fact_come_to_the_same(
    working: Working, client: Client, conn: Connection
) -> None:
    for order in "abc":
        gate(order).set()

    async with working(flows=FLOWS, forgetful=True):
        started = [(await client.start(welds, order)).execution_id for order in "abc"]
        assert await finished(client, *started) == ["a", "b", "c"]

    begins = [said for said in SAID if said.endswith("begins")]
    assert [said for said in SAID if said.endswith("ends")] == [f"{said[0]} ends" for said in begins]
    assert await broken(conn) == []
