"""Races of mail with mail, with turns and with creation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from orchestrator.store import commits, executions, starts
from orchestrator.store.commits import Turn
from orchestrator.store.database import Connection
from receiver import inbox
from receiver.inbox import MailItem
from tests.explorer.moves import (
    alone,
    asks,
    commit_of,
    commits_of,
    new_execution,
    outcomes_of,
    owned,
    owned_with_message,
    post,
    sleeping_with_message,
    start,
)
from tests.explorer.races import Ending, Look, Scene, race
from tests.explorer.sessions import Program, Session
from tests.store.world import (
    Held,
    asked,
    claim_all,
    commit,
    event,
    is_due,
    mail_of,
    message,
    order,
    posted,
    reply,
    rows,
    worker,
)


def due(*executions: UUID) -> Look:
    """How many of these want to move at once."""

    async def look(conn: Connection, _: Ending) -> str:
        return f"due {sum([await is_due(conn, execution) for execution in executions])}"

    return look


# -- mail and turns ----------------------------------------------------------------------------------------


@race("reply first: matched, due", "release first: matched, due")
async def a_reply_and_a_release_lose_no_wake_up(conn: Connection) -> Scene:
    holder, message_id = await owned_with_message(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        matched = "matched" if ending.results["release"] else "not matched"
        return (
            f"{ending.first} first: {matched}, {'due' if await is_due(conn, holder.execution) else 'asleep'}"
        )

    return Scene(
        {"reply": post(reply("r1", message_id)), "release": commit_of(holder, holder.turn())},
        look,
    )


@race("due 2")
async def replies_to_two_and_a_commit_of_both_cross(conn: Connection) -> Scene:
    """The turns name the higher execution first, the replies come for the lower one first."""
    low, high = await owned(conn, 2)
    to_low, to_high = await asks(conn, low), await asks(conn, high)
    return Scene(
        {
            "replies": post(reply("r1", to_low), reply("r2", to_high)),
            "commit": commits_of((high, high.turn()), (low, low.turn())),
        },
        due(low.execution, high.execution),
    )


@race("order first: not matched, messages 0", "ask first: matched, messages 1")
async def nothing_is_asked_after_an_order_that_was_acknowledged(conn: Connection) -> Scene:
    [holder] = await owned(conn, 1)
    turn = holder.turn(asked("pay"), messages=[message("pay")], asks=True)

    async def look(conn: Connection, ending: Ending) -> str:
        matched = "matched" if ending.results["ask"] else "not matched"
        [(messages,)] = await rows(conn, "select count(*) from waypost.outbox")
        return f"{ending.first} first: {matched}, messages {messages}"

    return Scene({"order": post(order("o1", holder.execution)), "ask": commit_of(holder, turn)}, look)


@race("due 1")
async def a_release_to_paused_and_an_order_lose_no_order(conn: Connection) -> Scene:
    [holder] = await owned(conn, 1)
    return Scene(
        {
            "order": post(order("o1", holder.execution)),
            "pause": commit_of(holder, holder.turn(status="paused")),
        },
        due(holder.execution),
    )


@race("due 1")
async def a_release_to_paused_a_reply_and_an_order_lose_no_order(conn: Connection) -> Scene:
    """Two are released to paused; a reply comes for the one, which stays asleep, an order for the other."""
    low, high = await owned(conn, 2)
    to_high = await asks(conn, high)
    return Scene(
        {
            "mail": post(reply("r1", to_high), order("o1", low.execution)),
            "pause": commits_of((high, high.turn(status="paused")), (low, low.turn(status="paused"))),
        },
        due(low.execution, high.execution),
    )


@race("due 2")
async def orders_to_two_and_a_commit_of_both_cross(conn: Connection) -> Scene:
    low, high = await owned(conn, 2)
    return Scene(
        {
            "orders": post(order("o1", low.execution), order("o2", high.execution)),
            "commit": commits_of((high, high.turn()), (low, low.turn())),
        },
        due(low.execution, high.execution),
    )


@race("due 1, read 1 of 3")
async def a_turn_that_read_mail_and_released_is_woken_by_the_next(conn: Connection) -> Scene:
    holder, message_id = await owned_with_message(conn)
    await posted(conn, order("o1", holder.execution))

    async def look(conn: Connection, _: Ending) -> str:
        [(read, received)] = await rows(conn, "select mail_read, mail_received from waypost.execution")
        return f"due {int(await is_due(conn, holder.execution))}, read {read} of {received}"

    return Scene(
        {
            "mail": post(reply("r1", message_id), order("o2", holder.execution)),
            "release": commit_of(holder, holder.turn(mail=1, orders=1)),
        },
        look,
    )


@race("timed out, then woken", "the reply was read", "no match, decided again", "not claimed, due")
async def a_reply_and_a_timeout_are_decided_by_the_row(conn: Connection) -> Scene:
    """The worker claims, reads its mail and decides; a turn that fires a timeout carries guard."""
    return await reply_and_timeout(conn)


async def reply_and_timeout(conn: Connection, *, guarded: bool = True) -> Scene:
    """An execution is due, for its call has no reply in time; a worker claims it, reads, and decides."""
    holder, message_id = await owned_with_message(conn)
    now = (await rows(conn, "select now()"))[0][0]
    assert await commit(conn, holder, holder.turn(due=now))
    me = await worker(conn)

    async def turn(session: Session) -> str:
        async with session.transaction() as mine:
            claimed = await claim_all(mine, me)
        if not claimed:
            return "not claimed"
        [ours] = claimed
        key = str(ours.execution)
        await session.stop("before it reads")
        mail = (await executions.unread(session.conn, [(1, key, ours.mail_read)]))[key]
        kind = "reply" if mail else "timed out"
        guard = ours.mail_read if guarded and not mail else None
        decided = ours.turn(("ended", "pay", {}), mail=len(mail), guard=guard)
        async with session.transaction() as mine:
            return kind if await commit(mine, ours, decided) else "no match"

    async def look(conn: Connection, ending: Ending) -> str:
        match ending.results["turn"], await is_due(conn, holder.execution):
            case "timed out", True:
                return "timed out, then woken" if ending.first == "turn" else "timed out, with a reply unread"
            case "no match", False:
                return "no match, decided again"
            case "reply", False:
                return "the reply was read"
            case told, awake:
                return f"{told}, {'due' if awake else 'asleep'}"

    return Scene({"reply": post(reply("r1", message_id)), "turn": turn}, look)


@race("started, order mail, mail 1", "started, order unmatched, mail 0", waits=False)
async def an_order_and_the_start_of_its_execution(conn: Connection) -> Scene:
    execution = UUID(int=0xA)

    async def ordered(session: Session) -> str:
        async with session.transaction() as mine:
            [one] = await inbox.post(mine, [order("o1", execution)])
            return f"order {one.answer}"

    async def look(conn: Connection, ending: Ending) -> str:
        mail = len(await mail_of(conn, execution))
        return f"{ending.results['start'][0]}, {ending.results['order']}, mail {mail}"

    return Scene({"order": ordered, "start": start(new_execution(None, 1, execution=execution))}, look)


# -- mail and mail -----------------------------------------------------------------------------------------


def both(one: str, other: str) -> Look:
    """What became of each item, of whoever was first and of whoever came later."""

    async def look(_: Connection, ending: Ending) -> str:
        later = other if ending.first == one else one
        return f"{' '.join(ending.results[ending.first])} | {' '.join(ending.results[later])}"

    return look


@race("stored stored | duplicate duplicate")
async def the_same_replies_twice_at_once_are_stored_once(conn: Connection) -> Scene:
    _, first = await sleeping_with_message(conn)
    _, second = await sleeping_with_message(conn)
    items = [reply("r1", first), reply("r2", second)]
    return Scene({"one": post(*items), "other": post(*reversed(items))}, both("one", "other"))


@race(
    "stored duplicate stored stored | duplicate duplicate stored",
    "stored stored stored | stored duplicate duplicate duplicate",
)
async def an_item_twice_in_one_batch_and_in_another_is_stored_once(conn: Connection) -> Scene:
    _, first = await sleeping_with_message(conn)
    _, second = await sleeping_with_message(conn)
    return Scene(
        {
            "one": post(reply("r1", first), reply("r1", first), reply("r2", second), reply("r3", second)),
            "other": post(reply("r3", second), reply("r2", second), order("o1", UUID(int=1))),
        },
        both("one", "other"),
    )


async def crossing(conn: Connection) -> list[MailItem]:
    """Replies to two executions and events of two keys."""
    _, first = await sleeping_with_message(conn)
    _, second = await sleeping_with_message(conn)
    return [reply("r1", first), event("e2", key="b"), reply("r2", second), event("e1", key="a")]


@race("stored stored stored stored | duplicate duplicate duplicate duplicate")
async def batches_that_cross_do_not_deadlock(conn: Connection) -> Scene:
    items = await crossing(conn)
    return Scene({"one": post(*items), "other": post(*reversed(items))}, both("one", "other"))


@race(
    "stored stored stored stored | duplicate conflict duplicate duplicate",
    "stored stored stored stored | duplicate duplicate conflict duplicate",
)
async def batches_that_cross_and_differ_in_one_do_not_deadlock(conn: Connection) -> Scene:
    items = await crossing(conn)
    changed = [replace(item, digest=b"\1" * 32) if item.event_id == "r2" else item for item in items]
    return Scene({"one": post(*items), "other": post(*reversed(changed))}, both("one", "other"))


@race("stored 3, duplicate 3", sampled=True)
async def three_batches_of_the_same_items_do_not_deadlock(conn: Connection) -> Scene:
    """One is stopped in the middle of its items by the third, while the second has what the first wants next."""
    return Scene(
        {
            "long": post(*(reply(name, UUID(int=9)) for name in ("1", "15", "2"))),
            "crossing": post(*(reply(name, UUID(int=9)) for name in ("2", "1"))),
            "middle": post(reply("15", UUID(int=9))),
        },
        in_all,
    )


async def in_all(_: Connection, ending: Ending) -> str:
    """How many items were what, whoever brought them."""
    found = Counter(outcome for outcomes in ending.results.values() for outcome in outcomes)
    return ", ".join(f"{outcome} {count}" for outcome, count in sorted(found.items(), reverse=True))


@race("stored 3, duplicate 3", sampled=True)
async def three_batches_whose_webhook_ids_cross_do_not_deadlock(conn: Connection) -> Scene:
    """The first has an id that the second wants, and the other way round; the third stops the first between the two."""

    def named(event_id: str, webhook_id: str) -> MailItem:
        return reply(event_id, UUID(int=9), webhook_id=webhook_id)

    return Scene(
        {
            "one": post(named("a", "w2"), named("b", "w9"), named("d", "w1")),
            "other": post(named("b1", "w1"), named("c", "w2")),
            "middle": post(named("x", "w9")),
        },
        in_all,
    )


@race("stored stored | duplicate duplicate")
async def webhook_ids_that_cross_event_ids_do_not_deadlock(conn: Connection) -> Scene:
    """Two events, named the other way round by their webhook ids in the second batch: no order of rows serves both."""
    one = [event("e1", webhook_id="w2"), event("e2", webhook_id="w1")]
    other = [event("e1", webhook_id="w1"), event("e2", webhook_id="w2")]
    return Scene({"one": post(*one), "other": post(*other)}, both("one", "other"))


def posts_and_rolls_back(*items: MailItem) -> Program:
    """As `post`, but the transaction is rolled back when it would commit."""

    async def program(session: Session) -> list[str]:
        async with session.conn.transaction(force_rollback=True):
            found = outcomes_of(await inbox.post(session.conn, items))
            await session.stop("before the rollback")
        return found

    return program


@race("stored, mail 1")
async def a_duplicate_of_what_was_rolled_back_is_the_first(conn: Connection) -> Scene:
    execution, message_id = await sleeping_with_message(conn)

    async def look(conn: Connection, ending: Ending) -> str:
        return f"{ending.results['stays'][0]}, mail {len(await mail_of(conn, execution))}"

    return Scene(
        {
            "goes": posts_and_rolls_back(reply("r1", message_id)),
            "stays": post(reply("r1", message_id)),
        },
        look,
    )


@race("2 due, 3 mail", sampled=True)
async def three_ways_a_commit_replies_and_an_order(conn: Connection) -> Scene:
    low, high = await owned(conn, 2)
    to_low, to_high = await asks(conn, low), await asks(conn, high)

    async def look(conn: Connection, _: Ending) -> str:
        awake = sum([await is_due(conn, holder.execution) for holder in (low, high)])
        mail = sum([len(await mail_of(conn, holder.execution)) for holder in (low, high)])
        return f"{awake} due, {mail} mail"

    return Scene(
        {
            "commit": commits_of((high, high.turn()), (low, low.turn())),
            "replies": post(reply("r1", to_low), reply("r2", to_high)),
            "order": post(order("o1", low.execution)),
        },
        look,
    )


# -- creation ----------------------------------------------------------------------------------------------


@race("started | exists")
async def two_starts_of_one_key_are_one_execution(conn: Connection) -> Scene:
    return Scene(
        {"one": start(new_execution("k", 1)), "other": start(new_execution("k", 1))}, both("one", "other")
    )


@race("started started | exists conflict", "started started | conflict exists")
async def starts_that_cross_do_not_deadlock(conn: Connection) -> Scene:
    """Of two keys, in opposite orders; under the second key they say something else."""
    one = [new_execution("a", 1), new_execution("b", 1)]
    other = [new_execution("b", 2), new_execution("a", 1)]
    return Scene({"one": start(*one), "other": start(*other)}, both("one", "other"))


@race("started 3, exists 3")
async def three_batches_of_starts_do_not_deadlock(conn: Connection) -> Scene:
    """As with the items: of the keys a, b, c the first batch is stopped at b, and the second comes from the end."""
    return Scene(
        {
            "long": start(*(new_execution(key, 1) for key in "abc")),
            "crossing": start(*(new_execution(key, 1) for key in "ca")),
            "middle": start(new_execution("b", 1)),
        },
        in_all,
    )


@race("started")
async def a_start_of_a_key_whose_first_start_is_rolled_back_is_the_first(conn: Connection) -> Scene:
    async def goes(session: Session) -> None:
        async with session.conn.transaction(force_rollback=True):
            await starts.start(session.conn, [new_execution("k", 1)])
            await session.stop("before the rollback")

    async def look(_: Connection, ending: Ending) -> str:
        return ending.results["stays"][0]

    return Scene({"goes": goes, "stays": start(new_execution("k", 1))}, look)


# -- mail between executions -------------------------------------------------------------------------------


def end_of_child(child: Held, parent: UUID) -> MailItem:
    """What the child's last fact tells its parent: stored only if the journal has that fact."""
    return MailItem(
        kind="child",
        sender="waypost",
        source="waypost:execution",
        event_id=f"{child.execution}/ended/{parent}",
        digest=b"\0",
        data='{"outcome": "done"}',
        execution=parent,
        epoch=0,
        path="child",
        from_execution=child.execution,
        from_position=child.position + 1,
        from_fence=child.fence,
    )


