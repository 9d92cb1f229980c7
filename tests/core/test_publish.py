"""What flows say about their executions: what is written down, what is removed, and what cannot be."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from contracts.limits import ATTRIBUTES_MAX
from orchestrator import Context, UsageError
from tests.core.answers import driven, said

NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


def test_what_is_published_is_written_down_and_the_last_value_counts() -> None:
    async def tells(ctx: Context, n: int) -> None:
        ctx.publish(
            stage="paid", amount=42, rate=0.5, urgent=True, due=NOON.astimezone(timezone(timedelta(hours=2)))
        )
        ctx.publish(stage="shipped", amount=None)

    flow = driven(tells)

    assert said(flow.journal) == ["started", "noted publish", "noted publish#2", "finished completed"]
    assert flow.journal[1].data["args"] == {
        "stage": "paid",
        "amount": 42,
        "rate": 0.5,
        "urgent": True,
        "due": {"time": "2026-12-01T12:00:00+00:00"},
    }
    assert flow.attributes == {"stage": "shipped", "rate": 0.5, "urgent": True, "due": NOON}


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({}, "ctx.publish(): expected at least one attribute"),
        ({"": 1}, "attribute '': expected a name of 1 to 64 letters, digits and underscores"),
        ({"a-b": 1}, "attribute 'a-b': expected a name"),
        ({"1a": 1}, "attribute '1a': expected a name"),
        ({"é": 1}, "expected a name of 1 to 64 letters"),
        ({"a" * 65: 1}, "expected a name of 1 to 64"),
        ({"a": "x" * 257}, "attribute a: expected at most 256 bytes of printable text"),
        ({"a": "é" * 129}, "attribute a: expected at most 256 bytes of printable text"),
        ({"a": "x\ny"}, "attribute a: expected at most 256 bytes of printable text, found 'x\\ny'"),
        ({"a": float("nan")}, "attribute a: expected a finite number, found nan"),
        ({"a": 2**63}, "attribute a: expected a whole number of 64 bits"),
        ({"a": datetime(2026, 1, 1)}, "attribute a: expected a time with a zone"),  # noqa: DTZ001  # that is the point
        ({"a": ["x"]}, "attribute a: expected a text, a number, True or False, a time, or None, found ['x']"),
        (
            {f"a{n}": n for n in range(ATTRIBUTES_MAX + 1)},
            "expected at most 32 attributes of one execution, found 33",
        ),
    ],
)
def test_what_cannot_be_published_is_a_usage_error_and_leaves_nothing(
    attributes: dict[str, Any], says: str
) -> None:
    async def tells(ctx: Context, n: int) -> str:
        try:
            ctx.publish(**attributes)
        except UsageError as error:
            return str(error)
        return "published"

    flow = driven(tells)

    assert says in flow.returned
    assert said(flow.journal) == ["started", "finished completed"]
    assert flow.attributes == {}


def test_attributes_of_earlier_turns_count_and_those_that_were_removed_do_not() -> None:
    async def tells(ctx: Context, n: int) -> str:
        ctx.publish(**{f"a{n}": n for n in range(ATTRIBUTES_MAX)})
        await ctx.sleep(timedelta(seconds=1))
        ctx.publish(a0=None, b=1)
        try:
            ctx.publish(c=1)
        except UsageError as error:
            return str(error)
        return "published"

    flow = driven(tells)
    flow.passes(timedelta(seconds=1))

    assert "at most 32 attributes" in flow.returned
    assert len(flow.attributes) == ATTRIBUTES_MAX


def test_a_flow_that_continues_as_new_keeps_its_attributes() -> None:
    async def tells(ctx: Context, n: int) -> str:
        if n == 1:
            ctx.publish(stage="first", kept=True)
            ctx.continue_as_new(2)
        if n == 2:
            ctx.publish(stage="second")
            ctx.continue_as_new(3)
        ctx.publish(more="x")
        return "over"

    flow = driven(tells)

    assert flow.attributes == {"stage": "second", "kept": True, "more": "x"}
