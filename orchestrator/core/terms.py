"""What an author says about an ask, checked before anything is written, and made into what the machine knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from contracts.errors import shown
from contracts.limits import IDENTITY_BYTES_MAX, NAME_BYTES_MAX
from contracts.messages import Action, Command, Effect, marks, plain
from contracts.probe import NotDone
from contracts.sensitive import argument_places, faults_of, known, places_of, result_places
from orchestrator.core.ask import PROBED, Ask, Watch, since
from orchestrator.core.errors import ReplyInvalid, UsageError
from orchestrator.core.fork import Mode
from orchestrator.core.names import is_name
from orchestrator.core.retry import ONCE, Retry

Json = Any
R = TypeVar("R")
Ts = TypeVarTuple("Ts")
Op: TypeAlias = Coroutine[Any, Any, R]
Undo: TypeAlias = Action | Callable[[R | None], Action | None]
"""Either the action, or how to make it from the reply; the reply is None when nobody knows it."""


@dataclass(frozen=True, slots=True)
class Local:
    """A function of this process, with its arguments, as something to do later."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]

    def as_action(self) -> dict[str, Json]:
        return local_action(self.fn, self.args)


def local_action(fn: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Json]:
    """`fn(*args)` as an action: what a worker finds the function and its arguments by."""
    said: dict[str, Json] = {"do": "step", "name": address(fn), "data": [plain(arg) for arg in args]}
    if known:
        said |= marks(data=argument_places(positions(fn), fn, args), value=result_places(fn))
    return said


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


def positions(fn: Callable[..., Any]) -> Iterator[str]:
    """The parameter of `fn` that each argument belongs to; the last one again and again, when it takes many."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except ValueError:
        return iter(())  # a built-in function that does not say what it takes
    many = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    single = [p.name for p in parameters if p.kind < inspect.Parameter.VAR_POSITIONAL]
    return chain(single, *(repeat(name) for name in many))


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


def promise(
    ask: Ask,
    *,
    retry: Retry | None,
    effect: Effect | None,
    probe: Callable[..., Any] | None,
    attempt_timeout: timedelta | None,
    heartbeat: timedelta | None,
    may_stay_unknown: bool,
) -> None:
    """Write into the local step `ask` what its author promises about its tries.

    Raises UsageError for promises that contradict each other, and for spans outside of (0, ten years].
    """
    what = f"step {ask.name}"
    bounds = (("retry.within", ask.retry.within), ("attempt_timeout", since(attempt_timeout)))
    for bound, span in bounds:
        if span is not None and ask.timeout is not None and span > ask.timeout:
            raise UsageError(f"{what}: {bound} of {span}: expected at most its timeout of {ask.timeout}")
    longest = attempt_timeout or ask.timeout
    if since(heartbeat) is not None and heartbeat is not None and longest is not None and heartbeat > longest:
        raise UsageError(
            f"{what}: heartbeat of {heartbeat}: expected at most the {longest} that a try may take"
        )
    if probe is not None:
        check_probe(ask, probe, effect)
        ask.effect = PROBED
    elif effect is not None:
        ask.effect = effect_of(what, effect)
    if ask.effect == Effect.AT_MOST_ONCE:
        check_once(what, retry, may_stay_unknown=may_stay_unknown)
        ask.retry = ONCE
    if not (attempt_timeout is heartbeat is probe is None):
        ask.watch = Watch(attempt_timeout, heartbeat, probe)


def probes(action: dict[str, Json], probe: Action) -> dict[str, Json]:
    """`probe`, which asks what became of the command `action`, as data. Raises UsageError when it never could."""
    what = f"call of {action['name']}"
    if action.get("effect") == Effect.IDEMPOTENT:
        raise UsageError(f"{what}: probe= and an idempotent command: it may be sent again unasked")
    said = sendable(probe.as_action())
    if said["do"] != "call":
        raise UsageError(f"{what}: probe= expected a command, found the function {said['name']}")
    if said.get("effect") == Effect.AT_MOST_ONCE:
        raise UsageError(
            f"{what}: probe={said['name']}: it is asked again while it cannot say, not at most once"
        )
    if isinstance(probe, Command):
        reply = cast("Command[Any]", probe).reply_
        try:
            finds = isinstance(reply.validate_python({"found": "not_done"}), NotDone)
        except ValidationError:
            finds = False
        if not finds:
            raise UsageError(f"{what}: probe={said['name']}: expected a command whose reply is a Finding")
    return said


def resends(name: str, retry: Retry, timeout: timedelta | None, *, once: bool) -> Retry:
    """`retry` as the policy of the command `name`. Raises UsageError for one that no command can have."""
    what = name if name.startswith("task ") else f"call of {name}"
    classes = [one.__name__ for one in (*retry.only, *retry.never) if not isinstance(one, str)]
    if classes:
        raise UsageError(f"{what}: retry= by {classes[0]}: expected codes, since a service answers with one")
    if retry.within is not None and timeout is not None and retry.within > timeout:
        raise UsageError(f"{what}: retry.within of {retry.within}: expected at most its timeout of {timeout}")
    if once and retry.attempts != 1:
        raise UsageError(
            f"{what}: at most once, and retry= with {retry.attempts or 'any number of'} attempts"
        )
    return retry


def effect_of(what: str, effect: Effect) -> str:
    """`effect` as an ask has it. Raises UsageError for what is none."""
    try:
        found = Effect(effect)
    except ValueError:
        raise UsageError(f"{what}: effect={effect!r}: expected one of {', '.join(Effect)}") from None
    return "" if found is Effect.KEYED else str(found)


def check_once(what: str, retry: Retry | None, *, may_stay_unknown: bool) -> None:
    """Raises UsageError when a step that is tried at most once has more tries, or nobody thought of its unknown."""
    if retry is not None and retry.attempts != 1:
        raise UsageError(
            f"{what}: at most once, and retry= with {retry.attempts or 'any number of'} attempts"
        )
    if not may_stay_unknown:
        raise UsageError(
            f"{what}: at most once needs undo= or unknown='raise' or 'hold', because its outcome may stay unknown"
        )


def check_probe(ask: Ask, probe: Callable[..., Any], effect: Effect | None) -> None:
    """Raises UsageError when `probe` would never be asked, or cannot be asked with the arguments of the step."""
    what = f"step {ask.name}"
    if effect in {Effect.IDEMPOTENT, Effect.AT_MOST_ONCE}:
        why = "it may be run again unasked" if effect == Effect.IDEMPOTENT else "it is never run again"
        raise UsageError(f"{what}: probe= and effect={str(effect)!r}: {why}")
    if ask.retry.attempts == 1:
        raise UsageError(f"{what}: probe= with one attempt: a probe is asked before the next one")
    try:
        inspect.signature(probe).bind(*(ask.work[1] if ask.work is not None else ()))
    except TypeError as error:
        raise UsageError(f"{what}: probe= takes the arguments of the step: {error}") from None
    except ValueError:
        pass  # a built-in function that does not say what it takes


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
        where, said = next(faults_of(error, places_of(adapter)))
        place = "/".join(map(str, where))
        detail = f"at {'/' + place if place else 'the top'}: {said}"
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
