"""Branches side by side: who starts, who is stopped, who waits for whom, and what is undone."""

from __future__ import annotations

import contextlib
from itertools import permutations
from typing import Any, assert_never

import pytest

from orchestrator import (
    AllFailed,
    Cancelled,
    Context,
    Elapsed,
    FlowError,
    StepRefused,
    TimedOut,
    UsageError,
    command,
    days,
    hours,
    minutes,
    workflow,
)
from orchestrator.core.errors import ProgramFault
from orchestrator.core.terms import Op
from orchestrator.testing import FlowTester
from tests.core.answers import (
    UNDO,
    bare,
    cancelled,
    done,
    driven,
    finish,
    open_in,
    refused,
    said,
    undone,
    unknown,
)

Json = Any


async def at_once(value: str) -> str:
    return value


async def fails(why: str = "as written") -> str:
    raise ValueError(why)


# ---- together --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_all_returns_in_the_order_written_and_asks_at_the_same_paths_whoever_answers_first(
    order: tuple[str, ...],
) -> None:
    async def asks(ctx: Context, n: int) -> list[str]:
        async def twice(name: str) -> str:
            return await ctx.call("s", name) + await ctx.call("s", name)

        return list(await ctx.all(*(twice(name) for name in "abc")))

    flow = driven(asks)

    for name in order:
        branch = "abc".index(name)
        done(flow, f"all.{branch}/{name}", value=name)
        done(flow, f"all.{branch}/{name}#2", value="!")

    assert flow.returned == ["a!", "b!", "c!"]


def test_settle_waits_for_every_branch_and_an_error_is_a_value() -> None:
    async def asks(ctx: Context, n: int) -> list[str]:
        ends = await ctx.settle(ctx.call("s", "a"), ctx.call("s", "b"), ctx.sleep(days(-1)), at_once("d"))
        return [str(end) for end in ends]

    flow = driven(asks)
    refused(flow, "settle.0/a")
    assert flow.open == ["settle.1/b"]

    done(flow, "settle.1/b", value="b")

    [a, b, c, d] = flow.returned
    assert (a, b, d) == ("a at settle.0/a: no", "b", "d")
    assert c.startswith("a timeout of -1 day")


def test_settle_raises_what_no_flow_expects_when_all_have_ended() -> None:
    """The first of them, with all else that failed as notes; what the others did stays registered."""
    noted: list[str] = []

    async def asks(ctx: Context, n: int) -> None:
        a, b = ctx.call("s", "a", undo=UNDO), ctx.call("s", "b")
        try:
            await ctx.settle(fails("first"), a, fails("second"), b, at_once("e"))
        except ValueError as error:
            noted[:] = [str(error), *error.__notes__]
            raise

    flow = driven(asks)
    refused(flow, "settle.3/b")
    assert flow.open == ["settle.1/a"]

    done(flow, "settle.1/a", value="a")
    done(flow, "settle.1/a/undo")

    assert flow.status == "compensated"
    assert noted == [
        "first",
        "also failed beside it: ValueError: second",
        "also failed beside it: StepRefused: b at settle.3/b: no",
    ]


def test_settle_of_a_branch_that_ends_itself_as_cancelled_is_cancelled() -> None:
    async def leaves() -> str:
        raise Cancelled("by itself")

    async def asks(ctx: Context, n: int) -> None:
        await ctx.settle(leaves(), ctx.call("s", "a"))

    flow = driven(asks)
    assert flow.open == ["settle.1/a"]

    done(flow, "settle.1/a", value="a")

    assert flow.status == "cancelled"


def test_any_is_the_first_success_and_when_none_succeeds_all_errors_in_the_order_of_their_ends() -> None:
    async def asks(ctx: Context, n: int) -> list[str]:
        try:
            await ctx.any(ctx.call("s", "a"), ctx.call("s", "b"), fails())
        except AllFailed as failed:
            return [str(error) for error in failed.errors]
        return []

    flow = driven(asks)

    refused(flow, "any.1/b")
    refused(flow, "any.0/a")

    assert flow.returned == ["as written", "b at any.1/b: no", "a at any.0/a: no"]


