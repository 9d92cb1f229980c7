"""Races: programs that run at once, what may come of them, and the stage on which an order of theirs is run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import psycopg

from orchestrator.store.database import Connection
from tests.explorer.ground import Ground
from tests.explorer.orders import Choice, Chooser, name_of
from tests.explorer.sessions import Explorer, Program


@dataclass(frozen=True, slots=True)
class Ending:
    """What programs came to in one order: by name what each returned, and the names in the order of their ends."""

    results: dict[str, Any]
    finished: list[str]

    @property
    def first(self) -> str:
        return self.finished[0]


Look = Callable[[Connection, Ending], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Scene:
    """Programs in the world that was made for them, and how to say in a few words what came of them.

    `before`: a statement that is run before each order, when the world has been put back.
    """

    programs: dict[str, Program]
    look: Look
    before: str = ""


Build = Callable[[Connection], Awaitable[Scene]]


@dataclass(frozen=True, slots=True)
class Race:
    """A scene, and all that may come of it: each outcome does, in some order. `waits`: so does a lock wait.

    `sampled`: it has more orders than can be run.
    """

    name: str
    build: Build
    outcomes: frozenset[str]
    waits: bool
    sampled: bool

    def __str__(self) -> str:
        return self.name


REGISTERED: Final[dict[str, Race]] = {}
"""See `tests.explorer.catalogue`."""


def race(*outcomes: str, waits: bool = True, sampled: bool = False) -> Callable[[Build], Race]:
    """The race that a function builds. Its name is a sentence about it."""

    def register(build: Build) -> Race:
        made = Race(build.__name__, build, frozenset(outcomes), waits, sampled)
        assert made.name not in REGISTERED, made.name
        REGISTERED[made.name] = made
        return made

    return register


@dataclass(frozen=True, slots=True)
class Came:
    """One order of a race, and what came of it. `complaints`: what should not have."""

    choices: Sequence[Choice]
    outcome: str
    complaints: list[str]
    waited: bool
    steps: list[str]

    @property
    def order(self) -> str:
        return name_of(self.choices)


class Stage:
    """A race on its ground, run again and again, each time from the same beginning."""

    def __init__(self, race: Race, scene: Scene, ground: Ground, explorer: Explorer) -> None:
        self._race = race
        self._scene = scene
        self._ground = ground
        self._explorer = explorer
        self._names = list(scene.programs)

    @classmethod
    async def of(cls, race: Race, ground: Ground) -> Self:
        """The stage for `race`; what was on the ground before is removed."""
        explorer = await ground.explorer()
        ground.clear()
        scene = await race.build(ground.conn)
        ground.keep()
        return cls(race, scene, ground, explorer)

    @property
    def programs(self) -> int:
        return len(self._names)

    async def run(self, choose: Chooser) -> Came:
        """Run the race in one order."""
        self._ground.restore(self._scene.before)
        walk = await self._explorer.run(list(self._scene.programs.values()), choose)
        results = dict(zip(self._names, walk.results, strict=True))
        ending = Ending(results, [self._names[number] for number in walk.finished])
        complaints = [
            f"{name}: {said(what)}" for name, what in results.items() if isinstance(what, Exception)
        ]
        outcome = "an error" if complaints else await self._scene.look(self._ground.conn, ending)
        if not complaints and outcome not in self._race.outcomes:
            complaints.append(f"outcome: {outcome}")
        if walk.waited and not self._race.waits:
            complaints.append("it waited for a lock")
        complaints += self._ground.broken()
        steps = [f"{self._names[number]} from {stop}" for number, stop in walk.steps]
        return Came(walk.choices, outcome, complaints, bool(walk.waited), steps)


def said(error: Exception) -> str:
    """An error in one line, with the code that the database gave it."""
    code = error.sqlstate if isinstance(error, psycopg.Error) else None
    return f"{code or type(error).__name__}: {error}".partition("\n")[0]
