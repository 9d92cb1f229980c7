"""An application's errands, with a worker at work: from its commit to the end of the flow."""

from __future__ import annotations

import json

import pytest

from orchestrator import Context, Event, errands, workflow
from orchestrator.client import Client
from orchestrator.flows import Flows
from orchestrator.store.database import Connection
from tests.engine.conftest import Working


class Approved(Event, type="order.approved", key="order"):
    order: str
    by: str


@workflow(name="purchase", version="1")
async def purchase(ctx: Context, order: str) -> str:
    approved = await ctx.event(Approved, key=order)
    return f"{order} by {approved.by}"


@pytest.mark.parametrize("forgetful", [False, True], ids=["remembering", "forgetful"])
async def test_a_flow_that_an_application_starts_and_signals_runs_to_its_end(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(flows=Flows([purchase]), forgetful=forgetful) as moments:
        await moments.until("worker started")
        async with conn.transaction():
            execution = await errands.start(conn, purchase, "A", key="A")
            await errands.signal(conn, Approved(order="A", by="Ann"))
        view = await client.wait(execution, seconds=30)

    assert (view.row.status, view.output) == ("completed", "A by Ann")
    received = next(json.loads(fact.payload or "") for fact in view.facts if fact.kind == "received")
    assert (received["source"], received["type"], received["key"]) == (
        "waypost:application",
        "order.approved",
        "A",
    )
