"""Nothing that matters is kept in memory: flows end alike when they are evicted after each of their facts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Final

import pytest

from contracts.vault import Vault
from orchestrator.client import Client, ExecutionView
from orchestrator.flows import load
from orchestrator.store import database
from orchestrator.store.database import Pool
from orchestrator.store.hints import Hints, running
from orchestrator.worker import Worker
from receiver.ingress import Receiver
from relay.relay import Relay
from relay.settings import RelaySettings
from tests.acceptance.book import Book
from tests.acceptance.flows import FOLDER, GATE
from tests.acceptance.stand import BOUGHT, LOOPBACK, MODULES, free_port, register, start_ledger
from tests.invariants import at_rest
from tests.moments import Moments

FLOWS: Final = load(MODULES)
REFUNDED: Final = ["undone payment.refund", "undone stock.release"]

ENDS: Final = {
    ("order", "order-1"): ("completed", [*BOUGHT, "done shipment.create"]),
    ("order", "declined-1"): ("compensated", ["done stock.reserve", "refused payment.charge", REFUNDED[1]]),
    ("order", "undeliverable-1"): ("compensated", [*BOUGHT, "refused shipment.create", *REFUNDED]),
    ("order", "cut-1"): ("completed", [*BOUGHT, "done shipment.create"]),
    ("hasty", "order-2"): ("completed", [*BOUGHT, "done shipment.create"]),
    ("hasty", "late-1"): ("compensated", [*BOUGHT, *REFUNDED]),
    ("packed", "order-3"): ("completed", ["done stock.reserve", "done shipment.create"]),
    ("weighed", "order-4"): ("completed", [*BOUGHT, "done shipment.create"]),
    ("weighed", "undeliverable-2"): ("compensated", [*BOUGHT, "refused shipment.create", *REFUNDED]),
}
"""By flow and order: how it ends, and what the services did for it."""


async def test_each_flow_ends_alike_when_it_is_evicted_after_each_fact(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    (tmp_path / GATE).touch()
    async with database.pool(dsn, size=20, name="test") as pool, forgetful(dsn, pool, tmp_path) as client:
        started = {
            order: await client.start(FLOWS.get(flow), input_of(order), key=order) for flow, order in ENDS
        }
        views = [await client.wait(one.execution_id, seconds=60) for one in started.values()]
        async with pool.connection() as conn:
            assert await at_rest(conn) == []

    book = Book.read(tmp_path / "book")
    found = {(view.row.definition, view.row.business_key): ended(view, book) for view in views}
    steps = Counter((tmp_path / "undeliverable-2.steps").read_text().split())
    assert {flow.name for flow in FLOWS} == {flow for flow, _ in ENDS}
    assert found == ENDS
    assert steps == {"weigh": 1, "unweigh": 1}


def ended(view: ExecutionView, book: Book) -> tuple[str, list[str]]:
    return view.row.status, book.effects_of(view.row.business_key or "")


def input_of(order: str) -> dict[str, object]:
    return {"id": order, "customer": "ada", "total": 4200, "lines": []}


@asynccontextmanager
async def forgetful(dsn: str, pool: Pool, folder: Path) -> AsyncGenerator[Client]:
    """A worker that keeps no execution in memory, a relay and a receiver in this process; the ledger beside."""
    vault, port, stop, moments = Vault(bytes(32)), free_port(), asyncio.Event(), Moments()
    url = f"http://127.0.0.1:{port}"
    ledger, at, pairs = await start_ledger(folder)
    settings = RelaySettings(allow=(ip_network(LOOPBACK),))
    try:
        async with running(Hints(dsn)) as hints, pool.connection() as conn, asyncio.TaskGroup() as parts:
            await register(conn, vault, port=at, pairs=pairs)
            receiver = Receiver(pool, vault=vault, hint=hints.give)
            relay = Relay(pool, vault=vault, settings=settings, hint=hints.give, hinted=hints.event("outbox"))
            worker = Worker(
                pool, FLOWS, dsn=dsn, hints=hints, receiver_url=url, observer=moments, forgetful=True
            )
            parts.create_task(receiver.serve("127.0.0.1", port, stop))
            parts.create_task(relay.run(stop))
            parts.create_task(worker.run(stop))
            try:
                yield Client(conn, hint=hints.give)
            finally:
                stop.set()
    finally:
        await ledger.kill()
    assert not [fields for name, fields in moments.all if name == "worker failed"]
