"""Waits for events: what a turn registers is filled from the shelf or by what arrives, in order, one event each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import pytest

from orchestrator.core.fact import Fact
from orchestrator.store import commits, executions
from orchestrator.store.commits import KEYS_MAX, ClosedWait, NewWait, Turn, keys_locked
from tests.invariants import broken
from tests.store.world import (
    HOUR,
    NOON,
    Connection,
    Held,
    a_few_rows_read,
    claim,
    closed,
    commit,
    event,
    fill_the_shelf,
    held,
    is_due,
    mail_of,
    message,
    order,
    posted,
    reply,
    rows,
    wait,
    waiting,
    waits_of,
    worker,
)

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


async def again(conn: Connection, execution: UUID) -> Held:
    """The execution in the hands of another worker; it is due."""
    return await claim(conn, await worker(conn), execution)


async def test_a_wait_is_registered_with_its_turn(conn: Connection) -> None:
    holder = await held(conn)

    assert await commit(conn, holder, holder.turn(waits=[wait("a"), wait("b", key="other")]))

    assert await rows(
        conn, "select execution_id, path, epoch, type, key, inbox_id from waypost.wait order by wait_id"
    ) == [(holder.execution, "a", 0, "paid", "k", None), (holder.execution, "b", 0, "paid", "other", None)]
    assert not await is_due(conn, holder.execution)


async def test_a_turn_that_does_not_match_touches_no_wait(conn: Connection) -> None:
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn(waits=[wait("a")], release=False))
    await posted(conn, event("e1", key="other"))
    stale = holder.turn(waits=[wait("b", key="other")], closes=[closed("a", was_open=True)])

    assert not await commit(conn, holder, stale)

    assert await waits_of(conn, holder.execution) == [("a", None)]
    assert await mail_of(conn, holder.execution) == []


async def test_a_stale_turn_does_not_fill_the_wait_that_its_successor_registered(conn: Connection) -> None:
    """The paths are equal and the keys are not: the stale turn has locked only its own."""
    holder = await held(conn)
    await posted(conn, event("e1"))
    assert await commit(conn, holder, holder.turn(waits=[wait("a", key="other")], release=False))
    await conn.execute("update waypost.wait set key = 'k'")

    assert not await commit(conn, holder, holder.turn(waits=[wait("a", key="third")]))

    assert await waits_of(conn, holder.execution) == [("a", None)]
    await conn.execute("update waypost.wait set key = 'other'")


async def test_an_event_on_the_shelf_fills_a_wait_as_it_is_registered_and_wakes(conn: Connection) -> None:
    """Even though the turn released its execution with a due time far ahead."""
    await posted(conn, event("e1"))
    holder = await held(conn)

    told = await commits.commit(conn, [holder.turn(waits=[wait("a")], due=NOON + 9999 * HOUR)], me=holder.me)

    assert told == {str(holder.execution): True}
    assert await waits_of(conn, holder.execution) == [("a", "e1")]
    assert await mail_of(conn, holder.execution) == ["event e1"]
    assert await is_due(conn, holder.execution)
    assert await rows(conn, "select taken from waypost.inbox") == [(True,)]


async def test_a_turn_that_is_not_released_gets_its_mail_and_stays_with_its_owner(conn: Connection) -> None:
    await posted(conn, event("e1"))
    holder = await held(conn)

    told = await commits.commit(conn, [holder.turn(waits=[wait("a")], release=False)], me=holder.me)

    assert told == {str(holder.execution): False}
    assert await mail_of(conn, holder.execution) == ["event e1"]
    assert await rows(conn, "select owner::text from waypost.execution") == [(holder.me,)]


async def test_mail_that_the_commit_itself_brings_makes_its_execution_due(conn: Connection) -> None:
    """What was never sent is told at once to who takes it back."""
    holder = await held(conn)
    pay = message("pay")
    assert await commit(conn, holder, holder.turn(("asked", "pay", {}), messages=[pay], release=False))
    holder.position += 1

    told = await commits.commit(conn, [holder.turn(take_back=[pay.message_id])], me=holder.me)

    assert told == {str(holder.execution): True}
    assert await mail_of(conn, holder.execution) == ["refused never-sent"]


async def test_mail_of_an_event_names_the_wait_and_brings_the_event(conn: Connection) -> None:
    """From the shelf as at arrival, in the epoch of the wait."""
    await posted(conn, event("e1", data='{"n": 1}'))
    holder = await held(conn)
    await conn.execute("update waypost.execution set epoch = 3")
    holder.epoch = 3
    assert await commit(conn, holder, holder.turn(waits=[wait("a")]))
    holder = await again(conn, holder.execution)
    assert await commit(conn, holder, holder.turn(waits=[wait("b")], closes=[closed("a")], mail=1))
    await posted(conn, event("e2", data='["n", 2]'))

    unread = await executions.unread(conn, [(1, str(holder.execution), 0)])

    one, other = unread[str(holder.execution)]
    assert (one.kind, one.epoch, one.path, one.type, one.key) == ("event", 3, "a", "paid", "k")
    assert (other.kind, other.epoch, other.path, other.type, other.key) == ("event", 3, "b", "paid", "k")
    assert (one.data, other.data) == ('{"n": 1}', '["n", 2]')
    assert (one.sender, one.source, one.event_id, other.event_id) == ("payments", "/payments", "e1", "e2")
    assert [(one.inbox_id,), (other.inbox_id,)] == await rows(
        conn, "select inbox_id from waypost.inbox order by 1"
    )


async def test_mail_of_another_kind_brings_no_event(conn: Connection) -> None:
    holder = await held(conn)
    pay = message("pay")
    assert await commit(conn, holder, holder.turn(("asked", "pay", {}), messages=[pay]))
    await posted(conn, reply("r1", pay.message_id, key="k"))

    [[mail]] = (await executions.unread(conn, [(1, str(holder.execution), 0)])).values()

    assert (mail.kind, mail.path, mail.inbox_id > 0) == ("reply", "pay", True)
    assert (mail.type, mail.key, mail.source, mail.event_id) == (None, None, None, None)


# ---- which event ---------------------------------------------------------------------------------------------------


async def test_an_event_that_came_before_the_execution_is_given_to_one_only(conn: Connection) -> None:
    await posted(conn, event("e1"))
    one = await waiting(conn, wait("a"))
    other = await waiting(conn, wait("a"))

    assert await mail_of(conn, one) == ["event e1"]
    assert await waits_of(conn, other) == [("a", None)]


async def test_an_event_that_came_after_the_executions_is_given_to_each(conn: Connection) -> None:
    one, other = await held(conn), await held(conn)
    await posted(conn, event("e1"))

    for holder in (one, other):
        await waiting(conn, wait("a"), holder=holder)

    assert [await mail_of(conn, it.execution) for it in (one, other)] == [["event e1"], ["event e1"]]


async def test_two_executions_that_wait_for_one_key_both_get_the_event(conn: Connection) -> None:
    one, other = await waiting(conn, wait("a")), await waiting(conn, wait("b"))

    await posted(conn, event("e1"))

    assert [await mail_of(conn, which) for which in (one, other)] == [["event e1"], ["event e1"]]
    assert await is_due(conn, one)
    assert await is_due(conn, other)


async def test_what_somebody_had_before_the_execution_was_created_is_not_given_to_it(
    conn: Connection,
) -> None:
    await waiting(conn, wait("a"))
    await posted(conn, event("e1"))

    late = await waiting(conn, wait("a"))

    assert await waits_of(conn, late) == [("a", None)]


async def test_events_of_a_key_are_got_in_order_from_the_shelf_and_at_arrival(conn: Connection) -> None:
    await posted(conn, event("e1"), event("e2"))
    execution = await waiting(conn, wait("a"))
    await posted(conn, event("e3"))

    for n, path in ((1, "b"), (1, "c"), (1, "d")):
        holder = await again(conn, execution)
        before = chr(ord(path) - 1)
        assert await commit(conn, holder, holder.turn(waits=[wait(path)], closes=[closed(before)], mail=n))
    await posted(conn, event("e4"))

    assert await mail_of(conn, execution) == ["event e1", "event e2", "event e3", "event e4"]


async def test_waits_of_one_turn_get_an_event_each_oldest_first(conn: Connection) -> None:
    await posted(conn, event("e1"), event("e2"), event("e3", key="other"))

    execution = await waiting(conn, wait("b"), wait("a"), wait("c"), wait("d", key="other"))

    assert await waits_of(conn, execution) == [("b", "e1"), ("a", "e2"), ("c", None), ("d", "e3")]
    assert await mail_of(conn, execution) == ["event e1", "event e2", "event e3"]


async def test_a_wait_gets_one_event_and_keeps_it(conn: Connection) -> None:
    execution = await waiting(conn, wait("a"))
    await posted(conn, event("e1"))
    await posted(conn, event("e2"))

    assert await waits_of(conn, execution) == [("a", "e1")]
    assert await mail_of(conn, execution) == ["event e1"]

    holder = await again(conn, execution)
    assert await commit(conn, holder, holder.turn(waits=[wait("b")], closes=[closed("a")], mail=1))
    assert await mail_of(conn, execution) == ["event e1", "event e2"]


async def test_an_event_of_another_type_key_or_tenant_fills_nothing(conn: Connection) -> None:
    await conn.execute("insert into waypost.tenant (tenant_id, name) values (2, 'other')")
    await posted(conn, event("e1", key="K"), event("e2", type="Paid"), event("e3", tenant=2))

    execution = await waiting(conn, wait("a"))
    await posted(conn, event("e4", key=""), event("e5", type="paid.2"), event("e6", tenant=2))

    assert await waits_of(conn, execution) == [("a", None)]


@pytest.mark.parametrize("before", [True, False], ids=["before the execution", "after it"])
async def test_an_event_whose_time_on_the_shelf_is_over_is_offered_to_nobody(
    conn: Connection, *, before: bool
) -> None:
    """The moment at which the first one's time ends is too late for it, and not for the second one."""
    holder = None if before else await held(conn)
    await posted(conn, event("e1"), now=NOON)
    await posted(conn, event("e2"), now=NOON + HOUR)
    [(over,)] = await rows(conn, "select min(shelf_until) from waypost.inbox")
    holder = holder or await held(conn)

    await commits.commit(conn, [holder.turn(waits=[wait("a")])], me=holder.me, now=over)

    assert await mail_of(conn, holder.execution) == ["event e2"]


