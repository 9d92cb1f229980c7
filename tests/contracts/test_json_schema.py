"""What pydantic accepts fits the schema that it writes, and what it refuses does not; each fault has a place."""

from __future__ import annotations

from typing import Any, Final, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from contracts.json_schema import Checker, SchemaInvalid, Violated
from contracts.schemas import read_schema


class Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    sku: str = Field(min_length=1, max_length=3)
    count: int = Field(ge=1, le=9)


class Order(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str
    kind: Literal["a", "b"] = "a"
    lines: list[Line] = Field(max_length=2)
    note: str | None = None
    parent: Order | None = None
    tags: dict[str, int] = {}


ORDER: Final = Checker(read_schema(TypeAdapter(Order)))
Anything = st.SearchStrategy[Any]
scalars: Anything = st.none() | st.booleans() | st.integers(0, 10) | st.text("ab", max_size=4)
lines: Anything = (
    st.fixed_dictionaries({"sku": scalars, "count": scalars}, optional={"else": scalars}) | scalars
)
orders: Anything = st.recursive(
    st.fixed_dictionaries(
        {"id": scalars, "lines": st.lists(lines, max_size=3) | scalars},
        optional={"kind": scalars, "note": scalars, "tags": st.dictionaries(st.text("xy"), scalars)},
    ),
    lambda each: st.fixed_dictionaries(
        {"id": st.just("1"), "lines": st.just([])}, optional={"parent": each | scalars}
    ),
    max_leaves=3,
)


@given(orders)
def test_what_pydantic_accepts_fits_its_schema_and_nothing_else_does(value: Any) -> None:
    try:
        Order.model_validate(value)
        accepted = True
    except ValidationError:
        accepted = False

    try:
        ORDER.check(value)
        fits = True
    except Violated:
        fits = False

    assert fits == accepted


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"type": "integer"}, True, "the top: expected integer"),
        ({"type": ["string", "null"]}, 1, "the top: expected string or null"),
        ({"enum": [1, "a"]}, True, "the top: expected one of [1, 'a']"),
        ({"const": 0}, False, "the top: expected 0"),
        ({"required": ["a"]}, {}, "the top: expected a member 'a'"),
        ({"properties": {"a/b": {"type": "null"}}}, {"a/b": 1}, "/a~1b: expected null"),
        (
            {"properties": {"a": True}, "additionalProperties": False},
            {"a": 1, "b": 2},
            "/b: expected nothing",
        ),
        ({"prefixItems": [{"type": "null"}], "items": {"type": "string"}}, [None, 1], "/1: expected string"),
        ({"minItems": 1}, [], "the top: expected at least 1 items"),
        ({"uniqueItems": True}, [{"a": 1}, {"a": 1}], "the top: expected items that differ"),
        ({"pattern": "^[a-z]+$"}, "A", "the top: expected text like '^[a-z]+$'"),
        ({"pattern": "a"}, "a" * 5000, "the top: expected at most 4096 characters where there is a pattern"),
        ({"multipleOf": 5}, 7, "the top: expected a multiple of 5"),
        ({"exclusiveMinimum": 0}, 0, "the top: expected more than 0"),
        ({"maximum": 1}, 2, "the top: expected 1 or less"),
        ({"not": {"type": "null"}}, None, "the top: expected another value"),
        (
            {"oneOf": [{"type": "integer"}, {"minimum": 0}]},
            1,
            "the top: expected what fits one alternative only",
        ),
        (
            {"anyOf": [{"type": "null"}, {"properties": {"a": {"type": "null"}}}]},
            {"a": 1},
            "/a: expected null",
        ),
        (
            {"allOf": [{"minimum": 3}, {"maximum": 1}]},
            2,
            "the top: expected 3 or more; the top: expected 1 or less",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, 1, "the top: expected null"),
        ({"$ref": "#"}, 1, "the top: expected a value that is simpler to check"),
        (False, 1, "the top: expected nothing"),
    ],
)
def test_each_fault_has_a_place_and_what_was_expected(schema: Any, value: Any, problem: str) -> None:
    with pytest.raises(Violated) as refused:
        Checker(schema).check(value)

    assert str(refused.value) == problem


@pytest.mark.parametrize("value", [1.0, 7])
def test_a_number_without_a_fraction_is_an_integer(value: float) -> None:
    Checker({"type": "integer"}).check(value)


PARTLY: Final[list[Any]] = [
    None,
    [],
    {"if": {}},
    {"$dynamicRef": "#a"},
    {"unevaluatedProperties": False},
    {"minlength": 1},
    {"type": "text"},
    {"type": []},
    {"minimum": "1"},
    {"multipleOf": 0},
    {"required": "a"},
    {"pattern": "("},
    {"properties": []},
    {"anyOf": {}},
    {"items": [{}]},
    {"$ref": "https://hostile.test/schema"},
    {"$ref": "#/$defs/none"},
    {"$ref": 1},
]


@pytest.mark.parametrize("schema", PARTLY)
def test_a_schema_that_would_be_checked_in_part_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaInvalid, match="schema: expected"):
        Checker(schema)


def test_a_value_that_multiplies_alternatives_is_given_up_in_bounded_work() -> None:
    each: dict[str, Any] = {"type": "array", "items": {"anyOf": [{"$ref": "#"}] * 8}}

    value: Any = 1
    for _ in range(30):
        value = [value]
    with pytest.raises(Violated, match="simpler to check"):
        Checker(each).check(value)


def test_no_more_than_twenty_faults_are_told() -> None:
    with pytest.raises(Violated) as refused:
        Checker({"items": False}).check(list(range(100)))

    assert len(refused.value.problems) == 20
