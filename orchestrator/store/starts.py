"""New executions: the row and its first fact, in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, LiteralString, TypeAlias

from contracts import arrays
from contracts.codec import Sealing, place, seal_document
from orchestrator.store.database import Connection

StartOutcome: TypeAlias = Literal["started", "exists", "conflict", "again"]


@dataclass(frozen=True, slots=True)
class NewExecution:
    """What `start` writes. `started` is the payload of the first fact, as JSON; `digest` identifies the input;
    `deadline` is how long it may take.
    """

    tenant: int
    execution: str
    definition: str
    version: str
    business_key: str | None
    digest: bytes
    started: str
    traceparent: str
    deadline: timedelta | None = None


START: Final[LiteralString] = """
    select outcome, execution_id::text
      from waypost.start_executions(
             %(tenants)s::int[], %(ids)s::uuid[], %(definitions)s::text[], %(versions)s::text[], %(keys)s::text[],
             %(digests)s::bytea[], %(started)s::jsonb[], %(traceparents)s::text[], %(now)s::timestamptz,
             %(deadlines)s::interval[])
     order by item
"""


def started_at_rest(tenant: int, execution: str, started: str) -> str:
    """The first fact of an execution as the journal keeps it."""
    codec = Sealing.codec
    return started if codec is None else seal_document(codec, started, place("journal", tenant, execution, 1))


async def start(
    conn: Connection, new: Sequence[NewExecution], *, now: datetime | None = None
) -> list[tuple[StartOutcome, str]]:
    """For each of `new`, in order: what became of it, and the execution that has its key.

    `started` is new; `exists` has the same input; `conflict` has another; `again` was deleted just now, and is
    to be repeated.
    """
    parameters = {
        "tenants": arrays.plain(n.tenant for n in new),
        "ids": arrays.plain(n.execution for n in new),
        "definitions": arrays.texts(n.definition for n in new),
        "versions": arrays.texts(n.version for n in new),
        "keys": arrays.texts(n.business_key for n in new),
        "digests": arrays.blobs(n.digest for n in new),
        "started": arrays.texts([started_at_rest(n.tenant, n.execution, n.started) for n in new]),
        "traceparents": arrays.texts(n.traceparent for n in new),
        "now": now,
        "deadlines": arrays.spans(n.deadline for n in new),
    }
    cursor = await conn.execute(START, parameters, prepare=True)
    return [(outcome, execution) for outcome, execution in await cursor.fetchall()]
