"""Events that flows emit: what is written down, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import Context, Event, UsageError
from tests.core.answers import driven, said


class Shipped(Event, type="shop.order.shipped", key="order"):
    order: str
    when: Any = None


class Untyped(Event):
    order: str


async def emits(ctx: Context, event: Event) -> str:
    try:
        ctx.emit(event)
    except UsageError as error:
        return str(error)
    return "emitted"


def test_an_event_is_written_down_with_type_key_and_data() -> None:
    async def tells(ctx: Context, n: int) -> str:
        return await emits(ctx, Shipped(order="A", when=3))

    flow = driven(tells)

    assert said(flow.journal) == ["started", "noted shipped", "finished completed"]
    assert flow.journal[1].data["args"] == {
        "type": "shop.order.shipped",
        "key": "A",
        "data": {"order": "A", "when": 3},
    }


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Untyped(order="A"), "event Untyped: expected a class with type="),
        (Shipped(order=""), "event key '': expected 1 to 1024 bytes of printable text"),
        (Shipped(order="x" * 1025), "expected 1 to 1024 bytes of printable text"),
        (Shipped(order="A", when="\x00"), "noted shipped"),
        (Shipped(order="A", when="x" * 300_000), "noted shipped"),
    ],
)
def test_an_event_that_cannot_be_sent_is_a_usage_error_and_leaves_nothing(event: Event, says: str) -> None:
    async def tells(ctx: Context, n: int) -> str:
        return await emits(ctx, event)

    flow = driven(tells)

    assert says in flow.returned
    assert said(flow.journal) == ["started", "finished completed"]
