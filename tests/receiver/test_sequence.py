"""Where an event stands among those that its sender numbers."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.envelope import Envelope
from contracts.errors import MalformedEvent
from receiver.schemes import Ordered
from receiver.sequence import Position, position_of


def event(sequence: Any, **more: Any) -> Envelope:
    said = {} if sequence is None else {"sequence": sequence}
    return Envelope(id="1", source="/shop", type="order.paid", subject="7", extensions={**said, **more})


def place(sequence: Any, **settings: Any) -> Position:
    found = position_of(Ordered(**settings), event(sequence))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("sequence", "after"),
    [
        pytest.param("0002", "0001", id="padded"),
        pytest.param("1000", "0999", id="as-long"),
        pytest.param("10", "09", id="text-is-compared-as-text"),
        pytest.param("0001", None, id="the-first"),
        pytest.param("0000", None, id="before-the-first"),
        pytest.param("b", None, id="no-number"),
        pytest.param("1.5", None, id="no-whole-number"),
        pytest.param("\u0662", None, id="digits-of-others"),
        pytest.param(10, "0" * 19 + "9", id="a-number"),
    ],
)
def test_a_number_has_one_before_it_and_nothing_else_has(sequence: Any, after: str | None) -> None:
    assert place(sequence).after == after


def test_numbers_of_which_it_is_said_are_ordered_as_numbers() -> None:
    ordered = Ordered()
    told = [position_of(ordered, event(it, sequencetype="Integer")) for it in ("9", "10", "00011")]

    texts = [it.sequence for it in told if it is not None]
    assert len(texts) == 3
    assert texts == sorted(texts)


@pytest.mark.parametrize(
    ("last", "is_next", "is_older"),
    [
        (None, False, False),
        ("0003", False, False),
        ("0004", True, False),
        ("0005", True, False),
        ("0009", True, True),
    ],
)
def test_it_is_its_turn_when_the_one_before_it_was_let_through(
    last: str | None, is_next: bool, is_older: bool
) -> None:
    found = place("0005")

    assert (found.is_next(last), found.is_older(last)) == (is_next, is_older)
    assert place("0005", gap=0).is_next(last)


def test_a_stream_is_a_source_or_a_source_and_a_key() -> None:
    assert place("1").stream == "/shop"
    assert place("1", of="key").stream == "/shop 7"
    assert place("5", first=5).after is None
    assert position_of(Ordered(), event(None)) is None


@pytest.mark.parametrize("sequence", ["", "x" * 257, True, "hostile" * 40])
def test_what_is_no_sequence_is_said_so(sequence: Any) -> None:
    with pytest.raises(MalformedEvent, match="sequence: expected"):
        position_of(Ordered(), event(sequence))


@pytest.mark.parametrize("sequence", ["-1", "1.0", "1" * 21, "x"])
def test_what_is_said_to_be_a_number_is_one(sequence: str) -> None:
    with pytest.raises(MalformedEvent, match="expected a whole number"):
        position_of(Ordered(), event(sequence, sequencetype="Integer"))
