"""The trace of one execution from the database alone, as a tree: nothing of it was ever exported, or need be."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from contracts.spans import Span
from orchestrator.core.fact import Fact
from orchestrator.store.situation import Situation
from orchestrator.store.spans import Arrival, Delivery
from orchestrator.store.tries import TryRow
from orchestrator.telemetry.journal import Subject, Told, spans_of
from orchestrator.telemetry.messages import accepted, sent
from orchestrator.telemetry.processed import processed


@dataclass(frozen=True, slots=True)
class Traced:
    """All spans of an execution, those under way too, and when it was looked at. `lost` are tries to send that no
    relay has settled, by the message's id: they may have arrived, and nobody knows when they were made.
    """

    spans: list[Span]
    now: datetime
    lost: dict[str, list[int]]

    def with_child(self, child: Traced) -> Traced:
        """This one, and that of one of its children."""
        return Traced([*self.spans, *child.spans], max(self.now, child.now), self.lost | child.lost)

    @property
    def began(self) -> datetime:
        return min((span.began for span in self.spans), default=self.now)

    @property
    def ended(self) -> datetime:
        return max((span.ended or self.now for span in self.spans), default=self.now)


def traced(
    it: Situation, tries: Sequence[TryRow], arrivals: Sequence[Arrival], *, gap: timedelta | None
) -> Traced:
    """What the database says about the execution of `it`, its tries to send and what it got."""
    row = it.row
    subject = Subject(row.execution_id, row.definition, row.version, row.epoch)
    facts = [
        Fact(one.position, one.kind, one.path, json.loads(one.payload or "{}"), one.at, actor=one.actor)
        for one in it.facts
    ]
    told = spans_of(subject, facts, gap=gap)
    created = dict(messages_in(told))
    spans = [one.span for one in told]
    spans += [
        sent(delivery(row.execution_id, it, one), created[one.message_id])
        for one in tries
        if one.message_id in created
    ]
    spans += [accepted(one) for one in arrivals]
    spans += [
        processed(one, one.traceparent, one.state, one.began_at, one.ended_at)
        for one in it.tasks
        if one.traceparent is not None and one.began_at is not None
    ]
    known = {(one.message_id, one.attempt) for one in tries}
    lost = {
        message.message_id: missing
        for message in it.messages
        if (
            missing := [
                number
                for number in range(1, message.attempts + 1)
                if (message.message_id, number) not in known
                and not (number == message.attempts and message.state in ("sending", "stopping"))
            ]
        )
    }
    return Traced(spans, it.around.now, lost)


def messages_in(told: Sequence[Told]) -> Iterator[tuple[str, str]]:
    """Id and traceparent of each message."""
    for one in told:
        if one.span.kind == "producer":
            yield str(one.span.attributes["messaging.message.id"]), str(one.span.at)


def delivery(execution: str, it: Situation, one: TryRow) -> Delivery:
    endpoint = next(message.endpoint for message in it.messages if message.message_id == one.message_id)
    return Delivery(
        one.message_id, one.attempt, execution, endpoint, one.started_at, one.duration, one.outcome, one.status,
        one.error_code,
    )  # fmt: skip


def in_order(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with its depth, parents before children, in the order of their beginnings. What is under nothing that
    is here is under the first one.
    """
    here = {span.at.span_id for span in spans}
    first = spans[0].at.span_id if spans else ""
    under: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.began):
        top = span.at.span_id == first
        under["" if top else span.parent if span.parent in here else first].append(span)

    def walk(parent: str, depth: int) -> Iterator[tuple[int, Span]]:
        for span in under[parent]:
            yield depth, span
            yield from walk(span.at.span_id, depth + 1)

    return walk("", 0)


class Scale:
    """Where on a line of `width` a moment is. It keeps the order and is not to scale: each stretch in which nothing
    begins or ends is as wide as the root of its time, so that a wait of days leaves room for what took milliseconds.
    """

    def __init__(self, traced: Traced, width: int) -> None:
        moments = sorted(
            {moment for span in traced.spans for moment in (span.began, span.ended or traced.now)}
        )
        self._places: dict[datetime, float] = {}
        place = 0.0
        for before, moment in zip([None, *moments], moments, strict=False):
            place += 0.0 if before is None else (moment - before).total_seconds() ** 0.5
            self._places[moment] = place
        self._unit = width / place if place else 0.0
        self._width = width

    def __call__(self, moment: datetime) -> int:
        """The column, from 0 up to the width."""
        return min(self._width, round(self._places[moment] * self._unit))
