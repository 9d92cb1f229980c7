"""The transaction that a function of the application shares with Waypost: its role, its session, its guard."""

from __future__ import annotations

from uuid import uuid4

import pytest
from psycopg import sql

from orchestrator.store.database import Connection
from orchestrator.store.transactions import RoleUnfit, check_role, ending_in, pool


async def test_a_role_that_is_not_there_or_may_touch_our_tables_is_refused_at_start(
    conn: Connection,
) -> None:
    shop = f"shop_{uuid4().hex}"
    await conn.execute(sql.SQL("create role {}").format(sql.Identifier(shop)))
    await check_role(conn, shop)
    with pytest.raises(RoleUnfit, match="expected a role of this database, found 'nobody-here'"):
        await check_role(conn, "nobody-here")
    await conn.execute(sql.SQL("grant select on waypost.journal to {}").format(sql.Identifier(shop)))

    with pytest.raises(RoleUnfit, match="expected a role without rights on the tables of the schema waypost"):
        await check_role(conn, shop)
    await conn.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(shop)))


async def test_what_a_function_sets_is_gone_for_the_next_one(dsn: str) -> None:
    async with pool(dsn) as connections:
        async with connections.connection() as conn:
            await conn.execute("set search_path = elsewhere")
            mine = conn.info.backend_pid
        async with connections.connection() as conn:
            [(path,)] = await (await conn.execute("show search_path")).fetchall()

    assert (conn.info.backend_pid, path) == (mine, '"$user", public')


@pytest.mark.parametrize(
    ("statement", "ends"),
    [
        ("commit", "commit"), (" END ", "end"), ("abort", "abort"), ("/* x */ rollback work", "rollback"),
        ("select 1;\n-- y\nCommit;", "commit"), ("prepare transaction 'x'", "prepare transaction"),
        ("rollback to s", None), ("rollback to savepoint s", None), ("rollback work to s", None),
        ("select ';commit'", None), ("select $$;commit$$", None), ("select $a$ ';commit; $a$", None),
        ("select e'\\';commit'", None), ('select 1 as ";commit"', None), ("select 1 -- ;\n", None),
        ("update commit set ended = true", None), ("prepare x as select 1", None), ("", None),
    ],
)  # fmt: skip
def test_statements_that_end_a_transaction_are_told_from_those_that_name_them(
    statement: str, ends: str | None
) -> None:
    assert ending_in(statement) == ends
