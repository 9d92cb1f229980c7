"""What the answers of an endpoint mean for the endpoint, in its row, for all relays."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from contracts.outcome import Outcome
from relay import health, outbox
from relay.delivery import Answer, Dead, Delivered, Refused, Retry, Spared, Verdict
from relay.health import Change, notes_on
from relay.outbox import Message, Result
from tests.relay import given
from tests.relay.given import NOON, Connection

pytestmark = pytest.mark.postgres

DOWN = Retry(timedelta(seconds=1), reached=True)
NO = Refused(Outcome("refused", code="http-422"))
GONE = Refused(Outcome("refused", code="http-410"), disable=True)


def result(
    verdict: Verdict = DOWN, status: int | None = 503, *, watched: bool = True, probe: bool = False
) -> Result:
    message = Message(
        tenant_id=1,
        message_id=uuid4(),
        token=uuid4(),
        attempt=1,
        endpoint="payments",
        content_type="",
        body=b"",
        timeout=timedelta(0),
        command=True,
        replies_from="payments",
        watched=watched,
        probe=probe,
    )
    return Result(message, Answer(status=status, reached=True), verdict, NOON)


def well(**more: Any) -> Result:
    return result(Delivered(), 202, **more)


async def note(conn: Connection, *results: Result, at: datetime = NOON) -> list[Change]:
    return list(await health.write(conn, notes_on(results), now=at))


async def state(conn: Connection, *columns: str) -> tuple[Any, ...]:
    cursor = await conn.execute("select to_jsonb(e) from waypost.endpoint e")
    [(found,)] = await cursor.fetchall()
    return tuple(found[column] for column in columns)


async def claim(conn: Connection, *, at: datetime, room: int = 100, limit: int = 100) -> list[Message]:
    return await outbox.claim(
        conn,
        token=uuid4(),
        limit=limit,
        room=room,
        busy={},
        timeout_max=timedelta(minutes=5),
        margin=timedelta(seconds=10),
        guarded=True,
        now=at,
    )


@pytest.fixture
async def registered(conn: Connection) -> Connection:
    await given.endpoint(conn, "https://payments.test/")
    return conn


# What there is to write


def test_an_endpoint_that_works_costs_nothing() -> None:
    assert notes_on([well(watched=False), result(NO, 422, watched=False)]) == {}
    assert notes_on([result(Spared(timedelta(0)), None, watched=False)]) == {}


@pytest.mark.parametrize("verdict", [DOWN, Dead("timeout", reached=True), GONE])
def test_a_failure_is_written_and_so_is_a_success_after_one(verdict: Verdict) -> None:
    assert notes_on([result(verdict, watched=False)])
    assert notes_on([well(watched=True)])


# Days of failures


async def test_only_failures_for_five_days_disable_an_endpoint(registered: Connection) -> None:
    began = NOON
    for hours in range(0, 120, 10):
        assert await note(registered, result(), at=began + timedelta(hours=hours)) == []

    [change] = await note(registered, result(), at=began + timedelta(days=5))

    assert change.disabled == "failing"
    assert await state(registered, "state", "fault") == ("disabled", "failing")


@pytest.mark.parametrize("good", [well(), result(NO, 422)])
async def test_a_single_success_begins_the_days_anew(registered: Connection, good: Result) -> None:
    """So does a refusal by a service that looked at the command."""
    await note(registered, result())
    await note(registered, good, at=NOON + timedelta(days=4))
    await note(registered, result(), at=NOON + timedelta(days=5))

    assert await note(registered, result(), at=NOON + timedelta(days=9, hours=23)) == []
    [change] = await note(registered, result(), at=NOON + timedelta(days=10))
    assert change.disabled == "failing"


async def test_success_on_the_last_try_of_a_message_keeps_its_endpoint_enabled(
    registered: Connection,
) -> None:
    """Elsewhere an endpoint was disabled by the number of the try, though that one was taken."""
    await note(registered, result())

    assert await note(registered, well(), at=NOON + timedelta(days=30)) == []
    assert await state(registered, "state", "failing_since") == ("enabled", None)


async def test_a_success_among_the_failures_of_one_batch_counts(registered: Connection) -> None:
    await note(registered, result())

    await note(registered, result(), well(), result(), at=NOON + timedelta(days=6))

    assert await state(registered, "state", "failing_since") == ("enabled", None)


async def test_two_relays_that_write_at_once_both_see_the_threshold(registered: Connection, dsn: str) -> None:
    """A threshold that is compared with an equal sign is jumped over by the second of them."""
    await note(registered, result())
    async with await Connection.connect(dsn, autocommit=True) as other:
        async with registered.transaction():
            await note(registered, result(), at=NOON + timedelta(days=4))
        [change] = await note(other, result(), at=NOON + timedelta(days=50))

    assert change.disabled == "failing"


async def test_an_endpoint_may_be_kept_enabled_whatever_happens(registered: Connection) -> None:
    await registered.execute("update waypost.endpoint set disable_after = null")
    await note(registered, result())

    assert await note(registered, result(), at=NOON + timedelta(days=400)) == []


async def test_410_disables_at_once_and_says_why(registered: Connection) -> None:
    [change] = await note(registered, result(GONE, 410))

    assert change.disabled == "gone"
    assert await state(registered, "state", "fault") == ("disabled", "gone")


# The circuit


async def opened(conn: Connection, *, at: datetime = NOON) -> None:
    [change] = await note(conn, *(result() for _ in range(10)), at=at)
    assert change.opened


@pytest.mark.parametrize(
    ("good", "bad", "opens"), [(0, 9, False), (0, 10, True), (3, 7, True), (4, 7, False)]
)
async def test_a_circuit_opens_when_seven_of_ten_tries_of_a_minute_failed(
    registered: Connection, good: int, bad: int, *, opens: bool
) -> None:
    changes = await note(registered, *(well() for _ in range(good)), *(result() for _ in range(bad)))

    assert [change.opened for change in changes] == [True] * opens


async def test_tries_of_different_minutes_are_not_added_up(registered: Connection) -> None:
    await note(registered, *(result() for _ in range(9)))

    assert await note(registered, result(), at=NOON + timedelta(seconds=61)) == []
    assert await state(registered, "window_tries", "window_failures") == (1, 1)


async def test_tries_of_different_relays_are_added_up(registered: Connection) -> None:
    for _ in range(3):
        await note(registered, *(result() for _ in range(3)))

    [change] = await note(registered, result())
    assert change.opened


@pytest.mark.parametrize("status", [400, 404, 422, 429, 301])
async def test_who_answers_is_no_reason_to_open_a_circuit(registered: Connection, status: int) -> None:
    await note(registered, *(result(DOWN, status) for _ in range(50)))

    assert await state(registered, "open_until", "failing_since") != (None, None)
    assert await state(registered, "open_until") == (None,)


async def test_what_we_are_to_blame_for_is_no_reason_either(registered: Connection) -> None:
    await note(registered, *(result(Spared(timedelta(0)), None) for _ in range(50)), well())

    assert await state(registered, "window_failures", "open_until") == (0, None)


async def test_while_a_circuit_is_open_nothing_is_sent_and_no_try_is_counted(registered: Connection) -> None:
    await opened(registered)
    message = await given.message(registered, await given.execution(registered))

    assert await claim(registered, at=NOON + timedelta(milliseconds=999)) == []
    assert (await given.row(registered, message))["attempts"] == 0


async def test_then_one_relay_may_try_the_longest_due_and_no_other(registered: Connection, dsn: str) -> None:
    await opened(registered)
    execution = await given.execution(registered)
    for seconds in (3, 1, 2):
        await given.message(registered, execution, at=NOON - timedelta(seconds=seconds))
    at = NOON + timedelta(seconds=1)

    [first] = await claim(registered, at=at)
    async with await Connection.connect(dsn, autocommit=True) as other:
        second = await claim(other, at=at)
        after_its_lease = await claim(other, at=at + timedelta(seconds=26))

    assert (first.probe, first.watched) == (True, True)
    cursor = await registered.execute(
        "select due_at from waypost.outbox where message_id = %s", (first.message_id,)
    )
    assert await cursor.fetchone() == (NOON - timedelta(seconds=3),)
    assert second == []
    assert len(after_its_lease) == 1


async def test_two_relays_that_ask_at_the_same_moment_do_not_both_try(
    registered: Connection, dsn: str
) -> None:
    await opened(registered)
    execution = await given.execution(registered)
    for _ in range(3):
        await given.message(registered, execution)
    at = NOON + timedelta(seconds=1)

    async with await Connection.connect(dsn, autocommit=True) as other, registered.transaction():
        mine = await claim(registered, at=at)
        theirs = await claim(other, at=at)

    assert (len(mine), len(theirs)) == (1, 0)


async def test_a_try_that_goes_through_closes_the_circuit(registered: Connection) -> None:
    await opened(registered)

    [change] = await note(registered, well(probe=True), at=NOON + timedelta(seconds=1))

    assert change.closed
    assert await state(registered, "open_until", "opened", "window_tries") == (None, 0, 0)


async def test_each_try_that_fails_leaves_it_open_for_twice_as_long_up_to_half_a_minute(
    registered: Connection,
) -> None:
    await opened(registered)
    waits: list[float] = []

    for _ in range(7):
        await note(registered, result(probe=True), at=NOON)
        (until,) = await state(registered, "open_until")
        waits.append((datetime.fromisoformat(until) - NOON).total_seconds())

    assert waits == [2, 4, 8, 16, 30, 30, 30]


async def test_what_was_under_way_when_it_opened_does_not_make_it_longer(registered: Connection) -> None:
    await opened(registered)
    before = await state(registered, "open_until", "opened")

    await note(registered, *(result() for _ in range(20)))

    assert await state(registered, "open_until", "opened") == before


# Rates


async def rate(conn: Connection, per_second: float, burst: int | None = None) -> None:
    await conn.execute("update waypost.endpoint set rate = %s, burst = %s", (per_second, burst))
    execution = await given.execution(conn)
    for _ in range(40):
        await given.message(conn, execution)


async def test_all_relays_together_send_no_more_than_the_rate(registered: Connection, dsn: str) -> None:
    await rate(registered, 5)
    async with await Connection.connect(dsn, autocommit=True) as other:
        taken = [
            len(await claim(conn, at=NOON + timedelta(milliseconds=100 * tenths)))
            for tenths in range(31)
            for conn in (registered, other)
        ]

    assert taken[:2] == [5, 0]  # a second's worth at once, after a pause
    assert sum(taken) == 5 + 15  # and five in each of three seconds


async def test_a_burst_may_be_larger_than_what_a_second_brings_and_no_pause_saves_more(
    registered: Connection,
) -> None:
    await rate(registered, 2, burst=7)

    assert len(await claim(registered, at=NOON)) == 7
    assert len(await claim(registered, at=NOON + timedelta(seconds=1))) == 2
    assert len(await claim(registered, at=NOON + timedelta(hours=1))) == 7


async def test_a_rate_of_less_than_one_a_second_lets_one_through_at_a_time(registered: Connection) -> None:
    await rate(registered, 0.1)

    taken = [len(await claim(registered, at=NOON + timedelta(seconds=s))) for s in range(31)]

    assert [at for at, count in enumerate(taken) if count] == [0, 10, 20, 30]
    assert set(taken) == {0, 1}


async def test_what_is_not_taken_for_want_of_room_costs_no_token(registered: Connection) -> None:
    await rate(registered, 10)

    assert len(await claim(registered, at=NOON, limit=4)) == 4
    assert len(await claim(registered, at=NOON)) == 6


async def test_a_claim_that_does_not_look_at_rates_takes_nothing_of_theirs(registered: Connection) -> None:
    await rate(registered, 10)

    taken = await outbox.claim(
        registered,
        token=uuid4(),
        limit=100,
        room=100,
        busy={},
        timeout_max=timedelta(minutes=5),
        margin=timedelta(seconds=10),
        now=NOON,
    )

    assert taken == []
    assert await health.guarded(registered)


async def test_an_endpoint_s_own_concurrency_wins_over_the_relay_s(registered: Connection) -> None:
    await registered.execute("update waypost.endpoint set concurrency = 3")
    execution = await given.execution(registered)
    for _ in range(10):
        await given.message(registered, execution)

    taken = await claim(registered, at=NOON, room=8)

    assert [message.concurrency for message in taken] == [3, 3, 3]
