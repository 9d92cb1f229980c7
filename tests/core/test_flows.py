"""The order saga, driven by hand."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest
from pydantic import BaseModel

from contracts import Command, Refused
from contracts.errors import InputInvalid
from orchestrator import (
    Context,
    OutcomeUnknown,
    Retry,
    StepError,
    StepRefused,
    UsageError,
    days,
    hours,
    local,
    minutes,
    workflow,
)
from orchestrator.core.errors import LimitExceeded, ProgramFault
from orchestrator.core.follows import TakenBack
from orchestrator.core.machine import Machine
from orchestrator.testing import NOON, FlowTester


class Line(BaseModel):
    sku: str
    count: int


class Order(BaseModel):
    id: str
    total: int
    lines: list[Line] = []


class Reserved(BaseModel):
    reservation: str


class Charged(BaseModel):
    charge: str


class Shipped(BaseModel):
    tracking: str


class Release(Command[None], endpoint="inventory", type="stock.release"):
    order: str


class Reserve(Command[Reserved], endpoint="inventory", type="stock.reserve"):
    order: str
    lines: list[Line]


class Refund(Command[None], endpoint="payments", type="payment.refund"):
    order: str
    charge: str | None


class Charge(Command[Charged], endpoint="payments", type="payment.charge"):
    order: str
    amount: int

    def refund(self, done: Charged | None) -> Refund:
        return Refund(order=self.order, charge=done.charge if done else None)


class Ship(Command[Shipped], endpoint="shipping", type="shipment.create"):
    order: str


@workflow(name="order", version="1")
async def order_saga(ctx: Context, order: Order) -> str:
    await ctx.call(Reserve(order=order.id, lines=order.lines), undo=Release(order=order.id))
    charge = Charge(order=order.id, amount=order.total)
    await ctx.call(charge, undo=charge.refund, timeout=minutes(5))
    shipped = await ctx.call(Ship(order=order.id))
    return shipped.tracking


ORDER = Order(id="A", total=90)


def test_a_paid_order_ends_with_its_tracking() -> None:
    flow = FlowTester(order_saga, ORDER)

    flow.expect(Reserve).replies(Reserved(reservation="r"))
    flow.expect(Charge(order="A", amount=90)).replies(Charged(charge="ch"))
    flow.expect(Ship).replies(Shipped(tracking="T"))

    assert (flow.status, flow.returned, flow.told) == ("completed", "T", ["reserve", "charge", "create"])


def test_a_declined_charge_releases_the_stock() -> None:
    flow = FlowTester(order_saga, ORDER)
    flow.expect(Reserve).replies(Reserved(reservation="r"))

    flow.expect(Charge).refuses("declined", "no funds")
    flow.expect(Release(order="A")).replies()

    assert (flow.status, flow.told) == ("compensated", ["reserve", "charge", "reserve/undo"])
    assert flow.error == {
        "class": "business", "type": "StepRefused", "code": "declined", "detail": "no funds", "path": "charge",
    }  # fmt: skip


def test_a_refusal_with_nothing_to_undo_is_failed_and_never_compensated() -> None:
    flow = FlowTester(order_saga, ORDER)

    flow.expect(Reserve).refuses("sold-out")

    assert (flow.status, flow.told) == ("failed", ["reserve"])


def test_a_charge_without_answer_is_refunded_before_the_stock_is_released() -> None:
    flow = FlowTester(order_saga, ORDER)
    flow.expect(Reserve).replies(Reserved(reservation="r"))

    flow.passes(minutes(5))
    flow.expect(Refund(order="A", charge=None)).replies()
    flow.expect(Release).replies()

    assert (flow.status, flow.error["type"]) == ("compensated", "OutcomeUnknown")


def test_what_was_done_is_undone_in_reverse_with_what_the_replies_said() -> None:
    flow = FlowTester(order_saga, ORDER)
    flow.expect(Reserve).replies(Reserved(reservation="r"))
    flow.expect(Charge).replies(Charged(charge="ch"))

    flow.expect(Ship).refuses("no-carrier")
    flow.expect(Refund(order="A", charge="ch")).replies()
    flow.expect(Release).replies()

    assert (flow.status, flow.told[3:]) == ("compensated", ["charge/undo", "reserve/undo"])


def test_no_undo_before_its_step_has_settled() -> None:
    machine = Machine(order_saga.program)
    machine.tell("started", "", {"input": ORDER.model_dump(), "seed": ""}, NOON)
    machine.tell("ended", "reserve", {"outcome": "done", "value": {"reservation": "r"}}, NOON)

    assert machine.fire(NOON + minutes(5))

    assert [back.path for back in machine.follows.of(TakenBack)] == ["charge"]
    assert list(machine.open) == []
    machine.tell("late", "charge", {"outcome": "refused", "error": {"code": "never-sent"}}, NOON)
    assert list(machine.open) == ["reserve/undo"]


def test_a_late_reply_makes_the_undo_exact_before_it_is_asked() -> None:
    machine = Machine(order_saga.program)
    machine.tell("started", "", {"input": ORDER.model_dump(), "seed": ""}, NOON)
    machine.tell("ended", "reserve", {"outcome": "done", "value": {"reservation": "r"}}, NOON)
    machine.fire(NOON + minutes(5))

    machine.tell("ended", "charge", {"outcome": "done", "value": {"charge": "ch"}}, NOON)

    [(_, ask)] = machine.open.values()
    assert (ask.path, ask.args["data"]) == ("charge/undo", {"order": "A", "charge": "ch"})


def test_a_late_refusal_after_its_undo_was_asked_changes_nothing() -> None:
    flow = FlowTester(order_saga, ORDER)
    flow.expect(Reserve).replies(Reserved(reservation="r"))
    flow.passes(minutes(5))

    flow.late("charge", "refused", {"code": "undone"})

    assert flow.open == ["charge/undo"]


def test_a_late_refusal_of_what_is_known_to_be_done_does_not_drop_its_undo() -> None:
    flow = FlowTester(order_saga, ORDER)
    flow.expect(Reserve).replies(Reserved(reservation="r"))

    flow.late("reserve", "refused", {"code": "never-sent"})
    flow.expect(Charge).refuses("declined")

    assert flow.open == ["reserve/undo"]


def test_a_late_refusal_that_empties_an_unwinding_scope_releases_it_at_once() -> None:
    @workflow(name="one", version="1")
    async def one(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=Release(order=str(n)), timeout=minutes(1))

    machine = Machine(one.program)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    machine.fire(NOON + minutes(1))
    assert machine.status == "open"

    machine.tell("ended", "a", {"outcome": "refused", "error": {"code": "never-sent"}}, NOON)

    assert machine.status == "failed"


def test_an_undo_that_fails_holds_the_execution_until_a_person_retries_it() -> None:
    flow = FlowTester(order_saga, ORDER)
    flow.expect(Reserve).replies(Reserved(reservation="r"))
    flow.expect(Charge).refuses("declined")

    flow.expect(Release).fails("broken")
    assert (flow.status, flow.open) == ("held", [])
    flow.resolves("reserve/undo", "retry", by="ann", reason="service is back")
    flow.expect(Release).replies()

    assert (flow.status, flow.told[-1]) == ("compensated", "reserve/undo#2")


@pytest.mark.parametrize(("verdict", "status"), [("done", "compensated"), ("skip", "failed")])
def test_an_undo_marked_done_counts_and_a_skipped_one_stands(verdict: str, status: str) -> None:
    flow = FlowTester(order_saga, ORDER)
    flow.expect(Reserve).replies(Reserved(reservation="r"))
    flow.expect(Charge).refuses("declined")
    flow.expect(Release).is_unknown()

    flow.resolves("reserve/undo", verdict)

    assert flow.status == status
    assert flow.journal[-1].data.get("stands", []) == ([] if verdict == "done" else ["reserve"])


def test_an_undo_that_nobody_knows_how_to_do_asks_a_person() -> None:
    @workflow(name="needs-reply", version="1")
    async def needs_reply(ctx: Context, n: int) -> None:
        await ctx.call(Charge(order="A", amount=n), undo=lambda c: c and Refund(order="A", charge=c.charge))

    flow = FlowTester(needs_reply, 1)

    flow.expect(Charge).is_unknown()

    assert flow.status == "held"
    flow.late("charge", "done", {"charge": "ch"})
    flow.resolves("charge/undo", "retry")
    flow.expect(Refund(order="A", charge="ch")).replies()
    assert flow.status == "compensated"


def test_a_reply_that_does_not_fit_its_model_is_done_and_undone() -> None:
    flow = FlowTester(order_saga, ORDER)
    flow.expect(Reserve).replies(Reserved(reservation="r"))

    flow.tell("ended", "charge", {"outcome": "done", "value": {"chargé": 7}})

    assert flow.expect(Refund).data == {"order": "A", "charge": None}
    flow.expect(Refund).replies()
    flow.expect(Release).replies()
    assert (flow.error["type"], flow.error["detail"]) == ("ReplyInvalid", "at /charge: Field required")


def test_an_author_may_catch_what_went_wrong_and_go_on() -> None:
    @workflow(name="tries", version="1")
    async def tries(ctx: Context, n: int) -> str:
        try:
            await ctx.call(Charge(order="A", amount=n), undo=Refund(order="A", charge=None))
        except StepRefused as no:
            return f"{no.code} {no.may_have_acted}"
        return "charged"

    flow = FlowTester(tries, 1)

    flow.expect(Charge).refuses("declined")

    assert flow.returned == "declined False"


def test_an_unknown_outcome_that_is_to_be_held_waits_for_a_person() -> None:
    @workflow(name="careful", version="1")
    async def careful(ctx: Context, n: int) -> str:
        try:
            charged = await ctx.call(
                Charge(order="A", amount=n),
                undo=lambda c: c and Refund(order="A", charge=c.charge),
                unknown="hold",
            )
        except StepError as error:
            return f"{type(error).__name__} {error.code}"
        return charged.charge

    def held() -> FlowTester[int, str]:
        flow = FlowTester(careful, 1)
        flow.passes(days(1))
        assert (flow.status, flow.machine.held and flow.machine.held.path) == ("held", "charge")
        return flow

    for verdict, value, returned in [
        ("done", {"charge": "ch"}, "ch"),
        ("not_done", None, "StepRefused resolved"),
        ("skip", None, "OutcomeUnknown resolved"),
    ]:
        flow = held()
        flow.resolves("charge", verdict, value=value)
        assert flow.returned == returned


def test_a_sleep_ends_at_its_time_and_now_moves_with_facts() -> None:
    @workflow(name="naps", version="1")
    async def naps(ctx: Context, n: int) -> list[str]:
        before = ctx.now()
        await ctx.sleep(hours(n))
        assert ctx.now() == ctx.now()
        return [before.isoformat(), ctx.now().isoformat()]

    flow = FlowTester(naps, 2)

    flow.passes(hours(1))
    assert flow.status == "open"
    flow.passes(hours(3))

    assert flow.returned == [NOON.isoformat(), (NOON + hours(2)).isoformat()]


def test_a_uuid_is_the_same_in_every_replay_and_differs_by_place_and_seed() -> None:
    @workflow(name="draws", version="1")
    async def draws(ctx: Context, n: int) -> list[UUID]:
        return [ctx.uuid(), ctx.uuid()]

    one = FlowTester(draws, 1, seed="one").returned
    again = FlowTester(draws, 1, seed="one").returned
    other = FlowTester(draws, 1, seed="two").returned

    assert one == again
    assert len({*one, *other}) == 4


def fetch(n: int) -> int:
    return n * 2


def forget(n: int) -> None:
    assert n


async def afetch(n: int) -> int:
    return n * 3


def test_a_local_step_is_asked_and_its_result_remembered() -> None:
    @workflow(name="steps", version="1")
    async def steps(ctx: Context, n: int) -> int:
        return await ctx.step(fetch, n) + await ctx.step(afetch, n, name="more")

    flow = FlowTester(steps, 1)

    flow.expect(fetch).replies(2)
    flow.expect(afetch).replies(3)

    assert (flow.returned, flow.told) == (5, ["fetch", "more"])


def test_a_local_step_is_tried_again_by_its_policy_and_then_failed_and_undone() -> None:
    @workflow(name="retries", version="1")
    async def retries(ctx: Context, n: int) -> int:
        return await ctx.step(fetch, n, undo=local(forget, n), retry=Retry(attempts=2))

    flow = FlowTester(retries, 1)

    flow.expect(fetch).raises("raised", "ValueError: no")
    assert flow.machine.runnable() == []
    flow.passes(timedelta(seconds=1))
    assert [ask.attempt for ask in flow.machine.runnable()] == [2]
    flow.expect(fetch).raises("raised", "ValueError: no")

    assert flow.expect(forget).data == [1]
    flow.expect(forget).replies()
    assert (flow.status, flow.error["type"]) == ("compensated", "StepFailed")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("x" * 300_000, "too-large"),
        ("ü" * 200_000, "too-large"),
        (float("nan"), "not-encodable"),
        ("\x00", "not-encodable"),
        ("\ud800", "not-encodable"),
    ],
    ids=["large", "large in UTF-8", "NaN", "NUL", "lone surrogate"],
)
def test_an_argument_that_cannot_be_stored_is_a_refused_ask(value: object, code: str) -> None:
    @workflow(name="sends", version="1")
    async def sends(ctx: Context, n: int) -> str:
        try:
            await ctx.call("s", "a", {"v": value}, undo=Release(order="A"))
        except StepRefused as error:
            return error.code
        return "sent"

    flow = FlowTester(sends, 1)

    assert flow.returned == code


@pytest.mark.parametrize("output", ["x" * 300_000, "\x00"], ids=["large", "NUL"])
def test_an_output_that_cannot_be_stored_fails_the_flow(output: str) -> None:
    @workflow(name="returns", version="1")
    async def returns(ctx: Context, n: int) -> str:
        return output

    flow = FlowTester(returns, 1)

    assert (flow.status, flow.error["code"] in {"too-large", "not-encodable"}) == ("failed", True)


def test_an_input_that_does_not_fit_is_refused_with_every_place() -> None:
    with pytest.raises(InputInvalid, match=r"at /id: .*; at /lines/0/count: "):
        order_saga.checked({"total": 1, "lines": [{"sku": "s", "count": "many"}]})


def test_awaiting_something_foreign_says_what_to_use() -> None:
    @workflow(name="foreign", version="1")
    async def foreign(ctx: Context, n: int) -> None:
        await asyncio.sleep(n)

    for n in (0, 1):
        with pytest.raises(ProgramFault, match=r"use ctx.sleep|event loop"):
            FlowTester(foreign, n)


def test_a_bug_holds_and_undoes_nothing() -> None:
    @workflow(name="buggy", version="1")
    async def buggy(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=Release(order="A"))
        raise AttributeError("no such thing")

    flow = FlowTester(buggy, 1)

    with pytest.raises(ProgramFault, match="AttributeError: no such thing"):
        flow.tell("ended", "a", {"outcome": "done", "value": None})

    assert [(f.kind, f.path) for f in flow.machine.new] == [("ended", "a")]


def test_an_undo_that_raises_is_a_bug_of_the_program() -> None:
    def undo(_: object) -> Release:
        raise KeyError("x")

    @workflow(name="undo-raises", version="1")
    async def undo_raises(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=undo)

    with pytest.raises(ProgramFault, match="the undo of a raised KeyError"):
        FlowTester(undo_raises, 1)


@pytest.mark.parametrize("span", [timedelta(0), timedelta(days=-1), timedelta(days=4000)])
def test_a_timeout_outside_of_its_bounds_is_refused_before_anything_is_written(span: timedelta) -> None:
    @workflow(name="spans", version="1")
    async def spans(ctx: Context, n: int) -> None:
        await ctx.sleep(span)

    flow = FlowTester(spans, 1)

    assert (flow.error["type"], flow.told) == ("UsageError", [])


def test_a_nested_function_cannot_be_an_undo() -> None:
    flow_error = pytest.raises(Exception, match="can be imported by name")
    with flow_error:
        local(lambda: None)


def test_an_undo_must_be_given_what_its_function_takes() -> None:
    with pytest.raises(UsageError, match="missing a required argument"):
        local(forget)  # pyright: ignore[reportArgumentType]  # that is the point


def test_the_context_is_of_no_use_outside_of_its_flow() -> None:
    kept: list[Context] = []

    @workflow(name="leaks", version="1")
    async def leaks(ctx: Context, n: int) -> None:
        kept.append(ctx)
        await ctx.sleep(hours(1))

    FlowTester(leaks, 1)

    with pytest.raises(Exception, match="only while the flow runs"):
        kept[0].now()


def test_a_flow_that_catches_everything_cannot_hide_that_it_was_stopped() -> None:
    @workflow(name="hides", version="1")
    async def hides(ctx: Context, n: int) -> str:
        try:
            for _ in range(20):
                await ctx.step(fetch, n)
        except BaseException:  # noqa: BLE001
            pass
        return "hid it"

    machine = Machine(hides.program, facts_max=10)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON)

    with pytest.raises(LimitExceeded, match="facts_max"):
        for n in range(20):
            machine.tell(
                "ended", "fetch" if n == 0 else f"fetch#{n + 1}", {"outcome": "done", "value": 1}, NOON
            )


def test_refused_says_definitely_not_done() -> None:
    error = Refused("declined", "no funds", detail={"limit": 5})

    assert (error.code, error.message, error.detail, str(error)) == (
        "declined",
        "no funds",
        {"limit": 5},
        "declined: no funds",
    )


def test_what_was_parked_runs_its_cleanup_when_let_go_and_records_nothing() -> None:
    ended: list[str] = []

    @workflow(name="cleans", version="1")
    async def cleans(ctx: Context, n: int) -> None:
        try:
            await ctx.sleep(hours(1))
        finally:
            ended.append("cleanup")
            ctx.now()

    machine = Machine(cleans.program)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    before = len(machine.new)

    machine.evict()

    assert (ended, len(machine.new)) == (["cleanup"], before)


def test_an_unknown_outcome_is_an_error_that_may_have_acted() -> None:
    assert OutcomeUnknown("charge", "charge", {"code": "timeout"}).may_have_acted


def test_a_command_without_reply_passes_over_whatever_its_service_adds() -> None:
    @workflow(name="tells", version="1")
    async def tells(ctx: Context, n: int) -> str:
        return str(await ctx.call(Release(order="A")))

    flow = FlowTester(tells, 1)

    flow.tell("ended", "release", {"outcome": "done", "value": {"ok": True}})

    assert flow.returned == "None"
