"""The flows whose every commit is killed."""

from __future__ import annotations

import asyncio
from typing import Any, Final, LiteralString

import psycopg
from pydantic import BaseModel

from orchestrator import (
    Context,
    OutcomeUnknown,
    Retry,
    StepRefused,
    Tasks,
    TimedOut,
    hours,
    local,
    seconds,
    workflow,
)
from orchestrator.engine.pulse import attempt
from tests.crash.contracts import (
    Announced,
    Carrier,
    Charge,
    Collected,
    Lost,
    Mill,
    Reserve,
    Ship,
    Shipped,
    Sorted,
    Tell,
)
from tests.crash.witness import act

NAP: Final = seconds(0.3)
MILLING_SECONDS: Final = 0.8
"""Longer than the pause between two signs of life of who has a task."""
QUEUE: Final = "mill"
OFTEN: Final = Retry(attempts=20, first=seconds(0.05), factor=1.0)
"""A worker that is killed uses up a try."""


class Order(BaseModel):
    id: str
    carrier: Carrier = Carrier.TAKES
    busy: bool = False
    jammed: bool = False


class Assorted(BaseModel):
    """An order whose flow has begun again, or has not."""

    id: str
    again: bool = False


class Receipt(BaseModel):
    weight: int
    label: str
    charge: str
    tracking: str


@workflow(name="parcel", version="1")
async def parcel(ctx: Context, order: Order) -> Receipt:
    """Every kind of step, and an undo for most of them."""
    weight = await ctx.step(weigh, order.id, undo=local(unweigh, order.id), retry=OFTEN)
    label = await ctx.step(print_label, order.id, weight, retry=OFTEN)
    reserve = Reserve(order=order.id, jammed=order.jammed)
    await ctx.call(reserve, undo=reserve.release)
    charge = Charge(order=order.id, busy=order.busy)
    paid = await ctx.call(charge, undo=charge.refund)
    await ctx.sleep(NAP, name="nap")
    shipped = await ctx.call(Ship(order=order.id, carrier=order.carrier, busy=order.busy))
    return Receipt(weight=weight, label=label, charge=paid.charge, tracking=shipped.tracking)


@workflow(name="notice", version="1")
async def notice(ctx: Context, order: Order) -> str:
    """A customer is told, at most once."""
    try:
        await ctx.call(Tell(order=order.id), unknown="raise")
    except StepRefused:
        return "not told"
    except OutcomeUnknown:
        return "nobody knows"
    return "told"


@workflow(name="together", version="1")
async def together(ctx: Context, order: Order) -> str:
    """Two services and an event side by side, then a race that the event never wins."""
    reserve = Reserve(order=order.id, jammed=order.jammed)
    charge = Charge(order=order.id, busy=order.busy)
    await ctx.all(
        ctx.call(reserve, undo=reserve.release),
        ctx.call(charge, undo=charge.refund),
        ctx.event(Collected, key=order.id),
    )
    ship = Ship(order=order.id, carrier=order.carrier, busy=order.busy)
    shipped = await ctx.first(ctx.call(ship), ctx.event(Lost, key=order.id))
    return shipped.tracking if isinstance(shipped, Shipped) else "lost"


@workflow(name="cancelled", version="1")
async def cancelled(ctx: Context, order: Order) -> None:
    """Waits for what never comes, until somebody cancels it."""
    reserve = Reserve(order=order.id, jammed=order.jammed)
    await ctx.call(reserve, undo=reserve.release)
    try:
        await ctx.all(ctx.event(Lost, key=order.id), ctx.sleep(hours(1), name="nap"))
    finally:
        await ctx.step(sweep, order.id, retry=OFTEN)


@workflow(name="pickup", version="1", on=Announced, key="order")
async def pickup(ctx: Context, announced: Announced) -> str:
    """An event starts it, and its only call waits for its turn."""
    reserved = await ctx.call(Reserve(order=announced.order, jammed=False), mutex=announced.order)
    return reserved.reservation


