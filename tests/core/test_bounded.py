"""Undos that say themselves how long they may take, and when they are tried again."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.messages import Action
from orchestrator import (
    Context,
    Refused,
    Retry,
    UsageError,
    bounded,
    command,
    days,
    hours,
    local,
    minutes,
    seconds,
)
from orchestrator.core.bounds import bounds_of
from orchestrator.core.fact import Fact
from orchestrator.core.follows import SentAgain
from orchestrator.core.machine import Machine
from orchestrator.core.retry import ONCE, UNDO_RETRY
from orchestrator.engine.message import asked_again
from orchestrator.testing import NOON, FlowTester
from tests.core.answers import bare, done, driven, refused, said

Json = Any

TAKE_BACK = command("s", "take-back")
SLOWLY = Retry.fixed(minutes(10), attempts=3, jitter=0, only=("busy",))


def give_back(thing: str) -> None: ...


def fails_after(undo: Any) -> FlowTester[int, None]:
    """A flow that did something and has failed since: `undo` is asked."""

    async def flow(ctx: Context, n: int) -> None:
        await ctx.call("s", "do", undo=undo)
        await ctx.call("s", "fail")

    flow_ = driven(flow)
    done(flow_, "do", value="r")
    refused(flow_, "fail")
    return flow_


def asked(flow: FlowTester[int, None] | Machine) -> Fact:
    facts = flow.new if isinstance(flow, Machine) else flow.journal
    return next(fact for fact in facts if fact.kind == "asked" and fact.path == "do/undo")


def gives_up(flow: FlowTester[int, None], code: str) -> None:
    flow.tell("ended", "do/undo", {"outcome": "failed", "error": {"code": code, "detail": ""}})


# ---- by a command ----------------------------------------------------------------------------------------------


def test_an_undo_by_a_command_has_the_time_that_its_author_gave_it() -> None:
    flow = fails_after(bounded(TAKE_BACK, timeout=days(3)))

    assert flow.machine.next_due() == (NOON + days(3), "do/undo")
    assert asked(flow).data["args"]["bounds"] == {"timeout": 259_200.0}
    flow.passes(days(3))
    assert flow.status == "held"


def test_an_undo_that_its_service_gave_up_is_sent_again_as_its_policy_says_and_says_what_it_undoes() -> None:
    flow = fails_after(bounded(TAKE_BACK, retry=SLOWLY))

    gives_up(flow, "busy")
    assert (flow.status, flow.machine.next_due()) == ("open", (NOON + minutes(10), "do/undo"))
    flow.machine.fire(NOON + minutes(10))
    again = asked_again(flow.machine.follows.of(SentAgain)[0])
    flow.journal += flow.machine.take_new()
    done(flow, "do/undo")

    first = asked(flow).data
    assert {name: again.data[name] for name in ("known", "undoes_at")} == {
        name: first[name] for name in ("known", "undoes_at")
    }
    assert again.data["again"] == 2
    assert (flow.status, said(flow.journal)[-4:]) == (
        "compensated", ["attempted do/undo", "resent do/undo", "ended do/undo", "finished compensated"],
    )  # fmt: skip


def test_an_undo_that_was_sent_again_does_not_change_what_the_undone_was() -> None:
    flow = fails_after(bounded(TAKE_BACK, retry=SLOWLY))
    before = asked(flow).data["undoes_at"]
    gives_up(flow, "busy")
    flow.passes(minutes(10))

    gives_up(flow, "broken")  # not covered: a person is asked, and asks again
    flow.resolves("do/undo", "retry")

    assert flow.open == ["do/undo#2"]
    assert flow.journal[-1].data["undoes_at"] == before


@pytest.mark.parametrize("code", ["broken", "busy"], ids=["not-covered", "no-try-left"])
def test_an_undo_that_its_policy_does_not_try_again_holds_the_execution(code: str) -> None:
    flow = fails_after(bounded(TAKE_BACK, retry=SLOWLY))
    if code == "busy":
        for _ in range(2):
            gives_up(flow, "busy")
            flow.passes(minutes(10))

    gives_up(flow, code)

    assert flow.status == "held"


def test_an_undo_without_bounds_is_sent_once_within_a_day_and_a_local_one_has_twenty_tries() -> None:
    assert bounds_of(TAKE_BACK.as_action()) == (days(1), ONCE)
    assert bounds_of(local(give_back, "r").as_action()) == (None, UNDO_RETRY)


# ---- by a function ---------------------------------------------------------------------------------------------


def test_an_undo_by_a_function_is_tried_as_its_policy_says() -> None:
    flow = fails_after(bounded(local(give_back, "r"), retry=SLOWLY))

    flow.expect(give_back).raises("busy")
    assert flow.machine.next_due() == (NOON + minutes(10), "do/undo")
    flow.passes(minutes(10))
    flow.expect(give_back).raises("broken")

    assert flow.status == "held"


def test_an_undo_by_a_function_that_runs_out_of_time_is_waited_for_and_counts_when_it_was_done_after_all() -> (
    None
):
    machine = local_undo_out_of_time()

    assert (machine.held, machine.has_no_use_for("do/undo"), machine.runnable()) == (None, True, [])
    done(machine, "do/undo")

    assert machine.status == "compensated"


def test_an_undo_by_a_function_that_runs_out_of_time_and_was_not_done_holds_the_execution() -> None:
    machine = local_undo_out_of_time()

    machine.attempt_failed("do/undo", {"code": "stopped", "detail": ""}, NOON + hours(1), unknown=True)

    assert machine.held is not None
    assert (machine.held.code, machine.held.path) == ("undo-failed", "do/undo")
    machine.evict()


def local_undo_out_of_time() -> Machine:
    async def flow(ctx: Context, n: int) -> None:
        await ctx.call("s", "do", undo=bounded(local(give_back, "r"), timeout=hours(1)))
        await ctx.call("s", "fail")

    machine = bare(flow)
    done(machine, "do")
    refused(machine, "fail")
    assert machine.fire(NOON + hours(1))
    return machine


# ---- how it is said --------------------------------------------------------------------------------------------


def test_an_undo_that_is_made_from_the_reply_has_bounds_too_and_its_data_is_what_the_function_says() -> None:
    def cancel(reply: Json) -> Action | None:
        return None if reply is None else command("s", "cancel", reply)

    flow = fails_after(bounded(cancel, timeout=hours(2)))

    args = asked(flow).data["args"]
    assert (args["name"], args["data"], args["bounds"]) == ("cancel", "r", {"timeout": 7200.0})


def test_a_replay_has_the_bounds_that_were_recorded() -> None:
    flow = fails_after(bounded(TAKE_BACK, timeout=hours(2), retry=SLOWLY))

    again = Machine(flow.flow.program)
    again.replay(flow.journal)

    ask = again.open["do/undo"][1]
    assert (ask.retry, ask.due) == (SLOWLY, NOON + hours(2))
    again.evict()


@pytest.mark.parametrize(
    ("undo", "why"),
    [
        (bounded(TAKE_BACK, retry=Retry(only=(OSError,))), "retry= by OSError: expected codes"),
        (
            bounded(TAKE_BACK, retry=Retry(within=days(2))),
            "retry.within of 2 days.*: expected at most its timeout",
        ),
        (
            bounded(local(give_back, "r"), timeout=hours(1), retry=Retry(within=hours(2))),
            "retry.within of 2:00:00: expected at most its timeout of 1:00:00",
        ),
    ],
    ids=["a-class", "longer-than-a-day", "longer-than-its-timeout"],
)
def test_bounds_that_an_undo_cannot_have_are_refused_and_nothing_is_asked(undo: Any, why: str) -> None:
    async def flow(ctx: Context, n: int) -> None:
        with pytest.raises(UsageError, match=why):
            await ctx.call("s", "do", undo=undo)

    assert said(driven(flow).journal) == ["started", "finished completed"]


def test_a_timeout_that_cannot_be_is_refused_where_it_is_said() -> None:
    with pytest.raises(UsageError, match="expected more than 0 and at most ten years"):
        bounded(TAKE_BACK, timeout=seconds(0))


def test_a_policy_is_the_same_when_it_comes_back_from_a_journal() -> None:
    policy = Retry.exponential(seconds(2), 3.0, attempts=None, within=days(1), only=("a",), never=("b",))

    assert Retry.from_data(policy.as_data()) == policy


async def _transact(conn: Any) -> str:
    raise Refused("never run here")


def test_the_undo_of_a_transaction_has_bounds_too() -> None:
    async def flow(ctx: Context, n: int) -> None:
        await ctx.transaction(_transact, undo=bounded(TAKE_BACK, timeout=hours(2)))
        await ctx.call("s", "fail")

    flow_ = driven(flow)
    done(flow_, "_transact", value="t")
    refused(flow_, "fail")

    assert flow_.machine.next_due() == (NOON + hours(2), "_transact/undo")
