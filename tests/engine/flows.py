"""Flows that the engine's tests run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

from pydantic import BaseModel

from contracts import Command, Refused
from orchestrator import (
    Context,
    Elapsed,
    Event,
    OutcomeUnknown,
    Retry,
    StepRefused,
    TimedOut,
    local,
    seconds,
    workflow,
)
from orchestrator.flows import Flows

CALLS: list[tuple[Any, ...]] = []
"""What the local functions did, in order."""

BLOCK = threading.Event()


class Charged(BaseModel):
    charge: str


class Refund(Command[None], endpoint="payments", type="payment.refund"):
    order: str
    charge: str | None


class Charge(Command[Charged], endpoint="payments", type="payment.charge"):
    order: str

    def refund(self, done: Charged | None) -> Refund:
        return Refund(order=self.order, charge=done.charge if done else None)


class Ship(Command[None], endpoint="shipping", type="shipment.create"):
    order: str


async def triple(n: int) -> int:
    CALLS.append(("triple", n))
    return n * 3


def double(n: int) -> int:
    CALLS.append(("double", n, threading.current_thread() is not threading.main_thread()))
    return n * 2


def undo_double(n: int) -> None:
    CALLS.append(("undo_double", n))


def declines(code: str) -> None:
    CALLS.append(("declines", code))
    raise Refused(code, "said no")


def breaks() -> None:
    CALLS.append(("breaks",))
    raise ValueError("broken \x1b[31m")


async def returns(what: str) -> Any:
    CALLS.append(("returns", what))
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    return {
        "nan": float("nan"), "nul": "\x00", "surrogate": "\ud800", "large": "x" * 300_000, "deep": deep,
        "object": object(), "huge": 10**5000, "infinite": float("1e5000"),
    }[what]  # fmt: skip


async def waits() -> str:
    CALLS.append(("waits",))
    await asyncio.Event().wait()
    return "never"


@workflow(name="three", version="1")
async def three(ctx: Context, n: int) -> int:
    a = await ctx.step(triple, n)
    b = await ctx.step(double, a)
    return await ctx.step(triple, b, name="again")


@workflow(name="undoes", version="1")
async def undoes(ctx: Context, n: int) -> None:
    await ctx.step(double, n, undo=local(undo_double, n))
    await ctx.step(double, n + 1, undo=local(undo_double, n + 1))
    await ctx.step(declines, "sold-out")


@workflow(name="retries", version="1")
async def retries(ctx: Context, n: int) -> None:
    await ctx.step(breaks, retry=Retry(attempts=2, first=seconds(0.01), cap=seconds(0.01)))


@workflow(name="unfit", version="1")
async def unfit(ctx: Context, what: str) -> str:
    await ctx.step(returns, what, undo=local(undo_double, 1))
    return "fits"


@workflow(name="pays", version="1")
async def pays(ctx: Context, order: str) -> str:
    charge = Charge(order=order)
    paid = await ctx.call(charge, undo=charge.refund)
    await ctx.call(Ship(order=order))
    return paid.charge


@workflow(name="persists", version="1")
async def persists(ctx: Context, order: str) -> str:
    charge = Charge(order=order)
    retry = Retry.fixed(seconds(0.01), attempts=3, only=("busy",))
    paid = await ctx.call(charge, undo=charge.refund, retry=retry)
    await ctx.call(Ship(order=order))
    return paid.charge


@workflow(name="hurries", version="1")
async def hurries(ctx: Context, order: str) -> str:
    charge = Charge(order=order)
    paid = await ctx.call(charge, undo=charge.refund, timeout=seconds(0.05))
    return paid.charge


@workflow(name="asks", version="1")
async def asks(ctx: Context, order: str) -> str:
    try:
        await ctx.call(Charge(order=order), timeout=seconds(0.05), unknown="hold")
    except StepRefused as no:
        return no.code
    return "charged"


@workflow(name="asks-patiently", version="1")
async def asks_patiently(ctx: Context, order: str) -> str:
    await ctx.call(Charge(order=order), unknown="hold")
    return "charged"


@workflow(name="naps", version="1")
async def naps(ctx: Context, n: int) -> str:
    await ctx.sleep(seconds(0.05))
    return str(ctx.uuid())


@workflow(name="overdue", version="1")
async def overdue(ctx: Context, n: int) -> str:
    return await ctx.step(waits, timeout=seconds(0.05), undo=local(undo_double, n))


BUG = [True]


@workflow(name="buggy", version="1")
async def buggy(ctx: Context, n: int) -> str:
    got = await ctx.step(triple, n, undo=local(undo_double, n))
    if BUG[0]:
        raise AttributeError("a bug")
    return f"mended {got}"


@workflow(name="patient", version="1")
async def patient(ctx: Context, n: int) -> str:
    await ctx.step(waits)
    return "done"


class Paid(Event, type="payment.succeeded", key="order"):
    order: str
    amount: int = 0


class Declined(Event, type="payment.failed", key="order"):
    order: str


@workflow(name="hears", version="1")
async def hears(ctx: Context, order: str) -> int:
    """Waits for two payments of one order, one after the other."""
    first = await ctx.event(Paid, key=order)
    second = await ctx.event(Paid, key=order)
    return first.amount * 10 + second.amount


@workflow(name="either", version="1")
async def either(ctx: Context, order: str) -> str:
    match await ctx.first(
        ctx.event(Paid, key=order), ctx.event(Declined, key=order), ctx.sleep(seconds(3600))
    ):
        case Paid(amount=amount):
            return f"paid {amount}"
        case Declined():
            return "declined"
        case Elapsed():
            return "nothing came"


@workflow(name="hastens", version="1")
async def hastens(ctx: Context, order: str) -> str:
    try:
        await ctx.event(Paid, key=order, timeout=seconds(0.05))
    except TimedOut:
        late = await ctx.event(Paid, key=order)
        return f"late {late.amount}"
    return "in time"


@workflow(name="beside", version="1")
async def beside(ctx: Context, order: str) -> list[int]:
    """A local step and two waits side by side; the step ends while the waits stay open."""
    done, one, two = await ctx.all(
        ctx.step(double, 1), ctx.event(Paid, key=order), ctx.event("other", key=order)
    )
    return [done, one.amount, two]


@workflow(name="joins", version="1")
async def joins(ctx: Context, n: int) -> list[int]:
    return list(await ctx.all(*(ctx.step(triple, n + i, undo=local(undo_double, n + i)) for i in range(5))))


@workflow(name="races", version="1")
async def races(ctx: Context, order: str) -> str:
    """The charge loses against the event: it is withdrawn, and undone if it may have left."""
    charge = Charge(order=order)
    winner = await ctx.first(ctx.event(Declined, key=order), ctx.call(charge, undo=charge.refund))
    return type(winner).__name__


@workflow(name="nests", version="1")
async def nests(ctx: Context, n: int) -> str:
    await ctx.step(double, 0, undo=local(undo_double, 0))
    try:
        async with ctx.saga("by-air"):
            await ctx.all(
                ctx.step(double, n, undo=local(undo_double, n)),
                ctx.step(double, n + 1, undo=local(undo_double, n + 1)),
            )
            await ctx.step(declines, "full")
    except StepRefused:
        await ctx.step(double, n + 2, undo=local(undo_double, n + 2), name="by-rail")
    ctx.pivot()
    return "there"


@workflow(name="tidies", version="1")
async def tidies(ctx: Context, order: str) -> str:
    """Waits until it is cancelled; then it tidies up, and what it did is undone."""
    await ctx.step(double, 1, undo=local(undo_double, 1))
    try:
        await ctx.event(Paid, key=order)
    finally:
        await ctx.step(triple, 7, name="tidy")
    return "paid"


class Month(BaseModel):
    number: int
    told: list[int] = []


@workflow(name="monthly", version="1")
async def monthly(ctx: Context, it: Month) -> list[int]:
    """Three months: each doubles its number, waits for a charge that may fail, and hears one event."""
    doubled = await ctx.step(double, it.number)
    with contextlib.suppress(OutcomeUnknown):
        await ctx.call(Charge(order=f"month-{it.number}"), timeout=seconds(1) if it.number == 1 else None)
    heard = await ctx.event("told", key="all")
    told = [*it.told, doubled + heard["n"]]
    if it.number == 3:
        return told
    return ctx.continue_as_new(Month(number=it.number + 1, told=told))


class Packed(Event, type="shop.order.packed", key="order"):
    order: str
    boxes: int


@workflow(name="tells", version="1")
async def tells(ctx: Context, order: str) -> int:
    ctx.emit(Packed(order=order, boxes=1))
    boxes = await ctx.step(pack, order)
    ctx.emit(Packed(order=order, boxes=boxes))
    await ctx.sleep(seconds(0.01))
    return boxes


def pack(order: str) -> int:
    CALLS.append(("pack", order))
    return 2


FLOWS = Flows(
    [
        three, undoes, retries, unfit, pays, hurries, naps, overdue, buggy, patient, asks, hears, either, hastens,
        asks_patiently, beside, joins, races, nests, tidies, tells, monthly, persists,
    ]
)  # fmt: skip
