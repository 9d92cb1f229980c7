"""A worker in this process, on a database of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta

import pytest

from contracts.dataref import Tickets
from orchestrator.client import Client
from orchestrator.flows import Flows
from orchestrator.store import database
from orchestrator.store.database import Pool
from orchestrator.store.hints import Hints, running
from orchestrator.worker import Worker, WorkerLimits
from tests.engine.flows import FLOWS
from tests.moments import Moments

LIMITS = WorkerLimits(
    drain=timedelta(milliseconds=200), poll=timedelta(milliseconds=100), watch=timedelta(milliseconds=100)
)

Working = Callable[..., AbstractAsyncContextManager[Moments]]


@pytest.fixture
async def hints(dsn: str) -> AsyncIterator[Hints]:
    async with running(Hints(dsn)) as hints:
        yield hints


@pytest.fixture
def working(dsn: str, hints: Hints) -> Working:
    """`async with working() as moments:` a worker runs while inside. Nothing is stuck, unless there are `orphans`."""

    @asynccontextmanager
    async def one(
        *,
        forgetful: bool = False,
        lease: timedelta = timedelta(seconds=10),
        flows: Flows = FLOWS,
        orphans: bool = False,
        limits: WorkerLimits = LIMITS,
        application_role: str | None = None,
        receiver_url: str = "http://127.0.0.1:8081",
        tickets: Tickets | None = None,
    ) -> AsyncGenerator[Moments]:
        moments, stop = Moments(), asyncio.Event()
        async with database.pool(dsn, size=8, name="worker") as connections:
            worker = Worker(
                connections,
                flows,
                dsn=dsn,
                hints=hints,
                lease=lease,
                observer=moments,
                limits=limits,
                forgetful=forgetful,
                application_role=application_role,
                receiver_url=receiver_url,
                tickets=tickets,
            )
            task = asyncio.create_task(worker.run(stop))
            try:
                yield moments
            finally:
                stop.set()
                await task
        assert not [fields for name, fields in moments.all if name == "worker failed"]
        assert orphans or not moments.count("executions.stuck"), moments.all

    return one


@pytest.fixture
async def client(pool: Pool, hints: Hints) -> AsyncIterator[Client]:
    async with pool.connection() as conn:
        yield Client(conn, hint=hints.give)
