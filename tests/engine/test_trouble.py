"""What a worker does when something goes wrong under it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from contracts.errors import UnsafeDatabase
from contracts.outcome import Outcome
from orchestrator import Context, UsageError, workflow
from orchestrator.client import Client
from orchestrator.core import terms
from orchestrator.core.fact import Fact
from orchestrator.engine import committer, turn
from orchestrator.engine.committer import Committer
from orchestrator.engine.lease import Lease
from orchestrator.engine.ownership import DEATHS_MAX
from orchestrator.flows import Flows
from orchestrator.store import commits, database, executions, workers
from orchestrator.store.commits import Turn
from orchestrator.store.database import Connection, Pool
from orchestrator.store.hints import Hints
from orchestrator.worker import Worker, WorkerLimits
from tests.engine.conftest import Working
from tests.engine.flows import CALLS, FLOWS
from tests.engine.test_worker import kinds, reply
from tests.invariants import broken
from tests.moments import Moments
from tests.waiting import until

MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    yield


async def dead_worker(conn: Connection, *flows: str) -> str:
    """A worker that registered, and whose lease ends when the test says so."""
    me = str(uuid4())
    await workers.register(conn, me=me, lease=MINUTE, host="gone", definitions=flows)
    return me


async def expire(conn: Connection, me: str) -> None:
    await conn.execute(
        "update waypost.worker set lease_until = clock_timestamp() - interval '1 ms' where worker_id = %s",
        (me,),
    )


def turn_of(claim: executions.Claim, **more: Any) -> Turn:
    base: dict[str, Any] = {
        "tenant": claim.tenant, "execution": claim.execution, "fence": claim.fence, "position": claim.position,
        "epoch": 0, "facts": [], "mail": 0, "orders": 0, "status": "open", "undoing": False, "release": True,
        "due": None, "guard": None, "asks": False,
    }  # fmt: skip
    return Turn(**(base | more))


async def test_what_a_dead_worker_owned_is_taken_over_and_goes_on(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await client.start(FLOWS.get("three"), 1)
    me = await dead_worker(conn)
    [claim] = await executions.claim(conn, me=me, definitions=[("three", "1")], limit=10)
    await expire(conn, me)

    async with working():
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.output) == ("completed", 18)
    assert kinds(view)[:2] == ["started", "orphaned"]
    assert await commits.commit(conn, [turn_of(claim)], me=me) == {}
    assert await broken(conn) == []


async def test_a_worker_that_slept_through_its_lease_writes_nothing(client: Client, conn: Connection) -> None:
    await client.start(FLOWS.get("three"), 1)
    sleeper = await dead_worker(conn)
    [claim] = await executions.claim(conn, me=sleeper, definitions=[("three", "1")], limit=10)
    await expire(conn, sleeper)
    assert await workers.bury(conn) == [sleeper]
    assert await workers.take_over(conn, limit=10) == [claim.execution]

    assert await commits.commit(conn, [turn_of(claim, status="completed")], me=sleeper) == {}

    [row] = await client.list()
    assert (row.status, row.fence, row.position, row.owner) == ("open", claim.fence + 1, 2, None)
    assert await executions.claim(conn, me=sleeper, definitions=[("three", "1")], limit=10) == []


async def test_a_buried_worker_cannot_renew(conn: Connection, dsn: str) -> None:
    me = await dead_worker(conn)
    with psycopg.connect(dsn, autocommit=True) as other:
        assert workers.renew(other, me=me, lease=MINUTE)
        await expire(conn, me)

        assert not workers.renew(other, me=me, lease=MINUTE)


async def test_a_reply_that_comes_while_the_timeout_is_being_committed_wins(
    working: Working, client: Client, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, posted = Committer.submit, asyncio.Event()

    async def late(self: Committer, turn: Turn) -> bool:
        if turn.guard is not None and not posted.is_set():
            posted.set()
            await reply(conn, "charge", Outcome("done", {"charge": "ch"}), execution=UUID(turn.execution))
        return await submit(self, turn)

    monkeypatch.setattr(Committer, "submit", late)
    async with working():
        started = await client.start(FLOWS.get("hurries"), "A")
        view = await client.wait(started.execution_id, seconds=30)

    assert posted.is_set()
    assert (view.row.status, view.output) == ("completed", "ch")
    assert await broken(conn) == []


UNREAD_ORDERS = """
    select status, wake_at, orders_received, orders_read from waypost.execution where execution_id = %s
