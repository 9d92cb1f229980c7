"""What flows publish about their executions: found by it, in the commit of the turn."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from orchestrator import Context, seconds, workflow
from orchestrator.client import Client
from orchestrator.flows import Flows
from orchestrator.store.database import Connection
from tests.engine.conftest import Working
from tests.engine.flows import Packed
from tests.engine.test_emit import TYPE, subscriber
from tests.engine.test_worker import REMEMBERING
from tests.invariants import broken

NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


@workflow(name="stages", version="1")
async def stages(ctx: Context, number: int) -> None:
    ctx.publish(stage="begun", amount=number, urgent=True, draft="yes", since=NOON)
    await ctx.sleep(seconds(0.01))
    ctx.publish(stage="said 'paid'", draft=None)
    ctx.emit(Packed(order="A", boxes=number))
    ctx.publish(amount=number + 0.5)
    if number == 1:
        ctx.continue_as_new(2)


FLOWS = Flows([stages])


@REMEMBERING
async def test_an_execution_is_found_by_what_it_published_last(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    await subscriber(conn, "billing", of=TYPE)

    async with working(forgetful=forgetful, flows=FLOWS):
        one = await client.start(FLOWS.get("stages"), 1)
        two = await client.start(FLOWS.get("stages"), 7)
        first = await client.wait(one.execution_id, seconds=30)
        await client.wait(two.execution_id, seconds=30)

    assert first.row.attributes == {
        "stage": "said 'paid'",
        "amount": 2.5,
        "urgent": True,
        "since": "2026-12-01T12:00:00.000000Z",
    }

    async def found(*where: Any) -> set[str]:
        return {row.execution_id for row in await client.list(where=where)}

    a, b = str(one.execution_id), str(two.execution_id)
    assert await found("stage=\"said 'paid'\"") == {a, b}
    assert await found("stage=begun") == set()
    assert await found("draft=yes") == set()
    assert await found("amount=2.5") == {a}
    assert await found("amount>=2.5", "amount<8") == {a, b}
    assert await found("amount>2.5", "urgent=true") == {b}
    assert await found("since<2026-12-01T14:00+01:00") == {a, b}
    assert await broken(conn) == []
