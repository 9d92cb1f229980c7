"""`waypost payloads`: everything in the database under the newest key; objects that nothing names."""

from __future__ import annotations

from argparse import Namespace

from contracts.errors import ContractViolation
from orchestrator import bootstrap
from orchestrator.cli.output import Exit, note
from orchestrator.objects.sweep import AGE_MIN, sweep
from orchestrator.rekey import rekey
from orchestrator.settings import Settings, SettingsInvalid


def payloads(args: Namespace, settings: Settings) -> int:
    return seal_anew(settings) if args.verb == "rekey" else sweep_objects(args, settings)


def seal_anew(settings: Settings) -> int:
    codec = settings.codec()
    if codec is None:
        raise SettingsInvalid(["WAYPOST_PAYLOAD_KEYS: expected ID:KEY,ID:KEY, the newest first, found none"])

    async def all_of_it() -> int:
        async with bootstrap.connection(settings) as conn:
            return await rekey(conn, codec, progress=progress)

    done = bootstrap.run(all_of_it())
    note(f"{done:,} rows are sealed with key {codec.newest}; no other key is needed for what was there.")
    return Exit.OK


def progress(table: str, done: int, of: int) -> None:
    note(f"{table}: {done:,} of {of:,} sealed")


def sweep_objects(args: Namespace, settings: Settings) -> int:
    store = settings.objects()
    if store is None:
        raise SettingsInvalid(["WAYPOST_PAYLOAD_STORE: expected a payload store, found none"])
    if args.older < AGE_MIN:
        raise ContractViolation(
            f"--older: expected at least 24h, found {args.older}; a commit may be under way"
        )

    async def all_of_it() -> int:
        async with bootstrap.connection(settings) as conn:
            return await sweep(conn, store, age=args.older, dry=args.dry_run, progress=swept)

    gone = bootstrap.run(all_of_it())
    note(
        f"{gone:,} objects that nothing names {'would be' if args.dry_run else 'are'} removed from {store.name}."
    )
    return Exit.OK


def swept(looked: int, gone: int) -> None:
    note(f"{looked:,} objects looked at, nothing names {gone:,} of them")
