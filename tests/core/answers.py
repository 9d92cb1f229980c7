"""Short words for flows under test: what the world says to them, and what their journals say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from contracts.messages import Loose
from orchestrator import Context, command, workflow
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.core.terms import Op
from orchestrator.testing import NOON, FlowTester
from orchestrator.workflow import Workflow

Json = Any
O = TypeVar("O")  # noqa: E741  # what a flow returns
Flow: TypeAlias = Machine | FlowTester[Any, Any]

UNDO = command("s", "undo")


def undoes(name: str) -> Loose:
    """An undo that can be told from others."""
    return command("s", f"undo-{name}")


def flow_of(fn: Callable[[Context, int], Op[O]]) -> Workflow[int, O]:
    return workflow(name=fn.__name__, version="1")(fn)


def driven(fn: Callable[[Context, int], Op[O]]) -> FlowTester[int, O]:
    """`fn` begun in a tester: all that it is told is also replayed, and what is withdrawn settles at once."""
    return FlowTester(flow_of(fn), 1)


def bare(fn: Callable[[Context, int], Op[Any]]) -> Machine:
    """`fn` begun in a bare machine: nothing settles unless it is told. Let it go with `evict`."""
    machine = Machine(flow_of(fn).program)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    return machine


def tell(flow: Flow, kind: str, path: str, data: dict[str, Json]) -> None:
    if isinstance(flow, Machine):
        flow.tell(kind, path, data, NOON)
    else:
        flow.tell(kind, path, data)


def done(flow: Flow, *paths: str, value: Json = None) -> None:
    """What was asked at each of `paths`, one after the other, was done."""
    for path in paths:
        tell(flow, "ended", path, {"outcome": "done", "value": value})


def refused(flow: Flow, path: str, code: str = "no") -> None:
    tell(flow, "ended", path, {"outcome": "refused", "error": {"code": code, "detail": ""}})


def unknown(flow: Flow, path: str) -> None:
    tell(flow, "ended", path, {"outcome": "unknown", "error": {"code": "sent", "detail": ""}})


def cancelled(machine: Machine, *, undo: bool = True) -> None:
    tell(machine, "cancel_asked", "", {"by": "ann", "reason": "enough", "undo": undo})


def received(machine: Machine, kind: str, data: Json = None, *, key: str = "") -> None:
    tell(machine, "received", "", {"type": kind, "key": key, "data": data})


def finish(flow: Flow) -> None:
    """Whatever it waits for is done, the oldest first, until it has ended."""
    opened = flow.open
    while opened:
        done(flow, next(iter(opened)))
        opened = flow.open


def open_in(flow: Flow) -> list[str]:
    return list(flow.open)


def undone(journal: Sequence[Fact]) -> list[str]:
    """The paths of what was undone, in the order in which that was asked."""
    return [fact.data["name"] for fact in journal if fact.kind == "asked" and fact.data["kind"] == "undo"]


def said(journal: Sequence[Fact]) -> list[str]:
    """Each fact as its kind and its path, or what it is about."""
    return [f"{fact.kind} {fact.path or fact.data.get('kind', '')}".rstrip() for fact in journal]
