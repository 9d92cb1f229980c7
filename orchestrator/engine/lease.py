"""The right of a worker to write, renewed in a thread of its own.

A thread, because code of users may block the event loop, and because a driver may need seconds to get out of
a frozen connection. But it renews only while the event loop's tick is fresh: a process that no longer serves
its executions must not keep them.
"""

from __future__ import annotations

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


class Lease:
    """Whether worker `me` may still write. `lost` is called, from any thread, when it no longer may."""

    def __init__(
        self, dsn: str, *, me: str, span: timedelta, granted: float, lost: Callable[[], None]
    ) -> None:
        self.me = me
        self._dsn = dsn
        self._span = span
        self._lost = lost
        self._ends = granted + span.total_seconds()
        self._tick = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease-{me[:8]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Renew no more. Returns at once; the thread ends by itself."""
        self._over.set()

    def tick(self) -> None:
        """The event loop is alive."""
        self._tick = time.monotonic()

    @property
    def holds(self) -> bool:
        """Whether an effect may begin now. Once it is false, it stays so: what we held may be another's."""
        if self._over.is_set():
            return False
        if time.monotonic() < self._ends - self._span.total_seconds() * MARGIN:
            return True
        self._lose()
        return False

    def _lose(self) -> None:
        self._over.set()
        self._lost()

    def _run(self) -> None:
        pause = self._span.total_seconds() / RENEWALS
        conn: psycopg.Connection[tuple[Any, ...]] | None = None
        while not self._over.wait(pause):
            now = time.monotonic()
            if now >= self._ends:
                break
            if now - self._tick > self._span.total_seconds() / 2:
                continue
            try:
                if conn is None or conn.closed:
                    conn = psycopg.connect(self._dsn, **connection_arguments(self._dsn, name="lease"))
                sent = time.monotonic()
                if not workers.renew(conn, me=self.me, lease=self._span):
                    break
                self._ends = sent + self._span.total_seconds()
            except psycopg.Error:
                conn = _closed(conn)
        _closed(conn)
        if not self._over.is_set():
            self._lose()


def _closed(conn: psycopg.Connection[tuple[Any, ...]] | None) -> None:
    if conn is not None:
        conn.close()
