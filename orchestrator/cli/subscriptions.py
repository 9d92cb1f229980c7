"""`waypost subscription`: who gets published events."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from orchestrator import bootstrap, registry, subscriptions
from orchestrator.cli.arguments import LISTED_MAX
from orchestrator.cli.output import Exit, ago, as_json, note, plain, say, table
from orchestrator.settings import Settings
from orchestrator.store import subscriptions as store
from orchestrator.store.subscriptions import SubscriptionRow


def subscription(args: Namespace, settings: Settings) -> int:
    match args.verb:
        case "list":
            return listed(bootstrap.run(read(settings)), args.output)
        case "add":
            new = bootstrap.run(add(args, settings))
            return told(args, "gets" if new else "got already, and gets,")
        case _:
            bootstrap.run(remove(args, settings))
            return told(args, "gets no more")


async def add(args: Namespace, settings: Settings) -> bool:
    async with bootstrap.connection(settings) as conn:
        return await subscriptions.subscribe(
            conn, args.type, args.endpoint, ordered_by=args.ordered, attributes=dict(args.where)
        )


async def remove(args: Namespace, settings: Settings) -> None:
    async with bootstrap.connection(settings) as conn:
        await subscriptions.unsubscribe(conn, args.type, args.endpoint)


async def read(settings: Settings) -> list[SubscriptionRow]:
    async with bootstrap.connection(settings) as conn:
        return await store.read(conn, tenant=registry.TENANT, limit=LISTED_MAX)


def told(args: Namespace, becomes: str) -> int:
    if args.output == "json":
        say(as_json({"type": args.type, "endpoint": args.endpoint, "subscribed": args.verb == "add"}))
    else:
        note(f"endpoint {plain(args.endpoint)} {becomes} events of type {plain(args.type)}.")
    return Exit.OK


def listed(found: Sequence[SubscriptionRow], shape: str) -> int:
    if shape == "json":
        say(as_json([asdict(row) for row in found]))
        return Exit.OK
    now = datetime.now(UTC)
    rows = (
        (
            row.type,
            row.endpoint,
            row.ordered_by or "-",
            " ".join(f"{name}={value}" for name, value in (row.attributes or {}).items()) or "-",
            row.url,
            row.state,
            ago(row.created_at, now=now),
        )
        for row in found
    )
    say(table(("TYPE", "ENDPOINT", "ORDERED BY", "WHERE", "URL", "STATE", "AGE"), rows))
    return Exit.OK
