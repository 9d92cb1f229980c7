"""The transaction that a function of the application shares with Waypost: who it is in it, and what it may not say."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, LiteralString, TypeVar

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from contracts.errors import WaypostError
from orchestrator.core.errors import UsageError
from orchestrator.store import database
from orchestrator.store.database import LOCK_MAX, STATEMENT_MAX, Connection, Pool

TRANSACTIONS_MAX: Final = 4
"""Transactions of applications that run at once in one worker, each on a connection that is for nothing else."""

IDLE_MAX: Final = timedelta(seconds=10)
"""For such a transaction without a statement: longer than its function may take."""

T = TypeVar("T")


class RoleUnfit(WaypostError):
    """The role of applications is not there, or may do what only Waypost may."""

    code = "role-unfit"

    def __init__(self, role: str, expected: str) -> None:
        super().__init__(f"WAYPOST_APPLICATION_ROLE: expected {expected}, found {role!r}")


class Commits(UsageError):
    """The function of a transaction tried to end it."""

    code = "commits"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what.upper()} inside of a transaction function: expected none, since what it writes is committed "
            f"with the fact that it ended, when it returns"
        )


class GuardedCursor(psycopg.AsyncCursor[T]):
    """Refuses statements that would end the transaction."""

    async def execute(self, query: Any, *args: Any, **named: Any) -> Any:
        self._check(query)
        return await super().execute(query, *args, **named)

    async def executemany(self, query: Any, *args: Any, **named: Any) -> None:
        self._check(query)
        await super().executemany(query, *args, **named)

    def stream(self, query: Any, *args: Any, **named: Any) -> Any:
        self._check(query)
        return super().stream(query, *args, **named)

    def _check(self, query: Any) -> None:
        found = ending_in(text_of(query, self.connection))
        if found is not None:
            raise Commits(found)


class GuardedConnection(Connection):
    """A connection whose transaction is not for its user to end."""

    async def commit(self) -> None:
        """Raises Commits while a function has it."""
        if self.cursor_factory is GuardedCursor:
            raise Commits("commit")
        await super().commit()

    async def rollback(self) -> None:
        """Raises Commits while a function has it."""
        if self.cursor_factory is GuardedCursor:
            raise Commits("rollback")
        await super().rollback()


def text_of(query: Any, conn: psycopg.AsyncConnection[Any]) -> str:
    """A query in any of the forms that psycopg takes."""
    if isinstance(query, bytes):
        return query.decode()
    return query if isinstance(query, str) else str(query.as_string(conn))


ENDS: Final = re.compile(
    r"\s*(commit|end|abort|prepare\s+transaction|rollback(?!\s+(?:(?:work|transaction)\s+)?to\b))\b",
    re.IGNORECASE,
)
QUOTED: Final = re.compile(
    r"--[^\n]*|/\*.*?\*/|\be'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\""
    r"|\$(?P<tag>(?:[a-z_]\w*)?)\$.*?\$(?P=tag)\$",
    re.IGNORECASE | re.DOTALL,
)
"""Comments, texts and names, in which words mean nothing."""


def ending_in(text: str) -> str | None:
    """The statement in `text` that would end the transaction; None where there is none."""
    bare = QUOTED.sub(lambda part: " " if part[0][:2] in ("--", "/*") else "''", text)
    for statement in bare.split(";"):
        found = ENDS.match(statement)
        if found is not None:
            return found[1].lower()
    return None


def connection_arguments(dsn: str) -> dict[str, Any]:
    """As for every connection, but for the time without a statement. Nothing is prepared, since it is forgotten."""
    found = database.connection_arguments(dsn, name="transaction")
    idle = f"-c idle_in_transaction_session_timeout={IDLE_MAX // timedelta(milliseconds=1)}"
    return {**found, "options": f"{found['options']} {idle}", "prepare_threshold": None}


def pool(dsn: str) -> Pool:
    """The connections for transactions of applications, not open yet. None is made before it is needed."""
    return database.pool(
        dsn,
        size=TRANSACTIONS_MAX,
        name="transaction",
        least=0,
        kind=GuardedConnection,
        arguments=connection_arguments(dsn),
        reset=forget,
    )


FORGET: Final[LiteralString] = "discard all"


async def forget(conn: Connection) -> None:
    """What a function left in the session is not for the next one."""
    await conn.execute(FORGET)


async def enter(conn: Connection, *, role: str | None) -> None:
    """From here to `leave`, the transaction is `role`'s (None: it stays ours). It asks for no snapshot, so that the
    function can still say which isolation it wants.
    """
    if role is not None:
        await conn.execute(sql.SQL("set local role {}").format(sql.Identifier(role)))


@contextmanager
def guarded(conn: Connection) -> Generator[Connection]:
    """`conn` as a function of the application gets it; afterwards it is ours again."""
    conn.cursor_factory = GuardedCursor
    try:
        yield conn
    finally:
        conn.cursor_factory, conn.row_factory = psycopg.AsyncCursor, tuple_row


CHECK: Final[LiteralString] = "set constraints all immediate"

LEAVE: Final[LiteralString] = """
    select pg_catalog.set_config('role', 'none', true),
           pg_catalog.set_config('search_path', 'pg_catalog', true),
           pg_catalog.set_config('statement_timeout', %(statement)s::pg_catalog.text, true),
           pg_catalog.set_config('lock_timeout', %(lock)s::pg_catalog.text, true)
"""


async def leave(conn: Connection) -> None:
    """The function is over. What it put off until the commit is done now, in its role; then the transaction is ours,
    whatever it set.
    """
    await conn.execute(CHECK)
    milliseconds = timedelta(milliseconds=1)
    limits = {"statement": f"{STATEMENT_MAX // milliseconds}ms", "lock": f"{LOCK_MAX // milliseconds}ms"}
    await conn.execute(LEAVE, limits)


READ_ROLE: Final[LiteralString] = """
    select pg_has_role(current_user, r.oid, 'member'),
           exists (select from pg_catalog.pg_class c
                    where c.relnamespace = 'waypost'::regnamespace and c.relkind in ('r', 'v')
                      and has_table_privilege(r.oid, c.oid, 'select, insert, update, delete, truncate'))
      from pg_catalog.pg_roles r
     where r.rolname = %(role)s
"""


async def check_role(conn: Connection, role: str) -> None:
    """Raise RoleUnfit unless we may take on `role`, and `role` has no rights on our tables."""
    row = await (await conn.execute(READ_ROLE, {"role": role})).fetchone()
    if row is None:
        raise RoleUnfit(role, "a role of this database")
    is_member, may_touch = row
    if not is_member:
        raise RoleUnfit(role, "a role that Waypost's own is a member of")
    if may_touch:
        raise RoleUnfit(role, "a role without rights on the tables of the schema waypost")
