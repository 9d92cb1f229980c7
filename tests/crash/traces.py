"""What a collector has of an execution, beside what the database says that happened."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from contracts.spans import Span
from orchestrator.store.database import Connection
from orchestrator.store.situation import situation
from orchestrator.store.spans import arrivals_of
from orchestrator.store.tries import SHOWN_MAX, tries
from orchestrator.telemetry.tree import traced
from tests.telemetry.collector import Collector, Seen

OURS: Final = frozenset({"waypost-worker", "waypost-relay", "waypost-receiver"})
"""Who says what is in the database. A service keeps its spans in memory, and they are lost with it."""

OF_TROUBLE: Final = ("turn ", "attempt ", "send ")
"""What there is more of when somebody dies: turns, and tries."""

TENANT: Final = 1
MARKS: Final = "select count(*) from waypost.span_due"
FACTS: Final = """
    select count(*)
      from waypost.journal
     where execution_id = %s
       and kind <> 'orphaned'
"""


def spans_of(collector: Collector, execution: str) -> list[Seen]:
    """What our processes exported of it, repetitions too."""
    with collector.lock:
        return [
            span
            for span in collector.spans
            if span.service in OURS and span.attributes.get("waypost.instance.id") == execution
        ]


def names(collector: Collector, execution: str) -> Iterator[str]:
    """The spans that are the same whoever dies, each with the one above it."""
    found = {span.span_id: span for span in spans_of(collector, execution)}
    for span in found.values():
        if not span.name.startswith(OF_TROUBLE):
            above = found[span.parent_id].name if span.parent_id in found else "nothing of ours"
            yield f"{span.name} under {above}"


async def unlike(conn: Connection, collector: Collector, execution: str) -> list[str]:
    """Where the collector has not, by now, all that happened and nothing else, each span the same whenever it came."""
    wrong = [f"{await one(conn, MARKS)} marks are left"] if await one(conn, MARKS) else []
    told, seen = await ended(conn, execution), spans_of(collector, execution)
    wrong += changed(seen)
    with collector.lock:
        anywhere = {span.span_id for span in collector.spans}
    wrong += [f"{span.name} was not exported" for span in told if span.at.span_id not in anywhere]
    here = {span.at.span_id for span in told}
    wrong += [
        f"{span.name} never happened"
        for span in seen
        if span.span_id not in here and not span.name.startswith("turn ")
    ]
    turns = {span.span_id: span.attributes for span in seen if "waypost.turn.facts" in span.attributes}
    said, facts = sum(it["waypost.turn.facts"] for it in turns.values()), await one(conn, FACTS, execution)
    # `started` is the first fact, of whoever started it; no turn has it.
    return wrong if said == facts - 1 else [*wrong, f"turns tell of {said} facts of {facts - 1}"]


async def ended(conn: Connection, execution: str) -> Sequence[Span]:
    """What happened, from the database alone."""
    tried = await tries(conn, execution, tenant=TENANT)
    arrived = await arrivals_of(conn, execution, tenant=TENANT, limit=SHOWN_MAX)
    it = await situation(conn, execution, tenant=TENANT)
    assert it is not None, f"{execution} was started"
    return [span for span in traced(it, tried, arrived, gap=None).spans if span.ended is not None]


def changed(seen: Collection[Seen]) -> list[str]:
    """What came again under its id, and was not the same."""
    first: dict[str, Seen] = {}
    return [f"{span.name} came as another" for span in seen if first.setdefault(span.span_id, span) != span]


async def one(conn: Connection, query: str, *values: object) -> int:
    row = await (await conn.execute(query.encode(), values)).fetchone()
    assert row is not None, "a count is a row"
    return row[0]
