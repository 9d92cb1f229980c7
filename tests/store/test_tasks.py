"""Tasks in the database: who gets which, what a report changes, and what becomes of those whose worker is silent."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from orchestrator.store import tasks, terminating
from orchestrator.store.commits import NewTask
from orchestrator.store.tasks import Report, Task
from tests.invariants import broken
from tests.store.world import (
    HOUR,
    Connection,
    claim,
    commit,
    held,
    is_due,
    mail_of,
    order,
    posted,
    rows,
    task,
    worker,
)

pytestmark = pytest.mark.postgres

MINUTE = timedelta(minutes=1)
OVER = -timedelta(seconds=1)


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


async def left(conn: Connection, *new: NewTask) -> UUID:
    """An execution that waits for tasks."""
    holder = await held(conn)
    facts = [asked(one.path) for one in new]
    assert await commit(conn, holder, holder.turn(*facts, tasks=new))
    return holder.execution


def asked(path: str) -> tuple[str, str, dict[str, Any]]:
    return ("asked", path, {"kind": "task", "name": "resize", "args": {"do": "task", "name": "image.resize"}})


async def taken(
    conn: Connection,
    *queues: str,
    limit: int = 10,
    lease: timedelta = MINUTE,
    owner: str = "w1",
    now: datetime | None = None,
) -> list[Task]:
    return await tasks.claim(
        conn, queues=queues or ["media"], limit=limit, owner=owner, token=uuid4(), lease=lease, now=now
    )


async def state_of(conn: Connection, task_id: UUID) -> str:
    [(state,)] = await rows(conn, "select state from waypost.task where task_id = %s", task_id)
    return state


def done(one: Task, value: str = "small") -> Report:
    return Report(one, "done", f'{{"outcome": "done", "value": "{value}"}}')


async def settled(conn: Connection, report: Report) -> tuple[str, str]:
    return (await tasks.settle(conn, [report]))[report.task.task_id]


async def takes_back(conn: Connection, execution: UUID, *ids: UUID) -> bool:
    """A turn of the execution that takes tasks back; whether it is due again, by mail that this brought."""
    if not await is_due(conn, execution):
        await posted(conn, order(f"wake {uuid4()}", execution))
    holder = await claim(conn, await worker(conn), execution)
    mail = holder.mail_received - holder.mail_read
    [(orders,)] = await rows(
        conn, "select orders_received - orders_read from waypost.execution where execution_id = %s", execution
    )
    turn = holder.turn(("withdrawn", "resize", {}), mail=mail, orders=orders, tasks_back=ids)
    assert await commit(conn, holder, turn)
    return await is_due(conn, execution)


# ---- claiming --------------------------------------------------------------------------------------------------


async def test_a_claim_takes_the_most_urgent_and_then_the_longest_due_of_its_queues(conn: Connection) -> None:
    slow, first, second, urgent = task("a", queue="slow"), task("b"), task("c"), task("d", priority=1)
    for one in (slow, first, second, urgent):
        await left(conn, one)

    [other] = await taken(conn, limit=1)
    assert [one.task_id for one in await taken(conn)] == [first.task_id, second.task_id]
    assert (other.task_id, other.payload, other.attempt, other.left) == (
        urgent.task_id, '{"image": "a"}', 1, None,
    )  # fmt: skip
    assert await taken(conn) == []
    assert await state_of(conn, slow.task_id) == "due"


async def test_a_task_whose_turn_did_not_match_is_not_left(conn: Connection) -> None:
    holder = await held(conn)
    holder.fence -= 1

    assert not await commit(conn, holder, holder.turn(asked("resize"), tasks=[task()]))
    assert await rows(conn, "select count(*) from waypost.task") == [(0,)]


async def test_a_queue_that_is_full_starves_no_other_and_no_tenant(conn: Connection) -> None:
    await left(conn, *(task(f"m{n}") for n in range(20)))
    await left(conn, task("s", queue="slow"))
    await conn.execute("insert into waypost.tenant (tenant_id, name) values (2, 'two')")
    await conn.execute("update waypost.task set tenant_id = 2 where path in ('m0', 'm1')")

    took = await taken(conn, "media", "slow", limit=6)
    await conn.execute("update waypost.task set tenant_id = 1")  # as the invariants want it

    assert Counter((one.queue, one.tenant_id) for one in took) == {
        ("media", 1): 2, ("media", 2): 2, ("slow", 1): 1,
    }  # fmt: skip


async def test_a_claim_reads_as_many_rows_as_it_takes_however_many_wait(conn: Connection) -> None:
    await left(conn, task())
    await conn.execute(
        """
        insert into waypost.task (tenant_id, task_id, execution_id, epoch, path, queue, type, payload, key, attempt,
                                  available_at, expires_at)
        select k.tenant_id, gen_random_uuid(), k.execution_id, k.epoch, k.path, q, k.type, k.payload, k.key, 1,
               k.available_at, k.expires_at
          from waypost.task k, generate_series(1, 3000), unnest(array['media', 'other']) as q
        """
    )
    read = """
        select seq_scan, coalesce(seq_tup_read, 0), coalesce(idx_tup_fetch, 0)
          from pg_stat_xact_user_tables where schemaname = 'waypost' and relname = 'task'
    """

    async with conn.transaction(force_rollback=True):
        [(scans, _, before)] = await rows(conn, read)
        assert len(await taken(conn, "media", "none", limit=5)) == 5
        [(scanned, _, after)] = await rows(conn, read)

    await conn.execute(
        "delete from waypost.task where key = 'key/resize' and number > 1"
    )  # no flow asked for them
    assert scanned == scans
    assert after - before <= 5 * 4


async def test_an_expired_task_is_taken_by_nobody(conn: Connection) -> None:
    one = task(life=OVER)
    execution = await left(conn, one)

    assert await taken(conn) == []
    assert await tasks.expire(conn, limit=10) == 0
    assert (await state_of(conn, one.task_id), await mail_of(conn, execution)) == ("expired", [])
    assert await takes_back(conn, execution, one.task_id)
    assert (await mail_of(conn, execution))[-1] == "refused never-sent"


async def test_the_next_try_gets_what_the_one_before_said_last(conn: Connection) -> None:
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn(asked("resize"), tasks=[task()], release=False))
    holder.position += 1
    [one] = await taken(conn)
    await tasks.beat(conn, [(one, '{"page": 7}')], lease=MINUTE)
    assert (await settled(conn, Report(one, "failed", '{"outcome": "failed"}')))[0] == "taken"
    assert await commit(conn, holder, holder.turn(("resent", "resize", {}), mail=1, tasks=[task(attempt=2)]))

    [again] = await taken(conn)
    assert (again.attempt, again.left) == (2, {"page": 7})


# ---- beating ---------------------------------------------------------------------------------------------------


async def test_a_beat_makes_the_lease_last_and_says_who_is_not_needed_any_more(conn: Connection) -> None:
    needed, withdrawn = task("a"), task("b")
    await left(conn, needed)
    execution = await left(conn, withdrawn)
    ours = await taken(conn, lease=OVER)
    await takes_back(conn, execution, withdrawn.task_id)

    assert await tasks.beat(conn, [(one, None) for one in ours], lease=MINUTE) == {
        needed.task_id: "running",
        withdrawn.task_id: "stopping",
    }
    assert await tasks.expire(conn, limit=10) == 0


async def test_a_beat_of_a_try_that_is_lost_says_so(conn: Connection) -> None:
    await left(conn, task())
    ours = await taken(conn, lease=OVER)
    assert await tasks.expire(conn, limit=10) == 1

    assert await tasks.beat(conn, [(one, None) for one in ours], lease=MINUTE) == {}


# ---- reporting -------------------------------------------------------------------------------------------------


async def test_a_report_is_mail_of_its_execution_once_however_often_it_is_said(conn: Connection) -> None:
    execution = await left(conn, task())
    [one] = await taken(conn)

    assert await settled(conn, done(one)) == ("taken", "done")
    assert await is_due(conn, execution)
    assert await settled(conn, Report(one, "failed", '{"outcome": "failed"}')) == ("repeated", "done")
    assert await rows(conn, "select kind, data from waypost.inbox") == [
        ("result", {"outcome": "done", "value": "small"})
    ]


async def test_a_report_under_another_token_is_late(conn: Connection) -> None:
    execution = await left(conn, task())
    [one] = await taken(conn)
    old = replace(one, token=uuid4())

    assert await settled(conn, done(old)) == ("late", "running")
    assert await mail_of(conn, execution) == []


async def test_a_report_after_its_lease_is_late_and_the_execution_was_told_that_its_worker_is_lost(
    conn: Connection,
) -> None:
    execution = await left(conn, task())
    [one] = await taken(conn, lease=OVER)

    assert await tasks.expire(conn, limit=10) == 1
    assert await settled(conn, done(one)) == ("late", "lost")
    assert await mail_of(conn, execution) == ["unknown worker-lost"]
    assert await tasks.expire(conn, limit=10) == 0


async def test_what_a_lost_claim_took_is_found_by_its_token(conn: Connection) -> None:
    await left(conn, task())
    token = uuid4()
    [one] = await tasks.claim(conn, queues=["media"], limit=1, owner="w", token=token, lease=MINUTE)

    [found] = await tasks.claimed_under(conn, token=token)
    assert (found.task_id, found.token) == (one.task_id, token)
    assert await tasks.claimed_under(conn, token=uuid4()) == []


# ---- taking back -----------------------------------------------------------------------------------------------


async def test_a_task_that_has_not_begun_is_withdrawn_and_never_runs(conn: Connection) -> None:
    one = task()
    execution = await left(conn, one)

    assert await takes_back(conn, execution, one.task_id)
    assert await state_of(conn, one.task_id) == "withdrawn"
    assert await taken(conn) == []
    assert (await mail_of(conn, execution))[-1] == "refused never-sent"


async def test_a_task_that_runs_is_stopping_and_its_result_comes_when_it_has_one(conn: Connection) -> None:
    one = task()
    execution = await left(conn, one)
    [ours] = await taken(conn)

    assert not await takes_back(conn, execution, one.task_id)
    assert await state_of(conn, one.task_id) == "stopping"
    assert await settled(conn, done(ours)) == ("taken", "done")
    assert await is_due(conn, execution)


async def test_a_task_that_has_ended_is_not_taken_back(conn: Connection) -> None:
    one = task()
    execution = await left(conn, one)
    [ours] = await taken(conn)
    await settled(conn, done(ours))

    await takes_back(conn, execution, one.task_id)
    assert await state_of(conn, one.task_id) == "done"
    assert len(await mail_of(conn, execution)) == 1


async def test_a_stopping_task_of_a_silent_worker_is_lost(conn: Connection) -> None:
    one = task()
    execution = await left(conn, one)
    await taken(conn, lease=OVER)
    await takes_back(conn, execution, one.task_id)

    assert await tasks.expire(conn, limit=10) == 1
    assert (await mail_of(conn, execution))[-1] == "unknown worker-lost"


async def test_terminating_withdraws_what_has_not_begun_and_what_runs_stands(conn: Connection) -> None:
    waits, runs = task("waits"), task("runs")
    holder = await held(conn)
    facts = [(kind, path, data | {"undo": None}) for kind, path, data in map(asked, ("waits", "runs"))]
    assert await commit(conn, holder, holder.turn(*facts, tasks=[waits, runs]))
    await conn.execute("update waypost.task set priority = 1 where path = 'runs'")
    await taken(conn, limit=1)

    ended = await terminating.terminate(
        conn, str(holder.execution), tenant=1, by="ann", reason="enough", traced=False
    )

    assert ended.stands == ["runs"]
    assert (await state_of(conn, waits.task_id), await state_of(conn, runs.task_id)) == (
        "withdrawn",
        "stopping",
    )


# ---- reading ---------------------------------------------------------------------------------------------------


async def test_operators_see_tries_by_queue_and_state(conn: Connection) -> None:
    await left(conn, task("a", queue="slow"))
    execution = await left(conn, task("b"))
    await taken(conn)

    listed = await tasks.listed(conn, tenant=1, queue=None, states=None, limit=10)
    assert [(one.path, one.state, one.owner) for one in listed] == [
        ("b", "running", "w1"),
        ("a", "due", None),
    ]
    assert [
        one.path for one in await tasks.listed(conn, tenant=1, queue="slow", states=["due"], limit=1)
    ] == ["a"]
    [of] = await tasks.of_execution(conn, str(execution), tenant=1)
    assert await tasks.one(conn, UUID(of.task_id), tenant=1) == of
    assert await tasks.one(conn, uuid4(), tenant=1) is None
    assert of.expires_at > datetime.now(UTC) and of.expires_at - of.available_at <= HOUR
