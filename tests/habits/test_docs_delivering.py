"""The page about delivering messages says what the relay does."""

from __future__ import annotations

from relay.delivery import HUNDREDS, STATUSES
from relay.health import FAILING_RATIO
from tests.habits.documents import table, text_of

PAGE = "docs/delivering.md"


def test_the_table_of_answers_is_the_relay_s_own() -> None:
    said = {cells[0]: tuple(cells[1:]) for cells in table(PAGE, "answer")}

    hundreds = {f"{hundred}xx": (row.command.value, row.event.value) for hundred, row in HUNDREDS.items()}
    statuses = {f"{status}": (row.command.value, row.event.value) for status, row in STATUSES.items()}
    assert said == hundreds | statuses


def test_the_ratio_of_a_circuit_is_the_one_that_is_told() -> None:
    assert FAILING_RATIO == 0.7
    assert "seven in ten" in text_of(PAGE)
