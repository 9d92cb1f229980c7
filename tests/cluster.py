"""Databases for tests: on an embedded PostgreSQL 18 and on the system's 15, a fresh one for each test."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, LiteralString

import psycopg
from psycopg import sql

from migrations import runner
from orchestrator.embedded import EmbeddedPostgres, embedded_binaries, system_binaries

EMBEDDED: Final = 18
OLDEST: Final = 15
TEMPLATE: Final = "waypost_template"
MEMORY_BYTES_MIN: Final = 4 * 1024**3


@dataclass(slots=True)
class Cluster:
    """A running server with a migrated template; copying its files takes some 20 ms and leaves nothing behind."""

    major: int
    server: EmbeddedPostgres
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def dsn(self, database: str) -> str:
        return self.server.dsn(database)

    def execute(self, statement: sql.SQL | sql.Composed) -> None:
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as conn:
            conn.execute(statement)

    def execute_text(self, statement: LiteralString) -> None:
        self.execute(sql.SQL(statement))

    def prepare(self) -> None:
        self.execute(sql.SQL("create database {}").format(sql.Identifier(TEMPLATE)))
        with psycopg.connect(self.dsn(TEMPLATE), autocommit=True) as conn:
            runner.migrate(conn)

    def create(self, *, template: str = TEMPLATE) -> str:
        """A new database; returns its name."""
        name = f"test_{next(self.numbers)}"
        statement = sql.SQL("create database {} template {} strategy file_copy")
        self.execute(statement.format(sql.Identifier(name), sql.Identifier(template)))
        return name

    def drop(self, name: str) -> None:
        """Drop a database, and the connections that a test left open to it."""
        self.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


def fast_folder() -> Path | None:
    """Memory that looks like a disk, where there is enough: a database is copied there in 10 ms, not in 150.

    fsync is on there too. What a test session that was killed left behind is removed after an hour.
    """
    memory = Path("/dev/shm")
    if not memory.is_dir():
        return None
    for left in memory.glob("waypost-*"):
        if time.time() - left.stat().st_mtime > 3600 and is_unused(left):
            shutil.rmtree(left, ignore_errors=True)
    found = os.statvfs(memory)
    enough = found.f_bavail * found.f_frsize >= MEMORY_BYTES_MIN
    return memory if enough and not found.f_flag & os.ST_NOEXEC else None


def is_unused(folder: Path) -> bool:
    """Whether no process serves this data folder."""
    with (folder / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@dataclass(slots=True)
class Clusters:
    """The clusters of a test session, by major version, started when a test first asks for one."""

    running: dict[int, Cluster] = field(default_factory=dict[int, Cluster])

    def get(self, major: int) -> Cluster | None:
        """The cluster of that version, or None where its binaries are not installed."""
        if major not in self.running:
            binaries = embedded_binaries() if major == EMBEDDED else system_binaries(major)
            if binaries is None:
                return None
            server = EmbeddedPostgres.temporary(binaries=binaries, within=fast_folder())
            server.start()
            self.running[major] = Cluster(major, server)
            self.running[major].prepare()
        return self.running[major]

    def close(self) -> None:
        for cluster in self.running.values():
            cluster.server.remove()
