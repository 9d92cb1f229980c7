"""What the races are worth: each flaw that the protocol could have is seen in the order that is named beside it."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import psycopg
import pytest

from tests.cluster import EMBEDDED, OLDEST
from tests.explorer import orders
from tests.explorer.catalogue import RACES
from tests.explorer.ground import Ground
from tests.explorer.mutants import MUTANTS, Edit, Mutant, applied
from tests.explorer.races import Stage

SEARCHED: Final = 300

VERSIONS: Final = [
    pytest.param(EMBEDDED, id="pg18"),
    pytest.param(OLDEST, id="pg15", marks=pytest.mark.proof),
]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("grounds", VERSIONS, indirect=True)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
async def test_a_flaw_is_seen_in_its_order(ground: Ground, mutant: Mutant) -> None:
    """And in the same order nothing is seen when the flaw is not there."""
    race = RACES[mutant.race]
    stage = await Stage.of(race, ground)
    sound = await stage.run(orders.follow(mutant.order))
    assert sound.complaints == [], sound.steps

    if mutant.flawed is not None:
        stage = await Stage.of(mutant.flawed, ground)
    with psycopg.connect(ground.dsn, autocommit=True) as conn, applied(mutant.edits, conn):
        came = await stage.run(orders.follow(mutant.order))
        assert mutant.is_seen_in(came), f"not seen in {came.steps}; {await where_it_is_seen(mutant, stage)}"


async def where_it_is_seen(mutant: Mutant, stage: Stage) -> str:
    """The simplest order in which it is, for whoever has moved a stop; and what else was complained of."""
    seen: list[str] = []
    other: set[str] = set()
    async for came in orders.some(stage.run, programs=stage.programs, at_most=SEARCHED):
        if mutant.is_seen_in(came):
            seen.append(came.order)
        else:
            other |= set(came.complaints)
    return f"seen in {min(seen, key=turns_in, default='none')} and {len(seen)} in all; elsewhere {other}"


def turns_in(order: str) -> int:
    """How often another program goes on."""
    return sum(one != next_one for one, next_one in pairwise(order))


def test_an_edit_that_finds_nothing_or_too_much_is_an_error() -> None:
    edit = Edit("settle", "for no  key update")

    assert edit.of("select 1 for\n  no key update;") == "select 1 ;"
    with pytest.raises(AssertionError, match="0 places"):
        edit.of("select 1 for update;")
    with pytest.raises(AssertionError, match="2 places"):
        edit.of("for no key update; for no key update;")
