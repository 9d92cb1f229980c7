"""`waypost approvals` and `waypost decide`: what flows ask of people."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from datetime import UTC, datetime

from orchestrator import bootstrap
from orchestrator.cli.output import Exit, ago, as_json, note, plain, say, table
from orchestrator.settings import Settings
from orchestrator.store.approvals import ApprovalRow


def approvals(args: Namespace, settings: Settings) -> int:
    found = bootstrap.run(waiting(args, settings))
    if args.output == "json":
        say(as_json([asdict(row) for row in found]))
    else:
        say(table(("EXECUTION", "FLOW", "SUBJECT", "WHO", "CHOICES", "SINCE", "UNTIL"), map(cells, found)))
        note(f"{len(found)} shown; `waypost decide EXECUTION SUBJECT CHOICE --by NAME` decides one.")
    return Exit.OK


async def waiting(args: Namespace, settings: Settings) -> list[ApprovalRow]:
    async with bootstrap.client(settings) as client:
        return await client.approvals_shown(flow=args.flow, limit=args.limit)


def cells(row: ApprovalRow) -> tuple[object, ...]:
    now = datetime.now(UTC)
    return (
        row.execution_id,
        f"{row.definition}@{row.version}",
        row.subject,
        ",".join(row.who),
        "|".join(row.choices),
        ago(row.asked_at, now=now),
        ago(row.expires_at, now=now),
    )


def decide(args: Namespace, settings: Settings) -> int:
    bootstrap.run(decide_one(args, settings))
    if args.output == "json":
        said = {name: getattr(args, name) for name in ("subject", "choice", "by", "reason")}
        say(as_json({"execution_id": args.id, "order": "decide", **said}))
    else:
        note(f"{plain(args.subject)} of {args.id} is decided: {plain(args.choice)} by {plain(args.by)}.")
    return Exit.OK


async def decide_one(args: Namespace, settings: Settings) -> None:
    async with bootstrap.client(settings) as client:
        await client.decide(args.id, args.subject, args.choice, by=args.by, reason=args.reason)
