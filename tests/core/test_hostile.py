"""Flows that do what no flow should: they are held, or they end; nothing else suffers for it."""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from orchestrator import Cancelled, Context, FlowError, UsageError, days, hours, local
from orchestrator.core.errors import Halt, NonDeterminism, ProgramFault
from orchestrator.core.follows import ClosedWait, TakenBack
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON
from tests.core.answers import (
    UNDO,
    bare,
    cancelled,
    done,
    driven,
    finish,
    flow_of,
    open_in,
    received,
    refused,
    said,
    undone,
)

Json = Any


async def at_once(value: str = "") -> str:
    return value


async def fails() -> str:
    raise ValueError("as written")


def work() -> None: ...


def stopped(fn: Callable[[Context, int], Coroutine[Any, Any, Any]], says: str) -> None:
    """`fn` is held as soon as it begins, and says why."""
    machine = Machine(flow_of(fn).program)
    with pytest.raises(ProgramFault, match=says):
        machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    assert said(machine.new) == ["started"]
    machine.evict()


# ---- coroutines ------------------------------------------------------------------------------------------------


def test_one_coroutine_twice_in_one_fork_is_held() -> None:
    async def shares(ctx: Context, n: int) -> None:
        one = ctx.call("s", "a")
        await ctx.settle(one, one)

    stopped(shares, "cannot reuse already awaited coroutine")


def test_one_coroutine_in_two_forks_is_held_though_it_catches_what_it_is_thrown() -> None:
    thrown: list[BaseException] = []

    async def shares(ctx: Context, n: int) -> None:
        async def deaf() -> str:
            while True:
                try:
                    return await ctx.call("s", "a")
                except Exception as error:  # noqa: BLE001  # that is the case
                    thrown.append(error)

        one = deaf()
        await ctx.settle(one, ctx.all(one))

    stopped(shares, "cannot reuse already awaited coroutine")
    assert thrown == []


def test_a_coroutine_that_runs_elsewhere_goes_on_when_a_branch_that_was_given_it_never_starts() -> None:
    async def shares(ctx: Context, n: int) -> list[str]:
        async def wraps(one: Coroutine[Any, Any, str]) -> str:
            return await one

        shared = ctx.call("s", "a")
        return list(
            await ctx.all(
                wraps(shared), ctx.first(at_once("x"), wraps(shared)), ctx.first(at_once("y"), shared)
            )
        )

    flow = driven(shares)

    done(flow, "all.0/a", value="a")

    assert flow.returned == ["a", "x", "y"]


@pytest.mark.parametrize("catches", [0, 99])
def test_a_foreign_await_in_a_branch_is_held_and_its_siblings_hear_nothing_of_it(catches: int) -> None:
    heard: list[str] = []

    async def waits(ctx: Context, n: int) -> None:
        async def foreign() -> None:
            for _ in range(catches):
                with suppress(TypeError):
                    await asyncio.sleep(0)
            await asyncio.sleep(0)

        async def sibling() -> None:
            try:
                await ctx.call("s", "a")
            except BaseException:
                heard.append("sibling")
                raise

        await ctx.all(sibling(), foreign())

    machine = Machine(flow_of(waits).program)
    with pytest.raises(ProgramFault, match=r"use ctx\.sleep for asyncio\.sleep"):
        machine.tell("started", "", {"input": 1, "seed": ""}, NOON)

    assert (heard, said(machine.new)) == ([], ["started"])
    machine.evict()


def test_a_flow_that_awaits_something_foreign_for_ever_and_catches_it_is_held() -> None:
    async def waits(ctx: Context, n: int) -> None:
        while True:
            with suppress(TypeError):
                await asyncio.sleep(0)

    stopped(waits, "use ctx.sleep for asyncio.sleep")


# ---- catching everything ---------------------------------------------------------------------------------------


def deaf_to_everything(*, asks: str) -> Callable[[Context, int], Coroutine[Any, Any, str]]:
    """A flow that catches whatever it is thrown, in its branches and around them, and goes on."""

    async def deaf(ctx: Context, n: int) -> str:
        async def branch(name: str) -> None:
            with suppress(BaseException):
                await ctx.call("s", name)
            with suppress(BaseException):
                async with ctx.saga("inner"):
                    await ctx.call("s", "more")

        with suppress(BaseException):
            await ctx.all(branch(asks), branch(asks))
        return "went on"

    return deaf


