"""Flows that continue as new: what ends, what goes along, and what begins again."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from orchestrator import Cancelled, Context, Event, TimedOut, UsageError, days, workflow
from orchestrator.core.errors import LimitExceeded
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON, FlowTester
from tests.core.answers import UNDO, bare, cancelled, done, driven, received, said, tell

Json = Any


class Month(BaseModel):
    number: int
    told: list[str] = []


class Ping(Event, type="ping"):
    n: int


@workflow(name="monthly", version="1")
async def monthly(ctx: Context, it: Month) -> list[str]:
    """Three months, each with a call, an identifier and what was heard meanwhile."""
    told = [*it.told, str(ctx.uuid())]
    await ctx.call("s", "charge", {"month": it.number})
    try:
        told.append(f"ping {(await ctx.event(Ping, timeout=days(1))).n}")
    except TimedOut:
        told.append("quiet")
    if it.number == 3:
        return told
    return ctx.continue_as_new(Month(number=it.number + 1, told=told))


def test_a_flow_goes_on_with_its_next_input_and_an_empty_journal() -> None:
    flow = FlowTester(monthly, Month(number=1))
    for _ in range(3):
        done(flow, "charge")
        flow.passes(days(1))

    assert flow.status == "completed"
    assert [line for line in flow.returned if line == "quiet"] == ["quiet"] * 3
    epochs = [fact for fact in flow.journal if fact.kind == "continued"]
    assert [(fact.data["epoch"], fact.data["input"]["number"]) for fact in epochs] == [(1, 2), (2, 3)]
    assert [fact.path for fact in flow.journal if fact.kind == "asked"] == ["charge", "ping"] * 3
    assert said(flow.journal)[-8:-5] == ["ended ping", "finished continued", "continued"]


def test_nothing_that_is_drawn_repeats() -> None:
    flow = FlowTester(monthly, Month(number=1))
    for _ in range(3):
        done(flow, "charge")
        flow.passes(days(1))

    assert len(set(flow.returned[::2])) == 3


def test_a_replay_begins_at_the_last_epoch() -> None:
    flow = FlowTester(monthly, Month(number=1))
    done(flow, "charge")
    flow.passes(days(1))
    done(flow, "charge")
    [begun] = [i for i, fact in enumerate(flow.journal) if fact.kind == "continued"]

    machine = Machine(monthly.program)
    machine.replay(flow.journal[begun:])

    assert (list(machine.open), machine.new, machine.epoch) == (["ping"], [], 1)
    assert machine.position == flow.machine.position
    machine.evict()


def test_a_machine_that_continues_hears_nothing_more() -> None:
    machine = Machine(monthly.program)
    machine.tell("started", "", {"input": {"number": 1}, "seed": "s", "key": "k"}, NOON)
    done(machine, "charge")
    received(machine, "ping", {"n": 1})
    assert machine.continues

    count = len(machine.new)
    received(machine, "ping", {"n": 2})
    cancelled(machine)

    assert len(machine.new) == count
    assert (machine.next_due(), machine.runnable(), machine.open) == (None, [], {})
    assert machine.new[-1].data["key"] == "k"
    machine.evict()


def test_a_worker_that_died_after_the_end_of_an_epoch_is_forgotten() -> None:
    flow = FlowTester(monthly, Month(number=1))
    done(flow, "charge")
    flow.passes(days(1))
    [begun] = [i for i, fact in enumerate(flow.journal) if fact.kind == "continued"]

    machine = Machine(monthly.program)
    machine.replay(flow.journal[begun : begun + 1])

    assert said(machine.new) == ["asked charge"]
    machine.evict()


# ---- where it may not ------------------------------------------------------------------------------------------


async def tries(ctx: Context, n: int) -> str:
    try:
        return ctx.continue_as_new(n + 1)
    except UsageError as error:
        return str(error)


def test_it_is_refused_while_something_is_left_to_undo_and_says_what() -> None:
    async def asks(ctx: Context, n: int) -> str:
        await ctx.call("s", "a", undo=UNDO)
        async with ctx.saga("inner"):
            await ctx.call("s", "b", undo=UNDO)
            return await tries(ctx, n)

    flow = driven(asks)
    done(flow, "a", "inner/b")

    assert flow.returned == (
        "continue_as_new: inner/b, a would not be undone any more; leave the scope, or pivot() first"
    )


def test_after_a_pivot_it_may() -> None:
    async def asks(ctx: Context, n: int) -> str:
        if n == 2:
            return "second"
        await ctx.call("s", "a", undo=UNDO)
        ctx.pivot()
        return await tries(ctx, n)

    flow = driven(asks)
    done(flow, "a")

    assert flow.returned == "second"


def test_an_input_that_the_flow_does_not_take_fails_it() -> None:
    @workflow(name="odd", version="1")
    async def odd(ctx: Context, it: Month) -> None:
        ctx.continue_as_new({"number": "many"})

    flow = FlowTester(odd, Month(number=1))

    assert flow.status == "failed"
    assert "continue_as_new" in flow.error["detail"]
    assert said(flow.journal) == ["started", "finished failed"]


@pytest.mark.parametrize("told", ["\x00", "x" * 300_000])
def test_an_input_that_cannot_be_stored_fails_it(told: str) -> None:
    @workflow(name="large", version="1")
    async def large(ctx: Context, it: Month) -> None:
        ctx.continue_as_new(Month(number=2, told=[told]))

    flow = FlowTester(large, Month(number=1))

    assert flow.status == "failed"
    assert "continue_as_new" in flow.error["detail"]


def test_who_is_told_to_end_meanwhile_ends() -> None:
    async def asks(ctx: Context, n: int) -> str:
        try:
            await ctx.call("s", "a")
        except Cancelled:
            await ctx.call("s", "tidy")
        return ctx.continue_as_new(n + 1)

    machine = bare(asks)
    cancelled(machine)
    done(machine, "tidy")

    assert machine.continues  # it swallowed what it was told, as it may
    machine.evict()


# ---- limits ----------------------------------------------------------------------------------------------------


def test_the_limit_of_facts_counts_each_epoch_alone() -> None:
    @workflow(name="long", version="1")
    async def long(ctx: Context, n: int) -> int:
        for _ in range(3):
            await ctx.call("s", "a")
        if n == 3:
            return n
        return ctx.continue_as_new(n + 1)

    def begun(machine: Machine) -> Machine:
        again = Machine(long.program, facts_max=9)
        again.replay(machine.take_new()[-1:])
        machine.evict()
        return again

    machine = Machine(long.program, facts_max=9)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    for _ in range(2):
        done(machine, "a", "a#2", "a#3")
        machine = begun(machine)
    done(machine, "a", "a#2", "a#3")

    assert (machine.status, machine.position) == ("completed", 24)

    full = Machine(long.program, facts_max=5)
    full.tell("started", "", {"input": 1, "seed": ""}, NOON)
    with pytest.raises(LimitExceeded, match="facts_max"):
        done(full, "a", "a#2", "a#3")
    full.evict()


def test_a_late_answer_of_an_earlier_epoch_is_kept_and_changes_nothing() -> None:
    flow = FlowTester(monthly, Month(number=1))
    done(flow, "charge")
    flow.passes(days(1))

    tell(flow, "late", "epoch:0/charge", {"outcome": "refused", "error": {"code": "no"}})

    assert flow.open == ["charge"]
    assert said(flow.journal)[-1] == "late epoch:0/charge"
