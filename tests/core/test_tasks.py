"""Work that is left in a queue: tried again by the policy of the flow, taken back, and undone as what it came to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import (
    Command,
    Context,
    Effect,
    ReplyInvalid,
    Retry,
    StepError,
    StepRefused,
    UsageError,
    command,
    days,
    hours,
    minutes,
    seconds,
    workflow,
)
from orchestrator.core.follows import TakenBack
from orchestrator.core.machine import Machine
from orchestrator.core.terms import Op
from orchestrator.testing import NOON, FlowTester
from orchestrator.workflow import Workflow
from tests.core.answers import bare, driven, tell, undone

Json = Any


class Resize(Command[str], type="image.resize"):
    image: str


class Print(Command[str], type="paper.print", effect=Effect.AT_MOST_ONCE):
    image: str


TWICE = Retry.fixed(minutes(1), attempts=2, jitter=0)
BUSY = Retry.fixed(minutes(1), attempts=3, jitter=0, only=("busy",))


def resizes(what: Command[str] = Resize(image="a"), **options: Any) -> Workflow[str, str]:  # noqa: B008  # frozen
    """A flow of one task; it returns why that did not end well."""

    @workflow(name="resizes", version="1")
    async def flow(ctx: Context, _: str) -> str:
        try:
            return await ctx.task(what, queue="media", name="resize", **options)
        except StepError as error:
            return f"{type(error).__name__} {error.code} {error.may_have_acted}"

    return flow


def told(flow: FlowTester[Any, Any]) -> list[str]:
    return [f"{fact.kind} {fact.path}".rstrip() for fact in flow.journal]


def test_a_task_is_asked_with_its_queue_and_its_reply_is_returned() -> None:
    flow = FlowTester(resizes(priority=5), "")

    assert flow.expect(Resize(image="a")).ask.args == {
        "do": "task", "queue": "media", "name": "image.resize", "data": {"image": "a"}, "priority": 5,
    }  # fmt: skip
    assert flow.journal[1].data["due"] == (NOON + days(1)).isoformat()
    flow.expect(Resize).replies("small")
    assert flow.returned == "small"


def test_a_try_that_failed_is_followed_by_another_one_at_its_time() -> None:
    flow = FlowTester(resizes(retry=TWICE), "")

    flow.expect(Resize).fails("no-memory")
    flow.passes(seconds(59))
    assert told(flow)[-1] == "attempted resize"
    flow.passes(seconds(1))
    assert told(flow)[-1] == "resent resize"
    flow.expect(Resize).fails("no-memory")
    assert flow.returned == "StepFailed no-memory True"


def test_a_task_has_five_tries_unless_it_says_otherwise() -> None:
    flow = FlowTester(resizes(), "")

    for _ in range(5):
        flow.expect(Resize).fails("no-memory")
        flow.passes(minutes(10))
    assert flow.returned == "StepFailed no-memory True"
    assert told(flow).count("attempted resize") == 4


def test_only_errors_of_the_policy_s_codes_are_tried_again() -> None:
    flow = FlowTester(resizes(retry=BUSY), "")

    flow.expect(Resize).fails("busy")
    flow.passes(minutes(1))
    flow.expect(Resize).fails("broken")
    assert flow.returned == "StepFailed broken True"


@pytest.mark.parametrize("code", ["too-large", "not-encodable", "reply-invalid"])
def test_what_another_try_cannot_mend_is_not_tried_again(code: str) -> None:
    flow = FlowTester(resizes(retry=TWICE), "")

    flow.expect(Resize).fails(code)
    assert flow.returned == f"StepFailed {code} True"


def test_a_lost_worker_s_task_is_tried_again_and_is_unknown_when_its_tries_are_used_up() -> None:
    flow = FlowTester(resizes(retry=TWICE), "")

    flow.expect(Resize).is_unknown("worker-lost")
    flow.passes(minutes(1))
    flow.expect(Resize).is_unknown("worker-lost")
    assert flow.returned == "OutcomeUnknown worker-lost True"


def test_an_at_most_once_task_of_a_lost_worker_is_unknown_at_once() -> None:
    flow = FlowTester(resizes(Print(image="a"), unknown="raise"), "")

    flow.expect(Print).is_unknown("worker-lost")
    assert flow.returned == "OutcomeUnknown worker-lost True"


def test_a_refusal_is_never_tried_again() -> None:
    flow = FlowTester(resizes(retry=TWICE), "")

    flow.expect(Resize).refuses("no-such-image")
    assert flow.returned == "StepRefused no-such-image False"


def test_the_time_of_a_task_bounds_all_of_its_tries() -> None:
    flow = FlowTester(resizes(retry=Retry.fixed(minutes(1), attempts=9, jitter=0), timeout=minutes(3)), "")

    for _ in range(2):
        flow.expect(Resize).fails("busy")
        flow.passes(minutes(1))
    flow.passes(hours(1))
    assert flow.returned == "OutcomeUnknown timeout True"


def test_a_task_whose_outcome_is_unknown_may_ask_a_person() -> None:
    flow = FlowTester(resizes(Print(image="a"), unknown="hold"), "")

    flow.expect(Print).is_unknown("worker-lost")
    assert flow.status == "held"
    flow.resolves("resize", "done", value="small")
    assert flow.returned == "small"


def test_a_reply_that_does_not_fit_is_done_and_said_to_be_invalid() -> None:
    @workflow(name="resizes", version="1")
    async def resizes_badly(ctx: Context, _: str) -> str:
        try:
            return await ctx.task(Resize(image="a"), queue="media", undo=command("depot", "image.drop"))
        except ReplyInvalid:
            raise StepRefused("x", "x", {"code": "seen"}) from None

    flow = FlowTester(resizes_badly, "")
    flow.expect(Resize).replies({"no": "text"})  # pyright: ignore[reportArgumentType]  # that is the point
    assert flow.told[-1] == "resize/undo"


def undoing(**options: Any) -> Callable[[Context, int], Op[str]]:
    async def flow(ctx: Context, _: int) -> str:
        await ctx.task(Resize(image="a"), queue="media", undo=command("depot", "image.drop"), **options)
        await ctx.call("bank", "transfer.create", name="pay")
        return "paid"

    return flow


def test_a_task_that_was_done_is_undone_by_a_command_that_names_no_message_of_it() -> None:
    flow = driven(undoing())

    flow.expect(Resize).replies("small")
    flow.tell("ended", "pay", {"outcome": "refused", "error": {"code": "declined"}})
    asked = flow.journal[-1]
    assert (asked.path, asked.data["known"]) == ("resize/undo", True)
    assert "undoes_at" not in asked.data
    flow.tell("ended", "resize/undo", {"outcome": "done"})
    assert flow.status == "compensated"


def test_a_cancelled_task_settles_before_it_is_undone_and_its_late_refusal_drops_that() -> None:
    machine = bare(undoing())
    tell(machine, "cancel_asked", "", {"by": "ann", "reason": "enough"})

    [back] = machine.follows.of(TakenBack)
    assert (back.path, back.task, machine.settling()) == ("resize", True, ["resize"])
    assert undone(machine.new) == []
    tell(machine, "ended", "resize", {"outcome": "refused", "error": {"code": "never-sent"}})
    assert machine.status == "cancelled"


def test_a_late_result_makes_the_undo_of_a_cancelled_task_exact() -> None:
    machine = bare(undoing())
    tell(machine, "cancel_asked", "", {"by": "ann", "reason": "enough"})
    tell(machine, "ended", "resize", {"outcome": "done", "value": "small"})

    assert [fact.kind for fact in machine.new if fact.path == "resize"] == ["asked", "withdrawn", "late"]
    assert machine.new[-1].data["known"] is True


def test_a_task_that_waits_for_its_next_try_has_nothing_to_settle_and_may_have_acted() -> None:
    machine = bare(undoing(retry=TWICE))
    tell(machine, "ended", "resize", {"outcome": "failed", "error": {"code": "busy"}})
    tell(machine, "cancel_asked", "", {"by": "ann", "reason": "enough"})

    assert (machine.follows.of(TakenBack), machine.settling()) == ([], [])
    assert machine.new[-1].path == "resize/undo"


def test_a_second_try_that_never_began_says_nothing_of_the_first() -> None:
    machine = bare(undoing(retry=TWICE))
    tell(machine, "ended", "resize", {"outcome": "failed", "error": {"code": "busy"}})
    assert machine.fire(machine.at + minutes(1))
    tell(machine, "cancel_asked", "", {"by": "ann", "reason": "enough"})
    tell(machine, "ended", "resize", {"outcome": "refused", "error": {"code": "never-sent"}})

    assert machine.new[-1].path == "resize/undo"


def test_the_death_of_the_flow_s_worker_is_nothing_to_a_task() -> None:
    machine = bare(undoing())
    machine.remark("orphaned", "", {"by": "w"}, machine.at)

    again = Machine(machine.program)
    again.replay([*machine.new])
    assert again.open["resize"][1].attempt == 1
    assert not again.runnable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": ""}, "queue '': expected 1 to 128 bytes"),
        ({"queue": "a\nb"}, "expected 1 to 128 bytes of printable text"),
        ({"priority": 101}, "priority=101: expected -100 to 100"),
        ({"timeout": seconds(0)}, "a timeout of 0:00:00"),
        ({"retry": Retry(only=(ValueError,))}, "task image.resize: retry= by ValueError: expected codes"),
        ({"retry": Retry(within=days(2))}, "retry.within of 2 days"),
        ({"unknown": "maybe"}, "unknown='maybe'"),
    ],
)
def test_what_no_worker_could_take_is_a_usage_error(options: dict[str, Any], message: str) -> None:
    said: dict[str, Any] = {"queue": "media"} | options

    @workflow(name="asks", version="1")
    async def asks(ctx: Context, _: str) -> str:
        try:
            return await ctx.task(Resize(image="a"), **said)
        except UsageError as error:
            return str(error)

    assert message in FlowTester(asks, "").returned


def test_an_at_most_once_task_needs_a_thought_for_its_unknown_outcome_and_has_one_try() -> None:
    @workflow(name="asks", version="1")
    async def asks(ctx: Context, _: str) -> str:
        said: list[str] = []
        for options in ({}, {"unknown": "raise", "retry": TWICE}):
            try:
                await ctx.task(Print(image="a"), queue="q", **options)  # pyright: ignore[reportArgumentType]
            except UsageError as error:
                said.append(str(error))
        return "; ".join(said)

    assert "needs undo= or unknown=" in FlowTester(asks, "").returned
    assert "at most once, and retry= with 2 attempts" in FlowTester(asks, "").returned


def test_a_command_with_a_type_alone_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="names no endpoint="):
        Resize(image="a").as_action()
    with pytest.raises(TypeError, match="names a type= too"):
        type("Odd", (Command,), {}, endpoint="depot")


def test_the_first_of_two_tasks_withdraws_the_other_one() -> None:
    async def races(ctx: Context, _: int) -> str:
        return await ctx.first(
            ctx.task(Resize(image="a"), queue="fast"), ctx.task(Resize(image="b"), queue="slow")
        )

    machine = bare(races)
    tell(machine, "ended", "first.0/resize", {"outcome": "done", "value": "small"})

    assert machine.status == "completed"
    assert [(back.path, back.task) for back in machine.follows.of(TakenBack)] == [("first.1/resize", True)]
