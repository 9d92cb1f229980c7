"""Payloads as they lie in the database, a page at a time, to be sealed with another key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, LiteralString, TypeAlias

from orchestrator.store.database import Connection

Table: TypeAlias = Literal["journal", "outbox", "inbox", "delivery", "task", "quarantine"]
Row: TypeAlias = tuple[Any, ...]

PAGE_MAX: Final = 200
"""Rows that are sealed anew in one transaction."""


@dataclass(frozen=True, slots=True)
class Statements:
    """Of one table: how many rows are to do, the next ones after a key (locked, in its order), and writing one."""

    count: LiteralString
    page: LiteralString
    write: LiteralString


# A payload is to be sealed anew when it names another key, or none. Pages go on behind the last key, so that what has
# nothing to seal is looked at once.
JOURNAL_TODO: Final[LiteralString] = """
       payload is not null
   and payload #>> '{sealed,key}' is distinct from %(newest)s::text
"""
COUNT_JOURNAL: Final[LiteralString] = "select count(*) from waypost.journal where " + JOURNAL_TODO  # noqa: S608  # constants of this file
PAGE_JOURNAL: Final[LiteralString] = (
    """
    select tenant_id, execution_id::text, position, kind, actor, payload::text
      from waypost.journal
     where (%(after)s::text is null
            or (tenant_id, execution_id, position)
               > (split_part(%(after)s, ' ', 1)::int, split_part(%(after)s, ' ', 2)::uuid,
                  split_part(%(after)s, ' ', 3)::bigint))
       and """  # noqa: S608  # constants of this file
    + JOURNAL_TODO
    + """
     order by tenant_id, execution_id, position
     limit %(limit)s
       for no key update
"""
)
WRITE_JOURNAL: Final[LiteralString] = """
    update waypost.journal
       set payload = %(data)s::jsonb
     where tenant_id = %(tenant)s::int
       and execution_id = %(one)s::uuid
       and position = %(number)s::bigint
"""

# A body begins with its key when it is sealed.
OUTBOX_TODO: Final[LiteralString] = """
       position(%(begins)s::bytea in body) is distinct from 1
"""
COUNT_OUTBOX: Final[LiteralString] = "select count(*) from waypost.outbox where " + OUTBOX_TODO  # noqa: S608  # constants of this file
PAGE_OUTBOX: Final[LiteralString] = (
    """
    select tenant_id, message_id::text, body
      from waypost.outbox
     where (%(after)s::text is null
            or (tenant_id, message_id) > (split_part(%(after)s, ' ', 1)::int, split_part(%(after)s, ' ', 2)::uuid))
       and """  # noqa: S608  # constants of this file
    + OUTBOX_TODO
    + """
     order by tenant_id, message_id
     limit %(limit)s
       for no key update
"""
)
WRITE_OUTBOX: Final[LiteralString] = """
    update waypost.outbox
       set body = %(body)s
     where tenant_id = %(tenant)s::int
       and message_id = %(one)s::uuid
"""

INBOX_TODO: Final[LiteralString] = """
       (data is not null and data #>> '{sealed,key}' is distinct from %(newest)s::text
        or position(%(begins)s::bytea in body) <> 1)
"""
COUNT_INBOX: Final[LiteralString] = "select count(*) from waypost.inbox where " + INBOX_TODO  # noqa: S608  # constants of this file
PAGE_INBOX: Final[LiteralString] = (
    """
    select tenant_id, inbox_id, kind, sender, source, event_id, data::text, body
      from waypost.inbox
     where (%(after)s::text is null or inbox_id > %(after)s::text::bigint)
       and """  # noqa: S608  # constants of this file
    + INBOX_TODO
    + """
     order by inbox_id
     limit %(limit)s
       for no key update
"""
)
WRITE_INBOX: Final[LiteralString] = """
    update waypost.inbox
       set data = %(data)s::jsonb, body = %(body)s
     where inbox_id = %(number)s::bigint
"""

DELIVERY_TODO: Final[LiteralString] = """
       position(%(begins)s::bytea in response) <> 1
"""
COUNT_DELIVERY: Final[LiteralString] = "select count(*) from waypost.delivery where " + DELIVERY_TODO  # noqa: S608  # constants of this file
PAGE_DELIVERY: Final[LiteralString] = (
    """
    select tenant_id, message_id::text, attempt, response
      from waypost.delivery
     where (%(after)s::text is null
            or (tenant_id, message_id, attempt)
               > (split_part(%(after)s, ' ', 1)::int, split_part(%(after)s, ' ', 2)::uuid,
                  split_part(%(after)s, ' ', 3)::int))
       and """  # noqa: S608  # constants of this file
    + DELIVERY_TODO
    + """
     order by tenant_id, message_id, attempt
     limit %(limit)s
       for no key update
