"""The flows that a process holds, found by importing modules."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from contracts.errors import UnknownFlow, WaypostError
from orchestrator.fingerprint import fingerprint
from orchestrator.store.definitions import Definition
from orchestrator.workflow import Workflow

Flow = Workflow[Any, Any]


class FlowsInvalid(WaypostError):
    """A module with flows or contracts cannot be used; the message names it and says why."""

    code = "flows-invalid"


class Flows:
    """Flows by name and version. Of several versions, the one registered last is what new executions get."""

    def __init__(self, flows: Sequence[Flow] = ()) -> None:
        self._flows: dict[tuple[str, str], Flow] = {}
        self._newest: dict[str, Flow] = {}
        for flow in flows:
            self.add(flow)

    def __iter__(self) -> Iterator[Flow]:
        return iter(self._flows.values())

    def __len__(self) -> int:
        return len(self._flows)

    def add(self, flow: Flow) -> None:
        """Raises FlowsInvalid when another flow has this name and version."""
        key = (flow.name, flow.version)
        if self._flows.setdefault(key, flow) is not flow:
            raise FlowsInvalid(f"two flows are called {flow.name}@{flow.version}; give one another version")
        self._newest[flow.name] = flow

    def get(self, name: str, version: str | None = None) -> Flow:
        """Raises UnknownFlow, which names what is known."""
        found = self._newest.get(name) if version is None else self._flows.get((name, version))
        if found is None:
            asked = name if version is None else f"{name}@{version}"
            raise UnknownFlow(asked, [f"{flow.name}@{flow.version}" for flow in self])
        return found

    def names(self) -> list[tuple[str, str]]:
        """Name and version of each."""
        return list(self._flows)

    def definitions(self) -> list[Definition]:
        """Each as the database knows it, in the order in which they were registered."""
        return [
            Definition(
                flow.name,
                flow.version,
                None if flow.on is None else flow.on.type_,
                flow.key,
                fingerprint(flow.run, flow.mutex),
                flow.deadline,
                flow.sensitive,
            )
            for flow in self
        ]


def load(modules: Sequence[str]) -> Flows:
    """The flows that `modules` define or import, the working directory being on the path.

    Raises FlowsInvalid when a module cannot be imported, or has no flow.
    """
    flows = Flows()
    for name in modules:
        found: list[Flow] = [thing for thing in vars(imported(name)).values() if isinstance(thing, Workflow)]
        if not found:
            raise FlowsInvalid(f"module {name}: expected at least one @workflow, found none")
        for flow in found:
            flows.add(flow)
    return flows


def imported(name: str) -> ModuleType:
    """The module, the working directory being on the path. Raises FlowsInvalid when it cannot be imported."""
    here = os.getcwd()  # noqa: PTH109  # sys.path holds text
    if here not in sys.path:
        sys.path.insert(0, here)
    if name.endswith(".py") or "/" in name:
        hint = name.removesuffix(".py").strip("./").replace("/", ".")
        raise FlowsInvalid(f"module {name}: expected the name of a module such as {hint}, found a path")
    try:
        return importlib.import_module(name)
    except Exception as error:
        problem = f"module {name} cannot be imported: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            problem += f"; looked in {here} and on Python's path"
        raise FlowsInvalid(problem) from error
