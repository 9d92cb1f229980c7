"""The oracle of mutexes: each rule that a log of facts can break is seen, and a sound log is not complained of."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.fact import Fact
from orchestrator.testing import NOON
from tests.core.holders import Holders

Said = tuple[int, str, str, dict[str, Any]]


def turn(number: int, path: str = "a") -> Said:
    return (number, "asked", f"{path}/mutex", {"kind": "mutex", "name": path, "args": {"key": "m"}})


def given(number: int, path: str = "a") -> Said:
    return (number, "ended", f"{path}/mutex", {"outcome": "done", "value": None})


def begun(number: int, path: str = "a", kind: str = "call") -> Said:
    return (number, "asked", path, {"kind": kind, "name": path})


def over(number: int, path: str = "a", **error: Any) -> Said:
    outcome = "unknown" if error else "done"
    return (number, "ended", path, {"outcome": outcome, "error": error})


def late(number: int, path: str = "a") -> Said:
    return (number, "late", path, {"outcome": "done"})


def died(number: int) -> Said:
    return (number, "orphaned", "", {"by": "w"})


def finished(number: int) -> Said:
    return (number, "finished", "", {"kind": "completed"})


def log(*said: Said) -> list[tuple[int, Fact]]:
    return [(number, Fact(at, kind, path, data, NOON)) for at, (number, kind, path, data) in enumerate(said)]


def test_two_that_have_it_one_after_the_other_are_as_it_should_be() -> None:
    first = [turn(0), turn(1), given(0), begun(0), over(0, settling=True), late(0)]

    assert Holders().read(log(*first, given(1), begun(1), over(1), finished(0))).granted == 2


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ([turn(0), turn(1), given(0), begun(0), given(1)], "is had by"),
        ([turn(0), turn(1), given(0), begun(0), over(0, settling=True), given(1)], "is had by"),
        ([turn(0), turn(1), given(1)], "wait in this order"),
        ([turn(0), begun(0)], "begins without its mutex"),
        ([turn(0), given(0), begun(0), over(0), begun(0)], "begins without its mutex"),
        ([turn(0), turn(1), given(0), begun(0), over(0)], "nobody has what is waited for"),
        ([turn(0), turn(1), given(0), begun(0, kind="step"), over(0, settling=True), died(1), given(1)], "is had by"),
        ([turn(0), finished(0)], "finished while"),
        ([finished(0), turn(0)], "after its end"),
    ],
)  # fmt: skip
def test_what_a_log_does_wrong_is_seen(said: list[Said], problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        Holders().read(log(*said))


def test_a_worker_that_dies_takes_along_what_it_ran_for_nobody() -> None:
    steps = [turn(0), given(0), begun(0, kind="step"), over(0, settling=True), died(0), turn(1), given(1)]
    calls = [turn(0), given(0), begun(0), over(0, settling=True), died(0), turn(1), given(1)]

    assert Holders().read(log(*steps)).granted == 2
    with pytest.raises(AssertionError, match="is had by"):
        Holders().read(log(*calls))
