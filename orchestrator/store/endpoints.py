"""What is set of an endpoint, and how it is doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, LiteralString

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from orchestrator.store.database import Connection


@dataclass(frozen=True, slots=True)
class EndpointState:
    """An endpoint as it stands: what is set, how it is doing, what waits for it, what it never took (`dead`). `tries`
    and `failures` are those of the last minute, counted while some fail.
    """

    name: str
    url: str
    kind: str
    state: str
    fault: str | None
    timeout: timedelta
    replies_from: str
    schedule: dict[str, Any] | None
    concurrency: int | None
    rate: float | None
    burst: int | None
    disable_after: timedelta | None
    on_dead: str
    ordered_by: str | None
    headers: list[str]
    idempotency: str
    mode: str
    tls: dict[str, str]
    paused_until: datetime | None
    failing_since: datetime | None
    open_until: datetime | None
    tries: int
    failures: int
    secrets: int
    waiting: int
    dead: int
    created_at: datetime


READ: Final[LiteralString] = """
    select e.name, e.url, e.kind, e.state, e.fault, e.timeout, coalesce(e.replies_from, e.name) as replies_from,
           e.schedule, e.concurrency, e.rate, e.burst, e.disable_after, e.on_dead, e.ordered_by,
           array(select jsonb_object_keys(e.headers) order by 1) as headers, e.idempotency, e.mode, e.tls,
           case when e.paused_until > now() then e.paused_until end as paused_until, e.failing_since, e.open_until,
           case when e.window_at > now() - interval '1 minute' then e.window_tries else 0 end as tries,
           case when e.window_at > now() - interval '1 minute' then e.window_failures else 0 end as failures,
           (select count(*)
              from waypost.secret s
             where s.tenant_id = e.tenant_id
               and s.owner_kind = 'endpoint'
               and s.owner_name = e.name
               and (s.expires_at is null or s.expires_at > now())) as secrets,
           (select count(*)
              from waypost.outbox o
             where o.tenant_id = e.tenant_id
               and o.endpoint = e.name
               and o.state in ('due', 'waiting')) as waiting,
           (select count(*)
              from waypost.outbox o
             where o.tenant_id = e.tenant_id
               and o.endpoint = e.name
               and o.state = 'dead') as dead,
           e.created_at
      from waypost.endpoint e
     where e.tenant_id = %(tenant)s::int
       and e.name = %(name)s::text
"""


async def read(conn: Connection, name: str, *, tenant: int) -> EndpointState | None:
    async with conn.cursor(row_factory=class_row(EndpointState)) as cursor:
        await cursor.execute(READ, {"tenant": tenant, "name": name})
        return await cursor.fetchone()


SET: Final[LiteralString] = """
    update waypost.endpoint e
       set (url, timeout, replies_from, schedule, concurrency, rate, burst, disable_after, on_dead, ordered_by,
            headers, idempotency, mode, tls) =
           (select n.url, n.timeout, n.replies_from, n.schedule, n.concurrency, n.rate, n.burst, n.disable_after,
                   n.on_dead, n.ordered_by, n.headers, n.idempotency, n.mode, n.tls
              from jsonb_populate_record(e, %(changes)s::jsonb) n)
     where e.tenant_id = %(tenant)s::int
       and e.name = %(name)s::text
"""


async def change(conn: Connection, name: str, changes: Mapping[str, Any], *, tenant: int) -> bool:
    """Set these columns, null being the default; whether there is an endpoint of that name."""
    cursor = await conn.execute(SET, {"tenant": tenant, "name": name, "changes": Jsonb(dict(changes))})
    return cursor.rowcount == 1


# As if nothing had happened: whoever enables an endpoint says that it works.
ENABLE: Final[LiteralString] = """
    with old as materialized (
        select e.tenant_id, e.name, e.state
          from waypost.endpoint e
         where e.tenant_id = %(tenant)s::int
           and e.name = %(name)s::text
           for no key update of e
    ),
    done as (
        update waypost.endpoint e
           set state = 'enabled',
               fault = null,
               paused_until = null,
               failing_since = null,
               window_at = null,
               window_tries = 0,
               window_failures = 0,
               opened = 0,
               open_until = null
          from old
         where e.tenant_id = old.tenant_id
           and e.name = old.name
     returning e.tenant_id, e.name, old.state as before
    )
    select case when done.before = 'disabled' then
                waypost.tell_of_endpoint(done.tenant_id, done.name, 'enabled', null) end as told
      from done
"""


async def enable(conn: Connection, name: str, *, tenant: int) -> bool:
    """Whether there is an endpoint of that name."""
    cursor = await conn.execute(ENABLE, {"tenant": tenant, "name": name})
    return cursor.rowcount == 1


DISABLE: Final[LiteralString] = """
    with old as materialized (
        select e.tenant_id, e.name, e.state
          from waypost.endpoint e
         where e.tenant_id = %(tenant)s::int
           and e.name = %(name)s::text
           for no key update of e
    ),
    done as (
        update waypost.endpoint e
           set state = 'disabled',
               fault = 'operator'
          from old
         where e.tenant_id = old.tenant_id
           and e.name = old.name
     returning e.tenant_id, e.name, old.state as before
    )
    select case when done.before = 'enabled' then
                waypost.tell_of_endpoint(done.tenant_id, done.name, 'disabled', 'operator') end as told
      from done
"""


async def disable(conn: Connection, name: str, *, tenant: int) -> bool:
    """Whether there is an endpoint of that name."""
    cursor = await conn.execute(DISABLE, {"tenant": tenant, "name": name})
    return cursor.rowcount == 1


# In the order of locks: its row, then messages. What is being sent is left to its try.
LOCK: Final[LiteralString] = """
    select from waypost.endpoint
     where tenant_id = %(tenant)s::int
       and name = %(name)s::text
       for update
"""
DISCARD: Final[LiteralString] = """
    with mine as materialized (
        select o.tenant_id, o.message_id
          from waypost.outbox o
         where o.tenant_id = %(tenant)s::int
           and o.endpoint = %(name)s::text
           and o.state in ('waiting', 'due')
           and not o.command
         order by o.tenant_id, o.message_id
           for no key update of o
    )
    update waypost.outbox o
       set state = 'discarded',
           fault = 'unknown-endpoint'
      from mine
     where o.tenant_id = mine.tenant_id
       and o.message_id = mine.message_id
"""
UNSUBSCRIBE: Final[LiteralString] = """
    delete from waypost.subscription
     where tenant_id = %(tenant)s::int
       and endpoint = %(name)s::text
"""
FORGET: Final[LiteralString] = """
    delete from waypost.secret
     where tenant_id = %(tenant)s::int
       and owner_kind = 'endpoint'
       and owner_name = %(name)s::text
"""
REMOVE: Final[LiteralString] = """
    delete from waypost.endpoint
     where tenant_id = %(tenant)s::int
       and name = %(name)s::text
"""


async def remove(conn: Connection, name: str, *, tenant: int) -> int | None:
    """Take an endpoint away, with its secrets and subscriptions, and discard the events that wait for it; how many.
    None when there is none of that name.
    """
    which = {"tenant": tenant, "name": name}
    async with conn.transaction():
        await conn.execute(LOCK, which)
        await conn.execute(UNSUBSCRIBE, which)
        discarded = (await conn.execute(DISCARD, which)).rowcount
        await conn.execute(FORGET, which)
        removed = (await conn.execute(REMOVE, which)).rowcount
    return discarded if removed else None
