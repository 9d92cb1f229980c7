"""What people ask about executions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, LiteralString, cast

from psycopg.rows import class_row

from contracts.codec import SEALED, PayloadKeyMissing, PayloadUnreadable
from contracts.objects import OBJECTS, referred
from orchestrator.core.redaction import Line, Redaction
from orchestrator.core.upcast import SCHEMA, lifted
from orchestrator.objects import large
from orchestrator.objects.large import NAMED
from orchestrator.store import executions
from orchestrator.store.attributes import Condition, clauses
from orchestrator.store.database import Connection

Json = Any


@dataclass(frozen=True, slots=True)
class ExecutionRow:
    """An execution as people see it: `state` is its status, or ready, running or waiting while it is open."""

    tenant_id: int
    execution_id: str
    definition: str
    version: str
    business_key: str | None
    state: str
    status: str
    undoing: bool
    epoch: int
    position: int
    wake_at: datetime | None
    owner: str | None
    fence: int
    mail_unread: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    deadline_at: datetime | None
    attributes: dict[str, Json] = field(default_factory=dict[str, Json])
    parent: str | None = None
    parent_path: str | None = None
    root: str | None = None


COLUMNS: Final[LiteralString] = """
    select e.tenant_id, e.execution_id::text, e.definition, e.version, e.business_key,
           case when e.status <> 'open' then e.status
                when e.owner is not null then 'running'
                when e.wake_at <= now() then 'ready'
                else 'waiting' end as state,
           e.status, e.undoing, e.epoch, e.position, e.wake_at, e.owner::text, e.fence,
           e.mail_received - e.mail_read as mail_unread, e.created_at, e.started_at, e.finished_at,
           e.deadline_at, waypost.attributes_of(e.tenant_id, e.execution_id) as attributes,
           e.parent::text, e.parent_path, e.root::text
      from waypost.execution e
"""

ONE: Final[LiteralString] = (
    COLUMNS
    + """
     where e.tenant_id = %(tenant)s
       and e.execution_id = %(execution)s::uuid
"""
)


async def execution(conn: Connection, execution_id: str, *, tenant: int) -> ExecutionRow | None:
    async with conn.cursor(row_factory=class_row(ExecutionRow)) as cursor:
        await cursor.execute(ONE, {"tenant": tenant, "execution": execution_id})
        return await cursor.fetchone()


OF_THESE: Final[LiteralString] = """
     where e.tenant_id = %(tenant)s
       and (%(flow)s::text is null or e.definition = %(flow)s::text)
       and (%(key)s::text is null or e.business_key = %(key)s::text)
       and (%(parent)s::uuid is null or e.parent = %(parent)s::uuid)
"""

NEWEST: Final[LiteralString] = """
    ) x
     where %(states)s::text[] is null
        or x.state = any(%(states)s::text[])
        or x.status = any(%(states)s::text[])
     order by x.created_at desc, x.execution_id desc
     limit %(limit)s
"""

MANY: Final[LiteralString] = "select * from (" + COLUMNS + OF_THESE + NEWEST  # noqa: S608  # constants of this file


async def newest(
    conn: Connection,
    *,
    tenant: int,
    states: Sequence[str] | None,
    flow: str | None,
    key: str | None,
    limit: int,
    where: Sequence[Condition] = (),
    parent: str | None = None,
) -> list[ExecutionRow]:
    """The newest executions first, of these states (or stored statuses), this flow, this business key and this parent,
    whose attributes are as all of `where` say.
    """
    such, parameters = clauses(where)
    asked = {
        "tenant": tenant,
        "states": list(states) if states else None,
        "flow": flow,
        "key": key,
        "parent": parent,
        "limit": limit,
    }
    async with conn.cursor(row_factory=class_row(ExecutionRow)) as cursor:
        statement = "select * from (" + COLUMNS + OF_THESE + such + NEWEST  # noqa: S608  # constants of this package
        await cursor.execute(statement, asked | parameters)
        return await cursor.fetchall()


@dataclass(frozen=True, slots=True)
class FactRow:
    """A fact as people see it; `payload` is JSON text, lifted from the version `schema` in which it was written."""

    position: int
    kind: str
    path: str
    actor: str
    fence: int
    at: datetime
    recorded_at: datetime
    payload: str | None
    schema: int = SCHEMA


FACTS: Final[LiteralString] = """
    select j.position, j.kind, j.path, j.actor, j.fence, j.at, j.recorded_at, j.payload::text,
           j.schema
      from waypost.journal j
     where j.tenant_id = %(tenant)s
       and j.execution_id = %(execution)s::uuid
     order by j.position
