"""Flows that run other flows: as children that they wait for, and on their own."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from contracts.identifiers import child_id, keyed_id, uuid8
from contracts.limits import CHILD_DEPTH_MAX, CHILDREN_MAX, STARTS_MAX
from orchestrator import (
    Cancelled,
    ChildFailed,
    Command,
    Context,
    Handle,
    OutcomeUnknown,
    ReplyInvalid,
    StepRefused,
    UsageError,
    hours,
    minutes,
    workflow,
)
from orchestrator.core.errors import LimitExceeded, error_in
from orchestrator.core.follows import LeftChild
from orchestrator.core.machine import Machine
from orchestrator.core.waiting import open_in
from orchestrator.testing import EXECUTION, NOON, FlowTester
from orchestrator.workflow import Workflow

Json = Any


class Parcel(BaseModel):
    order: str
    weight: int = 1


class Label(BaseModel):
    tracking: str


class Reserve(Command[str], endpoint="stock", type="stock.reserve"):
    order: str


class Release(Command[None], endpoint="stock", type="stock.release"):
    order: str


class Return(Command[None], endpoint="carrier", type="parcel.return"):
    tracking: str


@workflow(name="ship", version="1")
async def ship(_: Context, parcel: Parcel) -> Label:
    return Label(tracking=parcel.order)


def returned(label: Label | None) -> Return | None:
    return None if label is None else Return(tracking=label.tracking)


@workflow(name="order", version="1")
async def order(ctx: Context, order: str) -> str:
    await ctx.call(Reserve(order=order), undo=Release(order=order))
    label = await ctx.child(ship, Parcel(order=order), key=order, undo=returned)
    await ctx.sleep(hours(1))
    if order == "lost":
        raise ValueError("lost")
    return label.tracking


@workflow(name="hurried", version="1")
async def hurried(ctx: Context, order: str) -> str:
    await ctx.call(Reserve(order=order), undo=Release(order=order))
    label = await ctx.child(ship, Parcel(order=order), timeout=minutes(5))
    return label.tracking


@workflow(name="starter", version="1")
async def starter(ctx: Context, n: int) -> list[str]:
    handles = [ctx.start(ship, Parcel(order=str(i)), key="A" if i == 0 else None) for i in range(n)]
    return [str(one.execution_id) for one in handles]


def shipping(order_id: str = "A") -> FlowTester[str, str]:
    flow = FlowTester(order, order_id)
    flow.expect(Reserve).replies("r")
    return flow


def left(machine: Machine) -> list[tuple[str, str]]:
    return [(one.path, one.execution) for one in machine.follows.of(LeftChild)]


# ---- a child and its ends ------------------------------------------------------------------------------------------


def test_a_child_gets_its_input_and_returns_what_its_flow_does() -> None:
    flow = shipping()
    child = flow.expect(ship)

    assert child.data == {"order": "A", "weight": 1}
    child.replies(Label(tracking="T"))
    flow.passes(hours(1))
    assert flow.returned == "T"


def test_the_id_of_a_child_is_made_of_its_parent_and_of_where_it_stands() -> None:
    flow = shipping()

    assert flow.expect(ship).ask.args == {
        "flow": "ship",
        "data": {"order": "A", "weight": 1},
        "key": "A",
        "execution": str(child_id(EXECUTION, 0, "ship")),
    }


@pytest.mark.parametrize("status", ["failed", "compensated", "cancelled", "terminated"])
def test_a_child_that_ended_otherwise_than_well_says_how(status: str) -> None:
    flow = shipping()
    flow.expect(ship).ends(status, "no-van", "all are out")
    flow.expect(Release).replies()

    assert flow.status == "compensated"
    assert flow.error == {
        "class": "permanent",
        "type": "ChildFailed",
        "code": "no-van",
        "detail": "all are out",
        "path": "ship",
        "status": status,
    }


def test_a_failed_child_carries_its_own_error() -> None:
    caught: list[ChildFailed] = []

    @workflow(name="catches", version="1")
    async def catches(ctx: Context, _: int) -> None:
        try:
            await ctx.child(ship, Parcel(order="A"))
        except ChildFailed as error:
            caught.append(error)

    flow = FlowTester(catches, 1)
    error = {
        "status": "failed",
        "code": "no-van",
        "detail": "",
        "error": {"class": "permanent", "code": "no-van"},
    }
    flow.tell("ended", "ship", {"outcome": "child_failed", "error": error})

    assert (caught[0].status, caught[0].error["class"], caught[0].may_have_acted) == (
        "failed",
        "permanent",
        False,
    )
    assert str(caught[0]) == "ship at ship: failed: no-van"


def test_a_completed_child_is_undone_by_its_parent_before_what_came_earlier() -> None:
    flow = shipping("lost")
    flow.expect(ship).replies(Label(tracking="T"))
    flow.passes(hours(1))

    assert flow.open == ["ship/undo"]
    flow.expect(Return(tracking="T")).replies()
    flow.expect(Release).replies()
    assert flow.status == "compensated"


def test_a_failed_child_is_not_undone_by_its_parent() -> None:
    flow = shipping()
    flow.expect(ship).ends("failed")

    assert flow.open == ["reserve/undo"]


def test_a_completed_child_without_undo_stands() -> None:
    @workflow(name="stands", version="1")
    async def stands(ctx: Context, order: str) -> None:
        await ctx.call(Reserve(order=order), undo=Release(order=order))
        await ctx.child(ship, Parcel(order=order))
        raise ValueError

    flow = FlowTester(stands, "A")
    flow.expect(Reserve).replies("r")
    flow.expect(ship).replies(Label(tracking="T"))
    flow.expect(Release).replies()

    assert flow.status == "compensated"
    assert "stands" not in flow.journal[-1].data


def test_a_child_that_returns_what_its_flow_does_not_promise_is_done_and_undone_as_unknown() -> None:
    flow = shipping()
    with pytest.raises(AssertionError):
        flow.expect(ship).fails()
    flow.tell("ended", "ship", {"outcome": "done", "value": {"label": 1}})

    assert flow.machine.held is not None
    assert flow.machine.held.code == "undo-unknown"


def test_a_reply_that_does_not_fit_names_the_place() -> None:
    @workflow(name="reads", version="1")
    async def reads(ctx: Context, _: int) -> str:
        try:
            await ctx.child(ship, Parcel(order="A"))
        except ReplyInvalid as error:
            return error.detail
        return ""

    flow = FlowTester(reads, 1)
    flow.tell("ended", "ship", {"outcome": "done", "value": {}})

    assert flow.returned == "at /tracking: Field required"


def test_a_child_whose_key_is_taken_is_refused() -> None:
    flow = shipping()
    flow.expect(ship).refuses("key-taken")
    flow.expect(Release).replies()

    assert (flow.status, flow.error["type"], flow.error["code"]) == (
        "compensated",
        "StepRefused",
        "key-taken",
    )


# ---- told to end ---------------------------------------------------------------------------------------------------


def test_a_cancelled_flow_tells_its_child_to_end_and_undoes_nothing_before_it_has() -> None:
    flow = shipping()
    child = flow.expect(ship)
    flow.cancels()

    assert flow.open == ["ship"]
    assert child.is_told_to_end
    child.ends("cancelled")
    assert flow.open == ["reserve/undo"]
    flow.expect(Release).replies()
    assert flow.status == "cancelled"


def test_a_child_that_completes_although_it_was_told_to_end_is_undone() -> None:
    flow = shipping()
    flow.cancels()
    flow.expect(ship).replies(Label(tracking="T"))

    assert flow.open == ["ship/undo"]
    flow.expect(Return(tracking="T")).replies()
    flow.expect(Release).replies()
    assert flow.status == "cancelled"


def test_a_second_cancel_tells_a_child_nothing() -> None:
    flow = shipping()
    flow.cancels()
    flow.machine.follows.clear()
    flow.cancels()

    assert left(flow.machine) == []
    assert flow.open == ["ship"]


def test_who_is_to_be_told_follows_from_the_fact_that_it_was_withdrawn() -> None:
    flow = shipping()
    flow.machine.follows.clear()
    flow.cancels()

    position = next(fact.position for fact in flow.journal if fact.kind == "withdrawn")
    assert [(one.path, one.execution, one.position) for one in flow.machine.follows.of(LeftChild)] == [
        ("ship", str(child_id(EXECUTION, 0, "ship")), position)
    ]


def test_a_losing_child_has_ended_before_first_returns() -> None:
    @workflow(name="races", version="1")
    async def races(ctx: Context, order: str) -> str:
        label = await ctx.first(
            ctx.child(ship, Parcel(order=order), undo=returned), ctx.call(Reserve(order=order))
        )
        return str(label)

    flow = FlowTester(races, "A")
    flow.expect(Reserve).replies("r")

    assert flow.open == ["first.0/ship"]
    flow.expect(ship).ends("cancelled")
    assert flow.returned == "r"


def test_a_losing_child_that_completed_is_undone_before_within_is_over() -> None:
    @workflow(name="bounded", version="1")
    async def bounded(ctx: Context, order: str) -> str:
        label = await ctx.within(minutes(1), ctx.child(ship, Parcel(order=order), undo=returned))
        return label.tracking

    flow = FlowTester(bounded, "A")
    flow.passes(minutes(1))
    assert flow.open == ["within.0/ship"]
    flow.expect(ship).replies(Label(tracking="T"))
    flow.expect(Return(tracking="T")).replies()

    assert (flow.status, flow.error["type"]) == ("compensated", "TimedOut")


def test_the_finally_of_a_cancelled_flow_runs_when_its_child_has_ended() -> None:
    seen: list[str] = []

    @workflow(name="cleans", version="1")
    async def cleans(ctx: Context, order: str) -> None:
        try:
            await ctx.child(ship, Parcel(order=order))
        except Cancelled as error:
            seen.append(str(error))
            raise

    flow = FlowTester(cleans, "A")
    flow.cancels(reason="wrong")
    assert seen == []
    flow.expect(ship).ends("cancelled")

    assert set(seen) == {"wrong"}
    assert flow.status == "cancelled"


def test_the_journal_says_of_a_child_that_was_told_to_end_that_it_is_waited_for() -> None:
    flow = shipping()
    flow.cancels()

    [ask] = open_in(flow.journal).asks
    assert (ask.path, ask.kind, ask.withdrawn, ask.due) == ("ship", "child", True, None)


# ---- the time of a child -------------------------------------------------------------------------------------------


def test_a_child_without_answer_in_time_is_unknown_and_told_to_end() -> None:
    flow = FlowTester(hurried, "A")
    flow.expect(Reserve).replies("r")
    flow.passes(minutes(5))

    assert left(flow.machine) == [("ship", str(child_id(EXECUTION, 0, "ship")))]
    assert flow.open == []
    assert flow.status == "open"


def test_nothing_is_undone_before_a_child_has_ended_whose_time_was_over() -> None:
    flow = FlowTester(hurried, "A")
    flow.expect(Reserve).replies("r")
    flow.passes(minutes(5))
    assert flow.told == ["reserve", "ship"]
    flow.late("ship", "child_failed", {"status": "cancelled", "code": "cancelled"})

    assert flow.open == ["reserve/undo"]
    flow.expect(Release).replies()
    assert (flow.status, flow.error["type"]) == ("compensated", "OutcomeUnknown")


def test_a_child_whose_time_was_over_and_that_completed_is_undone_by_what_it_returned() -> None:
    @workflow(name="timed", version="1")
    async def timed(ctx: Context, order: str) -> None:
        await ctx.child(ship, Parcel(order=order), undo=returned, timeout=minutes(5))

    flow = FlowTester(timed, "A")
    flow.passes(minutes(5))
    flow.late("ship", "done", Label(tracking="T"))
    flow.expect(Return(tracking="T")).replies()

    assert flow.status == "compensated"


def test_a_flow_may_go_on_although_a_childs_time_was_over() -> None:
    @workflow(name="goes_on", version="1")
    async def goes_on(ctx: Context, order: str) -> str:
        try:
            await ctx.child(ship, Parcel(order=order), timeout=minutes(5))
        except OutcomeUnknown as error:
            return error.code
        return ""

    flow = FlowTester(goes_on, "A")
    flow.passes(minutes(5))

    assert flow.returned == "timeout"


def test_what_a_child_tells_in_time_counts_more_than_its_timeout() -> None:
    flow = FlowTester(hurried, "A")
    flow.expect(Reserve).replies("r")
    flow.passes(minutes(4))
    flow.expect(ship).replies(Label(tracking="T"))

    assert flow.returned == "T"


# ---- what cannot be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ({"weight": "x"}, None, "ctx.child ship: input of flow 'ship': at /order"),
        (Parcel(order="A"), "a\nb", "ctx.child ship: key"),
        (Parcel(order="A"), "", "ctx.child ship: key"),
    ],
)
def test_what_a_child_cannot_be_given_is_refused_before_anything_is_written(
    given: Any, key: Any, words: str
) -> None:
    @workflow(name="wrong", version="1")
    async def wrong(ctx: Context, _: int) -> None:
        await ctx.child(ship, given, key=key)

    flow = FlowTester(wrong, 1)

    assert flow.told == []
    assert flow.error["type"] == "UsageError"
    assert words in flow.error["detail"]


def test_what_is_no_flow_cannot_be_a_child() -> None:
    @workflow(name="wrong", version="1")
    async def wrong(ctx: Context, _: int) -> None:
        ctx.start(shipping, Parcel(order="A"))  # pyright: ignore[reportArgumentType]  # on purpose

    assert "expected a flow, made by @workflow" in FlowTester(wrong, 1).error["detail"]


def test_children_inside_each_other_are_bounded() -> None:
    def at(depth: int) -> Machine:
        machine = Machine(order.program, execution=EXECUTION)
        machine.tell("started", "", {"input": "A", "seed": "s", "depth": depth}, NOON)
        machine.tell("ended", "reserve", {"outcome": "done", "value": "r"}, NOON)
        return machine

    deep, deeper = at(CHILD_DEPTH_MAX - 1), at(CHILD_DEPTH_MAX)

    assert list(deep.open) == ["ship"]
    assert list(deeper.open) == ["reserve/undo"]
    refused = next(fact for fact in deeper.new if fact.kind == "ended" and fact.path == "ship")
    assert error_in(refused.data)["code"] == "too-deep"
    replayed = Machine(order.program, execution=EXECUTION)
    replayed.replay(deeper.new)
    assert list(replayed.open) == ["reserve/undo"]
    for machine in (deep, deeper, replayed):
        machine.evict()


def test_one_child_too_many_at_once_is_refused() -> None:
    refused: list[str] = []

    async def one(ctx: Context, n: int) -> None:
        try:
            await ctx.child(ship, Parcel(order=str(n)))
        except StepRefused as error:
            refused.append(error.code)

    @workflow(name="many", version="1")
    async def many(ctx: Context, n: int) -> None:
        await ctx.all(
            ctx.child(ship, Parcel(order="x")), ctx.map(range(n), lambda i: one(ctx, i), concurrency=1000)
        )

    machine = Machine(many.program, execution=EXECUTION)
    machine.tell("started", "", {"input": CHILDREN_MAX, "seed": "s"}, NOON)

    assert refused == ["too-many"]
    assert len(machine.open) == CHILDREN_MAX
    machine.evict()


def test_a_child_that_was_refused_is_not_waited_for_when_its_flow_is_cancelled() -> None:
    @workflow(name="beside", version="1")
    async def beside(ctx: Context, order: str) -> None:
        async def fails() -> None:
            raise ValueError

        await ctx.all(ctx.child(ship, Parcel(order="x" * 300_000)), fails())

    flow = FlowTester(beside, "A")

    assert (flow.status, flow.open) == ("failed", [])
    assert open_in(flow.journal).asks == []


# ---- executions of their own ---------------------------------------------------------------------------------------


def test_what_is_started_is_written_down_and_not_waited_for() -> None:
    flow = FlowTester(starter, 2)

    assert flow.begun == [
        ("ship", {"order": "0", "weight": 1}, "A"),
        ("ship", {"order": "1", "weight": 1}, None),
    ]
    assert flow.returned == [str(keyed_id("ship", "A")), str(child_id(EXECUTION, 0, "ship#2"))]


def test_a_handle_knows_flow_and_key() -> None:
    handles: list[Handle[Label]] = []

    @workflow(name="keeps", version="1")
    async def keeps(ctx: Context, _: int) -> None:
        handles.append(ctx.start(ship, Parcel(order="A"), key="K"))

    FlowTester(keeps, 1)

    assert set(handles) == {Handle(keyed_id("ship", "K"), "ship", "K")}


def test_a_recorded_handle_counts_when_the_journal_is_replayed_elsewhere() -> None:
    flow = FlowTester(starter, 2)

    again = Machine(starter.program, execution="another")
    again.replay(flow.journal)
    assert again.result == flow.returned
    again.evict()


def test_a_flow_that_starts_without_end_is_held() -> None:
    machine = Machine(starter.program, execution=EXECUTION)

    with pytest.raises(LimitExceeded, match=f"starts_max: {STARTS_MAX}"):
        machine.tell("started", "", {"input": STARTS_MAX + 1, "seed": "s"}, NOON)
    machine.evict()


def test_an_input_that_cannot_be_stored_starts_nothing() -> None:
    @workflow(name="large", version="1")
    async def large(ctx: Context, _: int) -> str:
        try:
            ctx.start(ship, Parcel(order="x" * 300_000))
        except UsageError as error:
            return str(error)
        return ""

    flow = FlowTester(large, 1)

    assert "262144" in flow.returned
    assert flow.begun == []


def test_ids_of_names_are_version_8_and_differ() -> None:
    one, other = uuid8("a"), uuid8("b")

    assert (one.version, one.variant) == (8, "specified in RFC 4122")
    assert one != other


def test_a_workflow_keeps_the_type_of_what_it_returns() -> None:
    """The type checker reads this: no cast, and no ignore."""

    @workflow(name="typed", version="1")
    async def typed(ctx: Context, order: str) -> str:
        label = await ctx.child(ship, Parcel(order=order))
        handle: Handle[Label] = ctx.start(ship, Parcel(order=order))
        return label.tracking + str(handle.execution_id)

    flow: Workflow[str, str] = typed
    assert flow.name == "typed"
