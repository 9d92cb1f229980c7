"""What a backlog costs those who need a few of its rows: nothing, also by plans that were made on empty tables."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
import pytest

from orchestrator.store import executions, mutexes
from orchestrator.store.commits import NewMutex
from tests.store.world import (
    Held,
    a_few_rows_read,
    asked,
    commit,
    event,
    fill_the_shelf,
    held,
    mail_of,
    message,
    posted,
    reply,
    rows,
    sent,
    state_of,
)

Connection = psycopg.AsyncConnection[Any]

BACKLOG: Final[LiteralString] = """
    insert into waypost.outbox (tenant_id, message_id, execution_id, epoch, path, endpoint, body, due_at)
    select 1, gen_random_uuid(), gen_random_uuid(), 0, 'p', 'other', '', now() + interval '1 day'
      from generate_series(1, 3000)
"""


@pytest.fixture
async def planned(conn: Connection) -> Connection:
    """A connection that has the plans of an empty database, and no table of it is ever analysed."""
    for table in ("outbox", "inbox", "mail", "execution", "journal"):
        await conn.execute(f"alter table waypost.{table} set (autovacuum_enabled = off)")  # pyright: ignore[reportArgumentType]  # ours
    for n in range(8):
        execution, one = await sent(conn)
        await posted(conn, reply(f"early {n}", one))
        await executions.unread(conn, [(1, str(execution), 0)])
    await conn.execute(BACKLOG)
    return conn


async def test_a_reply_reads_a_few_rows_however_many_messages_there_are(planned: Connection) -> None:
    execution, one = await sent(planned)

    async with planned.transaction(), a_few_rows_read(planned):
        [stored] = await posted(planned, reply("r", one))
    assert stored.outcome == "stored"
    assert await mail_of(planned, execution) == ["reply r"]


async def test_unread_mail_of_ten_is_found_by_a_few_rows_however_much_there_is(planned: Connection) -> None:
    for n in range(40):
        await posted(planned, reply(f"r{n}", (await sent(planned))[1]))
    found = await rows(planned, "select execution_id::text from waypost.mail order by inbox_id desc limit 10")
    ten = [execution for (execution,) in found]

    async with planned.transaction(), a_few_rows_read(planned):
        mail = await executions.unread(planned, [(1, execution, 0) for execution in ten])
    assert [[one.kind for one in mail[execution]] for execution in ten] == [["reply"]] * 10


async def test_a_turn_takes_a_message_back_by_a_few_rows_however_many_there_are(planned: Connection) -> None:
    for _ in range(3):
        holder, new = await asking(planned)
        await commit(planned, holder, holder.turn(("withdrawn", "pay", {}), take_back=[new]))
    holder, new = await asking(planned)

    async with planned.transaction(), a_few_rows_read(planned):
        assert await commit(planned, holder, holder.turn(("withdrawn", "pay", {}), take_back=[new]))
    assert await state_of(planned, new) == "withdrawn"


async def test_an_event_is_stored_by_a_few_rows_however_many_its_sender_has_sent(planned: Connection) -> None:
    await fill_the_shelf(planned)
    first = event("new", key="other", webhook_id="hook")

    async with planned.transaction(), a_few_rows_read(planned):
        [stored] = await posted(planned, first)
    async with planned.transaction(), a_few_rows_read(planned):
        [again] = await posted(planned, first)
    assert (stored.outcome, again.outcome) == ("stored", "duplicate")


WAITING: Final[LiteralString] = """
    insert into waypost.mutex (tenant_id, kind, key, execution_id, epoch, path, asked_at)
    select 1, 'step', 'busy', gen_random_uuid(), 0, 'a/mutex', now()
      from generate_series(1, 2000)
"""


async def test_a_mutex_is_given_by_a_few_rows_however_many_wait_for_another(planned: Connection) -> None:
    await planned.execute("alter table waypost.mutex set (autovacuum_enabled = off)")
    for key in ("busy", "free"):
        assert await given(planned, key) == 1
    await planned.execute(WAITING)
    await planned.execute("delete from waypost.mutex where key = 'free'")

    async with planned.transaction(force_rollback=True):
        assert await given(planned, "free", few=True) == 1


async def given(conn: Connection, key: str, *, few: bool = False) -> int:
    """How many get a mutex once somebody new has asked for `key`."""
    holder = await held(conn)
    await commit(conn, holder, holder.turn(mutexes=[NewMutex("a/mutex", "step", key)]))
    async with a_few_rows_read(conn) if few else nullcontext():
        granted, _ = await mutexes.grant(conn, limit=100)
    return granted


async def asking(conn: Connection) -> tuple[Held, UUID]:
    """An execution that somebody still holds, and the message that its last turn left."""
    holder, new = await held(conn), message("pay")
    assert await commit(conn, holder, holder.turn(asked("pay"), messages=[new], release=False))
    holder.position += 1
    return holder, new.message_id
