"""Mail into the database by its one door, `waypost.post_mail`: dedupe, store, match, number, wake, start."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, LiteralString, NamedTuple, cast
from uuid import UUID

import psycopg

from contracts.mail import body_at_rest, data_at_rest, mail_place

Connection = psycopg.AsyncConnection[Any]
MailKind = Literal["reply", "event", "order", "result", "child"]
PostOutcome = Literal["stored", "duplicate", "conflict", "stale", "foreign", "misfit"]
Answer = Literal["mail", "event", "unmatched"]


@dataclass(slots=True, kw_only=True)  # not frozen, since there are thousands a second: it costs half as much
class MailItem:
    """Something for executions, named by (tenant, sender, source, event_id): of two under one name the first
    counts.

    How it is addressed: a reply by `causation`, the message it answers, which is looked at when `command` says of
    which type it has to be; an event by `type` and `key`; all else by `execution`, with `epoch` and `path` of the
    ask. `data` is JSON text. `digest` tells a repetition from something else under the same name. In the trace of an
    event's `traceparent` goes on what it starts. Mail that an execution caused names the fact it comes from: it is
    stored only if the journal has that fact. `asked_at` is when its request came (monotonic seconds), for its span.
    """

    kind: MailKind
    sender: str
    source: str
    event_id: str
    digest: bytes
    data: str | None
    tenant: int = 1
    webhook_id: str | None = None
    type: str | None = None
    key: str | None = None
    causation: UUID | None = None
    command: str | None = None
    execution: UUID | None = None
    epoch: int | None = None
    path: str | None = None
    body: bytes | None = None
    traceparent: str | None = None
    from_execution: UUID | None = None
    from_position: int | None = None
    from_fence: int | None = None
    asked_at: float = 0.0


class Posted(NamedTuple):
    """What became of an item, and what its first sender was told.

    What was not stored has neither id nor answer: stale mail; foreign and misfit replies, which their sender may not
    give, or which are none to a command of that type.
    """

    outcome: PostOutcome
    inbox_id: int | None
    answer: Answer | None


CALL: Final[LiteralString] = """
    waypost.post_mail(
               %(tenants)b::int[], %(kinds)b::text[], %(senders)b::text[], %(sources)b::text[],
               %(events)b::text[], %(webhooks)b::text[], %(types)b::text[], %(keys)b::text[],
               %(digests)b::bytea[], %(datas)b::text[]::jsonb[], %(causations)b::uuid[],
               %(executions)b::uuid[], %(epochs)b::int[], %(paths)b::text[], %(bodies)b::bytea[],
               %(from_executions)b::uuid[], %(from_positions)b::bigint[], %(from_fences)b::bigint[], p_now =>
               %(now)s::timestamptz, p_trace => %(traceparents)b::text[], p_command => %(commands)b::text[])
"""

POST: Final[LiteralString] = (
    "select outcome, inbox_id, answer from "  # noqa: S608  # constants of this file
    + CALL
    + " order by item"
)

POST_TRACED: Final[LiteralString] = (
    "with posted as materialized ("  # noqa: S608  # constants of this file
    """
        select item, outcome, inbox_id, answer
          from """
    + CALL
    + """
    ),
    marks as (
        insert into waypost.span_due (part, tenant_id, inbox_id, traceparent, took)
        select 'receiver', t.tenant_id, posted.inbox_id, t.traceparent, t.took
          from posted
          join unnest(%(tenants)b::int[], %(traceparents)b::text[], %(tooks)b::interval[])
               with ordinality as t(tenant_id, traceparent, took, item) on t.item = posted.item
         where posted.outcome = 'stored'
    )
    select outcome, inbox_id, answer
      from posted
     order by item
    """
)


async def post(
    conn: Connection, items: Sequence[MailItem], *, traced: bool = False, now: datetime | None = None
) -> list[Posted]:
    """Store `items`, wake who waits for them, and start what they start; the answers come in their order.

    In autocommit this is a transaction of its own: when it returns, the items are durable. Inside a
    transaction, keep the lock order: whoever holds execution rows posts only mail with reserved sources
    (`waypost:…`). At most 256 keys, so about 100 items. Events and items of one name in one batch are handled
    in their order. With `traced`, what is stored is marked as to be exported. `now` is for tests.
    """
    parameters: dict[str, object] = {
        "tenants": [item.tenant for item in items],
        "kinds": [item.kind for item in items],
        "senders": [item.sender for item in items],
        "sources": [item.source for item in items],
        "events": [item.event_id for item in items],
        "webhooks": column(item.webhook_id for item in items),
        "types": column(item.type for item in items),
        "keys": column(item.key for item in items),
        "digests": [item.digest for item in items],
        "datas": column(data_at_rest(item.kind, item.data, place_of(item)) for item in items),
        "causations": column(item.causation for item in items),
        "commands": column(item.command for item in items),
        "executions": column(item.execution for item in items),
        "epochs": column(item.epoch for item in items),
        "paths": column(item.path for item in items),
        "bodies": column(body_at_rest(item.body, place_of(item)) for item in items),
        "traceparents": column(item.traceparent for item in items),
        "from_executions": column(item.from_execution for item in items),
        "from_positions": column(item.from_position for item in items),
        "from_fences": column(item.from_fence for item in items),
        "now": now,
    }
    if traced:
        clock = time.monotonic()
        parameters["tooks"] = [timedelta(seconds=clock - item.asked_at) for item in items]
    rows = await (await conn.execute(POST_TRACED if traced else POST, parameters)).fetchall()
    return [Posted(*cast("tuple[PostOutcome, int | None, Answer | None]", row)) for row in rows]


KNOWN: Final[LiteralString] = """
    select i.answer
      from unnest(%(tenants)b::int[], %(senders)b::text[], %(sources)b::text[], %(events)b::text[],
                  %(digests)b::bytea[]) with ordinality as t(tenant_id, sender, source, event_id, digest, ord)
      join waypost.inbox i
        on i.tenant_id = t.tenant_id
       and i.sender = t.sender
       and i.source = t.source
       and i.event_id = t.event_id
       and i.digest = t.digest
     order by t.ord
"""


async def known(conn: Connection, items: Sequence[MailItem]) -> list[Answer] | None:
    """What the first senders of `items` were told, when all of them are stored as they are; else None."""
    parameters: dict[str, object] = {
        "tenants": [item.tenant for item in items],
        "senders": [item.sender for item in items],
        "sources": [item.source for item in items],
        "events": [item.event_id for item in items],
        "digests": [item.digest for item in items],
    }
    rows = await (await conn.execute(KNOWN, parameters)).fetchall()
    return [row[0] for row in rows] if len(rows) == len(items) else None


def place_of(item: MailItem) -> str:
    return mail_place(item.tenant, item.sender, item.source, item.event_id)


def column(values: Iterable[object]) -> list[object] | None:
    """An array of `values`; none at all when all are null: unnest fills up what an array lacks."""
    array = list(values)
    return array if any(value is not None for value in array) else None


def is_transient(error: BaseException) -> bool:
    """Whether the same transaction may succeed later: nothing in it was at fault."""
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError)
    return error.sqlstate in PASSING or error.sqlstate[:2] in {"08", "57"}


PASSING: Final = frozenset({"40001", "40P01", "55P03", "53300", "25006"})
"""Serialization failure, deadlock, lock timeout, too many connections, a standby that was the primary."""


def is_bad_data(error: BaseException) -> bool:
    """Whether something in the batch is at fault: data exception, constraint, program limit."""
    return isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] in {"22", "23", "54"}
