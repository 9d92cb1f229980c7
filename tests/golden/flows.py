"""Flows whose journals are kept for each release: between them they have each kind of fact, ask and note.

They stay as they are: a journal of years ago is replayed by them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from contracts import Command, Effect
from orchestrator import (
    Cancelled,
    Context,
    Event,
    OutcomeUnknown,
    Retry,
    StepRefused,
    TimedOut,
    bounded,
    local,
    minutes,
    seconds,
    workflow,
)


class Booked(BaseModel):
    ref: str


class Leave(Command[None], endpoint="hotel", type="room.leave"):
    city: str
    ref: str | None


class Book(Command[Booked], endpoint="hotel", type="room.book"):
    city: str

    def leave(self, done: Booked | None) -> Leave:
        return Leave(city=self.city, ref=done.ref if done else None)


class Ticket(Command[Booked], endpoint="rail", type="ticket.buy", effect=Effect.AT_MOST_ONCE):
    city: str


class Paid(Event, type="trip.paid", key="trip"):
    trip: str
    amount: int


def measure(city: str) -> int:
    return len(city)


def forget(city: str) -> None:
    """Undoes a measurement."""


@workflow(name="golden.waits", version="1")
async def waits(ctx: Context, city: str) -> int:
    """A call, a local step, a timer, an event that comes and one that does not."""
    await ctx.call(Book(city=city), undo=Leave(city=city, ref=None))
    length = await ctx.step(
        measure, city, undo=local(forget, city), retry=Retry(attempts=3, first=seconds(1))
    )
    await ctx.sleep(minutes(1))
    try:
        await ctx.event(Paid, key="nobody", timeout=seconds(5))
    except TimedOut:
        length += 1
    paid = await ctx.event(Paid, key=city)
    return length + paid.amount


@workflow(name="golden.races", version="1")
async def races(ctx: Context, city: str) -> str:
    """Branches of which one wins; its siblings are withdrawn, and what they did is undone."""
    book = Book(city=city)
    await ctx.first(
        ctx.call(Ticket(city=city), unknown="raise", name="rail"),
        ctx.call(book, undo=book.leave, name="stay"),
    )
    async with ctx.saga("extras"):
        await ctx.all(ctx.step(measure, city), ctx.sleep(seconds(1)))
    ctx.pivot()
    return str(ctx.uuid())


@workflow(name="golden.asks", version="1")
async def asks(ctx: Context, city: str) -> str:
    """A step that nobody knows the end of, so that a person decides; and an undo that fails."""
    book = Book(city=city)
    try:
        await ctx.call(book, undo=book.leave)
        await ctx.call(Ticket(city=city), unknown="hold", timeout=seconds(30))
    except OutcomeUnknown:
        return "unknown"
    await ctx.sleep(minutes(5))
    raise ValueError("no seat")


@workflow(name="golden.ends", version="1")
async def ends(ctx: Context, city: str) -> str:
    """It is cancelled while it waits, and tidies up."""
    book = Book(city=city)
    await ctx.call(book, undo=book.leave)
    try:
        await ctx.sleep(minutes(60))
    except Cancelled:
        await ctx.step(measure, city)
        raise
    return city


@workflow(name="golden.maps", version="1")
async def maps(ctx: Context, cities: list[str]) -> list[int]:
    """Items two at a time, a time of day, numbers drawn, an event for subscribers, and code that came later."""

    async def one(city: str) -> int:
        return await ctx.step(measure, city)

    ctx.deprecate_patch("older")
    lengths = await ctx.map(cities, one, concurrency=2)
    if ctx.patched("bonus"):
        lengths.append(int(ctx.random() * 100))
    ctx.emit(Paid(trip="all", amount=len(cities)))
    await ctx.sleep_until(ctx.now() + minutes(30))
    return lengths


@workflow(name="golden.people", version="1")
async def people(ctx: Context, city: str) -> str:
    """People are asked, reminded, and one decides; then a command whose service gave it up is sent again."""
    decision = await ctx.approval("trip", who=["group:travel"], remind=minutes(10), expires=minutes(60))
    again = Retry.fixed(minutes(1), attempts=3, only=("busy",))
    booked = await ctx.call(Book(city=city), undo=Leave(city=city, ref=None), retry=again)
    return f"{booked.ref}: {decision.choice} by {decision.by}"


@workflow(name="golden.months", version="1")
async def months(ctx: Context, month: int) -> int:
    """It continues as new, with an event that nobody took and with what it has published."""
    ctx.publish(month=month, done=None)
    await ctx.call(Book(city=f"month {month}"))
    if month == 1:
        return ctx.continue_as_new(2)
    paid = await ctx.event(Paid, key="all")
    return paid.amount + int(ctx.random() * 100)


async def enroll(conn: Any, city: str) -> int:
    return len(city)


@workflow(name="golden.writes", version="1")
async def writes(ctx: Context, city: str) -> int:
    """A transaction that is committed and undone, one that is refused, and one of which a worker dies."""
    number = await ctx.transaction(enroll, city, undo=lambda n: local(forget, str(n)))
    try:
        await ctx.transaction(enroll, city, name="again")
    except StepRefused:
        await ctx.transaction(enroll, city, name="once-more")
    raise ValueError(f"no seat for {number}")


@workflow(name="golden.turns", version="1", mutex=lambda city: f"city-{city}")
async def turns(ctx: Context, city: str) -> int:
    """The mutex of a flow and of a step, and an undo with bounds of its own."""
    undo = bounded(
        Leave(city=city, ref=None), timeout=minutes(90), retry=Retry.fixed(minutes(1), attempts=2, jitter=0)
    )
    await ctx.call(Book(city=city), undo=undo, mutex="desk")
    raise ValueError(f"no seat in {city}")


class Print(Command[Booked], type="album.print"):
    city: str


@workflow(name="golden.guides", version="1")
async def guides(ctx: Context, city: str) -> str:
    """Work for a queue that is done at the second try, a flow that is run and one that is only started."""
    album = await ctx.task(
        Print(city=city),
        queue="paper",
        priority=1,
        undo=lambda found: Leave(city=city, ref=None if found is None else found.ref),
        retry=Retry.fixed(minutes(1), attempts=2, jitter=0),
        mutex="press",
    )
    paid = await ctx.child(months, 2, key=city, undo=Leave(city=city, ref=None))
    ctx.start(turns, city)
    raise ValueError(f"{paid} for {album.ref}")


FLOWS = (waits, races, asks, ends, maps, people, months, writes, turns, guides)
