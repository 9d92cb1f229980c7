"""Applies the numbered scripts of this folder: each once, in order, each in a transaction of its own.

A script is named `0007_words.sql` and says in its first line whether older code can live with it:

    -- compatible: yes

What was applied is written down with its checksum, so a script that was changed afterwards is an error that
names it. Two migrators take turns by an advisory lock, which ends with the transaction whatever becomes of
the process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from typing import Any, Final, LiteralString

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import class_row

Connection = psycopg.Connection[Any]


class MigrationError(Exception):
    """The scripts and the database do not fit together; the database is as it was before the script."""


class MigrationMalformed(MigrationError):
    """A script's name, number or header is not as it must be. A mistake of whoever wrote it."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"migration {name}: {problem}")
        self.name = name
        self.problem = problem


class MigrationChanged(MigrationError):
    """A script was applied, and its text is another one now."""

    def __init__(self, name: str, *, applied: str, found: str) -> None:
        super().__init__(
            f"migration {name} was changed after it was applied: sha256 {applied[:12]}… was applied,"
            f" {found[:12]}… is in the file. Restore the file and write a new migration"
        )
        self.name = name
        self.applied = applied
        self.found = found


class MigrationUnknown(MigrationError):
    """The database has a migration that this code does not know and may not be able to live with."""

    def __init__(self, number: int, name: str, *, newest: int) -> None:
        super().__init__(
            f"the database has migration {number:04} ({name}), which is not marked compatible; this code"
            f" knows migrations up to {newest:04}. Run a newer release"
        )
        self.number = number
        self.name = name
        self.newest = newest


@dataclass(frozen=True, slots=True)
class Migration:
    """A script of this folder. `compatible`: code that does not know it works on."""

    number: int
    name: str
    compatible: bool
    sql: str = field(repr=False)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Applied:
    """A row of `waypost.migration`."""

    number: int
    name: str
    sha256: str
    compatible: bool


FILE_NAME: Final = re.compile(r"(?P<number>\d{4})_[a-z0-9_]+\.sql")
HEADER: Final = re.compile(r"-- compatible: (?P<compatible>yes|no)\n")


def discover() -> list[Migration]:
    """The scripts of this folder, in order. Raises MigrationMalformed."""
    folder = resources.files("migrations")
    scripts = {
        entry.name: entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".sql")
    }
    return parse(scripts)


def parse(scripts: Mapping[str, str]) -> list[Migration]:
    """The migrations that files with these names and texts are; numbers go 1, 2, 3, … without a gap."""
    migrations: list[Migration] = []
    for expected, name in enumerate(sorted(scripts), start=1):
        named, header = FILE_NAME.fullmatch(name), HEADER.match(scripts[name])
        if named is None:
            raise MigrationMalformed(name, "the name is not like 0007_words.sql")
        if int(named["number"]) != expected:
            raise MigrationMalformed(name, f"the number is not {expected:04}, the next one")
        if header is None:
            raise MigrationMalformed(
                name, "the first line is not `-- compatible: yes` or `-- compatible: no`"
            )
        compatible = header["compatible"] == "yes"
        migrations.append(Migration(expected, name, compatible=compatible, sql=scripts[name]))
    return migrations


BOOTSTRAP: Final[LiteralString] = """
    create schema if not exists waypost;

    -- One row per script that was applied.
    create table if not exists waypost.migration (
        number     int         primary key,
        name       text        not null,
        sha256     text        not null,
        compatible boolean     not null,
        applied_at timestamptz not null default now()
    );
"""

LOCK_MAX: Final[LiteralString] = "2 s"  # a script that waits for a table makes all who come after it wait
TURN_MAX: Final[LiteralString] = "5 min"  # another migrator may be at work on a large table

WAIT_FOR_TURN: Final[LiteralString] = """
    select set_config('statement_timeout', '0', true),
           set_config('idle_in_transaction_session_timeout', '0', true),
           set_config('lock_timeout', %(turn_max)s, true),
           pg_advisory_xact_lock(hashtextextended('waypost:migrate', 0)),
           set_config('lock_timeout', %(lock_max)s, true)
"""

RECORD: Final[LiteralString] = """
    insert into waypost.migration (number, name, sha256, compatible, applied_at)
    values (%(number)s, %(name)s, %(sha256)s, %(compatible)s, coalesce(%(now)s::timestamptz, now()))
"""


