"""The bank: charges a card and refunds it."""

from __future__ import annotations

import asyncio
import os

from contracts.messages import Refused
from examples.shop import service
from examples.shop.contracts import Charge, Charged, Refund

DECLINED = service.named("SHOP_DECLINED_CARDS", "4000000000000002")
SLOW_ORDERS = service.named("SHOP_SLOW_ORDERS")  # orders whose payment takes its time
SLOW_SECONDS = float(os.environ.get("SHOP_SLOW_SECONDS", "2"))

payments = service.participant("payments")


@payments.does(Charge)
async def charge(command: Charge) -> Charged:
    if command.order in SLOW_ORDERS:
        await asyncio.sleep(SLOW_SECONDS)
    if command.card in DECLINED:
        raise Refused("declined", "the bank says no to this card")
    return Charged(charge=f"charge-{command.order}")


@payments.does(Refund)
async def refund(command: Refund) -> None:
    """Nothing was really charged; a real bank looks for the charge by its order when it is not named."""


if __name__ == "__main__":
    service.run(payments)
