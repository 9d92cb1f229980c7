"""What happened, to a collector: marks become spans, spans are exported, and then the marks are deleted.

    commit (with a mark) ──▶ take marks ──▶ read what they are about ──▶ export ──▶ delete the marks
                               └ for a while                               └ no transaction is open

Whoever dies on the way leaves the mark, and the span is exported again, as the same span. Each part exports what it
has committed itself; when it is gone, another process of the part does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final

import psycopg

from contracts import trace
from contracts.observer import Observer
from contracts.spans import Collector, Span
from orchestrator.core.fact import Fact
from orchestrator.store import spans as store
from orchestrator.store.database import Connection, Pool
from orchestrator.store.spans import Mark
from orchestrator.telemetry.journal import Subject, anchor_in, at, closed_within, spans_of
from orchestrator.telemetry.messages import accepted, sent

MARKS_MAX: Final = 200
"""Taken at once; their spans go together."""

POLL: Final = timedelta(seconds=1)
"""Between two looks for marks; what happens meanwhile goes together."""

MARK_LEASE: Final = timedelta(seconds=30)
"""For which marks that were taken are left alone: reading and exporting take less."""

PAUSE_MAX: Final = timedelta(seconds=30)
"""The longest pause while the collector takes nothing; it begins with POLL and doubles."""

KEPT: Final = timedelta(hours=1)
"""After which what no collector took is dropped."""

FLUSH: Final = timedelta(seconds=3)
"""For the last spans of a process that ends; what is left is exported by another one of its part."""

Read = Callable[[Connection, Sequence[Mark], "Tracing"], Awaitable[list[Span]]]


class Tracing:
    """Exports the marks of `part` to `collector`. `gap` is that of segments."""

    def __init__(
        self, part: str, pool: Pool, collector: Collector, *, observer: Observer, gap: timedelta | None
    ) -> None:
        self._part = part
        self._pool = pool
        self._collector = collector
        self.observer = observer
        self.gap = gap

    async def run(self) -> None:
        """Export until cancelled."""
        failures = 0
        while True:
            try:
                taken, went = await self.once()
            except (psycopg.Error, OSError) as error:
                self.observer.saw("database.failed", part="traces", error=type(error).__name__)
                taken, went = 0, False
            failures = 0 if went else failures + 1
            if not went or taken < MARKS_MAX:
                await asyncio.sleep(min(PAUSE_MAX, POLL * 2 ** min(failures, 10)).total_seconds())

    async def once(self) -> tuple[int, bool]:
        """Export what waits, at most MARKS_MAX marks; how many were taken, and whether the collector has them."""
        async with self._pool.connection() as conn:
            dropped = await store.drop_old(conn, part=self._part, kept=KEPT)
            marks = await store.take(conn, part=self._part, limit=MARKS_MAX, lease=MARK_LEASE)
            spans = await READ[self._part](conn, marks, self) if marks else []
        if dropped:
            self.observer.saw("spans.dropped", count=dropped)
        if spans and not await self._collector.export(spans):
            self.observer.saw("spans.delayed", count=len(spans))
            return len(marks), False
        if marks:
            async with self._pool.connection() as conn:
                await store.exported(conn, marks, part=self._part)
        return len(marks), True

    async def flush(self) -> None:
        """Export what is left, as far as it goes in FLUSH."""
        with contextlib.suppress(TimeoutError, psycopg.Error, OSError):
            async with asyncio.timeout(FLUSH.total_seconds()):
                taken, went = MARKS_MAX, True
                while went and taken == MARKS_MAX:
                    taken, went = await self.once()


# ---- a worker: turns -----------------------------------------------------------------------------------------------


async def turns(conn: Connection, marks: Sequence[Mark], tracing: Tracing) -> list[Span]:
    """The spans that the facts of marked turns end, and the turns themselves."""
    named = sorted({(mark.tenant_id, mark.execution_id or "") for mark in marks})
    journals = await store.journals(conn, named)
    spans: list[Span] = []
    for execution, journal in journals.items():
        subject = Subject(execution, journal.definition, journal.version, journal.epoch)
        of_it = [mark for mark in marks if mark.execution_id == execution]
        try:
            spans += turns_of(subject, journal.facts, of_it, tracing.gap)
        except Exception as error:  # noqa: BLE001  # rows edited by hand must not keep others from being exported
            tracing.observer.saw("spans.unfit", execution=execution, error=error)
    return spans


def turns_of(
    subject: Subject, facts: Sequence[Fact], marks: Sequence[Mark], gap: timedelta | None
) -> list[Span]:
    told, spans = spans_of(subject, facts, gap=gap), list[Span]()
    for mark in marks:
        assert mark.position is not None, "a worker's mark names facts"
        assert mark.facts is not None, "a worker's mark names facts"
        spans += closed_within(told, after=mark.position, last=mark.position + mark.facts)
        if mark.began_at is not None:
            base = anchor_in(subject, facts, gap=gap, position=mark.position + 1)
            spans.append(turn(subject, mark, base))
    return spans


def turn(subject: Subject, mark: Mark, base: str) -> Span:
    return Span(
        name=f"turn {subject.flow}",
        at=at(trace.child(base, f"turn/{(mark.position or 0) + 1}")),
        parent=at(base).span_id,
        began=min(mark.began_at or mark.made_at, mark.made_at),
        ended=mark.made_at,
        attributes={**subject.attributes, "waypost.turn.facts": mark.facts or 0},
    )


# ---- a relay: tries to send ----------------------------------------------------------------------------------------


async def tries(conn: Connection, marks: Sequence[Mark], _: Tracing) -> list[Span]:
    of = {(mark.message_id or "", mark.attempt or 0): mark for mark in marks}
    found = await store.deliveries(
        conn, [(mark.tenant_id, message, attempt) for (message, attempt), mark in of.items()]
    )
    return [
        sent(one, created)
        for one in found
        if (created := of[one.message_id, one.attempt].traceparent) is not None
    ]


# ---- a receiver: what was taken in ---------------------------------------------------------------------------------


async def arrivals(conn: Connection, marks: Sequence[Mark], _: Tracing) -> list[Span]:
    of = {mark.inbox_id: mark for mark in marks if mark.inbox_id is not None}
    return [
        accepted(one, of[one.inbox_id].traceparent, of[one.inbox_id].took)
        for one in await store.arrivals(conn, list(of))
    ]


READ: Final[Mapping[str, Read]] = {"worker": turns, "relay": tries, "receiver": arrivals}
"""How each part makes spans of its marks."""
