"""The warehouse: reserves stock for an order and releases it."""

from __future__ import annotations

from contracts.messages import Refused
from examples.shop import service
from examples.shop.contracts import Release, Reserve, Reserved

SOLD_OUT = service.named("SHOP_SOLD_OUT")  # articles that are not there

inventory = service.participant("inventory")


@inventory.does(Reserve)
def reserve(command: Reserve) -> Reserved:
    missing = [line.sku for line in command.lines if line.sku in SOLD_OUT]
    if missing:
        raise Refused("sold-out", detail={"sku": missing})
    return Reserved(reservation=f"reservation-{command.order}")


@inventory.does(Release)
def release(command: Release) -> None:
    """Nothing is kept here that could be given back; a real warehouse frees the reservation of this order."""


if __name__ == "__main__":
    service.run(inventory)
