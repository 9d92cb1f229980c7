"""What the shop's flow and its services agree on. Flow, services and documentation import these classes."""

from __future__ import annotations

from pydantic import BaseModel

from contracts.messages import Command


class Line(BaseModel):
    sku: str
    count: int


class Order(BaseModel):
    id: str
    customer: str
    total: int
    """In cents."""
    card: str = "4242424242424242"
    lines: list[Line] = []


class Reserved(BaseModel):
    reservation: str


class Charged(BaseModel):
    charge: str


class Shipped(BaseModel):
    tracking: str


class Receipt(BaseModel):
    order: str
    charge: str
    tracking: str


class Release(Command[None], endpoint="inventory", type="stock.release"):
    order: str


class Reserve(Command[Reserved], endpoint="inventory", type="stock.reserve"):
    order: str
    lines: list[Line]


class Refund(Command[None], endpoint="payments", type="payment.refund"):
    order: str
    charge: str | None
    """None: nobody knows whether the order was charged."""


class Charge(Command[Charged], endpoint="payments", type="payment.charge"):
    order: str
    amount: int
    card: str = "4242424242424242"

    def refund(self, done: Charged | None) -> Refund:
        return Refund(order=self.order, charge=done.charge if done else None)


class Ship(Command[Shipped], endpoint="shipping", type="shipment.create"):
    order: str
