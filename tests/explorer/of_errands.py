"""Races of applications that ask for something in their own transactions: with each other, and with all others."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

import psycopg

from orchestrator.store import definitions, errands
from orchestrator.store.database import Connection
from orchestrator.store.definitions import Definition
from tests.explorer.moves import commit_of, commits_of, new_execution, owned, post, start
from tests.explorer.of_waits import got
from tests.explorer.races import Ending, Look, Scene, race
from tests.explorer.sessions import Program, Session
from tests.store.world import FLOW, event, is_due, rows, wait, waiting

Ask = Callable[[Connection], Awaitable[Any]]


def starts(key: str, given: str = "1") -> Ask:
    """`waypost.start` of the flow of all races; `given` is its input, as in `new_execution`."""
    parameters: errands.Parameters = {
        "flow": FLOW[0],
        "input": given,
        "key": key,
        "version": None,
        "traceparent": None,
    }
    return lambda conn: errands.give_later(conn, errands.START, parameters)


def signals(event_id: str, key: str = "k") -> Ask:
    parameters: errands.Parameters = {
        "type": "paid",
        "key": key,
        "data": json.dumps({"order": "o1"}),
        "id": event_id,
        "traceparent": None,
    }
    return lambda conn: errands.give_later(conn, errands.SIGNAL, parameters)


def application(*asks: Ask, keeps: bool = True) -> Program:
    """An application's transaction. It returns what it was told last; or, when another was faster, the error's code."""

    async def program(session: Session) -> str:
        told = ""
        try:
            async with session.conn.transaction(force_rollback=not keeps):
                for ask in asks:
                    told = str(await ask(session.conn))
                await session.stop("before the end")
        except (psycopg.errors.SerializationFailure, psycopg.DatabaseError) as error:
            if error.diag.sqlstate not in ("40001", "WP409"):
                raise
            return error.diag.sqlstate
        return told

    return program


def executions(*names: str) -> Look:
    """How many executions there are, and which programs were told one that is there, or which error."""

    async def look(conn: Connection, ending: Ending) -> str:
        there = {
            str(execution) for (execution,) in await rows(conn, "select execution_id from waypost.execution")
        }
        told = ["told" if ending.results[name] in there else str(ending.results[name])[:5] for name in names]
        return f"{len(there)}: {', '.join(told)}"

    return look


KNOWN: Final = Definition(*FLOW)


@race("1: told, told", "1: told, 40001", "1: 40001, told")
async def two_applications_that_start_one_key(conn: Connection) -> Scene:
    """Whoever was told the id of an execution that is not to be is told so at its commit."""
    await definitions.publish(conn, [KNOWN])
    return Scene(
        {"one": application(starts("o1")), "other": application(starts("o1"))}, executions("one", "other")
    )


@race("1: told, WP409", "1: WP409, told")
async def two_applications_that_start_one_key_for_different_things(conn: Connection) -> Scene:
    await definitions.publish(conn, [KNOWN])
    return Scene(
        {"one": application(starts("o1")), "other": application(starts("o1", "2"))},
        executions("one", "other"),
    )


@race("1: told", waits=False)
async def an_application_that_rolls_back_and_one_that_starts_the_same_key(conn: Connection) -> Scene:
    await definitions.publish(conn, [KNOWN])
    return Scene(
        {"goes": application(starts("o1"), keeps=False), "stays": application(starts("o1"))},
        executions("stays"),
    )


@race("1: told, exists", "1: told, started", "1: 40001, started")
async def an_application_and_a_client_that_start_one_key(conn: Connection) -> Scene:
    """The client's input is equal, though its digest is not."""
    await definitions.publish(conn, [KNOWN])

    async def look(conn: Connection, ending: Ending) -> str:
        return f"{await executions('application')(conn, ending)}, {ending.results['client'][0]}"

    return Scene({"application": application(starts("o1")), "client": start(new_execution("o1", 1))}, look)


@race("A e1, B e2, asleep 0")
async def applications_whose_signals_cross_do_not_deadlock(conn: Connection) -> Scene:
    one = await waiting(conn, wait("a", key="k1"))
    other = await waiting(conn, wait("b", key="k2"))

    async def look(conn: Connection, ending: Ending) -> str:
        told = await got(A=one, B=other)(conn, ending)
        asleep = sum([not await is_due(conn, execution) for execution in (one, other)])
        return f"{told}, asleep {asleep}"

    return Scene(
        {
            "one": application(signals("e1", "k1"), signals("e2", "k2")),
            "other": application(signals("e2", "k2"), signals("e1", "k1")),
        },
        look,
    )


@race("A e1 e2")
async def an_application_that_gives_two_of_a_key_and_a_turn_that_waits_for_both(conn: Connection) -> Scene:
    """The second comes in a call of its own, and locks nothing that the first has not."""
    low, high = await owned(conn, 2)
    turns = commits_of(
        (high, high.turn(waits=[wait("c", key="k2")])), (low, low.turn(waits=[wait("a"), wait("b")]))
    )
    asked = application(signals("e1"), signals("e3", "k2"), signals("e2"))
    return Scene({"application": asked, "turns": turns}, got(A=low.execution))


@race("A e1")
async def a_signal_of_an_application_and_a_turn_that_waits_for_it(
    conn: Connection,
) -> Scene:
    [holder] = await owned(conn, 1)
    return Scene(
        {
            "application": application(signals("e1")),
            "turn": commit_of(holder, holder.turn(waits=[wait("a")])),
        },
        got(A=holder.execution),
    )


@race("A e1 e2, 2", "A e2 e1, 2", "A e2, 2")
async def an_application_that_signals_and_starts_and_a_receiver(conn: Connection) -> Scene:
    """Both hold the row of A for as long as their commits take. Both start o1: the application is to repeat it when it
    was told another id than that of the execution that the event started.
    """
    await definitions.publish(conn, [replace(KNOWN, on="placed", key="/order")])
    waits = await waiting(conn, wait("a"), wait("b"))
    placed = event("e3", key="o1", type="placed", data='{"order": "o1"}')

    async def look(conn: Connection, ending: Ending) -> str:
        [(count,)] = await rows(conn, "select count(*) from waypost.execution")
        return f"{await got(A=waits)(conn, ending)}, {count}"

    asked = application(starts("o1", '{"order": "o1"}'), signals("e1"))
    return Scene({"application": asked, "receiver": post(placed, event("e2"))}, look)
