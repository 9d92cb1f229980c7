"""Races for mutexes: who asks, who lets go, who gives, who ends an execution, and who takes one over."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from orchestrator.store import mutexes
from orchestrator.store.commits import NewMutex, Turn
from orchestrator.store.database import Connection
from tests.explorer.moves import alone, commit_of, commits_of, owned, post, take_over
from tests.explorer.of_ends import terminate
from tests.explorer.races import Ending, Look, Scene, race
from tests.explorer.sessions import Program, Session
from tests.store.world import Held, asked_mutex, commit, event, order, rows

KEY = "line-7"


def new(path: str = "weld/mutex", *, key: str = KEY, kind: str = "step") -> NewMutex:
    return NewMutex(path, kind, key)


def asks(holder: Held, path: str = "weld/mutex", *, key: str = KEY, release: bool = True) -> Turn:
    return holder.turn(asked_mutex(path), mutexes=[new(path, key=key)], release=release)


def lets_go(holder: Held, path: str = "weld/mutex") -> Turn:
    return holder.turn(("withdrawn", path, {"kind": "mutex"}), lets_go=[path])


async def given(conn: Connection) -> int:
    granted, _ = await mutexes.grant(conn, limit=10)
    return granted


def gives() -> Program:
    """A worker gives what there is to give, until there is no more; it returns how many."""

    async def program(session: Session) -> int:
        count, again = 0, True
        while again:
            async with session.transaction() as conn:
                granted, again = await mutexes.grant(conn, limit=10)
                count += granted
        return count

    return program


async def asked(conn: Connection, holder: Held, path: str = "weld/mutex", *, key: str = KEY) -> None:
    """The execution asks for a mutex, and keeps its worker."""
    assert await commit(conn, holder, asks(holder, path, key=key, release=False))
    holder.position += 1


def has(**executions: UUID) -> Look:
    """Who has a mutex and who waits, after whoever is left to give has given."""

    async def look(conn: Connection, _: Ending) -> str:
        await gives_all(conn)
        told: list[str] = []
        for name, execution in executions.items():
            found = await rows(
                conn,
                "select case when m.ticket is not null then m.granted_at is not null end from waypost.execution e"
                " left join waypost.mutex m using (tenant_id, execution_id) where e.execution_id = %s"
                " and e.finished_at is null order by m.ticket",
                execution,
            )
            word = {(True,): "has", (False,): "waits", (None,): "-", (): "-"}
            states = tuple(granted for (granted,) in found)
            told.append(f"{name} {word.get(states, str(states))}")
        return ", ".join(told)

    return look


async def gives_all(conn: Connection) -> None:
    again = True
    while again:
        _, again = await mutexes.grant(conn, limit=10)


async def standing(conn: Connection, number: int) -> Sequence[Held]:
    """So many executions that have asked for one key, in the order of their ids; the first has it."""
    holders = await owned(conn, number)
    for holder in holders:
        await asked(conn, holder)
    assert await given(conn) == 1
    return holders


@race("A has, B waits", "A waits, B has", waits=False, sampled=True)
async def two_ask_at_once_and_one_gets_it(conn: Connection) -> Scene:
    one, other = await owned(conn, 2)

    programs = {"A": commit_of(one, asks(one)), "B": commit_of(other, asks(other)), "give": gives()}
    return Scene(programs, has(A=one.execution, B=other.execution))


@race("A has, B waits")
async def two_workers_give_one_key(conn: Connection) -> Scene:
    one, other = await owned(conn, 2)
    await asked(conn, one)
    await asked(conn, other)
    return Scene({"give": gives(), "too": gives()}, has(A=one.execution, B=other.execution))


@race("A -, B has", waits=False)
async def a_mutex_is_let_go_while_a_worker_looks(conn: Connection) -> Scene:
    """Whether it sees that or not, the next look gives it: whoever lets one go looks after that."""
    one, other = await standing(conn, 2)
    return Scene(
        {"go": commit_of(one, lets_go(one)), "give": gives()}, has(A=one.execution, B=other.execution)
    )


@race("A -, B -, C has")
async def who_is_next_withdraws_while_it_is_given(conn: Connection) -> Scene:
    """It gets it, and lets it go at once, or it is passed over."""
    one, other, third = await standing(conn, 3)
    assert await commit(conn, one, lets_go(one))
    return Scene(
        {"withdraw": commit_of(other, lets_go(other)), "give": gives()},
        has(A=one.execution, B=other.execution, C=third.execution),
    )


@race("A -, B has", waits=False)
async def who_has_it_is_terminated_while_a_worker_gives(conn: Connection) -> Scene:
    one, other = await standing(conn, 2)
    return Scene({"end": terminate(one.execution), "give": gives()}, has(A=one.execution, B=other.execution))


@race("A -, B -, C has")
async def who_is_next_is_terminated_while_it_is_given(conn: Connection) -> Scene:
    one, other, third = await standing(conn, 3)
    assert await commit(conn, one, lets_go(one))
    return Scene(
        {"end": terminate(other.execution), "give": gives()},
        has(A=one.execution, B=other.execution, C=third.execution),
    )


@race("left 0, A -, B has")
async def an_ask_and_an_end_of_who_asks(conn: Connection) -> Scene:
    """An ask that is committed in that moment goes with its execution."""
    one, other = await owned(conn, 2)
    scene = {"ask": commit_of(one, asks(one, release=False)), "end": terminate(one.execution)}

    async def look(conn: Connection, ending: Ending) -> str:
        [(left,)] = await rows(conn, "select count(*) from waypost.mutex")
        assert await commit(conn, other, asks(other, release=False))
        return f"left {left}, {await has(A=one.execution, B=other.execution)(conn, ending)}"

    return Scene(scene, look)


@race("lost, A has", "let go, A -")
async def a_turn_that_lets_go_and_a_takeover(conn: Connection) -> Scene:
    """The mutex is the execution's: whoever owns it next has it, unless the turn came first."""
    [one] = await standing(conn, 1)
    before = "update waypost.worker set lease_until = now() - interval '1 s', dead_at = now()"

    async def look(conn: Connection, ending: Ending) -> str:
        told = await has(A=one.execution)(conn, ending)
        return f"{'let go' if ending.results['go'] else 'lost'}, {told}"

    return Scene({"go": commit_of(one, lets_go(one)), "over": alone(take_over)}, look, before)


@race("A has, B has")
async def keys_and_rows_that_cross_do_not_deadlock(conn: Connection) -> Scene:
    """Two keys are free, and a worker gives them while a batch has the rows of both who wait, in another order."""
    one, other = await owned(conn, 2)
    await asked(conn, other, key="k1")
    await asked(conn, one, key="k2")
    turns = commits_of((other, other.turn(release=False)), (one, one.turn(release=False)))
    return Scene({"turns": turns, "give": gives()}, has(A=one.execution, B=other.execution))


@race("A has, mail 2")
async def a_grant_and_other_mail_of_the_same_execution(conn: Connection) -> Scene:
    [one] = await owned(conn, 1)
    await asked(conn, one)

    async def look(conn: Connection, ending: Ending) -> str:
        told = await has(A=one.execution)(conn, ending)
        [(mail,)] = await rows(
            conn, "select mail_received from waypost.execution where execution_id = %s", one.execution
        )
        return f"{told}, mail {mail}"

    return Scene({"order": post(order("o", one.execution), event("e")), "give": gives()}, look)
