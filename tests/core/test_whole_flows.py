"""Whole flows as authors write them, driven by hand."""

from __future__ import annotations

from pydantic import BaseModel

from contracts import Command
from orchestrator import (
    AllFailed,
    Context,
    Elapsed,
    Event,
    StepRefused,
    TimedOut,
    days,
    hours,
    local,
    workflow,
)
from orchestrator.testing import FlowTester
from tests.core.answers import said, undone


class Notify(Command[None], endpoint="mail", type="mail.send"):
    to: str
    template: str


# ---- an order, shipped and announced at once -------------------------------------------------------------------


class Order(BaseModel):
    id: str
    customer: str
    total: int


class Charged(BaseModel):
    charge: str


class Shipped(BaseModel):
    tracking: str


class Refund(Command[None], endpoint="payments", type="payment.refund"):
    order: str
    charge: str | None


class Charge(Command[Charged], endpoint="payments", type="payment.charge"):
    order: str
    amount: int

    def refund(self, done: Charged | None) -> Refund:
        return Refund(order=self.order, charge=done.charge if done else None)


class Release(Command[None], endpoint="inventory", type="stock.release"):
    order: str


class Reserve(Command[None], endpoint="inventory", type="stock.reserve"):
    order: str


class Ship(Command[Shipped], endpoint="shipping", type="shipment.create"):
    order: str


@workflow(name="order", version="1")
async def order_saga(ctx: Context, order: Order) -> str:
    await ctx.call(Reserve(order=order.id), undo=Release(order=order.id))
    charge = Charge(order=order.id, amount=order.total)
    await ctx.call(charge, undo=charge.refund)
    shipped, _ = await ctx.all(
        ctx.call(Ship(order=order.id)), ctx.call(Notify(to=order.customer, template="accepted"))
    )
    return shipped.tracking


ORDER = Order(id="A", customer="c", total=90)


def charged() -> FlowTester[Order, str]:
    flow = FlowTester(order_saga, ORDER)
    flow.expect(Reserve).replies()
    flow.expect(Charge).replies(Charged(charge="ch"))
    return flow


def test_an_order_is_shipped_and_announced_side_by_side() -> None:
    flow = charged()

    flow.expect(Notify).replies()
    flow.expect(Ship).replies(Shipped(tracking="T"))

    assert (flow.returned, flow.told[2:]) == ("T", ["all.0/create", "all.1/send"])


def test_a_failed_shipment_withdraws_the_mail_and_undoes_in_reverse() -> None:
    flow = charged()

    flow.expect(Ship).refuses("no-carrier")
    flow.expect(Refund(order="A", charge="ch")).replies()
    flow.expect(Release).replies()

    assert "withdrawn all.1/send" in said(flow.journal)
    assert (flow.status, undone(flow.journal)) == ("compensated", ["charge", "reserve"])


def test_a_cancelled_charge_is_refunded_though_its_answer_never_came() -> None:
    flow = FlowTester(order_saga, ORDER)
    flow.expect(Reserve).replies()

    flow.cancels(reason="changed their mind")
    flow.expect(Refund(order="A", charge=None)).replies()
    flow.expect(Release).replies()

    assert (flow.status, flow.journal[-1].data["reason"]) == ("cancelled", "changed their mind")


# ---- ask every supplier, the first firm offer wins -------------------------------------------------------------


class Offer(BaseModel):
    supplier: str
    offer: str


class Withdraw(Command[None], endpoint="suppliers", type="offer.withdraw"):
    supplier: str


class Quote(Command[Offer], endpoint="suppliers", type="offer.request"):
    supplier: str


class Accept(Command[None], endpoint="suppliers", type="offer.accept"):
    offer: str


async def ask(ctx: Context, supplier: str) -> Offer:
    return await ctx.call(Quote(supplier=supplier), undo=Withdraw(supplier=supplier))


@workflow(name="procure", version="1")
async def procure(ctx: Context, suppliers: list[str]) -> Offer | None:
    try:
        offer = await ctx.within(hours(2), ctx.any(*(ask(ctx, supplier) for supplier in suppliers)))
    except (TimedOut, AllFailed):
        return None
    await ctx.call(Accept(offer=offer.offer))
    return offer


def test_the_first_offer_wins_and_the_other_suppliers_are_told() -> None:
    flow = FlowTester(procure, ["a", "b", "c"])

    flow.expect(Quote(supplier="a")).refuses("no-stock")
    flow.expect(Quote(supplier="c")).replies(Offer(supplier="c", offer="o"))
    flow.expect(Withdraw(supplier="b")).replies()
    flow.expect(Accept(offer="o")).replies()

    assert flow.returned == Offer(supplier="c", offer="o")


def test_when_nobody_offers_in_time_all_are_told_and_when_all_refuse_nobody_is() -> None:
    slow, refused = FlowTester(procure, ["a", "b"]), FlowTester(procure, ["a", "b"])

    slow.passes(hours(2))
    slow.expect(Withdraw(supplier="b")).replies()
    slow.expect(Withdraw(supplier="a")).replies()
    for supplier in ("b", "a"):
        refused.expect(Quote(supplier=supplier)).refuses("no-stock")

    assert (slow.returned, refused.returned) == (None, None)
    assert undone(refused.journal) == []