@pytest.mark.parametrize("status", ["paused", "held"])
async def test_a_wait_of_who_is_paused_or_held_is_filled_and_wakes_nobody(
    conn: Connection, status: str
) -> None:
    await posted(conn, event("e1"))
    holder = await held(conn)

    told = await commits.commit(conn, [holder.turn(status=status, waits=[wait("a")])], me=holder.me)

    assert told == {str(holder.execution): False}
    assert await mail_of(conn, holder.execution) == ["event e1"]
    assert await rows(conn, "select wake_at from waypost.execution") == [(None,)]


async def test_forty_waits_of_one_batch_are_filled_at_once(conn: Connection) -> None:
    await posted(conn, *(event(f"e{n}", key=f"k{n}") for n in range(0, 40, 2)))
    holders = [await held(conn) for _ in range(40)]
    me = holders[0].me
    await conn.execute("update waypost.execution set owner = %s", (me,))
    turns = [holder.turn(waits=[wait("a", key=f"k{n}")]) for n, holder in enumerate(holders)]

    told = await commits.commit(conn, turns, me=me)

    assert told == {str(holder.execution): n % 2 == 0 for n, holder in enumerate(holders)}
    for n, holder in enumerate(holders):
        assert await mail_of(conn, holder.execution) == ([] if n % 2 else [f"event e{n}"])


