"""`waypost trace`: what an execution did and when, as a tree, from the database alone."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from contracts.errors import UnknownExecution
from contracts.spans import Span
from orchestrator import bootstrap
from orchestrator.cli.output import Exit, as_json, fitting, plain, say, terminal_width
from orchestrator.settings import Settings
from orchestrator.store.database import Connection
from orchestrator.store.kin import descendants
from orchestrator.store.situation import Situation, situation
from orchestrator.store.spans import arrivals_of
from orchestrator.store.tries import SHOWN_MAX, tries
from orchestrator.telemetry.tree import Scale, Traced, in_order, traced
from orchestrator.why import explain
from orchestrator.words import when

TENANT: Final = 1
FAMILY_MAX: Final = 100
"""Executions whose spans are shown under that of their parent, the nearest first."""
BAR: Final = 32
"""Columns of the line of time."""
NAME_CHARACTERS_MAX: Final = 48
"""Of the name of a span with its indentation."""


@dataclass(frozen=True, slots=True)
class Marks:
    """How a line of time is drawn: what is over, what is under way, and what took no time."""

    over: str
    open: str
    instant: str


DRAWN: Final = Marks("█", "░", "▏")
TYPED: Final = Marks("#", ".", "|")


def trace(args: Namespace, settings: Settings) -> int:
    it, found = bootstrap.run(look_at(args.id, settings))
    if args.output == "json":
        say(as_json(whole(it, found)))
    else:
        drawn = (sys.stdout.encoding or "ascii").lower().startswith("utf")
        say("\n".join(lines(it, found, marks=DRAWN if drawn else TYPED, width=terminal_width())))
    return Exit.OK


async def look_at(execution: UUID, settings: Settings) -> tuple[Situation, Traced]:
    async with bootstrap.connection(settings) as conn:
        found = await look_at_one(conn, str(execution), settings)
        if found is None:
            raise UnknownExecution(str(execution))
        it, whole = found
        for one in await descendants(conn, str(execution), tenant=TENANT, limit=FAMILY_MAX):
            child = await look_at_one(conn, one, settings)
            whole = whole if child is None else whole.with_child(child[1])
    return it, whole


async def look_at_one(
    conn: Connection, execution: str, settings: Settings
) -> tuple[Situation, Traced] | None:
    """One execution, without its children; None when there is none."""
    tried = await tries(conn, execution, tenant=TENANT)
    arrived = await arrivals_of(conn, execution, tenant=TENANT, limit=SHOWN_MAX)
    it = await situation(conn, execution, tenant=TENANT)
    return None if it is None else (it, traced(it, tried, arrived, gap=settings.trace_segment_gap))


def whole(it: Situation, found: Traced) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "execution_id": it.row.execution_id,
        "flow": it.row.definition,
        "version": it.row.version,
        "state": it.row.state,
        "trace_id": found.spans[0].at.trace_id if found.spans else None,
        "spans": [as_data(span, depth, found) for depth, span in in_order(found.spans)],
        "tries_without_a_record": found.lost,
    }


def as_data(span: Span, depth: int, found: Traced) -> dict[str, Any]:
    return {
        "name": span.name,
        "kind": span.kind,
        "depth": depth,
        "trace_id": span.at.trace_id,
        "span_id": span.at.span_id,
        "parent_id": span.parent,
        "began": span.began,
        "ended": span.ended,
        "seconds": ((span.ended or found.now) - span.began).total_seconds(),
        "error": span.error,
        "attributes": dict(span.attributes),
        "links": [{"traceparent": str(link.to), "type": link.kind} for link in span.links],
    }


def lines(it: Situation, found: Traced, *, marks: Marks, width: int | None) -> Iterator[str]:
    """A head, a line for each span, and why it waits."""
    row = it.row
    key = f"  key {plain(row.business_key)}" if row.business_key else ""
    yield f"{row.execution_id}  {plain(row.definition)}@{plain(row.version)}{key}  {row.state}"
    if row.parent is not None:
        yield f"child of {row.parent} at {plain(row.parent_path)}"
    if not found.spans:
        return
    began = found.began.astimezone(UTC)
    yield fitting(
        f"trace {found.spans[0].at.trace_id}  began {began:%Y-%m-%d %H:%M:%S} UTC, {span_of_time(found.ended - began)}",
        width,
    )
    yield ""
    shown = [(indented(depth, span), span) for depth, span in in_order(found.spans)]
    names = max(len(name) for name, _ in shown)
    scale = Scale(found, BAR)
    for name, span in shown:
        took = "" if span.ended == span.began else span_of_time((span.ended or found.now) - span.began)
        line = f"{name:<{names}}  {bar(span, found, scale, marks)}  {took:>10}  {outcome(span, found.now)}"
        yield fitting(line.rstrip(), width)
    for message, missing in found.lost.items():
        yield f"tries without a record, whose relay died: {', '.join(map(str, missing))} of message {message}"
    if row.finished_at is None:
        yield ""
        yield plain(explain(it, it.around.now).sentence)


def indented(depth: int, span: Span) -> str:
    """The name of a span; a try with its number."""
    number = span.attributes.get("waypost.attempt.number") or span.attributes.get("waypost.delivery.attempt")
    name = f"{'  ' * min(depth, 12)}{plain(span.name)}"
    ending = f" #{number}" if number is not None else ""
    most = NAME_CHARACTERS_MAX - len(ending)
    return (name if len(name) <= most else name[: most - 1] + "…") + ending


def bar(span: Span, found: Traced, scale: Scale, marks: Marks) -> str:
    begin, end = scale(span.began), scale(span.ended or found.now)
    if span.ended == span.began:
        drawn = marks.instant
        begin = min(begin, BAR - 1)
    else:
        begin = min(begin, BAR - 1)
        drawn = (marks.open if span.ended is None else marks.over) * max(1, end - begin)
    return f"{' ' * begin}{drawn}".ljust(BAR)


SAID: Final = (
    "http.response.status_code",
    "waypost.outcome",
    "waypost.wait.outcome",
    "waypost.inbox.outcome",
    "waypost.workflow.outcome",
)
"""What says in a word how a span ended; the first that it has."""


def outcome(span: Span, now: datetime) -> str:
    """How a span ended, in a few words."""
    if span.ended is None:
        until = span.attributes.get("waypost.wait.deadline") or span.attributes.get("waypost.timer.due_at")
        return (
            "under way"
            if until is None
            else f"under way, until {when(datetime.fromisoformat(str(until)), now)}"
        )
    said = [str(span.attributes[name]) for name in SAID if name in span.attributes][:1]
    if span.kind == "producer":
        said = [str(span.attributes["cloudevents.event_type"])]
    if span.error is not None and span.error not in said:
        said.append(span.error)
    return plain(" ".join(said))


def span_of_time(found: timedelta) -> str:
    """How long, as people say it: `12 ms`, `1.9 s`, `1 m 12 s`, `2 h 3 m`, `3 d 4 h`."""
    seconds = max(0.0, found.total_seconds())
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, length, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // part} {smaller}"
    return f"{whole} s"
