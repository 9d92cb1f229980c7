"""A journal as spans: what an execution did, from its facts alone.

    start {flow}             the anchor of the trace
    ├ create {endpoint}      a command, as it was committed; its traceparent is in the signed body. A task: its queue
    │ └ wait {command}       from its asking to its end: done, refused, failed, unknown
    ├ attempt {step}         one try of a local step; a worker's death ends it, and another one begins
    ├ compensate {step}      an undo: the wait for a command's end, or one try of a local one
    ├ child {flow}           from its asking to its end; what the child did is under it
    ├ timer {name} · wait {type of event} · approval {subject} · hold {code} · operator {order}
    └ end {flow}

A pure function. Ids are made of the execution and of where things stand, so that whoever makes a span again makes the
same one, and a message can name its span before anybody has seen it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from contracts import trace
from contracts.identifiers import execution_key, message_id
from contracts.spans import Attributes, Link, Span
from contracts.trace import Trace
from orchestrator.core.ask import STEP_VERDICTS
from orchestrator.core.errors import error_in
from orchestrator.core.fact import Fact
from orchestrator.core.path import name_at, undone_at
from orchestrator.core.segments import Segments, anchor_of, span_key
from orchestrator.core.status import Status

Json = Any

GOOD: Final = frozenset({"done", "withdrawn", "resolved"})
"""Outcomes of an ask that are no errors. A timer and a wait for an event that is over are none either."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose journal it is. The first fact says which trace it belongs to."""

    execution: str
    flow: str
    version: str
    epoch: int = 0

    def key(self, path: str) -> str:
        return execution_key(self.execution, self.epoch, path)

    @property
    def attributes(self) -> dict[str, str | int | float | bool]:
        return {
            "waypost.instance.id": self.execution,
            "waypost.workflow.name": self.flow,
            "waypost.workflow.version": self.version,
        }


@dataclass(frozen=True, slots=True)
class Told:
    """A span, the position of the fact that ends it (0: it is under way), and the path that it is about."""

    span: Span
    by: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """What was asked and has not ended. `base` is the anchor that it is under, `number` that of the try which runs
    from `since`, if it is a local step.
    """

    fact: Fact
    base: str
    since: datetime
    number: int = 1

    @property
    def args(self) -> dict[str, Json]:
        args = self.fact.data.get("args")
        return args if isinstance(args, dict) else {}  # pyright: ignore[reportUnknownVariableType]  # JSON

    @property
    def is_local(self) -> bool:
        return self.args.get("do") == "step"

    @property
    def is_message(self) -> bool:
        """Whether somebody else does it: a command that is sent, or a task that is left in a queue."""
        return self.args.get("do") in ("call", "task")

    @property
    def destination(self) -> str:
        """The endpoint of a command, or the queue of a task."""
        return str(self.args.get("endpoint") or self.args.get("queue"))

    @property
    def is_between_sends(self) -> bool:
        """Whether a service gave it up, and it was not sent again yet."""
        return self.is_message and self.since > self.fact.at

    @property
    def again(self) -> int | None:
        """The number of a message that was made again."""
        return self.number if self.is_message and self.number > 1 else None


def spans_of(subject: Subject, facts: Sequence[Fact], *, gap: timedelta | None = None) -> list[Told]:
    """All spans of a journal, in the order in which they began; those that are under way at its end too."""
    reader = Reader(subject, facts, gap)
    for fact in facts:
        reader.read(fact)
    return sorted(reader.end(), key=lambda told: told.span.began)


