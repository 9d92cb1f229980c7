"""Deadlines of real executions, whoever started them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import pytest

from orchestrator import Context, days, errands, hours, local, minutes, seconds, workflow
from orchestrator.cli.operations import described
from orchestrator.client import Client, ExecutionView, OrderInvalid
from orchestrator.explanation import Code
from orchestrator.flows import Flows
from orchestrator.store import definitions
from orchestrator.store.database import Connection
from receiver import inbox
from tests.engine.conftest import Working
from tests.engine.flows import CALLS, FLOWS, Paid, double, undo_double, waits
from tests.engine.test_why import until_told, why
from tests.engine.test_worker import kinds
from tests.invariants import broken
from tests.store.world import event

REMEMBERING = pytest.mark.parametrize("forgetful", [False, True], ids=["remembering", "forgetful"])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    yield


@workflow(name="patient-order", version="1", deadline=seconds(0.2))
async def patient_order(ctx: Context, order: str) -> None:
    await ctx.step(double, 1, undo=local(undo_double, 1))
    await ctx.event(Paid, key=order)


@workflow(name="runs-on", version="1")
async def runs_on(ctx: Context, n: int) -> None:
    await ctx.step(double, n, undo=local(undo_double, n))
    await ctx.step(waits)


@workflow(name="by-payment", version="1", on=Paid, deadline=hours(2))
async def by_payment(ctx: Context, paid: Paid) -> None:
    await ctx.event("never")


MORE: Final = Flows([patient_order, runs_on, by_payment])


def done() -> list[int]:
    """What was done, as far as it came in its time."""
    return [call[1] for call in CALLS if call[0] == "double"]


def undone() -> list[int]:
    return [call[1] for call in CALLS if call[0] == "undo_double"]


def deadline_of(view: ExecutionView) -> timedelta:
    """How long it may take, as row and first fact say alike."""
    said: dict[str, Any] = json.loads(view.facts[0].payload or "{}")
    until = view.row.deadline_at
    assert until is not None
    assert type(until).fromisoformat(said["deadline"]) == until
    return until - view.row.created_at


@REMEMBERING
async def test_a_flow_that_waits_beyond_its_deadline_is_woken_stopped_and_undone(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(flows=MORE, forgetful=forgetful):
        started = (await client.start(patient_order, "A")).execution_id
        view = await client.wait(started, seconds=30)

    assert view.error is not None
    assert view.error["code"] == "deadline"
    assert undone() == done()
    assert "cancel_asked" in kinds(view)
    assert deadline_of(view) == seconds(0.2)
    assert await broken(conn, at_rest=True) == []


async def test_a_step_that_runs_is_stopped_at_the_deadline_of_its_start(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=MORE):
        started = (await client.start(runs_on, 1, deadline=seconds(0.3))).execution_id
        view = await client.wait(started, seconds=30)

    assert view.error is not None
    assert view.error["code"] == "deadline"
    assert undone() == done()
    assert await broken(conn, at_rest=True) == []


async def test_the_row_wakes_at_the_deadline_and_show_and_why_tell_it(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=MORE):
        started = (await client.start(patient_order, "A", deadline=days(3))).execution_id
        told = await until_told(conn, started, Code.AWAITING_EVENT)
    view = await client.show(started)

    assert (view.row.wake_at, deadline_of(view)) == (view.row.deadline_at, days(3))
    assert " Its deadline is at " in told.sentence
    assert ", next look in 2 d, deadline in 2 d" in "\n".join(described(view, [], is_served=True))


async def test_what_starts_an_execution_without_its_code_knows_its_deadline(
    working: Working, client: Client, conn: Connection
) -> None:
    await definitions.publish(conn, MORE.definitions())
    async with conn.transaction():
        by_application: UUID = await errands.start(conn, patient_order, "B")
    await inbox.post(conn, [event("e1", type=Paid.type_, key="C", data='{"order": "C"}')])
    cursor = await conn.execute("select execution_id from waypost.execution where definition = 'by-payment'")
    [(by_event,)] = await cursor.fetchall()

    assert deadline_of(await client.show(by_application)) == seconds(0.2)
    assert deadline_of(await client.show(by_event)) == hours(2)


async def test_a_version_that_is_published_again_has_the_deadline_of_its_code(conn: Connection) -> None:
    async def known() -> timedelta | None:
        cursor = await conn.execute("select deadline from waypost.definition where name = 'by-payment'")
        [(found,)] = await cursor.fetchall()
        return found

    [definition] = Flows([by_payment]).definitions()
    said: list[timedelta | None] = []
    for deadline in (hours(2), hours(3), None):
        await definitions.publish(
            conn, [definitions.Definition(definition.name, "1", definition.on, deadline=deadline)]
        )
        said.append(await known())

    assert said == [hours(2), hours(3), None]


async def test_an_execution_that_was_started_before_keeps_its_deadline(client: Client) -> None:
    first = await client.start(FLOWS.get("three"), 1, key="k", deadline=hours(1))
    again = await client.start(FLOWS.get("three"), 1, key="k", deadline=minutes(1))

    assert (again.outcome, deadline_of(await client.show(first.execution_id))) == ("exists", hours(1))


async def test_an_execution_without_one_has_none(client: Client, conn: Connection) -> None:
    started = (await client.start(FLOWS.get("three"), 1)).execution_id

    view = await client.show(started)

    assert (view.row.deadline_at, "deadline" in (view.facts[0].payload or "")) == (None, False)
    assert "deadline" not in (await why(conn, started)).sentence


@pytest.mark.parametrize("span", [timedelta(0), -seconds(1), days(3654)])
async def test_a_deadline_that_cannot_be_is_refused_and_nothing_is_written(
    client: Client, conn: Connection, span: timedelta
) -> None:
    with pytest.raises(OrderInvalid, match=r"deadline of .*: expected more than 0 and at most ten years"):
        await client.start(FLOWS.get("three"), 1, deadline=span)

    cursor = await conn.execute("select count(*) from waypost.execution")
    assert await cursor.fetchone() == (0,)
