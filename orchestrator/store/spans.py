"""What is to be exported as spans: marks that were written with what happened, and the rows that they are about."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, LiteralString, cast

from psycopg.rows import class_row

from contracts import arrays
from orchestrator.core.fact import Fact
from orchestrator.core.upcast import SCHEMA, lifted
from orchestrator.store.database import Connection

Json = Any


@dataclass(frozen=True, slots=True)
class Mark:
    """A row of `waypost.span_due`. Which columns it has depends on its part."""

    number: int
    tenant_id: int
    execution_id: str | None
    position: int | None
    facts: int | None
    message_id: str | None
    attempt: int | None
    inbox_id: int | None
    traceparent: str | None
    began_at: datetime | None
    took: timedelta | None
    made_at: datetime


TAKE: Final[LiteralString] = """
    with due as materialized (
        select part, number
          from waypost.span_due
         where part = %(part)s
           and free_at <= coalesce(%(now)s::timestamptz, now())
         order by part, number
         limit %(limit)s::int
           for no key update skip locked
    )
    update waypost.span_due s
       set free_at = coalesce(%(now)s::timestamptz, clock_timestamp()) + %(lease)s::interval
      from due
     where s.part = due.part
       and s.number = due.number
 returning s.number, s.tenant_id, s.execution_id::text, s.position, s.facts, s.message_id::text, s.attempt, s.inbox_id,
           s.traceparent, s.began_at, s.took, s.made_at
"""


async def take(
    conn: Connection, *, part: str, limit: int, lease: timedelta, now: datetime | None = None
) -> list[Mark]:
    """Up to `limit` marks of `part`, the oldest first; for `lease` nobody else takes them. `now` is for tests."""
    async with conn.cursor(row_factory=class_row(Mark)) as cursor:
        await cursor.execute(TAKE, {"part": part, "limit": limit, "lease": lease, "now": now}, prepare=False)
        return sorted(await cursor.fetchall(), key=lambda mark: mark.number)


EXPORTED: Final[LiteralString] = """
    delete from waypost.span_due
     where part = %(part)s
       and number = any(%(numbers)s::bigint[])
"""


async def exported(conn: Connection, marks: Sequence[Mark], *, part: str) -> None:
    """What `marks` are about has been exported, or never will be."""
    numbers = arrays.plain(mark.number for mark in marks)
    await conn.execute(EXPORTED, {"part": part, "numbers": numbers}, prepare=False)


DROP_OLD: Final[LiteralString] = """
    delete from waypost.span_due
     where part = %(part)s
       and made_at < now() - %(kept)s::interval
