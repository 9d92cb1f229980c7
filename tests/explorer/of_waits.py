"""Races of events with the waits for them: neither misses the other, and each wait gets the event that is its own."""

from __future__ import annotations

from uuid import UUID

from orchestrator.store import starts, workers
from orchestrator.store.commits import Turn
from orchestrator.store.database import Connection
from tests.explorer.moves import (
    alone,
    asks,
    commit_of,
    commits_of,
    new_execution,
    owned,
    owned_with_message,
    post,
    take_over,
)
from tests.explorer.of_mail import due, posts_and_rolls_back
from tests.explorer.races import Ending, Look, Scene, race
from tests.explorer.sessions import Session
from tests.store.world import (
    Held,
    asked,
    claim_all,
    closed,
    commit,
    event,
    is_due,
    journal_of,
    mail_of,
    message,
    posted,
    reply,
    rows,
    state_of,
    wait,
    waiting,
    waits_of,
    worker,
)


def got(**executions: UUID) -> Look:
    """The mail of each execution, in order, by the name that it has here."""

    async def look(conn: Connection, _: Ending) -> str:
        told: list[str] = []
        for name, execution in executions.items():
            mail = [text.removeprefix("event ") for text in await mail_of(conn, execution)]
            told.append(f"{name} {' '.join(mail) or '-'}")
        return ", ".join(told)

    return look


async def owned_and_waiting(conn: Connection, path: str = "a", *, key: str = "k") -> Held:
    """An execution in a worker's hands, with an open wait."""
    [holder] = await owned(conn, 1)
    assert await commit(conn, holder, holder.turn(waits=[wait(path, key=key)], release=False))
    holder.position += 1
    return holder


async def filled(conn: Connection) -> Held:
    """An execution in a worker's hands, whose wait at `a` is filled by the event e1, which the worker has read."""
    holder = await owned_and_waiting(conn)
    await posted(conn, event("e1"))
    return holder


# -- arrival and registration ------------------------------------------------------------------------------


@race("A e1, B e1")
async def an_event_and_a_registration_meet(conn: Connection) -> Scene:
    """Two executions of one batch wait for it, and both get it."""
    low, high = await owned(conn, 2)
    return Scene(
        {
            "event": post(event("e1")),
            "commit": commits_of((high, high.turn(waits=[wait("a")])), (low, low.turn(waits=[wait("b")]))),
        },
        got(A=low.execution, B=high.execution),
    )


@race("A e1 e2, B e1", "A e2 e1, B e2")
async def two_events_and_the_waits_of_two(conn: Connection) -> Scene:
    """Two waits of one execution, one of another: each event goes to the oldest open wait of each."""
    one = await waiting(conn, wait("a"), wait("b"))
    other = await waiting(conn, wait("c"))
    return Scene({"one": post(event("e1")), "other": post(event("e2"))}, got(A=one, B=other))


@race("A e1, B e2, asleep 0")
async def events_of_two_keys_that_cross_do_not_deadlock(conn: Connection) -> Scene:
    one = await waiting(conn, wait("a", key="k1"))
    other = await waiting(conn, wait("b", key="k2"))
    first, second = event("e1", key="k1"), event("e2", key="k2")

    async def look(conn: Connection, ending: Ending) -> str:
        told = await got(A=one, B=other)(conn, ending)
        asleep = sum([not await is_due(conn, execution) for execution in (one, other)])
        return f"{told}, asleep {asleep}"

    return Scene({"one": post(first, second), "other": post(second, first)}, look)


@race("A e1 e2, asleep 0")
async def events_and_registrations_of_two_keys_that_cross_do_not_deadlock(conn: Connection) -> Scene:
    """The keys are locked in an order that is not that of their texts."""
    keys = await rows(
        conn,
        "select a, b from generate_series(1, 9) a, generate_series(1, 9) b"
        " where a < b and waypost.event_key(1, 'paid', 'k' || a) > waypost.event_key(1, 'paid', 'k' || b) limit 1",
    )
    low, high = (f"k{n}" for n in keys[0])
    [holder] = await owned(conn, 1)
    turn = holder.turn(waits=[wait("a", key=low), wait("b", key=high)])

    async def look(conn: Connection, ending: Ending) -> str:
        told = await got(A=holder.execution)(conn, ending)
        return f"{told}, asleep {int(not await is_due(conn, holder.execution))}"

    events = post(event("e1", key=low), event("e2", key=high))
    return Scene({"events": events, "turn": commit_of(holder, turn)}, look)


@race("A e1 e2")
async def an_event_and_a_turn_that_goes_from_a_filled_wait_to_the_next(conn: Connection) -> Scene:
    holder = await filled(conn)
    turn = holder.turn(closes=[closed("a")], waits=[wait("b")], mail=1)
    return Scene({"event": post(event("e2")), "turn": commit_of(holder, turn)}, got(A=holder.execution))


