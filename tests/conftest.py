"""Fixtures that all tests share. A test that asks for `dsn`, `conn` or `pool` gets a database of its own.

What concerns SQL is marked `@pytest.mark.postgres`: it runs on PostgreSQL 18, and as a proof on 15. What takes minutes
is marked `@pytest.mark.proof`: `make proof` runs it, `make test` does not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import psycopg_pool
import pytest

from orchestrator.store import database
from tests.cluster import EMBEDDED, OLDEST, Cluster, Clusters
from tests.evidence import Evidence, lines_of

pytest_plugins = ["orchestrator.testing.plugin"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "postgres: runs on the embedded PostgreSQL 18, and as a proof on the system's 15"
    )
    config.addinivalue_line("markers", "proof: takes minutes; `make proof` runs it")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        it for how in ("passed", "failed") for it in terminalreporter.stats.get(how, ()) if it.when == "call"
    ]
    if lines := lines_of(sorted(reports, key=lambda it: it.nodeid)):
        terminalreporter.section("what the proofs did")
        terminalreporter.write_line("\n".join(lines))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = metafunc.definition.get_closest_marker("postgres") is not None
    if marked and "cluster" in metafunc.fixturenames:
        newest = pytest.param(EMBEDDED, id="pg18")
        oldest = pytest.param(OLDEST, id="pg15", marks=pytest.mark.proof)
        metafunc.parametrize("cluster", [newest, oldest], indirect=True)


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.close()


@pytest.fixture
def cluster(clusters: Clusters, request: pytest.FixtureRequest) -> Cluster:
    major: int = getattr(request, "param", EMBEDDED)
    found = clusters.get(major)
    if found is None:
        pytest.skip(f"PostgreSQL {major} is not installed")
    return found


@pytest.fixture
def dsn(cluster: Cluster) -> Iterator[str]:
    """The DSN of a fresh, migrated database."""
    name = cluster.create()
    yield cluster.dsn(name)
    cluster.drop(name)


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[psycopg.AsyncConnection[tuple[Any, ...]]]:
    """A connection in autocommit; rows are tuples."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[psycopg_pool.AsyncConnectionPool[Any]]:
    async with database.pool(dsn, size=4, name="test") as pool:
        yield pool


@pytest.fixture
def evidence(
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> Evidence:
    return Evidence(request.node.name, record_property, capsys)
