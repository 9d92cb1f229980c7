"""What an author says about a task, made into what the machine knows."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from pydantic import TypeAdapter

from contracts.errors import shown
from contracts.limits import CALL_TIMEOUT, IDENTITY_BYTES_MAX, NAME_BYTES_MAX
from contracts.messages import Command, Effect, marks
from contracts.sensitive import places_of
from orchestrator.core.ask import Ask, since
from orchestrator.core.errors import UsageError, error_in
from orchestrator.core.mutexes import key_of
from orchestrator.core.names import is_name, named
from orchestrator.core.retry import ONCE, STEP_RETRY, Retry
from orchestrator.core.terms import Undo, check_once, holds, resends, undoing

Json = Any

PRIORITY_MAX: Final = 100
"""Above and below 0."""

FINAL: Final = frozenset({"too-large", "not-encodable", "reply-invalid"})
"""Codes of tries that another try cannot mend: it would return the same."""


def task_of(
    what: Command[Any],
    *,
    queue: str,
    priority: int,
    undo: Undo[Any] | None,
    retry: Retry | None,
    timeout: timedelta | None,
    unknown: str | None,
    mutex: str | None,
    name: str | None,
) -> tuple[TypeAdapter[Any], Ask]:
    """How to read the reply, and the ask. Raises UsageError for what no worker could take."""
    kind = type(what)
    if not is_name(what.type_, IDENTITY_BYTES_MAX):
        raise UsageError(f"task {kind.__name__}: expected a class with type=, found {shown(what.type_)}")
    if not is_name(queue, NAME_BYTES_MAX):
        raise UsageError(f"queue {shown(queue)}: expected 1 to {NAME_BYTES_MAX} bytes of printable text")
    if not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise UsageError(f"priority={priority}: expected -{PRIORITY_MAX} to {PRIORITY_MAX}")
    once = what.effect_ is Effect.AT_MOST_ONCE
    title = f"task {what.type_}"
    if once:
        check_once(title, retry, may_stay_unknown=undo is not None or unknown is not None)
    ask = Ask(
        "task",
        named(name or what.type_.rsplit(".", 1)[-1]),
        {"do": "task", "queue": queue, "name": what.type_, "data": what.model_dump(mode="json")}
        | ({"priority": priority} if priority else {})
        | marks(data=places_of(kind), value=places_of(what.reply_)),
        undo=undoing(undo, what.reply_),
        timeout=since(timeout) or CALL_TIMEOUT,
        retry=ONCE if once else resends(title, retry or STEP_RETRY, timeout or CALL_TIMEOUT, once=False),
        hold=holds(unknown),
        effect=str(Effect.AT_MOST_ONCE) if once else "",
    )
    if mutex is not None:
        ask.mutex = key_of(title, mutex)
    return what.reply_, ask


def is_tried_again(ask: Ask, data: dict[str, Json]) -> bool:
    """Whether what a try of the task `ask` came to leaves it to the retry policy: it failed, or nobody knows what it
    did. That the time of the whole task is over ends it.
    """
    error = error_in(data)
    if error.get("code") in FINAL or error.get("settling"):
        return False
    outcome = data.get("outcome")
    return outcome == "failed" or (outcome == "unknown" and ask.effect != Effect.AT_MOST_ONCE)
