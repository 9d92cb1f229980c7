"""Races about who owns an execution: claims, commits, leases and takeovers."""

from __future__ import annotations

from datetime import timedelta
from typing import Final
from uuid import UUID

from orchestrator.store import workers
from orchestrator.store.database import Connection
from tests.explorer.moves import (
    alone,
    asks,
    claim,
    commits_of,
    owned,
    owned_with_message,
    post,
    take_over,
)
from tests.explorer.of_mail import ends_and_tells
from tests.explorer.races import Ending, Scene, race
from tests.explorer.sessions import Session
from tests.store.world import (
    HOUR,
    Held,
    begun,
    claim_all,
    commit,
    journal_of,
    mail_of,
    reply,
    rows,
    worker,
)

# -- claims ------------------------------------------------------------------------------------------------


@race("2 and 1", "1 and 2", waits=False)
async def two_workers_claim_nothing_twice(conn: Connection) -> Scene:
    """Three executions are due; each claim takes up to two, and skips what another has locked."""
    for _ in range(3):
        await begun(conn)
    one, other = await worker(conn), await worker(conn)

    async def look(_: Connection, ending: Ending) -> str:
        first: list[UUID] = ending.results["one"]
        second: list[UUID] = ending.results["other"]
        assert len({*first, *second}) == len(first) + len(second)
        return f"{len(first)} and {len(second)}"

    return Scene({"one": claim(one, limit=2), "other": claim(other, limit=2)}, look)


@race("matched 2, claimed 0", "matched 2, claimed 2", waits=False)
async def a_commit_of_two_and_a_claim(conn: Connection) -> Scene:
    """What a commit releases as due is another's as soon as it is committed, and not before."""
    low, high = await owned(conn, 2)
    for holder in (low, high):
        await asks(conn, holder)
    now = (await rows(conn, "select now()"))[0][0]
    other = await worker(conn)

    async def look(_: Connection, ending: Ending) -> str:
        return f"matched {len(ending.results['commit'])}, claimed {len(ending.results['claim'])}"

    return Scene(
        {"commit": commits_of((high, high.turn(due=now)), (low, low.turn(due=now))), "claim": claim(other)},
        look,
    )


# -- takeovers ---------------------------------------------------------------------------------------------


async def buried(conn: Connection, number: int = 2) -> list[Held]:
    """So many executions of one worker that was buried."""
    holders = await owned(conn, number)
    await workers.retire(conn, me=holders[0].me)
    return holders


@race("matched 2, taken 0", "matched 2, taken 2", "matched 0, taken 2")
async def a_stale_commit_and_a_takeover(conn: Connection) -> Scene:
    """The worker is buried and does not know. Each execution is its own until it is taken over, and never after."""
    low, high = await buried(conn)
    stays = commits_of((high, high.turn(release=False)), (low, low.turn(release=False)))

    async def look(conn: Connection, ending: Ending) -> str:
        taken = set(ending.results["takeover"])
        for holder in (low, high):
            kinds = await journal_of(conn, holder.execution)
            assert ("orphaned" in kinds) == (holder.execution in taken)
        return f"matched {len(ending.results['commit'])}, taken {len(taken)}"

    return Scene({"commit": stays, "takeover": alone(take_over)}, look)


@race("taken 2 and 0", "taken 0 and 2", waits=False)
async def two_takeovers_of_two_dead_workers(conn: Connection) -> Scene:
    for _ in range(2):
        await buried(conn, 1)

    async def look(conn: Connection, ending: Ending) -> str:
        one, other = ending.results["one"], ending.results["other"]
        kinds = [kind for (kind,) in await rows(conn, "select kind from waypost.journal")]
        assert kinds.count("orphaned") == len(one) + len(other)
        return f"taken {len(one)} and {len(other)}"

    return Scene({"one": alone(take_over), "other": alone(take_over)}, look)


@race(
    "matched 2, taken 0, claimed 0",
    "matched 2, taken 2, claimed 2",
    "matched 0, taken 2, claimed 2",
    "matched 0, taken 2, claimed 0",
)
async def a_stale_commit_and_a_takeover_with_a_claim(conn: Connection) -> Scene:
    low, high = await buried(conn)
    heir = await worker(conn)
    stays = commits_of((high, high.turn(release=False)), (low, low.turn(release=False)))

    async def other(session: Session) -> tuple[int, int]:
        async with session.transaction() as mine:
            taken = await take_over(mine)
        async with session.transaction() as mine:
            return len(taken), len(await claim_all(mine, heir))

    async def look(_: Connection, ending: Ending) -> str:
        taken, claimed = ending.results["other"]
        return f"matched {len(ending.results['commit'])}, taken {taken}, claimed {claimed}"

    return Scene({"commit": stays, "other": other}, look)


@race("taken, due, mail 1", "not taken, due, mail 1")
async def a_takeover_and_mail_agree(conn: Connection) -> Scene:
    holder, message_id = await owned_with_message(conn)
    await workers.retire(conn, me=holder.me)

    async def look(conn: Connection, ending: Ending) -> str:
        taken = "taken" if ending.results["takeover"] else "not taken"
        [(wakes,)] = await rows(conn, "select wake_at <= clock_timestamp() from waypost.execution")
        mail = len(await mail_of(conn, holder.execution))
        return f"{taken}, {'due' if wakes else 'asleep'}, mail {mail}"

    return Scene({"takeover": alone(take_over), "reply": post(reply("r1", message_id))}, look)


@race("matched, taken 0, mail 1", "not matched, taken 1, mail 0")
async def the_end_of_a_child_told_by_a_stale_worker_and_a_takeover(conn: Connection) -> Scene:
    """What an execution tells another is stored only with the fact that it comes from."""
    parent, child = await owned(conn, 2)
    assert await commit(conn, parent, parent.turn())
    await workers.retire(conn, me=child.me)

    async def look(conn: Connection, ending: Ending) -> str:
        matched = "matched" if ending.results["child"] else "not matched"
        mail = len(await mail_of(conn, parent.execution))
        return f"{matched}, taken {len(ending.results['takeover'])}, mail {mail}"

    return Scene({"child": ends_and_tells(child, parent.execution), "takeover": alone(take_over)}, look)


# -- leases ------------------------------------------------------------------------------------------------

LEFT: Final = timedelta(milliseconds=100)
"""What is left of the lease when an order begins: enough for a renewal that comes first to come in time."""


@race("renewed, taken 0", "refused, taken 1", waits=False)
async def a_renewal_and_the_end_of_the_lease_agree(conn: Connection) -> Scene:
    """A lease is about to end. Its worker renews it; another waits for its end, buries the worker and takes over."""
    [holder] = await owned(conn, 1)
    me = holder.me

    async def renewal(session: Session) -> bool:
        async with session.transaction() as mine:
            found = await mine.execute(workers.RENEW, {"me": me, "lease": HOUR})
            return await found.fetchone() is not None

    async def other(session: Session) -> int:
        await session.conn.execute("select pg_sleep_until(started_at + %s) from waypost.worker", (LEFT,))
        async with session.transaction() as mine:
            await workers.bury(mine)
        async with session.transaction() as mine:
            return len(await take_over(mine))

    async def look(_: Connection, ending: Ending) -> str:
        renewed = "renewed" if ending.results["renewal"] else "refused"
        return f"{renewed}, taken {ending.results['other']}"

    return Scene(
        {"renewal": renewal, "other": other},
        look,
        before="update waypost.worker set started_at = clock_timestamp(),"
        f" lease_until = clock_timestamp() + interval '{LEFT.microseconds} us'",
    )