@race("A e1", waits=False)
async def an_event_and_a_turn_that_only_closes_a_filled_wait(conn: Connection) -> Scene:
    """It needs no key, so nobody waits: a filled wait changes no more."""
    holder = await filled(conn)
    turn = holder.turn(closes=[closed("a")], mail=1)
    return Scene({"event": post(event("e2")), "turn": commit_of(holder, turn)}, got(A=holder.execution))


@race("matched, A -, C e1", "not matched, A e1, C e1")
async def an_event_and_a_wait_that_times_out_agree(conn: Connection) -> Scene:
    """The event goes to the wait, or the wait is gone; another execution that waits gets it in any case."""
    return await timeout(conn)


async def timeout(conn: Connection, *, locks: bool = True, guards: bool = True) -> Scene:
    """`locks`: the commit locks the key of the wait that it closes. `guards`: it compares what it has loaded."""
    holder = await owned_and_waiting(conn)
    other = await waiting(conn, wait("c"))
    turn = holder.turn(closes=[closed("a", was_open=locks)], guard=0 if guards else None)

    async def look(conn: Connection, ending: Ending) -> str:
        told = await got(A=holder.execution, C=other)(conn, ending)
        return f"{'matched' if ending.results['turn'] else 'not matched'}, {told}"

    return Scene({"event": post(event("e1")), "turn": commit_of(holder, turn)}, look)


@race("A e1, due 0")
async def a_release_to_paused_and_an_event_for_its_wait(conn: Connection) -> Scene:
    holder = await owned_and_waiting(conn)
    return pause(holder, holder.turn(status="paused"))


@race("A e1, due 0")
async def a_release_to_paused_that_registers_and_an_event(conn: Connection) -> Scene:
    [holder] = await owned(conn, 1)
    return pause(holder, holder.turn(status="paused", waits=[wait("a")]))


def pause(holder: Held, turn: Turn) -> Scene:
    async def look(conn: Connection, ending: Ending) -> str:
        told = await got(A=holder.execution)(conn, ending)
        return f"{told}, due {int(await is_due(conn, holder.execution))}"

    return Scene({"event": post(event("e1")), "pause": commit_of(holder, turn)}, look)


@race("reply r1, event e1, event e2, due 1", "event e1, event e2, reply r1, due 1")
async def events_of_two_keys_for_one_and_a_reply_to_it(conn: Connection) -> Scene:
    [holder] = await owned(conn, 1)
    message_id = await asks(conn, holder)
    assert await commit(conn, holder, holder.turn(waits=[wait("a", key="k1"), wait("b", key="k2")]))

    async def look(conn: Connection, ending: Ending) -> str:
        mail = await mail_of(conn, holder.execution)
        return f"{', '.join(mail)}, due {int(await is_due(conn, holder.execution))}"

    events = post(event("e1", key="k1"), event("e2", key="k2"))
    return Scene({"events": events, "reply": post(reply("r1", message_id))}, look)


# -- the shelf ---------------------------------------------------------------------------------------------


@race("A e1 e2")
async def two_waits_of_one_key_three_on_the_shelf_and_an_event(conn: Connection) -> Scene:
    await posted(conn, event("e1"), event("e2"), event("e3"))
    [holder] = await owned(conn, 1)
    turn = holder.turn(waits=[wait("a"), wait("b")])
    return Scene({"event": post(event("e4")), "turn": commit_of(holder, turn)}, got(A=holder.execution))


@race("A e1 e2")
async def a_turn_that_has_not_read_an_event_waits_for_the_next_of_its_key(conn: Connection) -> Scene:
    holder = await filled(conn)
    turn = holder.turn(waits=[wait("b")])
    return Scene({"event": post(event("e2")), "turn": commit_of(holder, turn)}, got(A=holder.execution))


@race("A e1, B e2", "A e2, B e1")
async def two_that_take_from_the_shelf_what_nobody_has(conn: Connection) -> Scene:
    await posted(conn, event("e1"), event("e2"), event("e3"))
    low, high = await owned(conn, 2)
    return Scene(
        {
            "low": commit_of(low, low.turn(waits=[wait("a")])),
            "high": commit_of(high, high.turn(waits=[wait("a")])),
        },
        got(A=low.execution, B=high.execution),
    )


@race("A e1 f1, B -", "A -, B f1 e1")
async def registrations_of_two_keys_that_cross_do_not_deadlock(conn: Connection) -> Scene:
    await posted(conn, event("e1", key="k1"), event("f1", key="k2"))
    low, high = await owned(conn, 2)
    return Scene(
        {
            "low": commit_of(low, low.turn(waits=[wait("a", key="k1"), wait("b", key="k2")])),
            "high": commit_of(high, high.turn(waits=[wait("a", key="k2"), wait("b", key="k1")])),
        },
        got(A=low.execution, B=high.execution),
    )


