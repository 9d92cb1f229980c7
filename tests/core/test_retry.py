"""When a local step is tried again."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import Retry, days, seconds
from orchestrator.core.retry import ONCE, STEP_RETRY, UNDO_RETRY


def delays(retry: Retry, *, key: bytes = b"key") -> list[float]:
    found: list[float] = []
    while (delay := retry.delay_after(len(found) + 1, key=key)) is not None:
        found.append(delay.total_seconds())
    return found


def test_a_step_has_five_tries_that_wait_twice_as_long_each_time_less_a_fifth_at_most() -> None:
    waits = delays(STEP_RETRY)

    assert len(waits) == 4
    for wait, whole in zip(waits, [1, 2, 4, 8], strict=True):
        assert whole * 0.8 <= wait <= whole


def test_no_wait_is_longer_than_the_cap() -> None:
    waits = delays(UNDO_RETRY)

    assert len(waits) == 19
    assert max(waits) <= 3600
    assert waits[-1] >= 3600 * 0.8


def test_one_attempt_is_never_followed_by_another() -> None:
    assert delays(ONCE) == []
    assert STEP_RETRY.delay_after(7, key=b"") is None


def test_the_same_place_waits_the_same_and_another_place_does_not() -> None:
    assert delays(STEP_RETRY, key=b"a") == delays(STEP_RETRY, key=b"a")
    assert delays(STEP_RETRY, key=b"a") != delays(STEP_RETRY, key=b"b")


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"first": timedelta(0)},
        {"first": seconds(-1)},
        {"first": seconds(10), "cap": seconds(9)},
        {"cap": days(4000)},
        {"factor": 0.5},
        {"factor": float("nan")},
        {"factor": float("inf")},
    ],
    ids=str,
)
def test_a_policy_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"expected|at least one attempt"):
        Retry(**wrong)  # pyright: ignore[reportArgumentType]  # of the wrong kind for most of them, as are its values


@settings(derandomize=True, database=None)
@given(
    attempts=st.integers(1, 2**40),
    attempt=st.integers(1, 2**40),
    factor=st.floats(1, 1e300),
    key=st.binary(max_size=8),
)
def test_every_delay_is_within_its_bounds_however_large_the_numbers(
    attempts: int, attempt: int, factor: float, key: bytes
) -> None:
    delay = Retry(attempts=attempts, factor=factor).delay_after(attempt, key=key)

    if attempt >= attempts:
        assert delay is None
    else:
        assert delay is not None
        assert seconds(0.8) <= delay <= STEP_RETRY.cap
