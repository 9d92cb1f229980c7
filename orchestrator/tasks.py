"""Functions that do the work of queues, by the type of the command that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, overload

from pydantic import ValidationError

from contracts import strict_json
from contracts.errors import NotEncodable, TooLarge
from contracts.limits import IDENTITY_BYTES_MAX, PAYLOAD_BYTES_MAX
from contracts.messages import Command, Refused
from contracts.outcome import Outcome
from orchestrator.core.errors import Cancelled, UsageError, code_of, in_words, storable
from orchestrator.core.names import is_name
from orchestrator.engine.attempt import NotBegun, refusal, where
from orchestrator.flows import FlowsInvalid, imported
from orchestrator.store.tasks import Report, Task

Json = Any
R = TypeVar("R")
C = TypeVar("C", bound=Command[Any])

STOPPED: Final = "worker-stopped"
"""The code of a try that was ended half-way: nobody knows what it did."""


@dataclass(frozen=True, slots=True)
class Handler:
    """`fn` does what a command of class `command` asks."""

    command: type[Command[Any]]
    fn: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Registration(Generic[R]):
    """Takes the function, which returns `R` or awaits it."""

    add: Callable[[Callable[[Any], Any]], None]

    @overload
    def __call__(
        self, fn: Callable[[C], Coroutine[Any, Any, R]], /
    ) -> Callable[[C], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, fn: Callable[[C], R], /) -> Callable[[C], R]: ...
    def __call__(self, fn: Callable[[Any], Any], /) -> Callable[[Any], Any]:
        self.add(fn)
        return fn


class Tasks:
    """What a process can do of what waits in queues: `@tasks.does(Resize)` above `def resize(command)`.

    A plain function runs in a thread, a coroutine function on the event loop. It returns the reply of its command, or
    raises `Refused(code)`: definitely not done. Whatever else it raises is tried again, by the policy of the flow that
    asked, with the error's code. `orchestrator.attempt()` tells it which try it is, under which key, and takes its
    heartbeats.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def does(self, command: type[Command[R]], /) -> Registration[R]:
        """Register a function for commands of this class. Raises UsageError for a class without a type, and when its
        type has a function already.
        """
        if not is_name(command.type_, IDENTITY_BYTES_MAX):
            raise UsageError(f"tasks.does({command.__name__}): expected a class with type=, found none")
        if command.type_ in self._handlers:
            raise UsageError(
                f"tasks.does({command.__name__}): {command.type_} is done by "
                f"{self._handlers[command.type_].fn.__qualname__} already"
            )

        def add(fn: Callable[[Any], Any]) -> None:
            self._handlers[command.type_] = Handler(command, fn)

        return Registration(add)

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers.values())

    def get(self, type_: str) -> Handler | None:
        return self._handlers.get(type_)

    def add(self, others: Tasks) -> None:
        """All of `others` too. Raises UsageError where both do the same."""
        for handler in others:
            if self._handlers.get(handler.command.type_, handler) != handler:
                raise UsageError(f"{handler.command.type_}: two functions do it")
            self._handlers[handler.command.type_] = handler


def load(modules: Sequence[str]) -> Tasks:
    """What `modules` can do, the working directory being on the path.

    Raises FlowsInvalid when a module cannot be imported or has no `Tasks`, and UsageError where two do the same.
    """
    found = Tasks()
    for name in modules:
        ours = [thing for thing in vars(imported(name)).values() if isinstance(thing, Tasks)]
        if not ours:
            raise FlowsInvalid(f"module {name}: expected a Tasks() with functions, found none")
        for tasks in ours:
            found.add(tasks)
    return found


# ---- what became of a try --------------------------------------------------------------------------------------


class Unfit(Exception):
    """A command that its class does not take. Nothing was done."""


def asked(handler: Handler, task: Task) -> Command[Any]:
    """The command of `task`. Raises Unfit."""
    try:
        return handler.command.model_validate_json(task.payload)
    except ValidationError as error:
        raise Unfit(first_fault(error)) from None


def done(task: Task, handler: Handler, value: Any) -> Report:
    """The report of a try that returned `value`; it failed, when that is no reply of its command, or cannot be kept."""
    try:
        reply = handler.command.reply_
        kept: Json = reply.dump_python(reply.validate_python(value), mode="json")
        answer = strict_json.encode(
            Outcome("done", value=kept).as_json(), what="reply", bytes_max=PAYLOAD_BYTES_MAX
        )
    except ValidationError as error:
        return failed(
            task, "reply-invalid", f"what it returned is no reply of {task.type}: {first_fault(error)}"
        )
    except TooLarge as error:
        return failed(task, "too-large", str(error))
    except (NotEncodable, ValueError) as error:
        return failed(task, "not-encodable", str(error))
    return Report(task, "done", answer)


def raised(task: Task, error: BaseException) -> Report:
    """The report of a try that raised."""
    match error:
        case Refused():
            said = refusal(error)
            return told(
                task, Outcome("refused", code=said["code"], detail=said["detail"], data=said.get("data"))
            )
        case Unfit():
            return told(task, Outcome("refused", code="input-invalid", detail=storable(str(error))))
        case NotBegun() | Cancelled():
            return lost(task)
        case _:
            return failed(task, code_of(error), f"{in_words(error)} (at {where(error)})")


def failed(task: Task, code: str, detail: str) -> Report:
    return told(task, Outcome("failed", code=storable(code), detail=storable(detail)))


def lost(task: Task) -> Report:
    """A try that was ended half-way."""
    detail = f"its worker stopped it at try {task.attempt}"
    answer = strict_json.encode(Outcome("unknown", code=STOPPED, detail=detail).as_json(), what="outcome")
    return Report(task, "lost", answer)


def told(task: Task, outcome: Outcome) -> Report:
    assert outcome.kind in ("refused", "failed"), outcome
    return Report(task, outcome.kind, strict_json.encode(outcome.as_json(), what="outcome"))


def first_fault(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = "/".join(str(part) for part in first["loc"])
    return f"at {'/' + place if place else 'the top'}: {first['msg']}"
