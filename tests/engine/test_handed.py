"""Events that flows emit and applications publish, and the flows of the same installation that get them."""

from __future__ import annotations

from typing import LiteralString

import pytest
from pydantic import BaseModel

from contracts.limits import EVENT_HOPS_MAX
from orchestrator import Context, Event, TimedOut, errands, seconds, workflow
from orchestrator.client import Client
from orchestrator.flows import Flows
from orchestrator.store import database, handing
from orchestrator.store.database import Connection
from tests.engine.conftest import Working
from tests.engine.test_worker import REMEMBERING
from tests.invariants import broken
from tests.waiting import until


class Baked(Event, type="bakery.baked", key="bread"):
    bread: str
    number: int = 0


class Eaten(Event, type="bakery.eaten", key="bread"):
    bread: str
    number: int = 0


class Ping(Event, type="bakery.ping", key="id"):
    id: str
    left: int


class Bread(BaseModel):
    name: str
    many: int = 1


@workflow(name="bakes", version="1")
async def bakes(ctx: Context, bread: Bread) -> None:
    for number in range(bread.many):
        ctx.emit(Baked(bread=bread.name, number=number))
        ctx.emit(Eaten(bread=bread.name, number=number))
    await ctx.sleep(seconds(0.01))
    ctx.emit(Baked(bread=bread.name, number=bread.many))


@workflow(name="buys", version="1")
async def buys(ctx: Context, bread: Bread) -> list[int]:
    """Waits for baked and eaten bread in turn, as it was emitted."""
    got: list[int] = []
    for _ in range(bread.many):
        got.extend(
            [(await ctx.event(Baked, key=bread.name)).number, (await ctx.event(Eaten, key=bread.name)).number]
        )
    got.append((await ctx.event(Baked, key=bread.name)).number)
    return got


@workflow(name="races", version="1")
async def races(ctx: Context, bread: Bread) -> list[str]:
    """Which of the two came first, and second."""
    found: list[str] = []
    for _ in range(2):
        won = await ctx.first(ctx.event(Baked, key=bread.name), ctx.event(Eaten, key=bread.name))
        found.append(type(won).__name__)
    return found


@workflow(name="toasts", version="1", on=Eaten, key="bread")
async def toasts(ctx: Context, eaten: Eaten) -> str:
    return f"toast to {eaten.bread}"


@workflow(name="tastes", version="1")
async def tastes(ctx: Context, bread: Bread) -> str:
    """Emits for itself: first it does not wait for that, then it does."""
    ctx.emit(Baked(bread=bread.name, number=7))
    await ctx.sleep(seconds(0.05))
    own = await ctx.event(Baked, key=bread.name)
    try:
        await ctx.event(Baked, key=bread.name, timeout=seconds(0.05))
    except TimedOut:
        return f"tasted {own.number}"
    return "tasted twice"


@workflow(name="echoes", version="1", on=Ping, key="id")
async def echoes(ctx: Context, ping: Ping) -> int:
    if ping.left == 0:
        ctx.emit(Ping(id=str(ctx.uuid()), left=0))
        return 0
    return ctx.continue_as_new(ping.model_copy(update={"left": ping.left - 1}))


FLOWS = Flows([bakes, buys, races, toasts, tastes, echoes])


async def count(conn: Connection, what: LiteralString) -> int:
    rows: list[tuple[int]] = await (await conn.execute("select count(*) from waypost." + what)).fetchall()  # pyright: ignore[reportAssignmentType]  # as the select says
    return rows[0][0]


