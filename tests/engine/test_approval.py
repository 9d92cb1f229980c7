"""Approvals of real executions: who decides first, what is told to others, and what waits without a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final
from uuid import UUID

import pytest

from contracts.errors import UnknownExecution
from orchestrator import Context, TimedOut, days, hours, seconds, workflow
from orchestrator.approvals import AlreadyDecided, ChoiceInvalid, NotWaiting, UnknownSubject
from orchestrator.client import Client, OrderInvalid
from orchestrator.explanation import Code
from orchestrator.flows import Flows
from orchestrator.store.database import Connection, Pool
from orchestrator.store.situation import stuck
from tests.engine.conftest import Working
from tests.engine.test_why import until_told
from tests.engine.test_worker import kinds
from tests.invariants import broken
from tests.waiting import until

MENDED: Final = [False]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    MENDED[0] = False
    yield


@workflow(name="spends", version="1")
async def spends(ctx: Context, amount: int) -> str:
    decision = await ctx.approval("spend", who=["group:finance", "ann"], show={"amount": amount})
    return f"{decision.choice} by {decision.by}: {decision.reason}"


@workflow(name="hastens", version="1")
async def hastens(ctx: Context, amount: int) -> str:
    try:
        return (await ctx.approval("spend", who="ann", expires=seconds(0.05))).choice
    except TimedOut:
        await ctx.sleep(days(1))
        return "expired"


@workflow(name="reminded", version="1")
async def reminded(ctx: Context, n: int) -> str:
    return (await ctx.approval("spend", who="ann", remind=seconds(0.05), expires=hours(1))).choice


@workflow(name="twice", version="1")
async def twice(ctx: Context, n: int) -> list[str]:
    both = await ctx.all(ctx.approval("spend", who="ann"), ctx.approval("spend", who="bob"))
    return [one.choice for one in both]


@workflow(name="stumbles", version="1")
async def stumbles(ctx: Context, n: int) -> str:
    decision = await ctx.approval("spend", who="ann")
    if not MENDED[0]:
        raise AttributeError("a bug")
    return decision.choice


FLOWS: Final = Flows([spends, hastens, reminded, twice, stumbles])


async def asks(working: Working, client: Client, conn: Connection, name: str = "spends") -> UUID:
    """An execution that waits for a decision, and no worker any more."""
    async with working(flows=FLOWS):
        started = (await client.start(FLOWS.get(name), 90)).execution_id
        await until_told(conn, started, Code.AWAITING_DECISION)
    return started


async def ended(working: Working, client: Client, execution: UUID) -> Any:
    async with working(flows=FLOWS):
        return (await client.wait(execution, seconds=30)).output


# ---- what waits --------------------------------------------------------------------------------------------------


async def test_what_waits_is_listed_with_whom_it_asks_and_what_they_should_see(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await asks(working, client, conn)

    [row] = await client.approvals()

    assert (row.execution_id, row.subject, row.path) == (str(started), "spend", "spend/decision")
    assert (row.who, row.choices, row.show) == (
        ["group:finance", "ann"], ["approve", "reject"], {"amount": 90},
    )  # fmt: skip
    assert (row.expires_at, row.state, row.reminders) == (None, "waiting", 0)
    assert await client.approvals(flow="other") == []
    assert await client.approvals(limit=1) == [row]


async def test_an_approval_without_a_time_is_a_reason_to_move_and_not_stuck(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await asks(working, client, conn)
    assert (await client.show(started)).row.wake_at is None
    assert await stuck(conn, limit=10) == (0, [])

    await conn.execute(
        "update waypost.journal set payload = payload #- '{args,request}'"
        " where payload ->> 'kind' = 'decision'"
    )

    assert await stuck(conn, limit=10) == (1, [str(started)])


async def test_reminders_are_counted_until_it_is_decided(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        started = (await client.start(reminded, 1)).execution_id

        async def was_reminded() -> bool:
            return any(row.reminders >= 2 for row in await client.approvals())

        await until(was_reminded, what="two reminders")
        await client.decide(started, "spend", "approve", by="ann")
        view = await client.wait(started, seconds=30)

    assert view.output == "approve"
    [state] = await states(conn, started)
    assert state == "decided"


# ---- deciding ----------------------------------------------------------------------------------------------------


async def states(conn: Connection, execution: UUID) -> list[str]:
    cursor = await conn.execute(
        "select state from waypost.approval where execution_id = %s order by asked_at, path", (execution,)
    )
    return [state for (state,) in await cursor.fetchall()]


async def test_a_decision_is_recorded_with_name_and_reason_and_the_flow_goes_on(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await asks(working, client, conn)

    await client.decide(started, "spend", "reject", by="ann", reason="no receipt")
    assert (await states(conn, started), await client.approvals()) == (["decided"], [])

    assert await ended(working, client, started) == "reject by ann: no receipt"
    view = await client.show(started)
    assert kinds(view) == [
        "started",
        "noted spend/request",
        "asked spend/decision",
        "ended spend/decision",
        "finished",
    ]
    assert view.facts[3].actor == "operator:ann"
    assert await states(conn, started) == ["decided"]
    assert await broken(conn, at_rest=True) == []


async def test_said_again_it_is_the_same_decision_before_and_after_it_was_read(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await asks(working, client, conn)

    for reason in ("fine", "really"):
        await client.decide(started, "spend", "approve", by="ann", reason=reason)

    assert await ended(working, client, started) == "approve by ann: fine"
    await client.decide(started, "spend", "approve", by="ann")
    view = await client.show(started)
    assert (view.row.mail_unread, len(view.facts)) == (0, 5)


async def test_another_decision_after_it_is_told_who_decided_first(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await asks(working, client, conn)
    await client.decide(started, "spend", "approve", by="ann")

    for by, choice in (("bob", "approve"), ("ann", "reject")):
        with pytest.raises(AlreadyDecided, match=r"approval 'spend' is decided: 'approve' by 'ann'"):
            await client.decide(started, "spend", choice, by=by)
    assert (await ended(working, client, started)).startswith("approve by ann")
    with pytest.raises(AlreadyDecided, match="'approve' by 'ann'"):
        await client.decide(started, "spend", "reject", by="bob")


async def test_of_many_who_decide_at_once_one_is_first_and_all_others_are_told(
    working: Working, client: Client, conn: Connection, pool: Pool
) -> None:
    started = await asks(working, client, conn)

    async def decides(name: str) -> str:
        async with pool.connection() as mine:
            try:
                await Client(mine).decide(started, "spend", "approve", by=name)
            except AlreadyDecided as late:
                return late.by
        return name

    told = await asyncio.gather(*(decides(f"p{n}") for n in range(6)))

    assert len(set(told)) == 1
    assert await ended(working, client, started) == f"approve by {told[0]}: "


async def test_what_cannot_be_decided_is_refused_and_nothing_is_written(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await asks(working, client, conn)

    with pytest.raises(UnknownExecution):
        await client.decide("0193f000-0000-7000-8000-000000000001", "spend", "approve", by="ann")
    with pytest.raises(UnknownSubject, match=f"{started} has no approval 'spent'; it waits for: spend"):
        await client.decide(started, "spent", "approve", by="ann")
    with pytest.raises(
        ChoiceInvalid, match="approval 'spend': expected one of approve, reject, found 'maybe'"
    ):
        await client.decide(started, "spend", "maybe", by="ann")
    with pytest.raises(OrderInvalid, match="operator's name"):
        await client.decide(started, "spend", "approve", by="n" * 129)
    with pytest.raises(OrderInvalid, match="operator's reason"):
        await client.decide(started, "spend", "approve", by="ann", reason="a\nb")

    cursor = await conn.execute("select count(*) from waypost.inbox")
    assert await cursor.fetchone() == (0,)


async def test_an_execution_that_is_over_waits_for_no_decision(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await asks(working, client, conn)
    await client.cancel(started, by="ann", reason="enough")
    await ended(working, client, started)

    with pytest.raises(NotWaiting, match=f"{started} waits no more for approval 'spend'"):
        await client.decide(started, "spend", "approve", by="ann")
    with pytest.raises(NotWaiting, match=f"{started} is cancelled: it waits for no decision"):
        await client.decide(started, "other", "approve", by="ann")
    assert await states(conn, started) == ["withdrawn"]


async def test_an_approval_that_expired_says_when_also_before_a_worker_has_noticed(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS):
        started = (await client.start(hastens, 1)).execution_id
        await until_told(conn, started, Code.SLEEPING)

    with pytest.raises(NotWaiting, match=r"approval 'spend' expired at 20\d\d-\d\d-\d\d "):
        await client.decide(started, "spend", "approve", by="ann")
    unread = await asks(working, client, conn)
    await conn.execute(
        "update waypost.journal set payload = payload || jsonb_build_object('due', now())"
        " where execution_id = %s and payload ->> 'kind' = 'decision'",
        (unread,),
    )
    with pytest.raises(NotWaiting, match="expired at"):
        await client.decide(unread, "spend", "approve", by="ann")


async def test_two_approvals_of_one_subject_are_told_apart_by_their_paths(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await asks(working, client, conn, "twice")

    with pytest.raises(ChoiceInvalid, match=r"all\.0/spend/decision, all\.1/spend/decision"):
        await client.decide(started, "spend", "approve", by="ann")
    await client.decide(started, "all.1/spend/decision", "reject", by="bob")
    await client.decide(started, "spend", "approve", by="ann")

    assert await ended(working, client, started) == ["approve", "reject"]


async def test_a_decision_that_finds_a_bug_is_not_lost(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await asks(working, client, conn, "stumbles")
    await client.decide(started, "spend", "approve", by="ann")
    async with working(flows=FLOWS):
        assert (await client.wait(started, seconds=30)).held is not None
        MENDED[0] = True
        await client.resume(started, by="bob", reason="mended")

        async def over() -> bool:
            return (await client.show(started)).row.finished_at is not None

        await until(over, what="its end")

    assert (await client.show(started)).output == "approve"
    assert await broken(conn, at_rest=True) == []


async def test_an_execution_that_is_evicted_after_each_fact_decides_the_same(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS, forgetful=True):
        started = (await client.start(spends, 1)).execution_id
        await until_told(conn, started, Code.AWAITING_DECISION)
        await client.decide(started, "spend", "approve", by="ann")
        assert (await client.wait(started, seconds=30)).output == "approve by ann: "


async def test_a_decision_for_a_choice_that_nobody_offered_is_late(
    working: Working, client: Client, conn: Connection
) -> None:
    """Whoever writes mail by hand may write anything."""
    started = await asks(working, client, conn)
    await client.decide(started, "spend", "approve", by="ann")
    await conn.execute('update waypost.inbox set data = data || \'{"choice": {"a": 1}}\'')

    async with working(flows=FLOWS):

        async def read() -> bool:
            return (await client.show(started)).row.mail_unread == 0

        await until(read, what="its mail")
        view = await client.show(started)

    assert kinds(view)[-1] == "late spend/decision"
    assert view.row.status == "open"
