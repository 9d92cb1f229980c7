"""The database's time, between two looks at it."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from orchestrator.core.journal import BEGINNING


class Clock:
    """The last time that the database told, moved on by this process's monotonic clock. Never goes backwards."""

    __slots__ = ("_mark", "_told")

    def __init__(self) -> None:
        self._told = BEGINNING
        self._mark = time.monotonic()

    def told(self, at: datetime) -> None:
        """The database said that it is `at`."""
        if at > self.now():
            self._told, self._mark = at, time.monotonic()

    def now(self) -> datetime:
        return self._told + timedelta(0, time.monotonic() - self._mark)
