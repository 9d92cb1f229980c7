"""`waypost task`: what waits in queues, who has it, what became of it."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from datetime import UTC, datetime

from contracts.errors import NotFound
from orchestrator import bootstrap, discretion
from orchestrator.cli.output import Exit, ago, as_json, note, plain, say, table
from orchestrator.settings import Settings
from orchestrator.store import tasks
from orchestrator.store.tasks import TaskRow

TENANT = 1


class UnknownTask(NotFound):
    """There is no such try of a task."""

    code = "unknown-task"

    def __init__(self, task: object) -> None:
        super().__init__(f"task {task}: expected one of `waypost task list`, found none")


def task(args: Namespace, settings: Settings) -> int:
    return bootstrap.run(listed(args, settings) if args.verb == "list" else shown(args, settings))


async def listed(args: Namespace, settings: Settings) -> int:
    async with bootstrap.connection(settings) as conn:
        states = [args.state] if args.state else None
        found = await tasks.listed(conn, tenant=TENANT, queue=args.queue, states=states, limit=args.limit)
    if args.output == "json":
        say(as_json([asdict(row) for row in found]))
    else:
        say(table(HEADINGS, map(cells, found)))
        note(f"{len(found)} shown")
    return Exit.OK


async def shown(args: Namespace, settings: Settings) -> int:
    async with bootstrap.connection(settings) as conn:
        found = await tasks.one(conn, args.id, tenant=TENANT)
        if found is None:
            raise UnknownTask(args.id)
        found = await discretion.task(conn, found, tenant=TENANT)
    if args.output == "json":
        say(as_json(asdict(found)))
    else:
        for name, value in asdict(found).items():
            if value is not None:
                say(f"{name}: {plain(value)}")
    return Exit.OK


HEADINGS = ("TASK", "QUEUE", "TYPE", "STATE", "TRY", "AGE", "BY", "UNTIL", "EXECUTION", "PATH")


def cells(row: TaskRow) -> tuple[object, ...]:
    now = datetime.now(UTC)
    until = row.lease_until or (row.expires_at if row.state == "due" else None)
    return (
        row.task_id,
        row.queue,
        row.type,
        row.state,
        row.attempt,
        ago(row.available_at, now=now),
        row.owner or "",
        ago(until, now=now),
        row.execution_id,
        row.path,
    )
