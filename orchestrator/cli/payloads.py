"""`waypost payloads rekey`: everything in the database under the newest key."""

from __future__ import annotations

from argparse import Namespace

from orchestrator import bootstrap
from orchestrator.cli.output import Exit, note
from orchestrator.rekey import rekey
from orchestrator.settings import Settings, SettingsInvalid


def payloads(_: Namespace, settings: Settings) -> int:
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
