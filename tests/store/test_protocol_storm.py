"""Many events and many who wait for them, at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from uuid import UUID

import psycopg
import pytest

from tests.invariants import broken
from tests.store.world import (
    Connection,
    Held,
    claim_all,
    closed,
    commit,
    event,
    held,
    mail_of,
    posted,
    rows,
    wait,
    waiting,
    worker,
)

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


EXECUTIONS, KEYS, EVENTS = 8, 3, 60


async def test_a_storm_of_events_and_waits_loses_none_and_gives_none_twice(
    conn: Connection, dsn: str
) -> None:
    """Workers read one event a turn and wait for the next; each of them gets every event of its key, in order."""
    key_of: dict[UUID, str] = {}
    for n in range(EXECUTIONS):
        holder = await held(conn)
        key_of[holder.execution] = f"k{n % KEYS}"
        await waiting(conn, wait("w1", key=key_of[holder.execution]), holder=holder)
    per_key = EVENTS // KEYS
    done: set[UUID] = set()

    async def sender(seed: int) -> None:
        chance = random.Random(seed)  # a storm that can be made again
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as mine:
            names = [(f"{seed} {n}", f"k{n % KEYS}") for n in range(EVENTS // 2)]
            while names:
                size = min(len(names), chance.randint(1, 5))
                batch = [names.pop(0) for _ in range(size)]
                chance.shuffle(batch)
                await posted(mine, *(event(name, key=key) for name, key in batch))

    async def reader() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as mine:
            me = await worker(mine)
            while len(done) < EXECUTIONS:
                for holder in await claim_all(mine, me):
                    await take_turn(mine, holder)
                await asyncio.sleep(0)

    async def take_turn(mine: Connection, holder: Held) -> None:
        """It reads what it got, closes that wait, and waits for the next until it has them all."""
        key, read = key_of[holder.execution], holder.mail_read
        got = holder.mail_received - read
        assert got <= 1, "one wait, one event"
        closes = [closed(f"w{read + 1}", key=key)] if got else []
        last = read + got == per_key
        waits = [wait(f"w{read + 2}", key=key)] if got and not last else []
        assert await commit(mine, holder, holder.turn(mail=got, closes=closes, waits=waits))
        if last:
            done.add(holder.execution)

    async with asyncio.timeout(60):
        await asyncio.gather(sender(1), sender(2), reader(), reader())

    for execution, key in key_of.items():
        all_of_it = await rows(
            conn, "select 'event ' || event_id from waypost.inbox where key = %s order by inbox_id", key
        )
        assert await mail_of(conn, execution) == [text for (text,) in all_of_it]