# ---- closing -------------------------------------------------------------------------------------------------------


async def test_a_turn_that_read_the_event_closes_its_wait(conn: Connection) -> None:
    execution = await waiting(conn, wait("a"))
    await posted(conn, event("e1"))
    holder = await again(conn, execution)

    assert await commit(conn, holder, holder.turn(closes=[closed("a")], mail=1))

    assert await waits_of(conn, execution) == []
    assert not await is_due(conn, execution)


async def test_an_open_wait_is_closed_only_if_nothing_came_meanwhile(conn: Connection) -> None:
    """The worker has seen it open, and an event has filled it since: the guard makes it look again."""
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn(waits=[wait("a")], release=False))
    holder.position += 1
    times_out = holder.turn(closes=[closed("a", was_open=True)], guard=0)
    await posted(conn, event("e1"))

    assert not await commit(conn, holder, times_out)

    assert await waits_of(conn, holder.execution) == [("a", "e1")]
    assert await commit(conn, holder, holder.turn(closes=[closed("a")], guard=1, mail=1))


async def test_an_event_after_its_wait_was_closed_stays_on_the_shelf_for_the_next(conn: Connection) -> None:
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn(waits=[wait("a")], release=False))
    holder.position += 1
    assert await commit(
        conn, holder, holder.turn(closes=[closed("a", was_open=True)], guard=0, release=False)
    )
    holder.position += 1

    await posted(conn, event("e1"))
    assert await mail_of(conn, holder.execution) == []

    await waiting(conn, wait("b"), holder=holder)
    assert await waits_of(conn, holder.execution) == [("b", "e1")]


