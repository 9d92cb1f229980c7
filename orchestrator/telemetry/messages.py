"""What goes out and what comes in, as spans: under the command that they are about."""

from __future__ import annotations

from datetime import timedelta

from contracts import trace
from contracts.spans import Link, Span
from contracts.trace import Trace
from orchestrator.store.spans import Arrival, Delivery
from orchestrator.telemetry.journal import at, messaging


def sent(one: Delivery, created: str) -> Span:
    """A try, under the span of its message. The header of the request named this very span."""
    bad = None if one.outcome == "delivered" else one.error_code or str(one.status or one.outcome)
    execution = {} if one.execution_id is None else {"waypost.instance.id": one.execution_id}
    answered = {} if one.status is None else {"http.response.status_code": one.status}
    return Span(
        name=f"send {one.endpoint}",
        kind="client",
        at=at(trace.child(created, trace.hop(one.message_id, one.attempt))),
        parent=at(created).span_id,
        began=one.started_at,
        ended=one.started_at + one.duration,
        attributes={
            **messaging("send", one.endpoint, one.message_id, one.execution_id),
            **execution,
            **answered,
            "waypost.delivery.attempt": one.attempt,
            "waypost.outcome": one.outcome,
            "http.request.method": "POST",
            "http.request.resend_count": one.attempt - 1,
        },
        error=bad,
    )


def accepted(one: Arrival, traceparent: str | None = None, took: timedelta | None = None) -> Span:
    """Something that was taken in, and took so long until it was. `traceparent` is what its sender says: it is believed
    where it is our own trace.
    """
    said = trace.parse(traceparent)
    command = trace.parse(one.command)
    links = () if said is None else (Link(said, "sender"),)
    if command is None:
        where, parent = at(trace.event(one.sender, one.source, one.event_id)), None
    elif said is not None and said.trace_id == command.trace_id:
        where, parent, links = under(command, one), said.span_id, ()
    else:
        where, parent = under(command, one), command.span_id
    execution = {} if one.execution_id is None else {"waypost.instance.id": one.execution_id}
    return Span(
        name=f"POST /events/{one.sender}",
        kind="server",
        at=where,
        parent=parent,
        began=one.received_at - (took or timedelta()),
        ended=one.received_at,
        attributes={
            **execution,
            "http.request.method": "POST",
            "http.response.status_code": 202,
            "waypost.source": one.sender,
            "waypost.inbox.outcome": "unmatched" if one.answer == "unmatched" else "accepted",
            "cloudevents.event_id": one.event_id,
            "cloudevents.event_source": one.source,
            "cloudevents.event_type": one.type,
        },
        links=links,
    )


def under(command: Trace, one: Arrival) -> Trace:
    return at(trace.child(str(command), f"accept/{one.sender}/{one.source}/{one.event_id}"))