def test_of_several_errors_the_earliest_is_raised_and_the_others_are_notes_on_it() -> None:
    noted: list[str] = []

    async def asks(ctx: Context, n: int) -> None:
        async def cleans(name: str) -> None:
            try:
                await ctx.call("s", name)
            finally:
                await fails(f"cleaning {name}")

        try:
            await ctx.all(cleans("a"), ctx.call("s", "b"), cleans("c"), at_once("d"))
        except StepRefused as error:
            noted.extend(error.__notes__)
            raise

    machine = bare(asks)

    refused(machine, "all.1/b")

    assert machine.status == "failed"
    assert noted == [
        "also failed beside it: ValueError: cleaning a",
        "also failed beside it: ValueError: cleaning c",
    ]


def test_of_nothing_all_and_settle_are_over_at_once() -> None:
    nothing: list[Op[None]] = []

    async def asks(ctx: Context, n: int) -> list[int]:
        return [len(await ctx.all(*nothing)), len(await ctx.settle(*nothing))]

    assert driven(asks).returned == [0, 0]


@pytest.mark.parametrize("mode", ["first", "any"])
def test_of_nothing_first_and_any_would_wait_for_ever(mode: str) -> None:
    async def asks(ctx: Context, n: int) -> str:
        try:
            await getattr(ctx, mode)()
        except UsageError as error:
            return str(error)
        return ""

    assert driven(asks).returned == f"ctx.{mode}() of nothing would wait for ever: expected at least one"


@pytest.mark.parametrize("mode", ["all", "settle", "first", "any"])
def test_what_is_no_coroutine_is_a_fault_that_says_so(mode: str) -> None:
    async def asks(ctx: Context, n: int) -> None:
        await getattr(ctx, mode)(ctx.call("s", "a"), at_once)

    with pytest.raises(
        ProgramFault, match=f"ctx.{mode} takes coroutines, as asyncio.gather does, not function"
    ):
        driven(asks)


def test_a_branch_asks_what_it_runs_wherever_its_coroutine_was_made() -> None:
    async def asks(ctx: Context, n: int) -> None:
        made: list[Any] = []

        async def makes() -> None:
            made.append(ctx.call("s", "a"))

        async def runs() -> None:
            await made.pop()

        await ctx.all(makes(), runs())

    assert driven(asks).open == ["all.1/a"]


# ---- stopping --------------------------------------------------------------------------------------------------


def test_a_fork_waits_for_the_cleanup_and_the_undo_of_what_it_stopped() -> None:
    async def asks(ctx: Context, n: int) -> str:
        async def cleans() -> None:
            async with ctx.saga("inner"):
                await ctx.call("s", "a", undo=UNDO)
                try:
                    await ctx.sleep(days(1))
                finally:
                    await ctx.call("s", "close")

        try:
            await ctx.all(cleans(), ctx.call("s", "b"))
        except StepRefused:
            return "went on"
        return "well"

    flow = driven(asks)
    done(flow, "all.0/inner/a")

    refused(flow, "all.1/b")

    assert flow.open == ["all.0/inner/close"]
    done(flow, "all.0/inner/close")
    assert flow.open == ["all.0/inner/a/undo"]
    done(flow, "all.0/inner/a/undo")
    assert flow.returned == "went on"


def test_a_cancel_goes_to_the_innermost_branches_first_and_comes_out_last() -> None:
    heard: list[str] = []

    async def asks(ctx: Context, n: int) -> None:
        async def listens(name: str, *inner: Any) -> None:
            try:
                await (ctx.all(*inner) if inner else ctx.sleep(days(1)))
            except Cancelled:
                heard.append(name)
                raise

        await listens("root", listens("left", listens("a"), listens("b")), listens("right"))

    machine = bare(asks)

    cancelled(machine)

    assert heard == ["a", "b", "right", "left", "root"]
    assert machine.status == "cancelled"


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