def test_a_flow_that_catches_everything_cannot_hide_that_it_differs_from_its_journal() -> None:
    journal = driven(deaf_to_everything(asks="a")).journal
    machine = Machine(flow_of(deaf_to_everything(asks="b")).program)

    with pytest.raises(NonDeterminism, match=r"has asked call a at 'all\.0/a'"):
        machine.replay(journal)
    assert (machine.new, machine.status) == ([], "open")
    machine.evict()


def test_a_flow_that_catches_everything_ends_when_it_returns_however_often_it_is_cancelled() -> None:
    flow = driven(deaf_to_everything(asks="a"))

    flow.cancels()
    flow.cancels()

    assert flow.open == ["all.0/inner/more", "all.1/inner/more"]
    finish(flow)
    assert flow.returned == "went on"


def test_cancelled_that_is_swallowed_in_a_loop_is_thrown_once_and_the_loop_goes_on() -> None:
    heard: list[str] = []

    async def loops(ctx: Context, n: int) -> str:
        for _ in range(3):
            try:
                await ctx.sleep(hours(1))
            except Cancelled as stop:
                heard.append(str(stop))
        return "slept"

    machine = bare(loops)

    for _ in range(3):
        cancelled(machine)

    assert (heard, open_in(machine)) == (["enough"], ["sleep#2"])
    machine.fire(NOON + hours(1))
    machine.fire(NOON + hours(2))
    assert machine.result == "slept"


@pytest.mark.parametrize("undo", [False, True])
def test_an_error_raised_in_a_finally_during_cancelled_takes_its_place(undo: bool) -> None:
    async def cleans(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=UNDO if undo else None)
        try:
            await ctx.sleep(days(1))
        finally:
            await fails()

    flow = driven(cleans)
    done(flow, "a")

    flow.cancels()
    finish(flow)

    assert (flow.status, undone(flow.journal)) == (("compensated", ["a"]) if undo else ("failed", []))
    assert flow.error["detail"] == "ValueError: as written"


def test_an_error_raised_in_a_finally_of_a_loser_changes_nothing_for_the_winner() -> None:
    async def races(ctx: Context, n: int) -> str:
        async def cleans() -> str:
            await ctx.call("s", "a", undo=UNDO)
            try:
                return await ctx.call("s", "slow")
            finally:
                await fails()

        return await ctx.first(cleans(), ctx.call("s", "b"))

    flow = driven(races)
    done(flow, "first.0/a")
    done(flow, "first.1/b", value="won")

    assert flow.open == ["first.0/a/undo"]
    done(flow, "first.0/a/undo")
    assert flow.returned == "won"


def test_a_bug_in_a_cleanup_during_cancelled_holds() -> None:
    async def cleans(ctx: Context, n: int) -> None:
        async def branch() -> None:
            try:
                await ctx.sleep(days(1))
            finally:
                raise AttributeError("a bug")

        await ctx.all(branch(), ctx.call("s", "a"))

    machine = bare(cleans)
    before = said(machine.new)

    with pytest.raises(ProgramFault, match="AttributeError: a bug"):
        cancelled(machine)

    assert said(machine.new) == [*before, "cancel_asked"]
    machine.evict()


# ---- scopes ----------------------------------------------------------------------------------------------------


def test_a_saga_that_is_entered_again_while_it_is_open_is_a_fault() -> None:
    async def nests(ctx: Context, n: int) -> None:
        scope = ctx.saga()
        async with scope, scope:
            await ctx.all()

    stopped(nests, "TypeError: a saga is left in the branch that entered it, and after those inside of it")


def test_a_saga_that_is_left_in_another_branch_is_a_fault() -> None:
    async def hands_over(ctx: Context, n: int) -> None:
        scope = ctx.saga("x")
        await scope.__aenter__()
        await ctx.all(scope.__aexit__(None, None, None), ctx.call("s", "a"))

    stopped(hands_over, "TypeError: a saga is left in the branch that entered it")


def test_a_saga_may_be_used_again_when_it_was_left() -> None:
    async def again(ctx: Context, n: int) -> None:
        scope = ctx.saga("x")
        for _ in range(2):
            async with scope:
                await ctx.call("s", "a", undo=UNDO)
        await fails()

    flow = driven(again)
    finish(flow)

    assert flow.told == ["x/a", "x#2/a", "x#2/a/undo", "x/a/undo"]


# ---- being stopped ---------------------------------------------------------------------------------------------


