"""The wire that loses an answer: what was asked is done, and who asked does not know."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.crash.points import FOUND, Point, Trap
from tests.crash.proxy import Proxy, proxied

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

SHUT = "update waypost.sender set state = 'disabled' where name = %s returning name"


@pytest.fixture
async def proxy(dsn: str, conn: Connection, tmp_path: Path) -> AsyncIterator[Proxy]:
    """Before a database with a sender `ada`."""
    await conn.execute("insert into waypost.sender (tenant_id, name) values (1, 'ada')")
    async with proxied(dsn, tmp_path) as found:
        yield found


def deafen(proxy: Proxy, folder: Path, conn: Connection, *, rows: bool = False) -> None:
    """As a process does it that comes to a point where it is to lose an answer."""
    Trap(Point("worker", "commit", "some", FOUND if rows else "", "lost")).write(folder / "worker.trap")
    with socket.socket(fileno=conn.fileno()) as ours:
        port: int = ours.getsockname()[1]
        ours.detach()
    proxy.deafen("worker", port, rows=rows)


async def state_of(conn: Connection, name: str) -> str:
    cursor = await conn.execute("select state from waypost.sender where name = %s", (name,))
    [(state,)] = await cursor.fetchall()
    return state


async def test_what_was_asked_is_committed_and_its_answer_is_lost(
    proxy: Proxy, conn: Connection, tmp_path: Path
) -> None:
    async with await psycopg.AsyncConnection.connect(proxy.dsn, autocommit=True) as through:
        deafen(proxy, tmp_path, through)
        with pytest.raises(psycopg.OperationalError):
            await through.execute(SHUT, ("ada",))

    assert await state_of(conn, "ada") == "disabled"
    assert (tmp_path / "worker.fired").exists()


async def test_a_transaction_is_committed_and_the_answer_to_its_commit_is_lost(
    proxy: Proxy, conn: Connection, tmp_path: Path
) -> None:
    async with await psycopg.AsyncConnection.connect(proxy.dsn, autocommit=True) as through:
        with pytest.raises(psycopg.OperationalError):
            async with through.transaction():
                await through.execute(SHUT, ("ada",))
                deafen(proxy, tmp_path, through)

    assert await state_of(conn, "ada") == "disabled"


async def test_an_answer_without_rows_gets_through_when_only_one_with_rows_is_to_be_lost(
    proxy: Proxy, conn: Connection, tmp_path: Path
) -> None:
    async with await psycopg.AsyncConnection.connect(proxy.dsn, autocommit=True) as through:
        deafen(proxy, tmp_path, through, rows=True)
        assert await (await through.execute(SHUT, ("bob",))).fetchall() == []
        deafen(proxy, tmp_path, through, rows=True)
        with pytest.raises(psycopg.OperationalError):
            await through.execute(SHUT, ("ada",), prepare=True)

    assert await state_of(conn, "ada") == "disabled"


async def test_an_error_gets_through(proxy: Proxy, tmp_path: Path) -> None:
    async with await psycopg.AsyncConnection.connect(proxy.dsn, autocommit=True) as through:
        deafen(proxy, tmp_path, through)
        with pytest.raises(psycopg.errors.UndefinedTable):
            await through.execute("delete from waypost.nothing")

        assert await state_of(through, "ada") == "enabled"
    assert json.loads((tmp_path / "worker.trap").read_text())
