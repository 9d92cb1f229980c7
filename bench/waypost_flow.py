"""The flow that is measured: three local steps, each remembered before the next begins."""

from __future__ import annotations

from typing import TypeAlias

from orchestrator import Context, workflow

Order: TypeAlias = dict[str, int]


async def reserve(order: Order) -> dict[str, int]:
    return {"reserved": order["number"]}


async def charge(order: Order) -> dict[str, int]:
    return {"charged": order["number"]}


async def ship(order: Order) -> dict[str, int]:
    return {"shipped": order["number"]}


@workflow(name="fulfil", version="1")
async def fulfil(ctx: Context, order: Order) -> dict[str, int]:
    await ctx.step(reserve, order)
    await ctx.step(charge, order)
    return await ctx.step(ship, order)
