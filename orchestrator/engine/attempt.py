"""Running one try of a local step."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import inspect
import math
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import lru_cache, partial, reduce
from types import FunctionType
from typing import Any, ClassVar, Final, TypeAlias, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from contracts import probe as findings
from contracts import strict_json
from contracts.errors import NotEncodable, TooLarge
from contracts.limits import PAYLOAD_BYTES_MAX
from contracts.messages import Refused, plain
from orchestrator.core.ask import Ask, Watch
from orchestrator.core.errors import Cancelled, UsageError, code_of, in_words, storable
from orchestrator.core.terms import positions, result_adapter
from orchestrator.engine.pulse import CURRENT, Attempt, Pulse

Json = Any


STOP_SECONDS: Final = 2.0
"""For a try whose time is over to end; a thread that goes on is waited for, and its step is not tried again."""


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
    """It `raised`, or its probe did not find out what became of it (`unknown`); and what it `left` for the next try."""

    word: ClassVar = "failed"
    error: dict[str, Json]
    raised: BaseException | None = field(default=None, compare=False)
    unknown: bool = False
    left: Json = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """It was cancelled half-way: nobody knows what it did."""

    word: ClassVar = "unknown"


@dataclass(frozen=True, slots=True)
class Lost:
    """Its time was over, or it was silent for too long: nobody knows what it did. `rest` is what of it still runs."""

    word: ClassVar = "unknown"
    error: dict[str, Json]
    left: Json = None
    rest: asyncio.Task[Result] | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """What came of it is in the journal, or for another owner to find out: there is nothing to tell."""

    word: ClassVar = "done"


Result: TypeAlias = Done | Refusal | Failure | Stopped | Lost | Settled


class NotBegun(BaseException):
    """The function never began: its step was over before a thread was free."""


async def run(ask: Ask, *, key: str, threads: ThreadPoolExecutor, now: datetime | None = None) -> Result:
    """One try of `ask`: a coroutine function on the event loop, any other in a thread of `threads`. `now`, the
    database's time, is needed where a try has a time of its own.

    Raises nothing: whatever the function raises is a result.
    """
    watch, pulse = ask.watch, Pulse()
    if watch is None:
        CURRENT.set(Attempt(key, ask.attempt, ask.due, pulse=pulse))
        return await tried(ask, pulse, threads)
    pulse.left = watch.left
    CURRENT.set(Attempt(key, ask.attempt, deadline_of(ask, watch, now), watch.left, pulse))
    return await Watchman(watch, pulse).watch(lambda: tried(ask, pulse, threads))


def deadline_of(ask: Ask, watch: Watch, now: datetime | None) -> datetime | None:
    """When the time of a try that begins `now` is over: its own, or its step's, whichever is first."""
    own = now + watch.timeout if now is not None and watch.timeout is not None else None
    return min((at for at in (ask.due, own) if at is not None), default=None)


async def tried(ask: Ask, pulse: Pulse, threads: ThreadPoolExecutor) -> Result:
    try:
        return await acted(ask, pulse, threads)
    except Refused as no:
        return Refusal(refusal(no))
    except NotBegun as no:
        return Refusal({"code": "never-begun", "detail": str(no)}) if ask.attempt == 1 else Stopped()
    except asyncio.CancelledError:
        return Stopped()
    except BaseException as error:  # noqa: BLE001  # whatever a step raises is its outcome
        return Stopped() if pulse.over and isinstance(error, Cancelled) else failure(error, pulse)


async def acted(ask: Ask, pulse: Pulse, threads: ThreadPoolExecutor) -> Result:
    """What the function returned; before it is run again, what its probe knows, unless that is: not done."""
    fn, args = ask.work or found(ask.args)
    if ask.watch is not None and ask.watch.probe is not None and ask.attempt > 1:
        finding = await asked(ask.watch.probe, args, pulse, threads)
        if isinstance(finding, findings.Done):
            return Done(stored(fn, finding.reply))
        if isinstance(finding, Failure):
            return finding
    return Done(stored(fn, await called(fn, args, pulse, threads)))


async def asked(
    probe: Callable[..., Any], args: tuple[Any, ...], pulse: Pulse, threads: ThreadPoolExecutor
) -> findings.Done[Any] | findings.NotDone | Failure:
    """What `probe` finds out about the tries before. One that raises, or says nothing, has found nothing out."""
    try:
        finding = await called(probe, args, pulse, threads)
    except (asyncio.CancelledError, NotBegun):
        raise
    except BaseException as error:  # noqa: BLE001  # whatever a probe raises, nobody knows more than before
        said = {"code": "probe-failed", "detail": in_words(error), "at": where(error)}
        return Failure(said, error, unknown=True, left=pulse.left)
    if isinstance(finding, findings.Done | findings.NotDone):
        return cast("findings.Done[Any] | findings.NotDone", finding)
    said = {"code": "probe-unclear", "detail": "its probe cannot say yet"}
    if not isinstance(finding, findings.CannotSay):
        detail = f"its probe returned {type(finding).__name__}: expected Done, NotDone or CannotSay"
        said = {"code": "probe-failed", "detail": detail}
    return Failure(said, unknown=True, left=pulse.left)


def failure(error: BaseException, pulse: Pulse) -> Failure:
    """What a try raised, as data; its code is the error's own, where that has one."""
    if isinstance(error.__cause__, StopIteration) and str(error) == "coroutine raised StopIteration":
        error = error.__cause__  # Python lets none pass through a coroutine
    said = {"code": code_of(error), "detail": in_words(error), "at": where(error)}
    return Failure(said, error, left=pulse.left)