def test_nothing_follows_from_what_a_program_said_in_the_turn_that_stopped_it() -> None:
    mended = False

    async def breaks(ctx: Context, n: int) -> str:
        with suppress(FlowError):
            await ctx.all(
                ctx.call("s", "a"), ctx.call("s", "b"), ctx.event("e"), ctx.step(work, undo=local(work))
            )
        if not mended:
            raise AttributeError("a bug")
        return "mended"

    machine = bare(breaks)
    with pytest.raises(ProgramFault):
        refused(machine, "all.0/a")
    assert said(machine.new)[-1] == "ended all.0/a"
    assert (machine.follows.of(TakenBack), machine.follows.of(ClosedWait)) == ([], [])
    machine.remark("held", "", {"code": ProgramFault.code, "reason": ""}, NOON)
    machine.evict()

    mended = True
    again = Machine(flow_of(breaks).program)
    again.replay(machine.new)
    done(again, "all.3/work")

    assert [(back.path, back.position) for back in again.follows.of(TakenBack)] == [("all.1/b", 8)]
    assert [(wait.ask.path, wait.position) for wait in again.follows.of(ClosedWait)] == [("all.2/e", 9)]


def test_a_gift_that_stops_the_program_is_kept_and_its_wait_is_over() -> None:
    async def breaks(ctx: Context, n: int) -> None:
        await ctx.event("e")
        raise AttributeError("a bug")

    machine = bare(breaks)

    with pytest.raises(ProgramFault):
        received(machine, "e")

    assert said(machine.new) == ["started", "asked e", "received", "ended e"]
    assert [(wait.ask.path, wait.position) for wait in machine.follows.of(ClosedWait)] == [("e", 4)]
    machine.evict()


def test_nothing_follows_from_a_replay_that_differs() -> None:
    async def short(ctx: Context, n: int) -> None:
        with suppress(ValueError):
            await ctx.all(ctx.call("s", "a"), ctx.event("e"), ctx.call("s", "b"))

    async def long(ctx: Context, n: int) -> None:
        async def breaks() -> None:
            await ctx.call("s", "b")
            await fails()

        with suppress(ValueError):
            await ctx.all(ctx.call("s", "a"), ctx.event("e"), breaks())

    machine = bare(short)
    done(machine, "all.2/b")
    machine.evict()
    again = Machine(flow_of(long).program)

    with pytest.raises(NonDeterminism, match="ends at position 5"):
        again.replay(machine.new)

    assert (again.new, again.follows.of(TakenBack), again.follows.of(ClosedWait)) == ([], [], [])
    again.evict()


# ---- being let go ----------------------------------------------------------------------------------------------


@contextmanager
def left_suspended() -> Generator[list[str]]:
    """What Python says of coroutines that refuse to end, when they are collected."""
    said_so: list[str] = []

    def hear(what: sys.UnraisableHookArgs) -> None:
        said_so.append(str(what.exc_value))

    hook, sys.unraisablehook = sys.unraisablehook, hear
    try:
        yield said_so
        gc.collect()
    finally:
        sys.unraisablehook = hook


@pytest.mark.parametrize("asks", ["sleep", "call", "fork", "saga", "pivot"])
def test_a_flow_that_clings_to_its_loop_is_let_go_and_records_nothing(asks: str) -> None:
    async def clings(ctx: Context, n: int) -> None:
        while True:
            with suppress(BaseException):
                match asks:
                    case "call":
                        await ctx.call("s", "a")
                    case "fork":
                        await ctx.all(ctx.call("s", "a"))
                    case "saga":
                        async with ctx.saga():
                            await ctx.sleep(days(1))
                    case "pivot":
                        ctx.pivot()
                        await ctx.sleep(days(1))
                    case _:
                        await ctx.sleep(days(1))

    machine = bare(clings)
    before = said(machine.new)

    with left_suspended() as told:
        machine.evict()
        assert said(machine.new) == before
        del machine
        gc.collect()

    assert set(told) <= {"coroutine ignored GeneratorExit", "coroutine 'Context.call' was never awaited"}


