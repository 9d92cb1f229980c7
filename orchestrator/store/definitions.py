"""Versions of flows, and where their commands go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, LiteralString
from urllib.parse import quote

from orchestrator.store import arrays
from orchestrator.store.database import Connection

PUBLISH: Final[LiteralString] = """
    insert into waypost.definition (tenant_id, name, version, kind, state)
    select 1, t.name, t.version, 'code', 'published'
      from unnest(%(names)s::text[], %(versions)s::text[]) as t(name, version)
     order by t.name collate "C", t.version collate "C"
        on conflict do nothing
"""


async def publish(conn: Connection, flows: Sequence[tuple[str, str]]) -> None:
    """Make the flows (name, version) that a worker holds known."""
    parameters = {"names": arrays.texts(n for n, _ in flows), "versions": arrays.texts(v for _, v in flows)}
    await conn.execute(PUBLISH, parameters)


ROUTES: Final[LiteralString] = """
    select e.tenant_id, e.name, t.name || '/' || coalesce(e.replies_from, e.name)
      from waypost.endpoint e
      join waypost.tenant t using (tenant_id)
"""


async def reply_routes(conn: Connection) -> dict[tuple[int, str], str]:
    """For each endpoint (tenant, name), the part of the receiver's URL that its replies are posted to."""
    cursor = await conn.execute(ROUTES)
    return {(tenant, name): quote(route) for tenant, name, route in await cursor.fetchall()}
