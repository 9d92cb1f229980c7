"""The author's language. If it can wait, it is awaited; what is only written down is a plain call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar, TypeVarTuple, get_type_hints, overload
from uuid import UUID

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from contracts.errors import shown
from contracts.limits import CALL_TIMEOUT, IDENTITY_BYTES_MAX, NAME_BYTES_MAX
from contracts.messages import Action, Command, Effect, command, plain
from orchestrator.core.ask import Ask, Scope, Unwind
from orchestrator.core.branch import suspend
from orchestrator.core.errors import ReplyInvalid, UsageError
from orchestrator.core.machine import Machine, is_fault, since
from orchestrator.core.retry import STEP_RETRY, Retry

Json = Any
R = TypeVar("R")
Ts = TypeVarTuple("Ts")
Op: TypeAlias = Coroutine[Any, Any, R]
Undo: TypeAlias = Action | Callable[[R | None], Action | None]
"""Either the action, or how to make it from the reply; the reply is None when nobody knows it."""


@dataclass(frozen=True, slots=True)
class Elapsed:
    """What `sleep` returns."""


@dataclass(frozen=True, slots=True)
class Local:
    """A function of this process, with its arguments, as something to do later."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]

    def as_action(self) -> dict[str, Json]:
        return {"do": "step", "name": address(self.fn), "data": [plain(arg) for arg in self.args]}


def local(fn: Callable[[*Ts], Any], /, *args: *Ts) -> Local:
    """`fn(*args)` as an undo. It must be importable by name, since it may run in another process after a crash.

    Raises UsageError for a lambda or a nested function.
    """
    if "<" in fn.__qualname__:
        raise UsageError(f"local({fn.__qualname__}): expected a function that can be imported by name")
    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        raise UsageError(f"local({fn.__qualname__}): {error}") from None
    except ValueError:
        pass  # a built-in function that does not say what it takes
    return Local(fn, args)


def address(fn: Callable[..., Any]) -> str:
    """The name by which another process finds `fn`: module and qualified name, with a colon between."""
    return f"{fn.__module__}:{fn.__qualname__}"


class Context:
    """What a flow asks. Each awaitable is an ordinary coroutine; nothing starts before it is awaited."""

    __slots__ = ("_machine",)

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @overload
    async def call(
        self,
        what: Command[R],
        /,
        *,
        undo: Undo[R] | None = None,
        timeout: timedelta | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        name: str | None = None,
    ) -> R: ...
    @overload
    async def call(
        self,
        what: str,
        type: str,
        data: Json,
        /,
        *,
        reply: type[R],
        undo: Undo[R] | None = None,
        timeout: timedelta | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        name: str | None = None,
    ) -> R: ...
    @overload
    async def call(
        self,
        what: str,
        type: str,
        data: Json = None,
        /,
        *,
        undo: Undo[Json] | None = None,
        timeout: timedelta | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        name: str | None = None,
    ) -> Json: ...
    async def call(
        self,
        what: Command[Any] | str,
        type: str = "",
        data: Json = None,
        /,
        *,
        reply: type[Any] | None = None,
        undo: Undo[Any] | None = None,
        timeout: timedelta | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        name: str | None = None,
    ) -> Any:
        """Send a command to an endpoint and wait for its reply.

        `undo` is asked, in reverse order, when the flow fails later. `timeout` (default: one day) is the
        message's expiry; then the outcome is unknown: `unknown="hold"` asks a person, "raise" (the default)
        raises. `name` tells calls of one type apart; default is the last dotted part of the type.

        Raises StepRefused (definitely not done), StepFailed, OutcomeUnknown, ReplyInvalid; UsageError for a
        timeout outside of (0, ten years], for a name that cannot be part of a path, and for an at-most-once
        command that has neither `undo` nor `unknown`, or is itself an undo.
        """
        self._machine.here()
        typed = what if isinstance(what, Command) else None
        once = typed is not None and typed.effect_ is Effect.AT_MOST_ONCE
        action = sendable(typed.as_action() if typed else command(str(what), type, data).as_action())
        adapter = typed.reply_ if typed is not None else adapter_of(reply) if reply is not None else None
        if once and undo is None and unknown is None:
            raise UsageError(
                f"call of {action['name']}: an at-most-once command needs undo= or unknown='raise' or 'hold', "
                f"because its outcome may stay unknown"
            )
        ask = Ask(
            "call",
            named(name or action["name"].rsplit(".", 1)[-1]),
            action,
            undo=undoing(undo, adapter),
            timeout=since(timeout) or CALL_TIMEOUT,
            hold=holds(unknown),
            at_most_once=once,
        )
        return fitting(adapter, await suspend(ask), ask)

    @overload
    async def step(
        self,
        fn: Callable[[*Ts], Coroutine[Any, Any, R]],
        /,
        *args: *Ts,
        undo: Undo[R] | None = None,
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        name: str | None = None,
    ) -> R: ...
    @overload
    async def step(
        self,
        fn: Callable[[*Ts], R],
        /,
        *args: *Ts,
        undo: Undo[R] | None = None,
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        name: str | None = None,
    ) -> R: ...
    async def step(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        undo: Undo[Any] | None = None,
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        name: str | None = None,
    ) -> Any:
        """Run a function of the worker's process; its result is remembered, so a replay does not run it again.

        A plain function runs in a thread, a coroutine function on the event loop. One that raises is tried
        again by `retry` (default: 5 tries); `raise Refused(code)` says "definitely not done" and is not.
        `timeout` bounds all tries together.

        Raises StepRefused, StepFailed (the tries ran out), OutcomeUnknown (timeout, workers that died).
        """
        self._machine.here()
        adapter = result_adapter(fn)
        ask = Ask(
            "step",
            named(name or fn.__name__),
            Local(fn, args).as_action(),
            undo=undoing(undo, adapter),
            timeout=since(timeout),
            retry=retry or STEP_RETRY,
            hold=holds(unknown),
            work=(fn, args),
        )
        return fitting(adapter, await suspend(ask), ask)

    async def sleep(self, span: timedelta, /, *, name: str = "sleep") -> Elapsed:
        """Wait for `span`, at most ten years, whatever restarts meanwhile. Raises UsageError outside of it."""
        self._machine.here()
        await suspend(Ask("timer", named(name), timeout=since(span)))
        return Elapsed()

    def now(self) -> datetime:
        """The time of the fact that resumed this flow. It moves with facts, not with the clock."""
        self._machine.here()
        return self._machine.at

    def uuid(self) -> UUID:
        """A random-looking identifier that is the same in every replay."""
        return UUID(bytes=self._machine.draw("uuid"), version=4)


