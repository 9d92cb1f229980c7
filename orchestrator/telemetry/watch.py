"""One process of a part as others see it: what it counts, and whether it is ready."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import psycopg
from psycopg.rows import class_row

from contracts.observer import Observer, Several
from contracts.spans import has_collector
from migrations import runner
from orchestrator.settings import Settings
from orchestrator.store.database import Pool
from orchestrator.telemetry.health import Check, Health, serving
from orchestrator.telemetry.meters import Meters
from orchestrator.telemetry.tracing import READ, Tracing

USABLE_SECONDS: Final = 2.0
"""For the database to say that it is there; a probe waits no longer."""

MIGRATIONS: Final = runner.discover()
"""Those that this release knows; read once, for what is asked every few seconds."""


class Watch:
    """What one process of a part is asked about: nothing is counted when nobody can ask. With a collector in the
    environment it is `traced`: what is committed is marked, and the marks are exported.
    """

    def __init__(self, settings: Settings, part: str, lines: Observer) -> None:
        self._address, self._fixed = settings.health_of(part)
        self._meters = Meters(part) if self._address is not None else None
        self._part = part
        self._gap = settings.trace_segment_gap
        self.traced = has_collector(os.environ)
        self.said = lines if self._meters is None else Several(lines, self._meters)

    @asynccontextmanager
    async def serving(self, pool: Pool, stop: asyncio.Event, **checks: Check) -> AsyncGenerator[None]:
        """Answer, and export what is marked, within the block. The process is ready until `stop`, as long as the
        database and all `checks` say so.

        Raises CannotListen.
        """
        async with self._exporting(pool), self._answering(pool, stop, checks):
            yield

    @asynccontextmanager
    async def _answering(
        self, pool: Pool, stop: asyncio.Event, checks: Mapping[str, Check]
    ) -> AsyncGenerator[None]:
        if self._meters is None:
            yield
            return
        asked: dict[str, Check] = {
            "draining": partial(draining, stop),
            "database": partial(usable, pool),
            **checks,
        }
        health = Health(asked, self._meters.page)
        async with serving(health, self._address, fixed=self._fixed, observer=self.said):
            yield

    @asynccontextmanager
    async def _exporting(self, pool: Pool) -> AsyncGenerator[None]:
        if not self.traced or self._part not in READ:
            yield
            return
        from receiver.otlp import Otlp  # noqa: PLC0415  # without a collector nobody needs its libraries

        collector = Otlp(f"waypost-{self._part}")
        tracing = Tracing(self._part, pool, collector, observer=self.said, gap=self._gap)
        running = asyncio.create_task(tracing.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await tracing.flush()
            collector.close()


async def draining(stop: asyncio.Event) -> str | None:
    return "asked to stop" if stop.is_set() else None


async def usable(pool: Pool) -> str | None:
    """What is wrong with the database: away, a standby, or migrated to what this release does not know."""
    try:
        async with asyncio.timeout(USABLE_SECONDS), pool.connection() as conn:
            cursor = conn.cursor(row_factory=class_row(runner.Applied))
            waiting = runner.compare(MIGRATIONS, await (await cursor.execute(runner.READ_APPLIED)).fetchall())
    except runner.MigrationError as error:
        return str(error)
    except (psycopg.Error, OSError) as error:  # TimeoutError is an OSError; a message may name hosts
        return type(error).__name__
    return f"{len(waiting)} migrations to apply" if waiting else None
