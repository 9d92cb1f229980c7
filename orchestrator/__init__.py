"""Durable sagas over signed webhooks: `from orchestrator import workflow, Context`."""

from contracts.messages import Command, Effect, Event, Refused, command
from contracts.probe import CannotSay, Done, Finding, NotDone
from contracts.sensitive import Sensitive
from orchestrator.core.approval import Decision
from orchestrator.core.bounds import bounded
from orchestrator.core.children import Handle
from orchestrator.core.context import Context, Elapsed
from orchestrator.core.errors import (
    AllFailed,
    Cancelled,
    ChildFailed,
    FlowError,
    OutcomeUnknown,
    ReplyInvalid,
    StepError,
    StepFailed,
    StepRefused,
    TimedOut,
    UsageError,
)
from orchestrator.core.retry import Retry
from orchestrator.core.spans import days, hours, minutes, seconds
from orchestrator.core.terms import Local, local
from orchestrator.engine.pulse import attempt
from orchestrator.tasks import Tasks
from orchestrator.workflow import Workflow, workflow

__all__ = [
    "AllFailed",
    "Cancelled",
    "CannotSay",
    "ChildFailed",
    "Command",
    "Context",
    "Decision",
    "Done",
    "Effect",
    "Elapsed",
    "Event",
    "Finding",
    "FlowError",
    "Handle",
    "Local",
    "NotDone",
    "OutcomeUnknown",
    "Refused",
    "ReplyInvalid",
    "Retry",
    "Sensitive",
    "StepError",
    "StepFailed",
    "StepRefused",
    "Tasks",
    "TimedOut",
    "UsageError",
    "Workflow",
    "attempt",
    "bounded",
    "command",
    "days",
    "hours",
    "local",
    "minutes",
    "seconds",
    "workflow",
]
