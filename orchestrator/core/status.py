"""The life of an execution, as one table."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Status(StrEnum):
    """What the execution row stores. `ready`, `running` and `waiting` are derived from owner and wake_at."""

    OPEN = "open"
    PAUSED = "paused"
    HELD = "held"
    COMPLETED = "completed"
    COMPENSATED = "compensated"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL: Final = frozenset({Status.COMPLETED, Status.COMPENSATED, Status.FAILED, Status.CANCELLED})

TRANSITIONS: Final[dict[Status, frozenset[Status]]] = {
    Status.OPEN: frozenset({Status.OPEN, Status.PAUSED, Status.HELD, *TERMINAL}),
    Status.PAUSED: frozenset({Status.OPEN, Status.PAUSED, Status.HELD, *TERMINAL}),
    Status.HELD: frozenset({Status.OPEN, Status.PAUSED, Status.HELD, *TERMINAL}),
    Status.COMPLETED: frozenset(),
    Status.COMPENSATED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
}
"""Every move that a commit may make. Terminal is terminal."""