# ---- undo one way, try another ---------------------------------------------------------------------------------


class Booked(BaseModel):
    ref: str


class Cancel(Command[None], endpoint="travel", type="booking.cancel"):
    what: str


class Book(Command[Booked], endpoint="travel", type="booking.create"):
    what: str


async def book(ctx: Context, what: str) -> str:
    return (await ctx.call(Book(what=what), undo=Cancel(what=what), name=what)).ref


@workflow(name="trip", version="1")
async def plan_trip(ctx: Context, traveller: str) -> list[str]:
    hotel = await book(ctx, "hotel")
    try:
        async with ctx.saga("by-air"):
            there, back = await ctx.all(book(ctx, "flight-out"), book(ctx, "flight-back"))
    except StepRefused:
        async with ctx.saga("by-rail"):
            there, back = await ctx.all(book(ctx, "train-out"), book(ctx, "train-back"))
    ctx.pivot()
    await ctx.call(Notify(to=traveller, template="itinerary"))
    return [hotel, there, back]


def by_rail() -> FlowTester[str, list[str]]:
    flow = FlowTester(plan_trip, "ann")
    flow.expect(Book(what="hotel")).replies(Booked(ref="h"))
    flow.expect(Book(what="flight-out")).replies(Booked(ref="f"))
    flow.expect(Book(what="flight-back")).refuses("full")
    flow.expect(Cancel(what="flight-out")).replies()
    return flow


def test_a_trip_goes_by_rail_after_the_flights_are_undone() -> None:
    flow = by_rail()

    flow.expect(Book(what="train-out")).replies(Booked(ref="1"))
    flow.expect(Book(what="train-back")).replies(Booked(ref="2"))
    flow.expect(Notify).replies()

    assert flow.returned == ["h", "1", "2"]
    assert flow.told[1:4] == [
        "by-air/all.0/flight-out", "by-air/all.1/flight-back", "by-air/all.0/flight-out/undo",
    ]  # fmt: skip


def test_a_trip_that_cannot_be_made_at_all_gives_up_the_hotel_too() -> None:
    flow = by_rail()

    flow.expect(Book(what="train-back")).replies(Booked(ref="2"))
    flow.expect(Book(what="train-out")).refuses("full")
    flow.expect(Cancel(what="train-back")).replies()
    flow.expect(Cancel(what="hotel")).replies()

    assert flow.status == "compensated"


def test_a_trip_that_is_booked_stands_though_nobody_could_be_told() -> None:
    flow = by_rail()
    for what in ("train-out", "train-back"):
        flow.expect(Book(what=what)).replies(Booked(ref="r"))

    flow.expect(Notify).refuses("bounced")

    assert flow.status == "failed"
    assert flow.journal[-1].data["stands"] == [
        "hotel", "by-rail/all.0/train-out", "by-rail/all.1/train-back",
    ]  # fmt: skip


# ---- one webhook starts it, another one ends it ----------------------------------------------------------------


class PaymentSucceeded(Event, type="com.stripe.payment_intent.succeeded", key="id"):
    id: str
    amount_received: int


class PaymentFailed(Event, type="com.stripe.payment_intent.payment_failed", key="id"):
    id: str
    code: str = ""


def grant(email: str, payment: str) -> str:
    return f"licence for {email} by {payment}"


def revoke(email: str) -> None: ...


@workflow(name="checkout", version="1")
async def checkout(ctx: Context, intent: str) -> str:
    paid = await ctx.first(
        ctx.event(PaymentSucceeded, key=intent), ctx.event(PaymentFailed, key=intent), ctx.sleep(days(3))
    )
    match paid:
        case PaymentSucceeded():
            licence = await ctx.step(grant, "e", paid.id, undo=local(revoke, "e"))
            await ctx.call(Notify(to="e", template="licence"))
            return licence
        case PaymentFailed(code=code):
            return f"not paid: {code}"
        case Elapsed():
            return "abandoned"


def test_a_checkout_waits_for_its_own_payment_and_is_undone_when_the_mail_bounces() -> None:
    flow = FlowTester(checkout, "pi")
    flow.receives(PaymentSucceeded(id="other", amount_received=1))
    assert len(flow.open) == 3

    flow.receives(PaymentSucceeded(id="pi", amount_received=5))
    flow.expect(grant).replies("L")
    flow.expect(Notify).refuses("bounced")
    flow.expect(revoke).replies()

    assert flow.status == "compensated"


def test_a_checkout_that_is_declined_or_abandoned_says_so() -> None:
    declined, abandoned = FlowTester(checkout, "pi"), FlowTester(checkout, "pi")

    declined.receives(PaymentFailed(id="pi", code="card_declined"))
    abandoned.passes(days(3))

    assert (declined.returned, abandoned.returned) == ("not paid: card_declined", "abandoned")
