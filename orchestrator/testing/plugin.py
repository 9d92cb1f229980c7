"""Fixtures for pytest: `pytest_plugins = ["orchestrator.testing.plugin"]` in conftest.py.

None of them is asynchronous, so whatever runs your asynchronous tests can use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest

from orchestrator.simulators.provider import Provider, provider
from orchestrator.simulators.zoo import Zoo, zoo
from orchestrator.testing.databases import Databases
from orchestrator.testing.installation import Installation, installed


@pytest.fixture(scope="session")
def waypost_databases() -> Iterator[Databases]:
    """A PostgreSQL that is started when the first test needs it, and kept for the session."""
    with Databases() as databases:
        yield databases


@pytest.fixture
def waypost_database(waypost_databases: Databases) -> Iterator[str]:
    """The DSN of a migrated database for one test."""
    with waypost_databases.fresh() as dsn:
        yield dsn


@pytest.fixture
def waypost(waypost_databases: Databases) -> Callable[..., AbstractAsyncContextManager[Installation]]:
    """What `installed` makes, on the session's PostgreSQL."""
    return partial(installed, databases=waypost_databases)


@pytest.fixture
def waypost_zoo() -> Callable[..., AbstractAsyncContextManager[Zoo]]:
    """`zoo`: an endpoint whose paths say how it misbehaves."""
    return zoo


@pytest.fixture
def waypost_provider() -> Callable[..., AbstractAsyncContextManager[Provider]]:
    """`provider`: one that posts webhooks as Stripe, GitHub or another does."""
    return provider
