"""Races of events that start flows: with each other, with callers, and with those who wait for the same events."""

from __future__ import annotations

import json
from typing import Final

from orchestrator.store import definitions
from orchestrator.store.database import Connection
from orchestrator.store.definitions import Definition
from receiver import inbox
from receiver.inbox import MailItem
from tests.explorer.moves import alone, commit_of, new_execution, owned, post, start
from tests.explorer.of_mail import in_all, posts_and_rolls_back
from tests.explorer.races import Ending, Look, Scene, race
from tests.explorer.sessions import Session
from tests.store.world import FLOW, claim_all, commit, event, mail_of, rows, wait, waiting, worker

BY_ORDER: Final = Definition(FLOW[0], FLOW[1], on="paid", key="/order")


FORGET_THE_NEWER: Final = """
    set session_replication_role = replica;
    delete from waypost.definition where version = '2';
    set session_replication_role = origin
"""
"""What was published cannot be deleted, so definitions outlive an order; this one becomes known anew in each."""


def paid(event_id: str, order_id: str) -> MailItem:
    """Its subject is its own, so that only the business key is shared, and no lock."""
    return event(event_id, key=event_id, data=json.dumps({"order": order_id}))


def started() -> Look:
    """What each program came to, how many executions there are, and which events started one."""

    async def look(conn: Connection, ending: Ending) -> str:
        outcomes = " | ".join(" ".join(found) for found in ending.results.values())
        [(count,)] = await rows(conn, "select count(*) from waypost.execution")
        taken = await rows(conn, "select event_id from waypost.inbox where taken order by 1")
        return f"{outcomes}; {count} by {' '.join(event_id for (event_id,) in taken) or '-'}"

    return look


@race("stored | stored; 1 by a", "stored | stored; 1 by b")
async def two_events_of_one_business_key_start_one_execution(conn: Connection) -> Scene:
    await definitions.publish(conn, [BY_ORDER])
    return Scene({"one": post(paid("a", "o1")), "other": post(paid("b", "o1"))}, started())


@race("stored | conflict; 1 by a", "stored | started; 1 by -")
async def an_event_and_a_caller_of_one_business_key_start_one_execution(conn: Connection) -> Scene:
    await definitions.publish(conn, [BY_ORDER])
    return Scene({"event": post(paid("a", "o1")), "caller": start(new_execution("o1", 1))}, started())


@race("stored stored | stored stored; 2 by a1 a2", "stored stored | stored stored; 2 by b1 b2")
async def events_whose_business_keys_cross_do_not_deadlock(conn: Connection) -> Scene:
    await definitions.publish(conn, [BY_ORDER])
    return Scene(
        {
            "one": post(paid("a1", "o1"), paid("a2", "o2")),
            "other": post(paid("b2", "o2"), paid("b1", "o1")),
        },
        started(),
    )


@race("stored 6", sampled=True)
async def three_batches_whose_business_keys_cross_do_not_deadlock(conn: Connection) -> Scene:
    """Of the keys 1, 2, 3 the first batch is stopped at 2, and the second comes from the end."""
    await definitions.publish(conn, [BY_ORDER])
    return Scene(
        {
            "long": post(*(paid(f"a{n}", f"o{n}") for n in (1, 2, 3))),
            "crossing": post(*(paid(f"b{n}", f"o{4 - n}") for n in (1, 3))),
            "middle": post(paid("c", "o2")),
        },
        in_all,
    )


@race("stored | stored; 1 by b")
async def an_event_whose_forerunner_is_rolled_back_starts_the_execution(conn: Connection) -> Scene:
    await definitions.publish(conn, [BY_ORDER])
    return Scene({"goes": posts_and_rolls_back(paid("a", "o1")), "stays": post(paid("b", "o1"))}, started())


@race("A e1, 2 executions")
async def an_event_that_starts_one_and_a_turn_of_another_that_waits_for_it(conn: Connection) -> Scene:
    await definitions.publish(conn, [BY_ORDER])
    [holder] = await owned(conn, 1)

    async def look(conn: Connection, _: Ending) -> str:
        [(count,)] = await rows(conn, "select count(*) from waypost.execution")
        mail = " ".join(await mail_of(conn, holder.execution)).removeprefix("event ") or "-"
        return f"A {mail}, {count} executions"

    turn = holder.turn(waits=[wait("a", key="e1")])
    return Scene({"event": post(paid("e1", "o1")), "turn": commit_of(holder, turn)}, look)


@race("not started yet", "X: e2", waits=True)
async def an_execution_that_an_event_has_started_and_the_next_of_its_key(conn: Connection) -> Scene:
    """A worker claims what the first event starts, and waits for another: it gets the second, and never the first."""
    await definitions.publish(conn, [Definition(*FLOW, on="paid")])
    await waiting(conn, wait("c"))
    me = await worker(conn)

    async def claims_and_waits(session: Session) -> str:
        async with session.transaction() as mine:
            claimed = await claim_all(mine, me)
        fresh = [holder for holder in claimed if holder.mail_received == 0]
        if not fresh:
            return "not started yet"
        async with session.transaction() as mine:
            assert await commit(mine, fresh[0], fresh[0].turn(waits=[wait("a")]))
        return str(fresh[0].execution)

    async def posts_two(session: Session) -> None:
        for event_id in ("e1", "e2"):
            async with session.transaction() as mine:
                await inbox.post(mine, [event(event_id)])

    async def look(conn: Connection, ending: Ending) -> str:
        found: str = ending.results["worker"]
        if found == "not started yet":
            return found
        mail = await rows(
            conn,
            "select event_id from waypost.mail join waypost.inbox using (inbox_id) where execution_id::text = %s",
            found,
        )
        return f"X: {' '.join(event_id for (event_id,) in mail) or '-'}"

    return Scene({"events": posts_two, "worker": claims_and_waits}, look)


@race("order 1", "order 2", waits=False)
async def an_event_and_a_version_that_becomes_known(conn: Connection) -> Scene:
    await definitions.publish(conn, [BY_ORDER])
    newer = Definition(FLOW[0], "2", on="paid", key="/order")

    async def look(conn: Connection, _: Ending) -> str:
        [(version,)] = await rows(conn, "select version from waypost.execution")
        return f"order {version}"

    return Scene(
        {
            "event": post(paid("e1", "o1")),
            "worker": alone(lambda mine: definitions.publish(mine, [BY_ORDER, newer])),
        },
        look,
        before=FORGET_THE_NEWER,
    )
