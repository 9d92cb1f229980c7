"""The names of all metrics, their units, labels and buckets: docs/telemetry.md explains each.

A name ends neither in `_total` nor in its unit: exporters add both, and some would add them twice.
Source: OpenTelemetry semantic conventions, "Metrics: naming" (no `_total`, seconds, units in braces are not
part of a name).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric. `labels` are all that it has, in this order; `buckets` are upper bounds, of a histogram."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    says: str
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """The name under which Prometheus gets it."""
        unit = "_seconds" if self.unit == "s" else ""
        return self.name.replace(".", "_") + unit + ("_total" if self.kind is Kind.COUNTER else "")


FLOW: Final = ("workflow_name", "workflow_version")
LIFE: Final = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 21_600, 86_400, 604_800, 2_592_000)
DELAY: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)
TRY: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

STARTED: Final = Instrument(
    "workflow.started",
    Kind.COUNTER,
    "{instance}",
    (*FLOW, "trigger"),
    "Executions that a worker took up for the first time",
)
COMPLETED: Final = Instrument(
    "workflow.completed",
    Kind.COUNTER,
    "{instance}",
    (*FLOW, "outcome"),
    "Executions that completed, were compensated or were cancelled",
)
FAILED: Final = Instrument(
    "workflow.failed",
    Kind.COUNTER,
    "{instance}",
    (*FLOW, "failure_class", "error_type"),
    "Executions that failed",
)
DURATION: Final = Instrument(
    "workflow.duration",
    Kind.HISTOGRAM,
    "s",
    ("workflow_name", "outcome"),
    "From the start of an execution to its end",
    LIFE,
)
QUEUE_DELAY: Final = Instrument(
    "workflow.queue_delay",
    Kind.HISTOGRAM,
    "s",
    ("queue", "workflow_name"),
    "From when an execution could go on to when a worker took it",
    DELAY,
)
NODE_ATTEMPT: Final = Instrument(
    "node.attempt",
    Kind.COUNTER,
    "{attempt}",
    (*FLOW, "node", "outcome"),
    "Tries of local steps, and calls that ended",
)
NODE_RETRY: Final = Instrument(
    "node.retry",
    Kind.COUNTER,
    "{retry}",
    (*FLOW, "node", "failure_class"),
    "Tries of local steps that failed and are followed by another",
)
NODE_TIMEOUT: Final = Instrument(
    "node.timeout",
    Kind.COUNTER,
    "{timeout}",
    (*FLOW, "node", "timeout_kind"),
    "Steps, calls and waits for events whose time ran out",
)
ORPHANED: Final = Instrument(
    "orphaned_attempt",
    Kind.COUNTER,
    "{attempt}",
    ("queue", "reason"),
    "Executions that were taken over from a dead worker",
)
STUCK: Final = Instrument(
    "stuck_instance",
    Kind.COUNTER,
    "{instance}",
    ("workflow_name", "wait_code"),
    "Executions that were found to have no reason to move",
)
STUCK_NOW: Final = Instrument(
    "workflow.instance.stuck",
    Kind.GAUGE,
    "{instance}",
    ("workflow_name", "wait_code"),
    "Executions of the whole database that have no reason to move, at the last look",
)
COMPENSATION: Final = Instrument(
    "saga.compensation", Kind.COUNTER, "{step}", (*FLOW, "node", "outcome"), "Undos that ended"
)
DELIVERY_ATTEMPT: Final = Instrument(
    "delivery.attempt",
    Kind.COUNTER,
    "{attempt}",
    ("endpoint", "outcome", "status_class"),
    "Tries to send a message",
)
DELIVERY_DURATION: Final = Instrument(
    "delivery.duration",
    Kind.HISTOGRAM,
    "s",
    ("endpoint", "outcome"),
    "How long a try to send a message took",
    TRY,
)
TASK_ATTEMPT: Final = Instrument(
    "task.attempt",
    Kind.COUNTER,
    "{attempt}",
    ("queue", "type", "outcome"),
    "Tries of tasks that a worker of queues reported",
)
TASK_DELAY: Final = Instrument(
    "task.queue_delay",
    Kind.HISTOGRAM,
    "s",
    ("queue",),
    "From when a task was left in its queue to when a worker took it",
    DELAY,
)
TASK_DURATION: Final = Instrument(
    "task.duration",
    Kind.HISTOGRAM,
    "s",
    ("queue", "outcome"),
    "From when a worker took a task to its report",
    LIFE,
)
RECEIVED: Final = Instrument(
    "inbox.received", Kind.COUNTER, "{event}", ("source", "outcome", "reason"), "Requests to the receiver"
)

ALL: Final = (
    STARTED,
    COMPLETED,
    FAILED,
    DURATION,
    QUEUE_DELAY,
    NODE_ATTEMPT,
    NODE_RETRY,
    NODE_TIMEOUT,
    ORPHANED,
    STUCK,
    STUCK_NOW,
    COMPENSATION,
    DELIVERY_ATTEMPT,
    DELIVERY_DURATION,
    TASK_ATTEMPT,
    TASK_DELAY,
    TASK_DURATION,
    RECEIVED,
)
