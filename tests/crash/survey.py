"""Which points there are: all that deployments pass when nothing is wrong, and what they pass after a death."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from tests.crash.desk import CLIENT
from tests.crash.outcome import Outcome
from tests.crash.points import Point
from tests.crash.scenarios import REFUSED, Place, Scenario
from tests.crash.stand import Stand

T = TypeVar("T")

ORDERS_MAX: Final = 5
"""Orders that may go another way, on a slow machine, than to the point where a process is to die."""

COMMIT: Final = "orchestrator.store.commits.COMMIT"
DEATHS: Final = (
    Point("worker", "commit", COMMIT, "ended reserve", "before"),
    Point("relay", "send", "relay.wire.Wire._post", "bank.charge", "sent"),
    Point("stock", "commit", "receiver.memory.RUN", "stock.reserve", "after"),
    Point("receiver", "commit", "receiver.inbox.POST", "stock.reserve.done", "after"),
)
"""After each of these, whoever takes over passes points that it would not pass else."""


@dataclass(frozen=True, slots=True)
class Survey:
    places: Sequence[Place]
    outcomes: Mapping[Scenario, Outcome]
    """What becomes of the orders when nobody dies."""


async def survey(
    stands: Sequence[Stand], scenarios: Sequence[Scenario], *, deaths: Sequence[Point]
) -> Survey:
    """Make an order of each scenario; end every part and let it come back; let each of `deaths` happen."""
    outcomes: dict[Scenario, Outcome] = {}
    found: dict[Scenario, list[Place]] = {}
    first = stands[0]
    at_start = [Place(point, REFUSED, provoke=signal.SIGKILL) for point in points(first)]

    async def make(stand: Stand, scenario: Scenario) -> None:
        before = marks(stand)
        outcomes[scenario] = await stand.order(scenario)
        found[scenario] = [Place(point, scenario) for point in points(stand, before)]

    await shared(stands, scenarios, make)
    before = marks(first)
    await first.restart()
    at_end = [Place(point, REFUSED, provoke=signal.SIGTERM) for point in points(first, before)]
    places = distinct([*(place for one in scenarios for place in found[one]), *at_start, *at_end])

    later: list[Place] = []

    async def die(stand: Stand, death: Point) -> None:
        before = marks(stand)
        await stand.order(REFUSED, Place(death, REFUSED))
        later.extend(
            Place(point, REFUSED, after=death) for point in points(stand, before) if point.part == death.part
        )

    await shared(stands, deaths, die)
    places = distinct([*places, *later])
    lost = dict.fromkeys(replace(place, point=point) for place in places for point in place.point.lost())
    return Survey([*places, *lost], outcomes)


def marks(stand: Stand) -> dict[str, int]:
    """How many points each part has passed."""
    return {part: len(stand.desk.passed(part)) for part in (*stand.parts, CLIENT)}


def points(stand: Stand, after: Mapping[str, int] | None = None) -> Iterator[Point]:
    """The points that were passed after those marks."""
    for part in (*stand.parts, CLIENT):
        yield from stand.desk.passed(part)[(after or {}).get(part, 0) :]


def distinct(places: Iterable[Place]) -> list[Place]:
    """The first way to each point."""
    first: dict[Point, Place] = {}
    for place in places:
        first.setdefault(place.point, place)
    return list(first.values())


async def crash(
    stands: Sequence[Stand],
    places: Sequence[Place],
    expected: Mapping[Scenario, Outcome],
    *,
    died: Counter[str] | None = None,
    goes_on: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Have a process die at each of `places`; what was not as if nobody had died, in words.

    `died` counts the deaths, by when; `goes_on` is told how far it is. A stand on which an order did not end well is
    used no more.
    """
    wrong: list[str] = []
    count = Counter[str]() if died is None else died

    async def die(stand: Stand, place: Place) -> None:
        for _ in range(ORDERS_MAX):
            try:
                found = await stand.order(place.scenario, place)
            except AssertionError as error:
                wrong.append(f"{place}: {error}")
                raise Unusable from error
            wrong.extend(f"{place}: {it}" for it in place.scenario.compare(expected[place.scenario], found))
            if stand.desk.fired(place.point):
                count[f"{place.point.when} {place.point.door}"] += 1
                goes_on(f"{count.total()} of {len(places)}, {len(wrong)} wrong")
                return
        wrong.append(f"{place}: not passed by {ORDERS_MAX} orders")

    left = await shared(stands, places, die)
    return wrong + [f"{place}: no stand is left to try it on" for place in left]


class Unusable(Exception):
    """Nothing more can be done on this stand."""


async def shared(
    stands: Sequence[Stand], work: Iterable[T], do: Callable[[Stand, T], Awaitable[None]]
) -> list[T]:
    """Do all of `work`, each on the next stand that is free; what is left when no stand is usable any more."""
    left = deque(work)

    async def use(stand: Stand) -> None:
        try:
            while left:
                await do(stand, left.popleft())
        except Unusable:
            return

    await asyncio.gather(*(use(stand) for stand in stands))
    return list(left)
