"""What came and moved nothing (events that nobody has, replies to nothing, what was kept apart), and contracts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, LiteralString
from uuid import UUID

from psycopg.rows import class_row

from contracts.codec import open_body
from contracts.mail import mail_place
from orchestrator.store.database import Connection
from orchestrator.store.executions import mail_data
from receiver.quarantine import quarantine_place


@dataclass(frozen=True, slots=True)
class Item:
    """Something that came. `id` is a number of the inbox, or `q` and a number of the quarantine."""

    id: str
    reason: str
    sender: str
    type: str
    key: str
    source: str
    event_id: str
    received_at: datetime
    detail: str


READ: Final[LiteralString] = """
    with apart as (
        select 'q' || q.quarantine_id as id, q.reason, q.sender, coalesce(q.type, '') as type,
               coalesce(q.key, '') as key, coalesce(q.source, '') as source, coalesce(q.event_id, '') as event_id,
               q.received_at, q.detail
          from waypost.quarantine q
         where q.tenant_id = %(tenant)s::int
           and q.released_at is null
         order by q.quarantine_id desc
         limit %(limit)s::int
    ),
    alone as (
        select i.inbox_id::text, case when i.kind <> 'event' then 'unmatched'
                                      when i.shelf_until > now() then 'early' else 'orphaned' end,
               i.sender, coalesce(i.type, ''), coalesce(i.key, ''), i.source, i.event_id, i.received_at, ''
          from waypost.inbox i
         where i.tenant_id = %(tenant)s::int
           and i.sender <> 'waypost'
           and ((i.kind = 'event' and not i.taken) or i.answer = 'unmatched')
           and not exists (select 1 from waypost.mail m where m.inbox_id = i.inbox_id)
         order by i.inbox_id desc
         limit %(limit)s::int
    ),
    late as (
        select i.inbox_id::text, 'late', i.sender, coalesce(i.type, ''), coalesce(i.key, ''), i.source, i.event_id,
               i.received_at, e.execution_id::text
          from waypost.execution e
          join waypost.mail m
            on m.tenant_id = e.tenant_id
           and m.execution_id = e.execution_id
           and m.mail_number > e.mail_read
          join waypost.inbox i on i.inbox_id = m.inbox_id
         where e.tenant_id = %(tenant)s::int
           and e.finished_at is not null
           and e.mail_received > e.mail_read
           and i.sender <> 'waypost'
         order by i.inbox_id desc
         limit %(limit)s::int
    )
    select *
      from (select * from apart union all select * from alone union all select * from late) a
     where %(reason)s::text is null or a.reason = %(reason)s::text
     order by a.received_at desc
     limit %(limit)s::int
"""


async def read(conn: Connection, *, tenant: int, reason: str | None, limit: int) -> list[Item]:
    """The newest first, at most `limit` of each kind."""
    async with conn.cursor(row_factory=class_row(Item)) as cursor:
        await cursor.execute(READ, {"tenant": tenant, "reason": reason, "limit": limit})
        return await cursor.fetchall()


@dataclass(frozen=True, slots=True)
class Apart:
    """What was kept apart, as it came."""

    quarantine_id: int
    tenant_id: int
    tenant: str
    sender: str
    reason: str
    detail: str
    source: str | None
    event_id: str | None
    type: str | None
    key: str | None
    webhook_id: str | None
    headers: Mapping[str, str]
    body: bytes
    digest: bytes
    times: int
    received_at: datetime
    released_at: datetime | None
    released_by: str | None
    stream: str | None
    sequence: str | None
    due_at: datetime | None


READ_APART: Final[LiteralString] = """
    select q.quarantine_id, q.tenant_id, t.name as tenant, q.sender, q.reason, q.detail, q.source, q.event_id, q.type,
           q.key, q.webhook_id, q.headers, q.body, q.digest, q.times, q.received_at, q.released_at, q.released_by,
           q.stream, q.sequence, q.due_at
      from waypost.quarantine q
      join waypost.tenant t using (tenant_id)
     where q.tenant_id = %(tenant)s::int
       and q.quarantine_id = %(id)s::bigint
       for update of q
"""


async def read_apart(conn: Connection, number: int, *, tenant: int) -> Apart | None:
    """Locked until the transaction ends, so that of two who let it in one waits for the other. Opened where sealed."""
    async with conn.cursor(row_factory=class_row(Apart)) as cursor:
        await cursor.execute(READ_APART, {"tenant": tenant, "id": number})
        found = await cursor.fetchone()
    if found is None:
        return None
    where = quarantine_place(found.tenant_id, found.sender, found.digest)
    return replace(found, body=open_body(found.body, where))


RELEASE: Final[LiteralString] = """
    update waypost.quarantine
       set released_at = now(), released_by = %(by)s::text, due_at = null
     where tenant_id = %(tenant)s::int
       and quarantine_id = %(id)s::bigint
       and released_at is null
