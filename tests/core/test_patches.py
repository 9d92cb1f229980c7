"""New code for executions that began with the old one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from orchestrator import Context, UsageError
from orchestrator.core.errors import NonDeterminism
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from tests.core.answers import bare, done, driven, finish, flow_of, open_in, said

Program = Callable[[Context, int], Coroutine[Any, Any, Any]]


async def old(ctx: Context, n: int) -> str:
    await ctx.call("s", "a")
    await ctx.call("s", "b")
    return "old"


async def new(ctx: Context, n: int) -> str:
    await ctx.call("s", "a")
    if ctx.patched("check"):
        await ctx.call("s", "check")
    await ctx.call("s", "b")
    return "new"


async def newest(ctx: Context, n: int) -> str:
    await ctx.call("s", "a")
    ctx.deprecate_patch("check")
    await ctx.call("s", "check")
    await ctx.call("s", "b")
    return "newest"


async def unpatched(ctx: Context, n: int) -> str:
    await ctx.call("s", "a")
    await ctx.call("s", "check")
    await ctx.call("s", "b")
    return "unpatched"


def journal_of(program: Program, *answered: str) -> list[Fact]:
    flow = driven(program)
    done(flow, *answered)
    return flow.journal


def replayed(program: Program, journal: list[Fact]) -> Machine:
    machine = Machine(flow_of(program).program)
    try:
        machine.replay(journal)
    finally:
        if machine.branches.fault is not None:
            machine.evict()
    return machine


def test_an_execution_that_was_past_the_place_keeps_the_old_way() -> None:
    machine = replayed(new, journal_of(old, "a"))

    assert (open_in(machine), machine.new) == (["b"], [])
    machine.evict()


def test_an_execution_that_comes_there_now_takes_the_new_way_and_leaves_a_marker() -> None:
    machine = replayed(new, journal_of(old))
    done(machine, "a")

    assert open_in(machine) == ["check"]
    assert said(machine.new)[-2:] == ["noted patched:check", "asked check"]
    machine.evict()


def test_a_replay_takes_the_way_that_the_marker_says() -> None:
    flow = driven(new)  # all that a driven flow is told is also replayed
    finish(flow)

    assert flow.told == ["a", "check", "b"]
    assert flow.returned == "new"


def test_a_step_that_stands_in_the_past_without_a_patch_is_a_difference() -> None:
    with pytest.raises(NonDeterminism, match="the journal has asked call b"):
        replayed(unpatched, journal_of(old, "a"))


def test_what_nobody_asked_when_all_branches_waited_may_follow_a_fresh_marker() -> None:
    """Branch 0 had nothing more to do when its answer came, and branch 1 still waits."""

    async def before(ctx: Context, n: int) -> None:
        await ctx.all(old(ctx, n), ctx.call("s", "c"))

    async def short(ctx: Context, n: int) -> str:
        await ctx.call("s", "a")
        return "short"

    async def was(ctx: Context, n: int) -> None:
        await ctx.all(short(ctx, n), ctx.call("s", "c"))

    async def longer(ctx: Context, n: int) -> str:
        await ctx.call("s", "a")
        if ctx.patched("more"):
            await ctx.call("s", "more")
        return "longer"

    async def becomes(ctx: Context, n: int) -> None:
        await ctx.all(longer(ctx, n), ctx.call("s", "c"))

    machine = replayed(becomes, journal_of(was, "all.0/a"))

    assert open_in(machine) == ["all.1/c", "all.0/more"]
    machine.evict()
    with pytest.raises(NonDeterminism, match="before its end"):
        replayed(before, journal_of(was, "all.0/a"))


def test_a_deprecated_patch_passes_its_marker_and_leaves_none() -> None:
    machine = replayed(newest, journal_of(new, "a"))
    assert (open_in(machine), machine.new) == (["check"], [])
    machine.evict()

    fresh = bare(newest)
    done(fresh, "a")
    assert not [line for line in said(fresh.new) if "patched" in line]
    fresh.evict()


def test_a_marker_that_nobody_passes_is_a_difference() -> None:
    with pytest.raises(NonDeterminism, match="noted patched check"):
        replayed(unpatched, journal_of(new, "a"))


def test_a_patch_moves_no_path() -> None:
    async def draws(ctx: Context, n: int) -> list[str]:
        first = ctx.uuid()
        ctx.patched("check")
        return [str(first), str(ctx.uuid())]

    async def plain(ctx: Context, n: int) -> list[str]:
        return [str(ctx.uuid()), str(ctx.uuid())]

    assert driven(draws).returned == driven(plain).returned


def test_the_name_of_a_patch_is_a_name() -> None:
    async def asks(ctx: Context, n: int) -> str:
        try:
            return str(ctx.patched(""))
        except UsageError as error:
            return str(error)

    assert driven(asks).returned == "name '': expected 1 to 128 bytes of printable text"
