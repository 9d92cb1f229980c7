"""The right of a worker to write, renewed in a thread of its own.

A thread, because code of users may block the event loop, and because a driver may need seconds to get out of
a frozen connection. But it renews only while the event loop's tick is fresh: a process that no longer serves
its executions must not keep them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import psycopg

from orchestrator.store import workers
from orchestrator.store.database import connection_arguments

RENEWALS: Final = 5
"""Renewals within one lease."""

MARGIN: Final = 0.2
"""The part of a lease that is left when its holder stops starting effects."""


BLOCKED_SECONDS_MAX: Final = 10.0
"""For the event loop to come back once the lease is over; a longer lease waits as long as itself."""

FRAMES_MAX: Final = 12
"""Of a stack that is told."""


class Lease:
    """Whether worker `me` may still write. `lost` is called, from any thread, when it no longer may.

    `blocked` is called, with where the code stands, when the event loop does not come back after that: a flow
    that computes for ever, say. From then on the process is of no use to anybody.
    """

    def __init__(
        self,
        dsn: str,
        *,
        me: str,
        span: timedelta,
        granted: float,
        lost: Callable[[], None],
        blocked: Callable[[list[str]], None] = lambda _: None,
        patience: float = BLOCKED_SECONDS_MAX,
    ) -> None:
        self.me = me
        self._dsn = dsn
        self._span = span
        self._lost = lost
        self._blocked = blocked
        self._patience = max(patience, span.total_seconds())
        self._loop_thread = threading.get_ident()
        self._seconds = span.total_seconds()
        self._ends = granted + self._seconds
        self._tick = time.monotonic()
        self._over = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease-{me[:8]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Renew no more. Returns at once; the thread ends by itself."""
        self._stopped.set()
        self._over.set()

    def join(self) -> None:
        """Wait for the thread's end, after `stop`."""
        self._thread.join()

    def tick(self) -> None:
        """The event loop is alive."""
        self._tick = time.monotonic()

    @property
    def holds(self) -> bool:
        """Whether an effect may begin now. Once it is false, it stays so: what we held may be another's."""
        if self._over.is_set():
            return False
        if time.monotonic() < self._ends - self._seconds * MARGIN:
            return True
        self._lose()
        return False

    def _lose(self) -> None:
        self._over.set()
        self._lost()

    def _run(self) -> None:
        self._renew()
        if not self._over.is_set():
            self._lose()
        while not self._stopped.wait(self._seconds / RENEWALS):
            if time.monotonic() - self._tick > self._patience:
                self._blocked(stack_of(self._loop_thread))
                return

    def _renew(self) -> None:
        conn: psycopg.Connection[tuple[Any, ...]] | None = None
        while not self._over.wait(self._seconds / RENEWALS):
            now = time.monotonic()
            if now >= self._ends:
                break
            if now - self._tick > self._seconds / 2:
                continue
            try:
                if conn is None or conn.closed:
                    conn = psycopg.connect(self._dsn, **connection_arguments(self._dsn, name="lease"))
                sent = time.monotonic()
                if not workers.renew(conn, me=self.me, lease=self._span):
                    break
                self._ends = sent + self._seconds
            except psycopg.Error:
                conn = _closed(conn)
        _closed(conn)


def stack_of(thread: int) -> list[str]:
    """Where a thread's code stands, the innermost frame first: function, module and line."""
    frames = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # documented so
    frame = frames.get(thread)
    places: list[str] = []
    while frame is not None and len(places) < FRAMES_MAX:
        module = frame.f_globals.get("__name__", "?")
        places.append(f"{frame.f_code.co_qualname} ({module}:{frame.f_lineno})")
        frame = frame.f_back
    return places


def _closed(conn: psycopg.Connection[tuple[Any, ...]] | None) -> None:
    if conn is not None:
        conn.close()
