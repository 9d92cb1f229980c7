"""What has simply arrived is settled by a statement of its own, without the row of its execution: in every case as
`waypost.settle` would have done it, or not at all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import UUID, uuid4

import psycopg
import pytest

from relay import outbox, replies
from relay.delivery import Answer, Delivered
from relay.outbox import Message, Result
from relay.replies import Reply
from tests.invariants import broken
from tests.store.world import (
    Connection,
    claim_message,
    expire_claims,
    is_due,
    mail_of,
    outbox_mail,
    posted,
    reply,
    rows,
    sent,
    take_back,
)

pytestmark = pytest.mark.postgres

OVER = timedelta(seconds=-1)  # a claim that nobody settled in time

Row = tuple[str, bool, UUID | None, bool]
"""Of a message: state, whether it may have reached the service, token, whether it is claimed."""


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    await conn.execute("set lock_timeout = '10 s'")  # who waits here waits for the test, which waits for it
    yield
    assert await broken(conn, scripted=True) == []


def arrived(message_id: UUID, token: UUID | None, *, tenant: int = 1) -> Result:
    """The service has the message that was claimed under `token`."""
    assert token is not None, "it was claimed"
    claimed = Message(
        tenant_id=tenant,
        message_id=message_id,
        token=token,
        attempt=1,
        endpoint="payments",
        content_type="",
        body=b"",
        timeout=timedelta(0),
        command=True,
        replies_from="payments",
    )
    return Result(claimed, Answer(status=202, reached=True), Delivered(), None)


def answered(message_id: UUID, event_id: str) -> Reply:
    """A reply that stood in the answer to the command `message_id`."""
    said = reply(event_id, message_id)
    return Reply(
        tenant_id=1,
        causation=message_id,
        sender=said.sender,
        source=said.source,
        event_id=said.event_id,
        type=said.type or "",
        key="",
        digest=said.digest,
        data=said.data,
        body=b"{}",
    )


async def row(conn: Connection, message_id: UUID) -> Row:
    [found] = await rows(
        conn,
        "select state, reached, token, lease_until is not null from waypost.outbox where message_id = %s",
        message_id,
    )
    return found[0], found[1], found[2], found[3]


DELIVERED: Row = ("delivered", True, None, False)


async def test_what_has_arrived_is_delivered_and_nobody_is_told(conn: Connection) -> None:
    execution, message = await sent(conn)
    token = await claim_message(conn, message)

    assert await outbox.deliver(conn, [arrived(message, token)]) == {(1, message): "delivered"}

    assert await row(conn, message) == DELIVERED
    assert await mail_of(conn, execution) == []
    assert not await is_due(conn, execution)


async def test_it_waits_for_no_execution(conn: Connection, dsn: str) -> None:
    execution, message = await sent(conn)
    token = await claim_message(conn, message)
    async with await psycopg.AsyncConnection.connect(dsn) as owner:
        await owner.execute("select from waypost.execution where execution_id = %s for update", (execution,))

        assert await outbox.deliver(conn, [arrived(message, token)]) == {(1, message): "delivered"}


async def test_it_passes_over_a_message_that_somebody_holds_and_the_others_go_on(
    conn: Connection, dsn: str
) -> None:
    (_, held), (_, free) = await sent(conn), await sent(conn)
    results = [arrived(one, await claim_message(conn, one)) for one in (held, free)]
    async with await psycopg.AsyncConnection.connect(dsn) as other:
        await other.execute("select from waypost.outbox where message_id = %s for update", (held,))

        assert await outbox.deliver(conn, results) == {(1, free): "delivered"}

    assert (await row(conn, held))[0] == "sending"
    assert await outbox.settle(conn, results) == {(1, held): "delivered"}


async def test_what_was_taken_back_meanwhile_is_left_to_who_can_tell_its_execution(conn: Connection) -> None:
    execution, message = await sent(conn)
    result = arrived(message, await claim_message(conn, message))
    await take_back(conn, execution, message)

    assert await outbox.deliver(conn, [result]) == {}

    assert (await row(conn, message))[:2] == ("stopping", False)
    assert await outbox_mail(conn, execution) == []
    assert await outbox.settle(conn, [result]) == {(1, message): "delivered"}
    assert await outbox_mail(conn, execution) == ["unknown sent"]


async def test_what_is_taken_back_afterwards_is_known_to_have_arrived(conn: Connection) -> None:
    execution, message = await sent(conn)
    await outbox.deliver(conn, [arrived(message, await claim_message(conn, message))])

    await take_back(conn, execution, message)

    assert await row(conn, message) == DELIVERED
    assert await outbox_mail(conn, execution) == ["unknown sent"]


async def test_a_reply_that_came_first_is_the_only_mail(conn: Connection) -> None:
    execution, message = await sent(conn)
    token = await claim_message(conn, message)
    await posted(conn, reply("r1", message))

    assert await outbox.deliver(conn, [arrived(message, token)]) == {(1, message): "delivered"}

    assert await row(conn, message) == DELIVERED
    assert await mail_of(conn, execution) == ["reply r1"]


async def test_a_reply_that_comes_afterwards_is_mail(conn: Connection) -> None:
    execution, message = await sent(conn)
    await outbox.deliver(conn, [arrived(message, await claim_message(conn, message))])

    await posted(conn, reply("r1", message))

    assert await row(conn, message) == DELIVERED
    assert await mail_of(conn, execution) == ["reply r1"]
    assert await is_due(conn, execution)


async def test_a_reply_in_the_answer_and_the_same_one_posted_are_one_mail(conn: Connection) -> None:
    execution, message = await sent(conn)
    token = await claim_message(conn, message)

    assert await replies.post(conn, [answered(message, "r1")]) == ["stored"]
    assert await outbox.deliver(conn, [arrived(message, token)]) == {(1, message): "delivered"}
    await posted(conn, reply("r1", message))

    assert await row(conn, message) == DELIVERED
    assert await mail_of(conn, execution) == ["reply r1"]


@pytest.mark.parametrize(
    ("at_most_once", "state", "mail"), [(False, "due", []), (True, "dead", ["unknown sent"])]
)
async def test_what_comes_after_its_claim_has_expired_changes_nothing(
    conn: Connection, *, at_most_once: bool, state: str, mail: list[str]
) -> None:
    execution, message = await sent(conn, at_most_once=at_most_once)
    token = await claim_message(conn, message, lease=OVER)
    assert await expire_claims(conn) == 1

    assert await outbox.deliver(conn, [arrived(message, token)]) == {}

    assert await row(conn, message) == (state, True, None, False)
    assert await mail_of(conn, execution) == mail


async def test_a_claim_whose_time_is_over_and_that_nobody_took_back_is_settled(conn: Connection) -> None:
    """The time says when others may take it back, not when it ends."""
    _, message = await sent(conn)
    token = await claim_message(conn, message, lease=OVER)

    assert await outbox.deliver(conn, [arrived(message, token)]) == {(1, message): "delivered"}

    assert await expire_claims(conn) == 0
    assert await row(conn, message) == DELIVERED


async def test_what_another_relay_is_sending_by_now_stays_in_its_hands(conn: Connection) -> None:
    _, message = await sent(conn)
    first = await claim_message(conn, message, lease=OVER)
    await expire_claims(conn)
    second = await claim_message(conn, message)

    assert await outbox.deliver(conn, [arrived(message, first)]) == {}

    assert await row(conn, message) == ("sending", True, second, True)
    assert await outbox.deliver(conn, [arrived(message, second)]) == {(1, message): "delivered"}


async def test_only_the_claim_that_took_it_settles_it_and_only_once(conn: Connection) -> None:
    _, message = await sent(conn)
    token = await claim_message(conn, message)

    assert await outbox.deliver(conn, [arrived(message, uuid4())]) == {}
    assert await outbox.deliver(conn, [arrived(message, token, tenant=2)]) == {}
    assert await row(conn, message) == ("sending", False, token, True)
    assert await outbox.deliver(conn, [arrived(message, token)] * 2) == {(1, message): "delivered"}
    assert await outbox.deliver(conn, [arrived(message, token)]) == {}


async def test_one_statement_settles_ours_and_leaves_what_is_not(conn: Connection) -> None:
    executions, messages = zip(*[await sent(conn) for _ in range(4)], strict=True)
    tokens = [await claim_message(conn, message) for message in messages]
    await take_back(conn, executions[1], messages[1])
    tokens[2] = uuid4()

    found = await outbox.deliver(conn, [*map(arrived, messages, tokens)])

    assert found == {(1, messages[0]): "delivered", (1, messages[3]): "delivered"}
    states = [(await row(conn, message))[0] for message in messages]
    assert states == ["delivered", "stopping", "sending", "delivered"]
