"""One run of a participant as a span: what a command was answered, under the command that our traces know."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from contracts import trace
from contracts.spans import Link, Span
from contracts.trace import Trace
from receiver.handlers import Delivery


@dataclass(frozen=True, slots=True)
class Run:
    """`delivery` is as the handler gets it: the traceparent of its event is that of this run, so that what the handler
    calls and the reply are under it. `command` is the span of the command.
    """

    delivery: Delivery
    command: Trace
    at: Trace
    began: datetime

    @classmethod
    def of(cls, delivery: Delivery) -> Run | None:
        """None when the command belongs to no trace."""
        said = delivery.event.extensions.get("traceparent")
        command = trace.parse(said) if isinstance(said, str) else None
        if command is None:
            return None
        ours = trace.child(str(command), f"{trace.hop(delivery.message, delivery.attempt)}/run")
        event = replace(delivery.event, extensions={**delivery.event.extensions, "traceparent": ours})
        at = trace.parse(ours)
        assert at is not None, "it was made here"
        return cls(replace(delivery, event=event), command, at, datetime.now(UTC))

    @contextmanager
    def current(self) -> Generator[None]:
        """Spans that libraries make inside are under this one."""
        from receiver.otlp import within  # noqa: PLC0415  # without a collector nobody needs its libraries

        with within(self.at):
            yield

    def span(self, status: int) -> Span:
        """The run, which ends now with an answer of `status`."""
        delivery, event = self.delivery, self.delivery.event
        hop = trace.parse(trace.child(str(self.command), trace.hop(delivery.message, delivery.attempt)))
        assert hop is not None, "it was made here"
        return Span(
            name=f"process {event.type}",
            kind="consumer",
            at=self.at,
            parent=self.command.span_id,
            began=self.began,
            ended=datetime.now(UTC),
            attributes={
                "messaging.system": "waypost",
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.message.id": delivery.message,
                "cloudevents.event_id": event.id,
                "cloudevents.event_source": event.source,
                "cloudevents.event_type": event.type,
                "http.response.status_code": status,
                "waypost.delivery.attempt": delivery.attempt,
            },
            error=str(status) if status >= 300 else None,
            links=(Link(hop, "delivery"),),
        )
