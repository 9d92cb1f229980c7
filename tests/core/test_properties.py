"""Random programs in random worlds: what is true of every journal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final
from zlib import crc32

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from orchestrator import seconds
from orchestrator.core.errors import error_in
from orchestrator.core.fact import BYSTANDERS, PRODUCED, Fact
from orchestrator.core.machine import Machine
from orchestrator.core.path import name_at
from orchestrator.core.status import TERMINAL
from orchestrator.core.waiting import open_in
from orchestrator.testing import NOON
from tests.core.holders import Holders
from tests.core.oracle import ENDS, Branches, Children, Events, Undoing, asker_of
from tests.core.programs import TOTAL, WITHIN_RETRY_SECONDS, Node, Program, patient_trees, trees, tried_trees
from tests.core.town import House, Town, towns
from tests.core.world import ENDS_OF_CHILDREN, OUTCOMES, World, state
from tests.evidence import Evidence

EXAMPLES: Final = 75
EXAMPLES_OF_TOWNS: Final = 30
EXAMPLES_IN_PROOF: Final = 5_000
"""Of each property. Always the same ones: a build does not fail by chance."""

PARTS: Final = 2
"""In which a proof searches them, side by side."""

Property = Callable[[Any, bytes], None]


@dataclass(frozen=True, slots=True)
class Worlds:
    """Programs, and what is true of each of them in every world, of which `examples` are tried each time."""

    programs: st.SearchStrategy[Any]
    examples: int = EXAMPLES
    properties: list[Property] = field(default_factory=list[Property])

    def hold(self, holds: Property) -> Callable[..., None]:
        self.properties.append(holds)
        return searched(holds, self.programs, examples=self.examples)


WORLDS: Final = {
    "world": Worlds(trees()),
    "order": Worlds(patient_trees()),
    "trial": Worlds(tried_trees()),
    "town": Worlds(towns(), examples=EXAMPLES_OF_TOWNS),
}
in_every_world, in_every_order, in_every_trial, in_every_town = (worlds.hold for worlds in WORLDS.values())


def searched(holds: Property, programs: st.SearchStrategy[Any], *, examples: int) -> Callable[..., None]:
    search = settings(max_examples=examples, deadline=None, derandomize=True, database=None, print_blob=False)
    return search(given(tree=programs, choices=st.binary(min_size=120, max_size=120))(holds))


def what_follows(journal: Sequence[Fact], length: int) -> tuple[list[Fact], bool]:
    """What follows the first `length` facts of `journal` without further input (what the core itself decides is
    none), and whether a worker died on the way.
    """
    unfit = {fact.path for fact in journal if "unfit" in fact.data and fact.kind == "asked"}
    found: list[Fact] = []
    died = False
    for fact in journal[length:]:
        decided = fact.kind == "ended" and ("of" in fact.data or fact.path in unfit or is_lost(fact))
        if fact.kind in BYSTANDERS:
            died = died or fact.kind == "orphaned"
        elif fact.kind in PRODUCED or decided:
            found.append(fact)
        else:
            break
    return found, died


def is_lost(fact: Fact) -> bool:
    return error_in(fact.data).get("code") == "worker-lost"


def what(fact: Fact) -> tuple[Any, ...]:
    return (*fact.says(), *(fact.data.get(name) for name in ("args", "undo", "known", "outcome", "of")))


@in_every_world
def test_every_prefix_of_a_journal_replays_to_the_facts_that_followed(tree: Node, choices: bytes) -> None:
    world = World(tree, choices).run()

    for length in range(1, len(world.journal) + 1):
        machine = world.new_machine()
        machine.replay(world.journal[:length], complete=False)
        machine.evict()

        followed, died = what_follows(world.journal, length)
        new = list(map(what, machine.new))
        if died:  # what follows from a death is not said before it
            assert new == list(map(what, followed))[: len(new)]
        else:
            assert new == list(map(what, followed))


@in_every_world
def test_what_a_journal_says_is_open_is_what_its_program_waits_for(tree: Node, choices: bytes) -> None:
    world = World(tree, choices).run()

    for length in {1 + byte % len(world.journal) for byte in choices[-4:]}:
        machine = world.new_machine()
        machine.replay(world.journal[:length], complete=False)
        machine.evict()

        said = open_in([*world.journal[:length], *machine.new])
        waits = {
            path for path, (_, ask) in machine.open.items() if not (machine.is_held(path) or ask.overdue)
        }
        assert {ask.path for ask in said.asks} == waits
        assert {ask.path for ask in said.settling} >= set(
            machine.settling()
        )  # who would hold, it cannot know


@in_every_world
def test_a_whole_journal_replays_to_the_same_state_also_when_read_back_as_text(
    tree: Node, choices: bytes
) -> None:
    world = World(tree, choices).run()
    read = [Fact(f.position, f.kind, f.path, json.loads(f.text or ""), f.at) for f in world.journal]

    for journal in (world.journal, read):
        machine = world.new_machine()
        machine.replay(journal)
        machine.evict()

        assert state(machine, world.at) == state(world.machine, world.at)
        assert (machine.undoing.stands, machine.result is None) == (
            world.machine.undoing.stands,
            world.machine.result is None,
        )


@in_every_world
def test_what_a_program_draws_is_the_same_in_every_replay(tree: Node, choices: bytes) -> None:
    world = World(tree, choices).run()

    machine = world.new_machine()
    machine.replay(world.journal)

    assert world.program.drawn == world.drawn


@in_every_world
def test_positions_and_times_only_grow_and_no_path_is_used_twice(tree: Node, choices: bytes) -> None:
    journal = World(tree, choices).run().journal
    seen = [fact.at for fact in journal if fact.kind not in BYSTANDERS]

    asked = [fact.path for fact in journal if fact.kind == "asked"]

    assert [fact.position for fact in journal] == list(range(1, len(journal) + 1))
    assert seen == sorted(seen)
    assert len(asked) == len(set(asked))


@in_every_world
def test_a_path_says_where_in_the_program_something_is_whatever_the_outcomes(
    tree: Node, choices: bytes
) -> None:
    world = World(tree, choices).run()
    asked = [fact for fact in world.journal if fact.kind == "asked" and fact.data["kind"] != "undo"]

    for fact in asked:
        said = asker_of(fact)
        assert said is None or said[0] == fact.path
    machine = world.new_machine()
    machine.replay(world.journal)
    assert {fact.path for fact in asked} <= world.program.expected


@in_every_world
def test_undo_runs_once_one_at_a_time_after_settling_in_reverse_for_exactly_what_may_stand(
    tree: Node, choices: bytes
) -> None:
    world = World(tree, choices).run()

    Undoing().read(world.journal)


@in_every_world
def test_a_child_that_nobody_waits_for_any_more_is_told_to_end_once(tree: Node, choices: bytes) -> None:
    world = World(tree, choices).run()

    told = [(one.path, one.execution, one.position) for one in world.left]
    assert sorted(told) == sorted(Children().read(world.journal).told)


@in_every_world
def test_what_is_begun_on_its_own_is_another_execution_each_time(tree: Node, choices: bytes) -> None:
    journal = World(tree, choices).run().journal
    begun = [fact.data.get("args") for fact in journal if fact.data.get("kind") in ("child", "start")]
    ids = [args["execution"] for args in begun if args and args["key"] is None]

    assert len(ids) == len(set(ids))


@in_every_world
def test_an_event_is_given_once_the_oldest_first_to_whoever_waited_longest(
    tree: Node, choices: bytes
) -> None:
    world = World(tree, choices).run()

    Events().read(world.journal)


@in_every_world
def test_a_branch_is_told_to_end_once_and_a_fork_is_joined_once_after_all_its_branches(
    tree: Node, choices: bytes
) -> None:
    world = World(tree, choices).run()

    Branches().read(world.journal)


@in_every_world
def test_a_finished_execution_has_nothing_open(tree: Node, choices: bytes) -> None:
    world = World(tree, choices).run()
    machine: Machine = world.machine

    assert [fact.kind for fact in world.journal if fact.kind in ENDS] == [world.journal[-1].kind]
    assert (machine.open, machine.next_due(), machine.runnable(), bool(machine.undoing)) == (
        {},
        None,
        [],
        False,
    )


@in_every_trial
def test_what_is_tried_at_most_once_is_never_tried_again(tree: Node, choices: bytes) -> None:
    world = World(tree, choices).run()
    journal = world.journal
    once = {fact.path for fact in journal if fact.data.get("effect") == "at_most_once"}

    assert [fact for fact in journal if fact.kind == "attempted" and fact.path in once] == []
    for place, fact in enumerate(journal):
        if fact.kind == "orphaned":
            machine = world.new_machine()
            machine.replay(journal[: place + 1], complete=False, now=fact.at)
            again = {ask.path for ask in machine.runnable()}
            machine.evict()
            assert once & again <= {later.path for later in machine.new if later.kind == "asked"}


@in_every_trial
def test_no_try_begins_when_its_total_time_is_over(tree: Node, choices: bytes) -> None:
    journal = World(tree, choices).run().journal
    asked_at = {fact.path: fact.at for fact in journal if fact.kind == "asked"}

    for fact in journal:
        if fact.kind == "attempted" and name_at(fact.path).endswith(TOTAL):
            begins = datetime.fromisoformat(fact.data["next_at"])
            assert begins <= asked_at[fact.path] + seconds(WITHIN_RETRY_SECONDS)


@in_every_town
def test_one_at_a_time_has_a_mutex_in_the_order_of_the_asking_and_none_is_lost(
    tree: Sequence[House], choices: bytes
) -> None:
    town = Town(tree, choices).run()

    Holders().read(town.log)
    for world in town.worlds:
        Undoing().read(world.journal)


@in_every_order
def test_what_is_asked_and_undone_does_not_depend_on_the_order_of_the_answers(
    tree: Node, choices: bytes
) -> None:
    first, second = answered(tree, choices[:60]), answered(tree, choices[60:])

    assert asked_in(first) == asked_in(second)
    assert first[-1].data["kind"] == second[-1].data["kind"]


def answered(tree: Node, choices: bytes) -> list[Fact]:
    """The journal of `tree` when what is asked at a path always ends in the same way, in the order of `choices`."""
    machine = Machine(Program(tree).flow.program)
    machine.tell("started", "", {"input": 1, "seed": "seed"}, NOON)
    order = iter(choices)
    while machine.status not in TERMINAL:
        held = machine.held
        if held is not None:
            said = {"verdict": "done", "value": None, "by": "ann", "reason": ""}
            machine.tell("resolved", held.path, said, NOON)
            continue
        paths = list(machine.open)
        path = paths[next(order, 0) % len(paths)]
        outcomes = OUTCOMES if not machine.open[path][1].is_child else [end for end, _ in ENDS_OF_CHILDREN]
        outcome = "done" if path.endswith("/undo") else outcomes[crc32(path.encode()) % len(outcomes)]
        said = {"value": {"r": path}} if outcome == "done" else {"error": {"code": "c"}}
        machine.tell("ended", path, {"outcome": outcome} | said, NOON)
    return machine.take_new()


def asked_in(journal: Sequence[Fact]) -> dict[str, tuple[Any, ...]]:
    return {fact.path: what(fact) for fact in journal if fact.kind == "asked"}


@pytest.mark.proof
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", WORLDS)
def test_all_of_it_in_many_more_worlds(
    kind: str, part: int, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = facts = 0
    run, run_town = World.run, Town.run
    ran: World | None = None
    properties = WORLDS[kind].properties

    def run_once(world: World) -> World:
        """All properties look at one run."""
        nonlocal facts, ran
        if ran is None:
            ran = run(world)
            facts += len(ran.journal)
        return ran

    def counted(tree: Node, choices: bytes) -> None:
        nonlocal worlds, ran
        worlds += 1
        ran = None
        evidence.goes_on(f"{worlds} of {EXAMPLES_IN_PROOF // PARTS} worlds")
        for holds in properties:
            holds(tree, choices)

    def counted_town(town: Town) -> Town:
        nonlocal facts
        found = run_town(town)
        facts += len(found.log)
        return found

    monkeypatch.setattr(World, "run", run_once)
    monkeypatch.setattr(Town, "run", counted_town)
    search = searched(counted, WORLDS[kind].programs, examples=EXAMPLES_IN_PROOF // PARTS)
    seed(f"{kind} {part}")(search)()

    assert worlds >= EXAMPLES_IN_PROOF // PARTS
    evidence.did(f"{worlds} worlds, {len(properties)} properties, {facts} facts")
