"""What open journals say about other code: which executions would go on, which would be held, and why."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel

from contracts import Command
from orchestrator import Context, Event, replays, seconds, workflow
from orchestrator.client import Client
from orchestrator.core.fact import Fact
from orchestrator.flows import Flow, Flows
from orchestrator.replays import Finding, Would
from orchestrator.store.database import Connection
from orchestrator.store.executions import UNREADABLE
from orchestrator.store.versions import OpenRow
from orchestrator.testing import FlowTester
from tests.engine.conftest import Working
from tests.engine.test_worker import message_at
from tests.waiting import until

NOW = datetime(2027, 1, 16, tzinfo=UTC)


class Booked(BaseModel):
    ref: str


class Book(Command[Booked], endpoint="hotel", type="room.book"):
    city: str


class Cancel(Command[None], endpoint="hotel", type="room.cancel"):
    city: str


class Paid(Event, type="paid"):
    amount: int


@workflow(name="trip", version="1")
async def trip(ctx: Context, city: str) -> str:
    booked = await ctx.call(Book(city=city), undo=Cancel(city=city))
    paid = await ctx.event(Paid, key=city)
    return f"{booked.ref} for {paid.amount}"


@workflow(name="trip", version="1")
async def reworded(ctx: Context, city: str) -> str:
    booked = await ctx.call(Book(city=city.upper()), undo=Cancel(city=city), timeout=seconds(9))
    paid = await ctx.event(Paid, key=city)
    await ctx.sleep(seconds(1))
    return f"{booked.ref}: {paid.amount}"


@workflow(name="trip", version="1")
async def inserted(ctx: Context, city: str) -> str:
    await ctx.sleep(seconds(1))
    await ctx.call(Book(city=city), undo=Cancel(city=city))
    return str(await ctx.event(Paid, key=city))


@workflow(name="trip", version="1")
async def shortened(ctx: Context, city: str) -> str:
    booked = await ctx.call(Book(city=city), undo=Cancel(city=city))
    return booked.ref


@workflow(name="trip", version="1")
async def broken(ctx: Context, city: str) -> str:
    booked: Any = await ctx.call(Book(city=city), undo=Cancel(city=city))
    return booked.reference


class Address(BaseModel):
    street: str


@workflow(name="trip", version="1")
async def remodelled(ctx: Context, city: Address) -> str:
    return city.street


def row(status: str = "open") -> OpenRow:
    return OpenRow("0197", "trip", "1", "k", status)


def journal() -> list[Fact]:
    """Of a trip that is booked and waits to be paid for."""
    test = FlowTester(trip, "Rome")
    test.expect(Book).replies(Booked(ref="r-1"))
    return test.journal


def looked_at(flow: Flow | None, *more: Fact) -> Finding:
    return replays.found(row(), flow, [*journal(), *more], now=NOW)


@pytest.mark.parametrize("flow", [trip, reworded])
def test_code_that_asks_for_what_was_asked_for_goes_on(flow: Flow) -> None:
    assert looked_at(flow) == Finding(row(), Would.GO_ON)


@pytest.mark.parametrize(
    ("flow", "code", "says"),
    [
        (
            inserted,
            "nondeterminism",
            "the journal has asked call book at 'book' at position 2; the program says ",
        ),
        (
            shortened,
            "nondeterminism",
            "the journal has asked event paid at 'paid' at position 4; the program says ",
        ),
        (broken, "program-fault", "AttributeError: "),
        (remodelled, "input-invalid", "the input does not fit flow trip: "),
    ],
)
def test_code_that_says_something_else_would_be_held_and_the_first_difference_is_told(
    flow: Flow, code: str, says: str
) -> None:
    finding = looked_at(flow)

    assert (finding.would, finding.code) == (Would.BE_HELD, code)
    assert (finding.reason or "").startswith(says), finding.reason


def test_an_execution_whose_version_is_not_here_would_wait() -> None:
    assert looked_at(None) == Finding(row(), Would.WAIT, "no-version", "no module here has trip@1")


def test_one_that_is_stopped_would_go_on_under_code_that_agrees_and_stays_held_under_other() -> None:
    held = Fact(5, "held", "", {"code": "program-fault", "reason": "a bug"}, NOW)

    assert looked_at(trip, held).would == Would.RECOVER
    assert looked_at(broken, held).would == Would.STAY_HELD


def test_a_fact_that_cannot_be_read_is_told() -> None:
    finding = looked_at(trip, Fact(5, UNREADABLE, "", {"why": "ended: expected an object"}, NOW))

    assert finding.reason == "the journal cannot be read at position 5: ended: expected an object"


def test_looking_runs_no_step() -> None:
    ran: list[str] = []

    async def note(city: str) -> None:
        ran.append(city)

    @workflow(name="trip", version="1")
    async def local(ctx: Context, city: str) -> None:
        await ctx.step(note, city)

    test = FlowTester(local, "Rome")

    assert replays.found(row(), local, test.journal, now=NOW).would == Would.GO_ON
    assert ran == []


async def test_all_that_is_open_is_looked_at_and_nothing_is_written(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=Flows([trip])) as moments:
        await moments.until("worker started")
        waits = [(await client.start(trip, city)).execution_id for city in ("Rome", "Oslo")]
        for execution in waits:

            async def booking(execution: UUID = execution) -> bool:
                return await message_at(conn, execution, "book") is not None

            await until(booking, what="a command")
    other = (await client.start(two, "Bern")).execution_id
    before = await everything(conn)
    told: list[tuple[str, Would]] = []
    progress: list[tuple[int, int]] = []

    counted = await replays.check(
        conn,
        Flows([inserted]),
        tenant=1,
        progress=lambda done, of: progress.append((done, of)),
        said=lambda one: told.append((one.execution.execution_id, one.would)),
    )

    assert sorted(told) == sorted(
        [*((str(execution), Would.BE_HELD) for execution in waits), (str(other), Would.WAIT)]
    )
    assert counted == {Would.BE_HELD: 2, Would.WAIT: 1}
    assert progress == [(3, 3)]
    assert await everything(conn) == before


async def test_executions_of_all_versions_are_looked_at_under_one(client: Client, conn: Connection) -> None:
    await client.start(trip, "Rome")
    await client.start(two, "Bern")

    counted = await replays.check(
        conn, Flows([two]), tenant=1, under=two, progress=lambda _done, _of: None, said=lambda _: None
    )

    assert counted == {Would.GO_ON: 2}


@workflow(name="trip", version="2")
async def two(ctx: Context, city: str) -> str:
    return city


async def everything(conn: Connection) -> list[Any]:
    cursor = await conn.execute(
        "select e::text from waypost.execution e union all select j::text from waypost.journal j order by 1"
    )
    return await cursor.fetchall()
