"""Marks are written with what they are about, exported, and deleted only then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import psycopg
import pytest

from contracts.spans import Span
from orchestrator import Context, StepError, seconds, workflow
from orchestrator.client import Client
from orchestrator.flows import Flows
from orchestrator.store import commits, workers
from orchestrator.store import spans as store
from orchestrator.store.commits import NewAttribute, NewEvent, NewMutex
from orchestrator.store.database import Pool
from orchestrator.store.hints import Hints, running
from orchestrator.telemetry import tracing
from orchestrator.telemetry.journal import Subject, spans_of
from orchestrator.telemetry.tracing import Tracing
from orchestrator.worker import Worker
from receiver.inbox import post
from tests.engine.flows import FLOWS, Charge, Ship
from tests.moments import Moments
from tests.store.world import NOON, begun, claim, event, held, reply, rows, sent, task, wait, worker
from tests.waiting import until

Connection = psycopg.AsyncConnection[Any]


class Kept:
    """A collector that keeps what it takes, as long as it takes anything."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.takes = True

    async def export(self, spans: Sequence[Span]) -> bool:
        self.spans += spans if self.takes else ()
        return self.takes

    def close(self) -> None:
        """Nothing is under way."""

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def moments() -> Moments:
    return Moments()


def exporter(
    pool: Pool, kept: Kept, moments: Moments, part: str = "worker", gap: timedelta | None = None
) -> Tracing:
    return Tracing(part, pool, kept, observer=moments, gap=gap)


@asynccontextmanager
async def at_work(pool: Pool, dsn: str, moments: Moments, *, traced: bool = True) -> AsyncGenerator[Client]:
    stop = asyncio.Event()
    async with running(Hints(dsn)) as hints:
        it = Worker(pool, FLOWS, dsn=dsn, hints=hints, observer=moments, traced=traced)
        task = asyncio.create_task(it.run(stop))
        try:
            async with pool.connection() as conn:
                yield Client(conn, hint=hints.give)
        finally:
            stop.set()
            await task


async def marked(conn: Connection) -> int:
    [(count,)] = await rows(conn, "select count(*) from waypost.span_due")
    return count


async def test_a_flow_is_exported_turn_by_turn_and_nothing_is_left(
    dsn: str, pool: Pool, conn: Connection, kept: Kept, moments: Moments
) -> None:
    async with at_work(pool, dsn, moments) as client:
        execution = (await client.start(FLOWS.get("three"), 2)).execution_id
        await client.wait(execution, seconds=30)

    tracing = exporter(pool, kept, moments)
    while await marked(conn):
        await tracing.once()

    assert sorted(set(kept.names)) == [
        "attempt again",
        "attempt double",
        "attempt triple",
        "end three",
        "start three",
        "turn three",
    ]
    assert len({span.at.span_id for span in kept.spans}) == len(kept.spans)
    assert {span.attributes["waypost.instance.id"] for span in kept.spans} == {str(execution)}
    assert all(span.ended is not None and span.began <= span.ended for span in kept.spans)


async def test_a_worker_that_is_not_traced_marks_nothing(
    dsn: str, pool: Pool, conn: Connection, moments: Moments
) -> None:
    async with at_work(pool, dsn, moments, traced=False) as client:
        await client.wait((await client.start(FLOWS.get("three"), 2)).execution_id, seconds=30)

    assert await marked(conn) == 0


async def test_what_the_collector_refuses_stays_and_is_exported_under_the_same_ids(
    dsn: str, pool: Pool, conn: Connection, kept: Kept, moments: Moments
) -> None:
    async with at_work(pool, dsn, moments) as client:
        await client.wait((await client.start(FLOWS.get("three"), 2)).execution_id, seconds=30)
    before, tracing = await marked(conn), exporter(pool, kept, moments)
    kept.takes = False

    taken, went = await tracing.once()

    assert (taken > 0, went) == (True, False)
    assert moments.count("spans.delayed") == 1
    assert await marked(conn) == before
    kept.takes = True
    assert await tracing.once() == (before - taken, True)  # for a while nobody takes them again
    await conn.execute("update waypost.span_due set free_at = now()")
    await tracing.once()
    assert await marked(conn) == 0
    first = {str(span) for span in kept.spans}
    assert len(first) == len(kept.spans)


