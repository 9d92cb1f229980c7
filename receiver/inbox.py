"""Mail into the database by its one door, `waypost.post_mail`: dedupe, store, match, number, wake, start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, LiteralString, NamedTuple, TypeVar, cast
from uuid import UUID

import psycopg

from contracts import arrays
from contracts.mail import mail_at_rest

Connection = psycopg.AsyncConnection[Any]
T = TypeVar("T")
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
    causation: UUID | str | None = None
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
               %(tenants)t::int[], %(kinds)t::text[], %(senders)t::text[], %(sources)t::text[],
               %(events)t::text[], %(webhooks)t::text[], %(types)t::text[], %(keys)t::text[],
               %(digests)t::bytea[], %(datas)t::jsonb[], %(causations)t::uuid[],
               %(executions)t::uuid[], %(epochs)t::int[], %(paths)t::text[], %(bodies)b::bytea[],
               %(from_executions)t::uuid[], %(from_positions)t::bigint[], %(from_fences)t::bigint[], p_now =>
               %(now)s::timestamptz, p_trace => %(traceparents)t::text[], p_command => %(commands)t::text[])
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
          join unnest(%(tenants)t::int[], %(traceparents)t::text[], %(tooks)t::interval[])
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
    kept = [
        mail_at_rest(it.kind, it.data, it.body, (it.tenant, it.sender, it.source, it.event_id))
        for it in items
    ]
    parameters: dict[str, object] = {
        "tenants": arrays.plain([it.tenant for it in items]),
        "kinds": arrays.plain([it.kind for it in items]),
        "senders": arrays.texts([it.sender for it in items]),
        "sources": arrays.texts([it.source for it in items]),
        "events": arrays.texts([it.event_id for it in items]),
        "webhooks": column(arrays.texts, [it.webhook_id for it in items]),
        "types": column(arrays.texts, [it.type for it in items]),
        "keys": column(arrays.texts, [it.key for it in items]),
        "digests": arrays.blobs([it.digest for it in items]),
        "datas": column(arrays.texts, [data for data, _ in kept]),
        "causations": column(arrays.plain, [it.causation for it in items]),
        "commands": column(arrays.texts, [it.command for it in items]),
        "executions": column(arrays.plain, [it.execution for it in items]),
        "epochs": column(arrays.plain, [it.epoch for it in items]),
        "paths": column(arrays.texts, [it.path for it in items]),
        "bodies": column(list, [body for _, body in kept]),
        "traceparents": column(arrays.texts, [it.traceparent for it in items]),
        "from_executions": column(arrays.plain, [it.from_execution for it in items]),
        "from_positions": column(arrays.plain, [it.from_position for it in items]),
        "from_fences": column(arrays.plain, [it.from_fence for it in items]),
        "now": now,
    }
    if traced:
        clock = time.monotonic()
        parameters["tooks"] = arrays.spans([timedelta(seconds=clock - it.asked_at) for it in items])
    rows = await (await conn.execute(POST_TRACED if traced else POST, parameters)).fetchall()
    return [Posted(*cast("tuple[PostOutcome, int | None, Answer | None]", row)) for row in rows]


KNOWN: Final[LiteralString] = """
    select i.answer
      from unnest(%(tenants)b::int[], %(senders)b::text[], %(sources)b::text[], %(events)b::text[],
                  %(digests)b::bytea[]) with ordinality as t(tenant_id, sender, source, event_id, digest, ord)
      left join waypost.inbox i
        on i.tenant_id = t.tenant_id
       and i.sender = t.sender
       and i.source = t.source
       and i.event_id = t.event_id
       and i.digest = t.digest
     order by t.ord
"""


async def known(conn: Connection, items: Sequence[MailItem]) -> list[Answer | None]:
    """What the first senders of `items` were told; None of those that are not stored, or not as they are."""
    parameters: dict[str, object] = {
        "tenants": [item.tenant for item in items],
        "senders": [item.sender for item in items],
        "sources": [item.source for item in items],
        "events": [item.event_id for item in items],
        "digests": [item.digest for item in items],
    }
    return [row[0] for row in await (await conn.execute(KNOWN, parameters)).fetchall()]


def column(write: Callable[[list[T]], object], values: list[T]) -> object:
    """`values` as an array; none at all when all are null: unnest fills up what an array lacks."""
    return write(values) if any(value is not None for value in values) else None


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
