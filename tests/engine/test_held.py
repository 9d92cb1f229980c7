"""What is held says why, whatever made it so; then a person can decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from orchestrator import Context, Refused, Retry, local, workflow
from orchestrator.cli.operations import described
from orchestrator.client import Client, ExecutionView, Started
from orchestrator.core.machine import Machine
from orchestrator.flows import Flows
from orchestrator.standing import Standing
from orchestrator.store import commits, executions
from orchestrator.store.database import Connection
from tests.engine.conftest import Working
from tests.engine.flows import CALLS, declines, double, triple, undo_double
from tests.engine.test_trouble import dead_worker, expire, turn_of
from tests.engine.test_worker import kinds
from tests.invariants import broken
from tests.waiting import until


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    yield


@workflow(name="lost", version="1")
async def lost(ctx: Context, n: int) -> int:
    return await ctx.step(triple, n, retry=Retry(attempts=1), unknown="hold")


def undo_fails(n: int) -> None:
    raise Refused("closed", f"{n} stays")


@workflow(name="stays", version="1")
async def stays(ctx: Context, n: int) -> None:
    await ctx.step(double, n, undo=local(undo_double, n))
    await ctx.step(triple, n, undo=local(undo_fails, n))
    await ctx.step(declines, "sold-out")


async def die_running(conn: Connection, flow: str) -> None:
    """A worker commits what the flow asks for first, begins it, and dies."""
    me = await dead_worker(conn, f"{flow}@1")
    [claim] = await executions.claim(conn, me=me, definitions=[(flow, "1")], limit=10)
    [journal] = (await executions.journals(conn, [(1, claim.execution)])).values()
    machine = Machine(lost.program)
    machine.replay(journal)
    machine.evict()
    turn = turn_of(claim, facts=machine.take_new(), release=False)
    assert claim.execution in await commits.commit(conn, [turn], me=me)
    await expire(conn, me)


async def test_a_step_that_is_held_because_its_worker_died_says_so_and_can_be_resolved(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await client.start(lost, 1)
    await die_running(conn, "lost")

    async with working(flows=Flows([lost])):
        held = await client.wait(started.execution_id, seconds=30)
        assert held.held is not None
        assert (held.held.code, held.held.path) == ("unknown-outcome", "triple")
        await client.resolve(started.execution_id, "triple", "done", by="ann", reason="seen", value=3)

        async def over() -> bool:
            return (await client.show(started.execution_id)).row.status == "completed"

        await until(over, what="its end")
        view = await client.show(started.execution_id)

    assert (view.row.status, view.output, CALLS) == ("completed", 3, [])
    assert kinds(view) == [
        "started", "asked triple", "orphaned", "ended triple", "held triple", "resolved triple", "finished",
    ]  # fmt: skip
    assert await broken(conn) == []


async def test_what_a_person_left_standing_is_shown_from_then_on_with_name_and_reason(
    working: Working, client: Client
) -> None:
    started = await client.start(stays, 1)

    async with working(flows=Flows([stays])):
        held = await client.wait(started.execution_id, seconds=30)
        await client.resolve(
            started.execution_id, "triple/undo", "retry", by="bob", reason="it may be open now"
        )
        again = await seen(
            client, started, lambda it: it.held is not None and it.held.path == "triple/undo#2"
        )
        await client.resolve(started.execution_id, "triple/undo#2", "skip", by="ann", reason="it is paid")
        view = await seen(client, started, lambda it: it.row.finished_at is not None)

    assert (held.stands, again.stands) == ([], [])
    assert (view.row.status, view.stands) == ("failed", [Standing("triple", "ann", "it is paid")])
    assert "still standing: triple (left by ann: it is paid)" in "\n".join(
        described(view, [], is_served=True)
    )
    before_the_end = replace(view, facts=view.facts[:-1])
    assert before_the_end.stands == view.stands


async def seen(client: Client, started: Started, condition: Callable[[ExecutionView], bool]) -> ExecutionView:
    """The execution once `condition` holds."""

    async def holds() -> bool:
        return condition(await client.show(started.execution_id))

    await until(holds, what="what is waited for")
    return await client.show(started.execution_id)
