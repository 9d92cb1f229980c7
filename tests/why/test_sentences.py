"""Every state has its sentence: each code is shown as it is read, word for word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from orchestrator.cli.why import lines
from orchestrator.core.errors import STOPPING
from orchestrator.explanation import Code, UnknownState
from orchestrator.store.situation import AheadRow, Situation
from orchestrator.why import STOPPED, UNDECIDED, explain
from tests.why.case import (
    ENDPOINT,
    ID,
    LIVING,
    MESSAGE,
    NOW,
    OTHER,
    RUNNING,
    TASK,
    TRIED,
    Said,
    asked_call,
    asked_child,
    asked_event,
    asked_mutex,
    asked_person,
    asked_probe,
    asked_step,
    asked_task,
    at,
    attempted,
    case,
    child,
    mutex,
    reminds,
)

CALL: Final = asked_call()
TIMED_OUT: Final[Any] = (
    "ended",
    "charge",
    {"outcome": "unknown", "error": {"code": "timeout", "settling": True}},
)
LEFT: Final[Said] = ("withdrawn", "deliver", {"kind": "child", "name": "deliver"})
OVERDUE: Final[Said] = (
    "ended",
    "deliver",
    {"outcome": "unknown", "error": {"code": "timeout", "settling": True}},
)
PROBED: Final[Said] = (CALL[0], CALL[1], {**CALL[2], "probe": None})
LOST: Final[Said] = ("ended", "charge", {"outcome": "unknown", "error": {"code": "sent"}})
TASKED: Final = asked_task()
UNDO: Final = asked_call(kind="undo", path="charge/undo")


def held(code: str, path: str = "", reason: str = "said so") -> Situation:
    return case(("held", path, {"code": code, "reason": reason}), status="held", wake=None)


def ended(status: str, *before: Said, **said: Any) -> Situation:
    return case(*before, ("finished", "", {"kind": status, **said}), status=status, wake=None)


SKIPPED: Final[tuple[Said, ...]] = (
    ("held", "charge/undo", {"code": "undo-failed", "reason": "no"}),
    ("resolved", "charge/undo", {"verdict": "skip", "by": "ann", "reason": "it is paid"}),
)


def terminated(*stands: str) -> Situation:
    error = {"code": "terminated", "detail": "by ann: enough"}
    said = {"kind": "failed", "by": "ann", "reason": "enough", "error": error, "stands": [*stands]}
    return case(("terminated", "", said), status="failed", wake=None)


BOOM: Final = {"code": "declined", "detail": "no money"}

CASES: Final[list[tuple[str, Situation]]] = [
    ("ready", case(wake=-4, holders=3)),
    ("no-worker", case(wake=-4, holders=0)),
    ("running", case(worker=LIVING)),
    ("running", case(asked_step(), attempted(1, -2), worker=LIVING)),
    ("running", case(asked_step(), attempted(1, 60), worker=LIVING)),
    ("running", case(asked_step("transaction"), worker=LIVING)),
    ("worker-lost", case(worker=replace(LIVING, lease_until=at(-2)))),
    ("worker-lost", case(worker=replace(LIVING, dead_at=at(-1)))),
    ("taken-over", case(CALL, ("orphaned", "", {}), wake=30)),
    ("awaiting-event", case(asked_event(), deadline=3600, wake=3600)),
    ("to-be-sent", case(CALL, messages=[MESSAGE], deadline=-5, undoing=True)),
    ("sleeping", case(("asked", "nap", {"kind": "timer", "name": "nap", "due": at(90_000).isoformat()}))),
    ("awaiting-event", case(asked_event())),
    ("awaiting-event", case(asked_event(key="", due=300))),
    ("awaiting-event", case(asked_event(), ahead=[AheadRow("q17", "payment.succeeded", "order-7", at(20))])),
    ("awaiting-decision", case(asked_person(due=90_000), reminds(600), wake=600)),
    ("awaiting-decision", case(asked_person(), wake=None)),
    ("awaiting-child", case(asked_child(), children=[child("waiting")], wake=None)),
    ("awaiting-child", case(asked_child(due=90), children=[child("held")], wake=90)),
    ("ending-child", case(asked_child(due=90), LEFT, children=[child("waiting")], wake=None)),
    ("ending-child", case(
        asked_child(due=-9), OVERDUE, children=[child("running")], undoing=True, wake=None,
    )),
    ("awaiting-mutex", case(
        asked_mutex(), wake=None, mutexes=[mutex(of=OTHER, granted=-90, waiting=3), mutex(ahead=2, waiting=3)],
    )),
    ("awaiting-mutex", case(
        asked_mutex("flow:mutex", "flow"), wake=None,
        mutexes=[
            mutex("flow:mutex", of=OTHER, kind="flow", granted=-90, status="held"), mutex("flow:mutex", kind="flow"),
        ],
    )),
    ("awaiting-mutex", case(asked_mutex(), wake=None, mutexes=[mutex(ahead=1)])),
    ("step-retry", case(asked_step(), attempted(2, 45), mutexes=[mutex(granted=-20, waiting=1)], deadline=900)),
    ("step-retry", case(asked_step(), attempted(2, 45))),
    ("step-retry", case(asked_step("undo", "pack/undo"), attempted(2, 45, "pack/undo"), undoing=True)),
    ("step-retry", case(CALL, attempted(1, 45, "charge"), messages=[replace(TRIED, state="delivered", replied=True)])),
    ("awaiting-reply", case(
        CALL, attempted(1, -9, "charge"), ("resent", "charge", {"attempt": 2}),
        messages=[
            replace(TRIED, state="delivered", replied=True), replace(MESSAGE, state="delivered", attempts=1),
        ],
    )),
    ("to-be-sent", case(CALL, messages=[MESSAGE])),
    ("to-be-sent", case(CALL, messages=[replace(TRIED, due_at=at(-1))])),
    ("delivery-retry", case(CALL, messages=[replace(TRIED, due_at=at(7))])),
    ("delivery-retry", case(CALL, messages=[replace(TRIED, due_at=at(7), http_status=None, error_code="refused")])),
    ("sending", case(CALL, messages=[replace(TRIED, state="sending", attempts=3, lease_until=at(11))])),
    ("relay-lost", case(CALL, messages=[replace(TRIED, state="sending", attempts=3, lease_until=at(-1))])),
    ("undelivered", case(CALL, messages=[replace(TRIED, state="expired")])),
    ("endpoint-unknown", case(CALL, messages=[MESSAGE], endpoints=[])),
    ("endpoint-disabled", case(CALL, messages=[TRIED], endpoints=[replace(ENDPOINT, state="disabled")])),
    ("endpoint-paused", case(CALL, messages=[TRIED], endpoints=[replace(ENDPOINT, paused_until=at(90))])),
    ("behind-another", case(CALL, messages=[replace(MESSAGE, state="waiting", attempts=0)])),
    ("circuit-open", case(CALL, messages=[TRIED], endpoints=[replace(ENDPOINT, open_until=at(20))])),
    ("endpoint-no-secret", case(CALL, messages=[MESSAGE], endpoints=[replace(ENDPOINT, has_secret=False)])),
    ("awaiting-reply", case(CALL, messages=[replace(TRIED, state="delivered", http_status=202)])),
    ("awaiting-reply", case(CALL, messages=[replace(MESSAGE, state="delivered", attempts=1)])),
    ("awaiting-reply", case(
        UNDO, undoing=True,
        messages=[replace(TRIED, path="charge/undo", state="delivered", http_status=202)],
    )),
    ("awaiting-reply", case(
        PROBED, LOST, asked_probe(), messages=[
            replace(TRIED, state="dead"), replace(MESSAGE, path="charge/probe", state="delivered", attempts=1),
        ],
    )),
    ("step-retry", case(PROBED, LOST, asked_probe(), attempted(1, 45, "charge/probe"), messages=[MESSAGE])),
    ("step-retry", case(
        PROBED, LOST, asked_probe(), ("ended", "charge/probe", {"outcome": "done", "value": {"found": "not_done"}}),
        attempted(1, 45, "charge"), messages=[MESSAGE],
    )),
    ("settling", case(
        PROBED, TIMED_OUT, wake=None, messages=[replace(TRIED, state="stopping", lease_until=at(11))],
    )),
    ("settling", case(
        asked_call(due=-9), TIMED_OUT, undoing=True, wake=None,
        messages=[replace(TRIED, state="stopping", lease_until=at(11))],
    )),
    ("settling", case(
        asked_call(due=-9), TIMED_OUT, wake=None, messages=[replace(TRIED, state="stopping", lease_until=at(11))],
    )),
    ("settling", case(
        CALL, ("withdrawn", "charge", {"kind": "call", "name": "charge"}), undoing=True, wake=None,
        messages=[replace(TRIED, state="stopping", lease_until=at(11))],
    )),
    ("task-queued", case(TASKED, tasks=[TASK])),
    ("task-running", case(TASKED, tasks=[RUNNING])),
    ("task-running", case(TASKED, tasks=[replace(RUNNING, progress={"page": 7})])),
    ("task-silent", case(TASKED, tasks=[replace(RUNNING, lease_until=at(-2))])),
    ("undelivered", case(TASKED, tasks=[replace(TASK, state="expired")])),
    ("step-retry", case(TASKED, attempted(1, 45, "resize"), tasks=[replace(RUNNING, state="failed")])),
    ("settling", case(
        TASKED, ("withdrawn", "resize", {"kind": "task", "name": "resize"}), undoing=True, wake=None,
        tasks=[replace(RUNNING, state="stopping")],
    )),
    ("ordered", replace(held("limit"), row=replace(held("limit").row, wake_at=at(-1)))),
    ("paused", case(CALL, status="paused", wake=None)),
    *((code, held(code)) for code in sorted(STOPPED)),
    ("undo-failed", held("undo-failed", "charge/undo")),
    ("undo-unknown", held("undo-unknown", "charge/undo", "nobody knows how to undo charge")),
    ("unknown-outcome", held("unknown-outcome", "charge#2", "unknown: timeout")),
    ("stuck", case(CALL, wake=None, stuck="no-reason")),
    ("stuck", case(CALL, wake=None, stuck="lost-wake-up")),
    ("stuck", case(status="held", wake=None, stuck="lost-order")),
    ("stuck", case(worker=LIVING, stuck="owner-gone")),
    ("stuck", case(asked_mutex(), wake=None, stuck="mutex-stranded", mutexes=[mutex()])),
    ("completed", ended("completed", output=1)),
    ("completed", ended("completed", *SKIPPED, output=1, undone=1, stands=["charge"])),
    ("compensated", ended("compensated", error=BOOM, undone=2)),
    ("failed", ended("failed", error={"code": "declined"})),
    ("failed", ended("failed", error=BOOM, undone=1, stands=["reserve", "charge"])),
    ("failed", ended("failed", *SKIPPED, error=BOOM, undone=1, stands=["reserve", "charge"])),
    ("failed", terminated()),
    ("failed", terminated("reserve", "charge")),
    ("cancelled", ended("cancelled", reason="cancelled")),
    ("cancelled", ended("cancelled", reason="wrong address", undone=2)),
    ("cancelled", ended("cancelled", reason="wrong address", undone=1, stands=["charge"])),
]  # fmt: skip

GOLDEN: Final = (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").strip().split("\n\n")


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(n, code, id=f"{n}-{code}") for n, (code, _) in enumerate(CASES)]
)
def test_a_state_is_told_in_these_words(number: int, code: str) -> None:
    told = explain(CASES[number][1], NOW)

    assert told.code == code
    assert "\n".join(lines(told)) == GOLDEN[number]


def test_every_code_is_shown() -> None:
    assert {code for code, _ in CASES} == {str(code) for code in Code}
    assert len(GOLDEN) == len(CASES)


def test_every_code_of_a_held_execution_has_words() -> None:
    assert set(STOPPED) == STOPPING
    assert {*STOPPED, *UNDECIDED} <= {str(code) for code in Code}


@pytest.mark.parametrize(
    "it",
    [
        pytest.param(case(), id="nothing is open"),
        pytest.param(case(("asked", "x", {"kind": "dance", "name": "x"})), id="an ask of an unknown kind"),
        pytest.param(case(asked_step()), id="a step that nobody runs"),
        pytest.param(case(CALL), id="a command without its message"),
        pytest.param(case(asked_mutex()), id="a mutex without its row"),
        pytest.param(case(CALL, messages=[replace(MESSAGE, state="dead")]), id="a message at its end"),
        pytest.param(case(TASKED), id="a task without its row"),
        pytest.param(case(TASKED, tasks=[replace(RUNNING, state="lost")]), id="a task at its end"),
        pytest.param(case(CALL, TIMED_OUT, undoing=True, messages=[MESSAGE]), id="settling, and due"),
        pytest.param(case(status="asleep", wake=None), id="an unknown status"),
        pytest.param(case(status="held", wake=None), id="held without a reason"),
        pytest.param(held("moonlight"), id="held by an unknown code"),
        pytest.param(case(stuck="bored"), id="stuck in an unknown way"),
    ],
)
def test_what_no_rule_knows_gets_no_sentence(it: Situation) -> None:
    with pytest.raises(UnknownState, match=ID):
        explain(it, NOW)


def test_a_late_answer_settles_what_was_unknown() -> None:
    known = case(CALL, TIMED_OUT, ("late", "charge", {"outcome": "done"}), UNDO, undoing=True,
                 messages=[replace(MESSAGE, path="charge/undo")])  # fmt: skip

    assert explain(known, NOW).path == "charge/undo"


def test_all_that_is_waited_for_is_told_and_first_what_needs_somebody() -> None:
    other = asked_call(path="charge#2", due=900)
    paid = replace(TRIED, state="delivered", http_status=202)

    told = explain(case(CALL, other, messages=[paid, replace(MESSAGE, path="charge#2")]), NOW)

    assert (told.code, told.path) == (Code.TO_BE_SENT, "charge#2")
    assert [(one.code, one.path) for one in told.also] == [(Code.AWAITING_REPLY, "charge")]


def test_an_explanation_names_try_holder_and_bounds_for_programs() -> None:
    told = explain(case(CALL, messages=[replace(TRIED, due_at=at(7))]), NOW)

    assert (told.attempt, told.holder, told.since, told.until) == (3, "payments", at(-30), at(7))
