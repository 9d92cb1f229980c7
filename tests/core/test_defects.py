"""Each defect that these tests are there to catch, planted; and the example that catches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from orchestrator import Context, OutcomeUnknown, Retry, command, hours, local, minutes, workflow
from orchestrator.core.ask import Ask, Entry
from orchestrator.core.branch import Branch
from orchestrator.core.errors import NonDeterminism, error_in
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.core.path import Frame, segment
from orchestrator.core.undoing import Undoing
from orchestrator.testing import NOON
from orchestrator.workflow import Workflow
from tests.core import oracle

Json = Any
Plant = Callable[[pytest.MonkeyPatch], None]


# ---- examples: each passes as it is --------------------------------------------------------------------------


@workflow(name="pays", version="1")
async def pays(ctx: Context, n: int) -> None:
    await ctx.call("s", "a", undo=command("s", "undo-a"))
    await ctx.call("s", "a", undo=command("s", "undo-b"), timeout=minutes(1))
    await ctx.call("s", "c", undo=command("s", "undo-c"))


def started(flow: Workflow[int, Any]) -> Machine:
    machine = Machine(flow.program)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    return machine


def ends(machine: Machine, path: str, outcome: str) -> None:
    more: dict[str, Json] = {"value": None} if outcome == "done" else {"error": {"code": "c"}}
    machine.tell("ended", path, {"outcome": outcome} | more, NOON)


def read(machine: Machine, *, status: str) -> None:
    """The journal keeps the rules of undoing, and says that the execution ended so."""
    machine.evict()
    oracle.Undoing().read(machine.new)
    assert machine.status == status, f"{machine.status}: {machine.new}"


def a_refusal_undoes_what_was_done_in_reverse() -> None:
    machine = started(pays)
    ends(machine, "a", "done")
    ends(machine, "a#2", "done")
    ends(machine, "c", "refused")
    while machine.open:
        ends(machine, next(iter(machine.open)), "done")
    read(machine, status="compensated")


def while_an_undo_runs_nothing_else_is_undone() -> None:
    machine = started(pays)
    ends(machine, "a", "done")
    ends(machine, "a#2", "unknown")
    ends(machine, "a#2", "done")
    while machine.open:
        ends(machine, next(iter(machine.open)), "done")
    read(machine, status="compensated")


def a_late_refusal_frees_the_flow() -> None:
    machine = started(pays)
    ends(machine, "a", "refused")
    read(machine, status="failed")

    @workflow(name="one", version="1")
    async def one(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=command("s", "undo"), timeout=minutes(1))

    machine = started(one)
    machine.fire(NOON + minutes(1))
    ends(machine, "a", "refused")
    read(machine, status="failed")


def what_timed_out_is_undone_after_it_has_settled() -> None:
    machine = started(pays)
    ends(machine, "a", "done")
    machine.fire(NOON + minutes(1))
    ends(machine, "a#2", "unknown")
    while machine.open:
        ends(machine, next(iter(machine.open)), "done")
    read(machine, status="compensated")


def a_late_reply_makes_the_undo_exact() -> None:
    @workflow(name="exact", version="1")
    async def exact(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=lambda reply: command("s", "undo", reply), timeout=minutes(1))

    machine = started(exact)
    machine.fire(NOON + minutes(1))
    machine.tell("ended", "a", {"outcome": "done", "value": {"charge": 7}}, NOON)
    ends(machine, "a/undo", "done")
    read(machine, status="compensated")


def another_kind_of_ask_is_found_in_replay() -> None:
    def asks(*, sleeps: bool) -> Workflow[int, None]:
        @workflow(name="either", version="1")
        async def either(ctx: Context, n: int) -> None:
            await (ctx.sleep(hours(1), name="a") if sleeps else ctx.call("s", "a"))

        return either

    journal = started(asks(sleeps=False)).take_new()
    machine = Machine(asks(sleeps=True).program)
    try:
        machine.replay(journal)
    except NonDeterminism:
        return
    finally:
        machine.evict()
    raise AssertionError("a sleep passed for a call")


def work() -> None: ...


def a_lost_step_ends_once() -> None:
    @workflow(name="loses", version="1")
    async def loses(ctx: Context, n: int) -> str:
        try:
            await ctx.step(work, undo=local(work), retry=Retry(attempts=1), unknown="hold")
        except OutcomeUnknown:
            return "lost"
        return "worked"

    journal = [*started(loses).take_new(), Fact(3, "orphaned", "", {}, NOON)]
    for _ in range(2):
        machine = Machine(loses.program)
        machine.replay(journal)
        machine.evict()
        journal += machine.take_new()
    assert [fact.kind for fact in journal] == ["started", "asked", "orphaned", "ended"]


# ---- defects ---------------------------------------------------------------------------------------------------


def undo_forward(patch: pytest.MonkeyPatch) -> None:
    def forward(self: Undoing) -> Entry | None:
        waiting = [entry for scope, _ in self._unwinding for entry in scope.entries.values()]  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside
        return min(waiting, key=lambda entry: entry.rank) if waiting and self.current is None else None

    patch.setattr(Undoing, "next", forward)


def refused_step_undone(patch: pytest.MonkeyPatch) -> None:
    sound = Undoing.ended

    def ended(self: Undoing, ask: Ask, fact: Fact, outcome: str) -> None:
        sound(self, ask, fact, "failed" if outcome == "refused" else outcome)

    patch.setattr(Undoing, "ended", ended)


def two_undos_at_once(patch: pytest.MonkeyPatch) -> None:
    def eager(self: Undoing) -> Entry | None:
        waiting = [entry for scope, _ in self._unwinding for entry in scope.entries.values()]  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside
        untried = [entry for entry in waiting if not entry.tries]
        return max(untried, key=lambda entry: entry.rank) if untried else None

    patch.setattr(Undoing, "next", eager)


def late_refusal_strands_a_scope(patch: pytest.MonkeyPatch) -> None:
    sound = Undoing.dropped

    def dropped(self: Undoing, entry: Entry) -> list[Branch]:
        free = sound(self, entry)
        return free if self.current is not None or self.undone else []

    patch.setattr(Undoing, "dropped", dropped)


def undo_before_settling(patch: pytest.MonkeyPatch) -> None:
    sound = Undoing.next

    def hasty(self: Undoing) -> Entry | None:
        for entry in self.unsettled.values():
            entry.settling = False
        return sound(self)

    patch.setattr(Undoing, "next", hasty)


def unknown_stays_unknown(patch: pytest.MonkeyPatch) -> None:
    sound = Undoing.late

    def forgetful(self: Undoing, fact: Fact) -> Entry | None:
        if fact.data["outcome"] == "done":
            entry = self.unsettled[fact.path]
            known, action = entry.known, entry.action
            found = sound(self, fact)
            entry.known, entry.action = known, action
            return found
        return sound(self, fact)

    patch.setattr(Undoing, "late", forgetful)


def replay_that_does_not_compare_kinds(patch: pytest.MonkeyPatch) -> None:
    def says(self: Fact) -> tuple[Any, ...]:
        return (self.kind, self.path, mock.ANY, self.data.get("name"))

    patch.setattr(Fact, "says", says)


def a_path_used_twice(patch: pytest.MonkeyPatch) -> None:
    def path_of(self: Frame, name: str) -> str:
        return self.prefix + segment(name)

    patch.setattr(Frame, "next", path_of)


def a_decision_made_at_each_load(patch: pytest.MonkeyPatch) -> None:
    sound = Machine.on_ended

    def repeats(self: Machine, fact: Fact) -> None:
        sound(self, fact)
        if error_in(fact.data).get("code") == "worker-lost" and self._past is not None:  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside
            self._decisions[fact.path] = fact.data  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside

    patch.setattr(Machine, "on_ended", repeats)


CAUGHT: list[tuple[Plant, Callable[[], None]]] = [
    (undo_forward, a_refusal_undoes_what_was_done_in_reverse),
    (refused_step_undone, a_refusal_undoes_what_was_done_in_reverse),
    (two_undos_at_once, while_an_undo_runs_nothing_else_is_undone),
    (late_refusal_strands_a_scope, a_late_refusal_frees_the_flow),
    (undo_before_settling, what_timed_out_is_undone_after_it_has_settled),
    (unknown_stays_unknown, a_late_reply_makes_the_undo_exact),
    (replay_that_does_not_compare_kinds, another_kind_of_ask_is_found_in_replay),
    (a_path_used_twice, a_refusal_undoes_what_was_done_in_reverse),
    (a_decision_made_at_each_load, a_lost_step_ends_once),
]


@pytest.mark.parametrize(("defect", "example"), CAUGHT, ids=[defect.__name__ for defect, _ in CAUGHT])
def test_a_planted_defect_fails_its_example(
    defect: Plant, example: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    example()

    defect(monkeypatch)

    with pytest.raises(AssertionError):
        example()