"""


async def release(conn: Connection, number: int, *, by: str, tenant: int) -> None:
    await conn.execute(RELEASE, {"tenant": tenant, "id": number, "by": by})


BLAME: Final[LiteralString] = """
    update waypost.quarantine
       set reason = %(reason)s::text, detail = %(detail)s::text, due_at = null
     where tenant_id = %(tenant)s::int
       and quarantine_id = %(id)s::bigint
"""


async def blame(conn: Connection, number: int, *, reason: str, detail: str, tenant: int) -> None:
    """Say why it is still kept apart; its turn passes."""
    await conn.execute(BLAME, {"tenant": tenant, "id": number, "reason": reason, "detail": detail})


@dataclass(frozen=True, slots=True)
class Received:
    """A row of the inbox, and how many executions have it."""

    inbox_id: int
    kind: str
    sender: str
    source: str
    event_id: str
    webhook_id: str | None
    type: str | None
    key: str | None
    data: Any
    body: bytes | None
    answer: str
    taken: bool
    shelf_until: datetime | None
    received_at: datetime
    had: list[UUID]
    ended: list[UUID]


READ_RECEIVED: Final[LiteralString] = """
    select i.inbox_id, i.kind, i.sender, i.source, i.event_id, i.webhook_id, i.type, i.key, i.data::text as data,
           i.body, i.answer, i.taken, i.shelf_until, i.received_at,
           array(select m.execution_id
                   from waypost.mail m
                  where m.inbox_id = i.inbox_id
                  limit 100) as had,
           array(select e.execution_id
                   from waypost.mail m
                   join waypost.execution e
                     on e.tenant_id = m.tenant_id
                    and e.execution_id = m.execution_id
                  where m.inbox_id = i.inbox_id
                    and e.finished_at is not null
                    and m.mail_number > e.mail_read
                  limit 100) as ended
      from waypost.inbox i
     where i.tenant_id = %(tenant)s::int
       and i.inbox_id = %(id)s::bigint
"""


async def read_received(conn: Connection, number: int, *, tenant: int) -> Received | None:
    """Opened where it is sealed."""
    async with conn.cursor(row_factory=class_row(Received)) as cursor:
        await cursor.execute(READ_RECEIVED, {"tenant": tenant, "id": number})
        found = await cursor.fetchone()
    if found is None:
        return None
    where = mail_place(tenant, found.sender, found.source, found.event_id)
    return replace(
        found,
        data=None if found.data is None else json.loads(mail_data(found.kind, found.data, where)),
        body=None if found.body is None else open_body(found.body, where),
    )


LOCK_ORPHAN: Final[LiteralString] = """
    select waypost.lock_keys(array[%(tenant)s::int], array[%(type)s::text], array[%(key)s::text])
"""

SHELVE: Final[LiteralString] = """
    update waypost.inbox
       set shelf_until = %(now)s::timestamptz + interval '7 days'
     where tenant_id = %(tenant)s::int
       and inbox_id = %(id)s::bigint
       and kind = 'event'
       and not taken
       and shelf_until <= %(now)s::timestamptz
"""

WAITING: Final[LiteralString] = """
    select coalesce(array_agg(w.execution_id order by w.wait_id), '{}'),
           coalesce(array_agg(w.path order by w.wait_id), '{}')
      from waypost.wait w
     where w.tenant_id = %(tenant)s::int
       and w.type = %(type)s::text
       and w.key = %(key)s::text
       and w.inbox_id is null
"""

LOCK_WAITING: Final[LiteralString] = """
    select waypost.lock_rows(array_fill(%(tenant)s::int, array[cardinality(%(executions)s::uuid[])]),
                             %(executions)s::uuid[])
"""

OFFER: Final[LiteralString] = """
    select waypost.match_waits(array_fill(%(tenant)s::int, array[cardinality(%(executions)s::uuid[])]),
                               %(executions)s::uuid[], %(paths)s::text[], %(now)s::timestamptz)
