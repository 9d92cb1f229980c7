"""Durable sagas over signed webhooks: `from orchestrator import workflow, Context`."""

from contracts.messages import Command, Effect, Event, Refused, command
from orchestrator.core.approval import Decision
from orchestrator.core.context import Context, Elapsed, Local, local
from orchestrator.core.errors import (
    AllFailed,
    Cancelled,
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
from orchestrator.workflow import Workflow, workflow

__all__ = [
    "AllFailed",
    "Cancelled",
    "Command",
    "Context",
    "Decision",
    "Effect",
    "Elapsed",
    "Event",
    "FlowError",
    "Local",
    "OutcomeUnknown",
    "Refused",
    "ReplyInvalid",
    "Retry",
    "StepError",
    "StepFailed",
    "StepRefused",
    "TimedOut",
    "UsageError",
    "Workflow",
    "command",
    "days",
    "hours",
    "local",
    "minutes",
    "seconds",
    "workflow",
]
