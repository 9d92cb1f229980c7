"""Versions of flows, what starts them, and where their commands go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal, LiteralString
from urllib.parse import quote

from contracts import arrays, strict_json
from contracts.errors import WaypostError
from contracts.limits import PROBLEMS_MAX
from orchestrator.store.database import Connection


class ChangedFlows(WaypostError):
    """Versions of flows have other code than they had: what runs under them was begun by that code."""

    code = "changed-flows"

    def __init__(self, flows: Sequence[str]) -> None:
        self.flows = tuple(flows)
        named = ", ".join(self.flows[:PROBLEMS_MAX])
        super().__init__(
            f"flows: expected the code that {named} had when it became known, found other code;"
            " give it a new version, or, when `waypost check-replay` finds no difference, say"
            " WAYPOST_CHANGED_FLOWS=accept"
        )


@dataclass(frozen=True, slots=True)
class Definition:
    """A version of a flow that a worker holds.

    `on` is the type of the events that start it, None when none does; `key` is a JSON pointer to the business key
    in their data, None for their subject. `fingerprint` says which code it is, None when that is not known; `deadline`
    how long an execution may take; `sensitive` where input and output are, as JSON pointers.
    """

    name: str
    version: str
    on: str | None = None
    key: str | None = None
    fingerprint: bytes | None = None
    deadline: timedelta | None = None
    sensitive: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])


ALONE: Final[LiteralString] = """
    select waypost.lock_keys(array[1], array['waypost:definition'], array[''])
"""

PUBLISH: Final[LiteralString] = """
    insert into waypost.definition as d (tenant_id, name, version, kind, state, fingerprint, deadline, sensitive)
    select 1, t.name, t.version, 'code', 'published', t.fingerprint, t.deadline, t.sensitive
      from unnest(%(names)s::text[], %(versions)s::text[], %(fingerprints)s::bytea[], %(deadlines)s::interval[],
                  %(sensitive)s::jsonb[])
           with ordinality as t(name, version, fingerprint, deadline, sensitive, ord)
     order by t.ord
        on conflict (tenant_id, name, version) do update
       set fingerprint = coalesce(excluded.fingerprint, d.fingerprint), deadline = excluded.deadline,
           sensitive = excluded.sensitive
     where d.kind = 'code'
       and (coalesce(d.fingerprint = excluded.fingerprint, true) or %(accept)s::boolean)
       and (d.fingerprint is distinct from coalesce(excluded.fingerprint, d.fingerprint)
            or d.deadline is distinct from excluded.deadline
            or d.sensitive is distinct from excluded.sensitive)
"""

CHANGED: Final[LiteralString] = """
    select d.name || '@' || d.version
      from unnest(%(names)s::text[], %(versions)s::text[], %(fingerprints)s::bytea[]) with ordinality
           as t(name, version, fingerprint, ord)
      join waypost.definition d
        on d.tenant_id = 1
       and d.name = t.name
       and d.version = t.version
       and d.fingerprint <> t.fingerprint
     order by t.ord
"""

TRIGGERS: Final[LiteralString] = """
      with held as materialized (
             select *
               from unnest(%(names)s::text[], %(versions)s::text[], %(types)s::text[], %(keys)s::text[])
                    as t(name, version, type, key_pointer)
           ),
           gone as (
             delete from waypost.trigger g
              using held h
              where g.tenant_id = 1
                and g.definition = h.name
                and g.version = h.version
                and h.type is null
           )
    insert into waypost.trigger as g (tenant_id, definition, version, type, key_pointer)
    select 1, h.name, h.version, h.type, h.key_pointer
      from held h
     where h.type is not null
        on conflict (tenant_id, definition, version) do update
       set type = excluded.type, key_pointer = excluded.key_pointer, changed_at = excluded.changed_at
     where g.type <> excluded.type
        or g.key_pointer is distinct from excluded.key_pointer
"""


async def publish(
    conn: Connection,
    flows: Sequence[Definition],
    *,
    changed: Literal["refuse", "accept", "pass"] = "refuse",
) -> None:
    """Make the flows that a worker holds known, in this order, and which events start them.

    The newest version is the one that became known last; of several at once, the last one, as in `Flows`. When a
    version has other code than it had, that is refused, or accepted from now on, or passed over: as `changed` says.
    One transaction, alone: publishers wait for each other. Raises ChangedFlows, and then nothing is written.
    """
    parameters = {
        "names": arrays.texts(flow.name for flow in flows),
        "versions": arrays.texts(flow.version for flow in flows),
        "types": arrays.texts(flow.on for flow in flows),
        "keys": arrays.texts(flow.key for flow in flows),
        "fingerprints": arrays.blobs(flow.fingerprint for flow in flows),
        "accept": changed == "accept",
        "sensitive": arrays.texts(
            strict_json.encode(dict(flow.sensitive), what="sensitive") for flow in flows
        ),
        "deadlines": arrays.spans(flow.deadline for flow in flows),
    }
    async with conn.transaction():
        await conn.execute(ALONE)
        await conn.execute(PUBLISH, parameters)
        other = await (await conn.execute(CHANGED, parameters)).fetchall()
        if other and changed == "refuse":
            raise ChangedFlows([name for (name,) in other])
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
