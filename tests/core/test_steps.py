"""What an author promises about the tries of a local step, and what follows from it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from orchestrator import (
    CannotSay,
    Context,
    Done,
    Effect,
    NotDone,
    OutcomeUnknown,
    Retry,
    StepFailed,
    UsageError,
    days,
    hours,
    local,
    minutes,
    seconds,
    workflow,
)
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON, FlowTester
from orchestrator.workflow import Workflow
from tests.core.answers import said, undone

Json = Any


def pay(order: str) -> str:
    return order


def unpay(order: str) -> None: ...


def look(order: str) -> Done[str] | NotDone | CannotSay:
    return NotDone()


def look_without(n: int, m: int) -> NotDone:
    return NotDone()


class Busy(Exception):
    code = "busy"


def pays(**promises: Any) -> Workflow[str, str]:
    """A flow of one step, with these promises; it returns why the step did not end well."""

    @workflow(name="pays", version="1")
    async def flow(ctx: Context, order: str) -> str:
        try:
            return await ctx.step(pay, order, **promises)
        except (StepFailed, OutcomeUnknown) as error:
            return f"{type(error).__name__} {error.code}"

    return flow


def begun(**promises: Any) -> FlowTester[str, str]:
    return FlowTester(pays(**promises), "A")


# ---- promises that contradict each other -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("promises", "why"),
    [
        ({"effect": Effect.AT_MOST_ONCE, "unknown": "raise", "retry": Retry(attempts=2)}, "2 attempts"),
        (
            {
                "effect": Effect.AT_MOST_ONCE,
                "unknown": "raise",
                "retry": Retry(attempts=None, within=days(1)),
            },
            "any number of attempts",
        ),
        ({"effect": Effect.AT_MOST_ONCE}, "needs undo= or unknown="),
        ({"effect": "twice"}, "expected one of keyed, idempotent, at_most_once"),
        ({"probe": look, "effect": Effect.IDEMPOTENT}, "may be run again unasked"),
        ({"probe": look, "effect": Effect.AT_MOST_ONCE, "unknown": "raise"}, "never run again"),
        ({"probe": look, "retry": Retry(attempts=1)}, "one attempt"),
        ({"probe": look_without}, "arguments of the step"),
        ({"probe": 7}, "arguments of the step"),
        ({"retry": Retry(within=hours(2)), "timeout": hours(1)}, "retry.within of 2:00:00: expected at most"),
        ({"attempt_timeout": hours(2), "timeout": hours(1)}, "attempt_timeout of 2:00:00: expected at most"),
        ({"heartbeat": minutes(2), "timeout": minutes(1)}, "heartbeat of 0:02:00: expected at most"),
        ({"heartbeat": minutes(2), "attempt_timeout": minutes(1)}, "heartbeat of 0:02:00: expected at most"),
        ({"timeout": timedelta(0)}, "more than 0"),
        ({"attempt_timeout": timedelta(0)}, "more than 0"),
        ({"heartbeat": days(4000)}, "at most ten years"),
        ({"unknown": "perhaps"}, "expected 'raise' or 'hold'"),
    ],
    ids=range(17),
)
def test_promises_that_contradict_each_other_are_refused_and_nothing_is_asked(
    promises: dict[str, Any], why: str
) -> None:
    @workflow(name="careless", version="1")
    async def flow(ctx: Context, order: str) -> str:
        try:
            return await ctx.step(pay, order, **promises)
        except UsageError as error:
            return str(error)

    tested = FlowTester(flow, "A")

    assert why in tested.returned
    assert said(tested.journal) == ["started", "finished completed"]


def test_an_error_in_a_promise_names_the_step() -> None:
    @workflow(name="careless", version="1")
    async def flow(ctx: Context, order: str) -> None:
        await ctx.step(pay, order, probe=look, retry=Retry(attempts=1), name="charge")

    assert "step charge: probe=" in FlowTester(flow, "A").error["detail"]


# ---- which errors are tried again ------------------------------------------------------------------------------


def test_only_the_errors_that_the_policy_names_are_tried_again() -> None:
    flow = begun(retry=Retry(only=(ConnectionError, "busy"), attempts=9))

    flow.expect(pay).raises(ConnectionResetError("peer"))
    flow.passes(seconds(1))
    flow.expect(pay).raises(Busy())
    flow.passes(seconds(2))
    assert [fact.data["error"]["code"] for fact in flow.journal if fact.kind == "attempted"] == [
        "raised",
        "busy",
    ]
    flow.expect(pay).raises(KeyError("order"))

    assert flow.returned == "StepFailed raised"


def test_an_error_that_the_policy_excludes_is_the_end_of_its_step() -> None:
    flow = begun(retry=Retry(never=("bad-address",)))

    flow.expect(pay).raises("bad-address", "no such street")

    assert flow.returned == "StepFailed bad-address"
    assert flow.journal[-2].data["error"] == {
        "code": "bad-address",
        "detail": "no such street",
        "attempts": 1,
    }


def test_the_tries_end_with_their_total_time() -> None:
    flow = begun(retry=Retry.fixed(minutes(1), attempts=None, within=minutes(3), jitter=0))

    for _ in range(3):
        flow.expect(pay).raises()
        flow.passes(minutes(1))
    flow.expect(pay).raises()

    assert flow.returned == "StepFailed raised"


def test_a_death_after_the_total_time_leaves_no_further_try() -> None:
    machine = Machine(pays(retry=Retry(within=minutes(3))).program)
    machine.tell("started", "", {"input": "A", "seed": ""}, NOON)
    journal = machine.take_new()
    machine.evict()

    for late, open_ in ((minutes(3), ["pay"]), (minutes(4), [])):
        again = Machine(pays(retry=Retry(within=minutes(3))).program)
        again.replay([*journal, Fact(3, "orphaned", "", {"by": "w"}, NOON + late)], now=NOON + late)
        assert list(again.open) == open_
        again.evict()


# ---- tries of which nobody knows what they did -----------------------------------------------------------------


@pytest.mark.parametrize("effect", [None, Effect.KEYED, Effect.IDEMPOTENT])
def test_a_try_that_was_ended_is_made_again_until_the_tries_run_out_and_then_it_is_unknown(
    effect: Effect | None,
) -> None:
    flow = begun(effect=effect, attempt_timeout=minutes(1), retry=Retry(attempts=2), undo=local(unpay, "A"))

    flow.expect(pay).runs_out()
    flow.passes(minutes(1))
    assert flow.open == ["pay"]
    flow.expect(pay).runs_out()

    assert flow.returned == "OutcomeUnknown attempt-timeout"


def test_what_is_tried_at_most_once_is_unknown_when_its_try_was_ended() -> None:
    flow = begun(effect=Effect.AT_MOST_ONCE, attempt_timeout=minutes(1), unknown="raise")

    flow.expect(pay).runs_out()

    assert flow.returned == "OutcomeUnknown attempt-timeout"


def test_what_is_tried_at_most_once_and_raises_has_failed_and_is_undone() -> None:
    @workflow(name="once", version="1")
    async def once(ctx: Context, order: str) -> None:
        await ctx.step(pay, order, effect=Effect.AT_MOST_ONCE, undo=local(unpay, order))

    flow = FlowTester(once, "A")

    flow.expect(pay).raises()
    flow.expect(unpay).replies()

    assert (undone(flow.journal), flow.status) == (["pay"], "compensated")


def test_what_is_tried_at_most_once_is_unknown_when_its_worker_died() -> None:
    flow = pays(effect=Effect.AT_MOST_ONCE, unknown="raise")
    machine = Machine(flow.program)
    machine.tell("started", "", {"input": "A", "seed": ""}, NOON)
    journal = machine.take_new()
    machine.evict()

    again = Machine(flow.program)
    again.replay([*journal, Fact(3, "orphaned", "", {"by": "w"}, NOON)], now=NOON)

    assert again.result == "OutcomeUnknown worker-lost"


def test_a_person_can_be_asked_about_a_try_that_was_ended() -> None:
    flow = begun(effect=Effect.AT_MOST_ONCE, heartbeat=minutes(1), unknown="hold")

    flow.expect(pay).runs_out("heartbeat-lost")
    assert flow.status == "held"
    flow.resolves("pay", "done", value="paid after all")

    assert flow.returned == "paid after all"


def test_a_policy_that_does_not_name_an_ended_try_does_not_repeat_it() -> None:
    flow = begun(attempt_timeout=minutes(1), retry=Retry(only=(ConnectionError,)))

    flow.expect(pay).runs_out()

    assert flow.returned == "OutcomeUnknown attempt-timeout"


# ---- what is written down --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("promises", "effect"),
    [
        ({}, None),
        ({"effect": Effect.KEYED}, None),
        ({"effect": Effect.IDEMPOTENT}, "idempotent"),
        ({"effect": Effect.AT_MOST_ONCE, "unknown": "raise"}, "at_most_once"),
        ({"probe": look}, "probe"),
        ({"probe": look, "effect": Effect.KEYED}, "probe"),
    ],
    ids=["none", "keyed", "idempotent", "at-most-once", "probe", "probe-keyed"],
)
def test_the_journal_names_every_contract_but_the_usual_one(
    promises: dict[str, Any], effect: str | None
) -> None:
    [_, asked] = begun(**promises).journal

    assert asked.data.get("effect") == effect


def test_a_step_with_a_probe_begins_only_when_its_asking_is_committed() -> None:
    [plain] = begun(heartbeat=minutes(1)).machine.runnable()
    [probed] = begun(probe=look).machine.runnable()

    assert (plain.needs_commit, probed.needs_commit) == (False, True)


def test_what_a_try_left_is_there_for_the_next_one_also_after_a_replay() -> None:
    flow = begun(heartbeat=minutes(1))

    flow.expect(pay).runs_out("heartbeat-lost", left={"page": 7})
    flow.passes(minutes(1))

    again = Machine(flow.flow.program)
    again.replay(flow.journal)
    for machine in (flow.machine, again):
        [(_, ask)] = machine.open.values()
        assert ask.watch is not None
        assert (ask.attempt, ask.watch.left) == (2, {"page": 7})
    again.evict()
