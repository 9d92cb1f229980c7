"""Which objects of the payload store rows name."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, LiteralString

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


BEFORE: Final[LiteralString] = """
    select now() - %(age)s::interval
"""


async def before(conn: Connection, age: timedelta) -> datetime:
    """The time that was so long ago, by the database's clock."""
    row = await (await conn.execute(BEFORE, {"age": age})).fetchone()
    assert row is not None, "a select of a value has a row"
    return row[0]
