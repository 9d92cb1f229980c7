"""How to wait without being in the way: pauses that grow, and waits that end early."""

import asyncio
import random
from datetime import timedelta
from typing import Final

FIRST: Final = 0.05  # seconds


class Patience:
    """Pauses between tries to reach something that is away: each about twice the last one, at most `longest`.

    Drawn by chance from the upper half, so that all who lost the same database do not come back together.
    """

    def __init__(self, longest: timedelta) -> None:
        self._longest = longest.total_seconds()
        self._next = FIRST

    def reset(self) -> None:
        self._next = FIRST

    async def pause(self, *until: asyncio.Event) -> None:
        """Wait for the next pause, or until one of these events is set."""
        seconds = min(self._next, self._longest)
        self._next = seconds * 2
        await first_of(*until, timeout=jittered(seconds))


def jittered(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311  # spreads load; nothing is guessed from it


async def first_of(*events: asyncio.Event, timeout: float) -> None:  # noqa: ASYNC109  # running out is no error here
    """Return when one of `events` is set, or after `timeout` seconds."""
    if any(event.is_set() for event in events):
        return
    if not events:
        await asyncio.sleep(timeout)
        return
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
