"""When a local step is tried again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import Retry, days, hours, seconds
from orchestrator.core.retry import ONCE, STEP_RETRY, UNDO_RETRY
from orchestrator.testing import NOON


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
        {"step": seconds(-1)},
        {"step": seconds(1)},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": float("nan")},
        {"within": timedelta(0)},
        {"within": days(4000)},
        {"attempts": None},
        {"only": "busy"},
        {"only": [OSError]},
        {"only": ("",)},
        {"never": (BaseException,)},
        {"never": (7,)},
    ],
    ids=str,
)
def test_a_policy_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|at least one attempt"):
        Retry(**wrong)


@settings(derandomize=True, database=None)
@given(
    attempts=st.none() | st.integers(1, 2**40),
    attempt=st.integers(1, 2**40),
    grows=st.tuples(st.floats(1, 1e300), st.just(0)) | st.tuples(st.just(1.0), st.integers(0, 10**6)),
    jitter=st.floats(0, 1),
    key=st.binary(max_size=8),
)
def test_every_delay_is_within_its_bounds_however_large_the_numbers(
    attempts: int | None, attempt: int, grows: tuple[float, int], jitter: float, key: bytes
) -> None:
    factor, step = grows
    retry = Retry(attempts=attempts, factor=factor, step=seconds(step), jitter=jitter, within=days(3000))

    delay = retry.delay_after(attempt, key=key)

    if attempts is not None and attempt >= attempts:
        assert delay is None
    else:
        assert delay is not None
        assert seconds(1 - jitter) - timedelta(microseconds=1) <= delay <= STEP_RETRY.cap


# ---- the shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retry", "waits"),
    [
        (Retry.fixed(seconds(5), attempts=4, jitter=0), [5, 5, 5]),
        (Retry.fixed(hours(1), attempts=3, jitter=0), [3600, 3600]),
        (Retry.linear(seconds(2), attempts=4, jitter=0), [2, 4, 6]),
        (Retry.linear(seconds(10), seconds(1), attempts=5, jitter=0, cap=seconds(12)), [10, 11, 12, 12]),
        (Retry.exponential(seconds(1), 3, attempts=5, jitter=0, cap=seconds(20)), [1, 3, 9, 20]),
        (Retry.exponential(hours(1), attempts=3, jitter=0), [3600, 3600]),
    ],
    ids=["fixed", "fixed-beyond-the-cap", "linear", "linear-capped", "exponential", "exponential-capped"],
)
def test_a_policy_waits_as_its_name_says(retry: Retry, waits: list[float]) -> None:
    assert delays(retry) == waits


@pytest.mark.parametrize("jitter", [0.5, 1.0])
def test_the_jitter_takes_at_most_its_part_of_a_wait(jitter: float) -> None:
    retry = Retry.fixed(seconds(100), jitter=jitter)
    waits = [wait.total_seconds() for n in range(50) if (wait := retry.delay_after(1, key=b"%d" % n))]

    assert len(waits) == 50
    assert min(waits) >= 100 * (1 - jitter)
    assert max(waits) <= 100
    assert max(waits) - min(waits) > 10


def test_no_try_begins_when_the_total_time_is_over() -> None:
    retry = Retry.fixed(seconds(10), attempts=None, within=seconds(25), jitter=0)

    assert retry.next_at(1, key=b"", asked_at=NOON, now=NOON) == NOON + seconds(10)
    assert retry.next_at(7, key=b"", asked_at=NOON, now=NOON + seconds(15)) == NOON + seconds(25)
    assert retry.next_at(7, key=b"", asked_at=NOON, now=NOON + seconds(16)) is None
    assert [retry.has_try(7, asked_at=NOON, now=NOON + seconds(n)) for n in (25, 26)] == [True, False]


# ---- which errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retry", "covered"),
    [
        (Retry(), ["timeout", "connection", "key", "busy"]),
        (Retry(only=(OSError,)), ["timeout", "connection"]),
        (Retry(only=(ConnectionError, "busy")), ["connection", "busy"]),
        (Retry(never=(OSError,)), ["key", "busy"]),
        (Retry(only=(OSError,), never=(TimeoutError,)), ["connection"]),
        (Retry(never=("busy",)), ["timeout", "connection", "key"]),
    ],
    ids=["all", "a-class", "a-class-and-a-code", "but-a-class", "a-class-but-one-below-it", "but-a-code"],
)
def test_what_is_tried_again_is_chosen_by_class_or_code(retry: Retry, covered: list[str]) -> None:
    errors: dict[str, tuple[str, Exception | None]] = {
        "timeout": ("raised", TimeoutError()),
        "connection": ("raised", ConnectionResetError()),
        "key": ("raised", KeyError()),
        "busy": ("busy", None),
    }

    assert [name for name, (code, error) in errors.items() if retry.covers(code, error)] == covered
