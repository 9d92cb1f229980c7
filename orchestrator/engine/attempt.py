"""Running one try of a local step."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, reduce
from typing import Any, TypeAlias, get_type_hints

from pydantic import TypeAdapter, ValidationError

from contracts.messages import Refused, plain
from orchestrator.core.ask import Ask
from orchestrator.core.context import result_adapter
from orchestrator.core.errors import UsageError, storable

Json = Any


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which try this is: the key that stays the same for all of them, its number from 1, and the step's due time."""

    key: str
    number: int
    deadline: datetime | None


_attempt: contextvars.ContextVar[Attempt] = contextvars.ContextVar("attempt")


def attempt() -> Attempt:
    """The try of the step that runs. Raises UsageError outside of a step."""
    try:
        return _attempt.get()
    except LookupError:
        raise UsageError("attempt() tells a local step about its try; no step runs here") from None


@dataclass(frozen=True, slots=True)
class Done:
    value: Json


@dataclass(frozen=True, slots=True)
class Refusal:
    error: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Failure:
    error: dict[str, Json]
    again: bool = True


@dataclass(frozen=True, slots=True)
class Stopped:
    """It was cancelled half-way: nobody knows what it did."""


Result: TypeAlias = Done | Refusal | Failure | Stopped


async def run(ask: Ask, *, key: str, threads: ThreadPoolExecutor) -> Result:
    """One try of `ask`: a coroutine function on the event loop, any other in a thread of `threads`.

    Never raises but for cancellation by a dying worker; what the function raises is a result.
    """
    try:
        fn, args = ask.work or found(ask.args)
        _attempt.set(Attempt(key, ask.attempt, ask.due))
        if inspect.iscoroutinefunction(fn):
            value = await fn(*args)
        else:
            value = await in_thread(threads, fn, args)
        return Done(stored(fn, value))
    except Refused as no:
        return Refusal({"code": storable(no.code), "detail": storable(no.message), "data": plain(no.detail)})
    except asyncio.CancelledError:
        return Stopped()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a step raises is its outcome
        return Failure(
            {"code": "raised", "detail": storable(f"{type(error).__name__}: {error}"), "at": where(error)}
        )


async def in_thread(threads: ThreadPoolExecutor, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`fn(*args)` in a thread. A thread cannot be stopped, so whoever cancels this waits for its end."""
    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(threads, lambda: context.run(fn, *args))
    while True:
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if future.cancelled():
                raise


def stored(fn: Callable[..., Any], value: Any) -> Json:
    """`value` as the journal keeps it, so that `fn`'s annotation reads it back."""
    if value is None or isinstance(value, str | int | float):
        return value
    adapter = result_adapter(fn)
    if adapter is None:
        return plain(value)
    try:
        return adapter.dump_python(value, mode="json", warnings=False)
    except ValueError:
        return value


def where(error: BaseException) -> str:
    """The last line of the step's own code that the error passed: function and line."""
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def found(action: dict[str, Json]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that an action names, and its arguments as its annotations read them.

    Raises UsageError when there is no such function, or the arguments do not fit it.
    """
    fn = imported(action["name"])
    parameters = list(inspect.signature(fn).parameters)
    hints = get_type_hints(fn)
    try:
        args = tuple(
            TypeAdapter(hints.get(name, Any)).validate_python(value)
            for name, value in zip(parameters, action["data"], strict=False)
        )
    except ValidationError as error:
        raise UsageError(
            f"{action['name']}: its recorded arguments no longer fit: {error.error_count()} errors"
        ) from None
    return fn, args


@lru_cache(maxsize=1024)
def imported(address: str) -> Callable[..., Any]:
    module, _, qualified = address.partition(":")
    try:
        fn = reduce(getattr, qualified.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise UsageError(f"no function {address}: {error}; it was there when its step was recorded") from None
    if not callable(fn):
        raise UsageError(f"{address} is no function")
    return fn
