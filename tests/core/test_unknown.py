"""What is unknown: it settles, becomes known, or a person decides; nothing waits for ever."""

from __future__ import annotations

import gc
from datetime import datetime, timedelta
from typing import Any

import pytest

from contracts import Command, Effect
from orchestrator import Context, Retry, StepError, command, days, hours, local, minutes, seconds, workflow
from orchestrator.core.errors import InputInvalid, ProgramFault, StepRefused, UsageError
from orchestrator.core.follows import TakenBack
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON, FlowTester
from orchestrator.workflow import Workflow

Json = Any
UNDO = command("s", "undo")


class Once(Command[None], endpoint="s", type="once", effect=Effect.AT_MOST_ONCE):
    n: int


def work() -> None: ...


def unwork() -> None: ...


def started(flow: Workflow[int, Any], *, at: datetime = NOON) -> Machine:
    machine = Machine(flow.program)
    machine.tell("started", "", {"input": 1, "seed": ""}, at)
    return machine


def error(code: str) -> dict[str, Json]:
    return {"code": code, "detail": ""}


@workflow(name="works", version="1")
async def works(ctx: Context, n: int) -> None:
    await ctx.step(
        work, undo=local(unwork), timeout=seconds(5), retry=Retry(first=seconds(10), cap=seconds(10))
    )


def test_a_step_that_times_out_between_two_tries_is_undone_at_once() -> None:
    machine = started(works)
    machine.attempt_failed("work", error("raised"), NOON + seconds(1))

    machine.fire(NOON + seconds(5))

    assert list(machine.open) == ["work/undo"]
    machine.evict()


def test_a_step_that_times_out_while_it_runs_is_undone_only_when_it_is_over() -> None:
    machine = started(works)

    machine.fire(NOON + seconds(5))
    assert list(machine.open) == []
    machine.tell("ended", "work", {"outcome": "unknown", "error": error("stopped")}, NOON)

    assert list(machine.open) == ["work/undo"]
    machine.evict()


def test_a_message_is_taken_back_although_its_timeout_stops_the_program() -> None:
    @workflow(name="buggy", version="1")
    async def buggy(ctx: Context, n: int) -> None:
        try:
            await ctx.call("s", "a", undo=UNDO, timeout=minutes(1))
        except StepError:
            raise AttributeError("a bug") from None

    machine = started(buggy)

    with pytest.raises(ProgramFault):
        machine.fire(NOON + minutes(1))

    assert [(back.path, back.position) for back in machine.follows.of(TakenBack)] == [("a", 3)]
    assert [(fact.position, fact.kind) for fact in machine.new][-1] == (3, "ended")


def test_a_service_that_failed_may_have_acted_whatever_it_says_later() -> None:
    @workflow(name="catches", version="1")
    async def catches(ctx: Context, n: int) -> None:
        try:
            await ctx.call("s", "a", undo=UNDO)
        except StepError:
            await ctx.call("s", "b")

    flow = FlowTester(catches, 1)
    flow.tell("ended", "a", {"outcome": "failed", "error": error("broken")})

    flow.late("a", "refused", error("no"))
    flow.tell("ended", "b", {"outcome": "refused", "error": error("no")})

    assert flow.open == ["a/undo"]


def test_a_late_failure_answers_what_was_unknown_and_a_later_refusal_does_not() -> None:
    @workflow(name="waits", version="1")
    async def waits(ctx: Context, n: int) -> None:
        try:
            await ctx.call("s", "a", undo=UNDO)
        except StepError:
            await ctx.call("s", "b")

    flow = FlowTester(waits, 1)
    flow.tell("ended", "a", {"outcome": "unknown", "error": error("sent")})

    flow.late("a", "failed", error("broken"))
    flow.late("a", "refused", error("no"))
    flow.tell("ended", "b", {"outcome": "refused", "error": error("no")})

    assert flow.open == ["a/undo"]


# ---- held steps ------------------------------------------------------------------------------------------------


@workflow(name="asks-a-person", version="1")
async def asks_a_person(ctx: Context, n: int) -> str:
    reply = await ctx.call("s", "a", undo=UNDO, timeout=minutes(1), unknown="hold")
    await ctx.call("s", "b")
    return str(reply)


