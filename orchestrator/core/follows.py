"""What follows from facts that are new, besides them: the commit that stores them does that too."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias, TypeVar

from orchestrator.core.ask import Ask


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A message, or a task, that nobody waits for any more, and the position of the fact that says so."""

    path: str
    asked_at: datetime
    position: int
    task: bool = False


@dataclass(frozen=True, slots=True)
class ClosedWait:
    """A wait for an event that is over, and the position of the fact that says so."""

    ask: Ask
    position: int


@dataclass(frozen=True, slots=True)
class SentAgain:
    """A message that is made again for the same ask, and the position and time of the fact that says so."""

    ask: Ask
    attempt: int
    position: int
    at: datetime


@dataclass(frozen=True, slots=True)
class LeftChild:
    """A child that is told to end, and the position of the fact that says so."""

    path: str
    execution: str
    position: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """A mutex that was asked for at `path`, and that nobody waits for or needs any more: so says the fact at
    `position`. `asked` is the position of its asking, where that may be as new.
    """

    path: str
    asked: int
    position: int


Following: TypeAlias = TakenBack | ClosedWait | SentAgain | LeftChild | LetGo
F = TypeVar("F", TakenBack, ClosedWait, SentAgain, LeftChild, LetGo)


class Follows:
    """All of that, in the order in which it was said. Most turns have none, so they look here once."""

    __slots__ = ("_said",)

    def __init__(self) -> None:
        self._said: list[Following] = []

    def __bool__(self) -> bool:
        return bool(self._said)

    def add(self, following: Following) -> None:
        self._said.append(following)

    def of(self, kind: type[F]) -> list[F]:
        """What there is of one kind."""
        return [one for one in self._said if isinstance(one, kind)]

    def up_to(self, position: int) -> Follows:
        """What follows from facts up to `position`."""
        found = Follows()
        found._said = [one for one in self._said if one.position <= position]
        return found

    def forget_beyond(self, position: int) -> None:
        """What follows from facts behind `position` does not count."""
        self._said = [one for one in self._said if one.position <= position]

    def clear(self) -> None:
        """It is done."""
        self._said.clear()
