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


# ---- types -----------------------------------------------------------------------------------------------------