def migrate(
    conn: Connection, *, migrations: Sequence[Migration] | None = None, now: datetime | None = None
) -> list[Migration]:
    """Apply what is not applied yet and return it, in order. `now` is for tests.

    The connection must be outside a transaction. Raises MigrationChanged, MigrationUnknown, and psycopg's
    LockNotAvailable when a table stays busy; what was applied before stays applied, so calling again goes on.
    """
    if conn.info.transaction_status != TransactionStatus.IDLE:
        raise MigrationError("migrate() was called inside a transaction: it needs one for each script")
    known = discover() if migrations is None else migrations
    applied: list[Migration] = []
    while (migration := apply_next(conn, known, now=now)) is not None:
        applied.append(migration)
    return applied


def apply_next(conn: Connection, known: Sequence[Migration], *, now: datetime | None) -> Migration | None:
    """Apply the first script that is not applied, in one transaction, or say that there is none.

    What is applied is read anew under the lock: another migrator may have had its turn while we waited.
    """
    with conn.transaction():
        conn.execute(WAIT_FOR_TURN, {"turn_max": TURN_MAX, "lock_max": LOCK_MAX})
        waiting = compare(known, read_applied(conn))
        if not waiting:
            return None
        [migration, *_] = waiting
        conn.execute(BOOTSTRAP)
        conn.execute(migration.sql.encode())
        conn.execute(
            RECORD,
            {
                "number": migration.number,
                "name": migration.name,
                "sha256": migration.sha256,
                "compatible": migration.compatible,
                "now": now,
            },
        )
    return migration


def pending(conn: Connection, *, migrations: Sequence[Migration] | None = None) -> list[Migration]:
    """What `migrate` would apply. Changes nothing; raises MigrationChanged and MigrationUnknown like it."""
    with conn.transaction():
        return compare(discover() if migrations is None else migrations, read_applied(conn))


def compare(known: Sequence[Migration], applied: Sequence[Applied]) -> list[Migration]:
    """The known migrations that are not applied. Raises when what is applied does not fit what is known.

    A migration that is newer than all we know is accepted when it was marked compatible as it was applied.
    """
    by_number = {migration.number: migration for migration in known}
    newest = max(by_number, default=0)
    for row in applied:
        migration = by_number.get(row.number)
        if migration is None:
            if row.number < newest or not row.compatible:
                raise MigrationUnknown(row.number, row.name, newest=newest)
        elif migration.sha256 != row.sha256:
            raise MigrationChanged(migration.name, applied=row.sha256, found=migration.sha256)
    done = {row.number for row in applied}
    return [migration for migration in known if migration.number not in done]


EXISTS: Final[LiteralString] = "select to_regclass('waypost.migration') is not null"

READ_APPLIED: Final[LiteralString] = """
    select number, name, sha256, compatible
      from waypost.migration
     order by number
"""


def read_applied(conn: Connection) -> list[Applied]:
    """What was applied to this database, in order; nothing when it never saw a migration."""
    row = conn.execute(EXISTS).fetchone()
    if row is None or not row[0]:
        return []
    with conn.cursor(row_factory=class_row(Applied)) as cursor:
        return cursor.execute(READ_APPLIED).fetchall()


def print_sql(migrations: Sequence[Migration] | None = None) -> str:
    """All scripts as one text for psql, for those who apply SQL by tools of their own.

    It does to an empty database what `migrate` would do, records included: `migrate` goes on from there.
    """
    known = discover() if migrations is None else migrations
    return "\n\n".join(["\\set ON_ERROR_STOP on", in_transaction(BOOTSTRAP), *map(as_script, known)]) + "\n"


def as_script(migration: Migration) -> str:
    compatible = "true" if migration.compatible else "false"
    record = (
        "insert into waypost.migration (number, name, sha256, compatible)\n"
        f"values ({migration.number}, '{migration.name}', '{migration.sha256}', {compatible});"
    )
    return "\n".join([f"-- {migration.name}", in_transaction(migration.sql + record)])


def in_transaction(statements: str) -> str:
    return f"begin;\nset local lock_timeout = '{LOCK_MAX}';\n{statements}\ncommit;"
