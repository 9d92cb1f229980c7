"""A lease is renewed while its process serves it, and says when the process no longer does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

from orchestrator.engine.lease import Lease
from orchestrator.store import workers
from orchestrator.store.database import Connection
from tests.waiting import until, until_true

SPAN = timedelta(milliseconds=500)


async def leased(conn: Connection, dsn: str, **more: object) -> tuple[Lease, threading.Event]:
    me, lost = str(uuid4()), threading.Event()
    granted = time.monotonic()
    await workers.register(conn, me=me, lease=SPAN, host="here", definitions=[])
    lease = Lease(dsn, me=me, span=SPAN, granted=granted, lost=lost.set, **more)  # pyright: ignore[reportArgumentType]
    lease.start()
    return lease, lost


async def ends(conn: Connection, lease: Lease) -> float:
    cursor = await conn.execute(
        "select extract(epoch from lease_until) from waypost.worker where worker_id = %s", (lease.me,)
    )
    row = await cursor.fetchone()
    assert row is not None
    return float(row[0])


async def test_a_lease_is_renewed_as_long_as_the_loop_is_alive(conn: Connection, dsn: str) -> None:
    lease, lost = await leased(conn, dsn)
    first = await ends(conn, lease)

    async def renewed() -> bool:
        lease.tick()
        return await ends(conn, lease) > first + 1

    await until(renewed, what="renewals beyond the first lease")
    assert (lease.holds, lost.is_set()) == (True, False)
    lease.stop()


async def test_a_loop_that_stands_still_loses_its_lease_and_never_gets_it_back(
    conn: Connection, dsn: str
) -> None:
    lease, lost = await leased(conn, dsn)

    until_true(lost.is_set, what="the lease to be lost")

    lease.tick()
    assert not lease.holds
    lease.stop()


async def test_a_buried_worker_hears_that_its_lease_is_lost(conn: Connection, dsn: str) -> None:
    lease, lost = await leased(conn, dsn)
    await conn.execute("update waypost.worker set dead_at = clock_timestamp()")

    async def told() -> bool:
        lease.tick()
        return lost.is_set()

    await until(told, what="the lease to be lost")
    assert not lease.holds
    lease.stop()


async def test_where_a_loop_stands_that_does_not_come_back_is_told(conn: Connection, dsn: str) -> None:
    stacks: list[list[str]] = []
    lease, _ = await leased(conn, dsn, blocked=stacks.append, patience=1.0)

    def computes_for_ever(enough: Callable[[], bool]) -> None:
        while not enough():
            pass

    computes_for_ever(lambda: bool(stacks))

    assert any("computes_for_ever (" in place for place in stacks[0])
    lease.stop()


async def test_a_loop_that_comes_back_is_not_called_blocked(conn: Connection, dsn: str) -> None:
    stacks: list[list[str]] = []
    lease, lost = await leased(conn, dsn, blocked=stacks.append, patience=60.0)

    until_true(lost.is_set, what="the lease to be lost")
    lease.stop()
    await asyncio.to_thread(lease.join)

    assert stacks == []


async def test_a_lease_survives_a_connection_that_breaks(conn: Connection, dsn: str) -> None:
    lease, lost = await leased(conn, dsn)
    broken = 0
    first = await ends(conn, lease)

    async def renewed() -> bool:
        nonlocal broken
        lease.tick()
        if broken == 0:
            cursor = await conn.execute(
                "select count(pg_terminate_backend(pid)) from pg_stat_activity "
                "where datname = current_database() and application_name = 'waypost-lease'"
            )
            row = await cursor.fetchone()
            broken = 0 if row is None else int(row[0])
        return broken > 0 and await ends(conn, lease) > first + 1

    await until(renewed, what="renewals on another connection")
    assert not lost.is_set()
    lease.stop()
