"""Events that an execution has got and that nothing in it has taken yet."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.core.fact import Fact


class Buffer:
    """`received` facts in the order of the journal. Each is taken by one wait only, the oldest of its type and
    key first.
    """

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events: dict[int, Fact] = {}

    def __iter__(self) -> Iterator[Fact]:
        return iter(self.events.values())

    def add(self, fact: Fact) -> None:
        self.events[fact.position] = fact

    def take(self, position: int) -> Fact | None:
        """The event that was received at `position`; None when it is not here (any more)."""
        return self.events.pop(position, None)
