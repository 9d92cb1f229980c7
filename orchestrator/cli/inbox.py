"""`waypost inbox` and `waypost contract`: what came and moved nothing, and what events of a type must be like.

What strangers wrote reaches no terminal unescaped.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from contracts import strict_json
from contracts.limits import SCHEMA_BYTES_MAX
from orchestrator import bootstrap, discretion, registry
from orchestrator import inbox as mail
from orchestrator.cli.output import Exit, ago, as_json, note, plain, say, table
from orchestrator.inbox import Apart, Became, Received
from orchestrator.settings import Settings
from orchestrator.store import inbox as store
from orchestrator.store.inbox import ContractRow, Item


def inbox(args: Namespace, settings: Settings) -> int:
    match args.verb:
        case "list":
            return listed(bootstrap.run(items(args, settings)), args.output)
        case "redrive":
            return redriven(args, bootstrap.run(redrive(args, settings)))
        case _:
            item, why = bootstrap.run(found(args, settings))
            return shown(item, why, args) if args.verb == "show" else explained(item, why, args)


async def items(args: Namespace, settings: Settings) -> list[Item]:
    async with bootstrap.connection(settings) as conn:
        found = await store.read(conn, tenant=registry.TENANT, reason=args.reason, limit=args.limit)
        return await discretion.items(conn, found, tenant=registry.TENANT)


async def found(args: Namespace, settings: Settings) -> tuple[Apart | Received, list[str]]:
    async with bootstrap.connection(settings) as conn:
        item = await mail.find(conn, args.id)
        shown = await discretion.item(conn, item, tenant=registry.TENANT)
        return shown, await mail.explain(
            conn, shown if isinstance(shown, Apart) else item, now=datetime.now(UTC)
        )


async def redrive(args: Namespace, settings: Settings) -> Became:
    async with bootstrap.connection(settings) as conn:
        return await mail.redrive(conn, settings.vault(), args.id, by=args.by)


def listed(rows: Sequence[Item], shape: str) -> int:
    if shape == "json":
        say(as_json([asdict(row) for row in rows]))
        return Exit.OK
    now = datetime.now(UTC)
    lines = (
        (
            row.id,
            row.reason,
            row.sender,
            row.type,
            row.key,
            ago(row.received_at, now=now),
            row.detail.splitlines()[:1],
        )
        for row in rows
    )
    cells = ((*line[:-1], "".join(line[-1])) for line in lines)
    say(table(("ID", "REASON", "SENDER", "TYPE", "KEY", "AGE", "DETAIL"), cells))
    return Exit.OK


def shown(item: Apart | Received, why: Sequence[str], args: Namespace) -> int:
    if args.output == "json":
        say(as_json({**asdict(item), "explanation": why}))
        return Exit.OK
    for name, value in asdict(item).items():
        text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
        say(f"{name}: {'-' if text is None else plain(text)}")
    return explained(item, why, args)


def explained(item: Apart | Received, why: Sequence[str], args: Namespace) -> int:
    if args.output == "json":
        say(as_json({"id": args.id, "explanation": why}))
        return Exit.OK
    for line in why:
        say(plain(line))
    if isinstance(item, Apart) and item.released_at is None and item.reason != "conflict":
        when = "So that it waits no longer" if item.reason == "ahead" else "When that is mended"
        say(f"{when}: waypost inbox redrive {args.id} --by NAME")
    return Exit.OK


def redriven(args: Namespace, became: Became) -> int:
    if args.output == "json":
        say(as_json({"id": args.id, "became": became}))
    else:
        let_in = "is let in." if args.id.startswith("q") else "is offered for a week more."
        note(f"{args.id} {let_in if became == 'stored' else 'was in already.'}")
    return Exit.OK


def contract(args: Namespace, settings: Settings) -> int:
    match args.verb:
        case "list":
            return contracts_listed(bootstrap.run(contracts(settings)), args.output)
        case "add":
            read = strict_json.decode(
                Path(args.file).read_bytes(), what="contract", bytes_max=SCHEMA_BYTES_MAX
            )
            type_, schema = mail.document_in(read, args.type)
            bootstrap.run(add(type_, schema, args.dataschema, settings))
            return changed(args, type_, "have a contract")
        case _:
            bootstrap.run(remove(args, settings))
            return changed(args, args.type, "have no contract")


async def contracts(settings: Settings) -> list[ContractRow]:
    async with bootstrap.connection(settings) as conn:
        return await store.read_contracts(conn, tenant=registry.TENANT)


async def add(type_: str, schema: Any, dataschema: str, settings: Settings) -> None:
    async with bootstrap.connection(settings) as conn:
        await mail.add_contract(conn, type_, schema, dataschema=dataschema)


async def remove(args: Namespace, settings: Settings) -> None:
    async with bootstrap.connection(settings) as conn:
        await mail.remove_contract(conn, args.type, dataschema=args.dataschema)


def changed(args: Namespace, type_: str, what: str) -> int:
    if args.output == "json":
        say(as_json({"type": type_, "dataschema": args.dataschema}))
    else:
        note(f"events of type {plain(type_)} {what} now.")
    return Exit.OK


def contracts_listed(rows: Sequence[ContractRow], shape: str) -> int:
    if shape == "json":
        say(as_json([asdict(row) for row in rows]))
        return Exit.OK
    now = datetime.now(UTC)
    say(
        table(
            ("TYPE", "DATASCHEMA", "AGE"),
            ((row.type, row.dataschema, ago(row.created_at, now=now)) for row in rows),
        )
    )
    return Exit.OK
