"""The one PostgreSQL server that every system is measured on; a fresh database in it for each measurement."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import psycopg
from psycopg import sql

from orchestrator.embedded import EmbeddedPostgres
from orchestrator.embedded.server import Postmaster

DURABLE: Final = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
SHOWN: Final = ("server_version", *DURABLE, "shared_buffers", "max_connections", "wal_sync_method")


class NotDurable(Exception):
    """A figure without durability is worth nothing, so none is taken."""

    def __init__(self, setting: str, expected: str, found: str) -> None:
        super().__init__(f"{setting} is {found}, expected {expected}")


@dataclass(slots=True)
class Server:
    """A running server, durable as its `settings` say."""

    postgres: EmbeddedPostgres
    settings: dict[str, str]
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    @contextmanager
    def database(self, name: str) -> Generator[str]:
        """The DSN of a new, empty database, which is dropped afterwards."""
        name = f"{name}_{next(self.numbers)}"
        # The server has nothing else to do, and what a measurement before this one left behind is on disk.
        self.execute(sql.SQL("checkpoint"))
        self.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            yield self.postgres.dsn(name)
        finally:
            self.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    @property
    def pid(self) -> int:
        """Of the postmaster, whose children are all the others."""
        running = Postmaster.over(self.postgres.cluster)
        assert running is not None, "it runs until we leave"
        return running.pid

    def execute(self, statement: sql.SQL | sql.Composed) -> None:
        with psycopg.connect(self.postgres.dsn(), autocommit=True) as conn:
            conn.execute(statement)


@contextmanager
def running(settings: Mapping[str, str] | None = None) -> Generator[Server]:
    """A PostgreSQL 18 of our own, as `waypost demo` would start it; with `settings` besides. Raises NotDurable."""
    postgres = EmbeddedPostgres.temporary(settings={"max_connections": "200", **(settings or {})})
    try:
        postgres.start()
        with psycopg.connect(postgres.dsn()) as conn:
            found = {name: show(conn, name) for name in SHOWN}
        for name, expected in DURABLE.items():
            if found[name] != expected:
                raise NotDurable(name, expected, found[name])
        yield Server(postgres, found)
    finally:
        postgres.remove()


def show(conn: psycopg.Connection[tuple[str]], setting: str) -> str:
    row = conn.execute("select current_setting(%s)", [setting]).fetchone()
    assert row is not None, "current_setting answers or raises"
    return row[0]
