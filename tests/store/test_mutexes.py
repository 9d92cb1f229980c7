"""Mutexes in the database: in turn, one holder of a key, and no lock service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import UUID

import psycopg
import pytest

from orchestrator.store import mutexes
from orchestrator.store.commits import NewMutex
from tests.invariants import broken
from tests.store.world import (
    Connection,
    Held,
    asked_mutex,
    commit,
    held,
    is_due,
    mail_of,
    order,
    posted,
    rows,
)

pytestmark = pytest.mark.postgres


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        yield conn


async def asking(conn: Connection, key: str = "k", *, kind: str = "step", status: str = "open") -> Held:
    """An execution that waits for a mutex, and for nothing else; `status` may say that it is stopped meanwhile."""
    holder = await held(conn)
    path = "flow:mutex" if kind == "flow" else "a/mutex"
    turn = holder.turn(asked_mutex(path, key=key), mutexes=[NewMutex(path, kind, key)], status=status)
    assert await commit(conn, holder, turn)
    return holder


async def has(conn: Connection, *executions: UUID) -> list[bool]:
    found = dict(await rows(conn, "select execution_id, granted_at is not null from waypost.mutex"))
    return [found[execution] for execution in executions]


async def test_a_key_goes_to_whoever_asked_first_and_others_wait(conn: Connection) -> None:
    one, other, free = await asking(conn), await asking(conn), await asking(conn, "l")

    assert await mutexes.grant(conn, limit=10) == (2, False)
    assert await mutexes.grant(conn, limit=10) == (0, False)

    assert await has(conn, one.execution, other.execution, free.execution) == [True, False, True]
    assert [await is_due(conn, it.execution) for it in (one, other, free)] == [True, False, True]
    assert await mail_of(conn, other.execution) == []
    assert await broken(conn) == []


async def test_the_key_of_a_flow_and_that_of_a_step_are_two(conn: Connection) -> None:
    await asking(conn, kind="flow")
    await asking(conn, kind="step")

    assert await mutexes.grant(conn, limit=10) == (2, False)


async def test_more_keys_than_one_transaction_gives_are_given_in_the_next(conn: Connection) -> None:
    for n in range(3):
        await asking(conn, f"k{n}")

    assert await mutexes.grant(conn, limit=2) == (2, True)
    assert await mutexes.grant(conn, limit=2) == (1, False)


async def test_who_is_held_keeps_its_turn_and_is_not_woken(conn: Connection) -> None:
    one, other = await asking(conn, status="held"), await asking(conn)

    assert await mutexes.grant(conn, limit=10) == (1, False)

    assert await has(conn, one.execution, other.execution) == [True, False]
    assert not await is_due(conn, one.execution)


async def test_a_turn_that_does_not_match_asks_for_nothing_and_lets_nothing_go(conn: Connection) -> None:
    one = await held(conn)
    asks = one.turn(asked_mutex("a/mutex"), mutexes=[NewMutex("a/mutex", "step", "k")], release=False)
    assert await commit(conn, one, asks)
    one.position += 1
    one.fence += 1  # of another owner

    assert not await commit(conn, one, one.turn(lets_go=["a/mutex"]))
    assert not await commit(conn, one, one.turn(mutexes=[NewMutex("b/mutex", "step", "k")]))

    assert await rows(conn, "select path from waypost.mutex") == [("a/mutex",)]


async def test_who_waits_in_vain_is_listed_behind_whoever_has_it(conn: Connection) -> None:
    one, other, third = await asking(conn), await asking(conn), await asking(conn)
    await mutexes.grant(conn, limit=10)

    found = await mutexes.of_key(conn, "k", tenant=1, limit=10)
    assert [(row.execution_id, row.granted_at is not None, row.ahead, row.waiting) for row in found] == [
        (str(one.execution), True, 0, 2), (str(other.execution), False, 0, 2), (str(third.execution), False, 1, 2),
    ]  # fmt: skip
    assert await mutexes.held(conn, tenant=1, limit=10) == found[:1]
    assert await mutexes.around(conn, str(third.execution), tenant=1) == [found[0], found[2]]


async def test_mail_that_came_meanwhile_is_before_the_grant(conn: Connection) -> None:
    one = await asking(conn)
    await posted(conn, order("o", one.execution))

    await mutexes.grant(conn, limit=10)

    [(ticket,)] = await rows(conn, "select ticket from waypost.mutex")
    assert await mail_of(conn, one.execution) == ["order o", f"result {ticket}/granted"]
