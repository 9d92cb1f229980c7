"""Local steps under way: begun once, told once, and never waited for in vain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator import Context, Effect, Retry, local, seconds, workflow
from orchestrator.core.ask import Ask
from orchestrator.core.machine import Machine
from orchestrator.engine.attempt import Done, Failure, Lost, Refusal, Result, Stopped
from orchestrator.engine.clock import Clock
from orchestrator.engine.work import Work
from orchestrator.store.executions import Claim
from orchestrator.testing import NOON
from orchestrator.workflow import Workflow

Json = Any
CLAIM = Claim(1, "0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000", 1, 1, 0, 0, 0, "works", "1", "open", NOON)


def work() -> Any: ...


@workflow(name="works", version="1")
async def works(ctx: Context, n: int) -> Any:
    done = await ctx.step(work, name="plain")
    return [done, await ctx.step(work, name="careful", undo=local(work), timeout=seconds(60))]


class Tries:
    """Runs nothing: a test says what becomes of each try."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.arrived = 0
        self._ends: dict[str, asyncio.Future[Result]] = {}
        self._tasks: dict[str, asyncio.Task[Result]] = {}
        self.work = Work(CLAIM, self.run, arrive=self._arrive)

    def run(self, ask: Ask, key: str) -> asyncio.Task[Result]:
        self.begun.append((ask.path, key.rpartition("/0/")[2]))
        end = self._ends[ask.path] = asyncio.get_running_loop().create_future()

        async def until_told() -> Result:
            try:
                return await end
            except asyncio.CancelledError:
                return Stopped()

        task = self._tasks[ask.path] = asyncio.create_task(until_told())
        return task

    async def end(self, path: str, result: Result) -> None:
        """The try at `path` is over; its result has arrived, and is not told."""
        self._ends[path].set_result(result)
        await self.settled(path)

    async def settled(self, path: str) -> None:
        await asyncio.wait([self._tasks[path]])
        await asyncio.sleep(0)

    def _arrive(self) -> None:
        self.arrived += 1


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.told(NOON)
    return clock


def started(flow: Workflow[int, Any], *, path: str | None = None) -> Machine:
    """`flow` at its first step; or at the one at `path`, with the first one done."""
    machine = Machine(flow.program)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    if path is not None:
        machine.tell("ended", "plain", {"outcome": "done", "value": 1}, NOON)
    return machine


async def test_a_plain_step_begins_before_it_is_stored_and_one_with_an_undo_only_after() -> None:
    tries = Tries()

    tries.work.begin(started(works), position=0)
    machine = started(works, path="careful")
    tries.work.begin(machine, position=machine.position - 1)
    assert tries.begun == [("plain", "plain")]
    tries.work.begin(machine, position=machine.position)

    assert tries.begun == [("plain", "plain"), ("careful", "careful")]
    tries.work.abandon()


async def test_what_follows_an_unstored_result_does_not_begin(clock: Clock) -> None:
    @workflow(name="two", version="1")
    async def two(ctx: Context, n: int) -> None:
        await ctx.step(work, name="plain")
        await ctx.step(work, name="next")

    tries, machine = Tries(), started(two)
    tries.work.begin(machine, position=0)
    await tries.end("plain", Done(1))
    tries.work.tell(machine, clock)

    tries.work.begin(machine, position=0)
    assert [path for path, _ in tries.begun] == ["plain"]
    tries.work.stored()
    tries.work.begin(machine, position=machine.position)

    assert [path for path, _ in tries.begun] == ["plain", "next"]
    tries.work.abandon()


async def test_a_try_that_is_over_but_not_told_does_not_begin_again(clock: Clock) -> None:
    tries, machine = Tries(), started(works)
    tries.work.begin(machine, position=2)
    await tries.end("plain", Done(7))

    tries.work.begin(machine, position=2)

    assert (len(tries.begun), tries.arrived, tries.work.has_arrived) == (1, 1, True)
    tries.work.tell(machine, clock)
    assert [fact.path for fact in machine.new if fact.kind == "ended"] == ["plain"]


