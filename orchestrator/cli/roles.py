"""The parts that run, and the tables that they need."""

from __future__ import annotations

from argparse import Namespace

import psycopg

from migrations import runner
from orchestrator import bootstrap
from orchestrator.cli.output import Exit, note, say
from orchestrator.settings import Settings


def migrate(args: Namespace, settings: Settings) -> int:
    if args.print_sql:
        say(runner.print_sql())
        return Exit.OK
    with psycopg.connect(settings.dsn(), autocommit=True, connect_timeout=3) as conn:
        if args.check:
            return check(conn)
        for migration in runner.migrate(conn):
            say(migration.name)
    note("The database is up to date.")
    return Exit.OK


def check(conn: runner.Connection) -> int:
    waiting = runner.pending(conn)
    for migration in waiting:
        say(migration.name)
    note(f"{len(waiting)} to apply." if waiting else "The database is up to date.")
    return Exit.ERROR if waiting else Exit.OK


def worker(args: Namespace, settings: Settings) -> int:
    bootstrap.run(bootstrap.worker(settings, args.modules))
    return Exit.OK


def tasks(args: Namespace, settings: Settings) -> int:
    work = bootstrap.task_worker(settings, args.modules, queues=args.queue, concurrency=args.concurrency)
    bootstrap.run(work)
    return Exit.OK


def relay(_: Namespace, settings: Settings) -> int:
    bootstrap.run(bootstrap.relay(settings))
    return Exit.OK


def receiver(_: Namespace, settings: Settings) -> int:
    bootstrap.run(bootstrap.receiver(settings))
    return Exit.OK
