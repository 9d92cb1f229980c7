"""The life of an execution: each move that a commit may make, and each that it may not."""

from __future__ import annotations

from itertools import product

import pytest

from orchestrator.core.status import TERMINAL, TRANSITIONS, Status

ALIVE = ("open", "paused", "held")
OVER = ("completed", "compensated", "failed", "cancelled")
ALLOWED = {(before, after) for before in ALIVE for after in (*ALIVE, *OVER)}


def test_the_names_are_those_that_the_table_of_executions_allows() -> None:
    assert [str(status) for status in Status] == [*ALIVE, *OVER]


@pytest.mark.parametrize(("before", "after"), list(product([*ALIVE, *OVER], [*ALIVE, *OVER])))
def test_a_move_is_allowed_while_alive_and_none_leads_out_of_an_end(before: str, after: str) -> None:
    allowed = Status(after) in TRANSITIONS[Status(before)]

    assert allowed == ((before, after) in ALLOWED)


def test_terminal_are_those_from_which_nothing_leads() -> None:
    assert {status for status, after in TRANSITIONS.items() if not after} == TERMINAL
    assert {str(status) for status in TERMINAL} == set(OVER)
