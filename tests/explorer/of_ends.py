"""Races of a person who ends an execution at once, with whoever has it in hand."""

from __future__ import annotations

from uuid import UUID

from psycopg.errors import SerializationFailure

from orchestrator.store import terminating
from orchestrator.store.database import Connection
from tests.explorer.moves import (
    DELIVERED,
    claim,
    claim_messages,
    commit_of,
    owned,
    owned_with_message,
    post,
    result,
    settle,
    sleeping_with_message,
)
from tests.explorer.of_waits import owned_and_waiting
from tests.explorer.races import Ending, Scene, race
from tests.explorer.sessions import Program, Session
from tests.store.world import (
    asked,
    begun,
    commit,
    event,
    journal_of,
    mail_of,
    message,
    reply,
    rows,
    state_of,
    wait,
    waits_of,
    worker,
)


def terminate(execution: UUID) -> Program:
    """A person ends it, and says so again when it has registered a wait in the very moment."""

    async def program(session: Session) -> str | None:
        while True:
            try:
                async with session.transaction() as conn:
                    done = await terminating.terminate(
                        conn, str(execution), tenant=1, by="ann", reason="enough", traced=False
                    )
                    return done.outcome
            except SerializationFailure:
                continue

    return program


async def is_over(conn: Connection, execution: UUID) -> None:
    """Its row says that it has ended, and its journal too, after whatever came before."""
    [row] = await rows(
        conn,
        "select status, owner, wake_at, position from waypost.execution where execution_id = %s",
        execution,
    )
    kinds = await journal_of(conn, execution)
    assert row == ("failed", None, None, len(kinds))
    assert (kinds[-1], kinds.count("terminated")) == ("terminated", 1)
    assert await waits_of(conn, execution) == []


@race("committed, and withdrawn", "lost, and never asked")
async def a_commit_that_asks_and_an_end(conn: Connection) -> Scene:
    """Either the command was asked for, and is taken back, or the owner has lost the execution."""
    [holder] = await owned(conn, 1)
    new = message("pay")
    asks = commit_of(holder, holder.turn(asked("pay"), messages=[new], release=False))

    async def look(conn: Connection, ending: Ending) -> str:
        await is_over(conn, holder.execution)
        if ending.results["commit"]:
            return f"committed, and {await state_of(conn, new.message_id)}"
        assert "asked" not in await journal_of(conn, holder.execution)
        return "lost, and never asked"

    return Scene({"commit": asks, "end": terminate(holder.execution)}, look)


@race("committed", "lost")
async def a_commit_that_registers_a_wait_and_an_end(conn: Connection) -> Scene:
    """What has ended waits for nothing, also when the wait came between the look for keys and the row's lock."""
    [holder] = await owned(conn, 1)
    registers = commit_of(holder, holder.turn(waits=[wait("a")], release=False))

    async def look(conn: Connection, ending: Ending) -> str:
        await is_over(conn, holder.execution)
        return "committed" if ending.results["commit"] else "lost"

    return Scene({"commit": registers, "end": terminate(holder.execution)}, look)


@race("mailed", "on the shelf")
async def an_event_that_fills_a_wait_and_an_end(conn: Connection) -> Scene:
    holder = await owned_and_waiting(conn)

    async def look(conn: Connection, _: Ending) -> str:
        await is_over(conn, holder.execution)
        return "mailed" if await mail_of(conn, holder.execution) else "on the shelf"

    return Scene({"event": post(event("e1")), "end": terminate(holder.execution)}, look)


@race("delivered")
async def a_settlement_and_an_end(conn: Connection) -> Scene:
    """The try has arrived, whoever says first what becomes of its message."""
    execution, message_id = await sleeping_with_message(conn)
    [claimed] = await claim_messages(conn)

    async def look(conn: Connection, _: Ending) -> str:
        await is_over(conn, execution)
        return str(await state_of(conn, message_id))

    return Scene({"settle": settle(result(claimed, DELIVERED)), "end": terminate(execution)}, look)


@race("withdrawn", "delivered")
async def a_reply_and_an_end(conn: Connection) -> Scene:
    """A reply to what was never sent, so to speak: what comes first is what becomes of the message."""
    holder, message_id = await owned_with_message(conn)
    assert await commit(conn, holder, holder.turn())

    async def look(conn: Connection, ending: Ending) -> str:
        await is_over(conn, holder.execution)
        assert ending.results["reply"] == ["stored"]
        return str(await state_of(conn, message_id))

    return Scene({"reply": post(reply("r1", message_id)), "end": terminate(holder.execution)}, look)


@race("claimed 0", "claimed 1")
async def a_claim_and_an_end(conn: Connection) -> Scene:
    execution = await begun(conn)
    me = await worker(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        await is_over(conn, execution)
        return f"claimed {len(ending.results['claim'])}"

    return Scene({"claim": claim(me), "end": terminate(execution)}, look)


@race("terminated and over", "over and terminated")
async def two_who_end_it(conn: Connection) -> Scene:
    execution = await begun(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        await is_over(conn, execution)
        return f"{ending.results['one']} and {ending.results['other']}"

    return Scene({"one": terminate(execution), "other": terminate(execution)}, look)
