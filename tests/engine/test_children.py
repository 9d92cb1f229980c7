"""Flows that run other flows, on a real database: begun with their parent's commit, and told of with their end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final
from uuid import UUID

import pytest

from contracts import trace
from contracts.identifiers import child_id, keyed_id
from orchestrator import (
    ChildFailed,
    Context,
    Event,
    OutcomeUnknown,
    Refused,
    StepRefused,
    local,
    seconds,
    workflow,
)
from orchestrator.cli.operations import described
from orchestrator.client import Client, ExecutionView
from orchestrator.explanation import Code
from orchestrator.flows import Flows
from orchestrator.store import definitions, kin
from orchestrator.store.database import Connection
from orchestrator.store.definitions import Definition
from orchestrator.store.situation import situation
from orchestrator.telemetry.tree import Traced, in_order, traced
from tests.engine.conftest import Working
from tests.engine.test_events import came
from tests.engine.test_why import until_told
from tests.engine.test_worker import kinds
from tests.invariants import broken
from tests.waiting import until

Json = Any
DONE: list[str] = []
"""What the flows' steps did, in order."""

REASON: Final[dict[str, Any]] = {"by": "ann", "reason": "enough"}


class Go(Event, type="test.go", key="name"):
    name: str


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    DONE.clear()
    yield


def does(what: str) -> str:
    DONE.append(what)
    return what


def undoes(what: str) -> None:
    DONE.append(f"un{what}")


def refuses(code: str) -> None:
    raise Refused(code)


@workflow(name="packs", version="1")
async def packs(ctx: Context, order: str) -> str:
    """What "fails" fails, what "waits" waits for an event."""
    await ctx.step(does, f"pack {order}", undo=local(undoes, f"pack {order}"))
    if order == "fails":
        await ctx.step(refuses, "no-box")
    if order.startswith("waits"):
        await ctx.event(Go, key=order)
    return f"box {order}"


@workflow(name="sells", version="1")
async def sells(ctx: Context, order: str) -> str:
    await ctx.step(does, "pay", undo=local(undoes, "pay"))
    try:
        box = await ctx.child(packs, order, undo=local(undoes, "box"))
    except ChildFailed as error:
        return f"{error.status} {error.code} {error.error.get('type')}"
    if order == "lost":
        raise ValueError("lost")
    return box


@workflow(name="brief", version="1", deadline=seconds(0.3))
async def brief(ctx: Context, order: str) -> str:
    return await packs.run(ctx, order)


@workflow(name="patient", version="1")
async def patient(ctx: Context, order: str) -> str:
    try:
        return await ctx.child(brief, order)
    except ChildFailed as error:
        return f"{error.status} {error.code} {error.error.get('type')}"


@workflow(name="keyed", version="1")
async def keyed(ctx: Context, key: str) -> str:
    try:
        return await ctx.child(packs, "waits", key=key)
    except StepRefused as error:
        return error.code


@workflow(name="races", version="1")
async def races(ctx: Context, order: str) -> str:
    async def other() -> str:
        return (await ctx.event(Go, key="other")).name

    return await ctx.first(ctx.child(packs, order), other())


@workflow(name="hurries", version="1")
async def hurries(ctx: Context, order: str) -> str:
    try:
        return await ctx.child(packs, order, timeout=seconds(0.2))
    except OutcomeUnknown as error:
        return error.code


@workflow(name="starts", version="1")
async def starts(ctx: Context, key: str) -> list[str]:
    one = ctx.start(packs, "a")
    two = ctx.start(packs, "b", key=key)
    same = ctx.start(packs, "c", key=key)
    return [str(handle.execution_id) for handle in (one, two, same)]


@workflow(name="nests", version="1")
async def nests(ctx: Context, depth: int) -> int:
    return 1 + (await ctx.child(nests, depth - 1) if depth else 0)


@workflow(name="again", version="1")
async def again(ctx: Context, n: int) -> str:
    if n:
        ctx.continue_as_new(n - 1)
    return await ctx.child(packs, "a")


@workflow(name="nowhere", version="1")
async def nowhere(_: Context, n: int) -> int:
    return n


@workflow(name="looks", version="1")
async def looks(ctx: Context, how: str) -> str:
    if how == "start":
        ctx.start(nowhere, 1)
    try:
        await ctx.child(nowhere, 1)
    except StepRefused as error:
        return error.code
    return ""


FAMILY: Final = Flows([packs, sells, brief, patient, keyed, races, hurries, starts, nests, again, looks])


async def gone(client: Client, flow: Any, given: Json, *, seconds: float = 20) -> ExecutionView:
    started = await client.start(flow, given)
    return await client.wait(started.execution_id, seconds=seconds)


def last(view: ExecutionView) -> dict[str, Json]:
    return json.loads(view.facts[-1].payload or "{}")


async def payload(conn: Connection, execution: UUID) -> dict[str, Json]:
    cursor = await conn.execute(
        "select payload from waypost.journal where execution_id = %s and position = 1", (execution,)
    )
    row = await cursor.fetchone()
    assert row is not None
    return row[0]