async def test_a_result_that_was_not_committed_is_told_again_and_does_not_run_again(clock: Clock) -> None:
    tries, machine = Tries(), started(works)
    tries.work.begin(machine, position=2)
    await tries.end("plain", Done(7))
    tries.work.tell(machine, clock)
    assert tries.work.is_unstored

    tries.work.again()
    again = started(works)
    tries.work.begin(again, position=2)
    tries.work.tell(again, clock)

    assert len(tries.begun) == 1
    assert again.new[-1].path == "careful"
    tries.work.stored()
    assert (tries.work.is_unstored, bool(tries.work)) == (False, False)


@pytest.mark.parametrize(
    ("result", "outcome", "code"),
    [
        (Done({"v": 1}), "done", None),
        (Done("\x00"), "failed", "not-encodable"),
        (Done("x" * 300_000), "failed", "too-large"),
        (Refusal({"code": "sold-out", "detail": ""}), "refused", "sold-out"),
    ],
    ids=["done", "not encodable", "too large", "refused"],
)
async def test_each_result_is_its_fact(clock: Clock, result: Result, outcome: str, code: str | None) -> None:
    tries, machine = Tries(), started(works, path="careful")
    tries.work.begin(machine, position=machine.position)
    await tries.end("careful", result)

    tries.work.tell(machine, clock)

    ended = next(fact for fact in machine.new if fact.kind == "ended" and fact.path == "careful")
    assert (ended.data["outcome"], ended.data.get("error", {}).get("code")) == (outcome, code)
    machine.evict()


async def test_a_try_that_failed_is_told_and_the_next_begins_when_its_time_has_come(clock: Clock) -> None:
    tries, machine = Tries(), started(works)
    tries.work.begin(machine, position=2)
    await tries.end("plain", Failure({"code": "raised", "detail": "no"}))
    tries.work.tell(machine, clock)
    tries.work.stored()
    tries.work.begin(machine, position=machine.position)
    assert len(tries.begun) == 1

    due = machine.next_due()
    assert due is not None
    machine.fire(due[0])
    tries.work.begin(machine, position=machine.position)

    assert tries.begun == [("plain", "plain"), ("plain", "plain")]
    tries.work.abandon()


@pytest.mark.parametrize(("effect", "fact"), [(Effect.KEYED, "attempted"), (Effect.AT_MOST_ONCE, "ended")])
async def test_a_try_that_was_cancelled_half_way_is_made_again_unless_that_must_not_be(
    clock: Clock, effect: Effect, fact: str
) -> None:
    @workflow(name="cancelled", version="1")
    async def cancelled(ctx: Context, n: int) -> None:
        await ctx.step(work, effect=effect, unknown="raise")

    tries, machine = Tries(), started(cancelled)
    tries.work.begin(machine, position=machine.position)
    await tries.end("work", Stopped())

    tries.work.tell(machine, clock)

    said = next(one for one in machine.new if one.path == "work" and one.kind != "asked")
    assert (said.kind, said.data.get("outcome"), said.data["error"]["code"]) == (
        fact,
        "unknown" if fact == "ended" else None,
        "stopped",
    )
    machine.evict()


async def test_a_try_that_was_ended_is_made_again_with_what_it_left(clock: Clock) -> None:
    tries, machine = Tries(), started(works)
    tries.work.begin(machine, position=2)
    await tries.end("plain", Lost({"code": "heartbeat-lost"}, {"page": 3}))

    tries.work.tell(machine, clock)

    [attempted] = [fact for fact in machine.new if fact.kind == "attempted"]
    assert (attempted.data["error"]["code"], attempted.data["left"]) == ("heartbeat-lost", {"page": 3})
    machine.evict()


async def test_a_try_that_could_not_be_stopped_is_not_made_again_and_its_step_is_undone_when_it_is_over(
    clock: Clock,
) -> None:
    tries, machine = Tries(), started(works, path="careful")
    tries.work.begin(machine, position=machine.position)
    still_runs: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    async def rest() -> Result:
        return await still_runs

    end = asyncio.create_task(rest())
    await tries.end("careful", Lost({"code": "attempt-timeout"}, None, end))
    tries.work.tell(machine, clock)
    tries.work.begin(machine, position=machine.position)
    tries.work.stop_closed(machine)
    assert (len(tries.begun), list(machine.open), machine.settling(), bool(tries.work)) == (
        1,
        [],
        ["careful"],
        True,
    )
    still_runs.set_result(Done("late"))
    await asyncio.wait([end])
    await asyncio.sleep(0)
    tries.work.tell(machine, clock)

    [undo] = [fact for fact in machine.new if fact.path == "careful/undo"]
    assert (undo.data["known"], bool(tries.work)) == (True, False)
    machine.evict()


