"""How often and how long is measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bench.report import figure

Say: TypeAlias = Callable[[str], None]
"""Takes a line about what goes on."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`rounds` of everything; `warm_up` and `window` in seconds, where they are not the bench's own."""

    rounds: int
    warm_up: float | None = None
    window: float | None = None


def spread(found: Sequence[float]) -> str:
    """The median of `found`, with the lowest and the highest."""
    return f"{figure(statistics.median(found))} ({figure(min(found))} to {figure(max(found))})"
