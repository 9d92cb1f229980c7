"""The tricky cases of a core, in the order of their table: each by the number of its row, and what was decided."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from contracts import Command, Refused
from orchestrator import (
    Cancelled,
    Context,
    OutcomeUnknown,
    ReplyInvalid,
    Retry,
    StepFailed,
    StepRefused,
    TimedOut,
    UsageError,
    command,
    days,
    hours,
    local,
    minutes,
    workflow,
)
from orchestrator.core.errors import InputInvalid, NonDeterminism, ProgramFault
from orchestrator.core.follows import TakenBack
from orchestrator.core.machine import Machine
from orchestrator.store.executions import Mail
from orchestrator.testing import NOON, FlowTester
from tests.core.answers import (
    UNDO,
    bare,
    done,
    driven,
    finish,
    flow_of,
    open_in,
    refused,
    said,
    undoes,
    undone,
    unknown,
)
from tests.engine.test_inputs import done as reply
from tests.engine.test_inputs import fed, mail

Json = Any


class Charged(BaseModel):
    charge: str


class Charge(Command[Charged], endpoint="payments", type="payment.charge"):
    order: str


def work() -> int:
    return 1


def unwork() -> None: ...


async def at_once(value: str) -> str:
    """A branch that waits for nothing."""
    return value


# ---- time ------------------------------------------------------------------------------------------------------


def test_the_reply_wins_over_its_timeout_when_a_late_worker_finds_both() -> None:
    """1"""

    async def pays(ctx: Context, n: int) -> str:
        try:
            await ctx.call("s", "charge", timeout=minutes(5))
        except OutcomeUnknown:
            return "nobody knows"
        return "paid"

    machine = bare(pays)

    fed(machine, reply(1, "charge", at=NOON + hours(1)), now=NOON + hours(2))

    assert machine.result == "paid"


def test_a_decision_that_came_after_the_approval_expired_is_too_late_however_late_the_worker_is() -> None:
    """2"""

    async def asks(ctx: Context, n: int) -> str:
        try:
            return (await ctx.approval("spend", who="ann", expires=hours(1))).choice
        except TimedOut:
            return "expired"

    def decided(after: timedelta) -> Mail:
        order = {"order": "decide", "choice": "approve", "by": "ann", "reason": ""}
        return mail(1, order, path="spend/decision", kind="order", at=NOON + after)

    in_time, on_the_dot, too_late = bare(asks), bare(asks), bare(asks)
    for machine, after in ((in_time, minutes(59)), (on_the_dot, hours(1)), (too_late, minutes(61))):
        fed(machine, decided(after), now=NOON + hours(2))

    assert [one.result for one in (in_time, on_the_dot, too_late)] == ["approve", "approve", "expired"]


def test_of_two_timers_the_earlier_due_fires_first_and_of_two_due_at_once_the_one_asked_first() -> None:
    """3"""

    async def naps(ctx: Context, n: int) -> list[str]:
        woken: list[str] = []

        async def nap(name: str, *spans: int) -> None:
            for span in spans:
                await ctx.sleep(minutes(span), name=name)
            woken.append(name)

        await ctx.all(nap("two", 1, 2), nap("one", 3), nap("three", 2, 1), nap("early", 1))
        return woken

    flow = driven(naps)

    flow.passes(minutes(3))

    assert flow.returned == ["early", "one", "two", "three"]


def test_a_timer_that_the_firing_of_another_withdrew_does_not_fire_in_the_same_turn() -> None:
    """4"""

    async def naps(ctx: Context, n: int) -> None:
        await ctx.first(ctx.sleep(minutes(1)), ctx.sleep(minutes(1)))

    flow = driven(naps)

    flow.passes(minutes(1))

    assert said(flow.journal)[3:] == ["ended first.0/sleep", "withdrawn first.1/sleep", "finished completed"]


# ---- the first of several --------------------------------------------------------------------------------------


def test_of_two_outcomes_in_one_turn_the_earlier_wins_and_the_other_is_late() -> None:
    """5"""

    async def races(ctx: Context, n: int) -> str:
        winner = await ctx.first(ctx.call("s", "a"), ctx.call("s", "b"))
        await ctx.call("s", "c")
        return winner

    machine = bare(races)
    machine.take_new()

    fed(machine, reply(1, "first.1/b"), reply(2, "first.0/a"))

    assert said(machine.new) == ["ended first.1/b", "withdrawn first.0/a", "asked c", "late first.0/a"]


def test_a_branch_that_ends_without_waiting_wins_and_later_ones_never_start() -> None:
    """6"""
    started: list[str] = []

    async def races(ctx: Context, n: int) -> str:
        async def calls(name: str) -> str:
            started.append(name)
            return await ctx.call("s", name)

        return await ctx.first(calls("before"), at_once("won"), calls("after"))

    machine = bare(races)

    assert (machine.result, started) == ("won", ["before"])
    assert said(machine.new)[1:] == [
        "asked first.0/before", "withdrawn first.0/before", "finished completed",
    ]  # fmt: skip


def test_an_error_that_is_first_is_raised_and_any_waits_for_a_success() -> None:
    """7"""

    async def first(ctx: Context, n: int) -> str:
        return await ctx.first(ctx.call("s", "a"), ctx.call("s", "b"))

    async def any_of(ctx: Context, n: int) -> str:
        return await ctx.any(ctx.call("s", "a"), ctx.call("s", "b"))

    hasty, patient = driven(first), driven(any_of)

    refused(hasty, "first.0/a")
    refused(patient, "any.0/a")
    done(patient, "any.1/b", value="b")

    assert (hasty.status, hasty.error["path"]) == ("failed", "first.0/a")
    assert patient.returned == "b"


def test_what_a_loser_had_completed_is_undone_before_first_returns() -> None:
    """8"""

    async def races(ctx: Context, n: int) -> str:
        async def reserves() -> str:
            await ctx.call("s", "reserve", undo=UNDO)
            return await ctx.call("s", "more")

        return await ctx.first(reserves(), ctx.call("s", "quick"))

    flow = driven(races)
    done(flow, "first.0/reserve")

    done(flow, "first.1/quick", value="won")

    assert (flow.status, flow.open) == ("open", ["first.0/reserve/undo"])
    done(flow, "first.0/reserve/undo")
    assert flow.returned == "won"


def test_a_losers_call_under_way_is_withdrawn_and_undone_as_unknown_when_it_has_settled() -> None:
    """9"""

    async def races(ctx: Context, n: int) -> str:
        return await ctx.first(ctx.call("s", "slow", undo=UNDO), ctx.call("s", "quick"))

    sent, never_sent = bare(races), bare(races)
    for machine in (sent, never_sent):
        done(machine, "first.1/quick")
        assert (open_in(machine), machine.settling()) == ([], ["first.0/slow"])
        assert [back.path for back in machine.follows.of(TakenBack)] == ["first.0/slow"]

    unknown(sent, "first.0/slow")
    refused(never_sent, "first.0/slow", "never-sent")

    assert (open_in(sent), sent.new[-1].data["known"]) == (["first.0/slow/undo"], False)
    assert (undone(never_sent.new), never_sent.status) == ([], "completed")
    sent.evict()


def test_an_error_in_all_that_is_caught_leaves_what_was_done_registered_in_the_scope_around() -> None:
    """10"""

    async def tries(ctx: Context, n: int) -> str:
        try:
            await ctx.all(ctx.call("s", "a", undo=UNDO), ctx.call("s", "b"), ctx.call("s", "c"))
        except StepRefused:
            await ctx.call("s", "instead")
        if n:
            raise ValueError("after all")
        return "well"

    flow = driven(tries)
    done(flow, "all.0/a")
    refused(flow, "all.1/b")

    assert flow.open == ["instead"]
    assert "withdrawn all.2/c" in said(flow.journal)
    done(flow, "instead")
    assert flow.open == ["all.0/a/undo"]


# ---- cancelling ------------------------------------------------------------------------------------------------


@workflow(name="cleans", version="1")
async def cleans(ctx: Context, n: int) -> None:
    async def careful() -> None:
        try:
            await ctx.sleep(days(1))
        finally:
            await ctx.call("s", "close")
            await ctx.call("s", "close")

    await ctx.all(careful(), ctx.call("s", "other"))


def test_a_finally_that_calls_works_on_cancel_and_the_fork_waits_for_it() -> None:
    """11"""
    flow = FlowTester(cleans, 1)

    flow.cancels()

    assert flow.open == ["all.0/close"]
    done(flow, "all.0/close", "all.0/close#2")
    assert flow.status == "cancelled"


def test_a_second_cancel_during_that_finally_is_not_thrown_again() -> None:
    """12"""
    flow = FlowTester(cleans, 1)
    flow.cancels()

    flow.cancels(reason="again")
    done(flow, "all.0/close")
    flow.cancels(reason="and again")

    assert flow.open == ["all.0/close#2"]
    done(flow, "all.0/close#2")
    assert flow.status == "cancelled"


@workflow(name="tries", version="1")
async def tries(ctx: Context, n: int) -> str:
    try:
        async with ctx.saga():
            await ctx.call("s", "a", undo=UNDO)
            await ctx.call("s", "b")
    except StepRefused:
        await ctx.call("s", "next")
    return "well"


def undoing() -> FlowTester[int, str]:
    """`tries` while its inner scope is undone."""
    flow = FlowTester(tries, 1)
    done(flow, "a")
    refused(flow, "b")
    assert flow.open == ["a/undo"]
    return flow


def test_a_cancel_while_an_undo_runs_is_delivered_after_it() -> None:
    """13"""
    flow = undoing()

    flow.cancels()

    assert (flow.status, flow.open) == ("open", ["a/undo"])
    done(flow, "a/undo")
    assert flow.status == "cancelled"


def test_a_cancel_that_came_while_a_scope_was_undone_is_thrown_at_the_next_await() -> None:
    """14"""
    flow = undoing()
    flow.cancels()

    done(flow, "a/undo")

    assert (flow.status, flow.told) == ("cancelled", ["a", "b", "a/undo"])


def test_who_catches_base_exception_and_returns_completes() -> None:
    """15"""

    async def deaf(ctx: Context, n: int) -> str:
        try:
            await ctx.sleep(days(1))
        except BaseException:  # noqa: BLE001  # that is the case
            return "did not listen"
        return "slept"

    flow = driven(deaf)

    flow.cancels()

    assert (flow.status, flow.returned) == ("completed", "did not listen")


# ---- leaving a scope -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["return", "break", "continue"])
def test_return_break_and_continue_leave_a_scope_well_and_nothing_is_undone(how: str) -> None:
    """16"""

    async def leaves(ctx: Context, n: int) -> str:
        for _ in range(2):
            async with ctx.saga("part"):
                await ctx.call("s", "a", undo=UNDO)
                if how == "return":
                    return how
                if how == "break":
                    break
                continue
        return how

    flow = driven(leaves)
    finish(flow)

    assert (flow.returned, undone(flow.journal)) == (how, [])


def test_control_flow_by_an_exception_through_a_scope_undoes_it() -> None:
    """17"""

    class Enough(Exception): ...

    def enough() -> None:
        raise Enough

    async def leaves(ctx: Context, n: int) -> str:
        try:
            async with ctx.saga("part"):
                await ctx.call("s", "a", undo=UNDO)
                enough()
        except Enough:
            return "enough"
        return "went on"

    flow = driven(leaves)

    done(flow, "part/a")

    assert flow.open == ["part/a/undo"]
    done(flow, "part/a/undo")
    assert flow.returned == "enough"


# ---- undoing ---------------------------------------------------------------------------------------------------


def test_a_local_function_that_raised_to_the_end_is_undone_and_one_that_refused_is_not() -> None:
    """18"""

    async def works(ctx: Context, n: int) -> None:
        await ctx.step(work, undo=local(unwork), retry=Retry(attempts=1))

    raised, refuses = driven(works), driven(works)

    raised.expect(work).raises("raised", "ValueError: no")
    refuses.expect(work).refuses(Refused("sold-out").code)

    assert (raised.open, refuses.status) == (["work/undo"], "failed")
    done(raised, "work/undo")
    assert (raised.status, raised.error["type"]) == ("compensated", StepFailed.__name__)


def test_an_undo_that_needs_the_reply_of_what_is_unknown_asks_a_person() -> None:
    """19"""

    async def charges(ctx: Context, n: int) -> None:
        await ctx.call("s", "charge", undo=lambda reply: command("s", "refund", reply) if reply else None)

    flow = driven(charges)

    unknown(flow, "charge")

    assert (flow.status, flow.open) == ("held", [])
    assert flow.machine.held is not None
    assert (flow.machine.held.code, flow.machine.held.path) == ("undo-unknown", "charge/undo")
    flow.resolves("charge/undo", "done")
    assert flow.status == "compensated"


def test_an_undo_function_that_raises_is_a_fault_of_the_program() -> None:
    """20"""

    def undo(reply: Json) -> Any:
        return command("s", "refund", reply["charge"])

    async def charges(ctx: Context, n: int) -> None:
        await ctx.call("s", "charge", undo=lambda reply: None if reply is None else undo(reply))

    flow = driven(charges)

    with pytest.raises(ProgramFault, match="the undo of charge raised KeyError: 'charge'"):
        done(flow, "charge", value={"no": "charge"})


def exact(reply: Json) -> Any:
    return command("s", "undo", reply)


@workflow(name="charges", version="1")
async def charges(ctx: Context, n: int) -> None:
    await ctx.call("s", "charge", undo=exact)


def test_a_late_reply_while_its_undo_runs_lets_it_go_on_and_its_retry_is_exact() -> None:
    """21"""
    flow = FlowTester(charges, 1)
    unknown(flow, "charge")

    done(flow, "charge", value={"charge": 7})

    assert (flow.open, flow.machine.open["charge/undo"][1].args["data"]) == (["charge/undo"], None)
    flow.tell("ended", "charge/undo", {"outcome": "failed", "error": {"code": "broken"}})
    flow.resolves("charge/undo", "retry")
    assert flow.machine.open["charge/undo#2"][1].args["data"] == {"charge": 7}


def test_a_late_refusal_while_its_undo_runs_is_ignored() -> None:
    """22"""
    flow = FlowTester(charges, 1)
    unknown(flow, "charge")

    refused(flow, "charge", "undone-before-done")

    assert flow.open == ["charge/undo"]
    done(flow, "charge/undo")
    assert flow.status == "compensated"


def test_a_late_refusal_that_empties_a_scope_while_it_is_undone_releases_it_at_once() -> None:
    """23"""

    async def pays(ctx: Context, n: int) -> str:
        try:
            async with ctx.saga():
                await ctx.call("s", "a", undo=UNDO, timeout=minutes(1))
        except OutcomeUnknown:
            return "went on"
        return "paid"

    machine = bare(pays)
    machine.fire(NOON + minutes(1))
    assert (machine.status, open_in(machine)) == ("open", [])

    refused(machine, "a", "never-sent")

    assert (machine.result, undone(machine.new)) == ("went on", [])


@workflow(name="pairs", version="1")
async def pairs(ctx: Context, n: int) -> None:
    async def pair(name: str) -> None:
        async with ctx.saga(name):
            await ctx.call("s", "p", undo=undoes(f"{name}p"))
            await ctx.call("s", "q", undo=undoes(f"{name}q"))
            await ctx.call("s", "last")

    await ctx.all(pair("x"), pair("y"))


def paired() -> FlowTester[int, None]:
    flow = FlowTester(pairs, 1)
    done(flow, "all.0/x/p", "all.1/y/p", "all.1/y/q", "all.0/x/q")
    return flow


def test_scopes_of_parallel_branches_that_are_cancelled_are_undone_in_one_strict_reverse_order() -> None:
    """24"""
    flow = paired()

    flow.cancels()
    finish(flow)

    assert undone(flow.journal) == ["all.0/x/q", "all.1/y/q", "all.1/y/p", "all.0/x/p"]
    assert flow.status == "cancelled"


def test_a_scope_that_fails_by_itself_is_undone_before_its_sibling_is_cancelled() -> None:
    """25"""
    flow = paired()

    refused(flow, "all.0/x/last")
    assert flow.open == ["all.1/y/last", "all.0/x/q/undo"]
    done(flow, "all.0/x/q/undo", "all.0/x/p/undo")
    finish(flow)

    assert undone(flow.journal) == ["all.0/x/q", "all.0/x/p", "all.1/y/q", "all.1/y/p"]
    assert said(flow.journal).index("withdrawn all.1/y/last") > said(flow.journal).index(
        "ended all.0/x/p/undo"
    )
    assert flow.status == "compensated"


def test_a_step_that_is_done_n_times_in_a_loop_is_undone_n_times_each_once() -> None:
    """26"""

    async def loops(ctx: Context, n: int) -> None:
        for _ in range(3):
            await ctx.call("s", "a", undo=UNDO)
        raise ValueError("undo it")

    flow = driven(loops)
    done(flow, "a", "a#2", "a#3")
    finish(flow)

    assert undone(flow.journal) == ["a#3", "a#2", "a"]
    assert flow.told[3:] == ["a#3/undo", "a#2/undo", "a/undo"]


# ---- code that changed -----------------------------------------------------------------------------------------


def both(*names: str, data: Json = None) -> Callable[[Context, int], Coroutine[Any, Any, None]]:
    """A flow with a branch for each of `names`."""

    async def calls(ctx: Context, n: int) -> None:
        await ctx.all(*(ctx.call("s", name, data) for name in names))

    return calls


def test_branches_in_another_order_are_found_at_the_first_difference() -> None:
    """27"""
    journal = driven(both("a", "b")).journal
    machine = Machine(flow_of(both("b", "a")).program)

    with pytest.raises(
        NonDeterminism,
        match=r"has asked call a at 'all\.0/a' at position 2; the program says .* at 'all\.0/b'",
    ):
        machine.replay(journal)
    machine.evict()


def test_other_arguments_in_new_code_are_no_difference_the_recorded_ones_were_sent() -> None:
    """28"""
    journal = driven(both("a", data={"v": 1})).journal
    machine = Machine(flow_of(both("a", data={"v": 2})).program)

    machine.replay(journal)

    assert (machine.new, machine.open["all.0/a"][1].args["data"]) == ([], {"v": 1})
    machine.evict()


def test_a_step_that_is_appended_after_the_recorded_past_is_asked() -> None:
    """29"""

    async def longer(ctx: Context, n: int) -> None:
        await both("a")(ctx, n)
        await ctx.call("s", "b")

    journal = driven(both("a")).journal
    machine = Machine(flow_of(longer).program)
    machine.replay(journal)

    done(machine, "all.0/a")

    assert open_in(machine) == ["b"]
    machine.evict()


# ---- events ----------------------------------------------------------------------------------------------------


def test_a_patch_that_was_first_met_in_the_past_stays_false_for_the_epoch() -> None:
    """30"""

    async def old(ctx: Context, n: int) -> None:
        for _ in range(3):
            await ctx.call("s", "a")

    async def new(ctx: Context, n: int) -> None:
        for _ in range(3):
            if ctx.patched("check"):
                await ctx.call("s", "check")
            await ctx.call("s", "a")

    flow = driven(old)
    done(flow, "a")
    machine = Machine(flow_of(new).program)
    machine.replay(flow.journal)
    done(machine, "a#2", "a#3")

    assert machine.status == "completed"
    assert not [line for line in said(machine.new) if "check" in line]


def test_events_that_came_before_anybody_waited_are_given_the_oldest_first() -> None:
    """31"""

    async def waits(ctx: Context, n: int) -> list[int]:
        await ctx.sleep(days(1))
        return [await ctx.event("e") for _ in range(3)]

    flow = driven(waits)
    for n in (1, 2, 3):
        flow.receives("e", data=n)

    flow.passes(days(1))

    assert flow.returned == [1, 2, 3]


def test_of_two_branches_that_wait_for_the_same_the_one_that_waited_longer_gets_it_and_each_gets_one() -> (
    None
):
    """32"""

    async def waits(ctx: Context, n: int) -> tuple[int, ...]:
        async def later() -> int:
            await ctx.sleep(hours(1))
            return await ctx.event("e")

        return await ctx.all(later(), ctx.event("e"), ctx.event("e"))

    flow = driven(waits)
    flow.passes(hours(1))

    for n in (1, 2, 3):
        flow.receives("e", data=n)

    assert flow.returned == (3, 1, 2)


def test_an_event_that_comes_after_its_wait_timed_out_stays_for_the_next() -> None:
    """33"""

    async def waits(ctx: Context, n: int) -> str:
        try:
            return await ctx.event("e", timeout=hours(1))
        except TimedOut:
            await ctx.sleep(hours(1))
        return await ctx.event("e")

    flow = driven(waits)
    flow.passes(hours(1))

    flow.receives("e", data="late")
    assert flow.open == ["sleep"]
    flow.passes(hours(1))

    assert flow.returned == "late"


# ---- what a program may not do ---------------------------------------------------------------------------------


class Future:
    """What a library gives that has a loop of its own."""

    def __await__(self) -> Generator[object, None, None]:
        yield self


def test_events_that_nobody_took_go_along_in_their_order() -> None:
    """34"""

    async def asks(ctx: Context, n: int) -> list[int]:
        first = await ctx.event("E")
        if n == 1:
            await ctx.call("s", "a")
            ctx.continue_as_new(2)
        second = await ctx.event("E")
        return [first["n"], second["n"]]

    flow = driven(asks)
    for number in (1, 2, 3):
        flow.receives("E", data={"n": number})
    done(flow, "a")

    assert flow.returned == [2, 3]


@pytest.mark.parametrize("mode", ["all", "first"])
def test_a_flow_continues_as_new_in_no_branch_and_with_nothing_left_to_undo(mode: str) -> None:
    """35"""

    async def goes_on(ctx: Context) -> str:
        try:
            ctx.continue_as_new(2)
        except UsageError as error:
            return str(error)

    async def branches(ctx: Context, n: int) -> str:
        return str(await getattr(ctx, mode)(goes_on(ctx)))

    async def undoes_left(ctx: Context, n: int) -> str:
        await ctx.call("s", "a", undo=UNDO)
        return await goes_on(ctx)

    assert "inside a branch" in driven(branches).returned
    flow = driven(undoes_left)
    done(flow, "a")
    assert "a would not be undone any more" in flow.returned


@pytest.mark.parametrize("foreign", [lambda: asyncio.sleep(0), Future], ids=["sleep", "future"])
def test_a_foreign_await_is_a_type_error_at_its_line_that_says_what_to_use(
    foreign: Callable[[], Awaitable[None]],
) -> None:
    """36"""
    seen: list[str] = []

    async def waits(ctx: Context, n: int) -> None:
        try:
            await foreign()
        except TypeError as error:
            seen.append(str(error))
            raise

    machine = Machine(flow_of(waits).program)

    with pytest.raises(ProgramFault, match=r"TypeError: .* at .* \(tests\.core\.test_decisions:\d+\)"):
        machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    machine.evict()

    assert "use ctx.sleep for asyncio.sleep and ctx.step for any other I/O" in seen[0]


def test_a_context_used_from_a_step_or_a_callback_is_a_usage_error() -> None:
    """37"""
    kept: list[Context] = []

    async def leaks(ctx: Context, n: int) -> None:
        kept.append(ctx)
        await ctx.step(work)

    driven(leaks)

    for use in (kept[0].now, kept[0].uuid, kept[0].pivot):
        with pytest.raises(UsageError, match="only while the flow runs, not from a step or a callback"):
            use()


def test_one_coroutine_in_two_forks_is_pythons_own_error_and_holds() -> None:
    """38"""

    async def shares(ctx: Context, n: int) -> None:
        one = ctx.call("s", "a")
        await ctx.all(ctx.all(one), ctx.all(one))

    machine = Machine(flow_of(shares).program)

    with pytest.raises(ProgramFault, match="cannot reuse already awaited coroutine"):
        machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    machine.evict()


def test_now_is_the_same_within_one_resume_and_moves_with_facts() -> None:
    """39"""

    async def looks(ctx: Context, n: int) -> list[str]:
        times = [ctx.now(), ctx.now()]
        await ctx.sleep(hours(1))
        return [str(time - NOON) for time in (*times, ctx.now(), ctx.now())]

    flow = driven(looks)
    flow.passes(minutes(59))
    flow.passes(hours(1))

    assert flow.returned == ["0:00:00", "0:00:00", "1:00:00", "1:00:00"]


def test_what_is_let_go_runs_its_cleanup_asks_nothing_and_records_nothing() -> None:
    """40"""
    reached: list[str] = []

    async def parked(ctx: Context, n: int) -> None:
        async def branch(name: str) -> None:
            try:
                async with ctx.saga(name):
                    await ctx.call("s", "a", undo=UNDO)
            finally:
                reached.append(name)
                await ctx.call("s", "close")
                reached.append("never")

        await ctx.all(branch("x"), branch("y"))

    machine = bare(parked)
    before = said(machine.new)

    machine.evict()

    assert (sorted(reached), said(machine.new)) == (["x", "y"], before)


def test_a_reply_that_fails_its_model_is_done_and_its_undo_stays() -> None:
    """41"""

    async def pays(ctx: Context, n: int) -> None:
        try:
            await ctx.call(Charge(order="A"), undo=UNDO)
        except ReplyInvalid:
            await ctx.call("s", "tell")
            raise

    flow = driven(pays)

    done(flow, "charge", value={"nothing": "of this"})
    done(flow, "tell")

    assert flow.open == ["charge/undo"]


def test_mail_for_what_has_finished_is_no_fact() -> None:
    """42"""

    async def calls(ctx: Context, n: int) -> None:
        await ctx.first(ctx.call("s", "a"), ctx.call("s", "b"))

    flow = driven(calls)
    done(flow, "first.0/a")
    length = len(flow.journal)

    done(flow, "first.1/b")
    flow.receives("e")
    flow.cancels()

    assert (len(flow.journal), flow.status) == (length, "completed")


def test_a_branch_that_is_just_being_resumed_gets_its_value_and_cancelled_at_its_next_await() -> None:
    """43"""
    got: list[object] = []

    async def both_resume(ctx: Context, n: int) -> None:
        async def fails() -> None:
            await ctx.all(at_once("none"))
            raise ValueError("as written")

        async def resumed() -> None:
            got.append(await ctx.all(at_once("one")))
            try:
                await ctx.call("s", "never")
            except Cancelled as stopped:
                got.append(str(stopped))
                raise

        async def ends_its_scope() -> None:
            async with ctx.saga():
                got.append(await ctx.all(at_once("two")))
            got.append("never")

        await ctx.all(fails(), resumed(), ends_its_scope())

    machine = bare(both_resume)

    assert (machine.status, said(machine.new)) == ("failed", ["started", "finished failed"])
    assert got == [("one",), ("two",), "a sibling decided"]


def test_a_bug_inside_an_inner_scope_undoes_nothing_and_goes_on_after_a_deploy() -> None:
    """44"""
    mended = False

    async def buggy(ctx: Context, n: int) -> str:
        async with ctx.saga("outer"):
            await ctx.call("s", "a", undo=UNDO)
            async with ctx.saga("inner"):
                await ctx.call("s", "b", undo=UNDO)
                if not mended:
                    raise AttributeError("no such thing")
        return "well"

    machine = bare(buggy)
    done(machine, "outer/a")
    with pytest.raises(ProgramFault, match="AttributeError: no such thing"):
        done(machine, "outer/inner/b")
    machine.remark("held", "", {"code": ProgramFault.code, "reason": ""}, NOON)
    machine.evict()
    journal = machine.take_new()

    mended = True
    again = Machine(flow_of(buggy).program)
    again.replay(journal)

    assert undone(journal) == []
    assert (again.result, undone(again.new)) == ("well", [])


def test_an_input_that_no_longer_fits_holds_before_the_new_version_asks_for_anything() -> None:
    """45. An execution stays on the version that it was started with; there is no way yet to move it."""

    class Order(BaseModel):
        id: str

    @workflow(name="orders", version="1")
    async def orders(ctx: Context, order: Charged) -> None:
        await ctx.call("s", "a")

    machine = Machine(orders.program)

    with pytest.raises(InputInvalid, match="the input does not fit flow orders: at /charge: Field required"):
        machine.tell("started", "", {"input": Order(id="A").model_dump(), "seed": ""}, NOON)

    assert said(machine.new) == ["started"]
    machine.evict()


# ---- the table is whole ----------------------------------------------------------------------------------------


def test_every_decision_is_told_once_in_its_order() -> None:
    tests = [value for name, value in globals().items() if name.startswith("test_") and value.__doc__]
    rows = [int(test.__doc__.split(".")[0]) for test in tests]

    assert rows == list(range(1, 46))
