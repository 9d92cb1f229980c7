"""Races about tasks: who gets one, what its report changes, and what becomes of one that nobody waits for."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

from orchestrator.store import tasks
from orchestrator.store.database import Connection
from orchestrator.store.tasks import Report, Task
from tests.explorer.moves import alone, commit_of, owned
from tests.explorer.of_ends import is_over, terminate
from tests.explorer.races import Ending, Scene, race
from tests.explorer.sessions import Program
from tests.store.world import HOUR, Held, commit, mail_of, rows, task

OVER = -timedelta(seconds=1)
ASKED = ("asked", "resize", {"kind": "task", "name": "resize", "args": {"do": "task"}})


async def queued(conn: Connection) -> tuple[Held, UUID]:
    """An execution in a worker's hands, and its task, which is due."""
    [holder] = await owned(conn, 1)
    new = task()
    assert await commit(conn, holder, holder.turn(ASKED, tasks=[new], release=False))
    holder.position += 1
    return holder, new.task_id


async def take(conn: Connection, *, owner: str = "w1", lease: timedelta = HOUR) -> list[Task]:
    return await tasks.claim(conn, queues=["media"], limit=1, owner=owner, token=uuid4(), lease=lease)


def claim(owner: str) -> Program:
    """A worker of queues takes what is due; how many."""

    async def call(conn: Connection) -> int:
        return len(await take(conn, owner=owner))

    return alone(call)


def report(one: Task, value: str = "done") -> Program:
    """A worker of queues says what became of its try; the verdict."""

    async def call(conn: Connection) -> str:
        answer = f'{{"outcome": "done", "value": "{value}"}}'
        return (await tasks.settle(conn, [Report(one, "done", answer)]))[one.task_id][0]

    return alone(call)


async def expire(conn: Connection) -> int:
    return await tasks.expire(conn, limit=10)


def take_back(holder: Held, task_id: UUID) -> Program:
    return commit_of(holder, holder.turn(("withdrawn", "resize", {}), tasks_back=[task_id], release=False))


async def state_of(conn: Connection, task_id: UUID) -> str:
    [(state,)] = await rows(conn, "select state from waypost.task where task_id = %s", task_id)
    return state


@race("withdrawn, taken 0", "stopping, taken 1")
async def a_claim_and_a_taking_back_of_a_task(conn: Connection) -> Scene:
    """Either nobody ever has it, or its worker is to be told. Never is it withdrawn and done."""
    holder, task_id = await queued(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        assert ending.results["back"]
        return f"{await state_of(conn, task_id)}, taken {ending.results['claim']}"

    return Scene({"claim": claim("w1"), "back": take_back(holder, task_id)}, look)


@race("1 and 0", "0 and 1", waits=False)
async def two_workers_and_one_task(conn: Connection) -> Scene:
    _, task_id = await queued(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        assert await state_of(conn, task_id) == "running"
        return f"{ending.results['one']} and {ending.results['other']}"

    return Scene({"one": claim("w1"), "other": claim("w2")}, look)


@race("taken, done", "late, unknown worker-lost")
async def a_report_and_the_end_of_its_lease(conn: Connection) -> Scene:
    """Whoever is first says what became of the try, and the execution is told that and nothing else."""
    holder, _ = await queued(conn)
    [one] = await take(conn, lease=OVER)

    async def look(conn: Connection, ending: Ending) -> str:
        [told] = [text or "done" for text in await mail_of(conn, holder.execution)]
        assert ending.results["expire"] == (1 if "lost" in told else 0)
        return f"{ending.results['report']}, {told}"

    return Scene({"report": report(one), "expire": alone(expire)}, look)


@race("taken and repeated", "repeated and taken")
async def the_same_report_twice(conn: Connection) -> Scene:
    """The first one counts, whatever the other one says."""
    holder, _ = await queued(conn)
    [one] = await take(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        assert len(await mail_of(conn, holder.execution)) == 1
        return f"{ending.results['one']} and {ending.results['other']}"

    return Scene({"one": report(one, "one"), "other": report(one, "other")}, look)


@race("done, told")
async def a_report_and_a_taking_back_of_a_task(conn: Connection) -> Scene:
    """It was done, whoever is first; the execution is told so once."""
    holder, task_id = await queued(conn)
    [one] = await take(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        assert (ending.results["back"], ending.results["report"]) == (True, "taken")
        assert len(await mail_of(conn, holder.execution)) == 1
        return f"{await state_of(conn, task_id)}, told"

    return Scene({"report": report(one), "back": take_back(holder, task_id)}, look)


@race("running, told 0", "lost, told 1")
async def a_beat_and_the_end_of_its_lease(conn: Connection) -> Scene:
    """A lease that is over lasts again, when its worker speaks before anybody says that it is lost."""
    holder, task_id = await queued(conn)
    [one] = await take(conn, lease=OVER)

    async def beat(conn: Connection) -> bool:
        return bool(await tasks.beat(conn, [(one, None)], lease=HOUR))

    async def look(conn: Connection, ending: Ending) -> str:
        state = await state_of(conn, task_id)
        assert ending.results["beat"] == (state == "running")
        return f"{state}, told {len(await mail_of(conn, holder.execution))}"

    return Scene({"beat": alone(beat), "expire": alone(expire)}, look)


@race("withdrawn, taken 0", "stopping, taken 1")
async def a_claim_of_a_task_and_an_end(conn: Connection) -> Scene:
    holder, task_id = await queued(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        await is_over(conn, holder.execution)
        return f"{await state_of(conn, task_id)}, taken {ending.results['claim']}"

    return Scene({"claim": claim("w1"), "end": terminate(holder.execution)}, look)


@race("committed, and withdrawn", "lost, and never left")
async def a_commit_that_leaves_a_task_and_an_end(conn: Connection) -> Scene:
    [holder] = await owned(conn, 1)
    new = task()
    leaves = commit_of(holder, holder.turn(ASKED, tasks=[new], release=False))

    async def look(conn: Connection, ending: Ending) -> str:
        await is_over(conn, holder.execution)
        if ending.results["commit"]:
            return f"committed, and {await state_of(conn, new.task_id)}"
        assert await rows(conn, "select 1 from waypost.task") == []
        return "lost, and never left"

    return Scene({"commit": leaves, "end": terminate(holder.execution)}, look)
