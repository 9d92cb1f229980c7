"""A flow that asks services which are killed."""

from __future__ import annotations

from examples.shop.contracts import Order, Receipt, Release, Reserve, Ship
from orchestrator import Context, workflow
from tests.acceptance.desk_contracts import Buy, Print, Return, Void


@workflow(name="stamped", version="1")
async def stamped(ctx: Context, order: Order) -> Receipt:
    """An order that gets a label and a stamp."""
    await ctx.call(Reserve(order=order.id, lines=order.lines), undo=Release(order=order.id))
    await ctx.call(Print(order=order.id), undo=Void(order=order.id))
    await ctx.call(Buy(order=order.id), undo=Return(order=order.id))
    shipped = await ctx.call(Ship(order=order.id))
    return Receipt(order=order.id, charge="", tracking=shipped.tracking)
