"""Mail and timers become facts: in which order, and what becomes of what does not fit."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from orchestrator import Context, OutcomeUnknown, TimedOut, command, hours, minutes, seconds, workflow
from orchestrator.core.errors import ProgramFault
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.engine.inputs import Inputs, acted_in, stopped_by
from orchestrator.store.executions import Mail
from orchestrator.testing import NOON
from orchestrator.workflow import Workflow

Json = Any
LATE = NOON + hours(5)


def mail(
    number: int,
    data: Json,
    *,
    path: str | None = None,
    at: datetime = NOON,
    kind: str = "reply",
    epoch: int | None = 0,
) -> Mail:
    text = data if isinstance(data, str | None) else json.dumps(data)
    return Mail(number, kind, epoch, path, text, "payments" if kind == "reply" else "waypost", at)


def done(number: int, path: str, *, at: datetime = NOON, **more: Any) -> Mail:
    return mail(number, {"outcome": "done", "value": None}, path=path, at=at, **more)


def order(number: int, *, path: str | None = None, **said: Json) -> Mail:
    return mail(number, {"by": "ann", "reason": "because"} | said, path=path, kind="order")


def started(flow: Workflow[int, Any]) -> Machine:
    machine = Machine(flow.program)
    machine.tell("started", "", {"input": 1, "seed": ""}, NOON)
    machine.take_new()
    return machine


def fed(machine: Machine, *unread: Mail, now: datetime = LATE) -> Inputs:
    inputs = Inputs()
    inputs.add(unread)
    inputs.feed(machine, now)
    machine.evict()
    return inputs


def told(machine: Machine) -> list[str]:
    return [f"{fact.kind} {fact.path}".rstrip() for fact in machine.new]


@workflow(name="naps", version="1")
async def naps(ctx: Context, n: int) -> None:
    await ctx.sleep(minutes(10))
    await ctx.call("s", "a", timeout=minutes(5))


@workflow(name="hurries", version="1")
async def hurries(ctx: Context, n: int) -> str:
    try:
        await ctx.call("s", "a", undo=command("s", "undo"), timeout=minutes(5))
    except OutcomeUnknown as error:
        return error.code
    return "answered"


# ---- order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrived", "order"),
    [
        (minutes(9), ["late a", "ended sleep", "asked a"]),
        (minutes(10), ["late a", "ended sleep", "asked a"]),
        (minutes(11), ["ended sleep", "asked a", "ended a", "finished"]),
    ],
    ids=["before", "at the same time", "after"],
)
def test_mail_and_timers_are_merged_by_time_and_mail_comes_first_on_a_tie(
    arrived: Any, order: list[str]
) -> None:
    machine = started(naps)

    inputs = fed(machine, done(1, "a", at=NOON + arrived), now=NOON + minutes(12))

    assert (told(machine), inputs.mail) == (order, 1)


def test_a_timer_that_is_not_due_does_not_fire() -> None:
    machine = started(naps)

    fed(machine, now=NOON + minutes(10) - seconds(1))

    assert told(machine) == []


@workflow(name="hears", version="1")
async def hears(ctx: Context, n: int) -> str:
    try:
        return await ctx.event("paid", key="A", timeout=minutes(5))
    except TimedOut:
        return "late " + await ctx.event("paid", key="A")


def paid(number: int, *, at: datetime, path: str = "paid", data: str | None = '"by card"') -> Mail:
    return Mail(
        number,
        "event",
        0,
        path,
        data,
        "bank",
        at,
        type="paid",
        key="A",
        source="/b",
        event_id="e",
        inbox_id=1,
    )


@pytest.mark.parametrize(
    ("arrived", "result"),
    [(minutes(4), "by card"), (minutes(5), "by card"), (minutes(6), "late by card")],
    ids=["before", "at the same time", "after"],
)
def test_an_event_and_the_timeout_of_its_wait_are_merged_by_time_however_late_we_are(
    arrived: Any, result: str
) -> None:
    machine = started(hears)

    inputs = fed(machine, paid(1, at=NOON + arrived))

    assert (machine.result, inputs.filled) == (result, {"paid"})


@pytest.mark.parametrize("data", ['{"a": 1, "a": 2}', "[NaN]", None], ids=["twice", "NaN", "none"])
def test_an_event_that_no_journal_can_hold_counts_as_one_without_data(data: str | None) -> None:
    machine = started(hears)

    fed(machine, paid(1, at=NOON, data=data))

    assert machine.result is None
    assert told(machine) == ["received", "ended paid", "finished"]


def test_an_order_to_cancel_is_read_with_the_mail_before_it_even_one_input_at_a_time() -> None:
    machine = started(naps)
    inputs = Inputs()
    inputs.add([done(1, "x"), order(2, order="cancel")])

    inputs.feed(machine, NOON, most=1)

    machine.evict()
    assert (told(machine), inputs.mail, inputs.orders) == (
        ["late x", "cancel_asked", "withdrawn sleep", "finished"],
        2,
        1,
    )


def test_an_order_to_cancel_that_found_its_execution_stopped_is_not_lost() -> None:
    machine = started(naps)
    inputs = Inputs(acted={1})
    inputs.add([order(1, order="cancel", undo=False)])

    inputs.feed(machine, NOON)

    machine.evict()
    assert told(machine) == ["cancel_asked", "withdrawn sleep", "finished"]
    assert (inputs.mail, inputs.orders) == (1, 0)


def test_a_reply_comes_before_its_own_timeout_however_late_we_are() -> None:
    machine = started(hurries)

    inputs = fed(machine, done(1, "a", at=NOON + hours(4)))

    assert (machine.result, inputs.guard) == ("answered", False)


def test_all_mail_before_that_reply_is_read_first_in_order_of_arrival() -> None:
    machine = started(hurries)

    fed(machine, done(1, "x", at=NOON + hours(3)), done(2, "a", at=NOON + hours(4)))

    assert told(machine) == ["late x", "ended a", "finished"]


def test_a_timeout_of_a_message_asks_that_no_mail_has_come_and_a_sleep_does_not() -> None:
    sleeping, hurried = started(naps), started(hurries)

    rested = fed(sleeping, now=NOON + minutes(10))
    guarded = fed(hurried)

    assert (rested.guard, guarded.guard) == (False, True)
    guarded.committed()
    assert guarded.guard is False


def test_what_the_program_is_told_is_the_time_of_the_turn_so_nothing_expires_before_it_is_asked() -> None:
    @workflow(name="two", version="1")
    async def two(ctx: Context, n: int) -> None:
        await ctx.call("s", "a")
        await ctx.call("s", "b", timeout=minutes(5))

    machine = started(two)

    fed(machine, done(1, "a", at=NOON))

    assert [fact.at for fact in machine.new] == [LATE, LATE]
    assert machine.new[-1].data["due"] == (LATE + minutes(5)).isoformat()


def test_at_most_so_many_inputs_are_told() -> None:
    machine = started(hurries)
    inputs = Inputs()
    inputs.add([done(1, "x"), done(2, "y"), done(3, "a")])

    inputs.feed(machine, NOON, most=1)

    assert (told(machine), inputs.mail, [one.number for one in inputs.unread]) == (["late x"], 1, [2, 3])
    machine.evict()


# ---- what does not fit -----------------------------------------------------------------------------------------

DEEP = "[" * 100 + "]" * 100


@pytest.mark.parametrize(
    "text",
    [
        None, "", "null", "7", "[]", "{}", "not json", '{"outcome": "perhaps"}', '{"outcome": "timed_out"}',
        '{"outcome": 7}', '{"outcome": ["done"]}', '{"outcome": {}}',
        '{"outcome": "done", "value": NaN}', '{"outcome": "done", "value": 1e5000}',
        '{"outcome": "refused", "error": 7}', '{"outcome": "done", "value": "\\u0000"}',
        '{"outcome": "done", "value": ' + DEEP + "}", '{"outcome": "done", "value": "' + "x" * 300_000 + '"}',
    ],
    ids=lambda text: repr(text)[:60],
)  # fmt: skip
def test_a_reply_that_is_no_outcome_ends_its_ask_as_failed_which_may_have_acted(text: str | None) -> None:
    machine = started(hurries)

    inputs = fed(machine, mail(1, text, path="a"))

    assert inputs.mail == 1
    assert told(machine) == ["ended a", "asked a/undo"]
    assert (machine.new[0].data["outcome"], bool(machine.new[0].data["error"]["code"])) == ("failed", True)


@pytest.mark.parametrize("path", ["nowhere", "", None, "a/undo", "a#2"])
def test_mail_for_what_is_not_open_is_late(path: str | None) -> None:
    machine = started(hurries)

    fed(machine, mail(1, {"outcome": "done", "value": None}, path=path), now=NOON)

    assert told(machine) == [f"late {path or ''}".rstrip()]


@pytest.mark.parametrize("epoch", [1, None])
def test_mail_of_another_epoch_is_late(epoch: int | None) -> None:
    machine = started(hurries)

    fed(machine, done(1, "a", epoch=epoch), now=NOON)

    assert told(machine) == [f"late epoch:{epoch}/a"]  # no path of now can be taken for it


def test_mail_for_a_finished_execution_is_read_and_is_no_fact() -> None:
    machine = started(hurries)

    inputs = fed(machine, done(1, "a"), done(2, "a"), order(3, order="resume"))

    assert (told(machine)[:2], inputs.mail, inputs.orders) == (["ended a", "finished"], 3, 1)


def test_who_said_it_is_kept() -> None:
    machine = started(hurries)

    fed(
        machine,
        done(1, "x"),
        mail(2, {"outcome": "refused", "code": "never-sent"}, path="y", kind="result"),
        order(3, order="resolve", path="z", verdict="done"),
        now=NOON,
    )

    assert [fact.actor for fact in machine.new] == ["participant:payments", "relay", "operator:ann"]
    assert machine.new[1].data["error"]["code"] == "never-sent"


# ---- orders ----------------------------------------------------------------------------------------------------


@workflow(name="careful", version="1")
async def careful(ctx: Context, n: int) -> str:
    reply = await ctx.call(
        "s", "a", undo=lambda reply: command("s", "undo", [reply, reply]), timeout=minutes(5), unknown="hold"
    )
    return str(reply)


def held() -> Machine:
    machine = started(careful)
    machine.fire(NOON + minutes(5))
    machine.tell("ended", "a", {"outcome": "unknown", "error": {"code": "sent"}}, NOON + minutes(5))
    machine.take_new()
    return machine


def test_an_order_to_resolve_carries_the_name_the_reason_and_the_verdict() -> None:
    machine = held()

    inputs = fed(machine, order(1, path="a", order="resolve", verdict="done", value="r"))

    assert (machine.result, inputs.orders, inputs.mail) == ("r", 1, 1)
    assert {key: machine.new[0].data[key] for key in ("by", "reason", "verdict", "value")} == {
        "by": "ann", "reason": "because", "verdict": "done", "value": "r",
    }  # fmt: skip


@pytest.mark.parametrize(
    "said",
    [
        {"order": "resolve"},
        {"order": "resolve", "verdict": "perhaps"},
        {"order": "resolve", "verdict": ["done"]},
        {"order": ["resolve"], "verdict": {}},
        {"order": "resolve", "verdict": "done", "value": "x" * 200_000},
        {"order": "explode"},
        {"by": ["\x1b[31m"], "reason": {"a": 1}},
        {},
    ],
    ids=lambda said: str(said)[:60],
)
def test_an_order_that_does_not_fit_changes_nothing_and_is_read(said: dict[str, Json]) -> None:
    machine = held()

    inputs = fed(machine, order(1, path="a", **said))

    assert machine.held is not None
    assert (machine.held.path, inputs.orders, inputs.mail, len(machine.new)) == ("a", 1, 1, 1)


def test_an_order_that_is_no_json_is_read_as_a_word_to_resume() -> None:
    machine = held()

    inputs = fed(machine, mail(1, "no json", kind="order"))

    assert (told(machine), inputs.orders) == (["resumed"], 1)


def test_an_order_to_resume_is_obeyed_before_its_turn_and_passed_when_its_turn_comes() -> None:
    machine = started(hurries)
    inputs = Inputs()
    inputs.add([done(1, "x"), order(2, order="resume"), order(3, order="resume")])

    first = inputs.resume()
    assert first is not None
    assert (first.number, inputs.orders) == (2, 1)
    inputs.feed(machine, NOON)

    assert (told(machine), inputs.mail, inputs.orders) == (["late x", "resumed"], 3, 2)
    machine.evict()


def test_orders_that_cannot_be_obeyed_count_once() -> None:
    inputs = Inputs()
    inputs.add([done(1, "x"), order(2, order="resolve"), order(3, order="explode")])

    assert inputs.resume() is None
    assert [one.number for one in inputs.refuse_orders()] == [2, 3]
    assert (inputs.refuse_orders(), inputs.orders) == ([], 2)


def test_an_order_that_was_obeyed_in_an_earlier_turn_is_passed() -> None:
    machine = started(hurries)
    inputs = Inputs(acted={1})
    inputs.add([order(1, order="resume"), done(2, "a")])

    inputs.feed(machine, NOON)

    assert (told(machine), inputs.mail, inputs.orders) == (["ended a", "finished"], 2, 0)
    machine.evict()


# ---- programs that stop ----------------------------------------------------------------------------------------


def test_the_mail_at_which_a_program_stops_is_read_and_what_follows_stays() -> None:
    @workflow(name="buggy", version="1")
    async def buggy(ctx: Context, n: int) -> None:
        await ctx.call("s", "a")
        raise AttributeError("a bug")

    machine = started(buggy)
    inputs = Inputs()
    inputs.add([done(1, "x"), done(2, "a"), done(3, "y")])

    with pytest.raises(ProgramFault):
        inputs.feed(machine, NOON)

    assert (told(machine), inputs.mail, [one.number for one in inputs.unread]) == (
        ["late x", "ended a"],
        2,
        [3],
    )
    machine.evict()


def test_mail_that_stops_the_program_before_it_is_a_fact_is_not_read() -> None:
    def undo(reply: Json) -> Any:
        return command("s", "undo", reply["charge"] if reply else None)

    @workflow(name="undo-raises", version="1")
    async def undo_raises(ctx: Context, n: int) -> None:
        await ctx.call("s", "a", undo=undo)

    machine = started(undo_raises)
    inputs = Inputs()
    inputs.add([mail(1, {"outcome": "done", "value": {"no": "charge"}}, path="a")])

    with pytest.raises(ProgramFault, match="the undo of a raised KeyError"):
        inputs.feed(machine, NOON)

    assert (told(machine), inputs.mail, len(inputs.unread)) == ([], 0, 1)
    machine.evict()


def facts(*kinds: str) -> list[Fact]:
    data = {"stopped": {"code": "program-fault"}, "held": {"code": "undo-failed"}}
    return [
        Fact(n, "held" if kind == "stopped" else kind, "", data.get(kind, {}), NOON)
        for n, kind in enumerate(kinds, 1)
    ]


@pytest.mark.parametrize(
    ("kinds", "position"),
    [
        (["started", "stopped"], 2),
        (["started", "stopped", "orphaned"], 2),
        (["started", "stopped", "stopped"], 3),
        (["started", "stopped", "held"], 2),
        (["started", "stopped", "resumed"], None),
        (["started", "stopped", "resumed", "orphaned"], None),
        (["started", "stopped", "resumed", "asked"], None),
        (["started", "held"], None),
        (["started"], None),
        ([], None),
    ],
    ids=str,
)
def test_a_journal_is_stopped_by_its_last_stop_that_nobody_resumed(
    kinds: list[str], position: int | None
) -> None:
    found = stopped_by(facts(*kinds))

    assert (found and found.position) == position


def test_a_journal_names_the_orders_that_were_obeyed_before_their_turn() -> None:
    journal = [
        Fact(1, "resumed", "", {"mail": 4, "early": True}, NOON),
        Fact(2, "resumed", "", {"mail": 5}, NOON),
        Fact(3, "held", "", {"code": "unstorable", "orders": [6, 7]}, NOON),
        Fact(4, "held", "", {"code": "program-fault"}, NOON),
    ]

    assert acted_in(journal) == {4, 6, 7}


# ---- decisions of people ---------------------------------------------------------------------------------------


@workflow(name="spends", version="1")
async def spends(ctx: Context, n: int) -> str:
    return (await ctx.approval("spend", who="ann")).choice


@pytest.mark.parametrize(
    ("epoch", "choice", "facts"),
    [
        (0, "approve", ["ended spend/decision", "finished"]),
        (0, "perhaps", ["late spend/decision"]),
        (0, ["approve"], ["late spend/decision"]),
        (1, "approve", ["late epoch:1/spend/decision"]),
    ],
    ids=["fits", "not offered", "no text", "of another epoch"],
)
def test_a_decision_ends_the_wait_for_it_or_is_late(epoch: int, choice: Json, facts: list[str]) -> None:
    machine = started(spends)
    said = {"order": "decide", "choice": choice, "by": "ann", "reason": ""}

    inputs = fed(machine, mail(1, said, path="spend/decision", kind="order", epoch=epoch))

    assert (told(machine), inputs.mail, inputs.orders) == (facts, 1, 1)


def test_an_approval_that_expires_is_for_the_mail_that_was_loaded_only() -> None:
    @workflow(name="hastens", version="1")
    async def hastens(ctx: Context, n: int) -> str:
        return (await ctx.approval("spend", who="ann", expires=minutes(5))).choice

    assert fed(started(hastens)).guard
