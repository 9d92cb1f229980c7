"""Each defect that these tests are there to catch, planted; and the example that catches it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any
from unittest import mock

import pytest

from orchestrator import (
    Cancelled,
    Context,
    Effect,
    OutcomeUnknown,
    Retry,
    StepRefused,
    command,
    hours,
    local,
    minutes,
    workflow,
)
from orchestrator.core import machine as machine_module
from orchestrator.core import undoing as undoing_module
from orchestrator.core.agenda import Agenda
from orchestrator.core.ask import Ask, Entry, Scope
from orchestrator.core.branch import Branch
from orchestrator.core.branches import Branches
from orchestrator.core.buffer import Buffer
from orchestrator.core.context import Saga
from orchestrator.core.driver import Driver
from orchestrator.core.errors import NonDeterminism, ProgramFault, error_in
from orchestrator.core.fact import Fact
from orchestrator.core.follows import LeftChild, LetGo, TakenBack
from orchestrator.core.fork import Fork
from orchestrator.core.journal import Journal
from orchestrator.core.machine import Machine
from orchestrator.core.mutexes import Mutexes
from orchestrator.core.path import Frame, segment
from orchestrator.core.undoing import Undoing
from orchestrator.testing import NOON
from orchestrator.workflow import Workflow
from tests.core import oracle
from tests.core.answers import UNDO, cancelled, flow_of, open_in, received, said, undone

Json = Any
Plant = Callable[[pytest.MonkeyPatch], None]


# ---- examples of one branch: each passes as it is --------------------------------------------------------------


@workflow(name="pays", version="1")
async def pays(ctx: Context, n: int) -> None:
    await ctx.call("s", "a", undo=command("s", "undo-a"))
    await ctx.call("s", "a", undo=command("s", "undo-b"), timeout=minutes(1))
    await ctx.call("s", "c", undo=command("s", "undo-c"))


MACHINES: list[Machine] = []
"""Those of an example; they are let go when it is over, however it ends."""


def started(flow: Workflow[int, Any]) -> Machine:
    machine = Machine(flow.program)
    MACHINES.append(machine)
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


# ---- examples of branches, scopes and cancelling ---------------------------------------------------------------


def bare(fn: Callable[[Context, int], Coroutine[Any, Any, Any]]) -> Machine:
    return started(flow_of(fn))


def finishes(machine: Machine, *, status: str) -> None:
    """What is open is done; then the execution has ended so."""
    while machine.open:
        ends(machine, next(iter(machine.open)), "done")
    assert machine.status == status, f"{machine.status}: {machine.new}"


async def fails() -> None:
    raise ValueError("as written")


def a_call_under_way_that_is_cancelled_is_undone() -> None:
    async def asks(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=UNDO)

    machine = bare(asks)
    cancelled(machine)
    ends(machine, "a", "unknown")
    assert open_in(machine) == ["a/undo"]
    finishes(machine, status="cancelled")


def what_is_withdrawn_is_undone_after_it_has_settled() -> None:
    async def asks(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=UNDO)

    machine = bare(asks)
    cancelled(machine)
    assert open_in(machine) == []
    ends(machine, "a", "unknown")
    finishes(machine, status="cancelled")


def a_fork_waits_for_the_cleanup_of_what_it_stopped() -> None:
    async def asks(ctx: Context, n: int) -> None:
        async def cleans() -> None:
            try:
                await ctx.call("s", "a")
            finally:
                await ctx.call("s", "close")

        with suppress(StepRefused):
            await ctx.all(cleans(), ctx.call("s", "b"))
        await ctx.call("s", "next")

    machine = bare(asks)
    ends(machine, "all.1/b", "refused")
    assert open_in(machine) == ["all.0/close"]
    finishes(machine, status="completed")


def a_fork_whose_first_branch_fails_at_once_is_joined_once() -> None:
    """Random programs did not find that this can go wrong: when the others were not even started, stopping them
    ends the fork from within.
    """

    async def asks(ctx: Context, n: int) -> None:
        with suppress(ValueError):
            await ctx.all(fails(), ctx.call("s", "a"))
        await ctx.call("s", "b")
        await ctx.call("s", "c")

    machine = bare(asks)
    assert open_in(machine) == ["b"]
    finishes(machine, status="completed")


def an_error_in_all_stops_the_others() -> None:
    async def asks(ctx: Context, n: int) -> None:
        await ctx.all(ctx.call("s", "a"), ctx.call("s", "b"))

    machine = bare(asks)
    ends(machine, "all.0/a", "refused")
    assert said(machine.new)[-2:] == ["withdrawn all.1/b", "finished failed"]


def what_a_loser_did_is_undone_and_what_the_winner_did_is_kept() -> None:
    async def asks(ctx: Context, n: int) -> None:
        async def slow() -> None:
            await ctx.call("s", "a", undo=UNDO)
            await ctx.call("s", "more")

        await ctx.first(slow(), ctx.call("s", "b", undo=UNDO))
        await ctx.call("s", "next")

    machine = bare(asks)
    ends(machine, "first.0/a", "done")
    ends(machine, "first.1/b", "done")
    assert open_in(machine) == ["first.0/a/undo"]
    ends(machine, "first.0/a/undo", "done")
    ends(machine, "next", "refused")
    assert open_in(machine) == ["first.1/b/undo"]
    finishes(machine, status="compensated")


def a_loser_that_does_not_listen_is_undone_too() -> None:
    async def asks(ctx: Context, n: int) -> None:
        async def deaf() -> None:
            await ctx.call("s", "a", undo=UNDO)
            with suppress(Cancelled):
                await ctx.call("s", "more")

        await ctx.first(deaf(), ctx.call("s", "b"))

    machine = bare(asks)
    ends(machine, "first.0/a", "done")
    ends(machine, "first.1/b", "done")
    assert open_in(machine) == ["first.0/a/undo"]
    finishes(machine, status="completed")


def a_second_cancel_leaves_the_cleanup_alone() -> None:
    async def asks(ctx: Context, n: int) -> None:
        try:
            await ctx.sleep(hours(1))
        finally:
            await ctx.call("s", "close")

    machine = bare(asks)
    cancelled(machine)
    cancelled(machine)
    assert open_in(machine) == ["close"]
    finishes(machine, status="cancelled")


def a_cancel_that_comes_while_it_is_undone_waits() -> None:
    async def asks(ctx: Context, n: int) -> None:
        with suppress(ValueError):
            async with ctx.saga():
                await ctx.call("s", "a", undo=UNDO)
                await ctx.call("s", "b", undo=UNDO)
                await fails()
        await ctx.call("s", "next")

    machine = bare(asks)
    ends(machine, "a", "done")
    ends(machine, "b", "done")
    with suppress(ProgramFault):  # of a scope that is left in the midst of its undoing
        cancelled(machine)
    assert open_in(machine) == ["b/undo"]
    finishes(machine, status="cancelled")
    assert undone(machine.new) == ["b", "a"]


def a_cancel_meets_who_is_being_resumed_at_the_end_of_its_scope() -> None:
    reached: list[str] = []

    async def asks(ctx: Context, n: int) -> None:
        async def resumed() -> None:
            async with ctx.saga():
                await ctx.all(nothing())
            reached.append("beyond its scope")

        async def breaks() -> None:
            await ctx.all(nothing())
            await fails()

        await ctx.all(breaks(), resumed())

    finishes(bare(asks), status="failed")
    assert reached == []


async def nothing() -> None: ...


def a_path_is_the_same_wherever_its_branch_was_stopped() -> None:
    async def asks(ctx: Context, n: int) -> None:
        async def cleans() -> None:
            await ctx.all(nothing())
            try:
                await ctx.call("s", "a")
            finally:
                await ctx.call("s", "a")

        async def breaks() -> None:
            await ctx.all(nothing())
            await fails()

        await ctx.all(breaks(), cleans())

    machine = bare(asks)
    assert open_in(machine) == ["all.1/a#2"]
    finishes(machine, status="failed")


def branches_count_their_names_apart() -> None:
    async def asks(ctx: Context, n: int) -> None:
        async def twice() -> None:
            await ctx.call("s", "a")
            await ctx.call("s", "a")

        await ctx.all(twice(), twice())

    machine = bare(asks)
    ends(machine, "all.1/a", "done")
    assert open_in(machine) == ["all.0/a", "all.1/a#2"]
    finishes(machine, status="completed")


def the_last_that_ended_is_undone_first_though_it_was_asked_first() -> None:
    async def asks(ctx: Context, n: int) -> None:
        await ctx.all(ctx.call("s", "a", undo=UNDO), ctx.call("s", "b", undo=UNDO))
        await fails()

    machine = bare(asks)
    ends(machine, "all.1/b", "done")
    ends(machine, "all.0/a", "done")
    finishes(machine, status="compensated")
    assert undone(machine.new) == ["all.0/a", "all.1/b"]


def what_was_done_before_a_pivot_stands_in_all_scopes_around() -> None:
    async def asks(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=UNDO)
        async with ctx.saga():
            await ctx.call("s", "b", undo=UNDO)
            ctx.pivot()
            await fails()

    machine = bare(asks)
    ends(machine, "a", "done")
    ends(machine, "b", "done")
    assert (open_in(machine), machine.new[-1].data.get("stands")) == ([], ["b", "a"])
    finishes(machine, status="failed")


def nothing_more_is_undone_when_nobody_wants_it() -> None:
    machine = started(pays)
    ends(machine, "a", "done")
    ends(machine, "a#2", "done")
    cancelled(machine)
    ends(machine, "c", "refused")
    cancelled(machine, undo=False)
    finishes(machine, status="cancelled")
    assert undone(machine.new) == ["a#2"]


def nothing_more_is_undone_while_a_person_is_asked() -> None:
    machine = started(pays)
    ends(machine, "a", "done")
    ends(machine, "a#2", "done")
    ends(machine, "c", "refused")
    ends(machine, "a#2/undo", "failed")
    assert (open_in(machine), machine.held and machine.held.path) == ([], "a#2/undo")


def nothing_follows_from_a_turn_that_was_stopped() -> None:
    async def asks(ctx: Context, n: int) -> None:
        with suppress(StepRefused):
            await ctx.all(ctx.call("s", "a"), ctx.call("s", "b"))
        raise AttributeError("a bug")

    machine = bare(asks)
    with suppress(ProgramFault):
        ends(machine, "all.0/a", "refused")
    assert (said(machine.new)[-1], machine.follows.of(TakenBack)) == ("ended all.0/a", [])


# ---- examples of events ----------------------------------------------------------------------------------------


def gives(machine: Machine) -> list[str]:
    """What goes to whom, in order."""
    machine.evict()
    oracle.Events().read(machine.new)
    kinds = {fact.position: fact.data["data"] for fact in machine.new if fact.kind == "received"}
    return [f"{kinds[fact.data['of']]} to {fact.path}" for fact in machine.new if "of" in fact.data]


def an_event_goes_to_one_of_two_that_wait() -> None:
    async def waits(ctx: Context, n: int) -> None:
        await ctx.all(ctx.event("e"), ctx.event("e"))

    machine = bare(waits)
    received(machine, "e", 1)
    assert gives(machine) == ["1 to all.0/e"]


def the_oldest_event_goes_first() -> None:
    async def waits(ctx: Context, n: int) -> None:
        await ctx.call("s", "a")
        await ctx.event("e")

    machine = bare(waits)
    received(machine, "e", 1)
    received(machine, "e", 2)
    ends(machine, "a", "done")
    assert gives(machine) == ["1 to e"]


def who_has_waited_longest_gets_it() -> None:
    async def waits(ctx: Context, n: int) -> None:
        async def later() -> None:
            await ctx.call("s", "a")
            await ctx.event("e")

        await ctx.all(later(), ctx.event("e"))

    machine = bare(waits)
    ends(machine, "all.0/a", "done")
    received(machine, "e", 1)
    assert gives(machine) == ["1 to all.1/e"]


def a_wait_that_was_withdrawn_leaves_the_event_to_the_next() -> None:
    async def waits(ctx: Context, n: int) -> None:
        await ctx.call("s", "a")
        await ctx.first(ctx.event("e"), ctx.event("f"))
        await ctx.event("e")

    machine = bare(waits)
    received(machine, "f", 1)
    received(machine, "e", 2)
    ends(machine, "a", "done")
    assert gives(machine) == ["1 to first.1/f", "2 to e"]
    assert machine.status == "completed"


def a_recorded_gift_is_what_the_journal_says() -> None:
    async def waits(ctx: Context, n: int) -> int:
        return await ctx.event("e")

    def event(position: int) -> Fact:
        return Fact(position, "received", "", {"type": "e", "key": "", "data": position}, NOON)

    journal = bare(waits).take_new()
    gift = Fact(5, "ended", "e", {"outcome": "done", "of": 4}, NOON)
    machine = Machine(flow_of(waits).program)
    MACHINES.append(machine)
    machine.replay([*journal, event(3), event(4), gift], complete=False)
    assert machine.result == 4


def nobody_answers_a_timer() -> None:
    async def sleeps(ctx: Context, n: int) -> None:
        await ctx.sleep(hours(1))

    machine = bare(sleeps)
    ends(machine, "sleep", "done")
    assert (open_in(machine), said(machine.new)[-1]) == (["sleep"], "late sleep")


# ---- examples of what is tried again ---------------------------------------------------------------------------


def given_up() -> Machine:
    """A call that its service gave up, and that is sent again in a minute."""

    async def pays_again(ctx: Context, n: int) -> None:
        retry = Retry.fixed(minutes(1), attempts=3, jitter=0)
        await ctx.call("s", "a", undo=command("s", "undo-a"), retry=retry)

    machine = bare(pays_again)
    ends(machine, "a", "failed")
    assert said(machine.new)[-1] == "attempted a"
    return machine


def a_call_that_is_stopped_between_two_sends_is_undone_at_once() -> None:
    machine = given_up()
    cancelled(machine)
    assert open_in(machine) == ["a/undo"]


def what_was_given_up_is_undone_though_its_next_message_never_arrived() -> None:
    machine = given_up()
    machine.fire(NOON + minutes(1))
    cancelled(machine)
    never = {"outcome": "refused", "error": {"code": "never-sent"}}
    machine.tell("ended", "a", never, NOON + minutes(1), actor="relay")
    assert undone(machine.new) == ["a"]


def a_refusal_is_the_end_of_its_call() -> None:
    machine = given_up()
    machine.fire(NOON + minutes(1))
    ends(machine, "a", "refused")
    assert (open_in(machine), machine.status) == ([], "failed")


def what_is_tried_at_most_once_is_not_begun_again_after_a_death() -> None:
    @workflow(name="once", version="1")
    async def once(ctx: Context, n: int) -> None:
        await ctx.step(work, effect=Effect.AT_MOST_ONCE, unknown="raise")

    machine = Machine(once.program)
    machine.replay([*started(once).take_new(), Fact(3, "orphaned", "", {}, NOON)])
    machine.evict()
    assert machine.runnable() == []


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
        if error_in(fact.data).get("code") == "worker-lost" and self.journal.past is not None:
            self.agenda.decisions[fact.path] = fact.data

    patch.setattr(Machine, "on_ended", repeats)


def cancelled_call_not_undone(patch: pytest.MonkeyPatch) -> None:
    def withdrawn(self: Undoing, ask: Ask, _: Fact, *, settling: bool) -> None:
        if ask.entry is not None:
            ask.entry.scope.entries.pop(ask.path)

    patch.setattr(Undoing, "withdrawn", withdrawn)


def withdrawn_step_undone_before_it_has_settled(patch: pytest.MonkeyPatch) -> None:
    sound = Undoing.withdrawn

    def withdrawn(self: Undoing, ask: Ask, fact: Fact, *, settling: bool) -> None:
        sound(self, ask, fact, settling=False)

    patch.setattr(Undoing, "withdrawn", withdrawn)


def fork_joined_before_its_branches(patch: pytest.MonkeyPatch) -> None:
    sound = Fork.over

    def over(self: Fork, kid: Branch, value: Json, error: BaseException | None) -> bool:
        decides = sound(self, kid, value, error)
        if decides:
            for other in list(self.running.values()):
                other.over = other.told = True
            self.running.clear()
        return decides

    patch.setattr(Fork, "over", over)


def fork_joined_twice(patch: pytest.MonkeyPatch) -> None:
    sound = Branches._join  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside

    def join(self: Branches, fork: Fork) -> None:
        fork.joined = False
        sound(self, fork)

    patch.setattr(Branches, "_join", join)


def error_does_not_stop_the_others(patch: pytest.MonkeyPatch) -> None:
    sound = Fork.over

    def over(self: Fork, kid: Branch, value: Json, error: BaseException | None) -> bool:
        return sound(self, kid, value, error) and error is None

    patch.setattr(Fork, "over", over)


def loser_not_undone(patch: pytest.MonkeyPatch) -> None:
    sound = Fork.start

    def start(self: Fork, branch: Branch, path: str) -> list[Branch]:
        kids = sound(self, branch, path)
        for kid in kids:
            kid.scope, kid.scoped = branch.scope, False
        return kids

    patch.setattr(Fork, "start", start)


def winner_forgotten(patch: pytest.MonkeyPatch) -> None:
    sound = Scope.merge

    def merge(self: Scope) -> None:
        if self.depth > 1:
            self.entries.clear()
        sound(self)

    patch.setattr(Scope, "merge", merge)


def deaf_loser_kept(patch: pytest.MonkeyPatch) -> None:
    sound = Driver._ended  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside

    def ended(self: Driver, branch: Branch, value: Json, error: BaseException | None) -> None:
        branch.told = branch.told and error is not None
        sound(self, branch, value, error)

    patch.setattr(Driver, "_ended", ended)


def cancelled_thrown_twice(patch: pytest.MonkeyPatch) -> None:
    sound = Branches.cancel

    def cancel(self: Branches, branch: Branch, reason: str) -> list[Ask]:
        branch.told = False
        return sound(self, branch, reason)

    patch.setattr(Branches, "cancel", cancel)


def cancel_during_undo_not_shielded(patch: pytest.MonkeyPatch) -> None:
    sound = Driver._unwind  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside

    def unwind(self: Driver, scope: Scope, branch: Branch) -> None:
        sound(self, scope, branch)
        branch.shielded = False

    patch.setattr(Driver, "_unwind", unwind)


def cancel_forgotten_at_the_end_of_a_scope(patch: pytest.MonkeyPatch) -> None:
    sound = Saga.__aexit__

    async def leave(self: Saga, kind: Any, error: BaseException | None, trace: object) -> None:
        branch = self._machine.branches.here()  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside
        pending, branch.pending = branch.pending, None
        await sound(self, kind, error, trace)
        branch.pending = pending

    patch.setattr(Saga, "__aexit__", leave)


def path_that_depends_on_where_a_stop_met_it(patch: pytest.MonkeyPatch) -> None:
    sound = Branches._interrupt  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside

    def interrupt(self: Branches, branch: Branch, request: object) -> None:
        sound(self, branch, request if isinstance(request, Fork) else None)

    patch.setattr(Branches, "_interrupt", interrupt)


def branches_that_share_their_count(patch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}

    def inside(_: str) -> Frame:
        frame = Frame("all/")
        frame.counts = counts
        return frame

    patch.setattr(Frame, "inside", inside)


def rank_by_asking(patch: pytest.MonkeyPatch) -> None:
    sound = Undoing.ended

    def ended(self: Undoing, ask: Ask, fact: Fact, outcome: str) -> None:
        sound(self, ask, fact, outcome)
        if ask.entry is not None:
            ask.entry.rank = ask.position

    patch.setattr(Undoing, "ended", ended)


def pivot_forgotten(patch: pytest.MonkeyPatch) -> None:
    def pivot(_self: Undoing, _scope: Scope) -> None: ...

    patch.setattr(Undoing, "pivot", pivot)


def pivot_of_the_inner_scope_only(patch: pytest.MonkeyPatch) -> None:
    def around(self: Scope) -> Iterator[Scope]:
        yield self

    patch.setattr(Scope, "around", around)


def undoing_that_cannot_be_given_up(patch: pytest.MonkeyPatch) -> None:
    def give_up(_: Undoing) -> list[Branch]:
        return []

    patch.setattr(Undoing, "give_up", give_up)


def undoing_that_does_not_wait_for_a_person(patch: pytest.MonkeyPatch) -> None:
    sound = Driver._next_undo  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside

    def eager(self: Driver) -> None:
        failed = self.undoing.current if self.agenda.held is not None else None
        if failed is not None:
            self.agenda.needs.clear()
            self.undone(self.undoing.over(failed, stands=True))
        sound(self)

    patch.setattr(Driver, "_next_undo", eager)


def stopped_turn_that_takes_messages_back(patch: pytest.MonkeyPatch) -> None:
    sound = Journal.forget_beyond

    def forget(self: Journal, position: int, kept: int) -> None:
        back = self.follows.of(TakenBack)
        sound(self, position, kept)
        for one in back:
            if one.position > position:
                self.follows.add(one)

    patch.setattr(Journal, "forget_beyond", forget)


def event_given_twice(patch: pytest.MonkeyPatch) -> None:
    def take(self: Buffer, position: int) -> Fact:
        return next(event for event in self if event.position == position)

    patch.setattr(Buffer, "take", take)


def newest_event_first(patch: pytest.MonkeyPatch) -> None:
    sound = Buffer.__iter__

    def newest_first(self: Buffer) -> Iterator[Fact]:
        return reversed(list(sound(self)))

    patch.setattr(Buffer, "__iter__", newest_first)


def newest_wait_first(patch: pytest.MonkeyPatch) -> None:
    sound = Agenda._gift  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside

    def gift(self: Agenda) -> tuple[str, dict[str, Json]] | None:
        asks, self.open = self.open, dict(reversed(self.open.items()))
        found = sound(self)
        self.open = asks
        return found

    patch.setattr(Agenda, "_gift", gift)


def withdrawn_wait_consumes(patch: pytest.MonkeyPatch) -> None:
    sound = Driver._withdraw  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside

    def withdraw(self: Driver, ask: Ask) -> None:
        sound(self, ask)
        for event in list(self.agenda.buffer):
            if ask.is_event and event.data["type"] == ask.args["type"]:
                self.agenda.buffer.take(event.position)

    patch.setattr(Driver, "_withdraw", withdraw)


def gift_computed_again_in_replay(patch: pytest.MonkeyPatch) -> None:
    sound = Machine._event_of  # pyright: ignore[reportPrivateUsage]  # the defect is planted inside

    def event_of(self: Machine, fact: Fact) -> Json:
        oldest = next(iter(self.agenda.buffer)).position
        return sound(self, Fact(fact.position, fact.kind, fact.path, {"of": oldest}, fact.at))

    patch.setattr(Machine, "_event_of", event_of)


def timer_that_a_reply_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine_module, "ANSWERED", frozenset({"call", "step", "undo", "timer"}))


def idle_call_that_waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    sound = Undoing.withdrawn

    def withdrawn(self: Undoing, ask: Ask, fact: Fact, *, settling: bool) -> None:
        sound(self, ask, fact, settling=True)

    patch.setattr(Undoing, "withdrawn", withdrawn)


def last_message_that_speaks_for_all(patch: pytest.MonkeyPatch) -> None:
    def was_given_up(_: Machine, _path: str) -> bool:
        return False

    patch.setattr(Machine, "_was_given_up", was_given_up)


def second_try_of_what_is_tried_once(patch: pytest.MonkeyPatch) -> None:
    def has_try(_: Retry, _attempt: int, **_more: Any) -> bool:
        return True

    patch.setattr(Retry, "has_try", has_try)


def refusal_that_is_sent_again(patch: pytest.MonkeyPatch) -> None:
    sound = Machine.tell

    def tell(self: Machine, kind: str, path: str, data: dict[str, Json], at: datetime, **more: Any) -> None:
        outcome = "failed" if data.get("outcome") == "refused" else data.get("outcome")
        sound(self, kind, path, data | {"outcome": outcome}, at, **more)

    patch.setattr(Machine, "tell", tell)


# ---- children and mutexes: examples, and their defects ---------------------------------------------------------


@workflow(name="kid", version="1")
async def kid(_: Context, said: None) -> None:
    """What a child runs, were it run."""


@workflow(name="parent", version="1")
async def parent(ctx: Context, n: int) -> None:
    await ctx.call("s", "a", undo=command("s", "undo"))
    await ctx.child(kid, None, timeout=minutes(1))


def a_child_is_told_to_end_and_waited_for() -> None:
    machine = started(parent)
    ends(machine, "a", "done")
    cancelled(machine)
    assert [one.path for one in machine.follows.of(LeftChild)] == ["kid"]
    assert list(machine.open) == ["kid"]
    ends(machine, "kid", "child_failed")
    ends(machine, "a/undo", "done")
    read(machine, status="cancelled")
    oracle.Children().read(machine.new)


def nothing_before_a_child_is_undone_while_it_acts() -> None:
    machine = started(parent)
    ends(machine, "a", "done")
    machine.fire(NOON + minutes(1))
    assert list(machine.open) == []
    ends(machine, "kid", "child_failed")
    ends(machine, "a/undo", "done")
    read(machine, status="compensated")


def what_a_child_that_failed_did_is_its_own_affair() -> None:
    @workflow(name="kept", version="1")
    async def kept(ctx: Context, n: int) -> None:
        await ctx.child(kid, None, undo=UNDO)

    machine = started(kept)
    ends(machine, "kid", "child_failed")
    read(machine, status="failed")


@workflow(name="alone", version="1")
async def alone(ctx: Context, n: int) -> None:
    await ctx.call("s", "a", mutex="m", timeout=minutes(1))


def a_mutex_is_kept_while_its_step_may_act() -> None:
    @workflow(name="goes_on", version="1")
    async def goes_on(ctx: Context, n: int) -> None:
        await ctx.settle(ctx.call("s", "a", mutex="m", timeout=minutes(1)))
        await ctx.sleep(hours(1))

    machine = started(goes_on)
    ends(machine, "settle.0/a/mutex", "done")
    machine.fire(NOON + minutes(1))
    assert machine.follows.of(LetGo) == []
    ends(machine, "settle.0/a", "refused")
    assert [one.path for one in machine.follows.of(LetGo)] == ["settle.0/a/mutex"]


def who_waits_no_more_lets_its_turn_go() -> None:
    machine = started(alone)
    cancelled(machine)
    assert [one.path for one in machine.follows.of(LetGo)] == ["a/mutex"]


def child_that_is_not_told(patch: pytest.MonkeyPatch) -> None:
    sound = Journal.takes_back

    def takes_back(self: Journal, ask: Ask, position: int) -> None:
        if not ask.is_child:
            sound(self, ask, position)

    patch.setattr(Journal, "takes_back", takes_back)


def child_that_is_left(patch: pytest.MonkeyPatch) -> None:
    def stop_child(self: Driver, ask: Ask, fact: Fact) -> None:
        branch, _ = self.agenda.open[ask.path]
        self.close(ask, fact)
        self.journal.takes_back(ask, fact.position)
        self.branches.resume(branch, error=Cancelled(ask.stopped))

    patch.setattr(Driver, "_stop_child", stop_child)


def child_that_nothing_waits_for(patch: pytest.MonkeyPatch) -> None:
    sound = Undoing.register

    def register(self: Undoing, ask: Ask, action: Json, scope: Scope) -> None:
        if not ask.is_child or action is not None:
            sound(self, ask, action, scope)

    patch.setattr(Undoing, "register", register)


def failed_child_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(undoing_module, "NOTHING_LEFT", frozenset({"refused"}))


def mutex_let_go_too_early(patch: pytest.MonkeyPatch) -> None:
    sound = Mutexes.over

    def over(self: Mutexes, ask: Ask, fact: Fact, *, settling: bool) -> None:
        sound(self, ask, fact, settling=False)

    patch.setattr(Mutexes, "over", over)


def turn_that_is_kept(patch: pytest.MonkeyPatch) -> None:
    def withdrawn(_: Mutexes, _turn: Ask, _fact: Fact) -> None: ...

    patch.setattr(Mutexes, "withdrawn", withdrawn)


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
    (cancelled_call_not_undone, a_call_under_way_that_is_cancelled_is_undone),
    (withdrawn_step_undone_before_it_has_settled, what_is_withdrawn_is_undone_after_it_has_settled),
    (fork_joined_before_its_branches, a_fork_waits_for_the_cleanup_of_what_it_stopped),
    (fork_joined_twice, a_fork_whose_first_branch_fails_at_once_is_joined_once),
    (error_does_not_stop_the_others, an_error_in_all_stops_the_others),
    (loser_not_undone, what_a_loser_did_is_undone_and_what_the_winner_did_is_kept),
    (winner_forgotten, what_a_loser_did_is_undone_and_what_the_winner_did_is_kept),
    (deaf_loser_kept, a_loser_that_does_not_listen_is_undone_too),
    (cancelled_thrown_twice, a_second_cancel_leaves_the_cleanup_alone),
    (cancel_during_undo_not_shielded, a_cancel_that_comes_while_it_is_undone_waits),
    (cancel_forgotten_at_the_end_of_a_scope, a_cancel_meets_who_is_being_resumed_at_the_end_of_its_scope),
    (path_that_depends_on_where_a_stop_met_it, a_path_is_the_same_wherever_its_branch_was_stopped),
    (branches_that_share_their_count, branches_count_their_names_apart),
    (rank_by_asking, the_last_that_ended_is_undone_first_though_it_was_asked_first),
    (pivot_forgotten, what_was_done_before_a_pivot_stands_in_all_scopes_around),
    (pivot_of_the_inner_scope_only, what_was_done_before_a_pivot_stands_in_all_scopes_around),
    (undoing_that_cannot_be_given_up, nothing_more_is_undone_when_nobody_wants_it),
    (undoing_that_does_not_wait_for_a_person, nothing_more_is_undone_while_a_person_is_asked),
    (stopped_turn_that_takes_messages_back, nothing_follows_from_a_turn_that_was_stopped),
    (event_given_twice, an_event_goes_to_one_of_two_that_wait),
    (newest_event_first, the_oldest_event_goes_first),
    (newest_wait_first, who_has_waited_longest_gets_it),
    (withdrawn_wait_consumes, a_wait_that_was_withdrawn_leaves_the_event_to_the_next),
    (gift_computed_again_in_replay, a_recorded_gift_is_what_the_journal_says),
    (timer_that_a_reply_ends, nobody_answers_a_timer),
    (idle_call_that_waits_for_ever, a_call_that_is_stopped_between_two_sends_is_undone_at_once),
    (last_message_that_speaks_for_all, what_was_given_up_is_undone_though_its_next_message_never_arrived),
    (second_try_of_what_is_tried_once, what_is_tried_at_most_once_is_not_begun_again_after_a_death),
    (refusal_that_is_sent_again, a_refusal_is_the_end_of_its_call),
    (child_that_is_not_told, a_child_is_told_to_end_and_waited_for),
    (child_that_is_left, a_child_is_told_to_end_and_waited_for),
    (child_that_nothing_waits_for, nothing_before_a_child_is_undone_while_it_acts),
    (failed_child_undone, what_a_child_that_failed_did_is_its_own_affair),
    (mutex_let_go_too_early, a_mutex_is_kept_while_its_step_may_act),
    (turn_that_is_kept, who_waits_no_more_lets_its_turn_go),
]

MUST_BE_CAUGHT: list[Plant] = [
    undo_forward,
    cancelled_call_not_undone,
    refused_step_undone,
    two_undos_at_once,
    fork_joined_before_its_branches,
    fork_joined_twice,
    late_refusal_strands_a_scope,
    undo_before_settling,
    loser_not_undone,
    cancelled_thrown_twice,
    replay_that_does_not_compare_kinds,
]
"""What a core like this one gets wrong first; chance alone finds some of it seldom."""


def test_no_defect_of_those_that_must_be_caught_is_without_its_example() -> None:
    assert {*MUST_BE_CAUGHT} <= {defect for defect, _ in CAUGHT}


@pytest.mark.parametrize(("defect", "example"), CAUGHT, ids=[defect.__name__ for defect, _ in CAUGHT])
def test_a_planted_defect_fails_its_example(
    defect: Plant, example: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    example()

    defect(monkeypatch)

    with pytest.raises(AssertionError):
        example()


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    while MACHINES:
        MACHINES.pop().evict()
