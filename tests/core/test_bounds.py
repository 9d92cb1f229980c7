"""What a flow may do at most: each bound by its name, and nothing is half done where it is reached."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from contracts.limits import FORK_WIDTH_MAX
from orchestrator import Context, UsageError, days, hours
from orchestrator.core.errors import LimitExceeded
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON
from tests.core.answers import UNDO, bare, driven, flow_of, said

Json = Any
Program = Callable[[Context, int], Coroutine[Any, Any, Any]]


async def at_once(value: int = 1) -> int:
    return value


def held(fn: Program, says: str, *, facts_max: int = 25_000) -> None:
    """`fn` is held as soon as it begins, says why, and nothing that it said is kept."""
    machine = Machine(flow_of(fn).program, facts_max=facts_max)
    try:
        with pytest.raises(LimitExceeded, match=says):
            machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
        assert said(machine.new) == ["started"]
    finally:
        machine.evict()


# ---- width -----------------------------------------------------------------------------------------------------


async def wide(ctx: Context, n: int) -> str:
    try:
        return str(sum(await ctx.all(*(at_once() for _ in range(FORK_WIDTH_MAX + 1)))))
    except UsageError as error:
        await ctx.call("s", "a")
        return str(error)


def test_a_fork_that_is_too_wide_in_a_branch_that_is_stopped_at_once_is_withdrawn() -> None:
    async def asks(ctx: Context, n: int) -> None:
        async def fails() -> None:
            raise ValueError("as written")

        await ctx.all(wide(ctx, n), fails())

    flow = driven(asks)

    assert said(flow.journal) == ["started", "asked all.0/all", "withdrawn all.0/all", "finished failed"]


def test_a_call_that_cannot_be_sent_in_a_branch_that_is_stopped_at_once_has_no_message_to_take_back() -> None:
    async def asks(ctx: Context, n: int) -> None:
        async def fails() -> None:
            raise ValueError("as written")

        await ctx.all(ctx.call("s", "a", {"v": "\x00"}, undo=UNDO), fails())

    machine = bare(asks)

    assert said(machine.new)[-2:] == ["withdrawn all.0/a", "finished failed"]
    assert machine.taken_back == []


# ---- depth -----------------------------------------------------------------------------------------------------


def nested(what: str, depth: int) -> Program:
    """A flow with a call inside of so many scopes or forks."""

    async def inside(ctx: Context, n: int) -> None:
        if n == 0:
            await ctx.call("s", "a")
        elif what in ("all", "first"):
            await getattr(ctx, what)(inside(ctx, n - 1))
        else:
            async with ctx.saga("x" if what == "named" else None):
                await inside(ctx, n - 1)

    async def nests(ctx: Context, n: int) -> None:
        with suppress(BaseException):
            await inside(ctx, depth)

    return nests


# ---- names and paths -------------------------------------------------------------------------------------------


async def long_step(ctx: Context) -> None:
    await ctx.call("s", "a", name="ü" * 64)


async def long_fork(ctx: Context) -> None:
    await ctx.all(at_once(), name="ü" * 64)


async def long_event(ctx: Context) -> None:
    await ctx.event("e", name="ü" * 64)


async def long_scope(ctx: Context) -> None:
    async with ctx.saga("ü" * 64):
        pass


async def a_draw(ctx: Context) -> None:
    ctx.uuid()


async def a_pivot(ctx: Context) -> None:
    ctx.pivot()


async def named(ctx: Context, what: str, name: str) -> None:
    match what:
        case "call":
            await ctx.call("s", "a", name=name)
        case "step":
            await ctx.step(at_once, 1, name=name)
        case "event":
            await ctx.event("e", name=name)
        case "sleep":
            await ctx.sleep(hours(1), name=name)
        case "within":
            await ctx.within(hours(1), at_once(), name=name)
        case "saga":
            async with ctx.saga(name):
                pass
        case _:
            await getattr(ctx, what)(at_once(), name=name)


@pytest.mark.parametrize("span", [hours(0), hours(-1), days(4_000)], ids=str)
def test_the_time_of_a_within_and_of_a_wait_is_bounded_before_anything_is_asked(span: Any) -> None:
    async def waits(ctx: Context, n: int) -> list[str]:
        ends = await ctx.settle(ctx.within(span, ctx.call("s", "a")), ctx.event("e", timeout=span))
        return [str(end) for end in ends]

    flow = driven(waits)

    assert flow.returned == [f"a timeout of {span}: expected more than 0 and at most ten years"] * 2
    assert flow.told == []


# ---- how much --------------------------------------------------------------------------------------------------
