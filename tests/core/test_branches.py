"""Branches side by side: who starts, who is stopped, who waits for whom, and what is undone."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from orchestrator import (
    Cancelled,
    Context,
    StepRefused,
    TimedOut,
    days,
    hours,
    workflow,
)
from orchestrator.testing import FlowTester
from tests.core.answers import (
    UNDO,
    done,
    driven,
    refused,
    undone,
)

Json = Any


async def at_once(value: str) -> str:
    return value


async def fails(why: str = "as written") -> str:
    raise ValueError(why)


# ---- together --------------------------------------------------------------------------------------------------


# ---- stopping --------------------------------------------------------------------------------------------------


def test_a_branch_that_hears_cancelled_and_returns_has_ended_and_what_it_did_is_kept() -> None:
    async def asks(ctx: Context, n: int) -> str:
        async def deaf() -> None:
            await ctx.call("s", "a", undo=UNDO)
            try:
                await ctx.sleep(days(1))
            except Cancelled:
                return

        with contextlib.suppress(StepRefused):
            await ctx.all(deaf(), ctx.call("s", "b"))
        return "well"

    flow = driven(asks)
    done(flow, "all.0/a")

    refused(flow, "all.1/b")

    assert (flow.returned, undone(flow.journal)) == ("well", [])


@pytest.mark.parametrize("waits", ["first", "any", "within"])
def test_a_loser_that_hears_cancelled_and_returns_is_undone_all_the_same(waits: str) -> None:
    async def asks(ctx: Context, n: int) -> str:
        async def deaf() -> str:
            await ctx.call("s", "a", undo=UNDO)
            try:
                await ctx.sleep(days(1))
            except Cancelled:
                return "deaf"
            return "slept"

        try:
            if waits == "within":
                return await ctx.within(hours(1), deaf())
            return await getattr(ctx, waits)(deaf(), ctx.call("s", "b"))
        except TimedOut:
            return "too late"

    flow = driven(asks)
    done(flow, f"{waits}.0/a")

    if waits == "within":
        flow.passes(hours(1))
    else:
        done(flow, f"{waits}.1/b", value="won")

    assert flow.open == [f"{waits}.0/a/undo"]
    done(flow, f"{waits}.0/a/undo")
    assert flow.returned == ("too late" if waits == "within" else "won")


@pytest.mark.parametrize("resumed", [False, True], ids=["where it waits", "while it is resumed"])
def test_what_a_branch_asks_after_it_was_stopped_has_the_same_path_wherever_that_met_it(
    *, resumed: bool
) -> None:
    async def asks(ctx: Context, n: int) -> None:
        async def cleans() -> None:
            await ctx.all(at_once(""))
            try:
                await ctx.call("s", "a")
            finally:
                await ctx.settle(ctx.call("s", "a"))
                await ctx.call("s", "a")

        async def breaks() -> None:
            await ctx.all(at_once(""))
            await (fails() if resumed else ctx.call("s", "b"))

        await ctx.all(breaks(), cleans())

    flow = driven(asks)
    if not resumed:
        refused(flow, "all.0/b")

    assert flow.open == ["all.1/settle.0/a"]
    done(flow, "all.1/settle.0/a")
    assert flow.open == ["all.1/a#2"]


def test_a_fork_that_a_stopped_branch_was_about_to_wait_for_keeps_its_place_too() -> None:
    async def asks(ctx: Context, n: int) -> None:
        async def cleans() -> None:
            await ctx.all(at_once(""), name="before")
            try:
                await ctx.all(ctx.call("s", "a"))
            finally:
                await ctx.all(ctx.call("s", "a"))

        async def breaks() -> None:
            await ctx.all(at_once(""))
            await fails()

        await ctx.all(breaks(), cleans())

    assert driven(asks).open == ["all.1/all#2.0/a"]


# ---- within ----------------------------------------------------------------------------------------------------


@workflow(name="hurries", version="1")
async def hurries(ctx: Context, n: int) -> str:
    async def books() -> str:
        await ctx.call("s", "a", undo=UNDO)
        return await ctx.call("s", "b", undo=UNDO)

    try:
        return await ctx.within(hours(1), books())
    except TimedOut as late:
        return str(late)
    except StepRefused:
        return "refused"


# ---- scopes ----------------------------------------------------------------------------------------------------


# ---- the point of no return ------------------------------------------------------------------------------------


def test_what_was_done_before_a_pivot_stands_and_what_is_done_after_it_is_undone() -> None:
    async def asks(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=UNDO)
        async with ctx.saga("part"):
            await ctx.call("s", "b", undo=UNDO)
            ctx.pivot()
            await ctx.call("s", "c", undo=UNDO)
        await fails()

    flow = driven(asks)
    done(flow, "a", "part/b", "part/c")

    assert flow.open == ["part/c/undo"]
    done(flow, "part/c/undo")
    assert (flow.status, flow.journal[-1].data["stands"]) == ("failed", ["part/b", "a"])


def test_after_a_pivot_an_end_by_an_error_is_failed_also_when_nothing_stands() -> None:
    async def asks(ctx: Context, n: int) -> None:
        ctx.pivot()
        await ctx.call("s", "a", undo=UNDO)
        await fails()

    flow = driven(asks)

    done(flow, "a", "a/undo")

    assert (flow.status, flow.journal[-1].data["undone"]) == ("failed", 1)


# ---- cancelling without undo -----------------------------------------------------------------------------------


@workflow(name="thrice", version="1")
async def thrice(ctx: Context, n: int) -> None:
    for _ in range(3):
        await ctx.call("s", "a", undo=UNDO)
    await ctx.call("s", "b")


def done_thrice() -> FlowTester[int, None]:
    flow = FlowTester(thrice, 1)
    done(flow, "a", "a#2", "a#3")
    return flow


def test_an_output_that_cannot_be_stored_lists_what_was_done_as_standing() -> None:
    async def returns(ctx: Context, n: int) -> str:
        await ctx.call("s", "a", undo=UNDO)
        return "x" * 300_000

    flow = driven(returns)

    done(flow, "a")

    assert (flow.status, flow.error["code"], flow.journal[-1].data["stands"]) == (
        "failed",
        "too-large",
        ["a"],
    )


# ---- types -----------------------------------------------------------------------------------------------------
