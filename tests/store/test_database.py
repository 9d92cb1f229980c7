"""The pool's connections are bounded and checked, and a database that could lose a commit is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from contracts.errors import UnsafeDatabase
from orchestrator.embedded import EmbeddedPostgres
from orchestrator.store import database
from tests.cluster import Cluster, fast_folder

Connection = psycopg.AsyncConnection[Any]


async def value(conn: Connection, statement: str) -> Any:
    row = await (await conn.execute(statement.encode())).fetchone()
    assert row is not None
    return row[0]


@pytest.mark.postgres
async def test_a_server_as_it_is_installed_is_safe(conn: Connection) -> None:
    await database.check_settings(conn)


@pytest.mark.parametrize(
    ("setting", "unsafe", "expected"),
    [
        ("synchronous_commit", "off", "anything but off"),
        ("default_transaction_isolation", "repeatable read", "read committed"),
        ("default_transaction_isolation", "serializable", "read committed"),
        ("default_transaction_read_only", "on", "off"),
        ("session_replication_role", "replica", "origin"),
        ("zero_damaged_pages", "on", "off"),
    ],
)
async def test_an_unsafe_session_is_refused(
    conn: Connection, setting: str, unsafe: str, expected: str
) -> None:
    await conn.execute("select set_config(%s, %s, false)", (setting, unsafe))

    with pytest.raises(UnsafeDatabase) as refused:
        await database.check_settings(conn)

    assert (refused.value.setting, refused.value.expected, refused.value.found) == (setting, expected, unsafe)
    assert f"database setting {setting}: expected {expected}" in str(refused.value)


@pytest.mark.parametrize("setting", ["local", "remote_write", "on", "remote_apply"])
async def test_a_commit_that_waits_for_any_disk_is_safe(conn: Connection, setting: str) -> None:
    await conn.execute("select set_config('synchronous_commit', %s, false)", (setting,))

    await database.check_settings(conn)


@pytest.fixture(scope="module")
def careless() -> Iterator[EmbeddedPostgres]:
    """A server whose settings somebody changed for speed."""
    server = EmbeddedPostgres.temporary(within=fast_folder())
    server.start()
    yield server
    server.remove()


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
async def test_a_server_that_may_tear_pages_is_refused(careless: EmbeddedPostgres, setting: str) -> None:
    async with await psycopg.AsyncConnection.connect(careless.dsn(), autocommit=True) as conn:
        await conn.execute(f"alter system set {setting} = off".encode())
        await conn.execute("select pg_reload_conf()")
    try:
        refused = await refusal(careless.dsn(), setting)
    finally:
        async with await psycopg.AsyncConnection.connect(careless.dsn(), autocommit=True) as conn:
            await conn.execute(f"alter system reset {setting}".encode())
            await conn.execute("select pg_reload_conf()")

    assert (refused.setting, refused.expected, refused.found) == (setting, "on", "off")


async def refusal(dsn: str, setting: str) -> UnsafeDatabase:
    """What check_settings raises once the server has read its configuration again."""
    for _ in range(1000):
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            if await value(conn, f"show {setting}") == "off":
                with pytest.raises(UnsafeDatabase) as refused:
                    await database.check_settings(conn)
                return refused.value
    raise AssertionError(f"the server never read {setting} = off")


async def test_a_database_of_another_encoding_is_refused(cluster: Cluster) -> None:
    cluster.execute_text("create database latin template template0 encoding 'LATIN1' locale 'C'")
    async with await psycopg.AsyncConnection.connect(cluster.dsn("latin"), autocommit=True) as conn:
        with pytest.raises(UnsafeDatabase, match="server_encoding: expected UTF8, found 'LATIN1'"):
            await database.check_settings(conn)
    cluster.drop("latin")


async def test_connections_of_the_pool_have_their_limits_and_their_name(dsn: str) -> None:
    async with database.pool(dsn, size=1, name="relay") as pool, pool.connection() as conn:
        found = [
            await value(conn, f"show {setting}")
            for setting in (
                "application_name",
                "statement_timeout",
                "lock_timeout",
                "idle_in_transaction_session_timeout",
            )
        ]

        assert found == ["waypost-relay", "5s", "2s", "5s"]
        assert conn.autocommit


async def test_what_the_dsn_says_itself_wins(dsn: str) -> None:
    said = make_conninfo(dsn, application_name="mine", options="-c statement_timeout=700")

    async with database.pool(said, size=1, name="relay") as pool, pool.connection() as conn:
        assert await value(conn, "show application_name") == "mine"
        assert await value(conn, "show statement_timeout") == "700ms"
        assert await value(conn, "show lock_timeout") == "2s"


async def test_a_killed_connection_is_replaced(dsn: str) -> None:
    async with database.pool(dsn, size=1, name="relay") as pool:
        async with pool.connection() as conn:
            killed = await value(conn, "select pg_backend_pid()")
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
            await other.execute("select pg_terminate_backend(%s, 5000)", (killed,))

        async with pool.connection() as conn:
            assert await value(conn, "select pg_backend_pid()") != killed


@pytest.mark.parametrize("sqlstate", ["40001", "40P01", "55P03", "57014", "57P01", "08006", "25006"])
def test_what_may_pass_is_transient(sqlstate: str) -> None:
    error = psycopg.errors.lookup(sqlstate)("x")

    assert database.is_transient(error)
    assert not database.is_bad_data(error)


@pytest.mark.parametrize("sqlstate", ["22P02", "23505", "23514", "54000"])
def test_what_would_fail_again_is_bad_data(sqlstate: str) -> None:
    error = psycopg.errors.lookup(sqlstate)("x")

    assert database.is_bad_data(error)
    assert not database.is_transient(error)


def test_a_connection_that_cannot_be_made_is_transient() -> None:
    assert database.is_transient(psycopg.OperationalError("connection refused"))
    assert not database.is_transient(ValueError("ours"))
    assert not database.is_bad_data(ValueError("ours"))
    assert not database.is_transient(psycopg.errors.lookup("42703")("a bug"))
