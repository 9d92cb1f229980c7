"""Races of events that flows and applications emit: with each other, with waits, and with events from outside."""

from __future__ import annotations

import json
from typing import Final

from orchestrator.store import definitions, handing
from orchestrator.store.database import Connection
from orchestrator.store.definitions import Definition
from tests.explorer.moves import commit_of, owned, post
from tests.explorer.of_triggers import started
from tests.explorer.of_waits import got
from tests.explorer.races import Ending, Scene, race
from tests.explorer.sessions import Program, Session
from tests.store.world import FLOW, event, rows, wait, waiting

EMIT: Final = """
    insert into waypost.emitted (tenant_id, emitter, source, event_id, type, key, data, hops)
    values (1, %s, 'waypost:' || %s, %s, 'paid', %s, %s, %s)
"""


async def emitted(
    conn: Connection, event_id: str, *, key: str = "k", by: str = "one", order: str = "o1", hops: int = 1
) -> None:
    """An event as the commit of a turn leaves it."""
    await conn.execute(EMIT, (by, by, event_id, key, json.dumps({"order": order}), hops))


def hands() -> Program:
    """A worker that gives what there is, until nothing is left."""

    async def program(session: Session) -> list[str]:
        found: list[str] = []
        while True:
            async with session.transaction() as mine:
                handed = await handing.hand_on(mine)
            if not handed:
                return found
            found += [one.outcome for one in handed]

    return program


async def none_left(conn: Connection, ending: Ending) -> str:
    """What was given, by whoever was first; and what was left."""
    [(left,)] = await rows(conn, "select count(*) from waypost.emitted")
    order = await rows(conn, "select event_id from waypost.inbox order by inbox_id")
    return f"{' '.join(event_id for (event_id,) in order)}; {left} left"


@race("e1 e3 e2; 0 left")
async def two_workers_that_give_the_same_events_give_each_once_in_order(conn: Connection) -> Scene:
    await emitted(conn, "e1")
    await emitted(conn, "e2", key="other")
    await emitted(conn, "e3", by="two", key="more")
    return Scene({"one": hands(), "other": hands()}, none_left)


@race("A e1")
async def an_event_that_is_given_while_a_turn_begins_to_wait_for_it(conn: Connection) -> Scene:
    [holder] = await owned(conn, 1)
    await emitted(conn, "e1")

    turn = commit_of(holder, holder.turn(waits=[wait("a")]))
    return Scene({"gives": hands(), "turn": turn}, got(A=holder.execution))


@race("A e1 e2, B e1 e2", "A x1 x2, B x1 x2")
async def events_from_inside_and_outside_whose_keys_cross_do_not_deadlock(conn: Connection) -> Scene:
    """Both go to both executions; they get those of whoever was first."""
    a = await waiting(conn, wait("a", key="k1"), wait("b", key="k2"))
    b = await waiting(conn, wait("a", key="k2"), wait("b", key="k1"))
    await emitted(conn, "e1", key="k1")
    await emitted(conn, "e2", key="k2", by="two")
    outside = post(event("x2", key="k2"), event("x1", key="k1"))
    return Scene({"gives": hands(), "outside": outside}, got(A=a, B=b))


@race("stored | stored; 1 by x1", "stored | stored; 1 by e1")
async def an_event_from_inside_and_one_from_outside_of_one_business_key_start_one_execution(
    conn: Connection,
) -> Scene:
    await definitions.publish(conn, [Definition(*FLOW, on="paid", key="/order")])
    await emitted(conn, "e1")
    return Scene(
        {"outside": post(event("x1", key="x", data=json.dumps({"order": "o1"}))), "gives": hands()}, started()
    )