def undoing(machine: Machine) -> None:
    machine.tell("ended", "careful", {"outcome": "failed", "error": {}}, NOON)


async def test_tries_of_an_undo_share_one_key() -> None:
    tries, machine = Tries(), started(works, path="careful")
    undoing(machine)
    tries.work.begin(machine, position=machine.position)
    await tries.end("careful/undo", Refusal({"code": "no", "detail": ""}))
    tries.work.tell(machine, Clock())
    machine.tell("resolved", "careful/undo", {"verdict": "retry", "by": "ann", "reason": ""}, NOON)

    tries.work.stored()
    tries.work.begin(machine, position=machine.position)

    assert tries.begun == [("careful/undo", "careful/undo"), ("careful/undo#2", "careful/undo")]
    tries.work.abandon()


# ---- timeouts --------------------------------------------------------------------------------------------------


async def test_a_step_that_times_out_while_it_runs_is_stopped_and_undone_when_it_is_over(
    clock: Clock,
) -> None:
    tries, machine = Tries(), started(works, path="careful")
    tries.work.begin(machine, position=machine.position)
    machine.fire(NOON + seconds(60))

    tries.work.stop_closed(machine)
    tries.work.stop_closed(machine)
    tries.work.tell(machine, clock)
    assert list(machine.open) == []
    await tries.settled("careful")
    tries.work.tell(machine, clock)

    assert list(machine.open) == ["careful/undo"]
    machine.evict()


async def test_a_thread_that_ends_well_after_its_timeout_makes_the_undo_exact(clock: Clock) -> None:
    tries, machine = Tries(), started(works, path="careful")
    tries.work.begin(machine, position=machine.position)
    machine.fire(NOON + seconds(60))
    await tries.end("careful", Done("late"))

    tries.work.tell(machine, clock)

    [undo] = [fact for fact in machine.new if fact.path == "careful/undo"]
    assert undo.data["known"] is True
    machine.evict()


@pytest.mark.parametrize("why", ["not begun", "between two tries"])
async def test_a_step_that_times_out_while_nothing_of_it_runs_is_undone_at_once(
    clock: Clock, why: str
) -> None:
    tries, machine = Tries(), started(works, path="careful")
    if why == "between two tries":
        machine.attempt_failed("careful", {"code": "raised"}, NOON + seconds(59.9))
    machine.fire(NOON + seconds(60))

    tries.work.tell(machine, clock)

    assert list(machine.open) == ["careful/undo"]
    machine.evict()


async def test_a_try_that_was_cancelled_before_it_began_wakes_its_execution(clock: Clock) -> None:
    tries, machine = Tries(), started(works, path="careful")
    tries.work.begin(machine, position=machine.position)
    machine.fire(NOON + seconds(60))

    tries.work.stop_closed(machine)
    await tries.settled("careful")

    assert tries.arrived == 1
    tries.work.tell(machine, clock)
    assert list(machine.open) == ["careful/undo"]
    machine.evict()


async def test_what_is_abandoned_is_stopped_and_tells_nothing(clock: Clock) -> None:
    tries, machine = Tries(), started(works)
    tries.work.begin(machine, position=2)
    await asyncio.sleep(0)

    tries.work.abandon()
    await tries.settled("plain")

    assert (tries.arrived, bool(tries.work)) == (0, False)


async def test_a_step_that_a_person_decides_about_does_not_begin_again() -> None:
    @workflow(name="holds", version="1")
    async def holds(ctx: Context, n: int) -> None:
        await ctx.step(work, name="plain", unknown="hold", retry=Retry(attempts=3), timeout=seconds(60))

    tries, machine = Tries(), started(holds)
    machine.fire(NOON + seconds(60))

    tries.work.begin(machine, position=machine.position)

    assert tries.begun == []
    machine.evict()
