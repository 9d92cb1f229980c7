"""Commands of which nobody knows what became, and probes that ask."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from orchestrator import (
    CannotSay,
    Command,
    Context,
    Done,
    Effect,
    Finding,
    NotDone,
    OutcomeUnknown,
    Retry,
    StepRefused,
    UsageError,
    bounded,
    days,
    hours,
    local,
    minutes,
    workflow,
)
from orchestrator.core.fact import Fact
from orchestrator.core.follows import SentAgain, TakenBack
from orchestrator.core.machine import Machine
from orchestrator.engine.message import Identity, Wire, asked_again, message_of
from orchestrator.testing import NOON, FlowTester
from orchestrator.workflow import Workflow
from tests.core.answers import said, tell, undone

Json = Any


class Charged(BaseModel):
    charge: str


class Refund(Command[None], endpoint="bank", type="payment.refund"):
    charge: str | None


class Charge(Command[Charged], endpoint="bank", type="payment.charge"):
    order: str

    def refund(self, charged: Charged | None) -> Refund:
        return Refund(charge=charged.charge if charged else None)


class WasCharged(Command[Finding[Charged]], endpoint="bank", type="payment.was-charged"):
    order: str


class Once(Command[None], endpoint="bank", type="letter.send", effect=Effect.AT_MOST_ONCE): ...


class Often(Command[None], endpoint="bank", type="letter.read", effect=Effect.IDEMPOTENT): ...


def look() -> None: ...


CHARGE = Charge(order="A")


def charges(**options: Any) -> Workflow[str, str]:
    """A flow of one call with a probe; it returns why that did not end well, unless it `fails`."""
    fails = options.pop("fails", False)

    @workflow(name="charges", version="1")
    async def flow(ctx: Context, order: str) -> str:
        probe = options.pop("probe", None) or WasCharged(order=order)
        options.setdefault("timeout", hours(1))
        try:
            paid = await ctx.call(CHARGE, undo=CHARGE.refund, probe=probe, name="charge", **options)
        except (OutcomeUnknown, StepRefused) as error:
            return f"{type(error).__name__} {error.code}"
        finally:
            options["probe"] = probe
        if fails:
            raise ValueError("later")
        return paid.charge

    return flow


def lost(flow: Workflow[str, str]) -> FlowTester[str, str]:
    """`flow`, whose call has run out of its time and settled: its probe is asked."""
    tester = FlowTester(flow, "A")
    tester.passes(hours(1))
    assert tester.open == ["charge", "charge/probe"]
    return tester


# ---- what it finds ---------------------------------------------------------------------------------------------


def test_what_was_done_counts_with_the_reply_that_the_probe_found_and_its_undo_is_made_from_that() -> None:
    flow = lost(charges(fails=True))

    flow.expect(WasCharged).replies(Done(Charged(charge="c7")))
    assert said(flow.journal)[-4:] == [
        "asked charge/probe",
        "ended charge/probe",
        "ended charge",
        "asked charge/undo",
    ]
    flow.expect(Refund(charge="c7")).replies()

    assert flow.status == "compensated"


def test_what_was_not_done_is_a_refusal_and_needs_no_undo() -> None:
    flow = lost(charges())

    flow.expect(WasCharged).replies(NotDone())

    assert flow.returned == "StepRefused not-done"
    assert undone(flow.journal) == []


def test_what_was_not_done_is_sent_again_with_a_time_of_its_own_where_the_policy_has_a_try() -> None:
    flow = lost(charges(retry=Retry.fixed(minutes(1), attempts=2, jitter=0)))
    flow.expect(WasCharged).replies(NotDone())
    assert flow.machine.next_due() == (NOON + minutes(61), "charge")

    flow.passes(minutes(1))
    assert flow.machine.next_due() == (NOON + minutes(121), "charge")
    assert flow.journal[-1].data == {"attempt": 2, "due": (NOON + minutes(121)).isoformat()}
    flow.passes(hours(1))
    assert flow.open == ["charge", "charge/probe#2"]
    flow.expect(WasCharged).replies(NotDone())

    assert flow.returned == "StepRefused not-done"


def test_a_policy_that_names_other_codes_sends_nothing_again() -> None:
    flow = lost(charges(retry=Retry.fixed(minutes(1), attempts=9, only=("busy",))))

    flow.expect(WasCharged).replies(NotDone())

    assert flow.returned == "StepRefused not-done"


def test_while_it_cannot_say_it_is_asked_again_and_each_question_has_a_key_of_its_own() -> None:
    flow = lost(charges())

    flow.expect(WasCharged).replies(CannotSay())
    due = flow.machine.next_due()
    assert due is not None
    assert due[1] == "charge/probe"
    flow.machine.fire(due[0])
    [again] = [message(asked_again(one)) for one in flow.machine.follows.of(SentAgain)]
    first = message(next(fact for fact in flow.journal if fact.path == "charge/probe"))

    assert b'"probes":"x/0/charge"' in again.body.replace(b" ", b"")
    assert again.lane == first.lane
    assert again.body != first.body
    assert again.message_id != first.message_id


def message(fact: Fact) -> Any:
    return message_of(fact, Identity(1, "x", 0, None, None), Wire("/test", "http://localhost"))


@pytest.mark.parametrize("how", ["refused", "failed", "unknown", "nonsense"])
def test_a_probe_that_does_not_answer_is_asked_again(how: str) -> None:
    flow = lost(charges())

    answer: Json = {"outcome": how, "error": {"code": "gone"}}
    tell(
        flow, "ended", "charge/probe", answer if how != "nonsense" else {"outcome": "done", "value": ["what"]}
    )

    assert said(flow.journal)[-1] == "attempted charge/probe"
    assert flow.open == ["charge", "charge/probe"]


def test_when_it_never_finds_out_the_outcome_stays_unknown_and_is_undone_as_that() -> None:
    flow = lost(charges())

    flow.passes(days(1))

    assert flow.returned == "OutcomeUnknown timeout"


def test_a_probe_may_have_bounds_of_its_own() -> None:
    often = Retry.fixed(minutes(5), attempts=2, jitter=0)
    flow = lost(charges(probe=bounded(WasCharged(order="A"), timeout=hours(2), retry=often)))

    flow.expect(WasCharged).replies(CannotSay())
    flow.passes(minutes(5))
    flow.expect(WasCharged).replies(CannotSay())

    assert flow.returned == "OutcomeUnknown timeout"


def test_when_it_never_finds_out_a_person_is_asked_where_the_flow_says_so() -> None:
    flow = lost(charges(unknown="hold"))
    flow.passes(days(1))
    assert flow.status == "held"

    flow.resolves("charge", "done", value={"charge": "c9"})

    assert flow.returned == "c9"


def test_an_unknown_that_has_settled_is_asked_about_at_once() -> None:
    flow = FlowTester(charges(), "A")

    flow.expect(Charge).is_unknown()

    assert flow.open == ["charge", "charge/probe"]


# ---- meanwhile -------------------------------------------------------------------------------------------------


def test_nothing_is_asked_before_it_is_known_that_the_message_cannot_act_any_more() -> None:
    machine = Machine(charges().program)
    machine.tell("started", "", {"input": "A", "seed": ""}, NOON)
    machine.fire(NOON + hours(1))
    assert (list(machine.open), [back.path for back in machine.follows.of(TakenBack)]) == (
        ["charge"],
        ["charge"],
    )

    tell(machine, "ended", "charge", {"outcome": "refused", "error": {"code": "never-sent"}})

    assert (machine.status, machine.result) == ("completed", "StepRefused never-sent")


def test_a_reply_that_comes_at_last_counts_and_the_probe_is_withdrawn() -> None:
    flow = lost(charges())

    flow.late("charge", "done", {"charge": "c1"})

    assert flow.returned == "c1"
    assert "withdrawn charge/probe" in said(flow.journal)


def test_a_second_word_that_nobody_knows_changes_nothing() -> None:
    flow = lost(charges())

    flow.late("charge", "unknown", {"code": "sent"})

    assert said(flow.journal)[-1] == "late charge"
    assert flow.open == ["charge", "charge/probe"]


def test_a_cancel_withdraws_both_and_undoes_what_may_have_been_done() -> None:
    flow = lost(charges())

    flow.cancels()

    assert [fact.path for fact in flow.journal if fact.kind == "withdrawn"] == ["charge/probe", "charge"]
    flow.expect(Refund(charge=None)).replies()
    assert flow.status == "cancelled"


# ---- promises that contradict each other -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "probe", "why"),
    [
        (Often(), WasCharged(order="A"), "probe= and an idempotent command: it may be sent again unasked"),
        (CHARGE, local(look), "probe= expected a command, found the function"),
        (CHARGE, Once(), "probe=letter.send: it is asked again while it cannot say, not at most once"),
        (CHARGE, Refund(charge=None), "expected a command whose reply is a Finding"),
        (CHARGE, Charge(order="B"), "expected a command whose reply is a Finding"),
    ],
    ids=["idempotent", "a-function", "at-most-once", "no-reply", "another-reply"],
)
def test_a_probe_that_could_never_tell_is_refused_and_nothing_is_asked(
    what: Command[Any], probe: Any, why: str
) -> None:
    @workflow(name="careless", version="1")
    async def flow(ctx: Context, order: str) -> str:
        try:
            await ctx.call(what, probe=probe)
        except UsageError as error:
            return str(error)
        return "asked"

    tester = FlowTester(flow, "A")

    assert why in tester.returned
    assert said(tester.journal) == ["started", "finished completed"]


def test_a_command_that_is_sent_at_most_once_may_be_probed() -> None:
    @workflow(name="tells", version="1")
    async def tells(ctx: Context, order: str) -> str:
        try:
            await ctx.call(Once(), probe=WasCharged(order=order), unknown="raise")
        except StepRefused as error:
            return error.code
        return "told"

    flow = FlowTester(tells, "A")
    flow.expect(Once).is_unknown()
    flow.expect(WasCharged).replies(NotDone())

    assert flow.returned == "not-done"


def test_a_probe_that_is_too_large_for_its_row_is_a_refused_ask() -> None:
    flow = FlowTester(charges(probe=WasCharged(order="x" * 300_000)), "A")

    assert flow.returned == "StepRefused too-large"
