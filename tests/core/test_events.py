"""Events: which one goes to which wait, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import (
    Context,
    Event,
    hours,
    workflow,
)
from tests.core.answers import done, driven, refused, said

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


# ---- waits that end otherwise ------------------------------------------------------------------------------------


# ---- facts -----------------------------------------------------------------------------------------------------


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
