"""One timer for all who wait equally long: a timer for each would cost as much as reading what they sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Fails each future that has no result `seconds` after it was added, with what `late` makes."""

    def __init__(self, seconds: float, late: Callable[[], Exception]) -> None:
        self._seconds = seconds
        self._late = late
        self._open: deque[tuple[float, asyncio.Future[T]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, future: asyncio.Future[T]) -> None:
        """Watch `future` from now on."""
        loop = asyncio.get_running_loop()
        waiting = self._open
        while waiting and waiting[0][1].done():  # mostly the oldest is done first, so few are kept
            waiting.popleft()
        waiting.append((loop.time() + self._seconds, future))
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look)

    def _look(self) -> None:
        """Fail those whose time is over, and look again when that of the next one is."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._open and (self._open[0][1].done() or self._open[0][0] <= loop.time()):
            _, future = self._open.popleft()
            if not future.done():
                future.set_exception(self._late())
        if self._open:
            self._timer = loop.call_at(self._open[0][0], self._look)