def test_a_winners_work_is_part_of_the_scope_around_and_is_undone_when_that_fails() -> None:
    async def asks(ctx: Context, n: int) -> None:
        await ctx.first(ctx.call("s", "a", undo=UNDO), ctx.call("s", "b", undo=UNDO))
        await fails()

    machine = bare(asks)

    done(machine, "first.1/b")
    refused(machine, "first.0/a", "never-sent")

    assert open_in(machine) == ["first.1/b/undo"]
    machine.evict()


def test_an_error_of_first_is_raised_after_what_its_branch_did_is_undone() -> None:
    async def asks(ctx: Context, n: int) -> str:
        async def reserves() -> str:
            await ctx.call("s", "a", undo=UNDO)
            return await ctx.call("s", "b")

        try:
            return await ctx.first(reserves(), ctx.call("s", "slow"))
        except StepRefused as error:
            return error.path

    flow = driven(asks)
    done(flow, "first.0/a")

    refused(flow, "first.0/b")

    assert flow.open == ["first.1/slow", "first.0/a/undo"]
    done(flow, "first.0/a/undo")
    assert flow.returned == "first.0/b"


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


def test_a_late_reply_makes_the_undo_of_a_loser_exact_before_it_is_asked() -> None:
    async def asks(ctx: Context, n: int) -> None:
        await ctx.first(
            ctx.call("s", "a", undo=lambda reply: command("s", "undo", reply)), ctx.call("s", "b")
        )

    machine = bare(asks)
    done(machine, "first.1/b")

    done(machine, "first.0/a", value={"charge": 7})

    [(_, ask)] = machine.open.values()
    assert (ask.path, ask.args["data"]) == ("first.0/a/undo", {"charge": 7})
    machine.evict()


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


def test_within_is_what_its_coroutine_returns_or_raises_in_time() -> None:
    well, badly = FlowTester(hurries, 1), FlowTester(hurries, 1)

    done(well, "within.0/a")
    done(well, "within.0/b", value="booked")
    done(badly, "within.0/a")
    refused(badly, "within.0/b")
    done(badly, "within.0/a/undo")

    assert (well.returned, badly.returned) == ("booked", "refused")


def test_within_withdraws_what_is_under_way_and_undoes_what_was_done_when_its_time_is_over() -> None:
    flow = FlowTester(hurries, 1)
    done(flow, "within.0/a")

    flow.passes(hours(1))

    assert said(flow.journal)[5:7] == ["ended within.1/limit", "withdrawn within.0/b"]
    finish(flow)
    assert (undone(flow.journal), flow.returned) == (
        ["within.0/b", "within.0/a"],
        "within: not done within 1:00:00",
    )


# ---- scopes ----------------------------------------------------------------------------------------------------


def test_a_named_scope_stands_in_the_paths_inside_and_an_unnamed_one_moves_none() -> None:
    async def asks(ctx: Context, n: int) -> None:
        for _ in range(2):
            async with ctx.saga("by-air"):
                await ctx.call("s", "a")
                async with ctx.saga():
                    await ctx.call("s", "a")
        await ctx.call("s", "a")
        await ctx.call("s", "by-air")

    flow = driven(asks)
    finish(flow)

    assert flow.told == ["by-air/a", "by-air/a#2", "by-air#2/a", "by-air#2/a#2", "a", "by-air#3"]


def test_a_branch_and_a_loop_count_apart() -> None:
    async def asks(ctx: Context, n: int) -> None:
        for _ in range(2):
            await ctx.all(ctx.call("s", "a"), ctx.call("s", "a"))

    flow = driven(asks)
    finish(flow)

    assert flow.told == ["all.0/a", "all.1/a", "all#2.0/a", "all#2.1/a"]


