"""Events: which one goes to which wait, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import (
    Context,
    Elapsed,
    Event,
    FlowError,
    ReplyInvalid,
    TimedOut,
    UsageError,
    days,
    hours,
    workflow,
)
from orchestrator.core.errors import NonDeterminism
from orchestrator.core.fact import Fact
from orchestrator.core.follows import ClosedWait
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON, FlowTester
from tests.core.answers import bare, done, driven, flow_of, open_in, received, refused, said

Json = Any


class Paid(Event, type="payment.succeeded", key="order"):
    order: str
    amount: int


class Declined(Event, type="payment.failed", key="order"):
    order: str


class Tick(Event, type="tick"):
    n: int


@workflow(name="waits", version="1")
async def waits(ctx: Context, n: int) -> int:
    return (await ctx.event(Paid, key="A")).amount


# ---- which one -------------------------------------------------------------------------------------------------


def test_an_event_goes_to_who_waits_for_its_type_and_its_key() -> None:
    flow = FlowTester(waits, 1)

    flow.receives(Paid(order="B", amount=1))
    flow.receives(Declined(order="A"))
    assert flow.open == ["payment%2Esucceeded"]
    flow.receives(Paid(order="A", amount=7))

    assert flow.returned == 7


def test_a_wait_without_key_takes_events_without_key_only() -> None:
    async def ticks(ctx: Context, n: int) -> int:
        return (await ctx.event(Tick)).n

    flow = driven(ticks)

    flow.receives("tick", key="A", data={"n": 1})
    assert flow.status == "open"
    flow.receives(Tick(n=2))

    assert flow.returned == 2


def test_each_type_and_key_has_its_own_order() -> None:
    async def takes(ctx: Context, n: int) -> list[str]:
        await ctx.sleep(hours(1))
        return [await ctx.event(kind, key=key) for kind in ("e", "f") for key in ("A", "A", "B")]

    flow = driven(takes)
    for kind, key in [("f", "A"), ("e", "B"), ("e", "A"), ("f", "B"), ("f", "A"), ("e", "A")]:
        flow.receives(kind, key=key, data=f"{kind}{key} {len(flow.journal)}")

    flow.passes(hours(1))

    numbers = [int(text.split()[1]) for text in flow.returned]
    assert [text.split()[0] for text in flow.returned] == ["eA", "eA", "eB", "fA", "fA", "fB"]
    assert numbers == [4, 7, 3, 2, 6, 5]


def test_the_same_event_twice_is_two_events() -> None:
    async def takes(ctx: Context, n: int) -> list[int]:
        return [(await ctx.event(Tick)).n, (await ctx.event(Tick)).n]

    flow = driven(takes)

    flow.receives(Tick(n=1))
    assert flow.open == ["tick#2"]
    flow.receives(Tick(n=1))

    assert flow.returned == [1, 1]


def test_one_event_is_given_once_however_many_wait() -> None:
    async def takes(ctx: Context, n: int) -> None:
        await ctx.all(ctx.event("e"), ctx.event("e"))

    flow = driven(takes)

    flow.receives("e")

    assert flow.open == ["all.1/e"]


# ---- waits that end otherwise ------------------------------------------------------------------------------------


def test_a_wait_that_is_withdrawn_has_taken_nothing() -> None:
    async def takes(ctx: Context, n: int) -> list[str]:
        won = await ctx.first(ctx.event("e", key="A"), ctx.event("f"))
        return [won, await ctx.event("e", key="A")]

    flow = driven(takes)
    flow.receives("f", data="f")
    assert flow.open == ["e"]

    flow.receives("e", key="A", data="e")

    assert flow.returned == ["f", "e"]


def test_of_two_waits_for_the_same_in_first_the_first_branch_gets_it_and_the_other_takes_none() -> None:
    async def takes(ctx: Context, n: int) -> list[int]:
        async def tagged(tag: int) -> list[int]:
            return [tag, await ctx.event("e")]

        return [*await ctx.first(tagged(0), tagged(1)), await ctx.event("e")]

    flow = driven(takes)
    flow.receives("e", data=1)

    flow.receives("e", data=2)

    assert flow.returned == [0, 1, 2]


def test_two_events_that_two_branches_race_for_leave_the_second_to_the_next_wait() -> None:
    async def takes(ctx: Context, n: int) -> list[str]:
        await ctx.sleep(hours(1))
        return [await ctx.first(ctx.event("e"), ctx.event("f")), await ctx.event("f")]

    flow = driven(takes)
    flow.receives("f", data="f")
    flow.receives("e", data="e")

    flow.passes(hours(1))

    assert (flow.status, flow.open) == ("open", ["f"])
    flow.receives("f", data="later")
    assert flow.returned == ["f", "later"]


def test_a_wait_that_times_out_raises_and_takes_nothing() -> None:
    async def takes(ctx: Context, n: int) -> str:
        try:
            return await ctx.event("e", timeout=hours(1), name="news")
        except TimedOut as late:
            return str(late)

    flow = driven(takes)

    flow.passes(hours(1))

    assert flow.returned == "news at news: nothing came in time"


def test_a_race_of_events_and_time_is_told_apart_by_type() -> None:
    async def checkout(ctx: Context, n: int) -> str:
        match await ctx.first(ctx.event(Paid, key="A"), ctx.event(Declined, key="A"), ctx.sleep(days(3))):
            case Paid(amount=amount):
                return f"paid {amount}"
            case Declined():
                return "declined"
            case Elapsed():
                return "abandoned"

    paid, declined, abandoned = driven(checkout), driven(checkout), driven(checkout)

    paid.receives(Paid(order="A", amount=5))
    declined.receives(Declined(order="A"))
    abandoned.passes(days(3))

    assert [flow.returned for flow in (paid, declined, abandoned)] == ["paid 5", "declined", "abandoned"]


def test_an_event_that_does_not_fit_its_class_is_taken_and_says_where() -> None:
    async def takes(ctx: Context, n: int) -> list[str]:
        try:
            await ctx.event(Paid, key="A")
        except ReplyInvalid as error:
            return [error.detail, str((await ctx.event(Paid, key="A")).amount)]
        return []

    flow = driven(takes)

    flow.receives("payment.succeeded", key="A", data={"order": "A", "amount": "much"})
    flow.receives(Paid(order="A", amount=7))

    detail = "at /amount: Input should be a valid integer, unable to parse string as an integer"
    assert flow.returned == [detail, "7"]


# ---- facts -----------------------------------------------------------------------------------------------------


def test_a_gift_names_what_was_received_and_is_written_down_after_what_caused_it() -> None:
    machine = bare(waits.run)
    received(machine, "payment.succeeded", {"order": "A", "amount": 7}, key="A")

    assert said(machine.new) == [
        "started", "asked payment%2Esucceeded", "received", "ended payment%2Esucceeded", "finished completed",
    ]  # fmt: skip
    assert machine.new[3].data == {"outcome": "done", "of": 3}


def test_a_recorded_gift_counts_though_an_older_event_would_be_given_today() -> None:
    machine = bare(waits.run)
    journal = machine.take_new()
    machine.evict()
    for position, amount in ((3, 1), (4, 2)):
        data = {"type": "payment.succeeded", "key": "A", "data": {"order": "A", "amount": amount}}
        journal.append(Fact(position, "received", "", data, NOON))
    journal.append(Fact(5, "ended", "payment%2Esucceeded", {"outcome": "done", "of": 4}, NOON))
    again = Machine(flow_of(waits.run).program)

    again.replay(journal, complete=False)

    assert again.result == 2


def test_a_gift_of_what_was_never_received_or_given_before_is_a_broken_journal() -> None:
    machine = bare(waits.run)
    journal = machine.take_new()
    machine.evict()
    again = Machine(flow_of(waits.run).program)

    with pytest.raises(
        NonDeterminism, match=r"gives 'payment%2Esucceeded' the event of position 9; there is none"
    ):
        again.replay([*journal, Fact(3, "ended", "payment%2Esucceeded", {"outcome": "done", "of": 9}, NOON)])
    again.evict()


def test_an_event_that_nobody_had_taken_is_given_after_a_replay() -> None:
    machine = bare(waits.run)
    received(machine, "other")
    journal = machine.take_new()
    machine.evict()
    data = {"type": "payment.succeeded", "key": "A", "data": {"order": "A", "amount": 7}}
    again = Machine(flow_of(waits.run).program)

    again.replay([*journal, Fact(4, "received", "", data, NOON)], complete=False)

    assert (said(again.new), again.result) == (
        ["ended payment%2Esucceeded", "finished completed"],
        7,
    )


@pytest.mark.parametrize("asks", ["event", "sleep"])
def test_nobody_can_answer_a_wait_or_a_timer_what_tries_is_late(asks: str) -> None:
    async def takes(ctx: Context, n: int) -> None:
        await (ctx.event("e", name="a") if asks == "event" else ctx.sleep(hours(1), name="a"))

    flow = driven(takes)

    done(flow, "a", value="not from the outside")
    refused(flow, "a")

    assert (flow.status, flow.open) == ("open", ["a"])
    assert said(flow.journal)[2:] == ["late a", "late a"]


# ---- names and keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "key", "says"),
    [
        ("", None, "event type ''"),
        ("x" * 513, None, "event type 'xxx"),
        ("a\nb", None, "event type"),
        ("e", "", "event key ''"),
        ("e", "x" * 1025, "event key 'xxx"),
        ("e", "a\x00", "event key"),
        ("x" * 129, None, "name 'xxx"),
    ],
    ids=["no type", "long type", "two lines", "empty key", "long key", "NUL", "no name of its own"],
)
def test_a_type_or_a_key_that_no_event_can_have_is_refused_before_anything_is_written(
    kind: str, key: str | None, says: str
) -> None:
    async def takes(ctx: Context, n: int) -> str:
        try:
            await ctx.event(kind, key=key)
        except FlowError as error:
            return str(error)
        return "came"

    flow = driven(takes)

    assert flow.returned.startswith(says)
    assert "bytes of printable text" in flow.returned
    assert flow.told == []


def test_an_event_that_has_a_key_is_not_waited_for_without_one() -> None:
    async def takes(ctx: Context, n: int) -> str:
        try:
            await ctx.event(Paid)
        except UsageError as error:
            return str(error)
        return "came"

    flow = driven(takes)

    assert flow.returned.startswith("event Paid: expected key=, the value of its field 'order', found none")
    assert flow.told == []


def test_a_long_type_is_waited_for_under_a_name_of_its_own() -> None:
    async def takes(ctx: Context, n: int) -> str:
        return await ctx.event("x" * 512, key="ü" * 512, name="long")

    flow = driven(takes)
    assert flow.open == ["long"]

    flow.receives("x" * 512, key="ü" * 512, data="came")

    assert flow.returned == "came"


def test_waits_are_told_to_whoever_keeps_them_when_they_end_and_not_again_in_a_replay() -> None:
    async def takes(ctx: Context, n: int) -> None:
        await ctx.first(ctx.event("e"), ctx.event("f"))

    machine = bare(takes)

    received(machine, "f")

    assert [(wait.ask.path, wait.position) for wait in machine.follows.of(ClosedWait)] == [
        ("first.1/f", 5),
        ("first.0/e", 6),
    ]
    assert open_in(machine) == []
    again = Machine(flow_of(takes).program)
    again.replay(machine.new)
    assert again.follows.of(ClosedWait) == []
