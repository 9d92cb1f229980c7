"""What a flow waits for by the clock, and what it draws."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from orchestrator import Context, UsageError, days, hours
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON
from tests.core.answers import driven, flow_of


def until(when: datetime) -> Callable[[Context, int], Coroutine[Any, Any, str]]:
    async def sleeps(ctx: Context, n: int) -> str:
        try:
            await ctx.sleep_until(when)
        except UsageError as error:
            return str(error)
        return ctx.now().isoformat()

    return sleeps


def test_a_sleep_until_a_time_ends_then() -> None:
    flow = driven(until(NOON + days(2)))

    flow.passes(days(2) - timedelta(seconds=1))
    assert flow.open == ["sleep"]
    flow.passes(timedelta(seconds=1))

    assert flow.returned == (NOON + days(2)).isoformat()


def test_a_sleep_until_means_the_moment_in_whichever_zone_it_is_told() -> None:
    flow = driven(until((NOON + hours(3)).astimezone(timezone(hours(5)))))

    flow.passes(hours(3))

    assert flow.returned == (NOON + hours(3)).isoformat()
    assert flow.journal[1].data["due"] == (NOON + hours(3)).isoformat()


def test_now_is_in_utc_whatever_zone_the_journal_was_read_in() -> None:
    async def asks(ctx: Context, n: int) -> str:
        return ctx.now().isoformat()

    machine = Machine(flow_of(asks).program)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON.astimezone(timezone(hours(9))))

    assert machine.result == NOON.isoformat()


@pytest.mark.parametrize("when", [NOON, NOON - days(400)])
def test_a_time_that_is_past_is_no_wait(when: datetime) -> None:
    flow = driven(until(when))

    flow.passes(timedelta(0))

    assert flow.returned == NOON.isoformat()


@pytest.mark.parametrize(
    ("when", "says"),
    [
        (datetime(2030, 1, 1), "ctx.sleep_until(2030-01-01T00:00:00): expected a time with a zone"),  # noqa: DTZ001  # on purpose
        (
            datetime(2040, 1, 1, tzinfo=UTC),
            "ctx.sleep_until(2040-01-01T00:00:00+00:00): expected a time within ten years",
        ),
    ],
)
def test_a_time_that_cannot_be_waited_for_is_a_usage_error(when: datetime, says: str) -> None:
    assert driven(until(when)).returned == says


def test_random_numbers_are_drawn_once_and_differ() -> None:
    async def draws(ctx: Context, n: int) -> list[float]:
        return [ctx.random() for _ in range(1_000)]

    drawn = driven(draws).returned

    assert drawn == driven(draws).returned
    assert len(set(drawn)) == 1_000
    assert 0 <= min(drawn) < 0.05
    assert 0.95 < max(drawn) < 1