"""


async def facts(conn: Connection, execution_id: str, *, tenant: int) -> list[FactRow]:
    """The whole journal."""
    async with conn.cursor(row_factory=class_row(FactRow)) as cursor:
        await cursor.execute(FACTS, {"tenant": tenant, "execution": execution_id})
        found = [opened(tenant, execution_id, fact) for fact in await cursor.fetchall()]
        return [referring(fact if fact.schema == SCHEMA else as_now(fact)) for fact in found]


def referring(fact: FactRow) -> FactRow:
    """`fact` with a reference where a part is in the payload store; as it is, where that names nothing."""
    if fact.payload is None or NAMED not in fact.payload:
        return fact
    try:
        return replace(fact, payload=json.dumps(referred(said_in(fact)), ensure_ascii=False))
    except ValueError:
        return fact


async def whole(fact: FactRow, *, tenant: int) -> FactRow:
    """`fact` with the parts that are in the payload store.

    Raises ObjectGone, StoreAway, PayloadKeyMissing, PayloadUnreadable.
    """
    said = said_in(fact)
    if OBJECTS not in said or SEALED in said:
        return fact
    return replace(fact, payload=json.dumps(await large.whole(tenant, said), ensure_ascii=False))


def opened(tenant: int, execution: str, fact: FactRow) -> FactRow:
    """`fact` with its payload in the clear; what this process has no key for stays in its box."""
    if fact.payload is None or SEALED not in fact.payload:
        return fact
    try:
        data = executions.opened(tenant, execution, fact.position, json.loads(fact.payload))
    except (ValueError, PayloadKeyMissing, PayloadUnreadable):
        return fact
    return replace(fact, payload=json.dumps(data, ensure_ascii=False))


def as_now(fact: FactRow) -> FactRow:
    """`fact` with its payload as this release writes it; as it is, where this release cannot read it."""
    try:
        data = lifted(fact.kind, fact.schema, json.loads(fact.payload or "{}"))
    except ValueError:
        return fact
    return replace(fact, payload=json.dumps(data, ensure_ascii=False))


DECLARED: Final[LiteralString] = """
    select d.sensitive::text
      from waypost.execution e
      join waypost.definition d
        on d.tenant_id = e.tenant_id and d.name = e.definition and d.version = e.version
     where e.tenant_id = %(tenant)s
       and e.execution_id = %(execution)s::uuid
"""


async def redaction(
    conn: Connection, execution_id: str, found: Sequence[FactRow], *, tenant: int
) -> Redaction:
    """How the facts `found` of an execution are shown to people."""
    parameters = {"tenant": tenant, "execution": execution_id}
    row = await (await conn.execute(DECLARED, parameters)).fetchone()
    declared: Json = json.loads(row[0]) if row is not None and row[0] is not None else None
    return Redaction([Line(fact.kind, fact.path, said_in(fact)) for fact in found], declared)


def said_in(fact: FactRow) -> dict[str, Json]:
    """Its data; nothing, where they are none that a program could have read."""
    try:
        found: Json = json.loads(fact.payload or "{}")
    except ValueError:
        return {}
    return cast("dict[str, Json]", found) if isinstance(found, dict) else {}


def shown(found: Sequence[FactRow], by: Redaction) -> list[FactRow]:
    """The facts as people may see them."""
    if not by.finds:
        return list(found)
    return [
        replace(fact, payload=None if fact.payload is None else json.dumps(line.data, ensure_ascii=False))
        for fact, line in zip(found, by.lines, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message that an execution sends, and its last try as far as it is recorded, which is number `tried`.

    `lease_until` is the end of the claim under which a relay sends it now.
    """

    message_id: str
    path: str
    endpoint: str
    state: str
    attempts: int
    reached: bool
    replied: bool
    due_at: datetime
    expires_at: datetime | None
    lease_until: datetime | None
    tried: int | None
    outcome: str | None
    http_status: int | None
    error_code: str | None
    tried_at: datetime | None
    took: timedelta | None


MESSAGES: Final[LiteralString] = """
    select o.message_id::text, o.path, o.endpoint, o.state, o.attempts, o.reached, o.replied, o.due_at,
           o.expires_at, o.lease_until, d.attempt as tried, d.outcome, d.status as http_status, d.error_code,
           d.started_at as tried_at, d.duration as took
      from waypost.outbox o
      left join lateral (
             select *
               from waypost.delivery d
              where d.tenant_id = o.tenant_id and d.message_id = o.message_id
              order by d.attempt desc
              limit 1) d on true
     where o.tenant_id = %(tenant)s
       and o.execution_id = %(execution)s::uuid
     order by o.number
"""


async def messages(conn: Connection, execution_id: str, *, tenant: int) -> list[MessageRow]:
    """The messages of an execution, in the order in which they were asked for."""
    async with conn.cursor(row_factory=class_row(MessageRow)) as cursor:
        await cursor.execute(MESSAGES, {"tenant": tenant, "execution": execution_id})
        return await cursor.fetchall()
