"""A deadline: a flow that is not over in its time is stopped and undone, and never counts as cancelled."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from orchestrator import Cancelled, Context, UsageError, days, hours, minutes, workflow
from orchestrator.core.errors import InputInvalid
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON, FlowTester
from tests.core.answers import UNDO, bare, done, flow_of, refused, said, undoes, undone

Json = Any


@workflow(name="hurried", version="1", deadline=hours(1))
async def hurried(ctx: Context, n: int) -> str:
    await ctx.call("s", "reserve", undo=UNDO)
    return await ctx.call("s", "ship")


@workflow(name="asks", version="1", deadline=hours(1))
async def asks(ctx: Context, n: int) -> str:
    return await ctx.call("s", "ship")


# ---- its time is over --------------------------------------------------------------------------------------------


def test_what_was_done_is_undone_and_the_end_is_compensated() -> None:
    flow = FlowTester(hurried, 1)
    done(flow, "reserve")

    flow.passes(hours(1))

    assert flow.open == ["reserve/undo"]
    done(flow, "reserve/undo")
    assert (flow.status, flow.error["code"]) == ("compensated", "deadline")
    assert flow.error["detail"] == f"its deadline was over at {(NOON + hours(1)).isoformat()}"


def test_where_nothing_was_there_to_undo_the_end_is_failed() -> None:
    flow = FlowTester(asks, 1)

    flow.passes(hours(1))

    assert (flow.status, flow.error["class"], flow.error["code"]) == ("failed", "transient", "deadline")


def test_what_an_undo_could_not_take_back_stands_and_the_end_is_failed() -> None:
    flow = FlowTester(hurried, 1)
    done(flow, "reserve")
    flow.passes(hours(1))
    refused(flow, "reserve/undo")

    flow.resolves("reserve/undo", "skip")

    assert (flow.status, flow.journal[-1].data["stands"]) == ("failed", ["reserve"])


def test_it_is_asked_to_end_by_its_deadline() -> None:
    flow = FlowTester(asks, 1)

    flow.passes(hours(2))

    [asked] = [fact for fact in flow.journal if fact.kind == "cancel_asked"]
    assert (asked.data["by"], asked.at) == ("deadline", NOON + hours(1))
    assert asked.data["deadline"] == (NOON + hours(1)).isoformat()


def test_what_ends_in_time_knows_of_no_deadline() -> None:
    flow = FlowTester(hurried, 1)
    flow.passes(minutes(59))

    done(flow, "reserve")
    done(flow, "ship", value="there")
    flow.passes(hours(5))

    assert (flow.returned, flow.machine.next_due()) == ("there", None)


def test_a_start_may_give_another_time_than_the_flow() -> None:
    flow = FlowTester(asks, 1, deadline=hours(2))

    flow.passes(minutes(119))
    assert flow.status == "open"
    flow.passes(minutes(1))

    assert flow.status == "failed"


def test_a_time_that_falls_due_with_it_comes_first() -> None:
    async def naps(ctx: Context, n: int) -> str:
        await ctx.sleep(hours(1))
        return "rested"

    flow = FlowTester(flow_of(naps), 1, deadline=hours(1))

    flow.passes(hours(1))

    assert flow.returned == "rested"


# ---- beside other ends -------------------------------------------------------------------------------------------


def test_a_flow_may_tidy_up_and_a_second_cause_is_not_thrown_again() -> None:
    async def tidies(ctx: Context, n: int) -> None:
        try:
            await ctx.sleep(days(1))
        finally:
            await ctx.call("s", "tidy")

    flow = FlowTester(flow_of(tidies), 1, deadline=hours(1))
    flow.passes(hours(1))

    flow.cancels(reason="and I want it too")
    assert flow.open == ["tidy"]
    done(flow, "tidy")

    assert (flow.status, flow.error["code"]) == ("failed", "deadline")


def test_what_a_person_cancelled_before_stays_cancelled_when_its_deadline_passes() -> None:
    flow = FlowTester(hurried, 1)
    done(flow, "reserve")
    flow.cancels(reason="wrong address")

    flow.passes(hours(2))
    done(flow, "reserve/undo")

    assert flow.status == "cancelled"
    assert "error" not in flow.journal[-1].data


def test_what_fails_before_keeps_its_own_error_though_it_undoes_beyond_its_deadline() -> None:
    flow = FlowTester(hurried, 1)
    done(flow, "reserve")
    refused(flow, "ship", "no-van")

    flow.passes(hours(2))
    assert flow.open == ["reserve/undo"]
    done(flow, "reserve/undo")

    assert (flow.status, flow.error["code"]) == ("compensated", "no-van")


def test_a_flow_that_does_not_listen_completes() -> None:
    async def deaf(ctx: Context, n: int) -> str:
        try:
            await ctx.sleep(days(1))
        except Cancelled:
            return "done anyway"
        return "slept"

    flow = FlowTester(flow_of(deaf), 1, deadline=hours(1))

    flow.passes(hours(1))

    assert flow.returned == "done anyway"


def test_after_a_pivot_what_was_done_before_it_stands() -> None:
    async def pivots(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=undoes("a"))
        ctx.pivot()
        await ctx.call("s", "b", undo=undoes("b"))
        await ctx.sleep(days(1))

    flow = FlowTester(flow_of(pivots), 1, deadline=hours(1))
    done(flow, "a", "b")
    flow.passes(hours(1))
    done(flow, "b/undo")

    assert (flow.status, undone(flow.journal), flow.journal[-1].data["stands"]) == ("failed", ["b"], ["a"])


def test_it_goes_on_counting_when_a_flow_continues_as_new() -> None:
    async def again(ctx: Context, n: int) -> None:
        await ctx.sleep(minutes(40))
        ctx.continue_as_new(n + 1)

    flow = FlowTester(flow_of(again), 1, deadline=hours(1))
    flow.passes(minutes(59))
    assert (flow.status, flow.machine.epoch) == ("open", 1)

    flow.passes(minutes(1))

    assert (flow.status, flow.error["code"]) == ("failed", "deadline")


def test_a_person_who_is_called_deadline_is_a_person() -> None:
    flow = FlowTester(asks, 1)

    flow.cancels(by="deadline")

    assert flow.status == "cancelled"


# ---- replay, and what cannot be ----------------------------------------------------------------------------------


def test_a_late_worker_lets_it_pass_when_it_comes_to_it() -> None:
    machine = Machine(asks.program)
    machine.tell("started", "", {"input": 1, "deadline": (NOON + hours(1)).isoformat()}, NOON)
    assert machine.next_due() == (NOON + hours(1), "")

    assert not machine.fire(NOON + minutes(59))
    assert machine.fire(NOON + hours(9))

    assert said(machine.new)[-3:] == ["cancel_asked", "withdrawn ship", "finished failed"]
    assert machine.next_due() is None


@pytest.mark.parametrize("found", ["soon", "2027-01-15T12:00:00", 7])
def test_a_recorded_deadline_that_is_no_moment_holds_the_execution(found: Json) -> None:
    machine = Machine(asks.program)

    with pytest.raises(InputInvalid, match="the recorded deadline: expected a moment"):
        machine.tell("started", "", {"input": 1, "deadline": found}, NOON)


@pytest.mark.parametrize("span", [timedelta(0), -hours(1), days(4000), 5])
def test_a_flow_that_could_not_be_in_time_is_refused_when_it_is_registered(span: Json) -> None:
    with pytest.raises(UsageError, match="workflow late: deadline= expected a timedelta of more than 0"):
        workflow(name="late", version="1", deadline=span)


def test_a_flow_without_a_deadline_has_all_the_time() -> None:
    machine = bare(hurried.run)

    done(machine, "reserve")

    assert machine.next_due() == (NOON + days(1), "ship")
    machine.evict()
