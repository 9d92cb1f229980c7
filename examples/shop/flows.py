"""An order: reserve, charge, ship. What was done is undone in reverse when a service says no."""

from __future__ import annotations

from examples.shop.contracts import Charge, Order, Receipt, Release, Reserve, Ship
from orchestrator import Context, minutes, workflow


@workflow(name="order", version="1")
async def order_saga(ctx: Context, order: Order) -> Receipt:
    await ctx.call(Reserve(order=order.id, lines=order.lines), undo=Release(order=order.id))

    charge = Charge(order=order.id, amount=order.total, card=order.card)
    paid = await ctx.call(charge, undo=charge.refund, timeout=minutes(5))

    shipped = await ctx.call(Ship(order=order.id))
    return Receipt(order=order.id, charge=paid.charge, tracking=shipped.tracking)
