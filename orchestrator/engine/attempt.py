"""Running one try of a local step."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import lru_cache, reduce
from itertools import chain, repeat
from typing import Any, ClassVar, TypeAlias, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from contracts import strict_json
from contracts.errors import NotEncodable, TooLarge
from contracts.limits import PAYLOAD_BYTES_MAX
from contracts.messages import Refused, plain
from orchestrator.core.ask import Ask
from orchestrator.core.context import result_adapter
from orchestrator.core.errors import UsageError, in_words, storable

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
    word: ClassVar = "done"
    value: Json


@dataclass(frozen=True, slots=True)
class Refusal:
    word: ClassVar = "refused"
    error: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Failure:
    word: ClassVar = "failed"
    error: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Stopped:
    """It was cancelled half-way: nobody knows what it did."""

    word: ClassVar = "unknown"


Result: TypeAlias = Done | Refusal | Failure | Stopped


async def run(ask: Ask, *, key: str, threads: ThreadPoolExecutor) -> Result:
    """One try of `ask`: a coroutine function on the event loop, any other in a thread of `threads`.

    Raises nothing: whatever the function raises is a result.
    """
    try:
        fn, args = ask.work or found(ask.args)
        _attempt.set(Attempt(key, ask.attempt, ask.due))
        if inspect.iscoroutinefunction(fn):
            value = await fn(*args)
        else:
            value, raised = await in_thread(threads, fn, args)
            if raised is not None:
                raise raised  # noqa: TRY301  # here it was caught, and here it is told
            if inspect.isawaitable(value):
                value = await value
        return Done(stored(fn, value))
    except Refused as no:
        return Refusal(refusal(no))
    except asyncio.CancelledError:
        return Stopped()
    except BaseException as error:  # noqa: BLE001  # whatever a step raises is its outcome
        return Failure({"code": "raised", "detail": in_words(error), "at": where(error)})


async def in_thread(
    threads: ThreadPoolExecutor, fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, BaseException | None]:
    """What `fn(*args)` returns or raises in a thread. A thread cannot be stopped, so whoever cancels this waits
    for its end.

    What it raises is handed over as a value: a future would never end with a StopIteration.
    """
    context = contextvars.copy_context()

    def told() -> tuple[Any, BaseException | None]:
        try:
            return context.run(fn, *args), None
        except BaseException as error:  # noqa: BLE001  # whatever a step raises is its outcome
            return None, error

    future = asyncio.get_running_loop().run_in_executor(threads, told)
    while True:
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if future.cancelled():
                raise


def stored(fn: Callable[..., Any], value: Any) -> Json:
    """`value` as the journal will give it back, so that `fn`'s annotation reads it then as it reads it now."""
    if value is None or type(value) in (str, int, bool):
        return value
    adapter = result_adapter(fn)
    try:
        made = plain(value) if adapter is None else adapter.dump_python(value, mode="json", warnings=False)
    except ValueError:
        return value
    return read_back(made)


def read_back(value: Json) -> Json:
    """`value` as PostgreSQL's jsonb gives it back: members by length and then by bytes, numbers as written out.

    A program that walks over a result must find the same order when it is replayed. What has no JSON form
    stays as it is. Source: PostgreSQL documentation, 8.14 (jsonb keeps no order of members), and jsonb_util.c.
    """
    if isinstance(value, dict):
        members = cast("dict[object, Json]", value).items()
        named = [(name, read_back(item)) for name, item in members if isinstance(name, str)]
        if len(named) < len(members):
            return cast("Json", value)
        return dict(sorted(named, key=lambda member: jsonb_order(member[0])))
    if isinstance(value, list | tuple):
        return [read_back(item) for item in cast("list[Json]", value)]
    if isinstance(value, float):
        return number(float(value))
    if isinstance(value, str | int) and type(value) not in (str, int, bool):
        return str.__str__(value) if isinstance(value, str) else int(value)
    return value


def number(value: float) -> float | int:
    """A float as jsonb writes it out: a large one has no exponent, so it reads as a whole number."""
    if value - value != 0:  # infinite, or none at all
        return value
    return int(Decimal(repr(value))) if "e+" in repr(value) else value + 0.0


def jsonb_order(name: str) -> tuple[int, bytes]:
    text = name.encode("utf-8", "replace")
    return len(text), text


def refusal(no: Refused) -> dict[str, Json]:
    """A refusal as data; its detail only when a journal can hold it."""
    said: dict[str, Json] = {"code": storable(str(no.code)), "detail": storable(str(no.message))}
    try:
        detail = read_back(plain(no.detail))
        strict_json.encode(detail, what="detail", bytes_max=PAYLOAD_BYTES_MAX // 2)
    except (NotEncodable, TooLarge, ValueError):
        return said
    return said if detail is None else said | {"data": detail}


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
    names = positions(fn)
    hints = get_type_hints(fn)
    try:
        inspect.signature(fn).bind(*action["data"])
        args = tuple(
            TypeAdapter(hints.get(name, Any)).validate_python(value)
            for name, value in zip(names, action["data"], strict=False)
        )
    except ValidationError as error:
        raise UsageError(
            f"{action['name']}: its recorded arguments no longer fit: {error.error_count()} errors"
        ) from None
    except TypeError as error:
        raise UsageError(f"{action['name']}: its recorded arguments no longer fit: {error}") from None
    return fn, args


def positions(fn: Callable[..., Any]) -> Iterator[str]:
    """The parameter of `fn` that each argument belongs to; the last one again and again, when it takes many."""
    parameters = list(inspect.signature(fn).parameters.values())
    many = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    single = [p.name for p in parameters if p.kind < inspect.Parameter.VAR_POSITIONAL]
    return chain(single, *(repeat(name) for name in many))


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
