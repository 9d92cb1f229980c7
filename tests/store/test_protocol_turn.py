"""A turn commits under its fence or not at all; a release loses no wake-up, a takeover no execution."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from orchestrator.store import commits, workers
from tests.invariants import broken
from tests.store.world import (
    HOUR,
    NOON,
    Connection,
    Start,
    asked,
    begun,
    claim,
    claim_all,
    commit,
    held,
    is_due,
    journal_of,
    message,
    order,
    posted,
    rows,
    start,
    worker,
)

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


async def test_an_execution_is_created_with_its_first_fact_and_due(conn: Connection) -> None:
    [(outcome, execution)] = await start(conn, Start(input={"order": 1}))

    assert outcome == "started"
    assert await is_due(conn, execution)
    assert await rows(conn, "select position, fence, kind, payload, actor from waypost.journal") == [
        (1, 0, "started", {"input": {"order": 1}}, "program")
    ]


async def test_the_same_start_again_finds_the_first(conn: Connection) -> None:
    [(_, first)] = await start(conn, Start(key="order-1", input=1))

    assert await start(conn, Start(key="order-1", input=1)) == [("exists", first)]
    assert await start(conn, Start(key="order-1", input=2)) == [("conflict", first)]
    assert await rows(conn, "select count(*) from waypost.journal") == [(1,)]


async def test_a_start_that_is_repeated_under_its_id_finds_itself(conn: Connection) -> None:
    mine = Start(input=1, execution=uuid4())
    await start(conn, mine)

    assert await start(conn, mine) == [("exists", mine.execution)]


async def test_equal_keys_in_one_call_are_one_execution(conn: Connection) -> None:
    first = UUID(int=1)

    found = await start(
        conn,
        Start(key="a", input=1, execution=first),
        Start(key="a", input=1, execution=UUID(int=2)),
        Start(key="a", input=2, execution=UUID(int=3)),
    )

    assert found == [("started", first), ("exists", first), ("conflict", first)]


async def test_keys_are_apart_by_tenant_and_definition(conn: Connection) -> None:
    await conn.execute("insert into waypost.tenant (tenant_id, name) values (2, 'other')")

    found = await start(
        conn, Start(key="a"), Start(key="a", tenant=2), Start(key="a", definition="refund"), Start(), Start()
    )

    assert [outcome for outcome, _ in found] == ["started"] * 5


async def test_an_execution_is_claimed_by_one_worker(conn: Connection) -> None:
    execution = await begun(conn)

    mine = await claim(conn, await worker(conn), execution)

    assert await claim_all(conn, await worker(conn)) == []
    assert (mine.fence, mine.position) == (1, 1)


@pytest.mark.parametrize("state", ["over", "dead", "unknown"])
async def test_a_worker_without_a_lease_claims_nothing(conn: Connection, state: str) -> None:
    await begun(conn)
    me = str(uuid4())
    if state != "unknown":
        me = await worker(conn, lease=-HOUR if state == "over" else HOUR)
    if state == "dead":
        await workers.retire(conn, me=me)

    assert await claim_all(conn, me) == []


async def test_what_sleeps_is_not_claimed(conn: Connection) -> None:
    holder = await held(conn)
    tomorrow = datetime.now(tz=NOON.tzinfo) + timedelta(days=1)
    assert await commit(conn, holder, holder.turn(due=tomorrow))

    assert await claim_all(conn, await worker(conn)) == []
    assert await rows(conn, "select wake_at from waypost.execution") == [(tomorrow,)]


async def test_a_commit_writes_facts_messages_and_row_together(conn: Connection) -> None:
    holder = await held(conn)
    new = message("pay")

    assert await commit(conn, holder, holder.turn(("ended", "a", {}), asked("pay"), messages=[new]))

    assert await journal_of(conn, holder.execution) == ["started", "ended", "asked"]
    assert await rows(conn, "select position, owner, fence from waypost.execution") == [(3, None, 1)]
    assert await rows(conn, "select message_id, path, state, body from waypost.outbox") == [
        (new.message_id, "pay", "due", b"{}")
    ]


@pytest.mark.parametrize("stale", ["fence", "position", "owner"])
async def test_a_commit_that_is_stale_writes_nothing(conn: Connection, stale: str) -> None:
    holder = await held(conn)
    match stale:
        case "fence":
            holder.fence -= 1
        case "position":
            holder.position -= 1
        case _:
            holder.me = await worker(conn)
    before = await rows(conn, "select * from waypost.execution")

    assert not await commit(conn, holder, holder.turn(asked("pay"), messages=[message("pay")]))

    assert await rows(conn, "select * from waypost.execution") == before
    assert await journal_of(conn, holder.execution) == ["started"]
    assert await rows(conn, "select * from waypost.outbox") == []


async def test_one_stale_turn_does_not_keep_the_others_of_its_batch(conn: Connection) -> None:
    one, other = await held(conn), await held(conn)
    other.me = one.me
    await conn.execute("update waypost.execution set owner = %s", (one.me,))
    other.fence -= 1

    matched = await commits.commit(conn, [one.turn(), other.turn()], me=one.me)

    assert set(matched) == {str(one.execution)}
    assert await journal_of(conn, other.execution) == ["started"]


async def test_a_commit_sent_twice_takes_effect_once(conn: Connection) -> None:
    holder = await held(conn)
    turn = holder.turn(release=False)
    assert await commit(conn, holder, turn)

    assert not await commit(conn, holder, turn)

    assert await journal_of(conn, holder.execution) == ["started", "ended"]


async def test_the_journal_says_which_commit_took_effect_when_its_answer_was_lost(conn: Connection) -> None:
    holder, lost = await held(conn), await held(conn)
    done, not_done = holder.turn(), lost.turn()
    assert await commit(conn, holder, done)

    assert set(await commits.committed(conn, [done, not_done])) == {str(holder.execution)}


@pytest.mark.parametrize(
    ("status", "mail", "orders", "wakes"),
    [
        ("open", 0, 0, False),
        ("open", 1, 0, True),
        ("open", 0, 1, True),
        ("paused", 1, 0, False),
        ("paused", 0, 1, True),
        ("held", 1, 0, False),
        ("held", 0, 1, True),
    ],
)
async def test_a_release_wakes_for_what_came_meanwhile(
    conn: Connection, *, status: str, mail: int, orders: int, wakes: bool
) -> None:
    """Mail of other kinds does not wake who is paused; an order does."""
    holder = await held(conn)
    new = message("pay")
    assert await commit(conn, holder, holder.turn(asked("pay"), messages=[new], release=False))
    holder.position += 1
    for n in range(orders):
        await posted(conn, order(f"o{n}", holder.execution))
    if mail:
        await conn.execute(
            "select waypost.post_settled(array[1], array[%s::uuid], array[%s::uuid], array[0], array['pay'],"
            ' array[\'{"outcome": "refused", "code": "no"}\'::jsonb], null)',
            (new.message_id, holder.execution),
        )
        await conn.execute("update waypost.outbox set state = 'refused'")

    assert await commit(conn, holder, holder.turn(status=status))

    assert await is_due(conn, holder.execution) == wakes


async def test_a_turn_with_a_guard_waits_for_mail_that_was_not_loaded(conn: Connection) -> None:
    holder = await held(conn)
    await posted(conn, order("o1", holder.execution))

    assert not await commit(conn, holder, holder.turn(guard=0))
    assert await commit(conn, holder, holder.turn(guard=1))


async def test_a_turn_that_asks_waits_for_orders_that_it_has_not_read(conn: Connection) -> None:
    holder = await held(conn)
    await posted(conn, order("o1", holder.execution))
    new = message("pay")

    assert not await commit(conn, holder, holder.turn(asked("pay"), messages=[new], asks=True))
    turn = holder.turn(asked("pay"), messages=[new], asks=True, mail=1, orders=1)
    assert await commit(conn, holder, turn)


async def test_who_finishes_rests(conn: Connection) -> None:
    holder = await held(conn)

    assert await commit(conn, holder, holder.turn(("finished", "", {}), status="completed", due=NOON))

    assert await rows(
        conn, "select status, owner, wake_at, finished_at is not null from waypost.execution"
    ) == [("completed", None, None, True)]


async def test_bad_data_in_one_turn_keeps_its_whole_batch_and_can_be_split(conn: Connection) -> None:
    good, bad = await held(conn), await held(conn)
    bad.me = good.me
    await conn.execute("update waypost.execution set owner = %s", (good.me,))
    hostile = bad.turn(asked("pay"), messages=[message("pay"), message("p" * 513)])

    with pytest.raises(psycopg.errors.CheckViolation, match="keys_are_bounded"):
        await commits.commit(conn, [good.turn(), hostile], me=good.me)

    assert await journal_of(conn, good.execution) == ["started"]
    assert await commit(conn, good, good.turn())


async def test_a_takeover_frees_what_a_buried_worker_owned(conn: Connection) -> None:
    holder = await held(conn)
    await conn.execute("update waypost.worker set lease_until = now() - interval '1 s'")

    assert await workers.bury(conn) == [holder.me]
    assert await workers.take_over(conn, limit=10) == [str(holder.execution)]

    assert await journal_of(conn, holder.execution) == ["started", "orphaned"]
    assert await is_due(conn, holder.execution)
    assert not await commit(conn, holder, holder.turn())
    heir = await claim(conn, await worker(conn), holder.execution)
    assert (heir.fence, heir.position) == (holder.fence + 2, holder.position + 1)
    assert await commit(conn, heir, heir.turn())


async def test_a_worker_that_lives_is_left_alone(conn: Connection) -> None:
    await held(conn)

    assert await workers.bury(conn) == []
    assert await workers.take_over(conn, limit=10) == []


async def test_a_dead_worker_cannot_renew(conn: Connection, dsn: str) -> None:
    me = await worker(conn)

    with psycopg.connect(dsn, autocommit=True) as thread:
        assert workers.renew(thread, me=me, lease=HOUR)
        await conn.execute("update waypost.worker set lease_until = now() - interval '1 s'")
        assert not workers.renew(thread, me=me, lease=HOUR), "its lease is over"
        await conn.execute("update waypost.worker set dead_at = now(), lease_until = now() + interval '1 h'")
        assert not workers.renew(thread, me=me, lease=HOUR), "it is buried"


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("status = 'completed'", "finished_is_terminal"),
        ("status = 'completed', finished_at = now()", "finished_rests"),
        ("finished_at = now(), wake_at = null", "finished_is_terminal"),
        ("mail_read = 1", "mail_is_whole"),
        ("orders_received = 1", "orders_are_whole"),
        ("wake_at = 'infinity'", "wake_is_finite"),
        ("status = 'running'", "status_is_known"),
        ("parent = gen_random_uuid()", "child_is_whole"),
    ],
)
async def test_a_row_that_would_lie_is_refused(conn: Connection, assignment: str, sentence: str) -> None:
    await begun(conn)

    with pytest.raises(psycopg.errors.CheckViolation, match=sentence):
        await conn.execute(f"update waypost.execution set {assignment}".encode())


DEFINITION = "insert into waypost.definition (tenant_id, name, version, state) values (1, 'order', '1', %s)"


@pytest.mark.parametrize(
    "assignment", ["source = 'other'", "version = '2'", "state = 'draft'", "kind = 'code'"]
)
async def test_a_published_definition_stays_as_it_is(conn: Connection, assignment: Any) -> None:
    await conn.execute(DEFINITION, ("published",))
    allowed = assignment == "kind = 'code'"  # it is that already

    update = f"update waypost.definition set {assignment}".encode()
    if allowed:
        await conn.execute(update)
        return
    with pytest.raises(psycopg.errors.RestrictViolation, match="order version 1 is published"):
        await conn.execute(update)


async def test_a_published_definition_is_retired_and_never_deleted(conn: Connection) -> None:
    await conn.execute(DEFINITION, ("published",))

    await conn.execute("update waypost.definition set state = 'retired'")
    with pytest.raises(psycopg.errors.RestrictViolation, match="cannot be changed, only retired"):
        await conn.execute("delete from waypost.definition")


async def test_a_draft_may_change_and_go(conn: Connection) -> None:
    await conn.execute(DEFINITION, ("draft",))

    await conn.execute("update waypost.definition set source = 'other'")
    await conn.execute("delete from waypost.definition")

    assert await rows(conn, "select * from waypost.definition") == []