def test_what_an_inner_scope_did_is_undone_alone_and_what_it_leaves_well_goes_with_the_outer_one() -> None:
    async def asks(ctx: Context, n: int) -> str:
        async with ctx.saga("outer"):
            async with ctx.saga("kept"):
                await ctx.call("s", "a", undo=UNDO)
            try:
                async with ctx.saga("inner"):
                    await ctx.call("s", "b", undo=UNDO)
                    await fails()
            except ValueError:
                await ctx.call("s", "c")
            return await fails()

    flow = driven(asks)
    done(flow, "outer/kept/a", "outer/inner/b")
    assert flow.open == ["outer/inner/b/undo"]

    done(flow, "outer/inner/b/undo", "outer/c")

    assert flow.open == ["outer/kept/a/undo"]
    done(flow, "outer/kept/a/undo")
    assert (flow.status, flow.journal[-1].data["undone"]) == ("compensated", 2)


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


def test_a_pivot_also_drops_the_undo_of_what_is_unknown_and_a_late_answer_changes_nothing() -> None:
    async def asks(ctx: Context, n: int) -> None:
        try:
            await ctx.call("s", "a", undo=UNDO)
        except FlowError:
            ctx.pivot()
        await ctx.call("s", "b")
        await fails()

    flow = driven(asks)
    unknown(flow, "a")

    flow.late("a", "done")
    done(flow, "b")

    assert (flow.status, undone(flow.journal), flow.journal[-1].data["stands"]) == ("failed", [], ["a"])


@pytest.mark.parametrize("where", ["all", "within"])
def test_a_pivot_inside_a_branch_is_refused_and_writes_nothing(where: str) -> None:
    async def asks(ctx: Context, n: int) -> str:
        async def decides() -> str:
            try:
                ctx.pivot()
            except UsageError as error:
                return str(error)
            return ""

        if where == "all":
            return (await ctx.all(decides(), at_once("")))[0]
        return await ctx.within(hours(1), decides())

    flow = driven(asks)

    assert "inside a branch would decide for its siblings" in flow.returned
    assert [fact.kind for fact in flow.journal if fact.kind == "noted"] == []


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


def test_what_is_cancelled_without_undo_lists_what_stands() -> None:
    flow = done_thrice()

    flow.cancels(undo=False)

    assert (flow.status, flow.journal[-1].data["stands"]) == ("cancelled", ["a", "a#2", "a#3"])


def test_a_cancel_without_undo_while_it_is_undone_stops_before_the_next_undo() -> None:
    flow = done_thrice()
    flow.cancels()
    assert flow.open == ["a#3/undo"]

    flow.cancels(undo=False)
    assert (flow.status, flow.open) == ("open", ["a#3/undo"])
    done(flow, "a#3/undo")

    assert (flow.status, undone(flow.journal)) == ("cancelled", ["a#3"])
    assert flow.journal[-1].data["stands"] == ["a", "a#2"]


def test_a_cancel_without_undo_lets_go_an_undo_that_a_person_was_to_decide_about() -> None:
    flow = done_thrice()
    refused(flow, "b")
    refused(flow, "a#3/undo")
    assert flow.status == "held"

    flow.cancels(undo=False)

    assert (flow.status, sorted(flow.journal[-1].data["stands"])) == ("failed", ["a", "a#2", "a#3"])


def test_an_undo_that_runs_when_the_rest_is_given_up_and_then_fails_asks_a_person() -> None:
    flow = done_thrice()
    flow.cancels()
    flow.cancels(undo=False)

    refused(flow, "a#3/undo")

    assert flow.status == "held"
    flow.resolves("a#3/undo", "skip")
    assert (flow.status, sorted(flow.journal[-1].data["stands"])) == ("cancelled", ["a", "a#2", "a#3"])


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


def test_what_first_returns_is_told_apart_by_its_type() -> None:
    async def waits(ctx: Context, n: int) -> str:
        found = await ctx.first(at_once("won"), ctx.sleep(minutes(1)))
        match found:
            case str():
                return found
            case Elapsed():
                return "too late"
            case _:
                assert_never(found)

    assert driven(waits).returned == "won"
