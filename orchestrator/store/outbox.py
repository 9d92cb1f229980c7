"""Messages as people see them: what waits, what is a dead letter, what was tried, and what they put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, LiteralString
from uuid import UUID

from psycopg.rows import class_row

from orchestrator.store.database import Connection


@dataclass(frozen=True, slots=True)
class Filter:
    """Which messages: all of what is said must fit. `states` are the outbox's; `since` and `until` are times at which
    they were made, or for dead letters at which they died. `after` is the place where a page before ended.
    """

    states: tuple[str, ...] = ()
    endpoint: str | None = None
    type: str | None = None
    code: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    lane: str | None = None
    after: UUID | None = None


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message. `fault` says why it is a dead letter."""

    message_id: str
    endpoint: str
    command: bool
    state: str
    lane: str | None
    ordered: bool
    attempts: int
    spared: int
    reached: bool
    fault: str | None
    execution_id: str | None
    path: str
    since: datetime
    due_at: datetime
    ended_at: datetime | None
    expires_at: datetime | None
    body: bytes


# By the time a message was made, and by its id: the page goes on behind a pair, not behind an id that says nothing of
# the order.
LISTED: Final[LiteralString] = """
    select o.message_id::text, o.endpoint, o.command, o.state, o.lane, o.ordered, o.attempts, o.spared, o.reached,
           o.fault, o.execution_id::text, o.path, o.since, o.due_at, o.ended_at, o.expires_at, o.body
      from waypost.outbox o
     where o.tenant_id = %(tenant)s::int
       and o.state = any(%(states)s::text[])
       and (%(endpoint)s::text is null or o.endpoint = %(endpoint)s::text)
       and (%(code)s::text is null or o.fault = %(code)s::text)
       and (%(lane)s::text is null or o.lane = %(lane)s::text)
       and (%(since)s::timestamptz is null or coalesce(o.ended_at, o.since) >= %(since)s::timestamptz)
       and (%(until)s::timestamptz is null or coalesce(o.ended_at, o.since) < %(until)s::timestamptz)
       and (%(type)s::text is null or waypost.type_in(o.body) = %(type)s::text)
       and (%(after)s::uuid is null
            or (coalesce(o.ended_at, o.since), o.message_id) >
               (select coalesce(p.ended_at, p.since), p.message_id
                  from waypost.outbox p
                 where p.tenant_id = %(tenant)s::int
                   and p.message_id = %(after)s::uuid))
     order by coalesce(o.ended_at, o.since), o.message_id
     limit %(limit)s::int
"""


async def listed(conn: Connection, which: Filter, *, tenant: int, limit: int) -> list[MessageRow]:
    """The oldest first, at most `limit`."""
    async with conn.cursor(row_factory=class_row(MessageRow)) as cursor:
        await cursor.execute(
            LISTED,
            {
                "tenant": tenant,
                "states": list(which.states),
                "endpoint": which.endpoint,
                "type": which.type,
                "code": which.code,
                "lane": which.lane,
                "since": which.since,
                "until": which.until,
                "after": which.after,
                "limit": limit,
            },
        )
        return await cursor.fetchall()


ONE: Final[LiteralString] = """
    select o.message_id::text, o.endpoint, o.command, o.state, o.lane, o.ordered, o.attempts, o.spared, o.reached,
           o.fault, o.execution_id::text, o.path, o.since, o.due_at, o.ended_at, o.expires_at, o.body
      from waypost.outbox o
     where o.tenant_id = %(tenant)s::int
       and o.message_id = %(message)s::uuid
"""


async def one(conn: Connection, message: UUID, *, tenant: int) -> MessageRow | None:
    async with conn.cursor(row_factory=class_row(MessageRow)) as cursor:
        await cursor.execute(ONE, {"tenant": tenant, "message": message})
        return await cursor.fetchone()


@dataclass(frozen=True, slots=True)
class DeliveryRow:
    """One try; `response` is the part of the answer that was kept, `headers` those of its headers that were."""

    attempt: int
    started_at: datetime
    duration: timedelta
    outcome: str
    status: int | None
    error_code: str | None
    response: bytes | None
    headers: dict[str, str] | None


DELIVERIES: Final[LiteralString] = """
    select d.attempt, d.started_at, d.duration, d.outcome, d.status, d.error_code, d.response, d.headers
      from waypost.delivery d
     where d.tenant_id = %(tenant)s::int
       and d.message_id = %(message)s::uuid
     order by d.attempt desc
     limit %(limit)s::int
"""


