"""Conditions as people write them, and what is said about those that are none."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from orchestrator.conditions import Condition, ConditionInvalid, condition, conditions


@pytest.mark.parametrize(
    ("text", "name", "operator", "value"),
    [
        ("stage=paid", "stage", "=", "paid"),
        ("stage!=paid", "stage", "!=", "paid"),
        ("amount>=100", "amount", ">=", 100),
        ("amount<-1.5e3", "amount", "<", -1500.0),
        ("urgent=true", "urgent", "=", True),
        ('n="100"', "n", "=", "100"),
        ('n="true = \\"x\\""', "n", "=", 'true = "x"'),
        ('n=""', "n", "=", ""),
        ("at>2026-12-01T00:00Z", "at", ">", datetime(2026, 12, 1, tzinfo=UTC)),
        ("city=Zürich-1", "city", "=", "Zürich-1"),
    ],
)
def test_a_condition_has_a_name_an_operator_and_a_value_with_a_type(
    text: str, name: str, operator: str, value: object
) -> None:
    found = condition(text)

    assert (found.name, found.operator, found.value) == (name, operator, value)
    assert type(found.value) is type(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "condition '': expected NAME=VALUE"),
        ("paid", "expected NAME=VALUE, or one of != >= <= > < instead of =, found no operator"),
        (
            "=paid",
            "expected a name of 1 to 64 letters, digits and underscores that begins with no digit, found ''",
        ),
        ("stage =paid", "found 'stage '"),
        ("stage==paid", "found '=paid'"),
        ("stage= paid", "found ' paid'"),
        ("stage=", "found nothing"),
        ("stage=4711-A", "or a text in double quotes, found '4711-A'"),
        ("at>2026-12-01", "a time with its zone such as 2026-12-01T00:00Z"),
        ("at>2026-12-01T00:00", "a time with its zone such as 2026-12-01T00:00Z"),
        ("at>2026-13-01T00:00Z", "expected a time, found '2026-13-01T00:00Z'"),
        ("amount=01", "found '01'"),
        ("amount=1e999", "expected a finite number, found inf"),
        ("amount=9223372036854775808", "expected a whole number of 64 bits"),
        ("urgent>true", "true and false are compared by = and != only"),
        ('stage="paid', "expected one text in double quotes, as JSON writes it"),
        ('stage="a""b"', "expected one text in double quotes"),
        ("stage=" + "x" * 300, "expected at most 256 bytes of printable text"),
    ],
)
def test_what_is_no_condition_is_refused_with_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(ConditionInvalid) as raised:
        condition(text)

    assert says in str(raised.value)


def test_conditions_are_bounded_and_may_be_given_as_they_are() -> None:
    assert conditions([Condition("a", "=", 1), "b=2"]) == [Condition("a", "=", 1), Condition("b", "=", 2)]
    with pytest.raises(ConditionInvalid, match="expected at most 8, found 9"):
        conditions(["a=1"] * 9)
    with pytest.raises(ConditionInvalid, match="expected a time with a zone"):
        conditions([Condition("a", "<", datetime(2026, 1, 1))])  # noqa: DTZ001  # that is the point