async def test_two_exporters_never_take_the_same_mark(pool: Pool, conn: Connection) -> None:
    it = await held(conn)
    await commits.commit(conn, [it.turn(release=False)], me=it.me, traced=True)
    lease = timedelta(seconds=30)

    first = await store.take(conn, part="worker", limit=10, lease=lease)
    second = await store.take(conn, part="worker", limit=10, lease=lease)

    assert ([mark.facts for mark in first], second) == ([1], [])


EVENT: Final = NewEvent(
    uuid4(), "emit", "paid", "k", b'{"source": "/orders"}', {}, NOON + timedelta(days=365_000), hops=0
)


@pytest.mark.parametrize(
    "leaves",
    [
        {"waits": [wait("a")]},
        {"events": [EVENT]},
        {"attributes": [NewAttribute("stage", "paid")]},
        {"mutexes": [NewMutex("a/mutex", "step", "line-7")]},
        {"tasks": [task()]},
    ],
    ids=lambda leaves: next(iter(leaves)),
)
async def test_a_turn_is_marked_whatever_else_it_leaves(conn: Connection, leaves: dict[str, Any]) -> None:
    it = await held(conn)
    turn = replace(it.turn(release=False), **leaves)

    assert await commits.commit(conn, [turn], me=it.me, traced=True)
    assert await marked(conn) == 1


async def test_what_nobody_has_exported_for_an_hour_is_dropped_and_counted(
    pool: Pool, conn: Connection, kept: Kept, moments: Moments
) -> None:
    it = await held(conn)
    await commits.commit(conn, [it.turn(release=False)], me=it.me, traced=True)
    await conn.execute("update waypost.span_due set made_at = now() - interval '61 minutes'")

    await exporter(pool, kept, moments).once()

    assert moments.count("spans.dropped", count=1) == 1
    assert (await marked(conn), kept.spans) == (0, [])


async def test_a_journal_that_was_edited_by_hand_keeps_no_other_from_being_exported(
    dsn: str, pool: Pool, conn: Connection, kept: Kept, moments: Moments
) -> None:
    async with at_work(pool, dsn, moments) as client:
        bad = (await client.start(FLOWS.get("three"), 2)).execution_id
        await client.wait(bad, seconds=30)
        good = (await client.start(FLOWS.get("three"), 2)).execution_id
        await client.wait(good, seconds=30)
    await conn.execute(
        "update waypost.journal set kind = 'attempted', payload = '[1]' where execution_id = %s and kind = 'ended'",
        (bad,),
    )

    await exporter(pool, kept, moments).once()

    assert moments.count("spans.unfit", execution=str(bad)) == 1
    assert {span.attributes["waypost.instance.id"] for span in kept.spans} == {str(good)}
    assert await marked(conn) == 0


async def test_the_run_goes_on_when_the_database_or_the_collector_is_away(
    pool: Pool, conn: Connection, kept: Kept, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "POLL", timedelta(milliseconds=1))
    it = await held(conn)
    await commits.commit(
        conn, [it.turn(("finished", "", {"kind": "completed"}), release=False)], me=it.me, traced=True
    )
    await conn.execute("alter table waypost.span_due rename to away")
    task = asyncio.create_task(exporter(pool, kept, moments).run())
    try:
        await moments.until("database.failed", part="traces")
        await conn.execute("alter table waypost.away rename to span_due")

        async def exported() -> bool:
            return await marked(conn) == 0

        await until(exported, what="the export")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert kept.spans


