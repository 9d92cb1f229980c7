"""Executions that wait for each other: each in a random world of its own, all with the same mutexes.

A mutex is given as the database gives it: to whoever's asking was committed first, once nobody has it, and the grant is
mail, which may be read late. What is let go is what the machines say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from hypothesis import strategies as st

from orchestrator.core.fact import Fact
from orchestrator.core.follows import LetGo
from orchestrator.core.mutexes import FLOW
from orchestrator.core.status import TERMINAL
from orchestrator.testing import NOON
from tests.core.oracle import ENDS
from tests.core.programs import Node, crowded_trees
from tests.core.world import MOVES_MAX, World


@dataclass(frozen=True, slots=True)
class House:
    """A program; one with a `mutex` has it as a whole."""

    tree: Node
    mutex: str | None = None


@dataclass(slots=True)
class Row:
    """An ask for a mutex, by the number of the execution and the path."""

    number: int
    path: str
    key: tuple[bool, str]
    """The mutexes of flows are others than those of steps."""
    granted: bool = False


class Neighbour(World):
    """The world of one execution of a town. It reads a grant only when there is one."""

    town: Town
    number: int

    def _turns(self) -> list[str]:
        return [path for path in self.machine.open if (self.number, path) in self.town.mail]

    def _write(self) -> None:
        let_go, written = self.machine.follows.of(LetGo), len(self.journal)
        super()._write()
        self.town.committed(self.number, self.journal[written:], let_go)

    def _append(self, fact: Fact) -> None:
        super()._append(fact)
        self.town.committed(self.number, [fact], [])

    def move(self) -> None:
        """One move; what is over is committed, and so is all when the world is calm: others may wait for it."""
        self._move()
        if self.is_over or self.is_calm:
            self.commit()

    @property
    def is_over(self) -> bool:
        return self.machine.status in TERMINAL and not self.is_stopped


@dataclass(slots=True)
class Town:
    """`log` has the facts of all executions in the order of their commits, each with the number of its execution;
    `rows` are the asks for mutexes in the order of their turns; `mail` are grants that were given.
    """

    houses: Sequence[House]
    choices: bytes
    at: datetime = NOON
    log: list[tuple[int, Fact]] = field(default_factory=list[tuple[int, Fact]])
    rows: list[Row] = field(default_factory=list[Row])
    mail: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    worlds: list[Neighbour] = field(default_factory=list[Neighbour])

    def run(self) -> Town:
        """Every execution to its end. Fails when one waits for what never comes."""
        self.worlds = [self._world(number, house) for number, house in enumerate(self.houses)]
        try:
            for world in self.worlds:
                world.begin()
            for _ in range(MOVES_MAX):
                left = [world for world in self.worlds if not world.is_over]
                if not left:
                    break
                for world in left:
                    self._move(world)
        finally:
            for world in self.worlds:
                world.machine.evict()
        left = [world.number for world in self.worlds if not world.is_over]
        assert not left, f"{left} wait for ever; {self.rows}"
        return self

    def _world(self, number: int, house: House) -> Neighbour:
        share = len(self.choices) // len(self.houses)
        world = Neighbour(house.tree, self.choices[number * share :][:share], mutex=house.mutex)
        world.town, world.number = self, number
        return world

    def _move(self, world: Neighbour) -> None:
        """One or more moves of one world. There is one clock."""
        for _ in range(1 + world.pick(4)):
            if not world.is_over:
                world.at = max(self.at, world.at)
                world.move()
                self.at = max(self.at, world.at)

    def committed(self, number: int, facts: Sequence[Fact], let_go: Sequence[LetGo]) -> None:
        """What the database does with a turn."""
        self.log += [(number, fact) for fact in facts]
        for fact in facts:
            if fact.kind == "asked" and fact.data["kind"] == "mutex":
                self.rows.append(Row(number, fact.path, (fact.path == FLOW, fact.data["args"]["key"])))
        gone = {(number, one.path) for one in let_go}
        over = any(fact.kind in ENDS for fact in facts)
        self.rows = [
            row
            for row in self.rows
            if (row.number, row.path) not in gone and not (over and row.number == number)
        ]
        self._give()

    def _give(self) -> None:
        taken = {row.key for row in self.rows if row.granted}
        for row in self.rows:
            if row.key not in taken:
                taken.add(row.key)
                row.granted = True
                self.mail.add((row.number, row.path))


def towns() -> st.SearchStrategy[list[House]]:
    """Two or three executions; of every fourth flow one at a time goes on."""
    keys = st.sampled_from([None, None, None, "m"])
    return st.lists(st.builds(House, tree=crowded_trees(), mutex=keys), min_size=2, max_size=3)
