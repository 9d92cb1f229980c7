"""Where in its trace an execution is."""

from __future__ import annotations

from datetime import datetime, timedelta

from contracts import trace
from orchestrator.core.fact import Fact


class Segments:
    """One trace from start to end; with a `gap`, a pause that is longer begins another one, which links back.

    It depends on the journal alone: who reads it later gets the same. `base` is the traceparent of the span that
    all others of the segment are under, `first` that of the execution itself.
    """

    __slots__ = ("_at", "_gap", "base", "first")

    def __init__(self, anchor: str, gap: timedelta | None) -> None:
        self.first = self.base = anchor
        self._gap = gap
        self._at: datetime | None = None

    def go_on(self, fact: Fact) -> bool:
        """To `fact`, the next one of the journal; whether a segment begins with it."""
        before, self._at = self._at, fact.at
        if self._gap is None or before is None or fact.at - before <= self._gap:
            return False
        self.base = trace.segment(self.first, fact.position)
        return True


def span_key(key: str, again: int | None) -> str:
    """What the span of a message is made of: its place, and its number when it was made again."""
    return key if again is None else f"{key}~{again}"


def anchor_of(traceparent: object, execution: str) -> str:
    """The traceparent of the span that begins an execution's trace; `traceparent` is what it was started with."""
    known = isinstance(traceparent, str) and trace.parse(traceparent) is not None
    return str(traceparent) if known else trace.root(execution)
