"""Gates: each stop of the scripts is one, and only the explorer's sessions wait there."""

from __future__ import annotations

import re

import psycopg
import pytest

from migrations import runner
from tests.cluster import EMBEDDED
from tests.explorer import orders
from tests.explorer.catalogue import RACES
from tests.explorer.ground import Ground
from tests.explorer.instrument import instrumented, stops, with_gates
from tests.explorer.mutants import replaced
from tests.explorer.races import Stage
from tests.store.world import event, posted

ON_18 = pytest.mark.parametrize("grounds", [EMBEDDED], indirect=True, ids=["pg18"])


def test_a_stop_becomes_a_call_that_names_its_function() -> None:
    script = """
create or replace function waypost.settle(p int) returns void as $$
begin
    perform 1;
    -- stop: rows locked
end $$;
"""

    assert "    perform explorer.stop('settle: rows locked');\nend $$;" in with_gates(script)


BRANCH = """
create function waypost.settle(p int) returns void as $$
begin
    if p < 0 then
        raise exception 'no';
    end if;
    {before}-- Lock it.
    if p > 0 then
        perform lock_it(p);
    end if;
    -- stop: locked
end $$;
"""


def test_a_stop_after_a_branch_is_in_it_since_nothing_happens_when_it_is_passed_by() -> None:
    inside = "lock_it(p);\n        perform explorer.stop('settle: locked');\n    end if;\nend $$;"

    assert inside in with_gates(BRANCH.format(before=""))


def test_a_stop_after_a_branch_and_something_else_is_after_both() -> None:
    after = "lock_it(p);\n    end if;\n    perform explorer.stop('settle: locked');\nend $$;"

    assert after in with_gates(BRANCH.format(before="perform 1;\n    "))
    assert after in with_gates(BRANCH.format(before="if p > 1 then perform 1; end if;\n    "))


def test_nothing_but_stops_is_changed() -> None:
    for script, found in zip(runner.discover(), instrumented(), strict=True):
        less = re.sub(r"\n *perform explorer\.stop\('\w+: [a-z ]+'\);", "", found.sql)
        assert less.startswith(re.sub(r"\n *-- stop: [a-z ]+$", "", script.sql, flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("script", "problem"),
    [("-- stop: it's\n", "a few small words"), ("-- stop: before any\n", "in no function")],
)
def test_a_stop_that_cannot_be_a_call_is_an_error(script: str, problem: str) -> None:
    head = "" if "no function" in problem else "create function waypost.f(a int) returns int as $$\n"

    with pytest.raises(AssertionError, match=problem):
        with_gates(head + script)


@ON_18
@pytest.mark.asyncio(loop_scope="session")
async def test_who_is_not_explored_passes_every_stop(ground: Ground) -> None:
    await ground.explorer()  # holds the gates

    [got] = await posted(ground.conn, event("e1"))

    assert got.outcome == "stored"


@ON_18
@pytest.mark.proof
@pytest.mark.asyncio(loop_scope="session")
async def test_every_stop_of_the_scripts_is_one_of_some_race(ground: Ground) -> None:
    seen: set[str] = set()
    for race in RACES.values():
        stage = await Stage.of(race, ground)
        for order in ("", "1"):
            seen |= {step.partition(" from ")[2] for step in (await stage.run(orders.follow(order))).steps}

    with psycopg.connect(ground.dsn) as conn:
        assert stops(conn) - seen == set()


COLLIDING = """
    create or replace function waypost.event_key(tenant_id int, type text, key text) returns bigint
    language sql immutable parallel safe return 0
"""


@ON_18
@pytest.mark.asyncio(loop_scope="session")
async def test_two_keys_with_one_lock_cost_a_wait_and_nothing_else(ground: Ground) -> None:
    """A hash may collide: an event of one key and the registration of another then wait for each other."""
    race = RACES["events_of_two_keys_that_cross_do_not_deadlock"]
    stage = await Stage.of(race, ground)

    with psycopg.connect(ground.dsn, autocommit=True) as conn, replaced("event_key", COLLIDING, conn):
        async for came in orders.some(stage.run, programs=stage.programs, at_most=30):
            assert came.complaints == [], came.steps