"""


@workflow(name="unstorable", version="1")
async def unstorable(ctx: Context, n: int) -> None:
    await ctx.call("x" * 200, "a.b", {"n": n})


async def test_a_turn_that_the_database_refuses_stands_alone_and_is_held(
    working: Working, client: Client, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "NAME_BYTES_MAX", 1000)  # else the call itself would be refused
    flows = Flows([unstorable, *FLOWS])
    bad = await client.start(unstorable, 1)
    good = await client.start_many(FLOWS.get("three"), [(n, None) for n in range(7)])

    async with working(flows=flows) as moments:
        view = await client.wait(bad.execution_id, seconds=30)
        others = [await client.wait(one.execution_id, seconds=30) for one in good]
        await client.resume(bad.execution_id, by="ann", reason="again")
        await moments.until("execution held", execution=str(bad.execution_id), times=2)
        [row] = await (await conn.execute(UNREAD_ORDERS, (bad.execution_id,))).fetchall()

    assert view.held is not None
    assert row == ("held", None, 1, 1)
    assert (view.row.status, view.held.code) == ("held", "unstorable")
    assert "keys_are_bounded" in view.held.reason
    assert {other.row.status for other in others} == {"completed"}
    assert await broken(conn) == []


@pytest.mark.parametrize("took_effect", [True, False])
async def test_a_commit_whose_answer_is_lost_is_looked_up_and_never_repeated_blindly(
    working: Working, client: Client, conn: Connection, monkeypatch: pytest.MonkeyPatch, took_effect: bool
) -> None:
    lost: list[int] = []

    async def answer_lost(
        conn: Connection, turns: Sequence[Turn], *, me: str, traced: bool
    ) -> dict[str, bool]:
        if len(lost) < 3:
            lost.append(len(turns))
            if took_effect:
                await commits.commit(conn, turns, me=me, traced=traced)
            raise psycopg.OperationalError("the connection is gone")
        return await commits.commit(conn, turns, me=me, traced=traced)

    monkeypatch.setattr(committer, "commit", answer_lost)
    async with working() as moments:
        started = await client.start(FLOWS.get("three"), 1)
        view = await client.wait(started.execution_id, seconds=30)
        await moments.until("commit looked up", committed=int(took_effect), times=3)

    assert (view.row.status, view.output, len(lost)) == ("completed", 18, 3)
    assert [call[0] for call in CALLS] == ["triple", "double", "triple"]
    assert await broken(conn) == []


async def test_a_drained_worker_leaves_what_still_runs_to_others(
    working: Working, client: Client, pool: Pool, hints: Hints, dsn: str
) -> None:
    moments, stop = Moments(), asyncio.Event()
    limits = WorkerLimits(drain=timedelta(milliseconds=50))
    worker = Worker(pool, FLOWS, dsn=dsn, hints=hints, observer=moments, limits=limits)
    task = asyncio.create_task(worker.run(stop))
    started = await client.start(FLOWS.get("patient"), 1)

    async def begun() -> bool:
        return "asked waits" in kinds(await client.show(started.execution_id))

    await until(begun, what="the step")
    stop.set()
    await task

    async with working():

        async def again() -> bool:
            return CALLS.count(("waits",)) == 2

        await until(again, what="the step's second run")
        view = await client.show(started.execution_id)
    assert kinds(view) == ["started", "asked waits", "orphaned"]


async def test_a_worker_whose_lease_is_lost_goes_on_as_a_new_one(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working(lease=timedelta(seconds=1)) as moments:
        await moments.until("worker started")
        await conn.execute("update waypost.worker set dead_at = clock_timestamp()")
        await moments.until("worker lost its lease")
        await moments.until("worker started", times=2)

        started = await client.start(FLOWS.get("three"), 1)
        view = await client.wait(started.execution_id, seconds=30)

    assert view.row.status == "completed"


async def test_a_worker_has_one_connection_for_its_lease_also_when_the_old_one_is_slow_to_go(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases: list[Lease] = []
    stands, goes_on = threading.Event(), threading.Event()
    renew = workers.renew

    class Kept(Lease):
        def start(self) -> None:
            leases.append(self)
            super().start()

        def join(self) -> None:
            goes_on.set()
            super().join()

    def slow(conn: psycopg.Connection[Any], *, me: str, lease: timedelta) -> bool:
        stands.set()
        goes_on.wait()
        return renew(conn, me=me, lease=lease)

    async def is_over() -> bool:
        return stands.is_set() and not leases[0].holds

    monkeypatch.setattr("orchestrator.worker.Lease", Kept)
    monkeypatch.setattr(workers, "renew", slow)
    async with working(lease=timedelta(seconds=1)) as moments:
        await moments.until("worker started")
        await until(is_over, what="the end of the lease that is not renewed")
        await moments.until("worker started", times=2)
        renewing = [thread.name for thread in threading.enumerate() if thread.name.startswith("lease-")]
        goes_on.set()

    assert renewing == [f"lease-{leases[1].me[:8]}"]


async def test_a_worker_whose_connections_break_goes_on(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working() as moments:
        await moments.until("worker started")
        await conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid() and application_name like 'waypost-%'"
        )
        other = Client(conn)
        started = await other.start(FLOWS.get("three"), 1)
        view = await other.wait(started.execution_id, seconds=30)
        moments.all = [moment for moment in moments.all if moment[0] != "worker failed"]

    assert view.row.status == "completed"


async def test_a_flow_that_a_worker_does_not_hold_is_left_to_others(working: Working, client: Client) -> None:
    stranger = await client.start(unstorable, 1)

    async with working():
        started = await client.start(FLOWS.get("three"), 1)
        await client.wait(started.execution_id, seconds=30)

    assert (await client.show(stranger.execution_id)).row.fence == 0


async def test_an_unsafe_database_is_refused_at_start(hints: Hints, dsn: str, conn: Connection) -> None:
    name = conninfo_to_dict(dsn)["dbname"]
    await conn.execute(
        sql.SQL("alter database {} set synchronous_commit = off").format(sql.Identifier(str(name)))
    )
    async with database.pool(dsn, size=2, name="fresh") as fresh:
        worker = Worker(fresh, FLOWS, dsn=dsn, hints=hints)

        with pytest.raises(UnsafeDatabase, match="synchronous_commit"):
            await worker.run(asyncio.Event())


@workflow(name="misspells", version="1")
async def misspells(ctx: Context, n: int) -> str:
    try:
        await ctx.call("payments", "pay\tment.charge", {"n": n})
    except UsageError as error:
        return str(error)
    return "sent"


async def test_a_type_that_no_message_can_have_is_refused_before_anything_is_written(
    working: Working, client: Client
) -> None:
    started = await client.start(misspells, 1)

    async with working(flows=Flows([misspells])):
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.messages) == ("completed", [])
    assert "expected 1 to 512 bytes of printable text" in view.output


async def test_a_mistake_of_the_engine_in_one_execution_holds_it_and_no_other(
    working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = await client.start(FLOWS.get("pays"), "A")
    good = await client.start(FLOWS.get("three"), 1)

    def broken(*_: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(turn, "message_of", broken)
    async with working():
        view = await client.wait(bad.execution_id, seconds=30)
        other = await client.wait(good.execution_id, seconds=30)

    assert view.held is not None
    assert (view.row.status, view.held.reason, other.row.status) == (
        "held",
        "KeyError: 'a mistake'",
        "completed",
    )


@pytest.mark.parametrize("payload", ['{"input": 1e5000}', "[" * 100 + "]" * 100, "7", '{"input": "many"}'])
async def test_an_input_that_cannot_be_read_holds_its_execution_and_no_other(
    working: Working, client: Client, conn: Connection, payload: str
) -> None:
    await conn.execute(
        "select waypost.start_executions('{1}', array[gen_random_uuid()], '{three}', '{1}', '{bad}', '{null}', "
        "array[%s]::jsonb[], '{null}')",
        (payload,),
    )
    good = await client.start_many(FLOWS.get("three"), [(n, None) for n in range(5)])

    async with working():
        [bad] = await client.list(key="bad")
        view = await client.wait(bad.execution_id, seconds=30)
        others = [await client.wait(one.execution_id, seconds=30) for one in good]

    assert view.held is not None
    assert (view.row.status, {other.row.status for other in others}) == ("held", {"completed"})
    assert await broken(conn) == []


async def test_a_claim_whose_answer_is_lost_is_found_again(
    working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = executions.claim, asyncio.Event()

    async def answer_lost(*args: Any, **more: Any) -> list[executions.Claim]:
        claims = await real(*args, **more)
        if claims and not lost.is_set():
            lost.set()
            raise psycopg.OperationalError("the connection is gone")
        return claims

    monkeypatch.setattr(executions, "claim", answer_lost)
    started = await client.start(FLOWS.get("three"), 1)
    async with working() as moments:
        view = await client.wait(started.execution_id, seconds=30)
        await moments.until("worker failed")
        moments.all = [moment for moment in moments.all if moment[0] != "worker failed"]

    assert lost.is_set()
    assert (view.row.status, view.row.fence, moments.count("execution adopted")) == ("completed", 1, 1)


async def test_a_journal_that_could_not_be_read_is_read_again(
    working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = executions.journals, asyncio.Event()

    async def fails_once(*args: Any) -> dict[str, list[Fact]]:
        if not failed.is_set():
            failed.set()
            raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
        return await real(*args)

    monkeypatch.setattr(executions, "journals", fails_once)
    started = await client.start_many(FLOWS.get("three"), [(n, None) for n in range(5)])
    async with working() as moments:
        views = [await client.wait(one.execution_id, seconds=30) for one in started]
        moments.all = [moment for moment in moments.all if moment[0] != "worker failed"]

    assert failed.is_set()
    assert {view.row.status for view in views} == {"completed"}


async def test_an_execution_of_which_every_worker_dies_is_held_before_it_takes_more_with_it(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await client.start(FLOWS.get("three"), 1)
    for _ in range(DEATHS_MAX):
        me = await dead_worker(conn)
        [_] = await executions.claim(conn, me=me, definitions=[("three", "1")], limit=1)
        await expire(conn, me)
        await workers.bury(conn)
        await workers.take_over(conn, limit=1)
        await conn.execute("update waypost.execution set wake_at = now()")

    async with working():
        held = await client.wait(started.execution_id, seconds=30)
        await client.resume(started.execution_id, by="ann", reason="mended")

        async def over() -> bool:
            return (await client.show(started.execution_id)).row.status == "completed"

        await until(over, what="its end")

    assert held.held is not None
    assert (held.row.status, held.held.reason) == ("held", "10 workers in a row died while they owned it")


async def test_a_turn_without_facts_whose_answer_is_lost_is_read_again(
    client: Client, conn: Connection, pool: Pool
) -> None:
    await client.start(FLOWS.get("three"), 1)
    me = await dead_worker(conn)
    [claim] = await executions.claim(conn, me=me, definitions=[("three", "1")], limit=1)
    lease = Lease("", me=me, span=MINUTE, granted=0.0, lost=lambda: None)
    owner = Committer(pool, lease=lease, observer=Moments(), hint=lambda _: None, wake=lambda: None)
    answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    lane = committer.Lane(owner)
    lane.batch = [(turn_of(claim), answer)]

    await lane.look_up(conn)

    assert answer.result() is False


async def test_what_is_taken_over_again_and_again_waits_while_others_get_through(
    client: Client, conn: Connection
) -> None:
    await client.start(FLOWS.get("three"), 1)
    waits: list[float] = []
    for _ in range(4):
        me = await dead_worker(conn)
        [_] = await executions.claim(conn, me=me, definitions=[("three", "1")], limit=1)
        await expire(conn, me)
        await workers.bury(conn)
        await workers.take_over(conn, limit=1)
        cursor = await conn.execute(
            "update waypost.execution e set wake_at = now() from waypost.execution old "
            "where e.execution_id = old.execution_id returning extract(epoch from old.wake_at - now())"
        )
        [(seconds,)] = await cursor.fetchall()
        waits.append(float(seconds))

    assert waits[0] <= 0
    assert all(0 < later <= 2**n for n, later in enumerate(waits[1:], 1))