@pytest.mark.parametrize(
    ("outcome", "opened"),
    [("refused", []), ("done", ["b"])],
    ids=["it was never sent", "its reply was on the way"],
)
def test_a_person_is_not_asked_what_the_message_itself_can_tell(outcome: str, opened: list[str]) -> None:
    machine = started(asks_a_person)
    machine.fire(NOON + minutes(1))
    assert (machine.held, machine.settling(), list(machine.open)) == (None, ["a"], ["a"])

    told = {"value": "r"} if outcome == "done" else {"error": error("never-sent")}
    machine.tell("ended", "a", {"outcome": outcome, **told}, NOON)

    assert (machine.held, machine.settling(), list(machine.open)) == (None, [], opened)
    machine.evict()


def test_a_step_that_a_person_calls_done_is_undone_later() -> None:
    machine = started(asks_a_person)
    machine.fire(NOON + minutes(1))
    machine.tell("ended", "a", {"outcome": "unknown", "error": error("sent")}, NOON)

    machine.tell("resolved", "a", {"verdict": "done", "value": "r", "by": "ann", "reason": ""}, NOON)
    machine.tell("ended", "b", {"outcome": "refused", "error": error("no")}, NOON)

    assert list(machine.open) == ["a/undo"]
    machine.evict()


def test_a_step_that_a_person_calls_done_is_undone_as_the_reply_that_they_gave_says() -> None:
    @workflow(name="exact", version="1")
    async def exact(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=lambda reply: command("s", "undo", reply), unknown="hold")
        await ctx.call("s", "b")

    flow = FlowTester(exact, 1)
    flow.tell("ended", "a", {"outcome": "unknown", "error": error("sent")})

    flow.resolves("a", "done", value={"charge": 7})
    flow.tell("ended", "b", {"outcome": "refused", "error": error("no")})

    ask = flow.machine.open["a/undo"][1]
    assert (ask.args["data"], flow.journal[-1].data["known"]) == ({"charge": 7}, True)


def test_a_held_step_takes_an_answer_and_another_unknown_tells_nothing_new() -> None:
    machine = started(asks_a_person)
    machine.fire(NOON + minutes(1))
    machine.tell("ended", "a", {"outcome": "unknown", "error": error("sent")}, NOON)
    held = machine.held
    assert held is not None

    machine.tell("ended", "a", {"outcome": "unknown", "error": error("sent")}, NOON)
    assert (machine.new[-1].kind, machine.held) == ("late", held)
    machine.tell("ended", "a", {"outcome": "done", "value": "r"}, NOON)

    assert (machine.held, list(machine.open)) == (None, ["b"])
    machine.evict()


def test_a_step_whose_time_has_run_out_does_not_run_again() -> None:
    @workflow(name="holds", version="1")
    async def holds(ctx: Context, n: int) -> None:
        await ctx.step(work, timeout=minutes(1), unknown="hold")

    machine = started(holds)

    machine.fire(NOON + minutes(1))

    assert (machine.settling(local=True), machine.runnable(), machine.next_due()) == (["work"], [], None)
    machine.attempt_failed("work", error("raised"), NOON)
    assert (machine.new[-1].kind, machine.status) == ("finished", "failed")


@pytest.mark.parametrize("verdict", ["retry", "perhaps", None, "unfit", 7])
def test_a_verdict_that_does_not_fit_a_step_has_no_effect(verdict: Json) -> None:
    flow = FlowTester(asks_a_person, 1)
    flow.passes(minutes(1))

    flow.tell("resolved", "a", {"verdict": verdict, "by": "ann", "reason": ""})

    assert (flow.status, flow.open) == ("held", ["a"])


@pytest.mark.parametrize("verdict", ["not_done", "perhaps", None])
def test_a_verdict_that_does_not_fit_an_undo_has_no_effect(verdict: Json) -> None:
    flow = FlowTester(asks_a_person, 1)
    flow.tell("ended", "a", {"outcome": "failed", "error": error("broken")})
    flow.tell("ended", "a/undo", {"outcome": "refused", "error": error("no")})

    flow.tell("resolved", "a/undo", {"verdict": verdict, "by": "ann", "reason": ""})

    assert flow.status == "held"


# ---- undos that nobody knows ---------------------------------------------------------------------------------


