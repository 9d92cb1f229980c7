"""An execution that is terminated: at once, whatever its state, and what stands is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final
from uuid import UUID, uuid4

import pytest

from contracts.errors import UnknownExecution
from contracts.outcome import Outcome
from orchestrator import Context, Event, local, workflow
from orchestrator.cli.operations import described
from orchestrator.client import Client, NotOpen, OrderInvalid, Standing
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.explanation import Code
from orchestrator.flows import Flows
from orchestrator.store.database import Connection
from tests.engine.conftest import Working
from tests.engine.flows import BUG, CALLS, FLOWS, Paid, double, undo_double, waits
from tests.engine.test_emit import subscriber
from tests.engine.test_held import lost, stays
from tests.engine.test_why import until_told, why
from tests.engine.test_worker import kinds, message_at, reply
from tests.golden.test_journals import keys_of
from tests.invariants import broken
from tests.store.world import claim_message, settle
from tests.waiting import until

LEFT: Final = {"by": "ann", "reason": "enough"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    BUG[0] = True
    yield
    BUG[0] = True


@workflow(name="hears-on", version="1")
async def hears_on(ctx: Context, order: str) -> None:
    await ctx.step(double, 1, undo=local(undo_double, 1))
    try:
        await ctx.event(Paid, key=order)
    finally:
        await ctx.step(double, 2, name="tidy")


@workflow(name="busy", version="1")
async def busy(ctx: Context, n: int) -> str:
    await ctx.step(double, n, undo=local(undo_double, n))
    return await ctx.step(waits)


class HeldUp(Event, type="order.held-up", key="order"):
    order: str


@workflow(name="tells-and-waits", version="1")
async def tells_and_waits(ctx: Context, order: str) -> None:
    ctx.emit(HeldUp(order=order))
    await ctx.event(Paid, key=order)


MORE: Final = Flows([hears_on, busy, stays, lost, tells_and_waits])


async def asked_at(conn: Connection, execution: UUID, path: str, *, number: int = 1) -> UUID:
    async def asked() -> bool:
        return await message_at(conn, execution, path, number=number) is not None

    await until(asked, what=f"the message at {path}")
    message = await message_at(conn, execution, path, number=number)
    assert message is not None
    return message


# ---- whatever its state ------------------------------------------------------------------------------------------


async def test_what_waits_for_an_event_ends_at_once_without_its_program(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=MORE):
        started = (await client.start(hears_on, "A")).execution_id
        await until_told(conn, started, Code.AWAITING_EVENT)

        assert await client.terminate(started, **LEFT) == ["double"]

    view = await client.show(started)
    assert (view.row.status, view.row.owner, view.row.wake_at, view.row.undoing) == (
        "failed",
        None,
        None,
        False,
    )
    assert kinds(view)[-1] == "terminated"
    assert [call[:2] for call in CALLS] == [("double", 1)]
    assert await broken(conn, at_rest=True) == []


async def test_what_is_held_because_its_program_is_broken_ends(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = (await client.start(FLOWS.get("buggy"), 1)).execution_id
        await until_told(conn, started, Code.PROGRAM_FAULT)

        assert await client.terminate(started, **LEFT) == ["triple"]

    assert (await client.show(started)).row.status == "failed"
    assert await broken(conn, at_rest=True) == []


async def test_what_is_paused_and_what_no_worker_has_ends(client: Client, conn: Connection) -> None:
    paused, unserved = [(await client.start(FLOWS.get("three"), n)).execution_id for n in (1, 2)]
    await conn.execute(
        "update waypost.execution set status = 'paused', wake_at = null where execution_id = %s", (paused,)
    )

    assert [await client.terminate(one, **LEFT) for one in (paused, unserved)] == [[], []]

    assert [(await client.show(one)).row.status for one in (paused, unserved)] == ["failed", "failed"]
    assert await broken(conn, at_rest=True) == []


async def test_what_a_journal_that_cannot_be_read_says_is_no_hindrance(
    client: Client, conn: Connection
) -> None:
    started = (await client.start(FLOWS.get("three"), 1)).execution_id
    await conn.execute("update waypost.journal set payload = '[1]'")

    assert await client.terminate(started, **LEFT) == []

    cursor = await conn.execute("select status from waypost.execution")
    assert await cursor.fetchall() == [("failed",)]


async def test_its_owner_is_stopped_and_the_step_that_runs_with_it(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=MORE) as moments:
        started = (await client.start(busy, 1)).execution_id

        async def step_runs() -> bool:
            return ("waits",) in CALLS

        await until(step_runs, what="the step")
        assert await client.terminate(started, **LEFT) == ["double"]
        await moments.until("execution lost", execution=str(started))

    view = await client.show(started)
    assert (view.row.status, kinds(view)[-1]) == ("failed", "terminated")
    assert await broken(conn, at_rest=True) == []


# ---- what stands -------------------------------------------------------------------------------------------------


async def test_a_command_that_has_not_left_never_will_and_does_not_stand(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = (await client.start(FLOWS.get("pays"), "A")).execution_id
        message = await asked_at(conn, started, "charge")

        assert await client.terminate(started, **LEFT) == []

    assert await claim_message(conn, message) is None
    view = await client.show(started)
    assert [(one.path, one.state) for one in view.messages] == [("charge", "withdrawn")]
    assert await broken(conn, at_rest=True) == []


@pytest.mark.parametrize(
    ("outcome", "state"),
    [("delivered", "delivered"), ("retry", "stopped")],
    ids=["arrived", "may have arrived"],
)
async def test_a_command_that_may_have_arrived_stands(
    working: Working, client: Client, conn: Connection, outcome: Any, state: str
) -> None:
    async with working():
        started = (await client.start(FLOWS.get("pays"), "A")).execution_id
        message = await asked_at(conn, started, "charge")
        token = await claim_message(conn, message)
        await settle(conn, message, token, outcome, reached=True)

        assert await client.terminate(started, **LEFT) == ["charge"]

    assert [one.state for one in (await client.show(started)).messages] == [state]
    assert await broken(conn, at_rest=True) == []


async def test_a_command_that_is_being_sent_stands_and_is_stopped(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = (await client.start(FLOWS.get("pays"), "A")).execution_id
        message = await asked_at(conn, started, "charge")
        token = await claim_message(conn, message)

        assert await client.terminate(started, **LEFT) == ["charge"]

        assert await settle(conn, message, token, "delivered", reached=True) is not None
    assert [one.state for one in (await client.show(started)).messages] == ["delivered"]
    assert await broken(conn, at_rest=True) == []


async def test_a_command_that_left_before_it_was_to_be_sent_again_stands(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = (await client.start(FLOWS.get("persists"), "A")).execution_id
        await reply(conn, "charge", Outcome("failed", code="busy"), execution=started)
        await asked_at(conn, started, "charge", number=2)

        assert await client.terminate(started, **LEFT) == ["charge"]

    assert [one.state for one in (await client.show(started)).messages] == ["delivered", "withdrawn"]
    assert await broken(conn, at_rest=True) == []


async def test_what_it_emitted_still_leaves(working: Working, client: Client, conn: Connection) -> None:
    await subscriber(conn, "audit", of="order.held-up")
    async with working(flows=MORE):
        started = (await client.start(tells_and_waits, "A")).execution_id
        await until_told(conn, started, Code.AWAITING_EVENT)

        await client.terminate(started, **LEFT)

    assert [one.state for one in (await client.show(started)).messages] == ["due"]
    assert await broken(conn) == []


async def test_what_was_refused_undone_or_resolved_does_not_stand_and_unread_mail_counts(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = (await client.start(FLOWS.get("pays"), "A")).execution_id
        await reply(conn, "charge", Outcome("done", {"charge": "c"}), execution=started)
        await reply(conn, "create", Outcome("refused", code="no"), execution=started)
        await asked_at(conn, started, "charge/undo")
    await reply(conn, "charge/undo", Outcome("done"), execution=started)

    assert await client.terminate(started, **LEFT) == []

    view = await client.show(started)
    assert (view.row.mail_unread, kinds(view)[-1]) == (1, "terminated")
    assert await broken(conn) == []


async def test_a_step_that_was_told_to_have_failed_and_an_undo_that_was_skipped_stand(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=MORE):
        started = (await client.start(stays, 1)).execution_id
        await client.wait(started, seconds=30)

    assert await client.terminate(started, **LEFT) == ["double", "triple"]
    assert (await client.show(started)).stands == [Standing("double"), Standing("triple")]


# ---- what is said of it ------------------------------------------------------------------------------------------


async def test_show_and_why_say_by_whom_why_and_what_stands(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=MORE):
        started = (await client.start(hears_on, "A")).execution_id
        await until_told(conn, started, Code.AWAITING_EVENT)
    await client.terminate(started, **LEFT)

    view, told = await client.show(started), await why(conn, started)

    shown = "\n".join(described(view, [], is_served=True))
    assert "failed: terminated: by ann: enough" in shown
    assert "still standing: double" in shown
    assert told.code == Code.FAILED
    assert told.sentence.endswith("by ann (enough); still standing: double.")
    assert view.facts[-1].actor == "operator:ann"


async def test_said_again_it_is_the_same_order_and_what_has_ended_cannot_be_terminated(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        over = (await client.start(FLOWS.get("three"), 1)).execution_id
        await client.wait(over, seconds=30)
    started = (await client.start(FLOWS.get("pays"), "A")).execution_id

    first, second = [await client.terminate(started, **LEFT) for _ in range(2)]

    assert first == second
    assert len((await client.show(started)).facts) == 2
    with pytest.raises(NotOpen, match=f"{started} is failed: there is nothing to terminate"):
        await client.terminate(started, by="bob", reason="enough")
    with pytest.raises(NotOpen, match=f"{over} is completed"):
        await client.terminate(over, **LEFT)
    with pytest.raises(UnknownExecution):
        await client.terminate(uuid4(), **LEFT)
    with pytest.raises(OrderInvalid, match="operator's reason"):
        await client.terminate(started, by="ann", reason=" ")


@pytest.mark.parametrize("traced", [True, False])
async def test_its_end_is_marked_for_a_collector_where_there_is_one(
    client: Client, conn: Connection, traced: bool
) -> None:
    started = (await client.start(FLOWS.get("three"), 1)).execution_id

    await Client(conn, traced=traced).terminate(started, **LEFT)

    cursor = await conn.execute(
        "select position, facts from waypost.span_due where execution_id = %s", (started,)
    )
    assert await cursor.fetchall() == ([(1, 1)] if traced else [])


async def test_a_journal_that_ends_so_is_replayed_to_its_end(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=MORE):
        started = (await client.start(hears_on, "A")).execution_id
        await until_told(conn, started, Code.AWAITING_EVENT)
    await client.terminate(started, **LEFT)
    view = await client.show(started)
    facts = [Fact(f.position, f.kind, f.path, json.loads(f.payload or "{}"), f.at) for f in view.facts]

    machine = Machine(hears_on.program)
    machine.replay(facts)

    assert (machine.status, list(machine.open), machine.new, machine.next_due()) == ("failed", [], [], None)


async def test_its_end_is_written_as_this_release_records_it(client: Client) -> None:
    started = (await client.start(FLOWS.get("three"), 1)).execution_id
    await client.terminate(started, **LEFT)

    last = (await client.show(started)).facts[-1]

    assert frozenset(json.loads(last.payload or "{}")) in keys_of("terminated")


async def test_many_at_once_terminate_once(client: Client, conn: Connection, pool: Any) -> None:
    started = (await client.start(FLOWS.get("three"), 1)).execution_id

    async def ends() -> list[str]:
        async with pool.connection() as mine:
            return await Client(mine).terminate(started, **LEFT)

    assert await asyncio.gather(*(ends() for _ in range(5))) == [[]] * 5
    assert kinds(await client.show(started)) == ["started", "terminated"]
