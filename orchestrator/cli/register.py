"""Registering endpoints and senders. A secret is printed once, alone on stdout, and never shown again."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from contracts.signature import Secret
from orchestrator import bootstrap, registry
from orchestrator.cli.output import Exit, as_json, note, say
from orchestrator.registry import Registered
from orchestrator.settings import Settings


def endpoint(args: Namespace, settings: Settings) -> int:
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
        )


def sender(args: Namespace, settings: Settings) -> int:
    added = bootstrap.run(add_sender(args, settings))
    return show(added, args.output, use="the service signs its replies with it")


async def add_sender(args: Namespace, settings: Settings) -> Registered:
    async with bootstrap.connection(settings) as conn:
        return await registry.add_sender(
            conn, settings.vault(), name=args.name, secret=given(args.secret_file)
        )


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