@workflow(name="needs-its-reply", version="1")
async def needs_its_reply(ctx: Context, n: int) -> None:
    await ctx.call("s", "before", undo=UNDO)
    await ctx.call("s", "a", undo=lambda reply: None if reply is None else UNDO, timeout=minutes(1))


def test_a_late_refusal_lets_go_what_nobody_knows_how_to_undo() -> None:
    flow = FlowTester(needs_its_reply, 1)
    flow.tell("ended", "before", {"outcome": "done", "value": None})
    flow.passes(minutes(1))
    assert (flow.status, flow.open) == ("held", [])

    flow.late("a", "refused", error("never-sent"))
    flow.tell("ended", "before/undo", {"outcome": "done", "value": None})

    assert (flow.status, flow.told[2:]) == ("compensated", ["before/undo"])


def test_an_answer_for_what_is_already_undone_asks_for_no_undo_any_more() -> None:
    asked: list[Json] = []

    def undo(reply: Json) -> Any:
        asked.append(reply)
        return UNDO

    @workflow(name="twice", version="1")
    async def twice(ctx: Context, n: int) -> None:
        await ctx.call("s", "before", undo=UNDO)
        await ctx.call("s", "a", undo=undo)

    machine = started(twice)
    machine.tell("ended", "before", {"outcome": "done", "value": None}, NOON)
    machine.tell("ended", "a", {"outcome": "unknown", "error": error("sent")}, NOON)
    machine.tell("ended", "a/undo", {"outcome": "done", "value": None}, NOON)

    machine.tell("ended", "a", {"outcome": "done", "value": "late"}, NOON)

    assert ("late" in asked, machine.new[-1].data) == (False, {"outcome": "done", "value": "late"})
    machine.evict()


@pytest.mark.parametrize("by", ["command", "function"])
def test_an_undo_by_a_function_is_run_here_and_one_by_a_command_is_sent_and_taken_back_when_it_is_due(
    by: str,
) -> None:
    @workflow(name="undoes", version="1")
    async def undoes(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=UNDO if by == "command" else local(unwork))
        await ctx.call("s", "b")

    machine = started(undoes)
    machine.tell("ended", "a", {"outcome": "done", "value": None}, NOON)
    machine.tell("ended", "b", {"outcome": "refused", "error": error("no")}, NOON)
    ask = machine.open["a/undo"][1]

    assert (ask.is_message, ask.is_local) == (by == "command", by == "function")
    assert [one.path for one in machine.runnable()] == ([] if by == "command" else ["a/undo"])
    assert machine.fire(NOON + days(2)) == (by == "command")
    assert [back.path for back in machine.follows.of(TakenBack)] == (["a/undo"] if by == "command" else [])
    assert (machine.held and machine.held.code) == ("undo-failed" if by == "command" else None)
    machine.evict()


# ---- when things are due -------------------------------------------------------------------------------------


def test_nothing_falls_due_before_its_time() -> None:
    @workflow(name="naps", version="1")
    async def naps(ctx: Context, n: int) -> None:
        await ctx.sleep(hours(1))

    machine = started(naps)

    assert not machine.fire(NOON + hours(1) - timedelta(microseconds=1))
    assert (list(machine.open), machine.status) == (["sleep"], "open")
    assert machine.fire(NOON + hours(1))
    assert (machine.status, machine.fire(NOON + hours(2))) == ("completed", False)


@pytest.mark.parametrize("undo", [False, True])
def test_only_a_step_without_an_undo_may_run_before_its_asking_is_committed(undo: bool) -> None:
    @workflow(name="works", version="1")
    async def one(ctx: Context, n: int) -> None:
        await ctx.step(work, undo=local(unwork) if undo else None)

    machine = started(one)

    assert [ask.needs_commit for ask in machine.runnable()] == [undo]
    machine.evict()


def test_what_is_first_asked_long_after_the_start_is_due_from_then_on() -> None:
    @workflow(name="hurries", version="1")
    async def hurries(ctx: Context, n: int) -> str:
        before = ctx.now()
        await ctx.call("s", "a", timeout=minutes(5))
        return before.isoformat()

    first = started(hurries)
    journal = first.take_new()[:1]
    first.evict()
    machine = Machine(hurries.program)

    machine.replay(journal, now=NOON + hours(2))

    assert machine.next_due() == (NOON + hours(2) + minutes(5), "a")
    machine.tell("ended", "a", {"outcome": "done", "value": None}, NOON + hours(3))
    assert machine.result == NOON.isoformat()


