"""A program and its journal: where they may differ, and where they may not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orchestrator import Context, OutcomeUnknown, Retry, command, hours, local, minutes, workflow
from orchestrator.core.errors import NonDeterminism
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON, FlowTester
from orchestrator.workflow import Workflow

Json = Any


def calls(*names: str, data: Json = None) -> Workflow[int, str]:
    """A flow that calls each of `names` in turn."""

    @workflow(name="calls", version="1")
    async def flow(ctx: Context, n: int) -> str:
        for name in names:
            await ctx.call("s", name, data)
        return "done"

    return flow


def recorded(flow: Workflow[int, Any], *, answers: int) -> list[Fact]:
    """The journal of `flow` after so many answers."""
    test = FlowTester(flow, 1)
    for _ in range(answers):
        test.tell("ended", test.open[0], {"outcome": "done", "value": None})
    return test.journal


def replayed(flow: Workflow[int, Any], journal: Sequence[Fact], *, complete: bool = True) -> Machine:
    machine = Machine(flow.program)
    try:
        machine.replay(journal, complete=complete)
    finally:
        machine.evict()
    return machine


def numbered(facts: Sequence[Fact]) -> list[Fact]:
    return [Fact(n, f.kind, f.path, f.data, f.at) for n, f in enumerate(facts, 1)]


def bystander(kind: str, **data: Json) -> Fact:
    return Fact(0, kind, "", data, NOON)


def sleeps(name: str) -> Workflow[int, str]:
    @workflow(name="sleeps", version="1")
    async def flow(ctx: Context, n: int) -> str:
        await ctx.sleep(hours(1), name=name)
        return "slept"

    return flow


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (calls("b", "a"), r"asked call b at 'b'"),
        (calls("a"), r"finished completed"),
        (calls("a", "a"), r"asked call a at 'a#2'"),
    ],
    ids=["reordered", "ends early", "another path"],
)
def test_a_program_that_asks_for_something_else_is_shown_both_sides_and_the_position(
    now: Workflow[int, str], says: str
) -> None:
    journal = recorded(calls("a", "b"), answers=1)

    with pytest.raises(
        NonDeterminism, match=r"the journal has asked call .* at position \d; the program says " + says
    ):
        replayed(now, journal)


def test_the_position_that_is_named_is_that_of_the_first_difference() -> None:
    journal = recorded(calls("a", "b", "c"), answers=2)

    with pytest.raises(NonDeterminism) as caught:
        replayed(calls("a", "x", "c"), journal)

    assert str(caught.value) == (
        "the journal has asked call b at 'b' at position 4; the program says asked call x at 'x'"
    )


def test_another_kind_of_ask_at_the_same_path_is_another_ask() -> None:
    journal = recorded(calls("a"), answers=0)

    with pytest.raises(NonDeterminism, match=r"has asked call a at 'a'.*says asked timer a at 'a'"):
        replayed(sleeps("a"), journal)


def test_another_ending_is_a_difference_too() -> None:
    @workflow(name="calls", version="1")
    async def fails(ctx: Context, n: int) -> str:
        await ctx.call("s", "a")
        raise ValueError("now it fails")

    journal = recorded(calls("a"), answers=1)

    with pytest.raises(NonDeterminism, match=r"has finished completed.*says finished failed"):
        replayed(fails, journal)


def careful(*, catches: bool) -> Workflow[int, str]:
    """Either it calls b when nobody knows about a, or it is undone as soon as a has settled."""

    @workflow(name="careful", version="1")
    async def flow(ctx: Context, n: int) -> str:
        try:
            await ctx.call("s", "a", undo=command("s", "undo"), timeout=minutes(1))
        except OutcomeUnknown:
            if not catches:
                raise
            await ctx.call("s", "b")
        return "done"

    return flow


def timed_out(flow: Workflow[int, Any]) -> list[Fact]:
    machine = Machine(flow.program)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    machine.fire(NOON + minutes(1))
    machine.evict()
    return machine.take_new()


def test_a_program_that_blocks_without_asking_no_longer_asks_for_what_is_recorded() -> None:
    journal = timed_out(careful(catches=True))

    with pytest.raises(
        NonDeterminism, match="has asked call b at 'b' at position 4; the program no longer asks"
    ):
        replayed(careful(catches=False), journal)


def test_a_step_inserted_before_the_end_of_a_complete_journal_is_found() -> None:
    journal = timed_out(careful(catches=False))

    with pytest.raises(NonDeterminism, match="ends at position 3; the program says asked call b at 'b'"):
        replayed(careful(catches=True), journal)


def test_an_end_of_something_that_was_never_asked_is_a_broken_journal() -> None:
    journal = recorded(calls("a"), answers=0)
    journal.append(Fact(3, "ended", "b", {"outcome": "done", "value": None}, NOON))

    with pytest.raises(NonDeterminism, match="has ended at 'b', position 3; the program never asked there"):
        replayed(calls("a"), journal)


def test_what_a_prefix_of_a_journal_does_not_hold_is_new() -> None:
    journal = recorded(calls("a", "b"), answers=1)

    machine = replayed(calls("a", "b"), journal[:3], complete=False)

    assert [fact.says() for fact in machine.new] == [("asked", "b", "call", "b")]


def test_arguments_that_changed_are_accepted_and_the_recorded_ones_count() -> None:
    journal = recorded(calls("a", data={"v": 1}), answers=0)

    machine = Machine(calls("a", data={"v": 2}).program)
    machine.replay(journal)

    [(_, ask)] = machine.open.values()
    assert (ask.args["data"], machine.new) == ({"v": 1}, [])
    machine.evict()


def test_the_recorded_due_time_and_undo_count_whatever_the_program_says_now() -> None:
    def flow(timeout: int, undo: str) -> Workflow[int, str]:
        @workflow(name="undoes", version="1")
        async def undoes(ctx: Context, n: int) -> str:
            await ctx.call("s", "a", undo=command("s", undo), timeout=minutes(timeout))
            raise ValueError("undo it")

        return undoes

    test = FlowTester(flow(1, "old"), 1)

    machine = Machine(flow(2, "new").program)
    machine.replay(test.journal)

    assert machine.next_due() == (NOON + minutes(1), "a")
    machine.tell("ended", "a", {"outcome": "refused", "error": {}}, NOON)
    again = Machine(flow(2, "new").program)
    again.replay(test.journal)
    again.fire(NOON + minutes(1))
    again.tell("late", "a", {"outcome": "unknown", "error": {}}, NOON)
    assert again.open["a/undo"][1].args["name"] == "old"
    for one in (machine, again):
        one.evict()


def test_a_step_appended_after_the_recorded_past_is_fine() -> None:
    journal = recorded(calls("a"), answers=0)
    machine = Machine(calls("a", "b").program)

    machine.replay(journal)
    machine.tell("ended", "a", {"outcome": "done", "value": None}, NOON)

    assert list(machine.open) == ["b"]
    machine.evict()


@pytest.mark.parametrize("kind", ["held", "resumed", "orphaned"])
def test_facts_for_people_are_passed_wherever_they_stand(kind: str) -> None:
    flow = calls("a", "b")
    journal = recorded(flow, answers=2)

    for place in range(1, len(journal) + 1):
        mixed = numbered([*journal[:place], bystander(kind, code="undo-failed"), *journal[place:]])
        machine = replayed(flow, mixed)

        assert (machine.status, machine.new, machine.position) == ("completed", [], len(mixed))


def test_a_journal_that_ends_where_it_began_may_go_on() -> None:
    journal = recorded(calls("a"), answers=0)[:1]

    machine = replayed(calls("a"), journal)

    assert [fact.says() for fact in machine.new] == [("asked", "a", "call", "a")]


@pytest.mark.parametrize("code", ["program-fault", "nondeterminism", "limit", "input-invalid", "unstorable"])
def test_a_journal_that_ends_with_the_program_stopped_may_go_on(code: str) -> None:
    journal = numbered([*recorded(calls("a", "b"), answers=1)[:3], bystander("held", code=code)])

    machine = replayed(calls("a", "b"), journal)

    assert [(fact.position, *fact.says()) for fact in machine.new] == [(5, "asked", "b", "call", "b")]


def test_a_stopped_program_may_go_on_although_it_was_resumed_and_its_worker_died() -> None:
    journal = recorded(calls("a", "b"), answers=1)[:3]
    after = [bystander("held", code="program-fault"), bystander("resumed"), bystander("orphaned")]

    machine = replayed(calls("a", "b"), numbered([*journal, *after]))

    assert [fact.position for fact in machine.new] == [7]


@pytest.mark.parametrize("end", [(), ("held",), ("resumed",), ("orphaned",), ("orphaned", "held")], ids=str)
def test_a_journal_that_ends_otherwise_is_complete(end: tuple[str, ...]) -> None:
    journal = numbered(
        [*timed_out(careful(catches=False)), *(bystander(kind, code="undo-failed") for kind in end)]
    )

    with pytest.raises(NonDeterminism, match=r"ends at position .*; the program says asked call b"):
        replayed(careful(catches=True), journal)


def test_after_a_difference_nothing_new_is_left_and_the_position_is_the_journals_end() -> None:
    machine = Machine(calls("x").program)

    with pytest.raises(NonDeterminism):
        machine.replay(recorded(calls("a", "b"), answers=1))

    assert (machine.new, machine.position) == ([], 4)
    machine.evict()


def test_a_program_that_catches_everything_cannot_hide_a_difference() -> None:
    @workflow(name="calls", version="1")
    async def hides(ctx: Context, n: int) -> str:
        try:
            await ctx.call("s", "other")
        except BaseException:  # noqa: BLE001
            return "hid it"
        return "done"

    with pytest.raises(NonDeterminism):
        replayed(hides, recorded(calls("a"), answers=0))


def test_a_journal_read_back_from_text_replays_the_same() -> None:
    test = FlowTester(careful(catches=True), 1)
    test.passes(minutes(1))
    test.tell("ended", "b", {"outcome": "done", "value": {"ü": [1, 2.5, None, "x"]}})
    read = [Fact(f.position, f.kind, f.path, json.loads(f.text or ""), f.at) for f in test.journal]

    machine = replayed(careful(catches=True), read)

    assert (machine.status, machine.position, machine.new) == ("completed", len(read), [])


def work() -> None: ...


def step(retry: Retry, **options: Any) -> Workflow[int, str]:
    @workflow(name="steps", version="1")
    async def flow(ctx: Context, n: int) -> str:
        try:
            await ctx.step(work, undo=local(work), retry=retry, **options)
        except OutcomeUnknown as error:
            return error.code
        return "worked"

    return flow


def orphaned(journal: Sequence[Fact], *, times: int, at: Callable[[int], Any] = lambda _: NOON) -> list[Fact]:
    deaths = [Fact(0, "orphaned", "", {"by": "w"}, at(n)) for n in range(times)]
    return numbered([*journal, *deaths])


def test_a_step_whose_worker_dies_is_tried_again_until_its_tries_are_used_up() -> None:
    flow = step(Retry(attempts=3))
    journal = recorded(flow, answers=0)

    again = replayed(flow, orphaned(journal, times=2))
    lost = replayed(flow, orphaned(journal, times=3))

    assert [(ask.path, ask.attempt) for ask in again.runnable()] == [("work", 3)]
    assert [(fact.kind, fact.data.get("error", {}).get("code")) for fact in lost.new] == [
        ("ended", "worker-lost"),
        ("finished", None),
    ]
    assert lost.result == "worker-lost"


def test_the_end_of_a_lost_step_is_written_once_however_often_it_is_loaded() -> None:
    flow = step(Retry(attempts=1), unknown="hold")
    lost = orphaned(recorded(flow, answers=0), times=1)
    first = replayed(flow, lost)

    second = replayed(flow, [*lost, *first.new])

    assert [fact.kind for fact in first.new] == ["ended"]
    assert second.held is not None
    assert (second.held.path, second.new, second.runnable()) == ("work", [], [])


def test_a_try_that_may_have_begun_is_lost_and_one_that_still_waited_is_not() -> None:
    flow = step(Retry(attempts=2))
    test = FlowTester(flow, 1)
    test.attempt_failed("work", {"code": "raised"})

    waited = replayed(flow, orphaned(test.journal, times=1))
    began = replayed(flow, orphaned(test.journal, times=1, at=lambda _: NOON + minutes(1)))

    assert (waited.new, [ask.attempt for _, ask in waited.open.values()]) == ([], [2])
    assert [fact.data["error"]["code"] for fact in began.new if fact.kind == "ended"] == ["worker-lost"]


def test_a_death_between_a_stop_and_its_resumption_counts_as_any_other() -> None:
    @workflow(name="stops", version="1")
    async def stops(ctx: Context, n: int) -> str:
        try:
            await ctx.step(work, undo=local(work), timeout=minutes(1))
        except OutcomeUnknown:
            await ctx.call("s", "a")
        raise ValueError("undo it")

    journal = timed_out(stops)[:3]
    journal = numbered([*journal, bystander("held", code="program-fault"), bystander("orphaned")])
    machine = Machine(stops.program)

    machine.replay(journal)
    machine.tell("ended", "a", {"outcome": "done", "value": None}, NOON)

    assert list(machine.open) == ["work/undo"]
    machine.evict()


def test_what_follows_from_a_death_at_the_end_of_a_journal_is_new_and_no_difference() -> None:
    @workflow(name="slow", version="1")
    async def slow(ctx: Context, n: int) -> None:
        await ctx.step(work, undo=local(work), timeout=minutes(1))

    lost = orphaned(timed_out(slow), times=1)

    machine = replayed(slow, lost)

    assert [(fact.position, *fact.says()) for fact in machine.new] == [
        (5, "asked", "work/undo", "undo", "work")
    ]