@race("the event came before X: -", "the event came after X: e1")
async def an_event_and_the_start_of_an_execution_that_waits_for_it(conn: Connection) -> Scene:
    """Another has the event, so X gets it only if it came after X was created, whenever X registers its wait."""
    await waiting(conn, wait("c"))
    execution, me = UUID(int=0xA), await worker(conn)
    new = new_execution(None, 1, execution=execution)

    async def starts_and_waits(session: Session) -> None:
        async with session.transaction() as mine:
            await starts.start(mine, [new])
        async with session.transaction() as mine:
            [holder] = [one for one in await claim_all(mine, me) if one.execution == execution]
        async with session.transaction() as mine:
            assert await commit(mine, holder, holder.turn(waits=[wait("a")]))

    async def look(conn: Connection, _: Ending) -> str:
        [(after,)] = await rows(
            conn,
            "select inbox_id > events_after from waypost.inbox, waypost.execution where execution_id = %s",
            execution,
        )
        mail = " ".join(await mail_of(conn, execution)).removeprefix("event ") or "-"
        return f"the event came {'after' if after else 'before'} X: {mail}"

    return Scene({"event": post(event("e1")), "X": starts_and_waits}, look)


@race("A -")
async def a_registration_and_an_event_that_is_rolled_back(conn: Connection) -> Scene:
    [holder] = await owned(conn, 1)
    turn = holder.turn(waits=[wait("a")])
    return Scene(
        {"event": posts_and_rolls_back(event("e1")), "turn": commit_of(holder, turn)}, got(A=holder.execution)
    )


# -- owners ------------------------------------------------------------------------------------------------


@race(
    "matched, withdrawn due, waits 1: started asked asked orphaned",
    "matched, withdrawn due, waits 1: started asked asked",
    "not matched, due, waits 0: started asked orphaned",
)
async def a_stale_turn_that_asks_waits_and_takes_back_and_a_takeover_with_a_claim(conn: Connection) -> Scene:
    """All of a turn or nothing: its message, its wait, what it takes back, and the mail of that."""
    holder, message_id = await owned_with_message(conn)
    await workers.retire(conn, me=holder.me)
    heir = await worker(conn)
    turn = holder.turn(
        asked("book"),
        messages=[message("book")],
        take_back=[message_id],
        waits=[wait("a")],
        release=False,
        asks=True,
    )

    async def other(session: Session) -> None:
        async with session.transaction() as mine:
            await take_over(mine)
        async with session.transaction() as mine:
            await claim_all(mine, heir)

    async def look(conn: Connection, ending: Ending) -> str:
        states = [await state_of(conn, message_id)]
        states += [s for (s,) in await rows(conn, "select state from waypost.outbox where path = 'book'")]
        waits = len(await waits_of(conn, holder.execution))
        kinds = " ".join(await journal_of(conn, holder.execution))
        matched = "matched" if ending.results["commit"] else "not matched"
        return f"{matched}, {' '.join(states)}, waits {waits}: {kinds}"

    return Scene({"commit": commit_of(holder, turn), "other": other}, look)


# -- three at once -----------------------------------------------------------------------------------------


@race("taken 0: A e1, B e1", "taken 2: A -, B -", "taken 2: A e1, B e1", sampled=True)
async def three_ways_a_registration_an_event_and_a_takeover(conn: Connection) -> Scene:
    low, high = await owned(conn, 2)
    await workers.retire(conn, me=low.me)

    async def look(conn: Connection, ending: Ending) -> str:
        told = await got(A=low.execution, B=high.execution)(conn, ending)
        return f"taken {len(ending.results['takeover'])}: {told}"

    return Scene(
        {
            "commit": commits_of(
                (high, high.turn(waits=[wait("a")], release=False)),
                (low, low.turn(waits=[wait("b")], release=False)),
            ),
            "event": post(event("e1")),
            "takeover": alone(take_over),
        },
        look,
    )


@race("due 2, mail 3", sampled=True)
async def three_ways_a_commit_replies_and_an_event(conn: Connection) -> Scene:
    low, high = await owned(conn, 2)
    to_low, to_high = await asks(conn, low), await asks(conn, high)
    assert await commit(conn, low, low.turn(waits=[wait("a")], release=False))
    low.position += 1

    async def look(conn: Connection, ending: Ending) -> str:
        mail = sum([len(await mail_of(conn, holder.execution)) for holder in (low, high)])
        return f"{await due(low.execution, high.execution)(conn, ending)}, mail {mail}"

    return Scene(
        {
            "commit": commits_of((high, high.turn()), (low, low.turn())),
            "replies": post(reply("r2", to_high), reply("r1", to_low)),
            "event": post(event("e1")),
        },
        look,
    )
