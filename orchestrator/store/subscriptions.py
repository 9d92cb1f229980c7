"""Which endpoints get the events of a type."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, LiteralString

from psycopg.rows import class_row

from orchestrator.store.database import Connection


@dataclass(frozen=True, slots=True)
class SubscriptionRow:
    """Events of `type` go to `endpoint`, which is at `url` and may be disabled (`state`)."""

    type: str
    endpoint: str
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
    insert into waypost.subscription (tenant_id, type, endpoint)
    values (%(tenant)s::int, %(type)s::text, %(endpoint)s::text)
        on conflict do nothing
"""


async def add(conn: Connection, type: str, endpoint: str, *, tenant: int) -> bool:  # noqa: A002  # its name on the wire
    """Whether it is new. Raises psycopg's ForeignKeyViolation for an endpoint that is not there."""
    cursor = await conn.execute(ADD, {"tenant": tenant, "type": type, "endpoint": endpoint})
    return cursor.rowcount == 1


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
    select s.type, s.endpoint, e.url, e.state, s.created_at
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
