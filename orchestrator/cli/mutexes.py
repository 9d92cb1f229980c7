"""`waypost mutex`: who has which mutex, and who waits for it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from orchestrator import bootstrap, registry
from orchestrator.cli.arguments import LISTED_MAX
from orchestrator.cli.output import Exit, ago, as_json, say, table
from orchestrator.settings import Settings
from orchestrator.store import mutexes as store
from orchestrator.store.mutexes import MutexRow


def mutex(args: Namespace, settings: Settings) -> int:
    key = None if args.verb == "list" else args.key
    return listed(bootstrap.run(read(settings, key)), args.output)


async def read(settings: Settings, key: str | None) -> list[MutexRow]:
    """Who has one; of `key`, who waits for it as well."""
    async with bootstrap.connection(settings) as conn:
        if key is None:
            return await store.held(conn, tenant=registry.TENANT, limit=LISTED_MAX)
        return await store.of_key(conn, key, tenant=registry.TENANT, limit=LISTED_MAX)


def listed(found: Sequence[MutexRow], shape: str) -> int:
    if shape == "json":
        say(as_json([asdict(row) for row in found]))
        return Exit.OK
    now = datetime.now(UTC)
    rows = (
        (
            row.key, row.kind, f"waits, {row.ahead} before" if row.granted_at is None else "has it",
            ago(row.granted_at or row.asked_at, now=now), row.execution_id, f"{row.definition}@{row.version}",
            row.status, row.path, str(row.waiting),
        )
        for row in found
    )  # fmt: skip
    say(table(("KEY", "OF", "STATE", "AGE", "EXECUTION", "FLOW", "STATUS", "PATH", "WAITING"), rows))
    return Exit.OK
