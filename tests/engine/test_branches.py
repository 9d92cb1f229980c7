"""Branches side by side, nested sagas, and cancelling, on a real database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contracts.outcome import Outcome
from orchestrator.client import Client, NotOpen
from orchestrator.store.database import Connection
from tests.engine.conftest import Working
from tests.engine.flows import CALLS, FLOWS
from tests.engine.test_events import came, left, until_it_waits
from tests.engine.test_worker import REMEMBERING, kinds, message_at, reply
from tests.waiting import until


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    yield


@REMEMBERING
async def test_all_joins_its_branches_in_the_order_written(
    working: Working, client: Client, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("joins"), 1)
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == [3, 6, 9, 12, 15]
    assert sorted(CALLS) == [("triple", n) for n in range(1, 6)]


@REMEMBERING
async def test_a_named_saga_is_undone_alone_and_what_was_done_before_stands(
    working: Working, client: Client, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("nests"), 10)
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.output) == ("completed", "there")
    undone = [fact.path for fact in view.facts if fact.kind == "asked" and fact.path.endswith("/undo")]
    ended = [
        fact.path for fact in view.facts if fact.kind == "ended" and fact.path.startswith("by-air/all")
        and not fact.path.endswith("/undo")
    ]  # fmt: skip
    assert undone == [f"{path}/undo" for path in reversed(ended)]
    assert {call for call in CALLS if call[0] == "undo_double"} == {("undo_double", 10), ("undo_double", 11)}


@REMEMBERING
async def test_a_call_that_lost_before_it_was_sent_is_withdrawn_and_needs_no_undo(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("races"), "A")
        await until_it_waits(conn, started.execution_id, "first.0/payment%2Efailed")
        await came(conn, "payment.failed", "A", {"order": "A"})
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == "Declined"
    assert [(message.path, message.state) for message in view.messages] == [("first.1/charge", "withdrawn")]
    assert kinds(view)[-3:] == ["withdrawn first.1/charge", "late first.1/charge", "finished"]


@REMEMBERING
async def test_a_call_that_lost_after_it_was_sent_is_undone_before_first_returns(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("races"), "A")
        await until_it_waits(conn, started.execution_id, "first.0/payment%2Efailed")
        await conn.execute("update waypost.outbox set state = 'delivered', reached = true, attempts = 1")
        await came(conn, "payment.failed", "A", {"order": "A"})
        done = Outcome("done", value=None)
        await reply(conn, "first.1/charge/undo", done, execution=started.execution_id)
        view = await client.wait(started.execution_id, seconds=30)

    assert view.output == "Declined"
    assert kinds(view)[-4:] == [
        "late first.1/charge", "asked first.1/charge/undo", "ended first.1/charge/undo", "finished",
    ]  # fmt: skip


@REMEMBERING
async def test_a_cancelled_flow_tidies_up_undoes_and_ends_cancelled(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("tidies"), "A")
        await until_it_waits(conn, started.execution_id, "payment%2Esucceeded")
        await client.cancel(started.execution_id, by="ann", reason="wrong address")
        view = await client.wait(started.execution_id, seconds=30)

    assert view.row.status == "cancelled"
    assert [call[0] for call in CALLS] == ["double", "triple", "undo_double"]
    asked = next(fact for fact in view.facts if fact.kind == "cancel_asked")
    assert asked.actor == "operator:ann"
    assert await left(conn) == 0


async def test_a_flow_cancelled_without_undo_leaves_what_it_did(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = await client.start(FLOWS.get("tidies"), "A")
        await until_it_waits(conn, started.execution_id, "payment%2Esucceeded")
        await client.cancel(started.execution_id, by="ann", reason="keep it", undo=False)
        view = await client.wait(started.execution_id, seconds=30)

    assert view.row.status == "cancelled"
    assert ("undo_double", 1) not in CALLS
    assert '"stands": ["double"]' in (view.facts[-1].payload or "")


async def test_a_flow_cancelled_before_its_first_turn_sends_nothing(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await client.start(FLOWS.get("pays"), "A")
    await client.cancel(started.execution_id, by="ann", reason="at once")
    async with working():
        view = await client.wait(started.execution_id, seconds=30)

    assert view.row.status == "cancelled"
    assert [message.state for message in view.messages] == ["withdrawn"]


async def test_nothing_ordinary_begins_after_a_cancel_that_came_with_the_reply(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = await client.start(FLOWS.get("pays"), "A")

        async def sent() -> bool:
            return await message_at(conn, started.execution_id, "charge") is not None

        await until(sent, what="a message at charge")
    await conn.execute("update waypost.outbox set state = 'delivered', reached = true, attempts = 1")
    await reply(conn, "charge", Outcome("done", value={"charge": "c-1"}), execution=started.execution_id)
    await client.cancel(started.execution_id, by="ann", reason="too late")
    async with working():
        await reply(conn, "charge/undo", Outcome("done"), execution=started.execution_id)
        view = await client.wait(started.execution_id, seconds=30)

    assert view.row.status == "cancelled"
    assert {message.path: message.state for message in view.messages}["create"] == "withdrawn"


async def test_what_is_at_an_end_or_stopped_cannot_be_cancelled(working: Working, client: Client) -> None:
    async with working():
        done = await client.start(FLOWS.get("three"), 1)
        await client.wait(done.execution_id, seconds=30)
        stopped = await client.start(FLOWS.get("buggy"), 1)
        await client.wait(stopped.execution_id, seconds=30)

        with pytest.raises(NotOpen, match="is completed"):
            await client.cancel(done.execution_id, by="ann", reason="why not")
        with pytest.raises(NotOpen, match="resume it, then cancel it"):
            await client.cancel(stopped.execution_id, by="ann", reason="why not")


async def test_an_order_that_is_said_again_is_the_same_order_until_something_else_holds(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        stopped = await client.start(FLOWS.get("buggy"), 1)
        await client.wait(stopped.execution_id, seconds=30)
    for reason in ("mended", "mended", "mended now"):
        await client.resume(stopped.execution_id, by="ann", reason=reason)

    cursor = await conn.execute("select data ->> 'reason' from waypost.inbox order by inbox_id")
    assert await cursor.fetchall() == [("mended",), ("mended now",)]
