"""Contracts as JSON Schema: they say what is sent and what is read, and are the same bytes each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from contracts.messages import Command, Effect, Event
from contracts.schemas import DIALECT, ContractsInvalid, contracts_in, document, documents, files


class Line(BaseModel):
    sku: str
    count: int = 1


class Packed(BaseModel):
    box: str
    weight: float | None = None


class Pack(Command[Packed], endpoint="depot", type="depot.pack", effect=Effect.AT_MOST_ONCE):
    """Put lines into a box."""

    id: UUID
    lines: list[Line]
    until: datetime | None = None


class Unpack(Command[None], endpoint="depot", type="depot.unpack"):
    box: str


class Arrived(Event, type="com.example.parcel/arrived", key="parcel"):
    parcel: str = Field(alias="parcelId")


class Nameless(Command[None]):
    box: str


def test_a_command_says_who_acts_and_what_it_carries() -> None:
    made = document(Pack)

    assert [made[name] for name in ("type", "kind", "endpoint", "effect", "dialect")] == [
        "depot.pack",
        "command",
        "depot",
        "at_most_once",
        DIALECT,
    ]
    assert made["request"]["description"] == "Put lines into a box."
    assert made["request"]["additionalProperties"] is False
    assert made["request"]["properties"]["lines"]["items"] == {"$ref": "#/$defs/Line"}


def test_each_schema_stands_by_itself() -> None:
    made = document(Pack)

    assert made["request"]["$schema"] == made["reply"]["$schema"] == DIALECT
    assert list(made["request"]["$defs"]) == ["Line"]
    assert "$defs" not in made["reply"]


def test_a_request_has_all_fields_and_a_reply_may_leave_out_those_with_a_default() -> None:
    made = document(Pack)
    sent = Pack(id=UUID(int=1), lines=[Line(sku="lamp")]).as_action()["data"]

    assert made["request"]["required"] == list(sent) == ["id", "lines", "until"]
    assert made["request"]["$defs"]["Line"]["required"] == list(sent["lines"][0]) == ["sku", "count"]
    assert made["reply"]["required"] == ["box"]
    assert "additionalProperties" not in made["reply"]


def test_a_command_without_a_result_takes_any_reply() -> None:
    assert document(Unpack)["reply"].keys() == {"$schema", "description"}


def test_an_event_names_its_key_and_is_described_as_it_is_read() -> None:
    made = document(Arrived)

    assert (made["kind"], made["key"]) == ("event", "parcel")
    assert made["data"]["required"] == ["parcelId"]


def test_only_classes_with_a_type_are_contracts_and_each_is_one_once() -> None:
    things: list[object] = [Pack, Arrived, Nameless, Command, Event, Line, Pack, "depot.pack", document]

    assert contracts_in(things) == [Arrived, Pack]


def test_a_file_is_named_after_its_type_and_has_the_same_bytes_each_time() -> None:
    made, again = files(documents([Arrived, Pack])), files(documents([Arrived, Pack]))

    assert list(made) == ["com.example.parcel%2Farrived.contract.json", "depot.pack.contract.json"]
    assert made == again
    assert json.loads(made["depot.pack.contract.json"]) == document(Pack)
    assert made["depot.pack.contract.json"].endswith(b"}\n")


@pytest.mark.parametrize("type_", ["depot.pack", "Depot.Pack"])
def test_two_classes_of_one_type_are_an_error_also_where_files_do_not_tell_case(type_: str) -> None:
    class Other(Command[None], endpoint="depot", type=type_):
        box: str

    with pytest.raises(ContractsInvalid, match=r"Other: expected one class of type .*, found .*\.Pack"):
        documents([Pack, Other])


def test_what_json_cannot_describe_is_an_error_that_names_the_class() -> None:
    class Odd(Command[None], endpoint="depot", type="depot.odd"):
        how: Callable[[int], int]

    with pytest.raises(ContractsInvalid, match="Odd: it has no JSON Schema"):
        documents([Odd])


def test_a_default_that_json_does_not_have_is_left_out() -> None:
    class Strange(Event, type="strange"):
        what: Any = object()

    assert "default" not in document(Strange)["data"]["properties"]["what"]
