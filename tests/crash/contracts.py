"""What the flows of these tests ask of their services."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel

from contracts.messages import Command, Effect, Event


class Carrier(StrEnum):
    """What the carrier does with a parcel."""

    TAKES = "takes"
    REFUSES = "refuses"
    """In a reply: definitely not."""
    GONE = "gone"
    """By a status, 410: this address serves nobody any more."""


class Reserved(BaseModel):
    reservation: str


class Charged(BaseModel):
    charge: str


class Shipped(BaseModel):
    tracking: str


class Release(Command[None], endpoint="stock", type="stock.release"):
    order: str
    reservation: str | None
    jammed: bool


class Reserve(Command[Reserved], endpoint="stock", type="stock.reserve"):
    """Its reply is posted to the receiver."""

    order: str
    jammed: bool
    """It cannot be released again: a person has to do it."""

    def release(self, done: Reserved | None) -> Release:
        return Release(order=self.order, reservation=done.reservation if done else None, jammed=self.jammed)


class Refund(Command[None], endpoint="bank", type="bank.refund"):
    order: str
    charge: str | None


class Charge(Command[Charged], endpoint="bank", type="bank.charge"):
    """Its reply is in the answer."""

    order: str
    busy: bool
    """The bank says 503 first."""

    def refund(self, done: Charged | None) -> Refund:
        return Refund(order=self.order, charge=done.charge if done else None)


class Ship(Command[Shipped], endpoint="carrier", type="parcel.ship"):
    order: str
    carrier: Carrier
    busy: bool
    """The carrier says 429 first."""


class Tell(Command[None], endpoint="stock", type="customer.tell", effect=Effect.AT_MOST_ONCE):
    order: str


class Mill(Command[int], type="parcel.mill"):
    """It waits in a queue, for whoever comes for it."""

    order: str


class Collected(Event, type="parcel.collected", key="order"):
    """Somebody outside says so, without having been asked."""

    order: str


class Announced(Event, type="parcel.announced", key="order"):
    """Somebody outside says so, and that starts a flow."""

    order: str


class Sorted(Event, type="parcel.sorted", key="order"):
    """A flow says so, and hears it itself."""

    order: str


class Lost(Event, type="parcel.lost", key="order"):
    """Nobody ever says so."""

    order: str