@REMEMBERING
async def test_what_a_flow_emits_reaches_flows_that_wait_in_its_order_and_starts_others_once(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(flows=FLOWS, forgetful=forgetful):
        buyer = await client.start(FLOWS.get("buys"), Bread(name="rye", many=3))
        racer = await client.start(FLOWS.get("races"), Bread(name="rye"))
        other = await client.start(FLOWS.get("races"), Bread(name="oat"))
        await there_are(conn, 5, "wait")
        await client.start(FLOWS.get("bakes"), Bread(name="rye", many=3))
        bought = await client.wait(buyer.execution_id, seconds=30)
        raced = await client.wait(racer.execution_id, seconds=30)
        await there_are(conn, 1, "execution where status = 'completed' and definition = 'toasts'")

    assert bought.output == [0, 0, 1, 1, 2, 2, 3]
    assert raced.output == ["Baked", "Eaten"]
    assert (await client.show(other.execution_id)).row.state == "waiting"
    assert await count(conn, "execution where definition = 'toasts'") == 1
    assert await count(conn, "emitted") == 0
    assert await count(conn, "outbox") == 0
    assert await broken(conn) == []


async def there_are(conn: Connection, many: int, what: LiteralString) -> None:
    """Wait until there are so many."""

    async def so_many() -> bool:
        return await count(conn, what) == many

    await until(so_many, what=f"{many} of {what}")


async def test_an_event_is_kept_for_who_waits_later_and_goes_to_an_execution_of_its_own_too(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS) as moments:
        tasting = await client.start(FLOWS.get("tastes"), Bread(name="rye"))
        view = await client.wait(tasting.execution_id, seconds=30)

    assert view.output == "tasted 7"
    assert moments.count("events.handed") == 1
    [received] = [fact for fact in view.facts if fact.kind == "received"]
    assert "waypost:/waypost/executions/" in (received.payload or "")
    assert await broken(conn) == []


async def test_an_execution_is_not_woken_by_what_it_emits_and_does_not_wait_for(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS) as moments:
        baking = await client.start(FLOWS.get("bakes"), Bread(name="rye"))
        view = await client.wait(baking.execution_id, seconds=30)
        await there_are(conn, 3, "inbox")

    assert view.row.status == "completed"
    assert await count(conn, "mail") == 0
    assert moments.count("events.handed") >= 1


async def test_flows_that_start_each_other_by_events_stop_at_the_limit_of_hops(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(flows=FLOWS) as moments:
        async with conn.transaction():
            await errands.publish(conn, Ping(id="first", left=1))
        await moments.until("events.looped")

    assert await count(conn, "execution") == EVENT_HOPS_MAX + 1
    [looped] = [fields for name, fields in moments.all if name == "events.looped"]
    assert (looped["type"], looped["hops"]) == ("bakery.ping", EVENT_HOPS_MAX + 1)
    assert await broken(conn) == []


async def test_what_an_application_publishes_reaches_flows_after_its_commit_and_once_for_each_id(
    working: Working, client: Client, conn: Connection, dsn: str
) -> None:
    async with working(flows=FLOWS) as moments:
        racer = await client.start(FLOWS.get("races"), Bread(name="rye"))
        await there_are(conn, 2, "wait")
        async with conn.transaction():
            await errands.publish(conn, Baked(bread="rye"), id="b1")
            await errands.publish(conn, Eaten(bread="rye"), id="e1")
        async with conn.transaction():
            await errands.publish(conn, Baked(bread="rye"), id="b1")
        async with conn.transaction(force_rollback=True):
            await errands.publish(conn, Baked(bread="rye"))
        view = await client.wait(racer.execution_id, seconds=30)
        await there_are(conn, 0, "emitted")
        await there_are(conn, 2, "execution where status = 'completed'")

    assert view.output == ["Baked", "Eaten"]
    assert await count(conn, "inbox") == 2
    assert not moments.count("events.conflict")


async def test_an_id_that_stands_for_another_event_is_told(working: Working, conn: Connection) -> None:
    async with working(flows=FLOWS) as moments:
        for number in (1, 2):
            async with conn.transaction():
                await errands.publish(conn, Baked(bread="rye", number=number), id="b1")
        await there_are(conn, 0, "emitted")
        await moments.until("events.conflict")

    assert await count(conn, "inbox") == 1


async def test_what_was_emitted_before_a_crash_is_given_afterwards(
    working: Working, client: Client, conn: Connection, pool: database.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies after the commit of its turn, before it gives the events, and again before that commits."""

    async def never(_: Connection) -> list[handing.Handed]:
        return []

    with monkeypatch.context() as dying:
        dying.setattr(handing, "hand_on", never)
        async with working(flows=FLOWS):
            started = await client.start(FLOWS.get("bakes"), Bread(name="rye"))
            await client.wait(started.execution_id, seconds=30)
    assert await count(conn, "emitted") == 3
    async with pool.connection() as other, other.transaction(force_rollback=True):
        assert [one.outcome for one in await handing.hand_on(other)] == ["stored"]
    assert await count(conn, "emitted") == 3

    async with working(flows=FLOWS):
        await there_are(conn, 0, "emitted")

    assert await count(conn, "inbox") == 3
    assert await broken(conn) == []