async def deliveries(conn: Connection, message: UUID, *, tenant: int, limit: int) -> list[DeliveryRow]:
    """The newest first, at most `limit`."""
    async with conn.cursor(row_factory=class_row(DeliveryRow)) as cursor:
        await cursor.execute(DELIVERIES, {"tenant": tenant, "message": message, "limit": limit})
        return await cursor.fetchall()


BEHIND: Final[LiteralString] = """
    select count(*)
      from waypost.outbox o
     where o.tenant_id = %(tenant)s::int
       and o.endpoint = %(endpoint)s::text
       and o.lane = %(lane)s::text
       and o.state = 'waiting'
"""


async def behind(conn: Connection, endpoint: str, lane: str, *, tenant: int) -> int:
    """How many messages wait in a lane."""
    row = await (
        await conn.execute(BEHIND, {"tenant": tenant, "endpoint": endpoint, "lane": lane})
    ).fetchone()
    return 0 if row is None else int(row[0])


PUT_BACK: Final[LiteralString] = """
    select put_back::text
      from waypost.put_back(%(tenant)s::int, %(messages)s::uuid[], %(spread)s::interval, p_state => %(state)s::text)
"""


async def put_back(
    conn: Connection, messages: Sequence[UUID], *, spread: timedelta, tenant: int, state: str = "dead"
) -> list[str]:
    """Put events that are in `state` back (dead letters, or `delivered`), `spread` apart; those that still were, in
    their order.
    """
    parameters = {
        "tenant": tenant,
        "messages": [str(one) for one in messages],
        "spread": spread,
        "state": state,
    }
    cursor = await conn.execute(PUT_BACK, parameters)
    return [message for (message,) in await cursor.fetchall()]


DISCARD: Final[LiteralString] = """
    with mine as materialized (
        select o.tenant_id, o.message_id
          from waypost.outbox o
         where o.tenant_id = %(tenant)s::int
           and o.message_id = any(%(messages)s::uuid[])
           and o.state = 'dead'
         order by o.tenant_id, o.message_id
           for no key update of o
    )
    update waypost.outbox o
       set state = 'discarded'
      from mine
     where o.tenant_id = mine.tenant_id
       and o.message_id = mine.message_id
 returning o.message_id::text
"""


async def discard(conn: Connection, messages: Sequence[UUID], *, tenant: int) -> list[str]:
    """End dead letters for good; those that still were some. What they kept waiting in their lanes goes on."""
    cursor = await conn.execute(DISCARD, {"tenant": tenant, "messages": [str(one) for one in messages]})
    return [message for (message,) in await cursor.fetchall()]


COPY: Final[LiteralString] = """
    insert into waypost.outbox
           (tenant_id, message_id, execution_id, epoch, path, command, endpoint, lane, ordered, content_type, body,
            due_at, expires_at)
    select o.tenant_id, %(new)s::uuid, o.execution_id, o.epoch, o.path, false, o.endpoint, o.lane, o.ordered,
           o.content_type, %(body)s::bytea, clock_timestamp() + %(delay)s::interval,
           clock_timestamp() + (o.expires_at - o.since)
      from waypost.outbox o
     where o.tenant_id = %(tenant)s::int
       and o.message_id = %(message)s::uuid
       and not o.command
"""


async def copy(
    conn: Connection, message: UUID, *, new: UUID, body: bytes, delay: timedelta, tenant: int
) -> None:
    """Write the event of `message` as another message."""
    await conn.execute(COPY, {"tenant": tenant, "message": message, "new": new, "body": body, "delay": delay})


SKIP: Final[LiteralString] = """
    with old as materialized (
        select o.tenant_id, o.message_id
          from waypost.outbox o
         where o.tenant_id = %(tenant)s::int
           and o.endpoint = %(endpoint)s::text
           and o.state in ('due', 'waiting')
           and not o.command
           and o.since < %(before)s::timestamptz
         order by o.tenant_id, o.message_id
           for no key update of o
    )
    update waypost.outbox o
       set state = 'dead',
           fault = 'skipped'
      from old
     where o.tenant_id = old.tenant_id
       and o.message_id = old.message_id
"""


async def skip(conn: Connection, endpoint: str, *, before: datetime, tenant: int) -> int:
    """Make dead letters of events that wait for an endpoint and were made `before`; how many."""
    cursor = await conn.execute(SKIP, {"tenant": tenant, "endpoint": endpoint, "before": before})
    return cursor.rowcount


ADVANCE: Final[LiteralString] = """
    select waypost.advance_lanes(10000)
"""


async def advance(conn: Connection) -> None:
    """Let those go that waited behind what has ended, without waiting for a relay's next look."""
    await conn.execute(ADVANCE)
