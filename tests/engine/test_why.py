"""What is said about real executions, and that nothing is stuck unless somebody took its reasons away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from uuid import UUID

import pytest

from contracts.outcome import Outcome
from contracts.vault import Vault
from orchestrator import Context, Retry, hours, registry, workflow
from orchestrator.client import Client
from orchestrator.explanation import Code, Explanation
from orchestrator.flows import Flows
from orchestrator.store.database import Connection
from orchestrator.store.situation import situation, stuck
from orchestrator.why import explain
from tests.engine.conftest import Working
from tests.engine.flows import BUG, CALLS, FLOWS, breaks
from tests.engine.test_worker import message_at, reply
from tests.store.world import claim_message, settle
from tests.waiting import until

VAULT: Final = Vault(bytes(range(32)))


@workflow(name="dozes", version="1")
async def dozes(ctx: Context, n: int) -> None:
    await ctx.sleep(hours(n))


@workflow(name="tries", version="1")
async def tries(ctx: Context, n: int) -> None:
    await ctx.step(breaks, retry=Retry(attempts=3, first=hours(n), cap=hours(n)))


SLOW: Final = Flows([dozes, tries])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    BUG[0] = True
    yield
    BUG[0] = True


async def why(conn: Connection, execution: UUID) -> Explanation:
    it = await situation(conn, str(execution), tenant=1)
    assert it is not None
    return explain(it, it.around.now)


async def until_told(conn: Connection, execution: UUID, code: Code) -> Explanation:
    """Wait until `code` is what is said. Every state on the way has a sentence too, or this fails."""
    said: list[Explanation] = []

    async def told() -> bool:
        said.append(await why(conn, execution))
        return said[-1].code == code

    await until(told, what=f"{code}; it said {said[-1:]}")
    return said[-1]


async def test_a_call_is_followed_from_its_start_to_its_end(
    working: Working, client: Client, conn: Connection
) -> None:
    started = (await client.start(FLOWS.get("pays"), "order-1")).execution_id
    assert (await why(conn, started)).code == Code.NO_WORKER

    async with working():
        told = await until_told(conn, started, Code.ENDPOINT_UNKNOWN)
        assert told.do == ("`waypost endpoint add payments URL`",)

        await registry.add_endpoint(conn, VAULT, name="payments", url="https://payments.example/x")
        assert (await why(conn, started)).code == Code.TO_BE_SENT

        message = await message_at(conn, started, "charge")
        assert message is not None
        token = await claim_message(conn, message)
        assert (await why(conn, started)).code == Code.SENDING

        await settle(conn, message, token, "delivered")
        told = await until_told(conn, started, Code.AWAITING_REPLY)
        assert (told.path, told.attempt, told.holder) == ("charge", 1, "payments")

        await reply(conn, "charge", Outcome("done", {"charge": "c1"}), execution=started)
        told = await until_told(conn, started, Code.ENDPOINT_UNKNOWN)
        assert (told.path, told.holder) == ("create", "shipping")

        await reply(conn, "create", Outcome("refused", code="no-van"), execution=started)
        told = await until_told(conn, started, Code.TO_BE_SENT)
        assert told.path == "charge/undo"
        assert "undo of charge by payment.refund" in told.sentence

        await reply(conn, "charge/undo", Outcome("done"), execution=started)
        assert "no-van" in (await until_told(conn, started, Code.COMPENSATED)).sentence


async def test_what_ran_out_of_time_while_it_was_sent_settles_before_it_is_undone(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        await registry.add_endpoint(conn, VAULT, name="payments", url="https://payments.example/x")
        claimed: list[UUID] = []

        async def one_is_claimed() -> bool:
            """Its time is short, so a slow machine may need more than one."""
            started = (await client.start(FLOWS.get("hurries"), "order-1")).execution_id

            async def asked() -> bool:
                return await message_at(conn, started, "charge") is not None

            await until(asked, what="the message")
            message = await message_at(conn, started, "charge")
            assert message is not None
            if await claim_message(conn, message) is not None:
                claimed.append(started)
            return bool(claimed)

        await until(one_is_claimed, what="the message in the hands of a relay")
        [started] = claimed
        told = await until_told(conn, started, Code.SETTLING)

    assert (told.path, told.attempt) == ("charge", 1)


async def test_a_sleep_and_a_pause_between_tries_say_until_when(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=SLOW):
        asleep = (await client.start(SLOW.get("dozes"), 3)).execution_id
        failing = (await client.start(SLOW.get("tries"), 1)).execution_id
        sleeping = await until_told(conn, asleep, Code.SLEEPING)
        woken = (await client.show(asleep)).row.wake_at
        retrying = await until_told(conn, failing, Code.STEP_RETRY)

    assert woken is not None
    assert sleeping.until == woken
    assert (retrying.path, retrying.attempt) == ("breaks", 2)
    assert "broken" in retrying.sentence


async def test_a_step_that_runs_names_its_worker(working: Working, client: Client, conn: Connection) -> None:
    async with working():
        started = (await client.start(FLOWS.get("patient"), 1)).execution_id

        async def step_runs() -> bool:
            return (await why(conn, started)).path == "waits"

        await until(step_runs, what="the step")
        told = await why(conn, started)
        view = await client.show(started)

    assert (told.code, told.attempt, told.holder) == (Code.RUNNING, 1, view.row.owner)


async def test_what_is_held_says_the_command_that_moves_it(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = (await client.start(FLOWS.get("buggy"), 1)).execution_id
        told = await until_told(conn, started, Code.PROGRAM_FAULT)
        assert f"waypost resume {started} " in told.do[0]

        BUG[0] = False
        await client.resume(started, by="ann", reason="mended")
        await until_told(conn, started, Code.COMPLETED)


async def test_an_orphan_is_stuck_and_a_worker_says_so(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=SLOW, orphans=True) as moments:
        started = (await client.start(SLOW.get("dozes"), 3)).execution_id
        await until_told(conn, started, Code.SLEEPING)
        assert await stuck(conn, limit=10) == (0, [])

        await conn.execute("update waypost.execution set wake_at = null where execution_id = %s", (started,))
        await moments.until("executions.stuck", count=1, executions=[str(started)])

    assert (await why(conn, started)).code == Code.STUCK