def ends_and_tells(child: Held, *parents: UUID, locks_all: bool = True) -> Program:
    """A commit that ends `child` and mails its parents. It locks the rows of all, before anything else."""
    ended = child.turn(("finished", "", {}), status="completed")
    items = [end_of_child(child, parent) for parent in parents]
    return tells([(child, ended)], items, locks_all=locks_all)


def tells(
    turns: Sequence[tuple[Held, Turn]], items: Sequence[MailItem], *, locks_all: bool = True
) -> Program:
    """A commit of `turns` that mails `items` to other executions; which turns matched."""

    async def call(conn: Connection) -> list[UUID]:
        locked = [holder.execution for holder, _ in turns]
        if locks_all:
            locked += [item.execution for item in items if item.execution is not None]
        await conn.execute("select waypost.lock_rows(%s, %s)", ([1] * len(locked), locked))
        matched = await commits.commit(conn, [turn for _, turn in turns], me=turns[0][0].me)
        await inbox.post(conn, items)
        return [holder.execution for holder, _ in turns if str(holder.execution) in matched]

    return alone(call)


@race("mail 1, due 1")
async def the_end_of_a_child_and_a_turn_of_its_parent(conn: Connection) -> Scene:
    parent, child = await owned(conn, 2)

    async def look(conn: Connection, _: Ending) -> str:
        return await mail_and_due(conn, parent.execution)

    return Scene(
        {
            "child": ends_and_tells(child, parent.execution),
            "parent": commit_of(parent, parent.turn()),
        },
        look,
    )


