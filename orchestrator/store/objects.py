"""Which objects of the payload store rows name."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, LiteralString

from contracts.objects import Reference, reference
from orchestrator.store.database import Connection

NAMED: Final[LiteralString] = """
    select n.digest
      from (select jsonb_path_query(j.payload, '$.objects.*.sha256') #>> '{}' as digest
              from waypost.journal j
             where j.payload ? 'objects'
               and jsonb_path_query_array(j.payload, '$.objects.*.sha256') ?| %(digests)s::text[]
             union
            select jsonb_path_query(i.data, '$.objects.*.sha256') #>> '{}'
              from waypost.inbox i
             where i.data ? 'objects'
               and jsonb_path_query_array(i.data, '$.objects.*.sha256') ?| %(digests)s::text[]) n
     where n.digest = any(%(digests)s::text[])
"""


async def named(conn: Connection, digests: Sequence[str]) -> set[str]:
    """Those of `digests` that any row names, of any tenant."""
    cursor = await conn.execute(NAMED, {"digests": list(digests)})
    return {digest for (digest,) in await cursor.fetchall()}


OF_FACT: Final[LiteralString] = """
    select payload -> 'objects' -> 'args.data'
      from waypost.journal
     where tenant_id = %(tenant)s::int
       and execution_id = %(execution)s::uuid
       and position = %(position)s::bigint
"""


async def of_fact(conn: Connection, execution: str, position: int, *, tenant: int) -> Reference:
    """What a fact names as the data of what it asks for. Raises ValueError when it names none."""
    named = {"tenant": tenant, "execution": execution, "position": position}
    row = await (await conn.execute(OF_FACT, named)).fetchone()
    return reference(None if row is None else row[0])


BEFORE: Final[LiteralString] = """
    select now() - %(age)s::interval
"""


async def before(conn: Connection, age: timedelta) -> datetime:
    """The time that was so long ago, by the database's clock."""
    row = await (await conn.execute(BEFORE, {"age": age})).fetchone()
    assert row is not None, "a select of a value has a row"
    return row[0]