@pytest.mark.parametrize(
    "leaves", [SystemExit(3), KeyboardInterrupt(), Cancelled("mine"), BaseException("out")]
)
def test_whatever_a_cleanup_raises_while_its_flow_is_let_go_stays_there(leaves: BaseException) -> None:
    async def cleans(ctx: Context, n: int) -> None:
        async def branch() -> None:
            try:
                await ctx.sleep(days(1))
            finally:
                raise leaves

        await ctx.all(branch(), branch())

    machine = bare(cleans)

    machine.evict()

    assert said(machine.new) == ["started", "asked all.0/sleep", "asked all.1/sleep"]


# ---- branches that never start ---------------------------------------------------------------------------------


@contextmanager
def nothing_unawaited() -> Generator[None]:
    """No coroutine of what is done here is collected before it was awaited."""
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


async def given(ctx: Context, *ops: Coroutine[Any, Any, Any]) -> None:
    await ctx.all(*ops)


async def given_a_list(ctx: Context, ops: list[Coroutine[Any, Any, Any]]) -> None:
    await ctx.all(*ops)


async def loses(ctx: Context, n: int) -> None:
    """Its other branches never start; they were given coroutines in every way."""
    await ctx.first(
        at_once(),
        ctx.call("s", "a"),
        ctx.all(ctx.call("s", "b"), ctx.settle(ctx.sleep(days(1)))),
        ctx.within(hours(1), ctx.any(ctx.event("e"))),
        given(ctx, ctx.call("s", "c"), given(ctx, ctx.call("s", "d"))),
        given_a_list(ctx, [ctx.call("s", "e"), ctx.call("s", "f")]),
    )


async def too_wide(ctx: Context, n: int) -> None:
    with suppress(UsageError):
        await ctx.all(*(given(ctx, at_once()) for _ in range(1_001)))


async def misnamed(ctx: Context, n: int) -> None:
    with suppress(UsageError):
        await ctx.all(given(ctx, at_once()), name="a\nb")


async def no_coroutine(ctx: Context, n: int) -> None:
    await ctx.all(given(ctx, at_once()), work, given(ctx, at_once()))  # pyright: ignore[reportArgumentType, reportCallIssue]  # that is the case


async def stopped_at_its_fork(ctx: Context, n: int) -> None:
    async def forks() -> None:
        await ctx.all(at_once())
        await ctx.all(given(ctx, at_once()), given(ctx, at_once()))

    async def breaks() -> None:
        await ctx.all(at_once())
        await fails()

    await ctx.all(breaks(), forks(), forks())


async def stops_the_turn(ctx: Context, n: int) -> None:
    async def bug() -> None:
        raise AttributeError("a bug")

    await ctx.all(ctx.call("s", "a"), bug(), given(ctx, at_once()))


async def too_deep(ctx: Context, n: int) -> None:
    await ctx.first(too_deep(ctx, n), given(ctx, at_once()))


async def waits_in_branches(ctx: Context, n: int) -> None:
    await ctx.all(ctx.call("s", "a"), given(ctx, ctx.call("s", "b"), ctx.sleep(days(1))))


@pytest.mark.parametrize(
    "flow",
    [
        loses, too_wide, misnamed, no_coroutine, stopped_at_its_fork, stops_the_turn, too_deep,
        waits_in_branches,
    ],
)  # fmt: skip
def test_no_branch_that_never_starts_is_left_unawaited(
    flow: Callable[[Context, int], Coroutine[Any, Any, None]],
) -> None:
    with nothing_unawaited():
        machine = Machine(flow_of(flow).program)
        with suppress(Halt):
            machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
        machine.evict()
        del machine


@pytest.mark.parametrize("length", [1, 2, 3])
def test_no_branch_of_a_replay_that_differs_is_left_unawaited(length: int) -> None:
    async def other(ctx: Context, n: int) -> None:
        await ctx.all(ctx.call("s", "b"), given(ctx, ctx.call("s", "c")), ctx.call("s", "d"))

    journal = driven(waits_in_branches).journal[: length + 1]

    with nothing_unawaited():
        machine = Machine(flow_of(other).program)
        with pytest.raises(NonDeterminism):
            machine.replay(journal)
        machine.evict()
        del machine


def test_a_fork_asked_of_a_flow_that_does_not_run_drops_what_it_was_given() -> None:
    kept: list[Context] = []

    async def leaks(ctx: Context, n: int) -> None:
        kept.append(ctx)
        await ctx.sleep(days(1))

    machine = bare(leaks)

    with nothing_unawaited(), pytest.raises(UsageError, match="only while the flow runs"):
        kept[0].all(given(kept[0], at_once()), at_once()).send(None)

    machine.evict()