@race("mail 1 and 1")
async def two_that_end_and_tell_each_other_do_not_deadlock(conn: Connection) -> Scene:
    return await two_that_end(conn)


async def two_that_end(conn: Connection, *, locks_all: bool = True) -> Scene:
    low, high = await owned(conn, 2)

    async def look(conn: Connection, _: Ending) -> str:
        mail = [len(await mail_of(conn, holder.execution)) for holder in (low, high)]
        return f"mail {mail[0]} and {mail[1]}"

    return Scene(
        {
            "low": ends_and_tells(low, high.execution, locks_all=locks_all),
            "high": ends_and_tells(high, low.execution, locks_all=locks_all),
        },
        look,
    )


@race("mail 2 2, due 2")
async def two_children_of_the_same_parents_do_not_deadlock(conn: Connection) -> Scene:
    """The parents sleep; each child tells both, in opposite orders."""
    low, high, one, other = await owned(conn, 4)
    for parent in (low, high):
        assert await commit(conn, parent, parent.turn())

    async def look(conn: Connection, _: Ending) -> str:
        return await mail_and_due(conn, low.execution, high.execution)

    return Scene(
        {
            "one": ends_and_tells(one, low.execution, high.execution),
            "other": ends_and_tells(other, high.execution, low.execution),
        },
        look,
    )


