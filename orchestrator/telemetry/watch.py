"""One process of a part as others see it: what it counts, and whether it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import psycopg
from psycopg.rows import class_row

from contracts.observer import Observer, Several
from migrations import runner
from orchestrator.settings import Settings
from orchestrator.store.database import Pool
from orchestrator.telemetry.health import Check, Health, serving
from orchestrator.telemetry.meters import Meters

USABLE_SECONDS: Final = 2.0
"""For the database to say that it is there; a probe waits no longer."""

MIGRATIONS: Final = runner.discover()
"""Those that this release knows; read once, for what is asked every few seconds."""


class Watch:
    """What one process of a part is asked about: nothing is counted when nobody can ask."""

    def __init__(self, settings: Settings, part: str, lines: Observer) -> None:
        self._address, self._fixed = settings.health_of(part)
        self._meters = Meters(part) if self._address is not None else None
        self.said = lines if self._meters is None else Several(lines, self._meters)

    @asynccontextmanager
    async def serving(self, pool: Pool, stop: asyncio.Event, **checks: Check) -> AsyncGenerator[None]:
        """Answer within the block. It is ready until `stop`, as long as the database and all `checks` say so.

        Raises CannotListen.
        """
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