"""


async def offer_again(conn: Connection, event: Received, *, now: datetime, tenant: int) -> bool:
    """Offer an orphaned event for a week more, to who waits and to who will; whether it was orphaned still.

    The key is locked before all rows, and the executions that wait by their own order, as mail does. What it would have
    started when it came it starts no more.
    """
    named: dict[str, Any] = {
        "tenant": tenant,
        "id": event.inbox_id,
        "type": event.type,
        "key": event.key,
        "now": now,
    }
    await conn.execute(LOCK_ORPHAN, named)
    if (await conn.execute(SHELVE, named)).rowcount == 0:
        return False
    waiting = await (await conn.execute(WAITING, named)).fetchone()
    assert waiting is not None, "an aggregate has a row"
    if waiting[0]:
        named |= {"executions": waiting[0], "paths": waiting[1]}
        await conn.execute(LOCK_WAITING, named)
        await conn.execute(OFFER, named)
    return True


TYPES_MAX: Final = 1000
"""Types of events that are waited for, among which waits are looked for that an event nearly met."""


@dataclass(frozen=True, slots=True)
class Near:
    """A wait that an event nearly met."""

    execution_id: UUID
    path: str
    type: str
    key: str
    filled: bool


NEAR: Final[LiteralString] = """
    with recursive each_type as (
        (select w.type
           from waypost.wait w
          where w.tenant_id = %(tenant)s::int
            and w.inbox_id is null
          order by w.type
          limit 1)
         union all
        select (select w.type
                  from waypost.wait w
                 where w.tenant_id = %(tenant)s::int
                   and w.inbox_id is null
                   and w.type > t.type
                 order by w.type
                 limit 1)
          from each_type t
         where t.type is not null
    ),
    types as (
        select t.type, lower(t.type) = lower(%(type)s::text) as alike
          from each_type t
         where t.type is not null
         limit %(types)s::int
    ),
    open as (
        select n.wait_id, n.execution_id, n.path, n.type, n.key, false as filled
          from types t
         cross join lateral
               (select w.*
                  from waypost.wait w
                 where w.tenant_id = %(tenant)s::int
                   and w.inbox_id is null
                   and w.type = t.type
                   and w.key = %(key)s::text
                   and (t.alike or %(key)s::text <> '')
                 order by w.execution_id
                 limit %(limit)s::int) n
         union all
        select n.wait_id, n.execution_id, n.path, n.type, n.key, false
          from types t
         cross join lateral
               ((select w.*
                   from waypost.wait w
                  where t.alike
                    and w.tenant_id = %(tenant)s::int
                    and w.inbox_id is null
                    and w.type = t.type
                    and w.key > %(key)s::text
                  order by w.key
                  limit %(limit)s::int)
                 union all
                (select w.*
                   from waypost.wait w
                  where t.alike
                    and w.tenant_id = %(tenant)s::int
                    and w.inbox_id is null
                    and w.type = t.type
                    and w.key < %(key)s::text
                  order by w.key desc
                  limit %(limit)s::int)) n
    ),
    filled as (
        select w.wait_id, w.execution_id, w.path, w.type, w.key, true
          from (select i.inbox_id
                  from waypost.inbox i
                 where i.tenant_id = %(tenant)s::int
                   and i.type = %(type)s::text
                   and i.key = %(key)s::text
                   and i.kind = 'event'
                 order by i.inbox_id desc
                 limit %(limit)s::int) i
         cross join lateral
               (select m.*
                  from waypost.mail m
                 where m.inbox_id = i.inbox_id
                 limit %(limit)s::int) m
          join waypost.wait w
            on w.tenant_id = m.tenant_id
           and w.execution_id = m.execution_id
           and w.path = m.path
           and w.inbox_id = i.inbox_id
    )
    select n.execution_id, n.path, n.type, n.key, n.filled
      from (select * from open union all select * from filled) n
     order by n.type <> %(type)s::text, n.key <> %(key)s::text, n.wait_id
     limit %(limit)s::int
"""


async def read_near(conn: Connection, *, tenant: int, type: str, key: str, limit: int) -> list[Near]:  # noqa: A002  # its name on the wire
    """Waits of the same type, or of the same key; those that have more in common come first.

    However many wait, few rows are read: one for each type that is waited for, and from each some whose keys are near.
    """
    named = {"tenant": tenant, "type": type, "key": key, "limit": limit, "types": TYPES_MAX}
    async with conn.cursor(row_factory=class_row(Near)) as cursor:
        await cursor.execute(NEAR, named)
        return await cursor.fetchall()


@dataclass(frozen=True, slots=True)
class ContractRow:
    type: str
    dataschema: str
    schema: Any
    created_at: datetime


READ_CONTRACTS: Final[LiteralString] = """
    select type, dataschema, schema, created_at
      from waypost.contract
     where tenant_id = %(tenant)s::int
     order by type, dataschema
"""


async def read_contracts(conn: Connection, *, tenant: int) -> list[ContractRow]:
    async with conn.cursor(row_factory=class_row(ContractRow)) as cursor:
        await cursor.execute(READ_CONTRACTS, {"tenant": tenant})
        return await cursor.fetchall()


PUT_CONTRACT: Final[LiteralString] = """
    insert into waypost.contract (tenant_id, type, dataschema, schema)
    values (%(tenant)s::int, %(type)s::text, %(dataschema)s::text, %(schema)s::jsonb)
        on conflict (tenant_id, type, dataschema) do update set schema = excluded.schema
"""


async def put_contract(conn: Connection, type: str, dataschema: str, schema: str, *, tenant: int) -> None:  # noqa: A002  # as above
    """It takes the place of one that is there."""
    parameters = {"tenant": tenant, "type": type, "dataschema": dataschema, "schema": schema}
    await conn.execute(PUT_CONTRACT, parameters)


REMOVE_CONTRACT: Final[LiteralString] = """
    delete from waypost.contract
     where tenant_id = %(tenant)s::int
       and type = %(type)s::text
       and dataschema = %(dataschema)s::text
"""


async def remove_contract(conn: Connection, type: str, dataschema: str, *, tenant: int) -> bool:  # noqa: A002  # as above
    """Whether it was there."""
    parameters = {"tenant": tenant, "type": type, "dataschema": dataschema}
    return (await conn.execute(REMOVE_CONTRACT, parameters)).rowcount == 1
