"""When to try again what outlives a process: tables, not formulas, so that people can compare them."""

from datetime import timedelta
from typing import Final

COMMAND_SCHEDULE: Final = (1, 2, 5, 10, 30)
"""Seconds after the first, second, … attempt of a command; then MINUTE, until its deadline."""

MINUTE: Final = 60


def delay_after(attempt: int) -> timedelta:
    """How long to wait after the `attempt`-th attempt of a command, counted from 1, has failed."""
    if attempt < 1:
        raise ValueError(f"expected an attempt counted from 1, found {attempt}")
    return timedelta(seconds=COMMAND_SCHEDULE[attempt - 1] if attempt <= len(COMMAND_SCHEDULE) else MINUTE)
