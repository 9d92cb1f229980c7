"""The doors around psycopg and sqlite3: a commit is named by the statements that write in it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from tests.crash import statements, subjects
from tests.crash.guard import Guard, SomeConnection, hang
from tests.crash.points import Subject
from tests.crash.subjects import Cursor, Parameters

Written = list[tuple[str, list[Subject]]]
"""What a transaction has written so far: the names of its statements, and what each is about."""


def install(guard: Guard) -> None:
    names = statements.named()
    database = Database(guard, names)
    hang(psycopg.AsyncCursor, "execute", database.execute_async)
    hang(psycopg.Cursor, "execute", database.execute)
    hang(psycopg.AsyncTransaction, "__aexit__", database.leave_async)
    hang(psycopg.Transaction, "__exit__", database.leave)
    Memory.guard, Memory.names = guard, names
    hang(sqlite3, "connect", remembering)


def name_of(text: str, names: Mapping[str, str]) -> str:
    """The name of a statement that writes. One that is no constant of ours shows itself as such."""
    return names.get(text, f"unknown: {text.strip()[:60]}")


def joined(written: Written) -> str:
    return "+".join(dict.fromkeys(name for name, _ in written))


def about(written: Written) -> list[Subject]:
    return [subject for _, some in written for subject in some]


@dataclass(slots=True)
class Said:
    """A statement that is being executed; `alone`, it is a transaction by itself."""

    name: str
    parameters: Parameters
    cursor: Cursor
    alone: bool


@dataclass(slots=True)
class Database:
    """PostgreSQL. Connections are in autocommit, so a transaction is a statement or a block."""

    guard: Guard
    names: Mapping[str, str]
    open: WeakKeyDictionary[SomeConnection, Written] = field(
        default_factory=WeakKeyDictionary["SomeConnection", "Written"]
    )

    def execute_async(self, execute: Any) -> Any:
        async def door(cursor: psycopg.AsyncCursor[Any], query: Any, *args: Any, **more: Any) -> Any:
            said = self._before(cursor, query, *args)
            found = await execute(cursor, query, *args, **more)
            self._after(said)
            return found

        return door

    def execute(self, execute: Any) -> Any:
        def door(cursor: psycopg.Cursor[Any], query: Any, *args: Any, **more: Any) -> Any:
            said = self._before(cursor, query, *args)
            found = execute(cursor, query, *args, **more)
            self._after(said)
            return found

        return door

    def leave_async(self, leave: Any) -> Any:
        async def door(transaction: psycopg.AsyncTransaction, *error: Any) -> Any:
            written = self._ends(transaction.connection, error)
            found = await leave(transaction, *error)
            self._ended(written)
            return found

        return door

    def leave(self, leave: Any) -> Any:
        def door(transaction: psycopg.Transaction, *error: Any) -> Any:
            written = self._ends(transaction.connection, error)
            found = leave(transaction, *error)
            self._ended(written)
            return found

        return door

    def _before(self, cursor: Cursor, query: Any, parameters: Any = None) -> Said | None:
        text = query.as_string(cursor) if isinstance(query, sql.Composable) else query
        if isinstance(text, bytes) or not statements.commits(text):
            return None  # bytes are the scripts of migrations, each of which is recorded beside it
        alone = cursor.connection.info.transaction_status == TransactionStatus.IDLE
        said = Said(name_of(text, self.names), parameters or {}, cursor, alone)
        if alone:
            found = subjects.asked(self.guard, said.name, said.parameters)
            self.guard.passes("before", "commit", said.name, found, cursor.connection)
        return said

    def _after(self, said: Said | None) -> None:
        if said is None:
            return
        found = subjects.answered(self.guard, said.name, said.parameters, said.cursor)
        if said.alone:
            self.guard.passes("after", "commit", said.name, found)
        else:
            self.open.setdefault(said.cursor.connection, []).append((said.name, found))

    def _ends(self, conn: SomeConnection, error: tuple[Any, ...]) -> Written:
        written = self.open.pop(conn, [])
        if error[0] is not None or not written:
            return []
        self.guard.passes("before", "commit", joined(written), about(written), conn)
        return written

    def _ended(self, written: Written) -> None:
        if written:
            self.guard.passes("after", "commit", joined(written), about(written))


class Memory(sqlite3.Connection):
    """What a service remembers in. `guard` and `names` are those of the process."""

    guard: Guard
    names: Mapping[str, str]

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._written: Written = []

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql in {"commit", "rollback"}:
            written, self._written = self._written, []
            return self._commit(sql, (), written if sql == "commit" else [])
        if not statements.commits(sql):
            return super().execute(sql, parameters)
        name = name_of(sql, self.names)
        said = name, subjects.asked(self.guard, name, parameters or {})
        if self.in_transaction:
            self._written.append(said)
            return super().execute(sql, parameters)
        return self._commit(sql, parameters, [said])

    def _commit(self, sql: str, parameters: Any, written: Written) -> sqlite3.Cursor:
        if not written:
            return super().execute(sql, parameters)
        self.guard.passes("before", "commit", joined(written), about(written))
        found = super().execute(sql, parameters)
        self.guard.passes("after", "commit", joined(written), about(written))
        return found


def remembering(connect: Any) -> Any:
    def door(*args: Any, **more: Any) -> Any:
        return connect(*args, factory=Memory, **more)

    return door
