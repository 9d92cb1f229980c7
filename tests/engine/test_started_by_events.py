"""From an event at the receiver's port to the end of the flow that it started, with a worker at work."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel

from contracts import Command, Event
from orchestrator import Context, seconds, workflow
from orchestrator.client import Client
from orchestrator.flows import Flows
from orchestrator.store.database import Connection, Pool
from orchestrator.store.hints import Hints
from tests.engine.conftest import Working
from tests.engine.test_worker import message_at
from tests.invariants import broken
from tests.receiver.world import World, add_sender, event, running
from tests.waiting import until

REMEMBERING = pytest.mark.parametrize("forgetful", [False, True], ids=["remembering", "forgetful"])


class CheckoutCompleted(Event, type="checkout.completed", key="payment"):
    payment: str
    email: str


class Paid(Event, type="payment.succeeded", key="payment"):
    payment: str
    amount: int


class Granted(BaseModel):
    licence: str


class Grant(Command[Granted], endpoint="payments", type="licence.grant"):
    email: str


@workflow(name="checkout", version="1", on=CheckoutCompleted, key="payment")
async def checkout(ctx: Context, session: CheckoutCompleted) -> str:
    """Started by one event; it waits for another one of its type before it goes on to the next kind."""
    again = await ctx.event(CheckoutCompleted, key=session.payment, timeout=seconds(60))
    paid = await ctx.event(Paid, key=session.payment)
    granted = await ctx.call(Grant(email=again.email))
    return f"{session.email}, {again.email}: {granted.licence} for {paid.amount}"


FLOWS = Flows([checkout])


@pytest.fixture
async def shop(pool: Pool, conn: Connection, hints: Hints) -> AsyncIterator[World]:
    await add_sender(conn)
    async with running(pool, conn) as world:
        world.receiver.intake.hint = hints.give
        yield world


def completed(number: int, email: str = "ann@shop.test") -> dict[str, Any]:
    """A checkout of payment p-1, under a subject of its own beside that of the flow."""
    return event(
        id=f"c-{number}", type="checkout.completed", subject="p-1", data={"payment": "p-1", "email": email}
    )


async def the_execution(conn: Connection) -> UUID:
    found: list[UUID] = []

    async def there() -> bool:
        cursor = await conn.execute(
            "select execution_id from waypost.execution where definition = 'checkout'"
        )
        found[:] = [execution for (execution,) in await cursor.fetchall()]
        return bool(found)

    await until(there, what="an execution")
    assert len(found) == 1
    return found[0]


async def waits(conn: Connection, execution: UUID, kind: str) -> None:
    """Until the execution has an open wait for an event of type `kind`."""

    async def open_wait() -> bool:
        cursor = await conn.execute(
            "select 1 from waypost.wait where execution_id = %s and type = %s and inbox_id is null",
            (execution, kind),
        )
        return await cursor.fetchone() is not None

    await until(open_wait, what=f"a wait for {kind}")


@REMEMBERING
async def test_one_event_starts_a_flow_another_of_its_key_is_its_mail_and_it_goes_to_its_end(
    shop: World, working: Working, client: Client, conn: Connection, *, forgetful: bool
) -> None:
    """The worker makes known what starts its flows. The event that started one does not end its wait for another."""
    async with working(flows=FLOWS, forgetful=forgetful) as moments:
        await moments.until("worker started")
        assert (await shop.post(completed(1))).status == 202
        execution = await the_execution(conn)
        await waits(conn, execution, "checkout.completed")

        await shop.post(completed(1))
        await shop.post(completed(2, email="bob@shop.test"))
        await waits(conn, execution, "payment.succeeded")
        await shop.post(event(type="payment.succeeded", subject="p-1", data={"payment": "p-1", "amount": 42}))

        async def asked() -> bool:
            return await message_at(conn, execution, "grant") is not None

        await until(asked, what="the command")
        cursor = await conn.execute("select message_id, body from waypost.outbox")
        [(message, body)] = await cursor.fetchall()
        command = json.loads(body)
        assert (command["subject"], command["data"]) == ("p-1", {"email": "bob@shop.test"})
        await shop.post(event(type="licence.grant.done", causationid=str(message), data={"licence": "L1"}))
        view = await client.wait(execution, seconds=30)

    assert (view.row.status, view.output) == ("completed", "ann@shop.test, bob@shop.test: L1 for 42")
    assert await broken(conn, at_rest=True) == []


async def test_an_event_whose_data_does_not_fit_holds_the_execution_for_a_person(
    shop: World, working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS) as moments:
        await moments.until("worker started")
        await shop.post(event(type="checkout.completed", data={"payment": "p-1"}))
        view = await client.wait(await the_execution(conn), seconds=30)

    assert view.held is not None
    assert (view.row.status, view.held.code) == ("held", "input-invalid")
    assert "the input does not fit flow checkout: at /email" in view.held.reason
    assert view.row.business_key == "p-1"


async def test_an_event_that_came_while_no_worker_lived_is_taken_up_by_the_next(
    shop: World, working: Working, conn: Connection
) -> None:
    """What starts a flow is in the database, not in a worker."""
    async with working(flows=FLOWS) as moments:
        await moments.until("worker started")
    await shop.post(completed(1))
    execution = await the_execution(conn)

    async with working(flows=FLOWS):
        await waits(conn, execution, "checkout.completed")