@workflow(name="booked", version="1")
async def booked(ctx: Context, order: Order) -> list[int]:
    """The application's own table is written in the commits of the journal, before and after a service is asked."""
    before = await ctx.transaction(book, order.id, name="before")
    await ctx.call(Reserve(order=order.id, jammed=False))
    after = await ctx.transaction(book, order.id, name="after")
    return [before, after]


@workflow(name="packed", version="1")
async def packed(ctx: Context, order: Order) -> str:
    """A child that does something and returns."""
    reserve = Reserve(order=order.id, jammed=order.jammed)
    return (await ctx.call(reserve, undo=reserve.release)).reservation


@workflow(name="idle", version="1")
async def idle(ctx: Context, order: Order) -> None:
    """A child that waits for what never comes."""
    await ctx.event(Lost, key=order.id)


@workflow(name="family", version="1")
async def family(ctx: Context, order: Order) -> str:
    """A child that ends, then one that is told to."""
    reservation = await ctx.child(packed, order)
    try:
        await ctx.within(NAP, ctx.child(idle, order))
    except TimedOut:
        return reservation
    return "found"


BOOK: Final[LiteralString] = "insert into ledger (item) values (%s)"
BOOKED: Final[LiteralString] = "select count(*) from ledger where item = %s"


async def book(conn: psycopg.AsyncConnection[Any], order: str) -> int:
    """How many lines the order has in the ledger, this one included."""
    await conn.execute(BOOK, [order])
    row = await (await conn.execute(BOOKED, [order])).fetchone()
    assert row is not None, "a count has a row"
    return int(row[0])


@workflow(name="sorting", version="1")
async def sorting(ctx: Context, order: Order) -> str:
    """It hears what it emits."""
    ctx.emit(Sorted(order=order.id))
    heard = await ctx.event(Sorted, key=order.id)
    return heard.order


@workflow(name="milled", version="1")
async def milled(ctx: Context, order: Order) -> int:
    """Work of a queue, of which one at a time is under way."""
    return await ctx.task(Mill(order=order.id), queue=QUEUE, retry=OFTEN, mutex=order.id)


@workflow(name="retrieved", version="1")
async def retrieved(ctx: Context, order: Order) -> str:
    """It waits for what came when nobody waited, and was kept too long."""
    return (await ctx.event(Collected, key=order.id)).order


@workflow(name="assorted", version="1")
async def assorted(ctx: Context, order: Assorted) -> str:
    """Whatever else a flow may ask for. What begins together is one commit, so that it is always the same ones."""
    if order.again:
        return order.id
    ctx.publish(stage="begun" if ctx.patched("stages") else "new", share=round(ctx.random(), 3) < 2)
    ctx.start(marked, f"{order.id} at {ctx.uuid()}"[: len(order.id)])
    await ctx.sleep_until(ctx.now() + NAP)
    async with ctx.saga("races"):
        await ctx.settle(
            ctx.any(ctx.sleep(NAP, name="nap"), ctx.event(Lost, key=order.id)),
            ctx.map(range(2), lambda _: ctx.sleep(NAP, name="rest"), concurrency=2),
        )
    ctx.pivot()
    await ctx.approval("leave", who="ada")
    return ctx.continue_as_new(Assorted(id=order.id, again=True))


@workflow(name="marked", version="1")
async def marked(_: Context, order: str) -> str:
    """An execution of its own."""
    return order


tasks = Tasks()


@tasks.does(Mill)
async def mill(_: Mill) -> int:
    await asyncio.sleep(MILLING_SECONDS)
    act(attempt().key, "milled")
    return 7


def weigh(_order: str) -> int:
    act(attempt().key, "weighed")
    return 42


def unweigh(_order: str) -> None:
    act(attempt().key, "unweighed")


def print_label(order: str, weight: int) -> str:
    """The printer has no paper at first."""
    if attempt().number == 1:
        raise RuntimeError("no paper")
    act(attempt().key, "printed")
    return f"{order}: {weight} g"


def sweep(_order: str) -> None:
    act(attempt().key, "swept")
