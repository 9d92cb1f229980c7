"""Races about messages: the relay that sends them, the execution that takes them back, the service that replies."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from orchestrator.store.database import Connection
from relay import outbox, replies
from relay.delivery import Verdict
from relay.outbox import Message
from relay.replies import Reply
from tests.explorer.moves import (
    DELIVERED,
    OVER,
    REACHED,
    REFUSED,
    UNREACHED,
    alone,
    asks,
    claim_messages,
    commit_of,
    commits_of,
    expire_claims,
    owned,
    owned_with_message,
    post,
    result,
    settle,
    settled,
    sleeping_with_message,
    take_back,
)
from tests.explorer.races import Ending, Look, Scene, race
from tests.explorer.sessions import Program, Session
from tests.store.world import NOON, mail_of, message, reply, rows, state_of


def fate(execution: UUID, message_id: UUID) -> Look:
    """The state of the message, and the mail of its execution in order."""

    async def look(conn: Connection, _: Ending) -> str:
        mail = ", ".join(await mail_of(conn, execution)) or "-"
        return f"{await state_of(conn, message_id)}: {mail}"

    return look


def fates(*of: tuple[UUID, UUID]) -> Look:
    async def look(conn: Connection, ending: Ending) -> str:
        return " | ".join([await fate(execution, message_id)(conn, ending) for execution, message_id in of])

    return look


# -- a reply and the relay ---------------------------------------------------------------------------------


async def reply_and_settlement(conn: Connection, verdict: Verdict, *, at_most_once: bool = False) -> Scene:
    execution, message_id = await sleeping_with_message(conn, at_most_once=at_most_once)
    [claimed] = await claim_messages(conn)
    return Scene(
        {"reply": post(reply("r1", message_id)), "settlement": settle(result(claimed, verdict))},
        fate(execution, message_id),
    )


@race("delivered: reply r1", "refused: refused no, reply r1")
async def a_reply_and_a_refusal_of_its_message_agree(conn: Connection) -> Scene:
    return await reply_and_settlement(conn, REFUSED)


@race("delivered: reply r1")
async def a_reply_and_a_try_that_failed_agree(conn: Connection) -> Scene:
    return await reply_and_settlement(conn, REACHED)


@race("delivered: reply r1")
async def a_reply_and_a_delivery_agree(conn: Connection) -> Scene:
    """A delivery needs no row of an execution. It passes over a message that somebody holds, and looks again later."""
    return await reply_and_settlement(conn, DELIVERED)


@race("delivered: reply r1", "dead: unknown sent, reply r1")
async def a_reply_and_a_claim_that_expires_agree(conn: Connection) -> Scene:
    execution, message_id = await sleeping_with_message(conn, at_most_once=True)
    await claim_messages(conn, lease=OVER)
    return Scene(
        {"reply": post(reply("r1", message_id)), "expiry": alone(expire_claims)}, fate(execution, message_id)
    )


def reply_in_answer(to: UUID) -> Reply:
    """What `reply("r1", to)` says, as the relay reads it in an answer."""
    item = reply("r1", to)
    return Reply(
        tenant_id=1,
        causation=to,
        sender=item.sender,
        source=item.source,
        event_id=item.event_id,
        type=item.type or "",
        key="",
        digest=item.digest,
        data=item.data,
        body=b"{}",
    )


@race("delivered: reply r1")
async def a_reply_in_an_answer_and_the_same_reply_posted_agree(conn: Connection) -> Scene:
    """The relay stores the reply first, in a transaction of its own, and then settles the try."""
    return await answered(conn)


async def answered(conn: Connection, *, at_once: bool = False) -> Scene:
    """`at_once`: the relay does both in one transaction, the settlement first."""
    execution, message_id = await sleeping_with_message(conn)
    [claimed] = await claim_messages(conn)

    async def relay(session: Session) -> None:
        if at_once:
            async with session.transaction() as mine:
                await outbox.end(mine, [result(claimed, DELIVERED)])
                await replies.post(mine, [reply_in_answer(message_id)])
            return
        async with session.transaction() as mine:
            await replies.post(mine, [reply_in_answer(message_id)])
        await settled(session, result(claimed, DELIVERED))

    return Scene({"receiver": post(reply("r1", message_id)), "relay": relay}, fate(execution, message_id))


# -- taking back and the relay -----------------------------------------------------------------------------


async def back_and_settlement(conn: Connection, verdict: Verdict) -> Scene:
    """A turn takes a message back while it is being sent, and that try ends."""
    holder, message_id = await owned_with_message(conn)
    [claimed] = await claim_messages(conn)
    return Scene(
        {
            "settlement": settle(result(claimed, verdict)),
            "turn": commit_of(holder, take_back(holder, message_id)),
        },
        fate(holder.execution, message_id),
    )


@race("delivered: unknown sent")
async def taking_back_and_a_delivery_agree(conn: Connection) -> Scene:
    return await back_and_settlement(conn, DELIVERED)


@race("refused: refused no")
async def taking_back_and_a_refusal_agree(conn: Connection) -> Scene:
    return await back_and_settlement(conn, REFUSED)


@race("stopped: unknown sent")
async def taking_back_and_a_try_that_may_have_arrived_agree(conn: Connection) -> Scene:
    return await back_and_settlement(conn, REACHED)


@race("withdrawn: refused never-sent")
async def taking_back_and_a_try_that_did_not_arrive_agree(conn: Connection) -> Scene:
    return await back_and_settlement(conn, UNREACHED)


@race("stopping: -", "withdrawn: refused never-sent")
async def taking_back_and_a_claim_agree(conn: Connection) -> Scene:
    """A claim does not wait for who takes back, and finds nothing then."""
    holder, message_id = await owned_with_message(conn)
    return Scene(
        {
            "claim": alone(claim_messages),
            "turn": commit_of(holder, take_back(holder, message_id)),
        },
        fate(holder.execution, message_id),
    )


def claims_and_settles(verdict: Verdict) -> Program:
    """A relay claims what is due, and writes down what came of it: two transactions."""

    async def program(session: Session) -> list[str]:
        async with session.transaction() as mine:
            claimed = await claim_messages(mine)
        return await settled(session, *(result(one, verdict) for one in claimed))

    return program


@race("delivered: unknown sent", "withdrawn: refused never-sent")
async def taking_back_and_a_relay_that_delivers_agree(conn: Connection) -> Scene:
    holder, message_id = await owned_with_message(conn)
    return Scene(
        {
            "relay": claims_and_settles(DELIVERED),
            "turn": commit_of(holder, take_back(holder, message_id)),
        },
        fate(holder.execution, message_id),
    )


async def back_and_expiry(conn: Connection, *, at_most_once: bool) -> Scene:
    holder, message_id = await owned_with_message(conn, at_most_once=at_most_once)
    await claim_messages(conn, lease=OVER)
    return Scene(
        {
            "expiry": alone(expire_claims),
            "turn": commit_of(holder, take_back(holder, message_id)),
        },
        fate(holder.execution, message_id),
    )


@race("stopped: unknown sent")
async def taking_back_and_a_claim_that_expires_agree(conn: Connection) -> Scene:
    return await back_and_expiry(conn, at_most_once=False)


@race("stopped: unknown sent", "dead: unknown sent")
async def taking_back_and_a_claim_at_most_once_that_expires_agree(conn: Connection) -> Scene:
    return await back_and_expiry(conn, at_most_once=True)


@race("withdrawn: refused never-sent")
async def taking_back_and_the_end_of_its_time_agree(conn: Connection) -> Scene:
    [holder] = await owned(conn, 1)
    message_id = await asks(conn, holder, expires_at=NOON)
    return Scene(
        {
            "expiry": alone(lambda conn: outbox.expire_due(conn, limit=100)),
            "turn": commit_of(holder, take_back(holder, message_id)),
        },
        fate(holder.execution, message_id),
    )


@race("delivered: reply r1, unknown sent", "delivered: unknown sent, reply r1")
async def taking_back_what_was_delivered_and_its_reply_agree(conn: Connection) -> Scene:
    holder, message_id = await owned_with_message(conn)
    [claimed] = await claim_messages(conn)
    await outbox.settle(conn, [result(claimed, DELIVERED)])
    return Scene(
        {
            "reply": post(reply("r1", message_id)),
            "turn": commit_of(holder, take_back(holder, message_id)),
        },
        fate(holder.execution, message_id),
    )


@race("delivered: reply r1, unknown sent", "withdrawn: refused never-sent, reply r1")
async def taking_back_what_is_due_and_its_reply_agree(conn: Connection) -> Scene:
    """A reply may come before its try is settled, or after its claim expired: the message is due again."""
    holder, message_id = await owned_with_message(conn)
    return Scene(
        {
            "reply": post(reply("r1", message_id)),
            "turn": commit_of(holder, take_back(holder, message_id)),
        },
        fate(holder.execution, message_id),
    )


# -- relays among themselves -------------------------------------------------------------------------------


@race("2 and 1", "1 and 2", waits=False)
async def two_relays_claim_nothing_twice(conn: Connection) -> Scene:
    """Three messages, one of them at most once; each claim takes up to two."""
    [holder] = await owned(conn, 1)
    for path in "abc":
        await asks(conn, holder, path, at_most_once=path == "b")

    async def look(conn: Connection, ending: Ending) -> str:
        one: list[Message] = ending.results["one"]
        other: list[Message] = ending.results["other"]
        found = await rows(conn, "select message_id, token from waypost.outbox where state = 'sending'")
        assert sorted(found) == sorted((m.message_id, m.token) for m in (*one, *other))
        return f"{len(one)} and {len(other)}"

    program = alone(lambda conn: claim_messages(conn, limit=2))
    return Scene({"one": program, "other": program}, look)


async def settlement_and_expiry(conn: Connection, verdict: Verdict, *, at_most_once: bool) -> Scene:
    execution, message_id = await sleeping_with_message(conn, at_most_once=at_most_once)
    [claimed] = await claim_messages(conn, lease=OVER)
    return Scene(
        {"settlement": settle(result(claimed, verdict)), "expiry": alone(expire_claims)},
        fate(execution, message_id),
    )


@race("delivered: -", "dead: unknown sent")
async def a_settlement_and_the_expiry_of_its_claim_at_most_once_agree(conn: Connection) -> Scene:
    return await settlement_and_expiry(conn, DELIVERED, at_most_once=True)


@race("refused: refused no", "due: -")
async def a_settlement_and_the_expiry_of_its_claim_agree(conn: Connection) -> Scene:
    return await settlement_and_expiry(conn, REFUSED, at_most_once=False)


@race("refused: refused no", "sending: -", "due: -")
async def a_settlement_and_another_relay_that_expires_and_claims_agree(conn: Connection) -> Scene:
    """The first relay was silent for too long. Its settlement counts while the claim is its own, and never later."""
    return await settlement_and_another(conn, REFUSED)


@race("delivered: -", "sending: -", "due: -")
async def a_delivery_and_another_relay_that_expires_and_claims_agree(conn: Connection) -> Scene:
    return await settlement_and_another(conn, DELIVERED)


async def settlement_and_another(conn: Connection, verdict: Verdict) -> Scene:
    execution, message_id = await sleeping_with_message(conn)
    [claimed] = await claim_messages(conn, lease=OVER)

    async def other(session: Session) -> list[Message]:
        async with session.transaction() as mine:
            await expire_claims(mine)
        async with session.transaction() as mine:
            return await claim_messages(mine)

    async def look(conn: Connection, ending: Ending) -> str:
        told = await fate(execution, message_id)(conn, ending)
        if ending.results["other"] and ending.results["settlement"]:
            return f"the try of another was settled, {told}"
        return told

    return Scene({"settlement": settle(result(claimed, verdict)), "other": other}, look)


@race("claimed 1: sending", "claimed 0: due")
async def an_expiry_and_a_relay_that_settles_too_late_and_claims_anew_agree(conn: Connection) -> Scene:
    """The expiry saw a claim that was over. By the time it has the locks, there may be a new one, which is not."""
    _, message_id = await sleeping_with_message(conn)
    [claimed] = await claim_messages(conn, lease=OVER)

    async def relay(session: Session) -> list[Message]:
        await settled(session, result(claimed, REACHED))
        async with session.transaction() as mine:
            return await claim_messages(mine)

    async def look(conn: Connection, ending: Ending) -> str:
        return f"claimed {len(ending.results['relay'])}: {await state_of(conn, message_id)}"

    return Scene({"expiry": alone(expire_claims), "relay": relay}, look)


@race("1 and 0", "0 and 1")
async def two_relays_expire_a_claim_once(conn: Connection) -> Scene:
    execution, _ = await sleeping_with_message(conn, at_most_once=True)
    await claim_messages(conn, lease=OVER)

    async def look(conn: Connection, ending: Ending) -> str:
        assert await mail_of(conn, execution) == ["unknown sent"]
        return f"{ending.results['one']} and {ending.results['other']}"

    return Scene({"one": alone(expire_claims), "other": alone(expire_claims)}, look)


@race("2 and 0", "0 and 2")
async def two_relays_expire_the_claims_of_two_executions_once(conn: Connection) -> Scene:
    for _ in range(2):
        await sleeping_with_message(conn, at_most_once=True)
    await claim_messages(conn, lease=OVER)

    async def look(conn: Connection, ending: Ending) -> str:
        assert [s for (s,) in await rows(conn, "select state from waypost.outbox")] == ["dead", "dead"]
        return f"{ending.results['one']} and {ending.results['other']}"

    return Scene({"one": alone(expire_claims), "other": alone(expire_claims)}, look)


# -- two executions, two messages --------------------------------------------------------------------------


async def crossed(conn: Connection) -> tuple[list[tuple[UUID, UUID]], list[Message], Program]:
    """Two executions whose messages sort the other way round, both being sent: the lower execution has the higher one.

    Returns (execution, message) for the lower and the higher execution, the claims in that order, and the commit
    that takes both back, the higher one first.
    """
    low, high = await owned(conn, 2)
    news = sorted((message("pay"), message("pay")), key=lambda new: new.message_id)
    to_high = await asks(conn, high, new=news[0])
    to_low = await asks(conn, low, new=news[1])
    claimed = {one.message_id: one for one in await claim_messages(conn, lease=timedelta(hours=1))}
    turns = commits_of((high, take_back(high, to_high)), (low, take_back(low, to_low)))
    return (
        [(low.execution, to_low), (high.execution, to_high)],
        [claimed[to_low], claimed[to_high]],
        turns,
    )


@race("refused: refused no | refused: refused no")
async def settlements_and_turns_that_take_back_cross(conn: Connection) -> Scene:
    pairs, claimed, turns = await crossed(conn)
    return Scene(
        {"settlement": settle(*(result(one, REFUSED) for one in claimed)), "turns": turns}, fates(*pairs)
    )


@race(
    "refused: refused no, reply r1 | refused: refused no, reply r2",
    "delivered: reply r1 | delivered: reply r2",
)
async def settlements_and_replies_cross(conn: Connection) -> Scene:
    pairs, claimed, _ = await crossed(conn)
    (_, to_low), (_, to_high) = pairs
    return Scene(
        {
            "replies": post(reply("r2", to_high), reply("r1", to_low)),
            "settlement": settle(*(result(one, REFUSED) for one in claimed)),
        },
        fates(*pairs),
    )


@race(
    "delivered: reply r1 | refused: refused no, reply r2",
    "delivered: reply r1 | delivered: reply r2",
)
async def settlements_of_which_one_has_arrived_and_replies_cross(conn: Connection) -> Scene:
    pairs, (to_low, to_high), _ = await crossed(conn)
    return Scene(
        {
            "replies": post(reply("r2", to_high.message_id), reply("r1", to_low.message_id)),
            "settlement": settle(result(to_high, REFUSED), result(to_low, DELIVERED)),
        },
        fates(*pairs),
    )


@race("delivered: unknown sent | refused: refused no")
async def settlements_of_which_one_has_arrived_and_turns_that_take_back_cross(conn: Connection) -> Scene:
    pairs, (to_low, to_high), turns = await crossed(conn)
    settlement = settle(result(to_high, REFUSED), result(to_low, DELIVERED))
    return Scene({"settlement": settlement, "turns": turns}, fates(*pairs))
