"""What a flow may do at most: each bound by its name, and nothing is half done where it is reached."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from contracts.limits import FORK_WIDTH_MAX, OPEN_ASKS_MAX, RESUMES_MAX
from orchestrator import Context, FlowError, UsageError, days, hours
from orchestrator.core import driver
from orchestrator.core import machine as machine_module
from orchestrator.core.errors import LimitExceeded
from orchestrator.core.follows import TakenBack
from orchestrator.core.machine import Machine
from orchestrator.core.path import DEPTH_MAX, PATH_BYTES_MAX
from orchestrator.testing import NOON
from tests.core.answers import UNDO, bare, done, driven, finish, flow_of, refused, said

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


def test_a_fork_has_at_most_a_thousand_branches_and_a_wider_one_is_a_usage_error_that_is_recorded() -> None:
    flow = driven(wide)

    assert said(flow.journal) == ["started", "asked all", "ended all", "asked a"]
    done(flow, "a")
    assert flow.returned == "fork_width_max: all of 1001 branches, at most 1000"


def test_a_fork_that_was_too_wide_stays_so_in_replay_after_the_limit_was_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = driven(wide).journal
    monkeypatch.setattr(driver, "FORK_WIDTH_MAX", FORK_WIDTH_MAX * 2)

    again = Machine(flow_of(wide).program)
    again.replay(journal)

    assert (again.new, list(again.open)) == ([], ["a"])
    again.evict()
    assert driven(wide).returned == "1001"


def test_a_fork_that_was_not_too_wide_stays_so_in_replay_after_the_limit_was_lowered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def asks(ctx: Context, n: int) -> int:
        return len(await ctx.all(*(ctx.call("s", "a") for _ in range(3))))

    flow = driven(asks)
    monkeypatch.setattr(driver, "FORK_WIDTH_MAX", 2)

    done(flow, "all.0/a", "all.1/a", "all.2/a")

    assert flow.returned == 3


def test_the_widest_fork_asks_in_all_its_branches_and_joins_them() -> None:
    async def asks(ctx: Context, n: int) -> int:
        return len(await ctx.all(*(ctx.call("s", "a") for _ in range(FORK_WIDTH_MAX))))

    machine = bare(asks)

    for i in reversed(range(FORK_WIDTH_MAX)):
        done(machine, f"all.{i}/a")

    assert machine.result == FORK_WIDTH_MAX


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
    assert machine.follows.of(TakenBack) == []


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


@pytest.mark.parametrize(
    ("what", "most"),
    [("named", DEPTH_MAX - 1), ("unnamed", DEPTH_MAX - 1), ("all", DEPTH_MAX), ("first", DEPTH_MAX - 1)],
)
def test_scopes_and_branches_stand_at_most_32_deep_and_no_flow_can_hide_that(what: str, most: int) -> None:
    flow = driven(nested(what, most))
    assert len(flow.open) == 1
    finish(flow)

    held(nested(what, most + 1), r"depth_max: 32 scopes")


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


@pytest.mark.parametrize("what", [long_step, long_fork, long_event, long_scope])
def test_a_path_has_at_most_512_bytes_whatever_it_names(
    what: Callable[[Context], Coroutine[Any, Any, None]],
) -> None:
    async def asks(ctx: Context, n: int) -> None:
        async with ctx.saga("a" * 128), ctx.saga("b" * 12):
            with suppress(BaseException):
                await what(ctx)

    held(asks, rf"a path of 5\d\d bytes, at most {PATH_BYTES_MAX}: a+…")


@pytest.mark.parametrize("what", [a_draw, a_pivot])
def test_also_what_is_only_written_down_or_drawn_has_a_path_of_at_most_512_bytes(
    what: Callable[[Context], Coroutine[Any, Any, None]],
) -> None:
    async def asks(ctx: Context, n: int) -> None:
        async with ctx.saga("a" * 128), ctx.saga("b" * 128), ctx.saga("c" * 128), ctx.saga("d" * 123):
            with suppress(BaseException):
                await what(ctx)
                await ctx.sleep(days(1))

    held(asks, r"a path of 51\d bytes, at most 512")


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


@pytest.mark.parametrize(
    "what", ["call", "step", "event", "sleep", "all", "settle", "first", "any", "within", "saga"]
)
@pytest.mark.parametrize("name", ["x" * 129, "é" * 65, "a\x00b", "a\nb", "\ud800"], ids=ascii)
def test_a_name_is_bounded_whatever_it_names(what: str, name: str) -> None:
    async def uses(ctx: Context, n: int) -> str:
        try:
            await named(ctx, what, name)
        except FlowError as error:
            return str(error)
        return "asked"

    flow = driven(uses)

    assert "expected 1 to 128 bytes of printable text" in flow.returned
    assert flow.returned.isprintable()
    assert flow.told == []


@pytest.mark.parametrize("span", [hours(0), hours(-1), days(4_000)], ids=str)
def test_the_time_of_a_within_and_of_a_wait_is_bounded_before_anything_is_asked(span: Any) -> None:
    async def waits(ctx: Context, n: int) -> list[str]:
        ends = await ctx.settle(ctx.within(span, ctx.call("s", "a")), ctx.event("e", timeout=span))
        return [str(end) for end in ends]

    flow = driven(waits)

    assert flow.returned == [f"a timeout of {span}: expected more than 0 and at most ten years"] * 2
    assert flow.told == []


# ---- how much --------------------------------------------------------------------------------------------------


def test_a_flow_that_runs_without_waiting_is_held() -> None:
    async def spins(ctx: Context, n: int) -> None:
        while True:
            with suppress(Exception):
                await ctx.all()

    held(spins, rf"resumes_max: {RESUMES_MAX} asks in one turn; it runs without waiting")


def test_branches_that_wake_each_other_for_ever_are_held() -> None:
    async def spins(ctx: Context, n: int) -> None:
        async def round_and_round() -> None:
            while True:
                await ctx.settle(at_once(), at_once())

        await ctx.all(round_and_round(), round_and_round())

    held(spins, "resumes_max")


def test_what_waits_between_its_asks_may_go_on_for_as_long_as_its_journal_has_room() -> None:
    async def loops(ctx: Context, n: int) -> int:
        return sum([await ctx.event("e") for _ in range(300)])

    machine = bare(loops)
    for _ in range(300):
        machine.tell("received", "", {"type": "e", "key": "", "data": 1}, NOON)

    assert machine.result == 300


def test_an_execution_waits_for_at_most_two_thousand_things_at_once() -> None:
    async def asks(ctx: Context, n: int) -> None:
        async def many() -> None:
            await ctx.all(*(ctx.call("s", "a") for _ in range(FORK_WIDTH_MAX)))

        await ctx.all(*(many() for _ in range(OPEN_ASKS_MAX // FORK_WIDTH_MAX)), ctx.sleep(days(1)))

    held(asks, "open_asks_max: 2000 asks are open")


def test_one_scope_has_at_most_two_thousand_things_to_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "UNDOS_MAX", 3)

    async def asks(ctx: Context, n: int) -> None:
        await ctx.all(*(ctx.call("s", "a", undo=UNDO) for _ in range(n)))

    machine = Machine(flow_of(asks).program)
    machine.tell("started", "", {"input": 3, "seed": ""}, NOON)
    machine.evict()
    more = Machine(flow_of(asks).program)
    with pytest.raises(LimitExceeded, match="undos_max: 3 steps would have to be undone"):
        more.tell("started", "", {"input": 4, "seed": ""}, NOON)
    more.evict()


@pytest.mark.parametrize("what", ["calls", "pivots", "withdraws"])
def test_a_journal_that_is_full_holds_whatever_is_to_be_written_next(what: str) -> None:
    async def fills(ctx: Context, n: int) -> None:
        async def fails() -> None:
            raise ValueError("as written")

        with suppress(BaseException):
            match what:
                case "calls":
                    await ctx.all(*(ctx.call("s", "a") for _ in range(10)))
                case "withdraws":
                    await ctx.all(*(ctx.call("s", "a") for _ in range(6)), fails())
                case _:
                    for _ in range(10):
                        ctx.pivot()
        await ctx.sleep(days(1))

    held(fills, "facts_max: 10 facts reached at", facts_max=10)


def test_a_journal_that_is_full_takes_no_gift_and_says_so() -> None:
    async def waits(ctx: Context, n: int) -> None:
        await ctx.event("e")

    machine = Machine(flow_of(waits).program, facts_max=3)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON)

    with pytest.raises(LimitExceeded, match="facts_max: the journal has 3 facts, at most 3"):
        machine.tell("received", "", {"type": "e", "key": "", "data": None}, NOON)

    assert said(machine.new) == ["started", "asked e", "received"]
    machine.evict()


def test_a_refusal_of_what_could_not_be_stored_is_for_its_own_branch_only() -> None:
    async def sends(ctx: Context, n: int) -> list[str]:
        ends = await ctx.settle(ctx.call("s", "a", {"v": "x" * 300_000}), ctx.call("s", "b"))
        return [str(end) for end in ends]

    flow = driven(sends)
    assert flow.open == ["settle.1/b"]

    refused(flow, "settle.1/b")

    assert flow.returned[0].startswith("a at settle.0/a: too-large")
    assert flow.returned[1] == "b at settle.1/b: no"
