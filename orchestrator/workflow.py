"""What makes a function a flow."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from contracts.errors import InputInvalid as InputRefused
from contracts.errors import shown
from contracts.limits import NAME_BYTES_MAX
from orchestrator.core.context import Context, Op, Saga, is_name
from orchestrator.core.errors import InputInvalid, UsageError
from orchestrator.core.machine import Machine

Json = Any
I = TypeVar("I")  # noqa: E741  # what a flow is given
O = TypeVar("O")  # noqa: E741  # what it returns


@dataclass(frozen=True, slots=True)
class Workflow(Generic[I, O]):
    """A flow: a program with a name and a version, and the models of what it is given and returns."""

    name: str
    version: str
    run: Callable[[Context, I], Op[O]]
    input: TypeAdapter[Any]
    output: TypeAdapter[Any]

    async def program(self, machine: Machine, input: Json) -> Json:  # noqa: A002  # an execution's input, everywhere
        """The flow as the machine drives it: one saga around all it does. Raises InputInvalid."""
        try:
            argument = self.input.validate_python(input)
        except ValidationError as error:
            raise InputInvalid(f"the input does not fit flow {self.name}: {faults(error)[0]}") from None
        async with Saga(machine):
            result = await self.run(Context(machine), argument)
        return self.output.dump_python(result, mode="json", warnings=False)

    def checked(self, input: Json) -> Json:  # noqa: A002  # an execution's input, everywhere
        """`input` as it will be recorded. Raises contracts.InputInvalid with every place that does not fit."""
        try:
            return self.input.dump_python(self.input.validate_python(input), mode="json")
        except ValidationError as error:
            raise InputRefused(self.name, faults(error)) from None


def workflow(*, name: str, version: str) -> Callable[[Callable[[Context, I], Op[O]]], Workflow[I, O]]:
    """Make a flow of `async def flow(ctx, input) -> output`; its annotations are its models.

    Raises UsageError when the name, the version or the function's shape cannot be one of a flow.
    """
    for what, word in (("name", name), ("version", version)):
        if not is_name(word) or "@" in word:
            raise UsageError(
                f"workflow {what} {shown(word)}: expected 1 to {NAME_BYTES_MAX} bytes of printable text without @"
            )

    def register(fn: Callable[[Context, I], Op[O]]) -> Workflow[I, O]:
        parameters = list(inspect.signature(fn).parameters)
        if not inspect.iscoroutinefunction(fn) or len(parameters) != 2:
            raise UsageError(f"workflow {name}: expected `async def {fn.__name__}(ctx, input)`")
        hints = get_type_hints(fn)
        takes = hints.get(parameters[1], Any)
        return Workflow(name, version, fn, TypeAdapter(takes), TypeAdapter(hints.get("return", Any)))

    return register


def faults(error: ValidationError) -> list[str]:
    """Each place that does not fit, what was expected there, and what was found (its kind, never its value)."""
    return [
        f"at /{'/'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
        for fault in error.errors(include_url=False, include_input=False)
    ]