"""
)
WRITE_DELIVERY: Final[LiteralString] = """
    update waypost.delivery
       set response = %(body)s
     where tenant_id = %(tenant)s::int
       and message_id = %(one)s::uuid
       and attempt = %(number)s::int
"""

# An answer that is no more than its code is in the clear.
TASK_TODO: Final[LiteralString] = """
       (payload #>> '{sealed,key}' is distinct from %(newest)s::text
        or (progress is not null and progress #>> '{sealed,key}' is distinct from %(newest)s::text)
        or (answer #>> '{sealed,key}' is distinct from %(newest)s::text
            and (answer ? 'value' or answer ? 'sealed' or answer #> '{error,detail}' is not null)))
"""
COUNT_TASK: Final[LiteralString] = "select count(*) from waypost.task where " + TASK_TODO  # noqa: S608  # constants of this file
PAGE_TASK: Final[LiteralString] = (
    """
    select tenant_id, task_id::text, payload::text, progress::text, answer::text
      from waypost.task
     where (%(after)s::text is null
            or (tenant_id, task_id) > (split_part(%(after)s, ' ', 1)::int, split_part(%(after)s, ' ', 2)::uuid))
       and """  # noqa: S608  # constants of this file
    + TASK_TODO
    + """
     order by tenant_id, task_id
     limit %(limit)s
       for no key update
"""
)
WRITE_TASK: Final[LiteralString] = """
    update waypost.task
       set payload = %(data)s::jsonb, progress = %(progress)s::jsonb, answer = %(answer)s::jsonb
     where tenant_id = %(tenant)s::int
       and task_id = %(one)s::uuid
"""

QUARANTINE_TODO: Final[LiteralString] = """
       position(%(begins)s::bytea in body) is distinct from 1
"""
COUNT_QUARANTINE: Final[LiteralString] = "select count(*) from waypost.quarantine where " + QUARANTINE_TODO  # noqa: S608  # constants of this file
PAGE_QUARANTINE: Final[LiteralString] = (
    """
    select tenant_id, quarantine_id, sender, digest, body
      from waypost.quarantine
     where (%(after)s::text is null or quarantine_id > %(after)s::text::bigint)
       and """  # noqa: S608  # constants of this file
    + QUARANTINE_TODO
    + """
     order by quarantine_id
     limit %(limit)s
       for no key update
"""
)
WRITE_QUARANTINE: Final[LiteralString] = """
    update waypost.quarantine
       set body = %(body)s
     where quarantine_id = %(number)s::bigint
"""

TABLES: Final[dict[Table, Statements]] = {
    "journal": Statements(COUNT_JOURNAL, PAGE_JOURNAL, WRITE_JOURNAL),
    "outbox": Statements(COUNT_OUTBOX, PAGE_OUTBOX, WRITE_OUTBOX),
    "inbox": Statements(COUNT_INBOX, PAGE_INBOX, WRITE_INBOX),
    "delivery": Statements(COUNT_DELIVERY, PAGE_DELIVERY, WRITE_DELIVERY),
    "task": Statements(COUNT_TASK, PAGE_TASK, WRITE_TASK),
    "quarantine": Statements(COUNT_QUARANTINE, PAGE_QUARANTINE, WRITE_QUARANTINE),
}


async def count(conn: Connection, table: Table, *, newest: str, begins: bytes) -> int:
    """How many rows of a table are not sealed with the newest key."""
    cursor = await conn.execute(TABLES[table].count, {"newest": newest, "begins": begins})
    row = await cursor.fetchone()
    assert row is not None, "a count has a row"
    return int(row[0])


async def page(
    conn: Connection, table: Table, *, newest: str, begins: bytes, after: str | None
) -> Sequence[Row]:
    """The next rows that are not sealed with the newest key, locked in the order of their key."""
    named = {"newest": newest, "begins": begins, "after": after, "limit": PAGE_MAX}
    return await (await conn.execute(TABLES[table].page, named)).fetchall()


async def write(conn: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    async with conn.cursor() as cursor:
        await cursor.executemany(TABLES[table].write, rows)
