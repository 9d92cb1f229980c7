"""Which endpoints get the events of a type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, LiteralString

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from orchestrator.store.database import Connection


@dataclass(frozen=True, slots=True)
class SubscriptionRow:
    """Events of `type`, an exact one or a pattern, with these attributes go to `endpoint`, which is at `url` and may be
    disabled (`state`); in lanes by what `ordered_by` says.
    """

    type: str
    endpoint: str
    ordered_by: str | None
    attributes: dict[str, Any] | None
    url: str
    state: str
    created_at: datetime


KIND: Final[LiteralString] = """
    select kind
      from waypost.endpoint
     where tenant_id = %(tenant)s::int
       and name = %(endpoint)s::text
"""


async def kind_of(conn: Connection, endpoint: str, *, tenant: int) -> str | None:
    """What an endpoint takes, `command` or `event`; None when nobody has that name."""
    row = await (await conn.execute(KIND, {"tenant": tenant, "endpoint": endpoint})).fetchone()
    return None if row is None else row[0]


ADD: Final[LiteralString] = """
    insert into waypost.subscription (tenant_id, type, endpoint, ordered_by, attributes)
    values (%(tenant)s::int, %(type)s::text, %(endpoint)s::text, %(ordered_by)s::text, %(attributes)s::jsonb)
        on conflict (tenant_id, type, endpoint) do update
       set ordered_by = excluded.ordered_by,
           attributes = excluded.attributes
 returning xmax = 0 as is_new
"""


async def add(
    conn: Connection,
    type: str,  # noqa: A002  # its name on the wire
    endpoint: str,
    *,
    ordered_by: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    tenant: int,
) -> bool:
    """Whether it is new; one that was there is as said from now on. Raises psycopg's ForeignKeyViolation for an
    endpoint that is not there.
    """
    row = await (
        await conn.execute(
            ADD,
            {
                "tenant": tenant,
                "type": type,
                "endpoint": endpoint,
                "ordered_by": ordered_by,
                "attributes": None if attributes is None else Jsonb(dict(attributes)),
            },
        )
    ).fetchone()
    return row is not None and bool(row[0])


REMOVE: Final[LiteralString] = """
    delete from waypost.subscription
     where tenant_id = %(tenant)s::int
       and type = %(type)s::text
       and endpoint = %(endpoint)s::text
"""


async def remove(conn: Connection, type: str, endpoint: str, *, tenant: int) -> bool:  # noqa: A002  # as above
    """Whether it was there."""
    cursor = await conn.execute(REMOVE, {"tenant": tenant, "type": type, "endpoint": endpoint})
    return cursor.rowcount == 1


READ: Final[LiteralString] = """
    select s.type, s.endpoint, s.ordered_by, s.attributes, e.url, e.state, s.created_at
      from waypost.subscription s
      join waypost.endpoint e
        on e.tenant_id = s.tenant_id
       and e.name = s.endpoint
     where s.tenant_id = %(tenant)s::int
     order by s.type, s.endpoint
     limit %(limit)s::int
"""


async def read(conn: Connection, *, tenant: int, limit: int) -> list[SubscriptionRow]:
    """By type and endpoint, at most `limit`."""
    async with conn.cursor(row_factory=class_row(SubscriptionRow)) as cursor:
        await cursor.execute(READ, {"tenant": tenant, "limit": limit})
        return await cursor.fetchall()
