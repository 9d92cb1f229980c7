"""Every race of the protocol: in every order on both versions of PostgreSQL, and in some of them each time."""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

from tests.cluster import EMBEDDED, OLDEST
from tests.evidence import Evidence
from tests.explorer import orders
from tests.explorer.catalogue import RACES
from tests.explorer.ground import Ground
from tests.explorer.races import Race, Stage

FEW: Final = 10
MANY: Final = 400
"""Of a race that has more than ten thousand."""

EXTENTS: Final = [
    pytest.param(EMBEDDED, False, id="pg18-some"),
    pytest.param(EMBEDDED, True, id="pg18-every", marks=pytest.mark.proof),
    pytest.param(OLDEST, True, id="pg15-every", marks=pytest.mark.proof),
]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("grounds", "in_full"), EXTENTS, indirect=["grounds"])
@pytest.mark.parametrize("race", RACES.values(), ids=str)
async def test_whatever_the_order_what_was_promised_holds(
    ground: Ground, race: Race, evidence: Evidence, *, in_full: bool
) -> None:
    stage = await Stage.of(race, ground)
    if in_full and not race.sampled:
        walks = orders.every(stage.run)
    else:
        walks = orders.some(stage.run, programs=stage.programs, at_most=MANY if in_full else FEW)
    seen: Counter[str] = Counter()
    waited = 0

    async for came in walks:
        assert came.complaints == [], f"in the order {came.order}: {came.steps}"
        seen[came.outcome] += 1
        waited += came.waited
        evidence.goes_on(f"{seen.total()} orders")

    assert bool(waited) == race.waits, "a lock wait"
    if in_full:
        assert set(seen) == race.outcomes
        extent = "sampled" if race.sampled else "all there are"
        evidence.did(f"{seen.total()} orders, {extent}, {waited} with a lock wait: {dict(seen)}")