async def called(
    fn: Callable[..., Any], args: tuple[Any, ...], pulse: Pulse, threads: ThreadPoolExecutor
) -> Any:
    if is_coroutine_function(fn):
        pulse.begin()
        return await fn(*args)
    value, raised = await in_thread(threads, fn, args, pulse)
    if raised is not None:
        raise raised
    return await value if inspect.isawaitable(value) else value


def is_coroutine_function(fn: Callable[..., Any]) -> bool:
    """As that of `inspect`, which takes its time: most steps are plain coroutine functions, and say so themselves."""
    plainly = isinstance(fn, FunctionType) and bool(fn.__code__.co_flags & inspect.CO_COROUTINE)
    return plainly or inspect.iscoroutinefunction(fn)


async def in_thread(
    threads: ThreadPoolExecutor, fn: Callable[..., Any], args: tuple[Any, ...], pulse: Pulse
) -> tuple[Any, BaseException | None]:
    """What `fn(*args)` returns or raises in a thread. A thread cannot be stopped, so whoever cancels this waits
    for its end; it can learn of that from its pulse. Raises NotBegun when it still waited for a thread then.

    What it raises is handed over as a value: a future would never end with a StopIteration.
    """
    context = contextvars.copy_context()

    def told() -> tuple[Any, BaseException | None]:
        pulse.begin()
        try:
            return context.run(fn, *args), None
        except BaseException as error:  # noqa: BLE001  # whatever a step raises is its outcome
            return None, error

    job = threads.submit(told)
    future = asyncio.wrap_future(job)
    while True:
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if job.cancel():
                raise NotBegun("its step was over before a thread was free") from None
            pulse.over = pulse.over or "its step is over"


class Watchman:
    """Ends a try whose time is over, or that is silent for too long."""

    def __init__(self, watch: Watch, pulse: Pulse) -> None:
        self._watch = watch
        self._pulse = pulse
        self._began = asyncio.Event()
        self._began_at = pulse.beat_at
        pulse.began = partial(asyncio.get_running_loop().call_soon_threadsafe, self._began.set)

    async def watch(self, go: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """The result of what `go` makes; Lost when it had to be ended."""
        task = asyncio.create_task(go())
        try:
            await self._until_begun(task)
            while not task.done():
                left = self.time_left(time.monotonic())
                if left <= 0:
                    return await self._end(task)
                await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError:
            self._pulse.over = self._pulse.over or "its step is over"
            await stopped(task)
        return task.result()

    async def _until_begun(self, task: asyncio.Task[Result]) -> None:
        """Before it has a thread, no time of it passes."""
        began = asyncio.create_task(self._began.wait())
        try:
            await asyncio.wait({task, began}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            began.cancel()
        self._began_at = time.monotonic()

    def time_left(self, now: float) -> float:
        """Seconds that it may go on without a word; `now` is a time of the monotonic clock."""
        watch = self._watch
        ends: list[float] = []
        if watch.timeout is not None:
            ends.append(self._began_at + watch.timeout.total_seconds())
        if watch.heartbeat is not None:
            ends.append(self._pulse.beat_at + watch.heartbeat.total_seconds())
        return min(ends) - now if ends else math.inf

    async def _end(self, task: asyncio.Task[Result]) -> Result:
        pulse = self._pulse
        error = self._error()
        pulse.over = error["detail"]
        task.cancel()
        await asyncio.wait({task}, timeout=STOP_SECONDS)
        if not task.done():
            return Lost(error, pulse.left, task)
        result = task.result()
        return result if isinstance(result, Done | Refusal) else Lost(error, pulse.left)

    def _error(self) -> dict[str, Json]:
        watch = self._watch
        if watch.timeout is not None and time.monotonic() - self._began_at >= watch.timeout.total_seconds():
            return {"code": "attempt-timeout", "detail": f"this try took more than {watch.timeout}"}
        return {"code": "heartbeat-lost", "detail": f"this try was silent for {watch.heartbeat}"}


async def stopped(task: asyncio.Task[Result]) -> None:
    """Cancel `task`, and wait for its end whatever happens: a thread cannot be stopped."""
    task.cancel()
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})


def stored(fn: Callable[..., Any], value: Any) -> Json:
    """`value` as the journal will give it back, so that `fn`'s annotation reads it then as it reads it now."""
    if type(value) in AS_THEY_ARE:
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
    if type(value) in AS_THEY_ARE:
        return value
    if isinstance(value, dict):
        return members_back(cast("dict[object, Json]", value))
    if isinstance(value, (list, tuple)):
        return [read_back(item) for item in cast("list[Json]", value)]
    if isinstance(value, float):
        return number(float(value))
    if isinstance(value, str | int):
        return str.__str__(value) if isinstance(value, str) else int(value)
    return value


def members_back(value: dict[object, Json]) -> Json:
    """A JSON object as jsonb gives it back; `value` itself when a name is no string."""
    named = [(name, read_back(item)) for name, item in value.items() if isinstance(name, str)]
    if len(named) < len(value):
        return value
    return dict(sorted(named, key=lambda member: jsonb_order(member[0])) if len(named) > 1 else named)


AS_THEY_ARE: Final = frozenset({str, int, bool, type(None)})
"""Types whose values jsonb gives back as they were."""


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
