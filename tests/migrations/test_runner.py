"""Scripts are applied once, in order; what was applied and is not what we have is an error that names it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import psycopg
import pytest
from psycopg.errors import SyntaxError as SqlSyntaxError

from migrations import runner
from migrations.runner import (
    Migration,
    MigrationChanged,
    MigrationError,
    MigrationMalformed,
    MigrationUnknown,
    migrate,
    pending,
)
from tests.cluster import Cluster
from tests.waiting import until_blocked

pytestmark = pytest.mark.postgres

Connection = psycopg.Connection[Any]

NOON: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)
FIRST: Final = Migration(1, "0001_first.sql", compatible=False, sql="create table waypost.a (x int);\n")
SECOND: Final = Migration(2, "0002_second.sql", compatible=False, sql="alter table waypost.a add y int;\n")
BROKEN: Final = Migration(
    2, "0002_broken.sql", compatible=False, sql="create table waypost.b (x int); selec;\n"
)


@pytest.fixture
def empty(cluster: Cluster) -> Iterator[str]:
    """The DSN of a database that never saw a migration."""
    name = cluster.create(template="template1")
    yield cluster.dsn(name)
    cluster.drop(name)


@pytest.fixture
def db(empty: str) -> Iterator[Connection]:
    with psycopg.connect(empty, autocommit=True) as db:
        yield db


def rows(db: Connection, statement: str) -> list[tuple[Any, ...]]:
    return db.execute(statement.encode()).fetchall()


def test_each_script_is_applied_once_and_written_down(db: Connection) -> None:
    assert migrate(db, migrations=[FIRST, SECOND], now=NOON) == [FIRST, SECOND]
    assert migrate(db, migrations=[FIRST, SECOND], now=NOON) == []

    assert rows(db, "select * from waypost.migration order by number") == [
        (1, "0001_first.sql", FIRST.sha256, False, NOON),
        (2, "0002_second.sql", SECOND.sha256, False, NOON),
    ]


def test_our_own_scripts_apply_to_an_empty_database(db: Connection) -> None:
    applied = migrate(db)

    assert applied == runner.discover()
    assert applied[0].name == "0001_tables.sql"
    assert rows(db, "select tenant_id, name from waypost.tenant") == [(1, "default")]


def test_what_is_pending_is_told_without_touching_the_database(db: Connection) -> None:
    assert pending(db, migrations=[FIRST, SECOND]) == [FIRST, SECOND]
    assert rows(db, "select to_regnamespace('waypost')::text") == [(None,)]

    migrate(db, migrations=[FIRST])

    assert pending(db, migrations=[FIRST, SECOND]) == [SECOND]


def test_a_connection_that_is_not_in_autocommit_migrates_too(empty: str) -> None:
    with psycopg.connect(empty) as db:
        assert migrate(db, migrations=[FIRST]) == [FIRST]
        assert pending(db, migrations=[FIRST]) == []
        db.rollback()

    with psycopg.connect(empty) as db:
        assert pending(db, migrations=[FIRST]) == []


def test_a_migration_inside_a_transaction_is_refused(db: Connection) -> None:
    with db.transaction(), pytest.raises(MigrationError, match="inside a transaction"):
        migrate(db, migrations=[FIRST])


def test_a_script_that_fails_leaves_nothing_of_itself(db: Connection) -> None:
    with pytest.raises(SqlSyntaxError):
        migrate(db, migrations=[FIRST, BROKEN])

    assert rows(db, "select number from waypost.migration") == [(1,)]
    assert rows(db, "select to_regclass('waypost.b')::text") == [(None,)]


def test_a_changed_script_is_an_error_that_names_its_file(db: Connection) -> None:
    migrate(db, migrations=[FIRST])
    changed = replace(FIRST, sql=FIRST.sql + "-- better\n")

    for refuse in (migrate, pending):
        with pytest.raises(
            MigrationChanged, match=r"0001_first\.sql was changed after it was applied"
        ) as error:
            refuse(db, migrations=[changed, SECOND])
        assert (error.value.name, error.value.applied, error.value.found) == (
            "0001_first.sql",
            FIRST.sha256,
            changed.sha256,
        )
    assert rows(db, "select number from waypost.migration") == [(1,)]


def test_a_newer_migration_is_accepted_when_it_is_compatible(db: Connection) -> None:
    migrate(db, migrations=[FIRST, replace(SECOND, compatible=True)])

    assert pending(db, migrations=[FIRST]) == []
    assert migrate(db, migrations=[FIRST]) == []


def test_a_newer_migration_is_refused_when_it_is_not(db: Connection) -> None:
    migrate(db, migrations=[FIRST, SECOND])

    for refuse in (migrate, pending):
        with pytest.raises(MigrationUnknown, match=r"0002_second\.sql.*Run a newer release") as error:
            refuse(db, migrations=[FIRST])
        assert (error.value.number, error.value.newest) == (2, 1)


def test_a_migration_that_is_missing_in_the_middle_is_refused(db: Connection) -> None:
    third = Migration(3, "0003_third.sql", compatible=True, sql="select 1;\n")
    migrate(db, migrations=[FIRST, replace(SECOND, compatible=True), third])

    with pytest.raises(MigrationUnknown, match=r"0002_second\.sql"):
        pending(db, migrations=[FIRST, third])


def test_two_migrators_take_turns(empty: str) -> None:
    """The second waits for the first, seen in pg_blocking_pids, and then finds its work done."""
    slow = replace(FIRST, sql=FIRST.sql + "select pg_advisory_xact_lock(7);\n")
    with (
        psycopg.connect(empty, autocommit=True) as gate,
        psycopg.connect(empty, autocommit=True) as one,
        psycopg.connect(empty, autocommit=True) as other,
        ThreadPoolExecutor() as threads,
    ):
        gate.execute("select pg_advisory_lock(7)")
        first = threads.submit(migrate, one, migrations=[slow, SECOND])
        until_blocked(gate, one.info.backend_pid, by=gate.info.backend_pid)
        second = threads.submit(migrate, other, migrations=[slow, SECOND])
        until_blocked(gate, other.info.backend_pid, by=one.info.backend_pid)
        gate.execute("select pg_advisory_unlock(7)")

        applied = [*first.result(timeout=30), *second.result(timeout=30)]

        assert sorted(migration.number for migration in applied) == [1, 2]
        assert rows(gate, "select number from waypost.migration order by number") == [(1,), (2,)]


def test_a_busy_table_is_given_up_on_and_tried_again_later(db: Connection, empty: str) -> None:
    migrate(db, migrations=[FIRST])
    with psycopg.connect(empty) as reader:
        reader.execute("select * from waypost.a")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            migrate(db, migrations=[FIRST, SECOND])

    assert migrate(db, migrations=[FIRST, SECOND]) == [SECOND]


def test_printed_sql_does_what_migrate_does(db: Connection, empty: str) -> None:
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("psql is not installed")

    subprocess.run([psql, "-q", "-X", empty], input=runner.print_sql(), check=True, text=True)

    assert pending(db) == []
    assert migrate(db) == []


HEAD: Final = "-- compatible: no\n"


@pytest.mark.parametrize(
    ("scripts", "problem"),
    [
        ({"0001_a.sql": "select 1;"}, "0001_a.sql: the first line is not"),
        ({"0001_a.sql": "-- compatible: maybe\n"}, "0001_a.sql: the first line is not"),
        ({"0002_a.sql": HEAD}, "0002_a.sql: the number is not 0001"),
        ({"0001_a.sql": HEAD, "0001_b.sql": HEAD}, "0001_b.sql: the number is not 0002"),
        ({"1_a.sql": HEAD}, "1_a.sql: the name is not like"),
        ({"0001-A.sql": HEAD}, "0001-A.sql: the name is not like"),
    ],
)
def test_a_malformed_script_is_named(scripts: dict[str, str], problem: str) -> None:
    with pytest.raises(MigrationMalformed, match=problem):
        runner.parse(scripts)


def test_a_script_says_whether_older_code_can_live_with_it() -> None:
    parsed = runner.parse({"0001_a.sql": HEAD, "0002_b.sql": "-- compatible: yes\nselect 1;"})

    assert [migration.compatible for migration in parsed] == [False, True]