"""


async def drop_old(conn: Connection, *, part: str, kept: timedelta) -> int:
    """Drop marks that nobody has exported for so long; how many."""
    return (await conn.execute(DROP_OLD, {"part": part, "kept": kept}, prepare=False)).rowcount


@dataclass(frozen=True, slots=True)
class Journal:
    """An execution and its facts, without what they carry: no input, result, argument, error text."""

    execution: str
    definition: str
    version: str
    epoch: int
    facts: list[Fact]


JOURNALS: Final[LiteralString] = """
    select e.execution_id::text, e.definition, e.version, e.epoch, j.position, j.kind, j.path, j.actor, j.at,
           j.schema,
           (case when jsonb_typeof(j.payload) is distinct from 'object' then '{}'
                 when j.schema <> %(schema)s then j.payload
                 else j.payload - '{input,output,value,data,undo,events}'::text[]
                      #- '{args,data}' #- '{error,data}' #- '{error,detail}' end)::text
      from unnest(%(tenants)s::int[], %(executions)s::uuid[]) as t(tenant_id, execution_id)
      join waypost.execution e on e.tenant_id = t.tenant_id and e.execution_id = t.execution_id
      join waypost.journal j on j.tenant_id = t.tenant_id and j.execution_id = t.execution_id
     order by e.execution_id, j.position
"""


async def journals(conn: Connection, of: Sequence[tuple[int, str]]) -> dict[str, Journal]:
    """The journals of executions (tenant, execution)."""
    parameters = {
        "tenants": arrays.plain(t for t, _ in of),
        "executions": arrays.plain(e for _, e in of),
        "schema": SCHEMA,
    }
    found: dict[str, Journal] = {}
    for execution, definition, version, epoch, position, kind, path, actor, at, schema, payload in await (
        await conn.execute(JOURNALS, parameters, prepare=False)
    ).fetchall():
        journal = found.setdefault(execution, Journal(execution, definition, version, epoch, []))
        data = cast("dict[str, Json]", json.loads(payload))
        if schema != SCHEMA:
            with contextlib.suppress(ValueError):  # of a later release: what can be drawn of it is
                data = lifted(kind, schema, data)
        journal.facts.append(Fact(position, kind, path, data, at, actor=actor))
    return found


@dataclass(frozen=True, slots=True)
class Delivery:
    """A try to send a message, and what the message is; an application's event has no execution."""

    message_id: str
    attempt: int
    execution_id: str | None
    endpoint: str
    started_at: datetime
    duration: timedelta
    outcome: str
    status: int | None
    error_code: str | None


DELIVERIES: Final[LiteralString] = """
    select d.message_id::text, d.attempt, o.execution_id::text, o.endpoint, d.started_at, d.duration, d.outcome,
           d.status, d.error_code
      from unnest(%(tenants)s::int[], %(messages)s::uuid[], %(attempts)s::int[]) as t(tenant_id, message_id, attempt)
      join waypost.delivery d using (tenant_id, message_id, attempt)
      join waypost.outbox o using (tenant_id, message_id)
"""


async def deliveries(conn: Connection, of: Sequence[tuple[int, str, int]]) -> list[Delivery]:
    """Tries (tenant, message, attempt)."""
    parameters = {
        "tenants": arrays.plain(t for t, _, _ in of),
        "messages": arrays.plain(m for _, m, _ in of),
        "attempts": arrays.plain(a for _, _, a in of),
    }
    async with conn.cursor(row_factory=class_row(Delivery)) as cursor:
        await cursor.execute(DELIVERIES, parameters, prepare=False)
        return await cursor.fetchall()


@dataclass(frozen=True, slots=True)
class Arrival:
    """Something that was taken in. `command` is the traceparent of what it answers, None when it answers nothing."""

    inbox_id: int
    sender: str
    source: str
    event_id: str
    type: str
    answer: str
    received_at: datetime
    execution_id: str | None
    command: str | None


ARRIVALS: Final[LiteralString] = """
    select i.inbox_id, i.sender, i.source, i.event_id, coalesce(i.type, '') as type, i.answer, i.received_at,
           o.execution_id::text, convert_from(o.body, 'UTF8')::jsonb ->> 'traceparent' as command
      from unnest(%(inbox)s::bigint[]) as t(inbox_id)
      join waypost.inbox i using (inbox_id)
      left join waypost.mail m
        on i.kind = 'reply'
       and m.inbox_id = i.inbox_id
      left join waypost.outbox o
        on o.tenant_id = m.tenant_id
       and o.execution_id = m.execution_id
       and o.epoch = m.epoch
       and o.path = m.path
"""


async def arrivals(conn: Connection, of: Sequence[int]) -> list[Arrival]:
    async with conn.cursor(row_factory=class_row(Arrival)) as cursor:
        await cursor.execute(ARRIVALS, {"inbox": arrays.plain(of)}, prepare=False)
        return await cursor.fetchall()


# A reply in the answer to its command was never posted: the span of the try tells of it, and it has no webhook id.
ARRIVALS_OF: Final[LiteralString] = """
    select i.inbox_id, i.sender, i.source, i.event_id, coalesce(i.type, '') as type, i.answer, i.received_at,
           m.execution_id::text, convert_from(o.body, 'UTF8')::jsonb ->> 'traceparent' as command
      from waypost.mail m
      join waypost.inbox i using (inbox_id)
      left join waypost.outbox o
        on i.kind = 'reply'
       and o.tenant_id = m.tenant_id
       and o.execution_id = m.execution_id
       and o.epoch = m.epoch
       and o.path = m.path
     where m.tenant_id = %(tenant)s::int
       and m.execution_id = %(execution)s::uuid
       and i.kind in ('reply', 'event')
       and i.webhook_id is not null
     order by m.mail_number
     limit %(limit)s::int
"""


async def arrivals_of(conn: Connection, execution: str, *, tenant: int, limit: int) -> list[Arrival]:
    """The replies and events that were posted for an execution, in the order in which it got them."""
    async with conn.cursor(row_factory=class_row(Arrival)) as cursor:
        await cursor.execute(ARRIVALS_OF, {"tenant": tenant, "execution": execution, "limit": limit})
        return await cursor.fetchall()
