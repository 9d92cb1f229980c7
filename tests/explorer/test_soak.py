"""Chance against the protocol: nothing is broken in the end, and nothing was in between."""

from __future__ import annotations

import random
from typing import Final

import psycopg
import pytest

from tests.cluster import EMBEDDED, OLDEST
from tests.evidence import Evidence
from tests.explorer.soak import Storm
from tests.invariants import broken
from tests.store.world import rows

HAPPENS: Final = (
    "commits",
    "commits looked up",
    "commits not matched",
    "connections cut",
    "claims expired",
    "ghosts that wrote nothing",
    "mail conflict",
    "mail duplicate",
    "mail stored",
    "relay died",
    "sent",
    "settled",
    "settled, no match",
    "start conflict",
    "start exists",
    "start started",
    "taken back",
    "taken over",
)
"""What a soak of a minute cannot be without."""

SOAKS: Final = [
    pytest.param(EMBEDDED, 2.0, id="pg18-for a moment"),
    pytest.param(EMBEDDED, 60.0, id="pg18-for a minute", marks=pytest.mark.proof),
    pytest.param(OLDEST, 60.0, id="pg15-for a minute", marks=pytest.mark.proof),
]


@pytest.mark.parametrize(("cluster", "seconds"), SOAKS, indirect=["cluster"])
async def test_a_storm_of_everything_with_deaths_breaks_nothing(
    dsn: str, evidence: Evidence, seconds: float
) -> None:
    storm = Storm(dsn, seconds, random.Random(1))  # a storm, not a secret

    await storm.run()

    if seconds > 10:
        evidence.did(f"{dict(sorted(storm.done.items()))}")
    assert storm.complaints == []
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        assert await broken(conn, scripted=True) == []
        once = await rows(conn, "select message_id from waypost.outbox where at_most_once")
        assert [message for (message,) in once if storm.tries[message] > 1] == []
        withdrawn = await rows(conn, "select message_id from waypost.outbox where state = 'withdrawn'")
        assert [message for (message,) in withdrawn if message in storm.reached] == []
    assert storm.done["commits"] > 0
    if seconds > 10:
        assert [what for what in HAPPENS if not storm.done[what]] == []