async def until_waits(conn: Connection, child: UUID) -> None:
    """Until `child` has been begun, and waits for its event."""

    async def begun() -> bool:
        return await situation(conn, str(child), tenant=1) is not None

    await until(begun, what="the child")
    await until_told(conn, child, Code.AWAITING_EVENT)


# ---- its life ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgetful", [False, True])
async def test_a_child_is_an_execution_of_its_own_whose_end_moves_its_parent(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(flows=FAMILY, forgetful=forgetful):
        view = await gone(client, sells, "A")

    parent = UUID(view.row.execution_id)
    child = await client.show(child_id(parent, 0, "packs"))
    assert (view.output, child.output) == ("box A", "box A")
    assert kinds(view) == ["started", "asked does", "ended does", "asked packs", "ended packs", "finished"]
    assert view.facts[-2].actor == f"child:{child.row.execution_id}"
    assert DONE == ["pay", "pack A"]
    said = await payload(conn, UUID(child.row.execution_id))
    assert (said["parent"]["execution"], said["parent"]["epoch"], said["parent"]["path"]) == (
        str(parent),
        0,
        "packs",
    )
    assert (said["root"], said["depth"], said["version"]) == (str(parent), 1, "1")
    row = await conn.execute(
        "select parent::text, parent_path, root::text from waypost.execution where parent is not null"
    )
    assert await row.fetchall() == [(str(parent), "packs", str(parent))]
    assert await broken(conn, at_rest=True) == []


async def test_a_child_goes_on_in_the_trace_of_its_parent(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        view = await gone(client, sells, "A")

    parent = UUID(view.row.execution_id)
    ours = trace.parse((await payload(conn, parent))["traceparent"])
    theirs = trace.parse((await payload(conn, child_id(parent, 0, "packs")))["traceparent"])
    assert ours is not None
    assert theirs is not None
    assert ours.trace_id == theirs.trace_id
    assert ours.span_id != theirs.span_id


async def test_the_trace_of_a_flow_has_those_of_its_children_under_its_waits(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        view = await gone(client, nests, 2)

    found: Traced | None = None
    for one in (
        view.row.execution_id,
        *await kin.descendants(conn, view.row.execution_id, tenant=1, limit=10),
    ):
        it = await situation(conn, one, tenant=1)
        assert it is not None
        own = traced(it, [], [], gap=None)
        found = own if found is None else found.with_child(own)
    assert found is not None
    assert [(depth, span.name) for depth, span in in_order(found.spans) if "end" not in span.name] == [
        (0, "start nests"),
        (1, "child nests"),
        (2, "start nests"),
        (3, "child nests"),
        (4, "start nests"),
    ]


async def test_what_people_are_shown_names_parent_and_children(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        view = await gone(client, sells, "A")
        child = await client.show(child_id(view.row.execution_id, 0, "packs"))

    shown = "\n".join(described(view, [], is_served=True))
    assert f"{child.row.execution_id}  packs  packs@1" in shown
    assert f"child of {view.row.execution_id} at packs" in "\n".join(described(child, [], is_served=True))


async def test_a_failed_child_undoes_itself_and_its_parent_learns_how_it_ended(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        view = await gone(client, sells, "fails")

    assert view.output == "compensated no-box StepRefused"
    assert DONE == ["pay", "pack fails", "unpack fails"]
    assert await broken(conn, at_rest=True) == []


async def test_a_completed_child_is_undone_by_its_parent_and_not_by_itself(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        view = await gone(client, sells, "lost")

    assert view.row.status == "compensated"
    assert DONE == ["pay", "pack lost", "unbox", "unpay"]
    assert await broken(conn, at_rest=True) == []


async def test_children_have_children(working: Working, client: Client, conn: Connection) -> None:
    async with working(flows=FAMILY):
        view = await gone(client, nests, 3)

    assert view.output == 4
    cursor = await conn.execute(
        "select count(*), count(distinct root) from waypost.execution where parent is not null"
    )
    assert await cursor.fetchall() == [(3, 1)]


async def test_a_child_of_a_flow_that_went_on_as_new_finds_its_parent(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        started = await client.start(again, 2)
        view = await client.wait(started.execution_id, seconds=20)

    assert view.output == "box a"
    said = await payload(conn, child_id(started.execution_id, 2, "packs"))
    assert said["parent"]["epoch"] == 2


async def test_a_child_gets_its_version_by_shares(working: Working, client: Client, conn: Connection) -> None:
    await definitions.publish(conn, [Definition("packs", "2")])
    await conn.execute(
        "insert into waypost.share (tenant_id, definition, version, percent) values (1, 'packs', '2', 100)"
    )
    async with working(flows=FAMILY):
        started = await client.start(sells, "A")
        await until_told(conn, started.execution_id, Code.AWAITING_CHILD)
        child = await client.show(child_id(started.execution_id, 0, "packs"))

        assert child.row.version == "2"
        await client.terminate(started.execution_id, **REASON)
        await client.terminate(child.row.execution_id, **REASON)


# ---- who is told what ----------------------------------------------------------------------------------------------


async def test_a_cancelled_parent_waits_for_its_child_to_undo_itself(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        started = (await client.start(sells, "waits")).execution_id
        await until_waits(conn, child_id(started, 0, "packs"))
        await client.cancel(started, **REASON)
        view = await client.wait(started, seconds=20)

    child = await client.show(child_id(started, 0, "packs"))
    assert (view.row.status, child.row.status) == ("cancelled", "cancelled")
    assert DONE == ["pay", "pack waits", "unpack waits", "unpay"]
    assert last(child)["reason"] == "its parent waits for it no more"
    assert await broken(conn, at_rest=True) == []


async def test_the_loser_of_a_race_is_told_to_end(working: Working, client: Client, conn: Connection) -> None:
    async with working(flows=FAMILY):
        started = (await client.start(races, "waits")).execution_id
        child = child_id(started, 0, "first.0/packs")
        await until_waits(conn, child)
        await came(conn, "test.go", "other", {"name": "other"})
        view = await client.wait(started, seconds=20)

    assert view.output == "other"
    assert (await client.show(child)).row.status == "cancelled"
    assert DONE == ["pack waits", "unpack waits"]
    assert await broken(conn, at_rest=True) == []


async def test_a_child_whose_time_is_over_is_told_to_end(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        view = await gone(client, hurries, "waits")
        child = await client.wait(child_id(view.row.execution_id, 0, "packs"), seconds=20)

    assert view.output == "timeout"
    assert child.row.status == "cancelled"
    assert last(child)["reason"] == "its parent gave it no more time"
    assert await broken(conn, at_rest=True) == []


async def test_a_terminated_child_tells_its_parent(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        started = (await client.start(sells, "waits")).execution_id
        child = child_id(started, 0, "packs")
        await until_waits(conn, child)
        await client.terminate(child, **REASON)
        view = await client.wait(started, seconds=20)

    assert view.output == "terminated terminated Terminated"
    assert await broken(conn, at_rest=True) == []


async def test_a_terminated_parent_asks_its_children_to_end(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        started = (await client.start(sells, "waits")).execution_id
        child = child_id(started, 0, "packs")
        await until_waits(conn, child)

        assert await client.terminate(started, **REASON) == ["does", "packs"]
        view = await client.wait(child, seconds=20)

    assert view.row.status == "cancelled"
    assert last(view)["reason"] == "its parent was terminated"
    assert DONE == ["pay", "pack waits", "unpack waits"]


async def test_a_child_that_runs_past_its_deadline_tells_its_parent(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        view = await gone(client, patient, "waits")

    assert view.output == "compensated deadline Overdue"
    assert DONE == ["pack waits", "unpack waits"]
    assert await broken(conn, at_rest=True) == []


# ---- keys, and flows that nobody knows -----------------------------------------------------------------------------


async def test_a_child_whose_key_is_taken_is_refused(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        await client.start(packs, "x", key="K")
        view = await gone(client, keyed, "K")

    assert view.output == "key-taken"
    cursor = await conn.execute("select count(*) from waypost.execution where definition = 'packs'")
    assert await cursor.fetchone() == (1,)
    assert await broken(conn, at_rest=True) == []


async def test_a_child_of_a_flow_that_nobody_knows_is_refused(working: Working, client: Client) -> None:
    async with working(flows=FAMILY):
        view = await gone(client, looks, "child")

    assert view.output == "unknown-flow"


async def test_a_start_of_a_flow_that_nobody_knows_holds(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        view = await gone(client, looks, "start")

        assert view.held is not None
        assert view.held.code == "unstorable"
        assert "no flow is called 'nowhere'" in view.held.reason
        await definitions.publish(conn, [Definition("nowhere", "1")])
        await client.resume(view.row.execution_id, **REASON)
        await until_told(conn, UUID(view.row.execution_id), Code.AWAITING_CHILD)
        await client.terminate(view.row.execution_id, **REASON)


async def test_what_is_started_is_begun_once_for_each_key_and_nobody_waits_for_it(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        one, two = await gone(client, starts, "K"), await gone(client, starts, "K")
        alone = [await client.wait(UUID(id_), seconds=20) for id_ in (*one.output[:2], two.output[0])]

    parent = one.row.execution_id
    assert one.output == [
        str(child_id(parent, 0, "packs")),
        str(keyed_id("packs", "K")),
        str(keyed_id("packs", "K")),
    ]
    assert two.output[1] == one.output[1]
    assert [view.output for view in alone] == ["box a", "box b", "box a"]
    cursor = await conn.execute(
        "select count(*), count(parent) from waypost.execution where definition = 'packs'"
    )
    assert await cursor.fetchone() == (3, 0)
    said = await payload(conn, UUID(one.output[0]))
    assert said["starter"]["execution"] == parent
    assert await broken(conn, at_rest=True) == []


async def test_a_key_that_somebody_else_has_starts_nothing(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FAMILY):
        await client.start(packs, "x", key="K")
        view = await gone(client, starts, "K")

    assert view.row.status == "completed"
    cursor = await conn.execute("select count(*) from waypost.execution where business_key = 'K'")
    assert await cursor.fetchone() == (1,)
