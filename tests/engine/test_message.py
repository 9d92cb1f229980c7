"""A command on the wire: each attribute as the service's page describes it, made from its fact alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest

from contracts import Command, Effect, trace
from contracts.envelope import Envelope, decode_structured
from orchestrator import Context, local, minutes, workflow
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.engine.message import Identity, Wire, instant, message_of
from orchestrator.engine.turn import messages_of
from orchestrator.store.commits import NewMessage
from orchestrator.testing import NOON
from orchestrator.workflow import Workflow

Json = Any
EXECUTION = "0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000"
TRACE = trace.root("an order")


class Refund(Command[None], endpoint="payments", type="payment.refund"):
    order: str


class Charge(Command[None], endpoint="payments", type="payment.charge"):
    order: str
    amount: int


class Once(Command[None], endpoint="printer", type="page.print", effect=Effect.AT_MOST_ONCE):
    page: int


def work() -> None: ...


@workflow(name="pays", version="1")
async def pays(ctx: Context, n: int) -> None:
    await ctx.call(Charge(order="A", amount=n), undo=Refund(order="A"), timeout=minutes(5))
    await ctx.step(work, undo=Refund(order="B"))
    await ctx.call(Charge(order="A", amount=n))


def sender(**more: Any) -> Identity:
    base: dict[str, Any] = {
        "tenant": 1, "execution": EXECUTION, "epoch": 0, "key": "order-1042", "traceparent": TRACE,
    }  # fmt: skip
    return Identity(**(base | more))


WIRE = Wire("/waypost", "https://waypost.example/", {(1, "payments"): "default/acme"})


def run(flow: Workflow[int, Any], *outcomes: tuple[str, str], at: datetime = NOON) -> list[Fact]:
    """The facts of `flow` after these (path, outcome)."""
    machine = Machine(flow.program)
    machine.tell("started", "", {"input": 1, "seed": ""}, at)
    for n, (path, outcome) in enumerate(outcomes, 1):
        more: dict[str, Json] = {"value": None} if outcome == "done" else {"error": {"code": "c"}}
        machine.tell("ended", path, {"outcome": outcome} | more, at + timedelta(seconds=n))
    machine.evict()
    return machine.take_new()


def sent(facts: Sequence[Fact], identity: Identity | None = None) -> dict[str, tuple[NewMessage, Envelope]]:
    asked = [fact for fact in facts if fact.kind == "asked"]
    messages = messages_of(asked, identity or sender(), WIRE)
    return {message.path: (message, decode_structured(message.body)) for message in messages}


UNDONE = [("charge", "done"), ("work", "done"), ("charge#2", "refused"), ("work/undo", "done")]


def test_a_command_says_what_the_wire_asks_for() -> None:
    message, envelope = sent(run(pays))["charge"]

    assert envelope == Envelope(
        id=str(message.message_id),
        source=f"/waypost/executions/{EXECUTION}",
        type="payment.charge",
        subject="order-1042",
        time="2027-01-15T12:00:00Z",
        datacontenttype="application/json",
        data={"order": "A", "amount": 1},
        extensions={
            "correlationid": EXECUTION,
            "idempotencykey": f"{EXECUTION}/0/charge",
            "replyto": "https://waypost.example/events/default/acme",
            "expirytime": "2027-01-15T12:05:00Z",
            "traceparent": trace.child(TRACE, f"{EXECUTION}/0/charge"),
            "sequence": "0000000000000000002",
        },
    )
    assert (message.endpoint, message.lane, message.expires_at, message.at_most_once) == (
        "payments",
        f"{EXECUTION}/0/charge",
        NOON + minutes(5),
        False,
    )


def test_the_trace_is_that_of_the_execution_and_each_command_has_a_span_of_its_own() -> None:
    found = sent(run(pays, *UNDONE))
    traces = [trace.parse(str(envelope.extensions["traceparent"])) for _, envelope in found.values()]
    root = trace.parse(TRACE)

    assert root is not None
    assert {one.trace_id for one in traces if one is not None} == {root.trace_id}
    assert len({one.span_id for one in traces if one is not None}) == len(found) == 4


def test_an_undo_names_what_it_undoes_and_goes_behind_it_in_its_lane() -> None:
    found = sent(run(pays, *UNDONE))
    charge, undo = found["charge"], found["charge/undo"]

    assert (undo[1].extensions["undoes"], undo[1].extensions["known"]) == (charge[1].id, True)
    assert undo[0].lane == charge[0].lane == f"{EXECUTION}/0/charge"
    assert undo[1].extensions["idempotencykey"] == f"{EXECUTION}/0/charge/undo"
    assert (undo[1].type, undo[1].data) == ("payment.refund", {"order": "A"})


def test_an_undo_of_something_unknown_says_so() -> None:
    facts = run(pays, ("charge", "unknown"))

    _, envelope = sent(facts)["charge/undo"]

    assert envelope.extensions["known"] is False


def test_an_undo_that_is_tried_again_is_another_message_with_the_same_key() -> None:
    machine = Machine(pays.program)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    machine.tell("ended", "charge", {"outcome": "failed", "error": {}}, NOON)
    machine.tell("ended", "charge/undo", {"outcome": "failed", "error": {}}, NOON)
    machine.tell("resolved", "charge/undo", {"verdict": "retry", "by": "ann", "reason": ""}, NOON)
    machine.evict()

    found = sent(machine.take_new())
    first, second = found["charge/undo"], found["charge/undo#2"]

    assert first[0].message_id != second[0].message_id
    assert first[1].extensions["idempotencykey"] == second[1].extensions["idempotencykey"]
    assert first[0].lane == second[0].lane
    assert first[1].extensions["undoes"] == second[1].extensions["undoes"]


def test_a_command_that_undoes_a_local_step_undoes_no_message() -> None:
    message, envelope = sent(run(pays, *UNDONE))["work/undo"]

    assert {"undoes", "known"} & set(envelope.extensions) == set()
    assert (message.lane, envelope.extensions["idempotencykey"]) == (
        f"{EXECUTION}/0/work",
        f"{EXECUTION}/0/work/undo",
    )


def test_only_commands_leave() -> None:
    @workflow(name="local", version="1")
    async def stays(ctx: Context, n: int) -> None:
        await ctx.step(work, undo=local(work))
        await ctx.call("s", "a", {"v": "\x00"})

    facts = run(stays, ("work", "done"))

    assert [fact.path for fact in facts if fact.kind == "asked"] == ["work", "a", "work/undo"]
    assert sent(facts) == {}


def test_the_same_fact_is_the_same_message_to_the_last_byte() -> None:
    fact = run(pays)[1]

    assert message_of(fact, sender(), WIRE) == message_of(fact, sender(), WIRE)


def test_a_fact_read_back_from_the_journal_is_the_same_message() -> None:
    fact = run(pays)[1]
    zone = timezone(timedelta(hours=5))

    again = Fact(fact.position, fact.kind, fact.path, fact.data, fact.at.astimezone(zone))

    assert message_of(again, sender(), WIRE) == message_of(fact, sender(), WIRE)


@pytest.mark.parametrize(
    "other",
    [{"execution": "0199aaaa-bbbb-7ccc-8ddd-eeeeffff0001"}, {"epoch": 1}],
    ids=["another execution", "another epoch"],
)
def test_another_execution_or_epoch_is_another_message_under_another_key(other: dict[str, Json]) -> None:
    fact = run(pays)[1]
    one, two = message_of(fact, sender(), WIRE), message_of(fact, sender(**other), WIRE)

    assert one.message_id != two.message_id
    assert one.lane != two.lane


def test_ids_grow_with_the_time_of_their_facts() -> None:
    early, late = run(pays)[1], run(pays, at=NOON + timedelta(milliseconds=1))[1]
    ids = [message_of(fact, sender(), WIRE).message_id for fact in (early, late)]

    assert ids == sorted(ids)
    assert {UUID(str(one)).version for one in ids} == {7}


def test_the_subject_is_the_business_key_else_the_execution() -> None:
    facts = run(pays)

    assert sent(facts, sender(key=None))["charge"][1].subject == EXECUTION


def test_replies_go_to_the_sender_of_the_endpoints_name_unless_it_names_another() -> None:
    plain = Wire("/waypost", "http://127.0.0.1:8081")

    assert plain.reply_to(1, "payments") == "http://127.0.0.1:8081/events/default/payments"
    assert WIRE.reply_to(2, "payments") == "https://waypost.example/events/default/payments"


def test_a_command_that_is_sent_at_most_once_is_marked() -> None:
    @workflow(name="prints", version="1")
    async def prints(ctx: Context, n: int) -> None:
        await ctx.call(Once(page=n), unknown="hold")

    message, _ = sent(run(prints))["print"]

    assert message.at_most_once


def test_a_name_of_a_call_is_part_of_its_key_and_not_of_its_type() -> None:
    @workflow(name="named", version="1")
    async def named(ctx: Context, n: int) -> None:
        await ctx.call(Charge(order="A", amount=n), name="größe/1")

    message, envelope = sent(run(named))["gr%C3%B6%C3%9Fe%2F1"]

    assert envelope.type == "payment.charge"
    assert envelope.extensions["idempotencykey"] == f"{EXECUTION}/0/gr%C3%B6%C3%9Fe%2F1" == message.lane


def test_times_are_in_utc_whatever_their_zone() -> None:
    assert instant(NOON.astimezone(timezone(timedelta(hours=-3)))) == "2027-01-15T12:00:00Z"
    assert instant(NOON + timedelta(microseconds=5)) == "2027-01-15T12:00:00.000005Z"
