"""The tricky cases of a core, in the order of their table: each by the number of its row, and what was decided."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Final

import pytest
from pydantic import BaseModel

from contracts import Command
from orchestrator import (
    Context,
    StepRefused,
    command,
    days,
    workflow,
)
from orchestrator.core.errors import ProgramFault
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON, FlowTester
from tests.core.answers import (
    UNDO,
    done,
    flow_of,
    refused,
    undoes,
)

Json = Any

LATER: Final = {
    2: "approvals",
    30: "patches",
    34: "continue_as_new",
    35: "continue_as_new",
}
"""Rows about what flows cannot do yet, and what that is."""


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


# ---- the first of several --------------------------------------------------------------------------------------


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


# ---- leaving a scope -------------------------------------------------------------------------------------------


# ---- undoing ---------------------------------------------------------------------------------------------------


def exact(reply: Json) -> Any:
    return command("s", "undo", reply)


@workflow(name="charges", version="1")
async def charges(ctx: Context, n: int) -> None:
    await ctx.call("s", "charge", undo=exact)


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


# ---- code that changed -----------------------------------------------------------------------------------------


def both(*names: str, data: Json = None) -> Callable[[Context, int], Coroutine[Any, Any, None]]:
    """A flow with a branch for each of `names`."""

    async def calls(ctx: Context, n: int) -> None:
        await ctx.all(*(ctx.call("s", name, data) for name in names))

    return calls


# ---- events ----------------------------------------------------------------------------------------------------


# ---- what a program may not do ---------------------------------------------------------------------------------


class Future:
    """What a library gives that has a loop of its own."""

    def __await__(self) -> Generator[object, None, None]:
        yield self


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


# ---- the table is whole ----------------------------------------------------------------------------------------
