"""Random programs in random worlds: what is true of every journal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from orchestrator.core.fact import BYSTANDERS, PRODUCED, Fact
from orchestrator.core.machine import Machine
from orchestrator.core.path import segment
from tests.core.oracle import Undoing
from tests.core.programs import Node, trees
from tests.core.world import World, state
from tests.evidence import Evidence

EXAMPLES: Final = 150
EXAMPLES_IN_PROOF: Final = 2_000
"""Of each property. Always the same ones: a build does not fail by chance."""

Property = Callable[[Node, bytes], None]
PROPERTIES: Final[list[Property]] = []


def in_every_world(holds: Property) -> Callable[..., None]:
    PROPERTIES.append(holds)
    return searched(holds, examples=EXAMPLES)


def searched(holds: Property, *, examples: int) -> Callable[..., None]:
    search = settings(max_examples=examples, deadline=None, derandomize=True, database=None, print_blob=False)
    return search(given(tree=trees(), choices=st.binary(min_size=120, max_size=120))(holds))


def produced(journal: Sequence[Fact]) -> tuple[list[Fact], bool]:
    """What follows at the beginning of `journal` without further input, and whether a worker died on the way."""
    found: list[Fact] = []
    died = False
    for fact in journal:
        if fact.kind in BYSTANDERS:
            died = died or fact.kind == "orphaned"
        elif fact.kind in PRODUCED:
            found.append(fact)
        else:
            break
    return found, died


def what(fact: Fact) -> tuple[Any, ...]:
    return (*fact.says(), fact.data.get("args"), fact.data.get("undo"), fact.data.get("known"))


@in_every_world
def test_every_prefix_of_a_journal_replays_to_the_facts_that_followed(tree: Node, choices: bytes) -> None:
    world = World(tree, choices).run()

    for length in range(1, len(world.journal) + 1):
        machine = world.new_machine()
        machine.replay(world.journal[:length], complete=False)
        machine.evict()

        followed, died = produced(world.journal[length:])
        new = [fact for fact in machine.new if fact.kind in PRODUCED]
        count = len(new) if died else len(followed)
        assert [what(fact) for fact in new[: len(followed)]] == [what(fact) for fact in followed[:count]]


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
    drawn = list(world.program.drawn)

    machine = world.new_machine()
    machine.replay(world.journal)

    assert world.program.drawn == drawn


@in_every_world
def test_positions_and_times_only_grow_and_no_path_is_used_twice(tree: Node, choices: bytes) -> None:
    journal = World(tree, choices).run().journal
    seen = [fact.at for fact in journal if fact.kind not in BYSTANDERS]

    asked = [fact.path for fact in journal if fact.kind == "asked"]

    assert [fact.position for fact in journal] == list(range(1, len(journal) + 1))
    assert seen == sorted(seen)
    assert len(asked) == len(set(asked))


@in_every_world
def test_a_path_is_the_name_and_its_number_in_the_program_whatever_the_outcomes(
    tree: Node, choices: bytes
) -> None:
    journal = World(tree, choices).run().journal
    counted: Counter[str] = Counter()

    for fact in journal:
        if fact.kind == "asked" and fact.data["kind"] != "undo":
            name = fact.data["name"]
            counted[name] += 1
            ordinal = "" if counted[name] == 1 else f"#{counted[name]}"
            assert fact.path == segment(name) + ordinal


@in_every_world
def test_undo_runs_once_one_at_a_time_after_settling_in_reverse_for_exactly_what_may_stand(
    tree: Node, choices: bytes
) -> None:
    world = World(tree, choices).run()

    Undoing().read(world.journal)


@in_every_world
def test_a_finished_execution_has_nothing_open(tree: Node, choices: bytes) -> None:
    world = World(tree, choices).run()
    machine: Machine = world.machine

    assert world.journal[-1].kind == "finished"
    assert (machine.open, machine.next_due(), machine.runnable(), bool(machine.undoing)) == (
        {},
        None,
        [],
        False,
    )


@pytest.mark.proof
@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__.removeprefix("test_"))
def test_in_many_more_worlds(holds: Property, evidence: Evidence) -> None:
    worlds = facts = 0

    def counted(tree: Node, choices: bytes) -> None:
        nonlocal worlds, facts
        worlds += 1
        facts += len(World(tree, choices).run().journal)
        evidence.goes_on(f"{worlds} of {EXAMPLES_IN_PROOF} worlds")
        holds(tree, choices)

    seed(holds.__name__)(searched(counted, examples=EXAMPLES_IN_PROOF))()  # for each property other worlds

    assert worlds >= EXAMPLES_IN_PROOF
    evidence.did(f"{worlds} worlds, {facts} facts")
