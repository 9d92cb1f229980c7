"""The author's language. If it can wait, it is awaited; what is only written down is a plain call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar, TypeVarTuple, get_type_hints, overload
from uuid import UUID

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from contracts.errors import shown
from contracts.limits import CALL_TIMEOUT, IDENTITY_BYTES_MAX, KEY_BYTES_MAX, NAME_BYTES_MAX
from contracts.messages import Action, Command, Effect, Event, command, plain
from orchestrator.core.approval import Decision, approval_of
from orchestrator.core.ask import Ask, Scope, Unwind, since
from orchestrator.core.branch import Branch, drop, suspend
from orchestrator.core.errors import Cancelled, FlowError, ReplyInvalid, TimedOut, UsageError, is_fault
from orchestrator.core.fork import Fork, Mode
from orchestrator.core.machine import Machine
from orchestrator.core.names import is_name, named
from orchestrator.core.path import Frame
from orchestrator.core.retry import STEP_RETRY, Retry

Json = Any
R = TypeVar("R")
T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
E = TypeVar("E", bound=Event)
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
        self._machine.branches.here()
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
        self._machine.branches.here()
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
        self._machine.branches.here()
        await suspend(Ask("timer", named(name), timeout=since(span)))
        return Elapsed()

    # ---- events --------------------------------------------------------------------------------------------

    @overload
    async def event(
        self,
        kind: type[E],
        /,
        *,
        key: str | None = None,
        timeout: timedelta | None = None,
        name: str | None = None,
    ) -> E: ...
    @overload
    async def event(
        self,
        kind: str,
        /,
        *,
        key: str | None = None,
        timeout: timedelta | None = None,
        name: str | None = None,
    ) -> Json: ...
    async def event(
        self,
        kind: type[Event] | str,
        /,
        *,
        key: str | None = None,
        timeout: timedelta | None = None,
        name: str | None = None,
    ) -> Any:
        """Wait for an event of a type and a key, which is the event's subject (None: it has none).

        An event that came earlier, though after this execution was created, or that nobody had, counts; each is
        given out once, the oldest first. `name` tells waits apart in the history; default is the type.

        Raises TimedOut after `timeout`, ReplyInvalid when what came does not fit the class, and UsageError for a
        type or a key that no event can have.
        """
        self._machine.branches.here()
        type_ = kind if isinstance(kind, str) else kind.type_
        if not is_name(type_, IDENTITY_BYTES_MAX):
            raise UsageError(
                f"event type {shown(type_)}: expected 1 to {IDENTITY_BYTES_MAX} bytes of printable text"
            )
        if key is not None and not is_name(key, KEY_BYTES_MAX):
            raise UsageError(
                f"event key {shown(key)}: expected 1 to {KEY_BYTES_MAX} bytes of printable text, or None"
            )
        ask = Ask("event", named(name or type_), {"type": type_, "key": key or ""}, timeout=since(timeout))
        value = await suspend(ask)
        return value if isinstance(kind, str) else fitting(adapter_of(kind), value, ask)

    # ---- people --------------------------------------------------------------------------------------------

    async def approval(
        self,
        subject: str,
        /,
        *,
        who: str | Sequence[str],
        choices: Sequence[str] = ("approve", "reject"),
        remind: timedelta | None = None,
        expires: timedelta | None = None,
        show: Json = None,
    ) -> Decision:
        """Ask `who` about `subject`, and wait until one of `choices` is decided: `waypost decide`.

        `show` is what a person should see for it. After each pause of `remind` a reminder is written down.
        `subject` is the scope of all that in the paths.

        Raises TimedOut when nobody has decided after `expires`, and UsageError for what nobody could decide.
        """
        self._machine.branches.here()
        asked = approval_of(subject, who, choices, remind=remind, expires=expires)
        return await asked.ask(self, self._machine, show)

    # ---- together ------------------------------------------------------------------------------------------

    @overload
    async def all(self, a: Op[T1], b: Op[T2], /, *, name: str = "all") -> tuple[T1, T2]: ...
    @overload
    async def all(self, a: Op[T1], b: Op[T2], c: Op[T3], /, *, name: str = "all") -> tuple[T1, T2, T3]: ...
    @overload
    async def all(
        self, a: Op[T1], b: Op[T2], c: Op[T3], d: Op[T4], /, *, name: str = "all"
    ) -> tuple[T1, T2, T3, T4]: ...
    @overload
    async def all(self, *ops: Op[T], name: str = "all") -> tuple[T, ...]: ...
    async def all(self, *ops: Op[Any], name: str = "all") -> Any:
        """Every result, in the order written.

        The first error stops the others and is raised when all have ended; later ones are notes on it. What was
        done stays registered in the scope around: it is undone only if that fails.
        """
        return tuple(await self._fork("all", ops, name))

    async def settle(self, *ops: Op[T], name: str = "settle") -> list[T | FlowError]:
        """Every result, in the order written; an error is a value. It waits for all of them."""
        return await self._fork("settle", ops, name)

    async def first(self, *ops: Op[T], name: str = "first") -> T:
        """The first to end, well or badly. What the others did is undone before this returns.

        Raises what the first to end raises; UsageError when there is none.
        """
        return await self._fork("first", ops, name, least=1)

    async def any(self, *ops: Op[T], name: str = "any") -> T:
        """The first to succeed. What the others did is undone before this returns.

        Raises AllFailed when none does; UsageError when there is none.
        """
        return await self._fork("any", ops, name, least=1)

    async def within(self, span: timedelta, op: Op[T], /, *, name: str = "within") -> T:
        """What `op` returns, if it ends within `span`; else what is under way in it is withdrawn, what it did is
        undone, and TimedOut is raised. UsageError for a span outside of (0, ten years].
        """
        result = await self._fork("first", (op, self._limit(span)), name, span=span)
        if isinstance(result, _Over):
            raise TimedOut(f"{name}: not done within {span}")
        return result

    async def _limit(self, span: timedelta) -> _Over:
        await self.sleep(span, name="limit")
        return _Over()

    async def _fork(
        self,
        mode: Mode,
        ops: Sequence[Op[Any]],
        name: str,
        *,
        least: int = 0,
        span: timedelta | None = None,
    ) -> Any:
        try:
            self._machine.branches.here()
            since(span)
            check_ops(mode, ops, least=least)
            fork = Fork(mode, ops, name=named(name))
        except BaseException:
            for op in ops:
                if inspect.iscoroutine(op):
                    drop(op)
            raise
        return await suspend(fork)

    # ---- undoing -------------------------------------------------------------------------------------------

    def saga(self, name: str | None = None) -> Saga:
        """A scope, for `async with`: left by an error, what was done in it is undone before the error goes on. Left
        well, its work joins the scope around it. A name stands in the paths of what is asked inside.
        """
        return Saga(self._machine, None if name is None else named(name))

    def pivot(self) -> None:
        """The point of no return: what was done before stands, whatever comes. What is done after it is undone as
        usual, but the end is then `failed`, not `compensated`. Raises UsageError inside of a branch.
        """
        self._machine.pivot()

    # ---- written down --------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """The time of the fact that resumed this flow. It moves with facts, not with the clock."""
        self._machine.branches.here()
        return self._machine.at

    def uuid(self) -> UUID:
        """A random-looking identifier that is the same in every replay."""
        return UUID(bytes=self._machine.draw("uuid"), version=4)


class _Over:
    """What the time of a `within` ends with."""


class Saga:
    """A scope: left by an error, what was done in it is undone before the error goes on."""

    __slots__ = ("_branch", "_frame", "_machine", "_name", "_scope")

    def __init__(self, machine: Machine, name: str | None = None) -> None:
        self._machine = machine
        self._name = name
        self._branch: Branch | None = None
        self._scope = Scope()
        self._frame = Frame()

    async def __aenter__(self) -> None:
        branch = self._branch = self._machine.branches.here()
        self._frame = branch.frame
        branch.scope, branch.frame = self._machine.branches.opens(self._name)
        self._scope = branch.scope

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is GeneratorExit:
            return
        branch = self._machine.branches.here()
        if branch is not self._branch or branch.scope is not self._scope:
            raise TypeError("a saga is left in the branch that entered it, and after those inside of it")
        stopped: Cancelled | None = None
        if error is None and branch.pending is not None:
            stopped, branch.pending = Cancelled(branch.pending), None
        if stopped is not None or (isinstance(error, Exception | Cancelled) and not is_fault(error)):
            await suspend(Unwind(self._scope))
        assert self._scope.parent is not None, "a scope that was opened has one around it"
        branch.scope, branch.frame = self._scope.parent, self._frame
        self._scope.merge()
        if stopped is not None:
            raise stopped


def check_ops(mode: Mode, ops: Sequence[object], *, least: int) -> None:
    """Raises TypeError for what is no coroutine, UsageError when there are fewer than `least`."""
    strangers = [op for op in ops if not inspect.iscoroutine(op)]
    if strangers:
        raise TypeError(
            f"ctx.{mode} takes coroutines, as asyncio.gather does, not {type(strangers[0]).__name__}"
        )
    if len(ops) < least:
        raise UsageError(f"ctx.{mode}() of nothing would wait for ever: expected at least one")


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
