"""Databases for tests: one server, a migrated template, and a copy of it for each test."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import psycopg
from psycopg import sql

from migrations import runner
from orchestrator.embedded import EmbeddedPostgres
from orchestrator.testing import clock

TEMPLATE: Final = "waypost_template"


class Databases:
    """A PostgreSQL of our own, which is started when the first database is asked for, and removed when it is left.

    `with Databases() as databases:` in a session, `with databases.fresh() as dsn:` in a test. The server's data lie in
    `folder` (default: the system's temporary one) and are removed with it.
    """

    def __init__(self, *, folder: Path | None = None) -> None:
        self._folder = folder
        self._server: EmbeddedPostgres | None = None
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server, and remove all of its databases."""
        if self._server is not None:
            self._server.remove()
            self._server = None

    @contextmanager
    def fresh(self) -> Generator[str]:
        """The DSN of a new, migrated database, which is dropped when it is left."""
        server = self._started()
        name = f"test_{next(self._numbers)}"
        with self._connected(server, "postgres") as conn:
            new, template = sql.Identifier(name), sql.Identifier(TEMPLATE)
            conn.execute(sql.SQL("create database {} template {}").format(new, template))
        try:
            yield server.dsn(name)
        finally:
            with self._connected(server, "postgres") as conn:
                conn.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _started(self) -> EmbeddedPostgres:
        if self._server is None:
            server = EmbeddedPostgres.temporary(within=self._folder)
            server.start()
            try:
                self._prepare(server)
            except BaseException:
                server.remove()
                raise
            self._server = server
        return self._server

    def _prepare(self, server: EmbeddedPostgres) -> None:
        with self._connected(server, "postgres") as conn:
            clock.make_search(conn)
            conn.execute(sql.SQL("create database {}").format(sql.Identifier(TEMPLATE)))
        with self._connected(server, TEMPLATE) as conn:
            clock.make(conn)
            runner.migrate(conn)
            clock.bind(conn)

    def _connected(self, server: EmbeddedPostgres, database: str) -> psycopg.Connection[Any]:
        return psycopg.connect(server.dsn(database), autocommit=True)
