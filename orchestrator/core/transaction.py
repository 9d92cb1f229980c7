"""What an author says about a transaction, made into what the machine knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from contracts.messages import Action
from orchestrator.core.ask import Ask
from orchestrator.core.errors import UsageError
from orchestrator.core.names import named
from orchestrator.core.retry import STEP_RETRY
from orchestrator.core.terms import Local, result_adapter, undoes

Json = Any


def transaction_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    undo: Action | Callable[[Any], Action] | None,
    name: str | None,
) -> tuple[TypeAdapter[Any] | None, Ask]:
    """How to read what `fn` returned, and the ask. Raises UsageError for what is no coroutine function."""
    if not inspect.iscoroutinefunction(fn):
        shown = getattr(fn, "__qualname__", repr(fn))
        raise UsageError(f"ctx.transaction({shown}): expected a coroutine function, async def fn(conn, ...)")
    adapter = result_adapter(fn)
    ask = Ask(
        "transaction",
        named(name or fn.__name__),
        Local(fn, args).as_action(),
        undo=exactly(undo, adapter),
        retry=STEP_RETRY,
        work=(fn, args),
    )
    return adapter, ask


def exactly(
    undo: Action | Callable[[Any], Action] | None, adapter: TypeAdapter[Any] | None
) -> Callable[[bool, Json], Json] | None:
    """`undo` as the machine asks for it. It is made once, from what the function returned: that is always known."""
    if undo is None:
        return None
    if not callable(undo):
        always = undoes(undo)
        return lambda _known, _value: always
    return lambda _known, value: undoes(undo(value if adapter is None else adapter.validate_python(value)))
