"""What can be said about why an execution is where it is: a code for each state, and a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from contracts.errors import WaypostError
from orchestrator.core.fact import Fact
from orchestrator.store.situation import Situation


class UnknownState(WaypostError):
    """The database says something about an execution that no rule covers: a bug, or rows edited by hand."""

    code = "unknown-state"


class Code(StrEnum):
    """What an execution waits for, in a word; programs, metrics and alerts go by it."""

    READY = "ready"
    NO_WORKER = "no-worker"
    RUNNING = "running"
    WORKER_LOST = "worker-lost"
    TAKEN_OVER = "taken-over"
    SLEEPING = "sleeping"
    STEP_RETRY = "step-retry"
    BEHIND = "behind-another"
    TO_BE_SENT = "to-be-sent"
    DELIVERY_RETRY = "delivery-retry"
    SENDING = "sending"
    RELAY_LOST = "relay-lost"
    UNDELIVERED = "undelivered"
    ENDPOINT_UNKNOWN = "endpoint-unknown"
    ENDPOINT_DISABLED = "endpoint-disabled"
    ENDPOINT_PAUSED = "endpoint-paused"
    CIRCUIT_OPEN = "circuit-open"
    ENDPOINT_NO_SECRET = "endpoint-no-secret"  # noqa: S105  # no password
    AWAITING_REPLY = "awaiting-reply"
    TASK_QUEUED = "task-queued"
    TASK_RUNNING = "task-running"
    TASK_SILENT = "task-silent"
    AWAITING_EVENT = "awaiting-event"
    AWAITING_DECISION = "awaiting-decision"
    AWAITING_CHILD = "awaiting-child"
    ENDING_CHILD = "ending-child"
    AWAITING_MUTEX = "awaiting-mutex"
    SETTLING = "settling"
    ORDERED = "ordered"
    PAUSED = "paused"
    NONDETERMINISM = "nondeterminism"
    PROGRAM_FAULT = "program-fault"
    LIMIT = "limit"
    INPUT_INVALID = "input-invalid"
    UNSTORABLE = "unstorable"
    PAYLOAD_UNAVAILABLE = "payload-unavailable"
    UNDO_FAILED = "undo-failed"
    UNDO_UNKNOWN = "undo-unknown"
    UNKNOWN_OUTCOME = "unknown-outcome"
    STUCK = "stuck"
    COMPLETED = "completed"
    COMPENSATED = "compensated"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Explanation:
    """`since` and `until` bound the wait, as far as it is bounded; `attempt` counts tries from 1; `holder` is the
    worker or the endpoint that has it. `do` says what a person can do: empty when nobody is needed. `also` is
    what it waits for besides.
    """

    code: Code
    sentence: str
    since: datetime | None = None
    until: datetime | None = None
    path: str = ""
    attempt: int | None = None
    holder: str | None = None
    do: tuple[str, ...] = ()
    also: tuple[Explanation, ...] = ()


def unknown(it: Situation, found: str) -> UnknownState:
    return UnknownState(f"execution {it.row.execution_id}: no sentence for its state; found {found}")


def journal(it: Situation) -> Iterator[Fact]:
    for fact in it.facts:
        yield Fact(fact.position, fact.kind, fact.path, json.loads(fact.payload or "{}"), fact.at)
