"""The ground of all races on one server: a database whose functions stop where the scripts say so."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Final
from uuid import UUID

import psycopg
import pytest
import pytest_asyncio
from psycopg import sql

from migrations import runner
from tests.cluster import Clusters
from tests.explorer.ground import Ground, furnish
from tests.explorer.instrument import instrumented

DATABASE: Final = "explorer"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def grounds(clusters: Clusters, request: pytest.FixtureRequest) -> AsyncIterator[Ground]:
    cluster = clusters.get(request.param)
    if cluster is None:
        pytest.skip(f"PostgreSQL {request.param} is not installed")
    cluster.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))
    with psycopg.connect(cluster.dsn(DATABASE), autocommit=True) as conn:
        runner.migrate(conn, migrations=instrumented())
        furnish(conn)
    async with Ground.at(cluster.dsn(DATABASE)) as ground:
        yield ground
    cluster.drop(DATABASE)


@pytest.fixture
def ground(grounds: Ground, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """The ground; ids that are made on it are 1, 2, 3, … for each test."""
    numbers = itertools.count(1)
    monkeypatch.setattr("tests.store.world.uuid4", lambda: UUID(int=next(numbers)))
    return grounds