# ---- what a program may not do -------------------------------------------------------------------------------


def test_an_undo_may_not_be_asked_at_most_once() -> None:
    @workflow(name="undoes", version="1")
    async def undoes(ctx: Context, n: int) -> str:
        try:
            await ctx.call("s", "a", undo=Once(n=n))
        except UsageError as wrong:
            return str(wrong)
        return "sent"

    flow = FlowTester(undoes, 1)

    assert flow.returned == "undo by once: an undo is asked again until it is done, not at most once"


def test_an_undo_made_from_the_reply_may_not_be_either() -> None:
    @workflow(name="undoes", version="1")
    async def undoes(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=lambda _: Once(n=n))

    with pytest.raises(ProgramFault, match="the undo of a raised UsageError: undo by once"):
        FlowTester(undoes, 1)


@pytest.mark.parametrize("undo", [None, UNDO])
def test_a_command_that_is_sent_at_most_once_says_what_becomes_of_the_unknown(undo: Any) -> None:
    @workflow(name="once", version="1")
    async def once(ctx: Context, n: int) -> None:
        await ctx.call(Once(n=n), undo=undo)

    flow = FlowTester(once, 1)

    assert flow.told == ([] if undo is None else ["once"])
    assert (flow.status, flow.journal[-1].kind) == (
        ("failed", "finished") if undo is None else ("open", "asked")
    )


@pytest.mark.parametrize("leaves", [SystemExit(3), GeneratorExit(), BaseException("out")], ids=repr)
def test_a_flow_that_tries_to_leave_its_worker_is_a_bug(leaves: BaseException) -> None:
    @workflow(name="leaves", version="1")
    async def leaving(ctx: Context, n: int) -> None:
        raise leaves

    with pytest.raises(ProgramFault, match=type(leaves).__name__):
        FlowTester(leaving, 1)


@pytest.mark.parametrize("data", ["x" * 300_000, "\x00", object()], ids=["large", "NUL", "no JSON"])
def test_an_error_whose_data_cannot_be_stored_ends_the_flow_without_it(data: Json) -> None:
    @workflow(name="raises", version="1")
    async def raises(ctx: Context, n: int) -> None:
        raise StepRefused("a\x00", "a", {"code": "no\x00", "detail": "\ud800", "data": data})

    flow = FlowTester(raises, 1)

    assert flow.status == "failed"
    assert flow.error == {
        "class": "business",
        "type": "StepRefused",
        "code": "no�",
        "detail": "?",
        "path": "a�",
    }


@pytest.mark.parametrize("asks", ["call", "step", "sleep", "now", "uuid"])
async def test_a_context_is_of_no_use_in_a_step_or_a_callback(asks: str) -> None:
    kept: list[Context] = []

    @workflow(name="leaks", version="1")
    async def leaks(ctx: Context, n: int) -> None:
        kept.append(ctx)
        await ctx.sleep(days(1))

    machine = started(leaks)
    [ctx] = kept

    with pytest.raises(UsageError, match="only while the flow runs"):
        match asks:
            case "call":
                await ctx.call("s", "a")
            case "step":
                await ctx.step(work)
            case "sleep":
                await ctx.sleep(days(1))
            case _:
                getattr(ctx, asks)()
    machine.evict()


def test_what_is_let_go_asks_for_nothing_in_its_cleanup() -> None:
    reached: list[str] = []

    @workflow(name="cleans", version="1")
    async def cleans(ctx: Context, n: int) -> None:
        try:
            try:
                await ctx.sleep(days(1))
            finally:
                reached.append("inner")
                await ctx.call("s", "inner")
                reached.append("never")
        finally:
            reached.append("outer")
            await ctx.sleep(timedelta(hours=1))

    machine = started(cleans)
    machine.take_new()

    machine.evict()
    del machine
    gc.collect()  # a coroutine that were still suspended would complain here

    assert reached == ["inner", "outer"]


def test_a_recorded_input_that_no_longer_fits_holds_before_anything_is_asked() -> None:
    machine = Machine(works.program)

    with pytest.raises(InputInvalid, match="the input does not fit flow works: at /: "):
        machine.tell("started", "", {"input": "one", "seed": ""}, NOON)

    assert [fact.kind for fact in machine.new] == ["started"]
