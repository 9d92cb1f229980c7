"""One function for many items: how many at once, in which order, and what an error stops."""

from __future__ import annotations

import pytest

from contracts.limits import FORK_WIDTH_MAX, ITEMS_MAX
from orchestrator import Cancelled, Context, UsageError, days
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
    tell,
    undone,
)


async def ask(ctx: Context, item: object) -> object:
    return await ctx.call("s", "a", {"item": item}, undo=UNDO)


def test_no_more_than_concurrency_run_at_once_and_the_next_begins_when_one_ends() -> None:
    async def maps(ctx: Context, n: int) -> object:
        return await ctx.map("abcd", lambda item: ask(ctx, item), concurrency=2)

    flow = driven(maps)
    seen = [open_in(flow)]
    for path in ("map.1/a", "map.2/a", "map.0/a", "map.3/a"):
        tell(flow, "ended", path, {"outcome": "done", "value": path})
        seen.append(open_in(flow))

    assert seen == [
        ["map.0/a", "map.1/a"],
        ["map.0/a", "map.2/a"],
        ["map.0/a", "map.3/a"],
        ["map.3/a"],
        [],
    ]
    assert flow.returned == [f"map.{i}/a" for i in range(4)]


def test_the_first_error_stops_those_under_way_and_begins_no_more() -> None:
    async def maps(ctx: Context, n: int) -> object:
        return await ctx.map(range(100), lambda item: ask(ctx, item), concurrency=3)

    flow = driven(maps)
    done(flow, "map.0/a")
    refused(flow, "map.2/a")
    finish(flow)

    asked = [fact.path for fact in flow.journal if fact.kind == "asked" and fact.data["kind"] == "call"]
    assert asked == ["map.0/a", "map.1/a", "map.2/a", "map.3/a"]
    assert [line for line in said(flow.journal) if "withdrawn" in line] == [
        "withdrawn map.1/a",
        "withdrawn map.3/a",
    ]
    assert undone(flow.journal)[-1] == "map.0/a"
    assert flow.status == "compensated"


def test_a_cancelled_flow_begins_no_more_items() -> None:
    async def maps(ctx: Context, n: int) -> object:
        try:
            return await ctx.map(range(100), lambda item: ask(ctx, item), concurrency=2)
        except Cancelled:
            await ctx.call("s", "closing")
            raise

    machine = bare(maps)
    cancelled(machine)

    assert open_in(machine) == ["closing"]
    machine.evict()


def test_what_fn_raises_is_the_branchs_own_error() -> None:
    async def maps(ctx: Context, n: int) -> object:
        def fails(item: int) -> object:
            raise ValueError(f"no {item}")

        try:
            return await ctx.map([1, 2], fails, concurrency=1)  # pyright: ignore[reportArgumentType, reportUnknownVariableType]  # on purpose
        except ValueError as error:
            return str(error)

    assert driven(maps).returned == "no 1"


def test_nothing_to_do_is_done() -> None:
    async def maps(ctx: Context, n: int) -> object:
        return await ctx.map([], lambda item: ask(ctx, item), concurrency=2)

    assert driven(maps).returned == []


def test_items_may_come_from_a_generator_and_wait_for_nothing() -> None:
    async def twice(item: int) -> int:
        return 2 * item

    async def maps(ctx: Context, n: int) -> object:
        return sum(await ctx.map((i for i in range(2_500)), twice, concurrency=1_000))

    assert driven(maps).returned == 2 * sum(range(2_500))


def test_more_items_than_items_max_are_a_usage_error_that_is_recorded() -> None:
    async def maps(ctx: Context, n: int) -> object:
        try:
            return await ctx.map(range(4), lambda item: ask(ctx, item), concurrency=2, items_max=3)
        except UsageError as error:
            await ctx.sleep(days(1))
            return str(error)

    flow = driven(maps)
    assert said(flow.journal)[:3] == ["started", "asked map", "ended map"]

    flow.passes(days(1))
    assert flow.returned == "items_max: map of 4 branches, at most 3"


@pytest.mark.parametrize(
    ("concurrency", "items_max", "says"),
    [
        (0, 1, "concurrency=0, expected 1 to 1000"),
        (FORK_WIDTH_MAX + 1, 1, "concurrency=1001, expected 1 to 1000"),
        (1, 0, "items_max=0, expected 1 to 10000"),
        (1, ITEMS_MAX + 1, "items_max=10001, expected 1 to 10000"),
    ],
)
def test_a_width_that_cannot_be_is_a_usage_error(concurrency: int, items_max: int, says: str) -> None:
    async def maps(ctx: Context, n: int) -> object:
        try:
            return await ctx.map(
                [1], lambda item: ask(ctx, item), concurrency=concurrency, items_max=items_max
            )
        except UsageError as error:
            return str(error)

    assert driven(maps).returned == f"ctx.map: {says}"
