"""What becomes of a message whose try ends, whose relay dies, or which its execution takes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from orchestrator.store import workers
from tests.invariants import broken
from tests.store.world import (
    NOON,
    Connection,
    asked,
    claim_message,
    commit,
    expire_claims,
    held,
    is_due,
    mail_of,
    message,
    outbox_mail,
    posted,
    reply,
    rows,
    sent,
    settle,
    state_of,
    take_back,
)

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


@pytest.mark.parametrize(
    ("at_most_once", "before", "outcome", "now_reached", "state", "mail"),
    [
        (False, False, "delivered", True, "delivered", []),
        (False, True, "delivered", True, "delivered", []),
        (False, False, "refused", True, "refused", ["refused no"]),
        (False, True, "refused", True, "refused", ["unknown sent"]),
        (False, False, "retry", True, "due", []),
        (False, False, "retry", False, "due", []),
        (True, False, "delivered", True, "delivered", []),
        (True, False, "refused", True, "refused", ["refused no"]),
        (True, False, "retry", True, "dead", ["unknown sent"]),
        (True, False, "retry", False, "refused", ["refused never-sent"]),
        (False, False, "unknown", True, "dead", ["unknown sent"]),
        (False, False, "unknown", False, "refused", ["refused never-sent"]),
        (False, True, "unknown", False, "dead", ["unknown sent"]),
    ],
)
async def test_a_try_that_ends(
    conn: Connection,
    *,
    at_most_once: bool,
    before: bool,
    outcome: str,
    now_reached: bool,
    state: str,
    mail: list[str],
) -> None:
    """`before`: an earlier try may have reached the service, so that a refusal of this one proves nothing."""
    execution, message_id = await sent(conn, at_most_once=at_most_once, reached=before)
    token = await claim_message(conn, message_id)

    assert await settle(conn, message_id, token, outcome, reached=now_reached) == state

    assert await mail_of(conn, execution) == mail
    assert await is_due(conn, execution) == bool(mail)


@pytest.mark.parametrize(
    ("before", "outcome", "now_reached", "state", "mail"),
    [
        (False, "delivered", True, "delivered", "unknown sent"),
        (False, "refused", True, "refused", "refused no"),
        (True, "refused", True, "refused", "unknown sent"),
        (False, "retry", True, "stopped", "unknown sent"),
        (False, "retry", False, "withdrawn", "refused never-sent"),
        (True, "retry", False, "stopped", "unknown sent"),
        (False, "unknown", False, "withdrawn", "refused never-sent"),
    ],
)
async def test_a_try_that_ends_after_its_message_was_taken_back(
    conn: Connection, *, before: bool, outcome: str, now_reached: bool, state: str, mail: str
) -> None:
    execution, message_id = await sent(conn, reached=before)
    token = await claim_message(conn, message_id)
    await take_back(conn, execution, message_id)
    assert await state_of(conn, message_id) == "stopping"
    assert await outbox_mail(conn, execution) == []

    assert await settle(conn, message_id, token, outcome, reached=now_reached) == state

    assert await outbox_mail(conn, execution) == [mail]


@pytest.mark.parametrize(
    ("state", "reached", "then", "mail"),
    [
        ("due", False, "withdrawn", ["refused never-sent"]),
        ("due", True, "stopped", ["unknown sent"]),
        ("expired", False, "withdrawn", ["refused never-sent"]),
        ("sending", False, "stopping", []),
        ("delivered", False, "delivered", ["unknown sent"]),
    ],
)
async def test_a_message_that_is_taken_back(
    conn: Connection, *, state: Any, reached: bool, then: str, mail: list[str]
) -> None:
    execution, message_id = await sent(conn, state=state, reached=reached)

    await take_back(conn, execution, message_id)

    assert await state_of(conn, message_id) == then
    assert await outbox_mail(conn, execution) == mail
    assert await is_due(conn, execution) == bool(mail)


async def test_what_was_taken_back_is_never_claimed_again(conn: Connection) -> None:
    execution, message_id = await sent(conn)
    await take_back(conn, execution, message_id)

    assert await claim_message(conn, message_id) is None


@pytest.mark.parametrize(("outcome", "mail"), [("refused", "refused no"), ("unknown", "unknown sent")])
async def test_taking_back_what_has_ended_says_nothing_twice(
    conn: Connection, outcome: str, mail: str
) -> None:
    execution, message_id = await sent(conn, state="sending")
    [(token,)] = await rows(conn, "select token from waypost.outbox")
    await settle(conn, message_id, token, outcome)

    await take_back(conn, execution, message_id)

    assert await outbox_mail(conn, execution) == [mail]


async def test_a_message_of_another_execution_cannot_be_taken_back(conn: Connection) -> None:
    _, message_id = await sent(conn)
    other, _ = await sent(conn, path="other")

    await take_back(conn, other, message_id)

    assert await state_of(conn, message_id) == "due"


async def test_a_turn_that_lost_its_lease_takes_nothing_back(conn: Connection) -> None:
    holder = await held(conn)
    new = message("pay")
    assert await commit(conn, holder, holder.turn(asked("pay"), messages=[new], release=False))
    holder.position += 1
    await workers.retire(conn, me=holder.me)
    await workers.take_over(conn, limit=10)

    assert not await commit(conn, holder, holder.turn(("withdrawn", "pay", {}), take_back=[new.message_id]))

    assert await state_of(conn, new.message_id) == "due"
    assert await mail_of(conn, holder.execution) == []


@pytest.mark.parametrize(
    ("at_most_once", "taken_back", "state", "mail"),
    [
        (False, False, "due", []),
        (True, False, "dead", ["unknown sent"]),
        (False, True, "stopped", ["unknown sent"]),
        (True, True, "stopped", ["unknown sent"]),
    ],
)
async def test_a_claim_whose_relay_is_silent_expires(
    conn: Connection, *, at_most_once: bool, taken_back: bool, state: str, mail: list[str]
) -> None:
    execution, message_id = await sent(conn, at_most_once=at_most_once)
    token = await claim_message(conn, message_id, lease=timedelta(seconds=-1))
    if taken_back:
        await take_back(conn, execution, message_id)

    assert await expire_claims(conn) == 1

    assert await state_of(conn, message_id) == state
    assert await rows(conn, "select reached, token, lease_until from waypost.outbox") == [(True, None, None)]
    assert await outbox_mail(conn, execution) == mail
    assert await settle(conn, message_id, token, "delivered") is None, "the claim is over"


async def test_a_claim_that_is_answered_by_a_reply_expires_quietly(conn: Connection) -> None:
    execution, message_id = await sent(conn, at_most_once=True)
    await claim_message(conn, message_id, lease=timedelta(seconds=-1))
    await posted(conn, reply("r1", message_id))

    assert await expire_claims(conn) == 1

    assert await state_of(conn, message_id) == "delivered"
    assert await mail_of(conn, execution) == ["reply r1"]


async def test_a_claim_that_lives_does_not_expire(conn: Connection) -> None:
    _, message_id = await sent(conn, state="sending")

    assert await expire_claims(conn) == 0

    assert await state_of(conn, message_id) == "sending"


async def test_a_try_is_settled_under_its_own_claim_only(conn: Connection) -> None:
    _, message_id = await sent(conn, state="sending")

    assert await settle(conn, message_id, uuid4(), "delivered") is None

    assert await state_of(conn, message_id) == "sending"


async def test_a_message_is_due_again_when_the_relay_says_so(conn: Connection) -> None:
    _, message_id = await sent(conn, state="sending")

    await conn.execute(
        "select * from waypost.settle(array[1], array[%s], array[(select token from waypost.outbox)],"
        " array['retry'], array[true], array[%s::timestamptz], array[null::jsonb])",
        (message_id, NOON),
    )

    assert await rows(conn, "select state, due_at, attempts, reached from waypost.outbox") == [
        ("due", NOON, 1, True)
    ]


async def test_an_event_that_is_refused_is_no_mail_to_anybody(conn: Connection) -> None:
    execution, message_id = await sent(conn, state="sending")
    await conn.execute("update waypost.outbox set command = false")
    [(token,)] = await rows(conn, "select token from waypost.outbox")

    assert await settle(conn, message_id, token, "refused") == "refused"

    assert await mail_of(conn, execution) == []


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("state = 'sending'", "claim_is_whole"),
        ("token = gen_random_uuid(), lease_until = now()", "claim_is_whole"),
        ("state = 'withdrawn', reached = true", "withdrawn_was_not_sent"),
        ("at_most_once = true, attempts = 2", "at_most_once_is_tried_once"),
        ("due_at = 'infinity'", "times_are_finite"),
        ("state = 'lost'", "state_is_known"),
    ],
)
async def test_a_row_that_would_lie_is_refused(conn: Connection, assignment: str, sentence: str) -> None:
    await sent(conn)

    with pytest.raises(psycopg.errors.CheckViolation, match=sentence):
        await conn.execute(f"update waypost.outbox set {assignment}".encode())