async def mail_and_due(conn: Connection, *executions: UUID) -> str:
    mail = [str(len(await mail_of(conn, execution))) for execution in executions]
    awake = sum([await is_due(conn, execution) for execution in executions])
    return f"mail {' '.join(mail)}, due {awake}"


@race("mail 2 2, due 2")
async def two_of_one_batch_that_tell_each_other_and_replies_to_both(conn: Connection) -> Scene:
    low, high = await owned(conn, 2)
    to_low, to_high = await asks(conn, low), await asks(conn, high)
    batch = tells(
        [(high, high.turn()), (low, low.turn())],
        [end_of_child(high, low.execution), end_of_child(low, high.execution)],
    )

    async def look(conn: Connection, _: Ending) -> str:
        return await mail_and_due(conn, low.execution, high.execution)

    return Scene({"batch": batch, "replies": post(reply("r1", to_low), reply("r2", to_high))}, look)


@race("mail 2 1, due 2")
async def two_of_one_batch_that_tell_each_other_and_a_third_that_tells_one(conn: Connection) -> Scene:
    low, high, third = await owned(conn, 3)
    batch = tells(
        [(high, high.turn()), (low, low.turn())],
        [end_of_child(high, low.execution), end_of_child(low, high.execution)],
    )

    async def look(conn: Connection, _: Ending) -> str:
        return await mail_and_due(conn, low.execution, high.execution)

    return Scene({"batch": batch, "third": ends_and_tells(third, low.execution)}, look)
