"""The explorer itself: it sees who waits for whom, lets the server end deadlocks, and survives what breaks off."""

from __future__ import annotations

from typing import Final

import psycopg
import pytest

from tests.cluster import EMBEDDED
from tests.explorer.ground import Ground
from tests.explorer.orders import follow, name_of
from tests.explorer.sessions import Program, Session
from tests.store.world import begun, order, posted, rows

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("grounds", [EMBEDDED], indirect=True, ids=["pg18"]),
]

LOCK: Final = "select pg_advisory_xact_lock(%s)"


def locks(*keys: int) -> Program:
    """A transaction that takes locks, with a stop after each."""

    async def program(session: Session) -> str:
        async with session.transaction() as conn:
            for key in keys:
                await conn.execute(LOCK, (key,))
                await session.stop(f"has {key}")
        return "done"

    return program


async def test_who_waits_takes_no_step_until_the_other_has_ended(ground: Ground) -> None:
    explorer = await ground.explorer()

    walk = await explorer.run([locks(1), locks(1)], follow("01"))

    assert walk.waited == {1}
    assert name_of(walk.choices) == "010011"
    assert [choice.among for choice in walk.choices] == [(0, 1), (0, 1), (0,), (0,), (1,), (1,)]
    assert walk.finished == [0, 1]
    assert walk.results == ["done", "done"]


async def test_who_meets_nobody_does_not_wait(ground: Ground) -> None:
    explorer = await ground.explorer()

    walk = await explorer.run([locks(1), locks(2)], follow("010101"))

    assert walk.waited == set()
    assert name_of(walk.choices) == "010101"


async def test_a_deadlock_is_ended_by_the_server_and_told(ground: Ground) -> None:
    explorer = await ground.explorer()

    walk = await explorer.run([locks(1, 2), locks(2, 1)], follow("0101"))

    failed = [one for one in walk.results if isinstance(one, psycopg.errors.DeadlockDetected)]
    assert (len(failed), walk.results.count("done")) == (1, 1)


async def test_a_deadlock_of_three_is_ended_too(ground: Ground) -> None:
    explorer = await ground.explorer()

    walk = await explorer.run([locks(1, 2), locks(2, 3), locks(3, 1)], follow("012012"))

    failed = [one for one in walk.results if isinstance(one, psycopg.errors.DeadlockDetected)]
    assert len(failed) == 1
    assert walk.results.count("done") == 2


async def test_stops_in_functions_are_steps(ground: Ground) -> None:
    explorer = await ground.explorer()

    async def program(session: Session) -> None:
        await session.conn.execute("select explorer.stop('one'), explorer.stop('two')")

    walk = await explorer.run([program], follow(""))

    assert walk.steps == [(0, "start"), (0, "one"), (0, "two")]


async def test_a_run_that_breaks_off_does_not_spoil_the_next(ground: Ground) -> None:
    """One is in the middle of a transaction, the other waits for it, and nobody says how it goes on."""
    explorer = await ground.explorer()
    steps = iter([0, 1])

    with pytest.raises(RuntimeError):
        await explorer.run([locks(1), locks(1)], lambda _: next(steps))

    again = await (await ground.explorer()).run([locks(1), locks(1)], follow("01"))
    assert again.results == ["done", "done"]


async def test_what_a_race_wrote_is_gone_before_the_next_order(ground: Ground) -> None:
    ground.clear()
    execution = await begun(ground.conn)
    ground.keep()
    await posted(ground.conn, order("o1", execution))

    ground.restore("update waypost.execution set priority = 7")

    found = await rows(ground.conn, "select execution_id, mail_received, priority from waypost.execution")
    assert found == [(execution, 0, 7)]
    assert await rows(ground.conn, "select * from waypost.inbox") == []
    [got] = await posted(ground.conn, order("o1", execution))
    assert (got.outcome, got.inbox_id) == ("stored", 1)


async def test_what_is_broken_is_said(ground: Ground) -> None:
    ground.clear()
    await begun(ground.conn)
    await ground.conn.execute("update waypost.execution set mail_received = 1")

    assert any(complaint.startswith("mail count: ") for complaint in ground.broken())
    ground.clear()
    assert ground.broken() == []
