"""Races of executions that are parent and child, or of which one begins another."""

from __future__ import annotations

import json
from uuid import UUID, uuid4

from orchestrator.store import definitions
from orchestrator.store.commits import Turn
from orchestrator.store.database import Connection
from orchestrator.store.definitions import Definition
from orchestrator.store.families import Family, KinMail, NewChild
from tests.explorer.moves import commit_of, new_execution, owned, post, start
from tests.explorer.of_ends import is_over, terminate
from tests.explorer.of_waits import got, owned_and_waiting
from tests.explorer.races import Ending, Scene, race
from tests.store.world import FLOW, Held, claim, closed, commit, event, mail_of, rows, wait, waiting

ASKED = ("asked", "packs", {"kind": "child", "name": "packs"})
LEFT = ("withdrawn", "packs", {"kind": "child", "name": "packs"})
ENDED = ("finished", "", {"kind": "completed", "output": 1})


def begins(holder: Held, child: UUID, *, key: str | None) -> Turn:
    """A turn that begins `child`."""
    turn = holder.turn(ASKED)
    said = {"input": 1, "parent": {"execution": str(holder.execution), "epoch": 0, "path": "packs"}}
    turn.family = Family(
        children=[
            NewChild(
                position=turn.position + 1,
                path="packs",
                execution=str(child),
                flow=FLOW[0],
                business_key=key,
                digest=b"\x02" * 32,
                started=json.dumps(said),
                traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                root=str(holder.execution),
            )
        ]
    )
    return turn


def leaves(holder: Held, child: UUID) -> Turn:
    """A turn that tells `child` to end."""
    turn = holder.turn(LEFT)
    order = json.dumps({"order": "cancel", "undo": True})
    turn.family = Family(mail=[KinMail(turn.position + 1, "order", f"{child}/cancel", str(child), order)])
    return turn


def ends(holder: Held, parent: UUID) -> Turn:
    """A turn that ends the execution of `holder`, and tells `parent`."""
    turn = holder.turn(ENDED, status="completed")
    said = json.dumps({"outcome": "done", "value": 1})
    mail = KinMail(turn.position + 1, "child", f"{holder.execution}/ended", str(parent), said, 0, "packs")
    turn.family = Family(mail=[mail])
    return turn


async def published(conn: Connection) -> None:
    """The flow is known, so that children of it may be begun."""
    await definitions.publish(conn, [Definition(*FLOW)])


async def parent_and_child(conn: Connection) -> tuple[Held, Held]:
    """Both in the hands of one worker."""
    await published(conn)
    [parent] = await owned(conn, 1)
    child = uuid4()
    turn = begins(parent, child, key=None)
    turn.release = False
    assert await commit(conn, parent, turn)
    parent.position += 1
    return parent, await claim(conn, parent.me, child)


@race("begun", "refused")
async def a_child_and_a_start_of_the_same_key(conn: Connection) -> Scene:
    """Whoever is first has the key. A parent whose child is not begun learns that."""
    await published(conn)
    [holder] = await owned(conn, 1)
    child = uuid4()

    async def look(conn: Connection, ending: Ending) -> str:
        assert ending.results["commit"] is True
        found = await rows(conn, "select execution_id from waypost.execution where business_key = 'K'")
        assert len(found) == 1
        mail = await mail_of(conn, holder.execution)
        if found == [(child,)]:
            assert mail == []
            return "begun"
        assert len(mail) == 1
        return "refused"

    programs = {
        "commit": commit_of(holder, begins(holder, child, key="K")),
        "start": start(new_execution("K", 1)),
    }
    return Scene(programs, look)


@race("told")
async def the_end_of_a_child_and_a_commit_of_its_parent(conn: Connection) -> Scene:
    """Its parent gets one mail, and is due, whoever comes first."""
    parent, child = await parent_and_child(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        assert ending.results == {"end": True, "commit": True}
        assert len(await mail_of(conn, parent.execution)) == 1
        [(due,)] = await rows(
            conn,
            "select wake_at is not null from waypost.execution where execution_id = %s",
            parent.execution,
        )
        assert due
        return "told"

    programs = {
        "end": commit_of(child, ends(child, parent.execution)),
        "commit": commit_of(parent, parent.turn()),
    }
    return Scene(programs, look)


@race("both")
async def the_end_of_a_child_and_a_parent_that_needs_it_no_more(conn: Connection) -> Scene:
    """Each writes to the other: rows are locked in one order."""
    parent, child = await parent_and_child(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        assert ending.results == {"end": True, "leave": True}
        assert len(await mail_of(conn, parent.execution)) == 1
        assert len(await mail_of(conn, child.execution)) == 1
        [(status, wake)] = await rows(
            conn, "select status, wake_at from waypost.execution where execution_id = %s", child.execution
        )
        assert (status, wake) == ("completed", None)
        return "both"

    programs = {
        "end": commit_of(child, ends(child, parent.execution)),
        "leave": commit_of(parent, leaves(parent, child.execution)),
    }
    return Scene(programs, look)


@race("child over", "child asked to end")
async def the_ends_of_a_parent_and_of_its_child(conn: Connection) -> Scene:
    """A parent that is terminated asks a child that has not ended to end."""
    parent, child = await parent_and_child(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        await is_over(conn, parent.execution)
        assert ending.results["end"] is True
        return "child asked to end" if await mail_of(conn, child.execution) else "child over"

    programs = {
        "end": commit_of(child, ends(child, parent.execution)),
        "terminate": terminate(parent.execution),
    }
    return Scene(programs, look)


@race("begun, and asked to end", "never begun")
async def a_parent_that_is_terminated_while_it_begins_a_child(conn: Connection) -> Scene:
    """No child is left behind: one that came between the look for children and the lock is asked, too."""
    await published(conn)
    [holder] = await owned(conn, 1)
    child = uuid4()

    async def look(conn: Connection, ending: Ending) -> str:
        await is_over(conn, holder.execution)
        found = await rows(conn, "select 1 from waypost.execution where execution_id = %s", child)
        if not ending.results["commit"]:
            assert found == []
            return "never begun"
        assert len(await mail_of(conn, child)) == 1
        return "begun, and asked to end"

    programs = {
        "commit": commit_of(holder, begins(holder, child, key=None)),
        "terminate": terminate(holder.execution),
    }
    return Scene(programs, look)


@race("matched, A -, C e1", "not matched, A e1, C e1")
async def an_event_and_a_wait_that_times_out_as_a_child_begins(conn: Connection) -> Scene:
    """A commit of a family locks the keys of its waits before all rows, as every other does."""
    await published(conn)
    holder = await owned_and_waiting(conn)
    other = await waiting(conn, wait("c"))
    turn = begins(holder, uuid4(), key=None)
    turn.closed_waits, turn.guard = [closed("a", was_open=True)], 0

    async def look(conn: Connection, ending: Ending) -> str:
        told = await got(A=holder.execution, C=other)(conn, ending)
        return f"{'matched' if ending.results['turn'] else 'not matched'}, {told}"

    return Scene({"event": post(event("e1")), "turn": commit_of(holder, turn)}, look)
