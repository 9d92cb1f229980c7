"""`waypost flow`: versions, what is open of each, and their shares of what is started."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from orchestrator import bootstrap, registry, versions
from orchestrator.cli.arguments import LISTED_MAX
from orchestrator.cli.output import Exit, ago, as_json, note, plain, say, table
from orchestrator.settings import Settings
from orchestrator.store import versions as store
from orchestrator.store.versions import VersionRow

SHOWN: Final = 8
"""Digits of a fingerprint in a table."""


def flow(args: Namespace, settings: Settings) -> int:
    if args.verb == "list":
        return listed(bootstrap.run(read(args.flow, settings)), args.output)
    name, version = versions.named(args.version)
    if args.verb == "share":
        bootstrap.run(share(name, version, args.percent, settings))
        told = f"{plain(name)}@{plain(version)} gets {args.percent} of a hundred new executions."
    else:
        bootstrap.run(unshare(name, version, settings))
        told = f"{plain(name)}@{plain(version)} has no share of its own any more."
    if args.output == "json":
        percent = args.percent if args.verb == "share" else None
        say(as_json({"name": name, "version": version, "percent": percent}))
    else:
        note(told)
    return Exit.OK


async def read(name: str | None, settings: Settings) -> list[VersionRow]:
    async with bootstrap.connection(settings) as conn:
        return await store.versions(conn, tenant=registry.TENANT, flow=name, limit=LISTED_MAX)


async def share(name: str, version: str, percent: int, settings: Settings) -> None:
    async with bootstrap.connection(settings) as conn:
        await versions.share(conn, name, version, percent)


async def unshare(name: str, version: str, settings: Settings) -> None:
    async with bootstrap.connection(settings) as conn:
        await versions.unshare(conn, name, version)


def listed(found: Sequence[VersionRow], shape: str) -> int:
    if shape == "json":
        say(as_json([asdict(row) for row in found]))
        return Exit.OK
    now = datetime.now(UTC)
    rows = (
        (
            f"{row.name}@{row.version}",
            row.state,
            f"{row.starts} %",
            row.open,
            row.held,
            row.workers,
            row.event or "",
            (row.fingerprint or "")[:SHOWN],
            ago(row.known_at, now=now),
        )
        for row in found
    )
    say(table(("VERSION", "STATE", "STARTS", "OPEN", "HELD", "WORKERS", "EVENT", "CODE", "AGE"), rows))
    return Exit.OK
