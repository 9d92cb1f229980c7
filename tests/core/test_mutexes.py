"""Mutexes of steps and of flows: when they are asked for, and until which fact they are had."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import (
    Command,
    Context,
    OutcomeUnknown,
    StepRefused,
    TimedOut,
    UsageError,
    command,
    hours,
    local,
    minutes,
    workflow,
)
from orchestrator.core.fact import Fact
from orchestrator.core.follows import LetGo
from orchestrator.core.machine import Machine
from orchestrator.core.mutexes import FLOW
from orchestrator.core.waiting import open_in
from orchestrator.testing import EXECUTION, NOON, FlowTester
from tests.core.answers import bare, cancelled, done, driven, refused, said, tell

Json = Any

GRANTED: Json = {"outcome": "done", "value": None}
KEY = "card-7"


def work() -> None: ...


class Work(Command[Json], type="work"):
    """What a worker of queues would do."""


async def book(conn: Any) -> str:
    return "booked"


async def calls(ctx: Context, n: int) -> str:
    return await ctx.call("s", "charge", mutex=KEY, timeout=hours(1), undo=command("s", "undo"))


def let_go(machine: Machine) -> list[str]:
    return [one.path for one in machine.follows.of(LetGo)]


def with_turn(fn: Any) -> Machine:
    """`fn` begun, and given the first mutex that it asks for."""
    machine = bare(fn)
    tell(machine, "ended", next(iter(machine.open)), GRANTED)
    return machine


# ---- when ------------------------------------------------------------------------------------------------------


def test_a_step_with_a_mutex_is_asked_for_when_it_is_its_turn() -> None:
    machine = bare(calls)
    assert said(machine.new) == ["started", "asked charge/mutex"]
    assert machine.new[1].data == {"kind": "mutex", "name": "charge", "args": {"key": KEY}}

    tell(machine, "ended", "charge/mutex", GRANTED)
    assert list(machine.open) == ["charge"]
    done(machine, "charge", value="c")

    assert (machine.status, machine.result) == ("completed", "c")
    assert let_go(machine) == ["charge/mutex"]


def test_the_time_to_wait_for_a_mutex_is_not_the_steps() -> None:
    machine = bare(calls)

    machine.tell("ended", "charge/mutex", GRANTED, NOON + hours(5))

    assert machine.next_due() == (NOON + hours(6), "charge")
    machine.evict()


def test_who_bounds_the_waiting_withdraws_it_and_nothing_was_asked() -> None:
    async def flow(ctx: Context, n: int) -> str:
        try:
            await ctx.within(minutes(5), ctx.step(work, mutex=KEY))
        except TimedOut:
            return "too long"
        return "done"

    machine = bare(flow)
    machine.fire(NOON + minutes(5))

    assert machine.result == "too long"
    assert [fact.path for fact in machine.new if fact.kind == "withdrawn"] == ["within.0/work/mutex"]
    assert let_go(machine) == ["within.0/work/mutex"]


def test_a_mutex_that_comes_after_it_was_withdrawn_changes_nothing() -> None:
    async def flow(ctx: Context, n: int) -> None:
        await ctx.within(minutes(5), ctx.step(work, mutex=KEY))

    async def catches(ctx: Context, n: int) -> None:
        try:
            await flow(ctx, n)
        except TimedOut:
            await ctx.sleep(hours(1))

    machine = bare(catches)
    machine.fire(NOON + minutes(5))
    tell(machine, "ended", "within.0/work/mutex", GRANTED)

    assert said(machine.new)[-1] == "late within.0/work/mutex"
    assert machine.mutexes.held == {}
    machine.evict()


@pytest.mark.parametrize("kind", ["call", "step", "task", "transaction"])
def test_each_kind_of_work_may_have_a_mutex(kind: str) -> None:
    async def flow(ctx: Context, n: int) -> Json:
        match kind:
            case "call":
                return await ctx.call("s", "work", mutex=KEY)
            case "step":
                return await ctx.step(work, mutex=KEY)
            case "task":
                return await ctx.task(Work(), queue="q", mutex=KEY)
            case _:
                return await ctx.transaction(book, mutex=KEY, name="work")

    tester = driven(flow)

    assert tester.told == ["work/mutex", "work"]
    done(tester, "work", value=None if kind != "transaction" else "booked")
    assert tester.status == "completed"


@pytest.mark.parametrize(
    "key", ["", "x" * 1025, "two\nlines", 7], ids=["none", "long", "unprintable", "a-number"]
)
def test_a_key_that_cannot_be_one_is_refused_and_nothing_is_asked(key: Any) -> None:
    async def flow(ctx: Context, n: int) -> None:
        for op in (
            ctx.call("s", "charge", mutex=key),
            ctx.step(work, mutex=key),
            ctx.transaction(book, mutex=key),
            ctx.task(Work(), queue="q", mutex=key),
        ):
            with pytest.raises(UsageError, match="mutex= expected 1 to 1024 bytes of printable text"):
                await op

    assert said(driven(flow).journal) == ["started", "finished completed"]


# ---- until when ------------------------------------------------------------------------------------------------


def test_a_refused_step_lets_its_mutex_go() -> None:
    machine = with_turn(calls)

    refused(machine, "charge")

    assert (machine.status, let_go(machine)) == ("failed", ["charge/mutex"])


def test_a_step_has_its_mutex_between_its_tries() -> None:
    async def flow(ctx: Context, n: int) -> None:
        await ctx.step(work, mutex=KEY)

    machine = with_turn(flow)
    machine.attempt_failed("work", {"code": "busy", "detail": ""}, NOON)

    assert (machine.mutexes.held, let_go(machine)) == ({"work/mutex": KEY}, [])
    machine.evict()


async def timed_out(ctx: Context, n: int) -> None:
    try:
        await ctx.call("s", "charge", mutex=KEY, timeout=hours(1))
    except OutcomeUnknown:
        await ctx.sleep(hours(5))


def test_a_call_that_timed_out_has_its_mutex_until_it_is_known_what_became_of_it() -> None:
    machine = with_turn(timed_out)
    machine.fire(NOON + hours(1))
    assert (list(machine.open), let_go(machine)) == (["sleep"], [])

    tell(machine, "ended", "charge", {"outcome": "refused", "error": {"code": "never-sent"}})

    assert (machine.mutexes.held, let_go(machine)) == ({}, ["charge/mutex"])
    machine.evict()


def test_a_step_that_is_stopped_while_it_runs_has_its_mutex_until_it_has_ended() -> None:
    async def flow(ctx: Context, n: int) -> None:
        try:
            await ctx.within(minutes(5), ctx.step(work, mutex=KEY))
        except TimedOut:
            await ctx.sleep(hours(5))

    machine = with_turn(flow)
    machine.fire(NOON + minutes(5))
    assert (machine.settling(local=True), let_go(machine)) == (["within.0/work"], [])

    machine.attempt_failed("within.0/work", {"code": "stopped", "detail": ""}, NOON, unknown=True)

    assert (machine.settling(), let_go(machine)) == ([], ["within.0/work/mutex"])
    machine.evict()


def test_a_step_whose_worker_died_after_its_time_was_over_lets_its_mutex_go() -> None:
    async def flow(ctx: Context, n: int) -> None:
        try:
            await ctx.step(work, mutex=KEY, timeout=minutes(5))
        except OutcomeUnknown:
            await ctx.sleep(hours(5))

    machine = with_turn(flow)
    machine.fire(NOON + minutes(5))
    facts = machine.take_new()
    machine.evict()
    death = Fact(len(facts) + 1, "orphaned", "", {}, NOON + hours(1))

    again = replayed(flow, [*facts, death])
    later = replayed(flow, [*facts, death, *slept(flow, [*facts, death])])

    assert (again.mutexes.held, let_go(again)) == ({}, ["work/mutex"])
    assert let_go(later) == []  # the turn after the death did it
    again.evict()
    later.evict()


def slept(fn: Any, journal: list[Fact]) -> list[Fact]:
    machine = replayed(fn, journal)
    machine.fire(NOON + hours(9))
    return machine.new


def replayed(fn: Any, journal: list[Fact]) -> Machine:
    machine = Machine(workflow(name=fn.__name__, version="1")(fn).program)
    machine.replay(journal)
    return machine


def test_a_transaction_that_was_stored_alone_lets_its_mutex_go_with_the_next_turn() -> None:
    async def flow(ctx: Context, n: int) -> None:
        await ctx.transaction(book, mutex=KEY)
        await ctx.sleep(hours(1))

    machine = with_turn(flow)
    before = machine.take_new()
    fact = machine.foresee("book", "booked", NOON)
    machine.believe(fact)
    after = machine.take_new()
    assert let_go(machine) == ["book/mutex"]
    machine.evict()

    crashed, went_on = replayed(flow, [*before, fact]), replayed(flow, [*before, fact, *after])

    assert (let_go(crashed), let_go(went_on)) == (["book/mutex"], [])
    crashed.evict()
    went_on.evict()


def test_a_step_that_a_person_has_to_decide_about_has_its_mutex_until_then() -> None:
    async def flow(ctx: Context, n: int) -> None:
        await ctx.call("s", "charge", mutex=KEY, unknown="hold")

    machine = with_turn(flow)
    tell(machine, "ended", "charge", {"outcome": "unknown", "error": {"code": "sent"}})
    assert (machine.mutexes.held, let_go(machine)) == ({"charge/mutex": KEY}, [])

    tell(machine, "resolved", "charge", {"verdict": "done", "value": None, "by": "ann", "reason": ""})

    assert let_go(machine) == ["charge/mutex"]


def test_an_end_lets_go_what_has_not_settled() -> None:
    async def flow(ctx: Context, n: int) -> None:
        try:
            await ctx.call("s", "charge", mutex=KEY, timeout=hours(1))
        except OutcomeUnknown:
            return

    machine = with_turn(flow)
    machine.fire(NOON + hours(1))

    assert (machine.status, let_go(machine)) == ("completed", ["charge/mutex"])


def test_a_program_that_was_stopped_keeps_what_its_last_fact_let_go() -> None:
    async def flow(ctx: Context, n: int) -> None:
        await ctx.call("s", "charge", mutex=KEY)
        raise TypeError("a bug")

    machine = with_turn(flow)
    with pytest.raises(BaseException, match="a bug"):
        done(machine, "charge")

    assert let_go(machine) == ["charge/mutex"]


def test_two_branches_wait_for_one_key_in_turn() -> None:
    async def flow(ctx: Context, n: int) -> Json:
        return await ctx.all(ctx.call("s", "a", mutex=KEY), ctx.call("s", "b", mutex=KEY))

    tester = driven(flow)
    assert tester.open == ["all.1/b/mutex", "all.0/a"]

    done(tester, "all.0/a", value=1)
    done(tester, "all.1/b", value=2)

    assert list(tester.returned) == [1, 2]


def test_a_loop_asks_for_its_mutex_each_time() -> None:
    async def flow(ctx: Context, n: int) -> None:
        for _ in range(2):
            await ctx.call("s", "a", mutex=KEY)

    tester = driven(flow)
    done(tester, "a")
    done(tester, "a#2")

    assert tester.told == ["a/mutex", "a", "a#2/mutex", "a#2"]


# ---- of a whole flow -------------------------------------------------------------------------------------------


@workflow(name="one-a-customer", version="1", mutex=lambda customer: f"customer-{customer}")
async def one_a_customer(ctx: Context, customer: int) -> str:
    await ctx.call("s", "a", undo=local(work))
    if customer < 3:
        ctx.pivot()
        ctx.continue_as_new(3)
    return await ctx.call("s", "b", mutex=KEY)


def started(customer: int) -> Machine:
    machine = Machine(one_a_customer.program)
    machine.tell("started", "", {"input": customer, "seed": ""}, NOON)
    return machine


def test_a_flow_with_a_mutex_asks_for_it_before_all_else_and_has_it_until_all_is_undone() -> None:
    machine = started(7)
    assert said(machine.new) == ["started", "asked flow:mutex"]
    assert machine.new[1].data["args"] == {"key": "customer-7"}
    tell(machine, "ended", FLOW, GRANTED)

    done(machine, "a")
    tell(machine, "ended", "b/mutex", GRANTED)
    refused(machine, "b")
    assert (list(machine.open), let_go(machine)) == (["a/undo"], ["b/mutex"])
    done(machine, "a/undo")

    assert (machine.status, let_go(machine)) == ("compensated", ["b/mutex", FLOW])


def test_a_flow_that_continues_as_new_has_its_mutex_on() -> None:
    machine = started(1)
    tell(machine, "ended", FLOW, GRANTED)
    done(machine, "a")
    assert (machine.continues, let_go(machine)) == (True, [])

    again = Machine(one_a_customer.program)
    again.replay(machine.new)

    assert again.mutexes.held == {FLOW: "customer-1"}
    assert list(again.open) == ["a"]
    again.evict()


def test_a_flow_that_is_cancelled_while_it_waits_for_its_mutex_has_done_nothing() -> None:
    machine = started(7)

    cancelled(machine)

    assert (machine.status, let_go(machine)) == ("cancelled", [FLOW])


def test_a_key_of_a_flow_that_cannot_be_one_fails_it() -> None:
    @workflow(name="keyless", version="1", mutex=lambda _: "")
    async def keyless(ctx: Context, n: int) -> None: ...

    tester = FlowTester(keyless, 1)

    assert (tester.status, tester.error["type"]) == ("failed", "UsageError")


def test_a_mutex_of_a_flow_is_a_function() -> None:
    with pytest.raises(UsageError, match="workflow x: mutex= expected a function from the input to a key"):
        workflow(name="x", version="1", mutex="k")  # pyright: ignore[reportArgumentType]  # it is refused


# ---- of a family -----------------------------------------------------------------------------------------------


@workflow(name="plain", version="1")
async def plain(ctx: Context, customer: int) -> str:
    return await ctx.call("s", "a", mutex=KEY)


@workflow(name="of-children", version="1")
async def of_children(ctx: Context, customer: int) -> list[str]:
    found = [await ctx.child(plain, customer)]
    try:
        found.append(await ctx.child(one_a_customer, customer))
    except StepRefused as error:
        found.append(error.code)
    return found


@workflow(name="of-children-alone", version="1", mutex=lambda customer: f"customer-{customer}")
async def of_children_alone(ctx: Context, customer: int) -> list[str]:
    return await of_children.run(ctx, customer)


@pytest.mark.parametrize("whose", ["its own", "one above"])
def test_a_flow_that_has_a_mutex_or_is_below_one_has_no_child_that_waits_for_one(whose: str) -> None:
    below: Json = {"under_mutex": True} if whose == "one above" else {}
    machine = Machine((of_children if below else of_children_alone).program, execution=EXECUTION)
    machine.tell("started", "", {"input": 7, "seed": ""} | below, NOON)
    if not below:
        tell(machine, "ended", FLOW, GRANTED)
    done(machine, "plain", value="p")

    assert (machine.status, machine.result) == ("completed", ["p", "mutex-inside"])
    [asked] = [fact for fact in machine.new if (fact.kind, fact.path) == ("asked", "one-a-customer")]
    assert "args" not in asked.data
    again = Machine((of_children if below else of_children_alone).program, execution=EXECUTION)
    again.replay(machine.new)
    assert again.result == machine.result


def test_a_flow_without_a_mutex_may_have_children_with_one() -> None:
    machine = Machine(of_children.program, execution=EXECUTION)
    machine.tell("started", "", {"input": 7, "seed": ""}, NOON)
    done(machine, "plain", value="p")

    assert list(machine.open) == ["one-a-customer"]
    machine.evict()


def test_a_child_that_turns_out_to_have_a_mutex_below_one_fails_before_it_waits_for_it() -> None:
    machine = Machine(one_a_customer.program)

    machine.tell("started", "", {"input": 7, "seed": "", "under_mutex": True}, NOON)

    assert said(machine.new) == ["started", "finished failed"]
    assert "mutex-inside" in str(machine.result)


def test_that_one_above_has_a_mutex_is_known_in_each_epoch() -> None:
    @workflow(name="again", version="1")
    async def again(ctx: Context, n: int) -> None:
        if n:
            ctx.continue_as_new(0)
        await ctx.child(one_a_customer, 7)

    machine = Machine(again.program, execution=EXECUTION)
    machine.tell("started", "", {"input": 1, "seed": "", "under_mutex": True}, NOON)
    following = Machine(again.program, execution=EXECUTION)
    following.replay(machine.new)

    assert following.result.code == "mutex-inside"


# ---- in a test of a flow ---------------------------------------------------------------------------------------


def test_a_tester_takes_a_key_and_frees_it() -> None:
    tester = FlowTester(one_a_customer, 7, taken=["customer-7"])
    assert tester.open == [FLOW]

    tester.frees("customer-7")

    assert tester.open == ["a"]
    with pytest.raises(AssertionError, match="expected one of none that is taken, not 'customer-7'"):
        tester.frees("customer-7")


def test_what_a_withdrawn_step_without_undo_keeps_is_in_the_journal() -> None:
    async def flow(ctx: Context, n: int) -> None:
        await ctx.first(ctx.call("s", "a", mutex=KEY), ctx.sleep(minutes(5)))
        await ctx.sleep(minutes(5))

    machine = bare(flow)
    tell(machine, "ended", "first.0/a/mutex", GRANTED)
    machine.fire(NOON + minutes(5))
    assert list(machine.mutexes.leaving) == ["first.0/a"]

    assert [ask.path for ask in open_in(machine.new).settling] == ["first.0/a"]
    tell(machine, "late", "first.0/a", {"outcome": "refused", "error": {"code": "never-sent"}})
    assert open_in(machine.new).settling == []
    machine.evict()