class Saga:
    """A scope: left by an error, what was done in it is undone before the error goes on."""

    __slots__ = ("_machine", "_scope")

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._scope = Scope()

    async def __aenter__(self) -> None:
        branch = self._machine.here()
        self._scope = branch.scope = Scope(branch.scope)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is GeneratorExit:
            return
        branch = self._machine.here()
        if isinstance(error, Exception) and not is_fault(error):
            await suspend(Unwind(self._scope))
        assert self._scope.parent is not None, "a scope is left once"
        branch.scope = self._scope.parent
        self._scope.merge()


def is_name(text: str, bytes_max: int = NAME_BYTES_MAX) -> bool:
    """Whether `text` can name something on the wire and in a table: printable, not empty, not too long."""
    return 0 < len(text.encode("utf-8", "replace")) <= bytes_max and text.isprintable()


def sendable(action: dict[str, Json]) -> dict[str, Json]:
    """`action`, when its endpoint and type can stand in a message. Raises UsageError."""
    if action["do"] != "call":
        return action
    for what, word, most in (
        ("endpoint", action["endpoint"], NAME_BYTES_MAX),
        ("type", action["name"], IDENTITY_BYTES_MAX),
    ):
        if not is_name(word, most):
            raise UsageError(f"{what} {shown(word)}: expected 1 to {most} bytes of printable text")
    return action


def undoing(undo: Undo[R] | None, adapter: TypeAdapter[R] | None) -> Callable[[bool, Json], Json] | None:
    """`undo` as the machine asks for it: from (known, reply) to an action as data, or None for "nobody knows".

    A reply that does not fit its model is like no reply: what was done still has to be undone. Raises
    UsageError, at once or when the action is made, for a command that is sent at most once: an undo is asked
    again until it is known to be done.
    """
    if undo is None:
        return None
    if not callable(undo):
        always = undoes(undo)
        return lambda _known, _value: always

    def action(known: bool, value: Json) -> Json:  # noqa: FBT001  # the machine's own shape
        made = undo(reply_or_none(adapter, value) if known else None)
        return None if made is None else undoes(made)

    return action


def undoes(action: Action) -> dict[str, Json]:
    """`action` as data. Raises UsageError when it is a command that is sent at most once."""
    said = sendable(action.as_action())
    if said.get("effect") == Effect.AT_MOST_ONCE:
        raise UsageError(f"undo by {said['name']}: an undo is asked again until it is done, not at most once")
    return said


def holds(unknown: str | None) -> bool:
    """Whether an unknown outcome asks a person. Raises UsageError for anything but None, "raise" and "hold"."""
    if unknown not in (None, "raise", "hold"):
        raise UsageError(f"unknown={unknown!r}: expected 'raise' or 'hold'")
    return unknown == "hold"


def named(name: str) -> str:
    """`name`, as a path and a journal can hold it. Raises UsageError when it is too long or not printable."""
    if not is_name(name):
        raise UsageError(f"name {shown(name)}: expected 1 to {NAME_BYTES_MAX} bytes of printable text")
    return name


def reply_or_none(adapter: TypeAdapter[R] | None, value: Json) -> R | None:
    try:
        return value if adapter is None else adapter.validate_python(value)
    except ValidationError:
        return None


def fitting(adapter: TypeAdapter[Any] | None, value: Json, ask: Ask) -> Any:
    """`value` as its model. Raises ReplyInvalid, which names the first place that does not fit."""
    if adapter is None:
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "/".join(str(part) for part in first["loc"])
        detail = f"at {'/' + place if place else 'the top'}: {first['msg']}"
        raise ReplyInvalid(ask.path, ask.name, {"code": "reply-invalid", "detail": detail}) from None


@lru_cache(maxsize=1024)
def adapter_of(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@lru_cache(maxsize=1024)
def result_adapter(fn: Callable[..., Any]) -> TypeAdapter[Any] | None:
    """How to read `fn`'s result back from a journal; None when it says nothing of it."""
    try:
        hint = get_type_hints(fn).get("return", Any)
    except (NameError, TypeError):
        return None
    try:
        return None if hint is Any else TypeAdapter(hint)
    except PydanticUserError as error:
        raise TypeError(
            f"step {fn.__name__}: no journal can keep its result of type {hint}: {error}"
        ) from None