class Reader:
    """Reads facts in their order."""

    def __init__(self, subject: Subject, facts: Sequence[Fact], gap: timedelta | None) -> None:
        self._subject = replace(subject, epoch=0)
        self._facts = {fact.position: fact for fact in facts if fact.kind == "received"}
        self._segments = Segments(
            anchor_of(facts[0].data.get("traceparent") if facts else None, subject.execution), gap
        )
        self._began = facts[0].at if facts else None
        self._told: list[Told] = []
        self._pending: dict[str, Pending] = {}
        self._held: Fact | None = None

    def read(self, fact: Fact) -> None:
        previous = self._segments.base
        if self._segments.go_on(fact):
            self._segment(fact, previous)
        on = getattr(self, f"on_{fact.kind}", None)
        if on is not None:
            on(fact)

    def end(self) -> list[Told]:
        """All of it; what has not ended is under way."""
        for pending in list(self._pending.values()):
            if pending.is_local:
                self._try(pending, None, {}, None)
            elif not pending.is_between_sends:
                self._wait(pending, None, "", None)
        self._released(None)
        return self._told

    # ---- facts -----------------------------------------------------------------------------------------------------

    def on_started(self, fact: Fact) -> None:
        """The anchor of all else. What an event started is in the event's trace, linked to where it was taken in. A
        child is under the wait of its parent; what was only started is linked to where that was.
        """
        said, parent, starter = (object_in(fact, name) for name in ("event", "parent", "starter"))
        caller = trace.parse(str(parent.get("span") or said.get("traceparent")))
        anchor = at(self._segments.base)
        links = [Link(event_anchor(said, sender=str(said.get("sender"))), "event")] if said else []
        begun = trace.parse(str(starter.get("span")))
        if begun is not None:
            links.append(Link(begun, "starter"))
        self._tell(
            Span(
                name=f"start {self._subject.flow}",
                at=anchor,
                parent=caller.span_id if caller is not None and caller.trace_id == anchor.trace_id else None,
                began=fact.at,
                ended=fact.at,
                attributes={
                    **self._subject.attributes,
                    "waypost.start.trigger": "event" if said else "parent" if parent else "start",
                },
                links=tuple(links),
            ),
            fact,
        )

    def on_asked(self, fact: Fact) -> None:
        pending = Pending(fact, self._segments.base, fact.at)
        self._pending[fact.path] = pending
        if pending.is_message:
            self._create(pending)

    def on_attempted(self, fact: Fact) -> None:
        pending = self._pending.get(fact.path)
        if pending is None:
            return
        next_at = datetime.fromisoformat(str(fact.data["next_at"]))
        if pending.is_message:
            self._wait(pending, fact, "failed", code_in(fact))
        else:
            self._try(pending, fact, {"waypost.outcome": "failed"}, code_in(fact))
        self._pending[fact.path] = replace(pending, number=pending.number + 1, since=next_at)

    def on_resent(self, fact: Fact) -> None:
        """The same command once more, as another message."""
        pending = self._pending.get(fact.path)
        if pending is not None:
            again = Fact(fact.position, "asked", fact.path, pending.fact.data, fact.at)
            self._pending[fact.path] = replace(pending, fact=again, base=self._segments.base, since=fact.at)
            self._create(self._pending[fact.path])

    def on_ended(self, fact: Fact) -> None:
        self._ended(fact, str(fact.data.get("outcome")))

    def on_withdrawn(self, fact: Fact) -> None:
        """A child that is told to end is waited for all the same."""
        if fact.data.get("kind") == "child" and self._pending[fact.path].args:
            return
        self._ended(fact, "withdrawn")

    def on_late(self, fact: Fact) -> None:
        outcome = {"waypost.wait.outcome": str(fact.data.get("outcome"))}
        self._instant(f"late {name_at(fact.path)}", fact, key=f"late/{fact.position}", **outcome)

    def _ended(self, fact: Fact, outcome: str) -> None:
        pending = self._pending.pop(fact.path, None)
        if pending is None:
            return
        if pending.is_local:
            if pending.since <= fact.at:  # else it ended while it waited for its next try
                error = None if outcome in GOOD else code_in(fact)
                self._try(pending, fact, {"waypost.outcome": outcome}, error)
            return
        if pending.is_between_sends:
            return
        harmless = outcome in GOOD or outcome == "timed_out"
        self._wait(pending, fact, outcome, None if harmless else code_in(fact))

    def on_orphaned(self, fact: Fact) -> None:
        """The worker that had it died: what it tried is over, and is tried again."""
        lost = [one for one in self._pending.values() if one.is_local and one.since <= fact.at]
        worker = {"waypost.lease.expired": True, "waypost.worker.id": str(fact.data.get("by") or "")}
        for pending in lost:
            self._try(pending, fact, worker, "worker-lost")
            again = replace(pending, number=pending.number + 1, since=fact.at)
            self._pending[pending.fact.path] = again
        if not lost:
            key = f"turn/{fact.position}"
            self._instant(f"turn {self._subject.flow}", fact, key=key, error="worker-lost", **worker)

    def on_held(self, fact: Fact) -> None:
        self._released(fact)
        self._held = fact

    def on_resumed(self, fact: Fact) -> None:
        self._ordered(fact, "resume")

    def on_cancel_asked(self, fact: Fact) -> None:
        self._ordered(fact, "cancel")

    def on_resolved(self, fact: Fact) -> None:
        self._ordered(fact, "resolve")
        if fact.data.get("verdict") in STEP_VERDICTS:
            self._ended(fact, "resolved")

    def _ordered(self, fact: Fact, order: str) -> None:
        self._released(fact)
        self._instant(f"operator {order}", fact, key=f"operator/{fact.position}")

    def on_continued(self, fact: Fact) -> None:
        self._subject = replace(self._subject, epoch=int(fact.data.get("epoch", 0)))

    def on_terminated(self, fact: Fact) -> None:
        self._ordered(fact, "terminate")
        self.on_finished(fact)

    def on_finished(self, fact: Fact) -> None:
        for path in list(self._pending):
            self._ended(replace_path(fact, path), "withdrawn")
        self._released(fact)
        outcome = str(fact.data.get("kind"))
        error = code_in(fact) if outcome == Status.FAILED else None
        seconds = (fact.at - (self._began or fact.at)).total_seconds()
        about = {"waypost.workflow.outcome": outcome, "waypost.workflow.duration_s": seconds}
        name, key = (
            ("end", "end") if outcome != "continued" else ("continue", f"continue/{self._subject.epoch}")
        )
        self._instant(f"{name} {self._subject.flow}", fact, key=key, error=error, **about)

    def _released(self, fact: Fact | None) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        code = str(held.data.get("code"))
        self._tell(
            Span(
                name=f"hold {code}",
                at=self._under(self._segments.base, f"hold/{held.position}"),
                parent=span_of(self._segments.base),
                began=held.at,
                ended=None if fact is None else fact.at,
                attributes={**self._subject.attributes, "waypost.wait.kind": code, "waypost.path": held.path},
            ),
            fact,
            held.path,
        )

    # ---- spans -----------------------------------------------------------------------------------------------------

    def _segment(self, fact: Fact, previous: str) -> None:
        links = [Link(at(self._segments.first), "anchor"), Link(at(previous), "previous_segment")]
        attributes = {**self._subject.attributes, "waypost.segment.cause": fact.kind}
        name = f"segment {self._subject.flow}"
        where = at(self._segments.base)
        self._tell(
            Span(
                name=name,
                at=where,
                parent=None,
                began=fact.at,
                ended=fact.at,
                attributes=attributes,
                links=(*links,),
            ),
            fact,
        )

    def _instant(
        self, name: str, fact: Fact, *, key: str, error: str | None = None, **about: str | float | bool
    ) -> None:
        """A span of no duration."""
        base = self._segments.base
        self._tell(
            Span(
                name=name,
                at=self._under(base, key),
                parent=span_of(base),
                began=fact.at,
                ended=fact.at,
                attributes={**self._subject.attributes, **about},
                error=error,
            ),
            fact,
            fact.path,
        )

    def _create(self, pending: Pending) -> None:
        fact, args = pending.fact, pending.args
        message = str(message_id(self._subject.execution, self._subject.epoch, fact.path, at=fact.at))
        self._tell(
            Span(
                name=f"create {pending.destination}",
                kind="producer",
                at=self._create_at(pending),
                parent=span_of(pending.base),
                began=fact.at,
                ended=fact.at,
                attributes={
                    **self._about(pending),
                    **messaging("create", pending.destination, message, self._subject.execution),
                    "cloudevents.event_id": message,
                    "cloudevents.event_type": str(args.get("name")),
                },
            ),
            fact,
            fact.path,
        )

    def _wait(self, pending: Pending, fact: Fact | None, outcome: str, error: str | None) -> None:
        asked, kind = pending.fact, str(pending.fact.data.get("kind"))
        base = self._segments.base
        moved = base != pending.base
        under = base if moved or not pending.is_message else str(self._create_at(pending))
        links = [Link(self._create_at(pending), "command")] if moved and pending.is_message else []
        event = self._facts.get(fact.data.get("of", 0)) if fact is not None else None
        about: dict[str, str | int | float | bool] = {"waypost.wait.kind": kind}
        if outcome:
            about["waypost.wait.outcome"] = outcome
        if asked.data.get("due"):
            about["waypost.timer.due_at" if kind == "timer" else "waypost.wait.deadline"] = str(
                asked.data["due"]
            )
        if event is not None:
            about["cloudevents.event_id"] = str(event.data.get("id"))
            links.append(Link(event_anchor(event.data, sender=event.actor.partition(":")[2]), "event"))
        self._tell(
            Span(
                name=wait_name(pending),
                at=self._under(base, f"{span_key(self._subject.key(asked.path), pending.again)}/wait"),
                parent=span_of(under),
                began=asked.at,
                ended=None if fact is None else fact.at,
                attributes={**self._about(pending), **about},
                error=error,
                links=tuple(links),
            ),
            fact,
            asked.path,
        )

    def _try(self, pending: Pending, fact: Fact | None, about: Attributes, error: str | None) -> None:
        path, base = pending.fact.path, self._segments.base
        step, key = undone_at(path), f"{self._subject.key(path)}/try"
        before = [Link(self._under(pending.base, f"{key}/{pending.number - 1}"), "retry_of")]
        self._tell(
            Span(
                name=f"attempt {name_at(path)}" if step is None else f"compensate {name_at(step)}",
                at=self._under(base, f"{key}/{pending.number}"),
                parent=span_of(base),
                began=pending.since,
                ended=None if fact is None else max(fact.at, pending.since),
                attributes={**self._about(pending), "waypost.attempt.number": pending.number, **about},
                error=error,
                links=tuple(before if pending.number > 1 else ()),
            ),
            fact,
            path,
        )

    def _tell(self, span: Span, fact: Fact | None, path: str = "") -> None:
        self._told.append(Told(span, fact.position if fact is not None else 0, path))

    def _create_at(self, pending: Pending) -> Trace:
        return self._under(pending.base, span_key(self._subject.key(pending.fact.path), pending.again))

    def _under(self, base: str, key: str) -> Trace:
        return at(trace.child(base, key))

    def _about(self, pending: Pending) -> dict[str, str | int | float | bool]:
        path = pending.fact.path
        step = undone_at(path)
        attributes = {
            **self._subject.attributes,
            "waypost.path": path,
            "waypost.node.name": name_at(path if step is None else step),
        }
        return attributes | ({} if step is None else {"waypost.saga.step": step})


