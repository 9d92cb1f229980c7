"""Flows of the scenarios, each with one thing that the shop's order has not."""

from __future__ import annotations

from datetime import timedelta

from contracts.messages import Event
from examples.shop.contracts import Charge, Order, Receipt, Release, Reserve, Ship
from orchestrator import Context, Retry, local, minutes, seconds, workflow
from tests.acceptance.flows import trace

REST = seconds(2)
"""Longer than it takes to stop everything."""


class Approved(Event, type="order.approved", key="order"):
    order: str
    by: str


@workflow(name="chosen", version="1")
async def chosen(ctx: Context, order: Order) -> Receipt:
    """A gift is shipped at once; what costs something is charged first."""
    if order.total == 0:
        shipped = await ctx.call(Ship(order=order.id))
        return Receipt(order=order.id, charge="", tracking=shipped.tracking)
    paid = await ctx.call(Charge(order=order.id, amount=order.total))
    return Receipt(order=order.id, charge=paid.charge, tracking="")


@workflow(name="abreast", version="1")
async def abreast(ctx: Context, order: Order) -> Receipt:
    """Reserved and charged side by side, then shipped."""
    charge = Charge(order=order.id, amount=order.total)
    _, paid = await ctx.all(
        ctx.call(Reserve(order=order.id, lines=order.lines), undo=Release(order=order.id)),
        ctx.call(charge, undo=charge.refund),
    )
    shipped = await ctx.call(Ship(order=order.id))
    return Receipt(order=order.id, charge=paid.charge, tracking=shipped.tracking)


@workflow(name="approved", version="1")
async def approved(ctx: Context, order: Order) -> str:
    """Ships when somebody outside has said yes; returns who."""
    await ctx.call(Reserve(order=order.id, lines=order.lines), undo=Release(order=order.id))
    yes = await ctx.event(Approved, key=order.id, timeout=minutes(10))
    await ctx.call(Ship(order=order.id))
    return yes.by


@workflow(name="bounded", version="1")
async def bounded(ctx: Context, order: Order) -> Receipt:
    """The whole order within a few seconds, or none of it."""
    return await ctx.within(seconds(4), bought(ctx, order))


async def bought(ctx: Context, order: Order) -> Receipt:
    await ctx.call(Reserve(order=order.id, lines=order.lines), undo=Release(order=order.id))
    charge = Charge(order=order.id, amount=order.total)
    paid = await ctx.call(charge, undo=charge.refund)
    shipped = await ctx.call(Ship(order=order.id))
    return Receipt(order=order.id, charge=paid.charge, tracking=shipped.tracking)


@workflow(name="jammed", version="1")
async def jammed(ctx: Context, order: Order) -> None:
    """A step of its own that never works."""
    await ctx.call(Reserve(order=order.id, lines=order.lines), undo=Release(order=order.id))
    thrice = Retry(attempts=3, first=timedelta(milliseconds=20))
    await ctx.step(jam, order.id, undo=local(unjam, order.id), retry=thrice)
    await ctx.call(Ship(order=order.id))


def jam(order: str) -> None:
    trace("jam", order)
    raise OSError("paper jam")


def unjam(order: str) -> None:
    trace("unjam", order)


@workflow(name="rested", version="1")
async def rested(ctx: Context, order: Order) -> Receipt:
    """Sleeps between reserving and shipping."""
    await ctx.call(Reserve(order=order.id, lines=order.lines), undo=Release(order=order.id))
    await ctx.sleep(REST)
    shipped = await ctx.call(Ship(order=order.id))
    return Receipt(order=order.id, charge="", tracking=shipped.tracking)
