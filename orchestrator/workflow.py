"""What makes a function a flow."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar, cast, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from contracts.errors import InputInvalid as InputRefused
from contracts.errors import shown
from contracts.limits import IDENTITY_BYTES_MAX, KEY_BYTES_MAX, NAME_BYTES_MAX, SPAN_MAX
from contracts.messages import Event, plain
from contracts.sensitive import faults_of, is_inside, places_of
from orchestrator.core.branch import suspend
from orchestrator.core.children import INSIDE, MUTEX_INSIDE
from orchestrator.core.context import Context, Saga
from orchestrator.core.errors import Continue, InputInvalid, UsageError
from orchestrator.core.machine import Machine
from orchestrator.core.mutexes import FLOW, key_of, turn_of_flow
from orchestrator.core.names import is_name
from orchestrator.core.terms import Op

Json = Any
I = TypeVar("I")  # noqa: E741  # what a flow is given
O = TypeVar("O")  # noqa: E741  # what it returns


@dataclass(frozen=True, slots=True)
class Workflow(Generic[I, O]):
    """A flow: a program with a name and a version, and the models of what it is given and returns.

    An event of class `on` starts it; `key` is a JSON pointer to the business key in the event's data, None for its
    subject. `deadline` is how long an execution may take, None as long as it likes. Of those for which `mutex` says the
    same, one goes on at a time.
    """

    name: str
    version: str
    run: Callable[[Context, I], Op[O]]
    input: TypeAdapter[Any]
    output: TypeAdapter[Any]
    on: type[Event] | None = None
    key: str | None = None
    deadline: timedelta | None = None
    mutex: Callable[[I], str] | None = None

    @property
    def sensitive(self) -> dict[str, list[str]]:
        """Where its input and output are sensitive, as JSON pointers; without those of which nothing is."""
        found = {"input": places_of(self.input), "output": places_of(self.output)}
        return {what: list(places) for what, places in found.items() if places}

    async def program(self, machine: Machine, input: Json) -> Json:  # noqa: A002  # an execution's input, everywhere
        """The flow as the machine drives it: one saga around all it does. Raises InputInvalid."""
        try:
            argument = self.input.validate_python(input)
        except ValidationError as error:
            raise InputInvalid(
                f"the input does not fit flow {self.name}: {faults(error, self.input)[0]}"
            ) from None
        try:
            async with Saga(machine):
                if self.mutex is not None and FLOW not in machine.mutexes.held:
                    if machine.mutexes.under_mutex:
                        raise UsageError(f"workflow {self.name}: {MUTEX_INSIDE}: {INSIDE}")
                    await suspend(turn_of_flow(key_of(f"workflow {self.name}", self.mutex(argument))))
                result = await self.run(Context(machine), argument)
        except Continue as go_on:
            raise Continue(self._next(machine, go_on.input)) from None
        return self.output.dump_python(result, mode="json", warnings=False)

    def _next(self, machine: Machine, input: object) -> Json:  # noqa: A002  # an execution's input, everywhere
        """The input of the next epoch, as it will be recorded. Raises UsageError when the flow does not take it."""
        try:
            checked = self.checked(plain(input))
        except InputRefused as error:
            raise UsageError(f"continue_as_new: {error}") from None
        machine.check_input(checked)
        return checked

    def checked(self, input: Json) -> Json:  # noqa: A002  # an execution's input, everywhere
        """`input` as it will be recorded. Raises contracts.InputInvalid with every place that does not fit."""
        try:
            return self.input.dump_python(self.input.validate_python(input), mode="json")
        except ValidationError as error:
            raise InputRefused(self.name, faults(error, self.input)) from None


def workflow(
    *,
    name: str,
    version: str,
    on: type[Event] | None = None,
    key: str | None = None,
    deadline: timedelta | None = None,
    mutex: Callable[[Any], str] | None = None,
) -> Callable[[Callable[[Context, I], Op[O]]], Workflow[I, O]]:
    """Make a flow of `async def flow(ctx, input) -> output`; its annotations are its models.

    With `on`, each event of that class starts it, with the event's data as its input: once for each business key,
    which is the event's subject, or what `key` names: a field of the event, or a JSON pointer into its data.

    With a `deadline`, an execution that is not over so long after its start is stopped and undone: it ends
    `compensated` or `failed`.

    With a `mutex`, which says a key for each input, one execution of all that have the same key goes on at a time, in
    the order of their starts; it has the mutex until its last fact, all undoing included.

    Raises UsageError when the name, the version, the event, the key, the deadline, the mutex or the function's shape
    cannot be one of a flow.
    """
    for what, word in (("name", name), ("version", version)):
        if not is_name(word) or "@" in word:
            raise UsageError(
                f"workflow {what} {shown(word)}: expected 1 to {NAME_BYTES_MAX} bytes of printable text without @"
            )
    pointer = trigger_key(name, on, key)
    bounded("deadline", deadline, where=f"workflow {name}: ")
    if mutex is not None and not callable(mutex):
        raise UsageError(
            f"workflow {name}: mutex= expected a function from the input to a key, found {shown(mutex)}"
        )

    def register(fn: Callable[[Context, I], Op[O]]) -> Workflow[I, O]:
        parameters = list(inspect.signature(fn).parameters)
        if not inspect.iscoroutinefunction(fn) or len(parameters) != 2:
            raise UsageError(f"workflow {name}: expected `async def {fn.__name__}(ctx, input)`")
        hints = get_type_hints(fn, include_extras=True)
        takes = hints.get(parameters[1], Any)
        if on is not None and takes is not on:
            raise UsageError(
                f"workflow {name}: expected `{parameters[1]}: {on.__name__}`, which is what on= starts it with, "
                f"found {getattr(takes, '__name__', takes)}"
            )
        output = TypeAdapter(hints.get("return", Any))
        return Workflow(name, version, fn, TypeAdapter(takes), output, on, pointer, deadline, mutex)

    return register


def bounded(what: str, span: object, *, where: str = "") -> None:
    """Raises UsageError for what is no span of more than nothing and at most ten years, nor None."""
    if span is not None and not (isinstance(span, timedelta) and timedelta(0) < span <= SPAN_MAX):
        found = shown(span)
        raise UsageError(
            f"{where}{what}= expected a timedelta of more than 0 and at most ten years, found {found}"
        )


def trigger_key(name: str, on: object, key: object) -> str | None:
    """Where in the data of an event `on` the business key is, as a JSON pointer; None: it is the subject.

    Whoever starts the flow does not run its code, so nothing can be computed: a function is no key.
    """
    where = f"workflow {name}:"
    if on is None:
        if key is not None:
            raise UsageError(f"{where} key= says where an event has its business key, so it needs on=")
        return None
    kind = cast("type[Event]", on)
    if not (isinstance(on, type) and issubclass(on, Event) and is_name(on.type_, IDENTITY_BYTES_MAX)):
        raise UsageError(f"{where} on= expected a class of Event with type=, found {shown(kind)}")
    if key is None:
        return None
    if not isinstance(key, str):
        found = "a function" if callable(key) else shown(key)
        raise UsageError(
            f"{where} key= expected a field of {on.__name__}, or a JSON pointer into its data, found {found}: "
            "events start flows where their code is not"
        )
    pointer = key if key.startswith("/") else "/" + key.replace("~", "~0").replace("/", "~1")
    first = pointer.split("/")[1].replace("~1", "/").replace("~0", "~")
    fields = fields_on_the_wire(on)
    if first not in fields and on.model_config.get("extra") != "allow":
        raise UsageError(
            f"{where} key= expected a field of {on.__name__} ({', '.join(sorted(fields))}), found {shown(first)}"
        )
    if any(pointer == place or is_inside(pointer, place) for place in places_of(on)):
        raise UsageError(f"{where} key= {shown(key)} is Sensitive, and keys are shown and searched")
    if not is_name(pointer, KEY_BYTES_MAX) or BAD_ESCAPE.search(pointer):
        raise UsageError(
            f"{where} key= expected a JSON pointer of at most {KEY_BYTES_MAX} printable bytes, found {shown(key)}"
        )
    return pointer


BAD_ESCAPE: Final = re.compile("~(?![01])")


def fields_on_the_wire(model: type[BaseModel]) -> set[str]:
    """The names that the data of `model` may have for its fields."""
    names: set[str] = set()
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        names.add(alias if isinstance(alias, str) else name)
    return names


def faults(error: ValidationError, model: TypeAdapter[Any]) -> list[str]:
    """Each place that does not fit, what was expected there, and what was found (its kind, never its value)."""
    return [f"at /{'/'.join(map(str, where))}: {said}" for where, said in faults_of(error, places_of(model))]
