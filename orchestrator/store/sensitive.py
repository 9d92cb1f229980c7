"""What flows declare as sensitive of the events of a type."""

from __future__ import annotations

from typing import Final, LiteralString

from contracts.sensitive import Places
from orchestrator.core.redaction import marks_in
from orchestrator.store.database import Connection

WAITS_MAX: Final = 100
"""Waits for a type that are asked what they declare of it: the newest."""

DECLARED: Final[LiteralString] = """
    select 'input' as what, d.sensitive as said
      from waypost.trigger t
      join waypost.definition d
        on d.tenant_id = t.tenant_id and d.name = t.definition and d.version = t.version
     where t.tenant_id = %(tenant)s::int
       and t.type = %(type)s::text
     union
    select 'value', j.payload #> '{args,sensitive}'
      from (select w.tenant_id, w.execution_id, w.path
              from waypost.wait w
             where w.tenant_id = %(tenant)s::int
               and w.type = %(type)s::text
             order by w.wait_id desc
             limit %(limit)s::int) w
      join waypost.journal j
        on j.tenant_id = w.tenant_id and j.execution_id = w.execution_id and j.path = w.path and j.kind = 'asked'
"""


async def declared(conn: Connection, type: str, *, tenant: int) -> Places:  # noqa: A002  # its name on the wire
    """Where in the data of an event of `type` something is sensitive: by the flows that it starts, and by those that
    wait for it.
    """
    cursor = await conn.execute(DECLARED, {"tenant": tenant, "type": type, "limit": WAITS_MAX})
    found = [marks_in(said).get(what, ()) for what, said in await cursor.fetchall()]
    return tuple(dict.fromkeys(place for places in found for place in places))