async def test_a_flush_waits_no_longer_than_it_may(
    pool: Pool, conn: Connection, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hangs(Kept):
        async def export(self, spans: Sequence[Span]) -> bool:
            await asyncio.Event().wait()
            return False

    monkeypatch.setattr(tracing, "FLUSH", timedelta(milliseconds=20))
    it = await held(conn)
    await commits.commit(
        conn, [it.turn(("finished", "", {"kind": "completed"}), release=False)], me=it.me, traced=True
    )

    await exporter(pool, Hangs(), moments).flush()

    assert await marked(conn) == 1


# ---- segments --------------------------------------------------------------------------------------------------

GAP = timedelta(milliseconds=20)


@workflow(name="pauses", version="1")
async def pauses(ctx: Context, order: str) -> None:
    with contextlib.suppress(StepError):
        await ctx.call(Charge(order=order), timeout=seconds(0.05))
    await ctx.sleep(seconds(0.06))
    await ctx.call(Ship(order=order))


@pytest.mark.parametrize("forgetful", [False, True])
async def test_a_command_after_a_pause_names_the_span_of_its_segment(
    dsn: str, pool: Pool, conn: Connection, moments: Moments, forgetful: bool
) -> None:
    async with running(Hints(dsn)) as hints:
        stop = asyncio.Event()
        it = Worker(
            pool,
            Flows([pauses]),
            dsn=dsn,
            hints=hints,
            observer=moments,
            segment_gap=GAP,
            forgetful=forgetful,
        )
        task = asyncio.create_task(it.run(stop))
        execution = (await Client(conn, hint=hints.give).start(pauses, "o-1")).execution_id

        async def asked() -> bool:
            return len(await rows(conn, "select 1 from waypost.outbox")) == 2

        await until(asked, what="the second command")
        stop.set()
        await task

    journal = (await store.journals(conn, [(1, str(execution))]))[str(execution)]
    told = spans_of(Subject(str(execution), "pauses", "1"), journal.facts, gap=GAP)
    created = {str(one.span.at) for one in told if one.span.kind == "producer"}
    bodies = await rows(
        conn, "select convert_from(body, 'UTF8')::jsonb ->> 'traceparent' from waypost.outbox"
    )
    assert {traceparent for (traceparent,) in bodies} == created
    assert len({traceparent[3:35] for traceparent in created}) == 2


# ---- marks are of the transaction that they are about ----------------------------------------------------------


@pytest.mark.postgres
async def test_a_turn_that_did_not_match_marks_nothing(conn: Connection) -> None:
    it, stale = await held(conn), await held(conn)
    stale.fence += 1

    done = await commits.commit(
        conn, [it.turn(release=False), stale.turn(release=False)], me=it.me, traced=True
    )

    assert list(done) == [str(it.execution)]
    assert await rows(conn, "select execution_id, position, facts, began_at from waypost.span_due") == [
        (it.execution, it.position, 1, None)
    ]


@pytest.mark.postgres
@pytest.mark.parametrize("traced", [False, True])
async def test_a_takeover_marks_its_fact_when_it_is_traced(conn: Connection, traced: bool) -> None:
    execution = await begun(conn)
    me = await worker(conn)
    await claim(conn, me, execution)
    await workers.retire(conn, me=me)

    assert await workers.take_over(conn, limit=10, traced=traced) == [str(execution)]

    found = await rows(conn, "select execution_id, position, facts from waypost.span_due")
    assert found == ([(execution, 1, 1)] if traced else [])


@pytest.mark.postgres
async def test_an_event_is_marked_once_however_often_it_comes(conn: Connection) -> None:
    one = event("e-1")

    first = await post(conn, [one, event("e-2")], traced=True)
    again = await post(conn, [one], traced=True)

    assert [posted.outcome for posted in [*first, *again]] == ["stored", "stored", "duplicate"]
    assert await rows(conn, "select part, inbox_id from waypost.span_due order by number") == [
        ("receiver", posted.inbox_id) for posted in first
    ]


@pytest.mark.postgres
async def test_a_mark_names_exactly_what_its_part_made(conn: Connection) -> None:
    for columns, values in (
        ("part, tenant_id", "'worker', 1"),
        ("part, tenant_id, inbox_id", "'relay', 1, 1"),
        ("part, tenant_id", "'receiver', 1"),
        ("part, tenant_id, inbox_id", "'other', 1, 1"),
        ("part, tenant_id, inbox_id, message_id, attempt", f"'receiver', 1, 1, '{uuid4()}', 1"),
    ):
        with pytest.raises(psycopg.errors.CheckViolation):
            await conn.execute(f"insert into waypost.span_due ({columns}) values ({values})".encode())


@pytest.mark.postgres
async def test_only_a_reply_that_was_posted_was_taken_in_by_a_receiver(conn: Connection) -> None:
    """One that stands in the answer to its command has no webhook id."""
    execution, message = await sent(conn)

    await post(conn, [reply("posted", message, webhook_id="w"), reply("answered", message)])

    found = await store.arrivals_of(conn, str(execution), tenant=1, limit=10)
    assert [one.event_id for one in found] == ["posted"]
