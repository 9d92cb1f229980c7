"""Waiting for what can be seen: a condition is asked for again and again, within a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import psycopg

PATIENCE_SECONDS: Final = 30.0
PAUSE_SECONDS: Final = 0.005


async def until(
    condition: Callable[[], Awaitable[bool]], *, what: str, seconds: float = PATIENCE_SECONDS
) -> None:
    """Return when `condition` holds. Fails after `seconds`, saying `what` was waited for."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        await asyncio.sleep(PAUSE_SECONDS)


def until_blocked(conn: psycopg.Connection[Any], pid: int, *, by: int) -> None:
    """Return when backend `pid` waits for a lock that backend `by` holds or is before it in the queue for."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        row = conn.execute("select pg_blocking_pids(%s)", (pid,)).fetchone()
        if row is not None and by in row[0]:
            return
        assert time.monotonic() < deadline, f"backend {pid} never waited for {by}"
        time.sleep(PAUSE_SECONDS)


def until_true(condition: Callable[[], bool], *, what: str) -> None:
    """As `until`, where nothing is asynchronous."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(PAUSE_SECONDS)
