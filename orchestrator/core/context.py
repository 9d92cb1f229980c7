"""The author's language. If it can wait, it is awaited; what is only written down is a plain call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NoReturn, TypeVar, TypeVarTuple, overload
from uuid import UUID

from contracts.errors import shown
from contracts.limits import (
    CALL_TIMEOUT,
    FORK_WIDTH_MAX,
    IDENTITY_BYTES_MAX,
    ITEMS_MAX,
    KEY_BYTES_MAX,
    SPAN_MAX,
)
from contracts.messages import Action, Command, Effect, Event, command, marks
from contracts.probe import Finding
from contracts.sensitive import places_of
from orchestrator.core import attributes as own
from orchestrator.core.approval import Decision, approval_of
from orchestrator.core.ask import Ask, Scope, Unwind, since
from orchestrator.core.branch import Branch, drop, suspend
from orchestrator.core.children import Flow, Handle, asked_of, child_of
from orchestrator.core.errors import Cancelled, Continue, FlowError, TimedOut, UsageError, is_fault
from orchestrator.core.fork import Fork, Mode
from orchestrator.core.machine import Machine
from orchestrator.core.mutexes import key_of
from orchestrator.core.names import is_name, named
from orchestrator.core.path import Frame
from orchestrator.core.retry import ONCE, STEP_RETRY, Retry
from orchestrator.core.task import task_of
from orchestrator.core.terms import (
    Op,
    Undo,
    adapter_of,
    check_ops,
    fitting,
    holds,
    local_action,
    probes,
    promise,
    resends,
    result_adapter,
    sendable,
    undoing,
)
from orchestrator.core.transaction import transaction_of

Json = Any
R = TypeVar("R")
T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
I = TypeVar("I")  # noqa: E741  # what a flow is given
E = TypeVar("E", bound=Event)
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class Elapsed:
    """What `sleep` returns."""


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
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        probe: Action | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        mutex: str | None = None,
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
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        probe: Action | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        mutex: str | None = None,
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
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        probe: Action | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        mutex: str | None = None,
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
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        probe: Action | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        mutex: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Send a command to an endpoint and wait for its reply.

        `undo` is asked, in reverse order, when the flow fails later. `timeout` (default: one day) is the
        message's expiry; then the outcome is unknown: `unknown="hold"` asks a person, "raise" (the default)
        raises. The relay tries to deliver it until then; `retry` is for what a service answers: a command that it
        gave up (`.failed`), with a code that the policy covers, is sent again under the same key, as another
        message. A refusal never is. When the outcome is unknown and settled, the command `probe` asks what became of
        it: that ends the call as done, or as refused unless `retry` covers the code `not-done`; while it cannot say,
        it is asked again. Of all calls, steps, transactions and tasks with the same `mutex` one is under way at a
        time, in the order of their asking; the time to wait for that does not count as the call's. `name` tells calls
        of one type apart; default is the last dotted part of the type.

        Raises StepRefused (definitely not done), StepFailed, OutcomeUnknown, ReplyInvalid; UsageError for a
        timeout outside of (0, ten years], for a name that cannot be part of a path, for a policy that names classes
        or lasts longer than the timeout, and for an at-most-once command that has neither `undo` nor `unknown`, has
        more than one attempt, or is itself an undo.
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
            retry=ONCE
            if retry is None
            else resends(action["name"], retry, None if probe else timeout or CALL_TIMEOUT, once=once),
            hold=holds(unknown),
            effect=str(Effect.AT_MOST_ONCE) if once else "",
        )
        if probe is not None:
            ask.probe = probes(action, probe)
        if mutex is not None:
            ask.mutex = key_of(f"call of {action['name']}", mutex)
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
        attempt_timeout: timedelta | None = None,
        heartbeat: timedelta | None = None,
        effect: Effect | None = None,
        probe: Callable[[*Ts], Op[Finding[R]] | Finding[R]] | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        mutex: str | None = None,
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
        attempt_timeout: timedelta | None = None,
        heartbeat: timedelta | None = None,
        effect: Effect | None = None,
        probe: Callable[[*Ts], Op[Finding[R]] | Finding[R]] | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        mutex: str | None = None,
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
        attempt_timeout: timedelta | None = None,
        heartbeat: timedelta | None = None,
        effect: Effect | None = None,
        probe: Callable[..., Any] | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        mutex: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Run a function of the worker's process; its result is remembered, so a replay does not run it again.

        A plain function runs in a thread, a coroutine function on the event loop. One that raises is tried
        again by `retry` (default: 5 tries); `raise Refused(code)` says "definitely not done" and is not.
        `timeout` bounds all tries together, `attempt_timeout` each one; `heartbeat` how long a try may be silent
        between two calls of `attempt().heartbeat()`. `effect` says what holds when nobody knows what a try did
        (default: it is tried again under the same key), or `probe` finds out, with the same arguments. `mutex`: as
        for a call.

        Raises StepRefused, StepFailed (the tries ran out), OutcomeUnknown (timeout, workers that died); UsageError
        for promises that contradict each other.
        """
        self._machine.branches.here()
        adapter = result_adapter(fn)
        ask = Ask(
            "step",
            named(name or fn.__name__),
            local_action(fn, args),
            undo=undoing(undo, adapter),
            timeout=since(timeout),
            retry=retry or STEP_RETRY,
            hold=holds(unknown),
            work=(fn, args),
        )
        if not (retry is effect is probe is attempt_timeout is heartbeat is None):
            promise(
                ask,
                retry=retry,
                effect=effect,
                probe=probe,
                attempt_timeout=attempt_timeout,
                heartbeat=heartbeat,
                may_stay_unknown=undo is not None or unknown is not None,
            )
        if mutex is not None:
            ask.mutex = key_of(f"step {ask.name}", mutex)
        return fitting(adapter, await suspend(ask), ask)

    async def transaction(
        self,
        fn: Callable[[Any, *Ts], Coroutine[Any, Any, R]],
        /,
        *args: *Ts,
        undo: Action | Callable[[R], Action] | None = None,
        mutex: str | None = None,
        name: str | None = None,
    ) -> R:
        """Run `fn(conn, *args)` in a transaction of the same PostgreSQL: what it writes, in the application's own
        tables, and the fact that it ended are committed together, exactly once.

        `conn` is a psycopg AsyncConnection; the function may neither commit nor roll back, and has five seconds. A
        serialization failure or a deadlock runs it again; a bug is tried again as that of a step is; any other
        error rolls back. `undo` gets what the function returned: it is never unknown. `mutex`: as for a call.

        Raises StepRefused (rolled back: definitely not done), with the code of `Refused(code)`, or `timeout`;
        UsageError for what is no coroutine function.
        """
        self._machine.branches.here()
        adapter, ask = transaction_of(fn, args, undo, name)
        if mutex is not None:
            ask.mutex = key_of(f"transaction {ask.name}", mutex)
        return fitting(adapter, await suspend(ask), ask)

    async def task(
        self,
        what: Command[R],
        /,
        *,
        queue: str,
        priority: int = 0,
        undo: Undo[R] | None = None,
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        unknown: Literal["raise", "hold"] | None = None,
        mutex: str | None = None,
        name: str | None = None,
    ) -> R:
        """Leave a command in `queue`, for whichever worker of that queue takes it (`waypost tasks`), and wait for its
        reply. Nothing is sent: workers come for it. Of two that wait, the one with the higher `priority` goes first.

        A try that raises, or whose worker is lost, is followed by another one under the same key, by `retry` (default:
        5 tries) and the code of the error. `timeout` (default: one day) bounds them all, waiting included; then, or
        when the tries of lost workers are used up, the outcome is unknown: `unknown="hold"` asks a person. `undo`,
        `mutex` and `name` are as for `call`: it waits for its mutex before it waits in its queue.

        Raises StepRefused (definitely not done), StepFailed (the tries ran out), OutcomeUnknown, ReplyInvalid;
        UsageError for a queue that cannot be named, a priority beyond 100, and where `call` raises it.
        """
        self._machine.branches.here()
        adapter, ask = task_of(
            what,
            queue=queue,
            priority=priority,
            undo=undo,
            retry=retry,
            timeout=timeout,
            unknown=unknown,
            mutex=mutex,
            name=name,
        )
        return fitting(adapter, await suspend(ask), ask)

    async def sleep(self, span: timedelta, /, *, name: str = "sleep") -> Elapsed:
        """Wait for `span`, at most ten years, whatever restarts meanwhile. Raises UsageError outside of it."""
        self._machine.branches.here()
        await suspend(Ask("timer", named(name), timeout=since(span)))
        return Elapsed()

    async def sleep_until(self, when: datetime, /, *, name: str = "sleep") -> Elapsed:
        """Wait until `when`; a time that is past is no wait.

        Raises UsageError for a time without a zone, or more than ten years away.
        """
        machine = self._machine
        machine.branches.here()
        if when.tzinfo is None:
            raise UsageError(f"ctx.sleep_until({when.isoformat()}): expected a time with a zone")
        if when - machine.at > SPAN_MAX:
            raise UsageError(f"ctx.sleep_until({when.isoformat()}): expected a time within ten years")
        await suspend(Ask("timer", named(name), until=when))
        return Elapsed()

    async def child(
        self,
        flow: Flow[I, R],
        input: I,
        /,
        *,
        key: str | None = None,
        undo: Undo[R] | None = None,
        timeout: timedelta | None = None,
        name: str | None = None,
    ) -> R:
        """Run another flow as an execution of its own, and wait for what it returns.

        `key` is its business key. `undo` is asked when this flow fails after the child has completed; what the child
        did before its end it undoes itself. When nobody waits for it any more, it is told to end, and waited for until
        it has. After `timeout` it is told to end, and the outcome is unknown until it has.

        Raises ChildFailed when it ended otherwise than well; StepRefused when it was not begun (`key-taken`,
        `unknown-flow`, `too-deep`, `too-many`, `mutex-inside`); OutcomeUnknown after `timeout`; ReplyInvalid;
        UsageError for an input that the flow does not take, for a key that cannot be one, and for a timeout outside of
        (0, ten years].
        """
        self._machine.branches.here()
        ask = child_of(flow, input, key, undo=undo, timeout=timeout, name=name)
        return fitting(flow.output, await suspend(ask), ask)

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

        A class that names the field of its key is waited for by `key`: its events have one, and none would come.
        An event that came earlier, though after this execution was created, or that nobody had, counts; each is
        given out once, the oldest first. `name` tells waits apart in the history; default is the type.

        Raises TimedOut after `timeout`, ReplyInvalid when what came does not fit the class, and UsageError for a
        type or a key that no event can have, and for no key where the class names one.
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
        if key is None and not isinstance(kind, str) and kind.key_ is not None:
            raise UsageError(
                f"event {kind.__name__}: expected key=, the value of its field {kind.key_!r}, found none; "
                f"an event without a key never comes"
            )
        args: dict[str, Json] = {"type": type_, "key": key or ""}
        if not isinstance(kind, str):
            args |= marks(value=places_of(kind))
        ask = Ask("event", named(name or type_), args, timeout=since(timeout))
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
        """Every result, in the order written; an error that a flow may expect, a FlowError, is a value.

        It waits for all of them. The first to raise anything else is raised then; other errors are notes on it.
        """
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

    async def map(
        self,
        items: Iterable[T],
        fn: Callable[[T], Op[R]],
        /,
        *,
        concurrency: int,
        items_max: int = ITEMS_MAX,
        name: str = "map",
    ) -> list[R]:
        """What `fn` returns for each of `items`, in their order, at most `concurrency` (1 to 1,000) of them at once.

        The first error stops those under way, begins no more, and is raised when all have ended. What was done stays
        registered in the scope around, as with `all`. More than `items_max` items (at most 10,000) are a UsageError
        that the journal keeps.
        """
        self._machine.branches.here()
        if not 1 <= concurrency <= FORK_WIDTH_MAX:
            raise UsageError(f"ctx.map: concurrency={concurrency}, expected 1 to {FORK_WIDTH_MAX}")
        if not 1 <= items_max <= ITEMS_MAX:
            raise UsageError(f"ctx.map: items_max={items_max}, expected 1 to {ITEMS_MAX}")
        given = list(items)
        branches = (of_item(fn, item) for item in given)
        fork = Fork(
            "map", branches, name=named(name), width=len(given), items_max=items_max, concurrency=concurrency
        )
        return await suspend(fork)

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
            fork = Fork(mode, ops, name=named(name), width=len(ops))
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

    def continue_as_new(self, input: Any, /) -> NoReturn:  # an execution's input, everywhere
        """End here, and begin again with `input` and an empty journal, as the same execution: for flows that go on for
        years. Events that nobody took yet go along.

        Raises UsageError inside of a branch, and while something is left to undo: leave the saga, or `pivot()`, first.
        An input that the flow does not take is a UsageError that fails it.
        """
        self._machine.continue_as_new(input)

    # ---- written down --------------------------------------------------------------------------------------

    def emit(self, event: Event, /) -> None:
        """Send `event` to every endpoint that subscribes to its type, with what else this turn commits: once for each,
        if it commits. Flows of this installation that wait for it get it too, and those that it starts are started.
        The event's subject is the field that its class names as `key`. Nobody answers it.

        Raises UsageError for an event without a type, with a key that cannot be one, or that cannot be stored.
        """
        kind = type(event)
        if not is_name(kind.type_, IDENTITY_BYTES_MAX):
            raise UsageError(f"event {kind.__name__}: expected a class with type=, found {shown(kind.type_)}")
        key = None if kind.key_ is None else str(getattr(event, kind.key_))
        if key is not None and not is_name(key, KEY_BYTES_MAX):
            raise UsageError(f"event key {shown(key)}: expected 1 to {KEY_BYTES_MAX} bytes of printable text")
        data = event.model_dump(mode="json", by_alias=True)
        name = named(kind.type_.rpartition(".")[2])
        said = {"type": kind.type_, "key": key, "data": data} | marks(data=places_of(kind))
        self._machine.note("emit", name, said)

    def publish(self, **attributes: str | float | bool | datetime | None) -> None:
        """Say about this execution what it should be found by: `publish(stage="paid", amount=4200)`. An attribute
        keeps its value until it gets another one, also when the flow continues as new or ends; None removes it.

        Raises UsageError for a name that is no identifier, for a text that is too long or not printable, a time
        without a zone, a number that is not finite, and for too many attributes.
        """
        self._machine.publish(own.said(attributes))

    def start(self, flow: Flow[I, R], input: I, /, *, key: str | None = None) -> Handle[R]:
        """Begin another execution, with what else this turn commits: once, if it commits. Nobody waits for it, and what
        becomes of this flow does not touch it.

        `key` is its business key. When an execution has it already, that one stays as it is, whatever its input, and
        nothing is begun.

        Raises UsageError for an input that the flow does not take, or that cannot be stored, and for a key that cannot
        be one. A flow that nobody has made known holds this execution.
        """
        self._machine.branches.here()
        args = asked_of("ctx.start", flow, input, key)
        return Handle(UUID(self._machine.start(named(flow.name), args)), flow.name, key)

    def now(self) -> datetime:
        """The time of the fact that resumed this flow, in UTC. It moves with facts, not with the clock."""
        self._machine.branches.here()
        return self._machine.at.astimezone(UTC)

    def uuid(self) -> UUID:
        """A random-looking identifier that is the same in every replay."""
        return UUID(bytes=self._machine.draw("uuid"), version=4)

    def random(self) -> float:
        """A random-looking number, from 0 up to 1 (excluded), that is the same in every replay."""
        return (int.from_bytes(self._machine.draw("random")[:7], "big") >> 3) / 2**53

    # ---- new code for old executions -----------------------------------------------------------------------

    def patched(self, id: str, /) -> bool:  # what it is
        """Whether this execution takes the new way: True from here on for one that comes here now, False for one that
        was past this place before the patch was there. The first answer holds for the whole execution.
        """
        return self._machine.patched(named(id))

    def deprecate_patch(self, id: str, /) -> None:  # what it is
        """Stands where `patched(id)` stood, once no execution takes the old way any more; later it can go too."""
        self._machine.deprecate_patch(named(id))


class _Over:
    """What the time of a `within` ends with."""


async def of_item(fn: Callable[[T], Op[R]], item: T) -> R:
    """What a branch of `map` runs: `fn` is called in it, so what it raises is the branch's own."""
    return await fn(item)


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
        if (error is None or isinstance(error, Continue)) and branch.pending is not None:
            stopped, branch.pending = Cancelled(branch.pending), None
        if stopped is not None or (isinstance(error, Exception | Cancelled) and not is_fault(error)):
            await suspend(Unwind(self._scope))
        assert self._scope.parent is not None, "a scope that was opened has one around it"
        branch.scope, branch.frame = self._scope.parent, self._frame
        self._scope.merge()
        if stopped is not None:
            raise stopped