def messaging(
    operation: str, endpoint: str, message: str, execution: str | None
) -> dict[str, str | int | float | bool]:
    """What the conventions want of spans about messages."""
    return {
        "messaging.system": "waypost",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": endpoint,
        "messaging.message.id": message,
        **({} if execution is None else {"messaging.message.conversation_id": execution}),
    }


def event_anchor(said: Mapping[str, Json], *, sender: str) -> Trace:
    """The trace of the taking in of an event, by what a fact says of it: whoever took it in made the same."""
    return at(trace.event(sender, str(said.get("source")), str(said.get("id"))))


def wait_name(pending: Pending) -> str:
    path, kind = pending.fact.path, pending.fact.data.get("kind")
    step = undone_at(path)
    if step is not None:
        return f"compensate {name_at(step)}"
    if kind == "timer":
        return f"timer {name_at(path)}"
    if kind == "child":
        return f"child {pending.args.get('flow')}"
    if kind == "decision":
        return f"approval {pending.args.get('subject')}"
    return f"wait {pending.args.get('name') or pending.args.get('type') or name_at(path)}"


def code_in(fact: Fact) -> str:
    """Why something did not end well, in a word."""
    return str(
        error_in(fact.data).get("code") or fact.data.get("outcome") or fact.data.get("kind") or fact.kind
    )


def object_in(fact: Fact, name: str) -> dict[str, Json]:
    """The object that `fact` has under `name`; empty when it has none."""
    found = fact.data.get(name)
    return found if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType]  # JSON


def replace_path(fact: Fact, path: str) -> Fact:
    return Fact(fact.position, fact.kind, path, fact.data, fact.at, actor=fact.actor)


def at(traceparent: str) -> Trace:
    found = trace.parse(traceparent)
    assert found is not None, f"{traceparent}: made here, and no traceparent"
    return found


def span_of(traceparent: str) -> str:
    return at(traceparent).span_id


def closed_within(told: Iterable[Told], *, after: int, last: int) -> list[Span]:
    """Those that facts after position `after` end, up to `last`. The first turn of an execution also says its start."""
    since = 0 if after <= 1 else after
    return [one.span for one in told if since < one.by <= last]


def anchor_in(subject: Subject, facts: Sequence[Fact], *, gap: timedelta | None, position: int) -> str:
    """The traceparent of the segment that the fact at `position` is in."""
    segments = Segments(anchor_of(facts[0].data.get("traceparent"), subject.execution), gap)
    for fact in facts:
        if fact.position > position:
            break
        segments.go_on(fact)
    return segments.base
