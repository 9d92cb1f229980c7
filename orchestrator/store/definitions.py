"""Versions of flows, what starts them, and where their commands go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, LiteralString
from urllib.parse import quote

from orchestrator.store import arrays
from orchestrator.store.database import Connection


@dataclass(frozen=True, slots=True)
class Definition:
    """A version of a flow that a worker holds.

    `on` is the type of the events that start it, None when none does; `key` is a JSON pointer to the business key
    in their data, None for their subject.
    """

    name: str
    version: str
    on: str | None = None
    key: str | None = None


ALONE: Final[LiteralString] = """
    select waypost.lock_keys(array[1], array['waypost:definition'], array[''])
"""

PUBLISH: Final[LiteralString] = """
    insert into waypost.definition (tenant_id, name, version, kind, state)
    select 1, t.name, t.version, 'code', 'published'
      from unnest(%(names)s::text[], %(versions)s::text[]) with ordinality as t(name, version, ord)
     order by t.ord
        on conflict do nothing
"""

TRIGGERS: Final[LiteralString] = """
      with newest as materialized (
             select t.name, t.version, t.type, t.key_pointer
               from unnest(%(names)s::text[], %(versions)s::text[], %(types)s::text[], %(keys)s::text[])
                    as t(name, version, type, key_pointer)
              where t.version = (select d.version
                                   from waypost.definition d
                                  where d.tenant_id = 1
                                    and d.name = t.name
                                    and d.state = 'published'
                                  order by d.number desc
                                  limit 1)
           ),
           gone as (
             delete from waypost.trigger g
              using newest n
              where g.tenant_id = 1
                and g.definition = n.name
                and n.type is null
           )
    insert into waypost.trigger as g (tenant_id, definition, version, type, key_pointer)
    select 1, n.name, n.version, n.type, n.key_pointer
      from newest n
     where n.type is not null
        on conflict (tenant_id, definition) do update
       set version = excluded.version, type = excluded.type, key_pointer = excluded.key_pointer,
           changed_at = excluded.changed_at
     where (g.version, g.type) <> (excluded.version, excluded.type)
        or g.key_pointer is distinct from excluded.key_pointer
"""


async def publish(conn: Connection, flows: Sequence[Definition]) -> None:
    """Make the flows that a worker holds known, in this order, and which events start them.

    What an event starts is the newest version of a flow: of several that become known at once the last one, as in
    `Flows`. Whoever holds only older ones changes nothing about that; whoever holds the newest one, and has no
    `on` in it, ends it. One transaction, alone: publishers wait for each other.
    """
    parameters = {
        "names": arrays.texts(flow.name for flow in flows),
        "versions": arrays.texts(flow.version for flow in flows),
        "types": arrays.texts(flow.on for flow in flows),
        "keys": arrays.texts(flow.key for flow in flows),
    }
    async with conn.transaction():
        await conn.execute(ALONE)
        await conn.execute(PUBLISH, parameters)
        await conn.execute(TRIGGERS, parameters)


ROUTES: Final[LiteralString] = """
    select e.tenant_id, e.name, t.name || '/' || coalesce(e.replies_from, e.name)
      from waypost.endpoint e
      join waypost.tenant t using (tenant_id)
"""


async def reply_routes(conn: Connection) -> dict[tuple[int, str], str]:
    """For each endpoint (tenant, name), the part of the receiver's URL that its replies are posted to."""
    cursor = await conn.execute(ROUTES)
    return {(tenant, name): quote(route) for tenant, name, route in await cursor.fetchall()}
