"""Commands that a service gave up, and that are sent again."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import (
    Command,
    Context,
    Effect,
    Retry,
    StepFailed,
    StepRefused,
    UsageError,
    command,
    days,
    hours,
    minutes,
    seconds,
    workflow,
)
from orchestrator.core.follows import SentAgain, TakenBack
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON, FlowTester
from orchestrator.workflow import Workflow
from tests.core.answers import bare, cancelled, said, tell, undone

Json = Any


class Pay(Command[str], endpoint="bank", type="transfer.create"):
    order: str


class PayOnce(Command[str], endpoint="bank", type="transfer.create", effect=Effect.AT_MOST_ONCE):
    order: str


BUSY = Retry.fixed(minutes(1), attempts=3, jitter=0, only=("busy",))


def pays(retry: Retry | None, **options: Any) -> Workflow[str, str]:
    """A flow of one call; it returns why that did not end well."""

    @workflow(name="pays", version="1")
    async def flow(ctx: Context, order: str) -> str:
        try:
            return await ctx.call(Pay(order=order), retry=retry, name="pay", **options)
        except (StepFailed, StepRefused) as error:
            return f"{type(error).__name__} {error.code}"

    return flow


async def pays_and_waits(ctx: Context, n: int) -> None:
    await ctx.call(Pay(order="A"), retry=BUSY, undo=command("bank", "transfer.undo"), name="pay")


def gives_up(machine: Machine, code: str = "busy") -> None:
    tell(machine, "ended", "pay", {"outcome": "failed", "error": {"code": code, "detail": ""}})


# ---- sent again ------------------------------------------------------------------------------------------------


def test_a_command_that_its_service_gave_up_is_sent_again_when_its_time_has_come() -> None:
    flow = FlowTester(pays(BUSY), "A")

    flow.expect(Pay).fails("busy", "come later")
    assert flow.machine.next_due() == (NOON + minutes(1), "pay")
    flow.passes(minutes(1))
    flow.expect(Pay).replies("paid")

    assert flow.returned == "paid"
    assert said(flow.journal) == [
        "started", "asked pay", "attempted pay", "resent pay", "ended pay", "finished completed",
    ]  # fmt: skip
    assert flow.journal[2].data["error"] == {"code": "busy", "detail": "come later", "attempts": 1}
    assert flow.journal[3].data == {"attempt": 2}


def test_what_is_sent_again_follows_from_the_fact_that_says_so() -> None:
    machine = bare(pays_and_waits)
    gives_up(machine)
    assert machine.follows.of(SentAgain) == []

    machine.fire(NOON + minutes(1))

    [again] = machine.follows.of(SentAgain)
    assert (again.ask.path, again.attempt, again.at) == ("pay", 2, NOON + minutes(1))
    assert again.position == machine.new[-1].position
    again_from_the_journal = Machine(machine.program)
    again_from_the_journal.replay(machine.new)
    assert again_from_the_journal.follows.of(SentAgain) == []
    machine.evict()
    again_from_the_journal.evict()


@pytest.mark.parametrize(
    ("retry", "outcome", "code", "end"),
    [
        (None, "failed", "busy", "StepFailed busy"),
        (BUSY, "failed", "broken", "StepFailed broken"),
        (Retry(never=("busy",)), "failed", "busy", "StepFailed busy"),
        (BUSY, "refused", "busy", "StepRefused busy"),
        (Retry.fixed(hours(23), attempts=9, jitter=0, cap=days(2)), "failed", "busy", None),
        (Retry.fixed(days(1), attempts=9, jitter=0), "failed", "busy", "StepFailed busy"),
    ],
    ids=[
        "no-policy",
        "another-code",
        "an-excluded-code",
        "a-refusal",
        "before-its-deadline",
        "at-its-deadline",
    ],
)
def test_only_what_the_policy_covers_is_sent_again_and_only_before_the_deadline(
    retry: Retry | None, outcome: str, code: str, end: str | None
) -> None:
    flow = FlowTester(pays(retry), "A")

    flow.tell("ended", "pay", {"outcome": outcome, "error": {"code": code}})

    assert (None if flow.status == "open" else flow.returned) == end


def test_a_command_that_is_given_up_again_and_again_has_failed() -> None:
    flow = FlowTester(pays(BUSY), "A")

    for _ in range(2):
        flow.expect(Pay).fails("busy")
        flow.passes(minutes(1))
    flow.expect(Pay).fails("busy")

    assert flow.returned == "StepFailed busy"


def test_an_answer_that_comes_between_two_sends_ends_the_call() -> None:
    flow = FlowTester(pays(BUSY), "A")
    flow.expect(Pay).fails("busy")

    flow.expect(Pay).replies("paid after all")
    flow.passes(minutes(5))

    assert (flow.returned, "resent pay" in said(flow.journal)) == ("paid after all", False)


# ---- stopped on the way ----------------------------------------------------------------------------------------


def test_a_call_that_is_stopped_between_two_sends_is_undone_at_once_since_nothing_of_it_is_under_way() -> (
    None
):
    machine = bare(pays_and_waits)
    gives_up(machine)

    cancelled(machine)

    assert (machine.settling(), machine.follows.of(TakenBack), list(machine.open)) == ([], [], ["pay/undo"])
    machine.evict()


def test_a_call_that_is_stopped_after_it_was_sent_again_takes_that_message_back_and_undoes_it() -> None:
    machine = bare(pays_and_waits)
    gives_up(machine)
    machine.fire(NOON + minutes(1))

    cancelled(machine)
    [back] = machine.follows.of(TakenBack)
    assert (machine.settling(), back.path, back.asked_at) == (["pay"], "pay", NOON + minutes(1))
    tell(machine, "ended", "pay", {"outcome": "unknown", "error": {"code": "sent"}})

    assert undone(machine.new) == ["pay"]
    assert machine.new[-1].data["undoes_at"] == (NOON + minutes(1)).isoformat()
    machine.evict()


def test_a_command_that_was_sent_again_is_unknown_at_its_first_deadline() -> None:
    machine = bare(pays_and_waits)
    due = machine.open["pay"][1].due
    assert due == NOON + days(1)
    gives_up(machine)
    machine.fire(NOON + minutes(1))

    machine.fire(NOON + days(1))

    assert [back.asked_at for back in machine.follows.of(TakenBack)] == [NOON + minutes(1)]
    assert machine.settling() == ["pay"]
    machine.evict()


@pytest.mark.parametrize("settles", ["open", "late"])
def test_that_the_last_message_never_arrived_says_nothing_of_the_one_before(settles: str) -> None:
    machine = bare(pays_and_waits)
    gives_up(machine)
    machine.fire(NOON + minutes(1))
    if settles == "late":
        cancelled(machine)

    never = {"outcome": "refused", "error": {"code": "never-sent"}}
    machine.tell("ended", "pay", never, NOON + minutes(1), actor="relay")

    assert undone(machine.new) == ["pay"]
    machine.evict()


def test_a_service_that_refuses_what_it_gave_up_before_says_that_it_did_nothing() -> None:
    machine = bare(pays_and_waits)
    gives_up(machine)
    machine.fire(NOON + minutes(1))

    refusal = {"outcome": "refused", "error": {"code": "no-account"}}
    machine.tell("ended", "pay", refusal, NOON + minutes(1), actor="participant:bank")

    assert (undone(machine.new), machine.status) == ([], "failed")


# ---- promises that contradict each other -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "retry", "why"),
    [
        (Pay(order="A"), Retry(only=(ConnectionError,)), "retry= by ConnectionError: expected codes"),
        (Pay(order="A"), Retry(never=("busy", OSError)), "retry= by OSError: expected codes"),
        (Pay(order="A"), Retry(within=hours(2)), "retry.within of 2:00:00: expected at most its timeout"),
        (PayOnce(order="A"), Retry(attempts=2), "at most once, and retry= with 2 attempts"),
    ],
    ids=["a-class", "a-class-among-codes", "too-long", "at-most-once"],
)
def test_a_policy_that_no_command_can_have_is_refused_and_nothing_is_asked(
    what: Command[str], retry: Retry, why: str
) -> None:
    @workflow(name="careless", version="1")
    async def flow(ctx: Context, order: str) -> str:
        try:
            return await ctx.call(what, retry=retry, timeout=hours(1), unknown="raise")
        except UsageError as error:
            return str(error)

    tested = FlowTester(flow, "A")

    assert f"call of transfer.create: {why}" in tested.returned
    assert said(tested.journal) == ["started", "finished completed"]


def test_a_command_named_by_strings_has_a_policy_too() -> None:
    @workflow(name="loose", version="1")
    async def flow(ctx: Context, order: str) -> Json:
        return await ctx.call("bank", "transfer.create", {}, retry=Retry.fixed(seconds(1), jitter=0))

    tested = FlowTester(flow, "A")

    tested.tell("ended", "create", {"outcome": "failed", "error": {"code": "any"}})
    tested.passes(seconds(1))

    assert said(tested.journal)[-1] == "resent create"