async def test_a_turn_may_close_a_wait_and_register_one_under_its_path(conn: Connection) -> None:
    """As a flow that continues as new does."""
    await posted(conn, event("e1"))
    execution = await waiting(conn, wait("a"))
    holder = await again(conn, execution)

    assert await commit(
        conn, holder, holder.turn(closes=[closed("a")], waits=[wait("a", key="other")], mail=1)
    )

    assert await rows(conn, "select path, key, inbox_id from waypost.wait") == [("a", "other", None)]


async def test_who_finishes_leaves_no_wait(conn: Connection) -> None:
    execution = await waiting(conn, wait("a"), wait("b", key="other"))
    await posted(conn, event("e1"))
    holder = await again(conn, execution)
    last = holder.turn(
        ("finished", "", {}),
        status="completed",
        closes=[closed("a"), closed("b", key="other", was_open=True)],
        guard=1,
        mail=1,
    )

    assert await commit(conn, holder, last)
    await posted(conn, event("e2", key="other"))

    assert await waits_of(conn, execution) == []
    assert await mail_of(conn, execution) == ["event e1"]


async def test_an_order_does_not_count_as_an_event(conn: Connection) -> None:
    """Guards speak of mail of any kind; what was loaded and is not read yet does not stand in the way."""
    holder = await held(conn)
    assert await commit(conn, holder, holder.turn(waits=[wait("a")], release=False))
    holder.position += 1
    await posted(conn, order("o1", holder.execution))

    assert await commit(conn, holder, holder.turn(closes=[closed("a", was_open=True)], guard=1))


# ---- keys ----------------------------------------------------------------------------------------------------------


def turn(*, waits: list[NewWait], closes: list[ClosedWait]) -> Turn:
    return Turn(
        tenant=7, execution="e", fence=1, position=1, epoch=0, facts=list[Fact](), mail=0, orders=0, status="open",
        undoing=False, release=True, due=None, guard=None, asks=False, waits=waits, closed_waits=closes,
    )  # fmt: skip


def test_a_turn_locks_the_keys_of_waits_that_may_meet_an_event() -> None:
    registers = [wait("a"), wait("b"), wait("c", key="other")]

    assert keys_locked(turn(waits=[], closes=[])) == set()
    assert keys_locked(turn(waits=registers, closes=[])) == {(7, "paid", "k"), (7, "paid", "other")}
    assert keys_locked(turn(waits=[], closes=[closed("a"), closed("b", key="x", was_open=True)])) == {
        (7, "paid", "x")
    }


async def test_as_many_keys_as_one_transaction_may_lock(conn: Connection) -> None:
    holder = await held(conn)

    assert await commit(
        conn, holder, holder.turn(waits=[wait(f"w{n}", key=f"k{n}") for n in range(KEYS_MAX)])
    )

    assert await rows(conn, "select count(*) from waypost.wait") == [(KEYS_MAX,)]


# ---- plans ---------------------------------------------------------------------------------------------------------


async def test_matching_reads_a_few_rows_however_long_the_shelf(conn: Connection) -> None:
    """Nothing has analysed the tables, and the session's plans are from when they were empty. Of the key there are
    5,000 events; somebody has all but the last.
    """
    for _ in range(8):
        await waiting(conn, wait("a", key="other"))
    await posted(conn, event("e1", key="other"))
    for _ in range(8):
        await waiting(conn, wait("a", key="other"))
    await fill_the_shelf(conn)
    await conn.execute("update waypost.inbox set taken = false where event_id = 'old 5000'")
    await conn.execute("update waypost.inbox set shelf_until = now() + interval '1 day'")
    holder = await held(conn)

    async with conn.transaction(force_rollback=True):
        async with a_few_rows_read(conn):
            assert await commit(conn, holder, holder.turn(waits=[wait("a")]))
        assert await mail_of(conn, holder.execution) == ["event old 5000"]
    await conn.execute("delete from waypost.inbox where key = 'k'")


async def test_an_event_reads_a_few_rows_however_long_the_shelf(conn: Connection) -> None:
    """It fills one wait; 5,000 other events that nobody has are on the shelf, of its key too."""
    for _ in range(8):
        await waiting(conn, wait("a", key="other"))
        await posted(conn, event(str(uuid4()), key="other"))
    execution = await waiting(conn, wait("a", key="new"))
    await fill_the_shelf(conn)
    await conn.execute("update waypost.inbox set taken = false where key = 'k'")

    async with conn.transaction(force_rollback=True):
        async with a_few_rows_read(conn):
            await posted(conn, event("e1", key="new"))
        assert await mail_of(conn, execution) == ["event e1"]
