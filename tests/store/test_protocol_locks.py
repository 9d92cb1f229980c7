"""The lock order, seen: who waits for an execution's row holds no later row and no message yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, LiteralString
from uuid import UUID

import psycopg
import pytest

from orchestrator.store import commits
from tests.invariants import broken
from tests.store.world import (
    Connection,
    Held,
    Program,
    asked,
    claim_message,
    closed,
    commit,
    event,
    expire_claims,
    held,
    message,
    posted,
    reply,
    rows,
    until_blocked,
    wait,
)

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


@dataclass(slots=True)
class Pair:
    """Two executions of one worker, the lower id first, each with a message whose claim is over."""

    low: Held
    high: Held
    to_low: UUID
    to_high: UUID
    tokens: list[UUID | None]


@pytest.fixture
async def pair(conn: Connection) -> Pair:
    made: list[tuple[Held, UUID]] = []
    for _ in range(2):
        holder = await held(conn)
        new = message("pay")
        assert await commit(conn, holder, holder.turn(asked("pay"), messages=[new], release=False))
        holder.position += 1
        made.append((holder, new.message_id))
    (low, to_low), (high, to_high) = sorted(made, key=lambda one: one[0].execution)
    high.me = low.me
    await conn.execute("update waypost.execution set owner = %s", (low.me,))
    tokens = [await claim_message(conn, m, lease=timedelta(seconds=-1)) for m in (to_low, to_high)]
    return Pair(low, high, to_low, to_high, tokens)


SETTLE_BOTH: Final[LiteralString] = """
    select * from waypost.settle(array[1, 1], %s::uuid[], %s::uuid[], array['refused', 'refused'],
                                 array[true, true], array[now(), now()], array['{}'::jsonb, '{}'::jsonb])
"""


def everybody(pair: Pair) -> dict[str, Program]:
    """Each program that touches both executions, told about the higher one first."""
    turns = [
        holder.turn(("withdrawn", "pay", {}), take_back=[to])
        for holder, to in ((pair.high, pair.to_high), (pair.low, pair.to_low))
    ]
    return {
        "post_mail": lambda c: posted(c, reply("r2", pair.to_high), reply("r1", pair.to_low)),
        "commit": lambda c: commits.commit(c, turns, me=pair.low.me),
        "settle": lambda c: rows(c, SETTLE_BOTH, [pair.to_high, pair.to_low], pair.tokens[::-1]),
        "expire_claims": expire_claims,
    }


@pytest.mark.parametrize("name", ["post_mail", "commit", "settle", "expire_claims"])
async def test_who_waits_for_a_row_holds_nothing_that_comes_later(
    conn: Connection, dsn: str, pair: Pair, name: str
) -> None:
    """The lower execution is locked. The program waits for it, and the rest can be locked at once."""
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as observer,
    ):
        async with conn.transaction():
            await conn.execute("select waypost.lock_rows(array[1], array[%s])", (pair.low.execution,))
            waiting = asyncio.ensure_future(everybody(pair)[name](other))
            await until_blocked(observer, other, by=conn, unless=waiting)

            await conn.execute(
                "select 1 from waypost.execution where execution_id = %s for no key update nowait",
                (pair.high.execution,),
            )
            await conn.execute("select 1 from waypost.outbox for no key update nowait")
        await waiting


async def test_who_waits_for_an_event_key_holds_no_row(conn: Connection, dsn: str, pair: Pair) -> None:
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as observer,
    ):
        async with conn.transaction():
            await conn.execute("select waypost.lock_keys(array[1], array['paid'], array['k'])")
            waiting = asyncio.ensure_future(posted(other, event("e1"), reply("r1", pair.to_low)))
            await until_blocked(observer, other, by=conn, unless=waiting)

            await conn.execute("select 1 from waypost.execution for no key update nowait")
        await waiting


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")], ids="-".join)
async def test_event_keys_are_locked_in_one_order(conn: Connection, dsn: str, order: tuple[str, str]) -> None:
    """Whatever the order of the items, both keys are taken lowest lock first: crossing batches queue up."""
    [(low,)] = await rows(
        conn, "select k from unnest(array['a', 'b']) k order by waypost.event_key(1, 'paid', k) limit 1"
    )
    high = "b" if low == "a" else "a"
    items = [event(f"e {key}", key=key) for key in order]
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as observer,
    ):
        async with conn.transaction():
            await conn.execute("select waypost.lock_keys(array[1], array['paid'], array[%s])", (low,))
            waiting = asyncio.ensure_future(posted(other, *items))
            await until_blocked(observer, other, by=conn, unless=waiting)

            assert await rows(
                observer, "select pg_try_advisory_xact_lock(waypost.event_key(1, 'paid', %s))", high
            ) == [(True,)]
        await waiting


async def held_and_waiting(conn: Connection) -> Held:
    """An execution in a worker's hands that has an open wait at `a`."""
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn(waits=[wait("a")], release=False))
    holder.position += 1
    return holder


@pytest.mark.parametrize("closes", [False, True], ids=["registers", "closes"])
async def test_a_commit_that_waits_for_an_event_key_holds_no_row(
    conn: Connection, dsn: str, *, closes: bool
) -> None:
    holder = await held_and_waiting(conn)
    turn = (
        holder.turn(closes=[closed("a", was_open=True)], guard=0)
        if closes
        else holder.turn(waits=[wait("b")])
    )
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as observer,
    ):
        async with conn.transaction():
            await conn.execute("select waypost.lock_keys(array[1], array['paid'], array['k'])")
            blocked = asyncio.ensure_future(commit(other, holder, turn))
            await until_blocked(observer, other, by=conn, unless=blocked)

            await conn.execute("select 1 from waypost.execution for no key update nowait")
            await conn.execute("select 1 from waypost.wait for no key update nowait")
        assert await blocked
