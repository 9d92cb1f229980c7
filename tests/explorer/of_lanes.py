"""Races about lanes: what enters one, what ends in it, who lets the next go, and dead letters that are put back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final
from uuid import UUID, uuid5

from orchestrator.store import commits
from orchestrator.store import outbox as people
from orchestrator.store.commits import NewEvent
from orchestrator.store.database import Connection
from relay import outbox
from tests.explorer.moves import (
    DELIVERED,
    alone,
    asks,
    claim_messages,
    commit_of,
    owned,
    result,
    settled,
    take_back,
)
from tests.explorer.races import Ending, Look, Scene, race
from tests.explorer.sessions import Program, Session
from tests.relay.given import NEVER
from tests.store.world import Held, message, rows

TYPE: Final = "paid"
ORDERS: Final = "orders"
IN_ORDER: Final = """
    insert into waypost.endpoint (tenant_id, name, url, ordered_by) values (1, %s, 'http://orders', 'execution')
        on conflict do nothing
"""
ENDPOINT: Final = "books"
BODY: Final = b'{"type": "paid", "source": "order"}'
SUBSCRIBED: Final = """
    with at as (
        insert into waypost.endpoint (tenant_id, name, url) values (1, %s, 'http://books')
            on conflict do nothing
    )
    insert into waypost.subscription (tenant_id, type, endpoint, ordered_by) values (1, %s, %s, 'key')
"""
DIED: Final = "update waypost.outbox set state = 'dead', fault = 'refused' where state in ('due', 'waiting')"
MESSAGES: Final = "select message_id, lane, state from waypost.outbox order by number"


def emitted(holder: Held, *lanes: str) -> commits.Turn:
    """A turn that leaves an event in each of `lanes`; it keeps its execution."""
    turn = holder.turn(release=False)
    turn.events = [
        NewEvent(uuid5(holder.execution, lane), f"emit-{lane}", TYPE, lane, BODY, {}, NEVER, hops=0)
        for lane in lanes
    ]
    return turn


def emits(holder: Held, *lanes: str) -> Program:
    """The commit of a turn that leaves events."""

    async def call(conn: Connection) -> bool:
        turn = emitted(holder, *lanes)
        return bool(await commits.commit(conn, [turn], me=holder.me))

    return alone(call)


async def holders(conn: Connection, *lanes: Sequence[str]) -> list[Held]:
    """An execution for each of `lanes`, which has left an event in each of those already."""
    await conn.execute(SUBSCRIBED, (ENDPOINT, TYPE, ENDPOINT))
    found = await owned(conn, len(lanes))
    for holder, some in zip(found, lanes, strict=True):
        if some:
            assert await commits.commit(conn, [emitted(holder, *some)], me=holder.me)
            holder.position += 1
    return found


async def advance(conn: Connection) -> int:
    """The lanes of events go on."""
    return await outbox.advance(conn, limit=100, commands=False)


def states() -> Look:
    """Each lane with the states of its messages, in their order, once everybody has looked who is left to."""

    async def look(conn: Connection, _: Ending) -> str:
        await advance(conn)
        lanes: dict[str, list[str]] = {}
        for _, lane, state in await rows(conn, MESSAGES):
            lanes.setdefault(lane, []).append(state)
        return ", ".join(f"{lane} {' '.join(lanes[lane])}" for lane in sorted(lanes))

    return look


async def relay_with_heads(conn: Connection) -> Program:
    """A relay that has sent the heads of all lanes: it settles that, and then lets the next ones go."""
    claimed = await claim_messages(conn)

    async def program(session: Session) -> None:
        await settled(session, *(result(message, DELIVERED) for message in claimed))
        async with session.transaction() as mine:
            await outbox.advance(mine, limit=100, commands=any(message.command for message in claimed))

    return program


# -- the next of a lane --------------------------------------------------------------------------------------


@race("a delivered due")
async def an_event_that_enters_a_lane_and_the_end_of_the_only_one_in_it(conn: Connection) -> Scene:
    """It goes at once, or when the lane is looked at; it does not wait behind nobody."""
    _, other = await holders(conn, ["a"], [])
    relay = await relay_with_heads(conn)
    return Scene({"relay": relay, "event": emits(other, "a")}, states())


@race("a delivered due waiting")
async def two_looks_at_a_lane_in_which_one_has_ended(conn: Connection) -> Scene:
    """There may be several reasons to look. One at a time goes, all the same."""
    await holders(conn, ["a"], ["a"], ["a"])
    relay = await relay_with_heads(conn)
    before = (
        "insert into waypost.lane_free (tenant_id, command, endpoint, lane) values (1, false, 'books', 'a')"
    )
    return Scene({"relay": relay, "sweep": alone(advance)}, states(), before)


@race("a due waiting, b due waiting", sampled=True)
async def an_event_for_two_lanes_and_two_looks_at_them_do_not_deadlock(conn: Connection) -> Scene:
    """One relay looks at the second lane, another one at both, and an event enters both."""
    _, both = await holders(conn, ["a", "b"], [])

    async def look_at_one(conn: Connection) -> int:
        return await outbox.advance(conn, limit=1, commands=False)

    programs = {"one": alone(look_at_one), "both": emits(both, "a", "b"), "look": alone(advance)}
    before = """
        insert into waypost.lane_free (tenant_id, command, endpoint, lane)
        select 1, false, 'books', lane from unnest(array['b', 'a', 'b']) lane
    """
    return Scene(programs, states(), before)


@race("delivered withdrawn due", sampled=True)
async def the_next_command_of_a_lane_that_is_taken_back_as_it_is_let_go(conn: Connection) -> Scene:
    """The one behind it goes."""
    await conn.execute(IN_ORDER, [ORDERS])
    [holder] = await owned(conn, 1)
    asked: dict[str, UUID] = {}
    for path in ("one", "two", "three"):
        asked[path] = await asks(conn, holder, path, new=message(path, endpoint=ORDERS))
    relay = await relay_with_heads(conn)

    async def look(conn: Connection, _: Ending) -> str:
        await outbox.advance(conn, limit=100, commands=True)
        return " ".join([state for _, _, state in await rows(conn, MESSAGES)])

    return Scene({"relay": relay, "turn": commit_of(holder, take_back(holder, asked["two"]))}, look)


# -- dead letters --------------------------------------------------------------------------------------------


async def dead_letters(conn: Connection, *lanes: str) -> list[UUID]:
    """One in each of `lanes`."""
    await holders(conn, *([lane] for lane in lanes))
    await conn.execute(DIED)
    return [message for message, _, _ in await rows(conn, MESSAGES)]


def puts_back(*messages: UUID) -> Program:
    """A person puts dead letters back; how many still were some."""

    async def call(conn: Connection) -> int:
        return len(await people.put_back(conn, messages, spread=timedelta(0), tenant=1))

    return alone(call)


def told(*names: str) -> Look:
    async def look(conn: Connection, ending: Ending) -> str:
        words = sorted(str(ending.results[name]) for name in names)
        return f"{' and '.join(words)}: {await states()(conn, ending)}"

    return look


@race("0 and 1: a due")
async def two_people_who_put_one_dead_letter_back(conn: Connection) -> Scene:
    dead = await dead_letters(conn, "a")
    return Scene({"ann": puts_back(*dead), "bob": puts_back(*dead)}, told("ann", "bob"))
