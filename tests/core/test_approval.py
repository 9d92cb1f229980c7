"""Approvals: a person is asked, reminded and waited for, and what was decided counts once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from contracts import Command
from contracts.limits import REMINDERS_MAX
from orchestrator import (
    Context,
    Decision,
    Elapsed,
    TimedOut,
    UsageError,
    days,
    hours,
    minutes,
    workflow,
)
from orchestrator.core.errors import NonDeterminism
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON, FlowTester
from tests.core.answers import UNDO, bare, cancelled, done, driven, flow_of, refused, said

Json = Any


class Expense(BaseModel):
    id: str
    amount: int


class Pay(Command[None], endpoint="bank", type="transfer.create"):
    expense: str
    amount: int


@workflow(name="expense", version="1")
async def expense(ctx: Context, request: Expense) -> str:
    try:
        decision = await ctx.approval(
            "expense", who=["group:finance"], show=request, remind=days(1), expires=days(7)
        )
    except TimedOut:
        return "expired"
    match decision.choice:
        case "approve":
            await ctx.call(Pay(expense=request.id, amount=request.amount))
            return f"paid, by {decision.by}"
        case _:
            return f"rejected by {decision.by}: {decision.reason}"


def asking() -> FlowTester[Expense, str]:
    return FlowTester(expense, Expense(id="e1", amount=90))


async def asks(ctx: Context, n: int) -> Decision:
    return await ctx.approval("expense", who="ann", expires=days(7))


# ---- what is decided ---------------------------------------------------------------------------------------------


def test_what_is_approved_goes_on_and_the_flow_knows_by_whom() -> None:
    flow = asking()

    flow.decides("expense", "approve", "ann")
    flow.expect(Pay(expense="e1", amount=90)).replies()

    assert flow.returned == "paid, by ann"


def test_what_is_rejected_comes_with_its_reason() -> None:
    flow = asking()

    flow.decides("expense", "reject", "ann", reason="no receipt")

    assert flow.returned == "rejected by ann: no receipt"


def test_a_decision_knows_when_the_flow_was_told() -> None:
    flow = driven(asks)
    flow.passes(hours(2))

    flow.decides("expense", "approve", "ann", reason="fine")

    assert flow.returned == Decision("approve", "ann", "fine", NOON + hours(2))


def test_an_approval_that_nobody_decides_expires() -> None:
    flow = asking()

    flow.passes(days(7))

    assert flow.returned == "expired"


def test_what_is_asked_is_written_down_with_whom_it_asks_and_what_they_should_see() -> None:
    flow = asking()

    noted, asked = flow.journal[1], flow.journal[2]

    assert (noted.kind, noted.path, noted.data) == (
        "noted",
        "expense/request",
        {
            "kind": "approval",
            "name": "request",
            "args": {
                "subject": "expense", "who": ["group:finance"], "choices": ["approve", "reject"],
                "show": {"id": "e1", "amount": 90},
            },
        },
    )  # fmt: skip
    assert (asked.path, asked.data["kind"], asked.data["args"]["request"]) == (
        "expense/first.0/decision", "decision", "expense/request",
    )  # fmt: skip
    assert asked.data["due"] == (NOON + days(7)).isoformat()


def test_each_approval_of_a_subject_has_a_place_of_its_own() -> None:
    async def twice(ctx: Context, n: int) -> list[str]:
        return [(await ctx.approval("spend", who="ann")).choice for _ in range(2)]

    flow = driven(twice)
    flow.decides("spend", "reject", "ann")
    flow.decides("spend", "approve", "ann")

    assert flow.told == ["spend/decision", "spend#2/decision"]
    assert flow.returned == ["reject", "approve"]


# ---- reminders ---------------------------------------------------------------------------------------------------


def reminders(journal: list[Any]) -> list[str]:
    return [fact.path for fact in journal if fact.kind == "noted" and fact.data["name"] == "reminder"]


def test_a_reminder_is_written_down_after_each_pause_until_it_is_decided() -> None:
    flow = asking()

    flow.passes(days(2.5))
    flow.decides("expense", "reject", "ann")
    flow.passes(days(10))

    assert reminders(flow.journal) == ["expense/first.1/reminder", "expense/first.1/reminder#2"]
    assert "withdrawn expense/first.1/remind#3" in said(flow.journal)


def test_reminders_end_when_there_were_many_and_the_wait_goes_on() -> None:
    async def patient(ctx: Context, n: int) -> str:
        return (await ctx.approval("expense", who="ann", remind=hours(1))).choice

    flow = driven(patient)
    flow.passes(hours(REMINDERS_MAX + 50))

    flow.decides("expense", "approve", "ann")

    assert len(reminders(flow.journal)) == REMINDERS_MAX
    assert flow.returned == "approve"


# ---- what else may happen ----------------------------------------------------------------------------------------


def test_an_approval_that_loses_a_race_is_withdrawn_and_a_decision_after_it_is_late() -> None:
    async def races(ctx: Context, n: int) -> str:
        match await ctx.first(ctx.approval("expense", who="ann"), ctx.sleep(hours(1))):
            case Decision(choice=choice):
                return choice
            case Elapsed():
                await ctx.call("s", "escalate")
                return "escalated"

    flow = driven(races)
    flow.passes(hours(1))

    flow.late("first.0/expense/decision", "done", {"choice": "approve", "by": "ann", "reason": ""})
    done(flow, "escalate")

    assert said(flow.journal)[-4:] == [
        "asked escalate", "late first.0/expense/decision", "ended escalate", "finished completed",
    ]  # fmt: skip
    assert flow.returned == "escalated"


def test_two_approvals_side_by_side_are_decided_by_their_subjects() -> None:
    async def both(ctx: Context, n: int) -> list[str]:
        found = await ctx.all(ctx.approval("money", who="ann"), ctx.approval("law", who="bob"))
        return [one.choice for one in found]

    flow = driven(both)
    flow.decides("law", "reject", "bob")
    flow.decides("money", "approve", "ann")

    assert flow.returned == ["approve", "reject"]


def test_a_flow_that_is_cancelled_waits_for_no_decision() -> None:
    async def pays(ctx: Context, n: int) -> None:
        await ctx.call("s", "reserve", undo=UNDO)
        await ctx.approval("expense", who="ann", remind=hours(1))

    flow = driven(pays)
    done(flow, "reserve")

    flow.cancels()

    assert flow.open == ["reserve/undo"]
    done(flow, "reserve/undo")
    assert flow.status == "cancelled"


def test_an_approval_needs_no_undo_and_its_scope_undoes_nothing() -> None:
    async def pays(ctx: Context, n: int) -> None:
        await ctx.call("s", "reserve", undo=UNDO)
        await ctx.approval("expense", who="ann")
        await ctx.call("s", "pay")

    flow = driven(pays)
    done(flow, "reserve")
    flow.decides("expense", "approve", "ann")

    refused(flow, "pay")

    assert flow.open == ["reserve/undo"]


def test_a_decision_is_no_answer_for_anything_else() -> None:
    machine = bare(asks)

    machine.tell("resolved", "expense/decision", {"verdict": "done", "value": None, "by": "eve"}, NOON)
    cancelled(machine)

    assert machine.status == "cancelled"
    machine.evict()


def test_choices_that_were_recorded_count_and_another_question_is_noticed() -> None:
    async def asks_otherwise(ctx: Context, n: int) -> Decision:
        return await ctx.approval("budget", who="ann", expires=days(7))

    flow = driven(asks)
    changed = Machine(flow_of(asks_otherwise).program)

    with pytest.raises(NonDeterminism, match=r"request at 'expense/request'.*'budget/request'"):
        changed.replay(flow.journal)
    changed.evict()


# ---- what cannot be asked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        pytest.param({"who": []}, "who= expected 1 to 100 different names, found \\[\\]", id="of nobody"),
        pytest.param({"who": ["ann", "ann"]}, "who= expected .* different", id="of somebody twice"),
        pytest.param({"who": [""]}, "who= '': expected 1 to 128 bytes", id="of a name that is none"),
        pytest.param({"choices": []}, "choices= expected 1 to 20 different names", id="without a choice"),
        pytest.param({"choices": "yes"}, "choices= expected several names", id="choices that are one text"),
        pytest.param({"choices": ["a\nb"]}, "choices= 'a\\\\nb': expected", id="a choice of two lines"),
        pytest.param({"choices": [str(n) for n in range(21)]}, "1 to 20", id="too many choices"),
        pytest.param({"expires": timedelta(0)}, "expected more than 0", id="expired already"),
        pytest.param({"remind": days(4000)}, "at most ten years", id="reminded too late"),
        pytest.param(
            {"remind": days(7), "expires": days(7)}, "nobody would be reminded", id="never reminded"
        ),
        pytest.param({"show": object()}, "expected a JSON value", id="showing what no journal can hold"),
        pytest.param({"show": "x" * 300_000}, "expected at most 262144 bytes", id="showing too much"),
    ],
)
def test_what_nobody_could_decide_is_refused_and_nothing_is_asked(asked: dict[str, Json], told: str) -> None:
    async def asks_so(ctx: Context, n: int) -> str:
        given: dict[str, Json] = {"who": "ann", **asked}
        with pytest.raises(UsageError, match=told):
            await ctx.approval("expense", **given)
        return "refused"

    flow = driven(asks_so)

    assert (flow.returned, [fact.kind for fact in flow.journal]) == ("refused", ["started", "finished"])


def test_a_subject_that_can_be_no_path_is_refused() -> None:
    async def asks_so(ctx: Context, n: int) -> None:
        await ctx.approval("x" * 200, who="ann")

    assert driven(asks_so).error["detail"].startswith("UsageError: approval ")


def test_a_tester_names_what_waits_for_a_decision() -> None:
    flow = asking()

    with pytest.raises(AssertionError, match="approval of 'holiday', open are \\['expense'\\]"):
        flow.decides("holiday", "approve")
    with pytest.raises(AssertionError, match="expected one of \\['approve', 'reject'\\], not 'perhaps'"):
        flow.decides("expense", "perhaps")
    flow.passes(minutes(1))
    assert flow.open == ["expense/first.0/decision", "expense/first.1/remind"]
