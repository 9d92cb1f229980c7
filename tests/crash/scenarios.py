"""The orders that are made, what may come of them, and where they are killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.crash.contracts import Carrier
from tests.crash.outcome import (
    Outcome,
    differences,
    differences_in_any_order,
    differences_in_effect,
    told_once,
)
from tests.crash.points import Point


@dataclass(frozen=True, slots=True)
class Scenario:
    """An order, and how its outcome is compared with that of a run without a crash."""

    name: str
    flow: str = "parcel"
    carrier: Carrier = Carrier.TAKES
    busy: bool = False
    jammed: bool = False
    announced: bool = False
    """An event starts it, not a command."""
    collected: bool = False
    """An event says so."""
    cancelled: bool = False
    """A person cancels it in its nap."""
    orphaned: bool = False
    """What it waits for came before it, and is offered again by a person."""
    approved: bool = False
    """A person decides about it."""
    once: str = ""
    """The type of a command that must not leave twice."""
    compare: Callable[[Outcome, Outcome], list[str]] = differences


REFUSED: Final = Scenario("refused", carrier=Carrier.REFUSES)
"""All that was done is undone."""
BUSY: Final = Scenario("busy", busy=True)
"""Services say first that they have no time; then all goes well."""
JAMMED: Final = Scenario("jammed", carrier=Carrier.REFUSES, jammed=True)
"""An undo cannot be done: a person does it."""
GONE: Final = Scenario("gone", carrier=Carrier.GONE, compare=differences_in_effect)
"""An endpoint says that it is closed for good."""
NOTICE: Final = Scenario("notice", flow="notice", once="customer.tell", compare=told_once)
"""A command that is never sent twice."""
TOGETHER: Final = Scenario("together", flow="together", collected=True, compare=differences_in_any_order)
"""Branches, whose facts come in any order, and events."""
CANCELLED: Final = Scenario("cancelled", flow="cancelled", cancelled=True, compare=differences_in_any_order)
"""A person cancels it."""
PICKUP: Final = Scenario("pickup", flow="pickup", announced=True)
"""An event starts it."""
BOOKED: Final = Scenario("booked", flow="booked")
"""Its application writes a table of its own in the commits of the journal."""
FAMILY: Final = Scenario("family", flow="family")
"""It has children: one ends, and one is told to."""
SORTING: Final = Scenario("sorting", flow="sorting")
"""It hears an event of its own."""
MILLED: Final = Scenario("milled", flow="milled")
"""A worker of queues does it, while it has a mutex."""
RETRIEVED: Final = Scenario("retrieved", flow="retrieved", orphaned=True)
"""An event that nobody waited for is offered again."""
ASSORTED: Final = Scenario("assorted", flow="assorted", approved=True, compare=differences_in_any_order)
"""It asks for all else that a flow may ask for."""

SCENARIOS: Final = (
    REFUSED, BUSY, JAMMED, GONE, NOTICE, TOGETHER, CANCELLED, PICKUP, BOOKED, FAMILY, SORTING, MILLED, RETRIEVED,
    ASSORTED,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A point, and how it is passed: in which order, after which signal to its part in the middle of that order,
    or after which other death.
    """

    point: Point
    scenario: Scenario
    provoke: signal.Signals | None = None
    after: Point | None = None

    def __str__(self) -> str:
        return f"{self.point}, {self.scenario.name}" + (f", after {self.after}" if self.after else "")
