"""The carrier: takes parcels. It is sometimes busy, and then answers 503: not now, come again."""

from __future__ import annotations

from contracts.errors import Unavailable
from examples.shop import service
from examples.shop.contracts import Ship, Shipped
from receiver.participant import Delivery

BUSY_ORDERS = service.named("SHOP_BUSY_ORDERS")  # orders whose first attempt finds nobody at the desk

shipping = service.participant("shipping")


@shipping.does(Ship)
def ship(command: Ship, delivery: Delivery) -> Shipped:
    if command.order in BUSY_ORDERS and delivery.attempt == 1:
        raise Unavailable("the carrier")
    return Shipped(tracking=f"parcel-{command.order}")


if __name__ == "__main__":
    service.run(shipping)
