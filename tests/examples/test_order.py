"""The example order: completed when all agree, undone in reverse when one does not."""

from __future__ import annotations

import pytest

from examples.shop.contracts import (
    Charge,
    Charged,
    Order,
    Receipt,
    Refund,
    Release,
    Reserve,
    Reserved,
    Ship,
    Shipped,
)
from examples.shop.flows import order_saga
from orchestrator import minutes
from orchestrator.testing import FlowTester

ORDER = Order(id="order-1", customer="ada", total=4200)


@pytest.fixture
def flow() -> FlowTester[Order, Receipt]:
    return FlowTester(order_saga, ORDER)


def test_an_order_that_all_accept_completes(flow: FlowTester[Order, Receipt]) -> None:
    flow.expect(Reserve).replies(Reserved(reservation="r"))
    flow.expect(Charge).replies(Charged(charge="c"))
    flow.expect(Ship).replies(Shipped(tracking="t"))

    assert flow.status == "completed"
    assert flow.returned == Receipt(order="order-1", charge="c", tracking="t")


def test_a_declined_charge_releases_the_stock(flow: FlowTester[Order, Receipt]) -> None:
    flow.expect(Reserve).replies(Reserved(reservation="r"))
    flow.expect(Charge).refuses("declined")
    flow.expect(Release(order="order-1")).replies()

    assert flow.status == "compensated"


def test_a_refused_parcel_refunds_then_releases(flow: FlowTester[Order, Receipt]) -> None:
    flow.expect(Reserve).replies(Reserved(reservation="r"))
    flow.expect(Charge).replies(Charged(charge="c"))
    flow.expect(Ship).refuses("no-carrier")
    flow.expect(Refund(order="order-1", charge="c")).replies()
    flow.expect(Release).replies()

    assert flow.status == "compensated"


def test_a_charge_without_answer_is_refunded_before_the_stock_is_released(
    flow: FlowTester[Order, Receipt],
) -> None:
    flow.expect(Reserve).replies(Reserved(reservation="r"))
    flow.passes(minutes(5))
    flow.expect(Refund(order="order-1", charge=None)).replies()
    flow.expect(Release).replies()

    assert flow.status == "compensated"
