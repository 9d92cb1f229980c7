"""Flows whose tests have real parts."""

from __future__ import annotations

from pydantic import BaseModel

from orchestrator import (
    Command,
    Context,
    Event,
    OutcomeUnknown,
    StepRefused,
    hours,
    minutes,
    seconds,
    workflow,
)


class Charged(BaseModel):
    charge: str


class Refund(Command[None], endpoint="bank", type="bank.refund"):
    order: str
    charge: str | None


class Charge(Command[Charged], endpoint="bank", type="bank.charge"):
    order: str

    def refund(self, done: Charged | None) -> Refund:
        return Refund(order=self.order, charge=done.charge if done else None)


class Ship(Command[str], endpoint="carrier", type="parcel.ship"):
    order: str


class Collected(Event, type="parcel.collected", key="order"):
    order: str


@workflow(name="buy", version="1")
async def buy(ctx: Context, order: str) -> str:
    """Charges, then ships; what cannot be shipped is refunded."""
    charge = Charge(order=order)
    try:
        paid = await ctx.call(charge, undo=charge.refund, timeout=hours(2))
    except StepRefused as refusal:
        return f"refused: {refusal.code}"
    tracking = await ctx.call(Ship(order=order), timeout=hours(1))
    return f"{paid.charge} {tracking}"


@workflow(name="patient", version="1", deadline=hours(48))
async def patient(ctx: Context, order: str) -> str:
    """Waits for days, and for an event."""
    await ctx.sleep(hours(24))
    await ctx.event(Collected, key=order, timeout=hours(12))
    return "collected"


@workflow(name="doubtful", version="1")
async def doubtful(ctx: Context, order: str) -> str:
    try:
        paid = await ctx.call(Charge(order=order), timeout=minutes(5))
    except OutcomeUnknown:
        return "nobody knows"
    await ctx.sleep(seconds(0.01))
    return paid.charge
