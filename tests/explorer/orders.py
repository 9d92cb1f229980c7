"""In which orders programs can take their steps: all of them, or a sample that is the same each time.

A run is a walk: at each point some programs can take a step, and one of them is chosen. Who waits for a lock can take
none, so orders that differ only in when somebody asked in vain are one. `every` takes each walk once: it goes back to
the last point where another choice is left, and on from there. Each walk is run from its beginning, since a database
cannot be put back into the middle of two transactions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

Chooser = Callable[[Sequence[int]], int]
"""Given the programs that can take a step (never none), the one that does."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A point of a walk: who could take a step, and who did."""

    among: tuple[int, ...]
    taken: int


class Walk(Protocol):
    """What a run has to say of the order in which it went."""

    @property
    def choices(self) -> Sequence[Choice]: ...


W = TypeVar("W", bound=Walk)
Run = Callable[[Chooser], Awaitable[W]]


def name_of(choices: Sequence[Choice]) -> str:
    """An order as text: the program of each step, `0010111`."""
    return "".join(str(choice.taken) for choice in choices)


def follow(order: str) -> Chooser:
    """The order with this name. A step of who cannot take one is passed over; at the end the first goes on."""
    left = iter(order)

    def choose(among: Sequence[int]) -> int:
        for step in left:
            if int(step) in among:
                return int(step)
        return among[0]

    return choose


class Known:
    """The walks that were run, as a tree: what is known of it need not be run again."""

    def __init__(self) -> None:
        self._among: dict[str, tuple[int, ...]] = {}
        self._over: set[str] = set()
        """Beginnings after which every walk was run; a whole walk is one."""

    def add(self, walk: Walk) -> None:
        name = name_of(walk.choices)
        self._over.add(name)
        for length in range(len(name) - 1, -1, -1):
            self._among[name[:length]] = walk.choices[length].among
            if all(name[:length] + str(n) in self._over for n in self._among[name[:length]]):
                self._over.add(name[:length])

    @property
    def is_all(self) -> bool:
        """Whether every walk was run."""
        return "" in self._over

    def has(self, choose: Chooser) -> bool:
        """Whether the walk that `choose` would take was run."""
        begin = ""
        while begin in self._among:
            begin += str(choose(self._among[begin]))
        return begin in self._over

    def first_unknown(self, pick: Callable[[Sequence[int]], int], *, again: bool = False) -> Chooser:
        """A walk that was not run; `pick` chooses where there is a choice. There must be one; or `again`, one that was
        run: who can take a step may hang on when a lock was let go, and then not all come to what is left.
        """
        begin = ""

        def choose(among: Sequence[int]) -> int:
            nonlocal begin
            left = [n for n in among if begin + str(n) not in self._over]
            taken = pick(left or (among if again else left))
            begin += str(taken)
            return taken

        return choose


async def every(run: Run[W]) -> AsyncIterator[W]:
    """Run each order once, in the order of their names."""
    known = Known()
    while not known.is_all:
        walk = await run(known.first_unknown(min))
        known.add(walk)
        yield walk


async def some(run: Run[W], *, programs: int, at_most: int, seed: int = 1) -> AsyncIterator[W]:
    """Run every cut-in, then random orders until `at_most` were run, or all; none twice, if that can be helped."""
    known, count = Known(), 0
    for choose in cut_ins(programs, known):
        walk = await run(choose)
        known.add(walk)
        count += 1
        yield walk
    chance = random.Random(seed)  # an order, not a secret
    while count < at_most and not known.is_all:
        walk = await run(known.first_unknown(chance.choice, again=True))
        known.add(walk)
        count += 1
        yield walk


def cut_ins(programs: int, known: Known) -> Iterator[Chooser]:
    """Every order in which one program is interrupted once, at any place, if it is not known when its turn comes.

    One program takes some steps, then another all that it can, then the first goes on.
    """
    for ranks in itertools.permutations(range(programs)):
        for steps in itertools.count():
            rehearsal = Interrupted(ranks, after=steps)
            if not known.has(rehearsal):
                rehearsal = Interrupted(ranks, after=steps)
                yield rehearsal
            if rehearsal.steps < steps:
                break


class Interrupted:
    """The first of `ranks` takes `after` steps; then whoever stands first in the rest goes, and it comes last.

    `steps`: how many it took before it was over or had to wait.
    """

    def __init__(self, ranks: Sequence[int], *, after: int) -> None:
        self._first, *self._rest = ranks
        self._after = after
        self._alone = True
        self.steps = 0

    def __call__(self, among: Sequence[int]) -> int:
        self._alone = self._alone and self.steps < self._after and self._first in among
        if self._alone:
            self.steps += 1
            return self._first
        return next(n for n in [*self._rest, self._first] if n in among)
