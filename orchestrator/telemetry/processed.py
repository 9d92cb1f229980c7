"""What workers of queues did, as spans: under the span of the task, from its beginning to its report."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from contracts import trace
from contracts.observer import Observer
from contracts.spans import Span
from contracts.trace import Trace
from orchestrator.store.tasks import Task, TaskRow
from orchestrator.telemetry.journal import at, messaging

if TYPE_CHECKING:
    from receiver.otlp import Spool

GOOD = frozenset({"done", "running", "stopping"})


def processed(
    task: Task | TaskRow, traceparent: str, outcome: str, began: datetime, ended: datetime | None
) -> Span:
    """A try, under the span of its task, which `traceparent` names. Whoever makes it makes the same."""
    identity = str(task.task_id)
    return Span(
        name=f"process {task.type}",
        kind="consumer",
        at=at(trace.child(traceparent, trace.hop(identity, task.attempt))),
        parent=at(traceparent).span_id,
        began=began,
        ended=ended,
        attributes={
            **messaging("process", task.queue, identity, task.execution_id),
            "waypost.instance.id": task.execution_id,
            "waypost.path": task.path,
            "waypost.attempt.number": task.attempt,
            "waypost.outcome": outcome,
        },
        error=None if outcome in GOOD else outcome,
    )


class Processed:
    """The spans of one process on their way to a collector; without one (`spool` is None) there are none."""

    def __init__(self, spool: Spool | None) -> None:
        self._spool = spool

    @classmethod
    @asynccontextmanager
    async def exporting(cls, observer: Observer, *, traced: bool) -> AsyncGenerator[Processed]:
        """Export what is done while inside, and what is left at the end; those of a process that dies are lost."""
        if not traced:
            yield cls(None)
            return
        from receiver.otlp import Otlp, Spool  # noqa: PLC0415  # without a collector nobody needs its libraries

        spool = Spool(Otlp("waypost-tasks"), observer)
        async with spool.running():
            yield cls(spool)

    def current(self, span: Trace) -> AbstractContextManager[None]:
        """Spans that libraries make inside are under `span`."""
        if self._spool is None:
            return contextlib.nullcontext()
        from receiver.otlp import within  # noqa: PLC0415  # as above

        return within(span)

    def ended(self, task: Task, outcome: str, began: datetime, ended: datetime) -> None:
        """A try was reported."""
        if self._spool is not None and trace.parse(task.traceparent) is not None:
            self._spool.add(processed(task, str(task.traceparent), outcome, began, ended))
