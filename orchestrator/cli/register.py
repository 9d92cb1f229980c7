"""Endpoints and senders: registering and listing them.

A secret is printed once, alone on stdout, and never shown again.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from contracts.signature import Secret
from orchestrator import bootstrap, registry
from orchestrator.cli import endpoints as verbs
from orchestrator.cli.arguments import LISTED_MAX
from orchestrator.cli.output import Exit, ago, as_json, note, plain, say, table
from orchestrator.registry import Registered
from orchestrator.settings import Settings
from orchestrator.store import registry as store
from orchestrator.store.registry import EndpointRow, SenderRow

ENDPOINT_VERBS = {
    "show": verbs.show,
    "set": verbs.set_,
    "enable": verbs.enable,
    "disable": verbs.disable,
}


def endpoint(args: Namespace, settings: Settings) -> int:
    if args.verb in ENDPOINT_VERBS:
        return ENDPOINT_VERBS[args.verb](args, settings)
    if args.verb == "list":
        return list_endpoints(bootstrap.run(endpoints(settings)), args.output)
    added = bootstrap.run(add_endpoint(args, settings))
    return show(added, args.output, use="the service verifies commands with it")


async def add_endpoint(args: Namespace, settings: Settings) -> Registered:
    async with bootstrap.connection(settings) as conn:
        return await registry.add_endpoint(
            conn,
            settings.vault(),
            name=args.name,
            url=args.url,
            kind=args.kind,
            patience=args.timeout,
            replies_from=args.replies_from,
            secret=given(args.secret_file),
            allow=settings.allow_addresses,
            replace=args.replace,
        )


def sender(args: Namespace, settings: Settings) -> int:
    if args.verb == "list":
        return list_senders(bootstrap.run(senders(settings)), args.output)
    if args.verb == "set":
        bootstrap.run(set_sender(args, settings))
        return changed(args)
    added = bootstrap.run(add_sender(args, settings))
    return show(added, args.output, use="what the service posts is signed with it")


async def add_sender(args: Namespace, settings: Settings) -> Registered:
    async with bootstrap.connection(settings) as conn:
        return await registry.add_sender(
            conn,
            settings.vault(),
            name=args.name,
            secret=given(args.secret_file),
            binary_mode=args.binary,
            replace=args.replace,
        )


async def set_sender(args: Namespace, settings: Settings) -> None:
    async with bootstrap.connection(settings) as conn:
        await registry.set_sender(conn, args.name, binary_mode=args.binary)


def changed(args: Namespace) -> int:
    if args.output == "json":
        say(as_json({"kind": "sender", "name": args.name, "binary_mode": args.binary}))
    else:
        note(
            f"sender {plain(args.name)} may send events in these content modes: {modes(binary=args.binary)}."
        )
    return Exit.OK


def modes(*, binary: bool) -> str:
    return "structured, binary" if binary else "structured"


def given(path: str | None) -> Secret | None:
    """The secret in a file. Raises BadSecret, which does not repeat it, and OSError."""
    match path:
        case None:
            return None
        case "-":
            return Secret.parse(sys.stdin.read())
        case _:
            return Secret.parse(Path(path).read_text(encoding="utf-8"))


def show(added: Registered, shape: str, *, use: str) -> int:
    if shape == "json":
        say(
            as_json(
                {"kind": added.kind, "name": added.name, "key_id": added.key_id, "secret": added.secret.text}
            )
        )
        return Exit.OK
    note(f"{added.kind} {added.name} is registered. Keep its secret now, {use}:")
    say(added.secret.text)
    return Exit.OK


async def endpoints(settings: Settings) -> list[EndpointRow]:
    async with bootstrap.connection(settings) as conn:
        return await store.read_endpoints(conn, tenant=registry.TENANT, limit=LISTED_MAX)


async def senders(settings: Settings) -> list[SenderRow]:
    async with bootstrap.connection(settings) as conn:
        return await store.read_senders(conn, tenant=registry.TENANT, limit=LISTED_MAX)


def list_endpoints(found: Sequence[EndpointRow], shape: str) -> int:
    if shape == "json":
        say(as_json([asdict(row) for row in found]))
        return Exit.OK
    now = datetime.now(UTC)
    say(
        table(
            ("ENDPOINT", "URL", "KIND", "STATE", "TIMEOUT", "REPLIES FROM", "SECRETS", "AGE"),
            (
                (
                    row.name,
                    row.url,
                    row.kind,
                    f"paused {ago(row.paused_until, now=now)}" if row.paused_until else row.state,
                    f"{row.timeout.total_seconds():g} s",
                    row.replies_from,
                    row.secrets,
                    ago(row.created_at, now=now),
                )
                for row in found
            ),
        )
    )
    return Exit.OK


def list_senders(found: Sequence[SenderRow], shape: str) -> int:
    if shape == "json":
        say(as_json([asdict(row) for row in found]))
        return Exit.OK
    now = datetime.now(UTC)
    rows = (
        (row.name, row.state, row.secrets, modes(binary=row.binary_mode), ago(row.created_at, now=now))
        for row in found
    )
    say(table(("SENDER", "STATE", "SECRETS", "MODES", "AGE"), rows))
    return Exit.OK
