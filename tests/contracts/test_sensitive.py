"""Sensitive fields: where they are, how they are shown, and what errors say about them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from contracts.log import told
from contracts.messages import Command, Event
from contracts.schemas import document
from contracts.sensitive import (
    Sensitive,
    argument_places,
    faults_of,
    places_of,
    redacted,
    result_places,
    scrubbed,
    value_places,
    values_at,
)
from orchestrator import UsageError, workflow

SECRET = "4242-8181"


class Card(BaseModel):
    number: Annotated[str, Sensitive]
    holder: str = ""


class Tree(BaseModel):
    pin: Annotated[str | None, Sensitive] = None
    kids: list[Tree] = Field(default_factory=list["Tree"])


class Charged(BaseModel):
    token: Annotated[str, Sensitive]


class Charge(Command[Charged], endpoint="bank", type="bank.charge"):
    order: str
    card: Card
    others: list[Card] = Field(default_factory=list[Card])
    named: dict[str, Card] = Field(default_factory=dict[str, Card])
    pair: tuple[int, Card] | None = None
    vault: Annotated[Card, Sensitive] | None = None
    iban: Annotated[str | None, Sensitive] = Field(default=None, alias="account")
    tree: Tree | None = None


class Plain(Command[None], endpoint="bank", type="bank.ping"):
    order: str


def test_a_place_is_found_however_deep_it_is_and_under_each_name_that_it_may_have() -> None:
    assert places_of(Charge) == (
        "/account",
        "/card/number",
        "/iban",
        "/named/*/number",
        "/others/*/number",
        "/pair/1/number",
        "/tree/kids/*",
        "/tree/pin",
        "/vault",
    )
    assert places_of(Annotated[str, Sensitive]) == ("",)
    assert places_of(list[Annotated[str, Sensitive]]) == ("/*",)
    assert places_of(Plain) == ()


def test_what_cannot_be_described_is_sensitive_as_a_whole() -> None:
    class Foreign:
        pass

    assert places_of(Foreign) == ("",)


def test_what_is_asked_says_where_in_it_nobody_may_look_and_else_says_nothing() -> None:
    action = Charge(order="1", card=Card(number=SECRET), account="DE1").as_action()

    assert action["sensitive"] == {"data": list(places_of(Charge)), "value": ["/token"]}
    assert action["data"]["card"]["number"] == SECRET
    assert "sensitive" not in Plain(order="1").as_action()


def test_arguments_and_results_of_functions_are_found_by_annotation_and_by_what_they_are() -> None:
    def fn(order: str, pin: Annotated[str, Sensitive], thing: Any) -> Annotated[str, Sensitive]:
        return order

    assert argument_places(["order", "pin", "thing"], fn, ["1", "2", Card(number="3")]) == (
        "/1",
        "/2/number",
    )
    assert result_places(fn) == ("",)
    assert value_places({"cards": [Card(number="3")]}) == ("/cards/*/number",)


def test_a_value_is_shown_without_what_is_sensitive_and_stays_as_it_was() -> None:
    data = {"order": "1", "card": {"number": SECRET, "holder": "Ann"}, "others": [{"number": "5"}]}

    assert redacted(data, places_of(Charge)) == {
        "order": "1",
        "card": {"number": "[redacted]", "holder": "Ann"},
        "others": [{"number": "[redacted]"}],
    }
    assert data["card"] == {"number": SECRET, "holder": "Ann"}
    assert list(values_at(data, places_of(Charge))) == [SECRET, "5"]


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        (f"card {SECRET} is stolen", SECRET, "card [redacted] is stolen"),
        ("it's 'o\\'neill'", "o'neill", "it's '[redacted]'"),
        ("pin 17 in 2017", "17", "pin [redacted] in 2017"),
        (json.dumps({"name": "Jörg"}), "Jörg", '{"name": "[redacted]"}'),
        ("nothing", " ", "nothing"),
    ],
)
def test_a_text_is_shown_without_the_values_in_whatever_form_it_quotes_them(
    text: str, value: str, shown: str
) -> None:
    assert scrubbed(text, [value]) == shown


class Careless(BaseModel):
    number: Annotated[str, Sensitive]
    limit: int = 0

    @field_validator("limit")
    @classmethod
    def check(cls, value: int, info: Any) -> int:
        raise ValueError(f"{info.data['number']} may not spend {value}")


def test_a_fault_never_repeats_what_is_sensitive_though_a_validator_does() -> None:
    with pytest.raises(ValidationError) as caught:
        Careless.model_validate({"number": SECRET, "limit": 3})

    assert list(faults_of(caught.value, places_of(Careless))) == [
        (("limit",), "the value does not fit ([redacted])")
    ]
    assert SECRET in next(iter(faults_of(caught.value, ())))[1]


def test_a_missing_field_is_told_as_ever() -> None:
    with pytest.raises(ValidationError) as caught:
        Charge.model_validate({"order": "1"})

    assert list(faults_of(caught.value, places_of(Charge))) == [(("card",), "Field required")]


def test_an_error_of_pydantic_in_a_log_quotes_no_input() -> None:
    with pytest.raises(ValidationError) as caught:
        Tree.model_validate({"pin": [SECRET]})

    assert SECRET in str(caught.value)
    assert SECRET not in told(caught.value)


def test_contracts_for_other_languages_mark_the_field() -> None:
    card = document(Charge)["request"]["$defs"]["Card"]["properties"]

    assert card["number"]["x-sensitive"] is True
    assert "x-sensitive" not in card["holder"]


def test_a_key_is_shown_and_searched_so_it_cannot_be_sensitive() -> None:
    with pytest.raises(TypeError, match="key='pin' is Sensitive"):

        class Bad(Event, type="bad", key="pin"):  # pyright: ignore[reportUnusedClass]  # it cannot be made
            pin: Annotated[str, Sensitive]

    class Came(Event, type="came"):
        pin: Annotated[str, Sensitive]

    with pytest.raises(UsageError, match="key= 'pin' is Sensitive"):

        @workflow(name="bad", version="1", on=Came, key="pin")
        async def bad(ctx: Any, came: Came) -> None:  # pyright: ignore[reportUnusedFunction]  # it cannot be made
            """Nothing."""
