"""What makes a flow one that an event starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from contracts import Event
from orchestrator import Context, UsageError, workflow
from orchestrator.flows import Flows
from orchestrator.store.definitions import Definition


class Paid(Event, type="order.paid", key="order"):
    order: str
    payment: str = Field(default="", alias="paymentId")
    account: dict[str, str] | None = None


class Open(Event, type="anything.happened"):
    model_config = ConfigDict(extra="allow")


class Nameless(Event):
    order: str


class Other(BaseModel):
    order: str


def made(on: Any, key: Any = None, *, takes: Any = None) -> Any:
    async def flow(_: Context, it: Any) -> None:
        return None

    flow.__annotations__["it"] = takes or on
    return workflow(name="billing", version="1", on=on, key=key)(flow)


def known(flow: Any) -> list[Definition]:
    """What the database gets to know of a flow, but for its code."""
    return [replace(one, fingerprint=None) for one in Flows([flow]).definitions()]


@pytest.mark.parametrize(
    ("key", "pointer"),
    [
        (None, None),
        ("order", "/order"),
        ("paymentId", "/paymentId"),
        ("/order", "/order"),
        ("/account/id~1of/0", "/account/id~1of/0"),
    ],
)
def test_a_flow_that_an_event_starts_knows_where_its_key_is(key: str | None, pointer: str | None) -> None:
    flow = made(Paid, key)

    assert (flow.on, flow.key) == (Paid, pointer)
    assert known(flow) == [Definition("billing", "1", "order.paid", pointer)]


def test_a_key_of_an_open_event_may_be_any_field() -> None:
    assert made(Open, "a/b~c").key == "/a~1b~0c"


def test_a_flow_without_an_event_has_none() -> None:
    flow = made(None, takes=Other)

    assert known(flow) == [Definition("billing", "1", None, None)]


@pytest.mark.parametrize(
    ("on", "key", "takes", "words"),
    [
        (Other, None, Other, "on= expected a class of Event with type=, found <class '.*Other'>"),
        ("order.paid", None, Paid, "on= expected a class of Event with type=, found 'order.paid'"),
        (Nameless, None, Nameless, "on= expected a class of Event with type=, found <class '.*Nameless'>"),
        (None, "order", Other, "key= says where an event has its business key, so it needs on="),
        (Paid, len, Paid, "key= expected a field of Paid, or a JSON pointer .* found a function"),
        (Paid, 7, Paid, "key= expected a field of Paid, or a JSON pointer .* found 7"),
        (
            Paid,
            "colour",
            Paid,
            r"key= expected a field of Paid \(account, order, paymentId\), found 'colour'",
        ),
        (Paid, "payment", Paid, "found 'payment'"),
        (Paid, "/colour/a", Paid, "found 'colour'"),
        (Paid, "", Paid, "found ''"),
        (Paid, "/account/~2", Paid, "key= expected a JSON pointer of at most 1024 printable bytes"),
        (
            Paid,
            "/account/" + "x" * 1016,
            Paid,
            "key= expected a JSON pointer of at most 1024 printable bytes",
        ),
        (Paid, None, Other, "expected `it: Paid`, which is what on= starts it with, found Other"),
    ],
)
def test_what_no_event_can_start_is_no_flow(on: Any, key: Any, takes: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"^workflow billing: .*{words}"):
        made(on, key, takes=takes)
