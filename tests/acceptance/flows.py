"""Flows of the acceptance tests, beside the shop's own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from examples.shop.contracts import Charge, Order, Receipt, Release, Reserve, Ship
from orchestrator import Context, Retry, local, seconds, workflow

FOLDER = "ACCEPTANCE_FOLDER"
"""Names the folder in which local steps leave their traces and look for the gate."""

GATE = "gate"
GATE_SECONDS = 0.02
WEIGHING_SECONDS = 0.3


@workflow(name="hasty", version="1")
async def hasty(ctx: Context, order: Order) -> Receipt:
    """An order that does not wait long for its charge."""
    await ctx.call(Reserve(order=order.id, lines=order.lines), undo=Release(order=order.id))

    charge = Charge(order=order.id, amount=order.total, card=order.card)
    paid = await ctx.call(charge, undo=charge.refund, timeout=seconds(4))

    shipped = await ctx.call(Ship(order=order.id))
    return Receipt(order=order.id, charge=paid.charge, tracking=shipped.tracking)


@workflow(name="packed", version="1")
async def packed(ctx: Context, order: Order) -> Receipt:
    """An order that is weighed and packed here, between two calls."""
    await ctx.call(Reserve(order=order.id, lines=order.lines), undo=Release(order=order.id))
    weight = await ctx.step(weigh, order.id)
    await ctx.step(pack, order.id, weight)
    shipped = await ctx.call(Ship(order=order.id))
    return Receipt(order=order.id, charge="", tracking=shipped.tracking)


@workflow(name="weighed", version="1")
async def weighed(ctx: Context, order: Order) -> Receipt:
    """The shop's order, with a step between its calls that keeps a worker busy for a moment."""
    await ctx.call(Reserve(order=order.id, lines=order.lines), undo=Release(order=order.id))
    often = Retry(attempts=100)  # a worker that is killed uses up a try
    await ctx.step(weigh_slowly, order.id, undo=local(unweigh, order.id), retry=often)

    charge = Charge(order=order.id, amount=order.total, card=order.card)
    paid = await ctx.call(charge, undo=charge.refund)

    shipped = await ctx.call(Ship(order=order.id))
    return Receipt(order=order.id, charge=paid.charge, tracking=shipped.tracking)


def weigh(order: str) -> int:
    """Done at once."""
    trace("weigh", order)
    return 42


async def weigh_slowly(order: str) -> int:
    trace("weigh", order)
    await asyncio.sleep(WEIGHING_SECONDS)
    return 42


def unweigh(order: str) -> None:
    trace("unweigh", order)


async def pack(order: str, _weight: int) -> None:
    """Done when the gate is open."""
    trace("pack", order)
    while not (folder() / GATE).exists():  # noqa: ASYNC110  # another process opens it
        await asyncio.sleep(GATE_SECONDS)


def trace(step: str, order: str) -> None:
    """Leave a line that outlives this process: the step was begun."""
    with (folder() / f"{order}.steps").open("a", encoding="ascii") as file:
        file.write(f"{step}\n")


def folder() -> Path:
    return Path(os.environ[FOLDER])
