"""An event and a wait at once: whoever locks the key first is first, and neither misses the other.

Each pair runs in both orders, as in test_protocol_races.py, and every invariant holds afterwards.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from uuid import UUID

import psycopg
import pytest

from orchestrator.store import commits
from tests.invariants import broken
from tests.store.world import (
    Connection,
    Held,
    claim,
    claim_all,
    closed,
    commit,
    event,
    held,
    is_due,
    mail_of,
    posted,
    race,
    rows,
    run,
    until_blocked,
    wait,
    waiting,
    waits_of,
    worker,
)

pytestmark = pytest.mark.postgres

BOTH = pytest.mark.parametrize("reverse", [False, True], ids=["as named", "reversed"])


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


async def held_and_waiting(conn: Connection) -> Held:
    """An execution in a worker's hands that has an open wait at `a`."""
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn(waits=[wait("a")], release=False))
    holder.position += 1
    return holder


@BOTH
async def test_an_event_and_a_registration_meet(conn: Connection, dsn: str, *, reverse: bool) -> None:
    """Two executions of one batch wait for it, and both get it."""
    one, other = await held(conn), await held(conn)
    await conn.execute("update waypost.execution set owner = %s", (one.me,))
    turns = [one.turn(waits=[wait("a")]), other.turn(waits=[wait("b")])]

    [got], matched = await run(
        dsn,
        lambda c: posted(c, event("e1")),
        lambda c: commits.commit(c, turns, me=one.me),
        reverse=reverse,
    )

    assert got.outcome == "stored"
    assert matched == {str(it.execution): not reverse for it in (one, other)}
    for it in (one, other):
        assert await mail_of(conn, it.execution) == ["event e1"]
        assert await is_due(conn, it.execution)


@BOTH
async def test_an_event_and_a_wait_that_times_out_agree(conn: Connection, dsn: str, *, reverse: bool) -> None:
    """The event goes to the wait, or it does not; another execution that waits gets it in any case."""
    holder = await held_and_waiting(conn)
    other = await waiting(conn, wait("c"))
    times_out = holder.turn(closes=[closed("a", was_open=True)], guard=0)

    _, matched = await run(
        dsn,
        lambda c: posted(c, event("e1")),
        lambda c: commit(c, holder, times_out),
        reverse=reverse,
    )

    assert matched == reverse
    assert await mail_of(conn, holder.execution) == ([] if reverse else ["event e1"])
    assert await waits_of(conn, holder.execution) == ([] if reverse else [("a", "e1")])
    assert await mail_of(conn, other) == ["event e1"]


@BOTH
async def test_an_event_and_a_turn_that_goes_from_a_filled_wait_to_the_next_agree(
    conn: Connection, dsn: str, *, reverse: bool
) -> None:
    execution = await waiting(conn, wait("a"))
    await posted(conn, event("e1"))
    holder = await claim(conn, await worker(conn), execution)
    goes_on = holder.turn(closes=[closed("a")], waits=[wait("b")], mail=1)

    _, matched = await run(
        dsn,
        lambda c: posted(c, event("e2")),
        lambda c: commit(c, holder, goes_on),
        reverse=reverse,
    )

    assert matched
    assert await mail_of(conn, execution) == ["event e1", "event e2"]
    assert await is_due(conn, execution)


async def test_a_filled_wait_is_closed_while_others_hold_its_key(conn: Connection, dsn: str) -> None:
    execution = await waiting(conn, wait("a"))
    await posted(conn, event("e1"))
    holder = await claim(conn, await worker(conn), execution)

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other, other.transaction():
        await posted(other, event("e2"))
        assert await commit(conn, holder, holder.turn(closes=[closed("a")], mail=1))

    assert await mail_of(conn, execution) == ["event e1"]


@BOTH
async def test_registrations_that_cross_do_not_deadlock(conn: Connection, dsn: str, *, reverse: bool) -> None:
    await posted(conn, event("e1", key="k1"), event("f1", key="k2"))
    one, other = await held(conn), await held(conn)
    first = one.turn(waits=[wait("a", key="k1"), wait("b", key="k2")])
    second = other.turn(waits=[wait("a", key="k2"), wait("b", key="k1")])

    matched = await run(
        dsn, lambda c: commit(c, one, first), lambda c: commit(c, other, second), reverse=reverse
    )

    assert matched == (True, True)
    assert await mail_of(conn, one.execution) == ([] if reverse else ["event e1", "event f1"])
    assert await mail_of(conn, other.execution) == (["event f1", "event e1"] if reverse else [])


@BOTH
async def test_events_that_nobody_has_are_given_to_one_of_two_each(
    conn: Connection, dsn: str, *, reverse: bool
) -> None:
    await posted(conn, event("e1"), event("e2"), event("e3"))
    one, other = await held(conn), await held(conn)

    await run(
        dsn,
        lambda c: commit(c, one, one.turn(waits=[wait("a")])),
        lambda c: commit(c, other, other.turn(waits=[wait("a")])),
        reverse=reverse,
    )

    assert await mail_of(conn, one.execution) == ["event e2" if reverse else "event e1"]
    assert await mail_of(conn, other.execution) == ["event e1" if reverse else "event e2"]


async def test_an_event_that_was_rolled_back_fills_nothing(conn: Connection, dsn: str) -> None:
    holder = await held(conn)

    await race(
        dsn,
        lambda c: posted(c, event("e1")),
        lambda c: commit(c, holder, holder.turn(waits=[wait("a")])),
        roll_back=True,
    )

    assert await waits_of(conn, holder.execution) == [("a", None)]
    assert not await is_due(conn, holder.execution)


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
