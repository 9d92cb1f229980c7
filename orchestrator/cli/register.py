"""Endpoints and senders: registering and listing them.

A secret is printed once, alone on stdout, and never shown again.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

from contracts import strict_json
from contracts.errors import shown
from contracts.signature import Secret
from orchestrator import bootstrap, registry
from orchestrator.cli import endpoints as verbs
from orchestrator.cli.arguments import LISTED_MAX
from orchestrator.cli.output import Exit, ago, as_json, note, plain, say, table
from orchestrator.registry import NotRegistered, Registered
from orchestrator.settings import Settings
from orchestrator.store import registry as store
from orchestrator.store.registry import EndpointRow, SenderRow
from receiver.authenticity import parse_secret
from receiver.schemes import SettingsInvalid, policy_of

SETTINGS_BYTES_MAX: Final = 16 * 1024
"""Of a sender's settings; the table takes no more."""

ENDPOINT_VERBS = {
    "show": verbs.show,
    "set": verbs.set_,
    "enable": verbs.enable,
    "disable": verbs.disable,
    "remove": verbs.remove,
    "rotate": verbs.rotate,
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
    match args.verb:
        case "list":
            return list_senders(bootstrap.run(senders(settings)), args.output)
        case "set":
            bootstrap.run(set_sender(args, settings))
            return changed(args)
        case "rotate":
            rotated = bootstrap.run(rotate_sender(args, settings))
            return show(rotated, args.output, use="the old ones end soon", what="has a new secret")
        case _:
            added = bootstrap.run(add_sender(args, settings))
            return show(added, args.output, use="what the service posts is signed with it")


async def add_sender(args: Namespace, settings: Settings) -> Registered:
    particular = members(args.settings) or {}
    text = read(args.secret_file)
    form = policy_of(args.scheme, particular).signature
    async with bootstrap.connection(settings) as conn:
        return await registry.add_sender(
            conn,
            settings.vault(),
            name=args.name,
            scheme=args.scheme,
            settings=particular,
            secret=None if text is None else parse_secret(form, text),
            binary_mode=args.binary,
            replace=args.replace,
        )


async def set_sender(args: Namespace, settings: Settings) -> None:
    if args.binary is None and args.settings is None and args.state is None:
        raise NotRegistered(
            f"sender {shown(args.name)}",
            ["expected --binary, --no-binary, --settings or --state, found none"],
        )
    async with bootstrap.connection(settings) as conn:
        await registry.set_sender(
            conn,
            args.name,
            binary_mode=args.binary,
            settings=members(args.settings),
            state=args.state,
        )


async def rotate_sender(args: Namespace, settings: Settings) -> Registered:
    text = read(args.secret_file)
    async with bootstrap.connection(settings) as conn:
        return await registry.rotate_sender(conn, settings.vault(), args.name, text=text, grace=args.grace)


def changed(args: Namespace) -> int:
    said = {"binary_mode": args.binary, "settings": members(args.settings), "state": args.state}
    if args.output == "json":
        told = {name: value for name, value in said.items() if value is not None}
        say(as_json({"kind": "sender", "name": args.name, **told}))
        return Exit.OK
    if args.binary is not None:
        note(
            f"sender {plain(args.name)} may send events in these content modes: {modes(binary=args.binary)}."
        )
    if args.settings is not None:
        note(f"sender {plain(args.name)} has these settings now.")
    if args.state is not None:
        note(f"sender {plain(args.name)} is {args.state}.")
    return Exit.OK


def members(text: str | None) -> Mapping[str, Any] | None:
    """Settings as JSON, or those in a file behind an at sign. Raises MalformedJson, SettingsInvalid, OSError."""
    if text is None:
        return None
    content = Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text
    found = strict_json.decode(content, what="settings", bytes_max=SETTINGS_BYTES_MAX)
    if not isinstance(found, dict):
        raise SettingsInvalid(f"settings: expected a JSON object, found {shown(found)}")
    return cast("dict[str, Any]", found)


def modes(*, binary: bool) -> str:
    return "structured, binary" if binary else "structured"


def given(path: str | None) -> Secret | None:
    """The secret in a file. Raises BadSecret, which does not repeat it, and OSError."""
    text = read(path)
    return None if text is None else Secret.parse(text)


def read(path: str | None) -> str | None:
    match path:
        case None:
            return None
        case "-":
            return sys.stdin.read()
        case _:
            return Path(path).read_text(encoding="utf-8")


def show(added: Registered, shape: str, *, use: str, what: str = "is registered") -> int:
    if shape == "json":
        say(as_json({"kind": added.kind, "name": added.name, "key_id": added.key_id, "secret": added.text}))
        return Exit.OK
    note(f"{added.kind} {added.name} {what}. Keep its secret now, {use}:")
    say(added.text)
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
            ("ENDPOINT", "URL", "KIND", "STATE", "TIMEOUT", "RATE", "REPLIES FROM", "SECRETS", "AGE"),
            (
                (
                    row.name,
                    row.url,
                    row.kind,
                    how_it_does(row, now),
                    f"{row.timeout.total_seconds():g} s",
                    f"{row.rate:g}/s" if row.rate else "-",
                    row.replies_from,
                    row.secrets,
                    ago(row.created_at, now=now),
                )
                for row in found
            ),
        )
    )
    return Exit.OK


def how_it_does(row: EndpointRow, now: datetime) -> str:
    """The first of: why it is disabled, until when it is paused, that nothing gets through, since when all fails."""
    if row.state != "enabled":
        return f"{row.state} {verbs.FAULTS[row.fault]}".strip()
    if row.paused_until:
        return f"paused {ago(row.paused_until, now=now)}"
    if row.open_until:
        return "circuit open"
    return f"failing for {ago(row.failing_since, now=now)}" if row.failing_since else row.state


def list_senders(found: Sequence[SenderRow], shape: str) -> int:
    if shape == "json":
        say(as_json([asdict(row) for row in found]))
        return Exit.OK
    now = datetime.now(UTC)
    rows = (
        (
            row.name,
            row.state,
            row.secrets,
            row.scheme,
            modes(binary=row.binary_mode),
            ago(row.created_at, now=now),
        )
        for row in found
    )
    say(table(("SENDER", "STATE", "SECRETS", "SCHEME", "MODES", "AGE"), rows))
    return Exit.OK
