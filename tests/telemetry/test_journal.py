"""A journal says what happened, as spans: which, under what, from when to when, and how they ended."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from contracts import trace
from contracts.envelope import decode_structured
from contracts.identifiers import execution_key
from contracts.spans import Span
from contracts.trace import Trace
from orchestrator.core.ask import Ask
from orchestrator.core.fact import Fact
from orchestrator.core.follows import SentAgain
from orchestrator.engine.message import Identity, Wire, asked_again, message_of
from orchestrator.store.spans import Arrival, Delivery
from orchestrator.telemetry.journal import Subject, closed_within, event_anchor, spans_of
from orchestrator.telemetry.messages import accepted, sent

NOON: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)
EXECUTION: Final = "0193f000-0000-7000-8000-000000000001"
ORDER: Final = Subject(EXECUTION, "order", "1")
ROOT: Final = trace.root(EXECUTION)
CALL: Final = {
    "kind": "call",
    "name": "reserve",
    "args": {"do": "call", "endpoint": "inventory", "name": "stock.reserve"},
}
QUIET: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
STEP: Final = {"kind": "step", "name": "pack", "args": {"do": "step", "name": "shop:pack"}}


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def journal(*said: tuple[float, str, str, dict[str, Any]]) -> list[Fact]:
    """An execution that was started at noon; then each (seconds, kind, path, data)."""
    started = (0.0, "started", "", {"traceparent": ROOT})
    return [
        Fact(n, kind, path, data, at(when)) for n, (when, kind, path, data) in enumerate([started, *said], 1)
    ]


def spans(*said: tuple[float, str, str, dict[str, Any]], gap: timedelta | None = None) -> dict[str, Span]:
    """The spans of such a journal, by name."""
    told = spans_of(ORDER, journal(*said), gap=gap)
    assert len({one.span.at.span_id for one in told}) == len(told)
    return {one.span.name: one.span for one in told}


def seconds(span: Span) -> tuple[float, float | None]:
    return (span.began - NOON).total_seconds(), None if span.ended is None else (
        span.ended - NOON
    ).total_seconds()


def test_an_execution_begins_with_an_instant_that_is_its_traceparent() -> None:
    start = spans()["start order"]

    assert (str(start.at), start.parent, seconds(start)) == (ROOT, None, (0, 0))
    assert start.attributes["waypost.instance.id"] == EXECUTION


def test_what_an_event_started_goes_on_in_its_trace_and_links_to_where_it_was_taken_in() -> None:
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    event = {"sender": "bank", "source": "/bank", "id": "e-1", "traceparent": caller}
    data = {"traceparent": trace.child(caller, EXECUTION), "event": event}

    [told] = spans_of(ORDER, [Fact(1, "started", "", data, NOON)])

    arrival = Arrival(1, "bank", "/bank", "e-1", "payment.paid", "event", at(2), None, None)
    assert (told.span.at.trace_id, told.span.parent) == (caller[3:35], caller[36:52])
    assert [(link.to, link.kind) for link in told.span.links] == [(accepted(arrival, caller).at, "event")]
    assert told.span.attributes["waypost.start.trigger"] == "event"


def test_what_an_event_without_a_trace_started_begins_one() -> None:
    event = {"sender": "bank", "source": "/bank", "id": "e-1", "traceparent": None}

    [told] = spans_of(ORDER, [Fact(1, "started", "", {"traceparent": ROOT, "event": event}, NOON)])

    assert (str(told.span.at), told.span.parent) == (ROOT, None)


def test_a_call_is_a_command_at_once_and_a_wait_when_it_has_ended() -> None:
    asked = spans((1, "asked", "reserve", CALL))
    ended = spans((1, "asked", "reserve", CALL), (3, "ended", "reserve", {"outcome": "done"}))

    assert seconds(asked["create inventory"]) == (1, 1)
    assert asked["wait stock.reserve"].ended is None
    assert ended["create inventory"] == asked["create inventory"]
    assert seconds(ended["wait stock.reserve"]) == (1, 3)
    assert ended["wait stock.reserve"].parent == ended["create inventory"].at.span_id
    assert ended["create inventory"].parent == ended["start order"].at.span_id


def test_a_command_that_is_sent_again_is_another_command_and_another_wait() -> None:
    gave_up = {"attempt": 1, "error": {"code": "busy"}, "next_at": at(5).isoformat()}
    said = [(1.0, "asked", "reserve", CALL), (3.0, "attempted", "reserve", gave_up)]
    again = [
        *said,
        (6.0, "resent", "reserve", {"attempt": 2}),
        (8.0, "ended", "reserve", {"outcome": "done"}),
    ]

    between = [one.span for one in spans_of(ORDER, journal(*said))]
    told = [one.span for one in spans_of(ORDER, journal(*again))]

    assert len({span.at.span_id for span in told}) == len(told)
    assert [(span.name, seconds(span), span.error) for span in between[1:]] == [
        ("create inventory", (1, 1), None),
        ("wait stock.reserve", (1, 3), "busy"),
    ]
    assert told[:3] == between
    assert [(span.name, seconds(span), span.error) for span in told[3:]] == [
        ("create inventory", (6, 6), None),
        ("wait stock.reserve", (6, 8), None),
    ]
    assert told[4].parent == told[3].at.span_id
    assert told[1].attributes["messaging.message.id"] != told[3].attributes["messaging.message.id"]


def test_the_span_of_a_command_that_is_sent_again_is_the_one_that_its_signed_body_names() -> None:
    gave_up = {"attempt": 1, "error": {"code": "busy"}, "next_at": at(5).isoformat()}
    facts = journal(
        (1, "asked", "reserve", CALL), (3, "attempted", "reserve", gave_up), (6, "resent", "reserve", {})
    )
    ask = Ask(
        "call", "reserve", {"do": "call", "endpoint": "inventory", "name": "stock.reserve", "data": None}
    )
    ask.path = "reserve"
    message = message_of(
        asked_again(SentAgain(ask, 2, 4, at(6))),
        Identity(1, EXECUTION, 0, None, ROOT),
        Wire("/waypost", "http://w"),
    )

    created = [one.span for one in spans_of(ORDER, facts) if one.span.name == "create inventory"][-1]
    assert str(created.at) == decode_structured(message.body).extensions["traceparent"]
    assert created.attributes["messaging.message.id"] == str(message.message_id)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("reserve", CALL),
        ("all/0/reserve#2", CALL),
        ("reserve/undo#2", {**CALL, "kind": "undo", "name": "reserve", "known": True}),
    ],
)
@pytest.mark.parametrize(
    "traceparent", [ROOT, None, "nonsense", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"]
)
def test_the_span_of_a_command_is_the_one_that_its_signed_body_names(
    path: str, asked: dict[str, Any], traceparent: str | None
) -> None:
    fact = Fact(2, "asked", path, {**asked, "args": {**asked["args"], "data": {}}}, at(1))
    sender = Identity(tenant=1, execution=EXECUTION, epoch=0, key=None, traceparent=traceparent)
    said = [Fact(1, "started", "", {"traceparent": traceparent}, NOON), fact]

    body = message_of(fact, sender, Wire("/waypost", "http://r")).body.decode()
    [created] = [one.span for one in spans_of(ORDER, said) if one.span.kind == "producer"]

    assert f'"traceparent":"{created.at}"' in body.replace(" ", "")
    assert str(created.attributes["messaging.message.id"]) in body


@pytest.mark.parametrize(
    ("outcome", "error", "expected"),
    [
        ("refused", {"code": "declined"}, "declined"),
        ("failed", {}, "failed"),
        ("unknown", {"code": "timeout"}, "timeout"),
    ],
)
def test_a_call_that_did_not_end_well_is_an_error_by_its_code(
    outcome: str, error: dict[str, str], expected: str
) -> None:
    found = spans(
        (1, "asked", "reserve", CALL), (3, "ended", "reserve", {"outcome": outcome, "error": error})
    )["wait stock.reserve"]

    assert (found.error, found.attributes["waypost.wait.outcome"]) == (expected, outcome)


def test_each_try_of_a_local_step_is_a_span_that_begins_when_it_may() -> None:
    told = spans_of(
        ORDER,
        journal(
            (1, "asked", "pack", STEP),
            (
                2,
                "attempted",
                "pack",
                {"attempt": 1, "error": {"code": "raised"}, "next_at": at(5).isoformat()},
            ),
            (7, "ended", "pack", {"outcome": "done", "value": 1}),
        ),
    )

    first, second = (one.span for one in told if one.span.name == "attempt pack")
    assert (seconds(first), first.error) == ((1, 2), "raised")
    assert (seconds(second), second.error) == ((5, 7), None)
    assert [(link.to, link.kind) for link in second.links] == [(first.at, "retry_of")]


def test_a_step_whose_time_ends_between_two_tries_has_no_further_one() -> None:
    told = spans_of(
        ORDER,
        journal(
            (1, "asked", "pack", STEP),
            (2, "attempted", "pack", {"attempt": 1, "error": {}, "next_at": at(60).isoformat()}),
            (9, "ended", "pack", {"outcome": "unknown", "error": {"code": "timeout"}}),
        ),
    )

    assert [one.span.name for one in told].count("attempt pack") == 1


def test_the_death_of_a_worker_ends_its_tries_with_an_error_and_begins_the_next_ones() -> None:
    told = spans_of(
        ORDER,
        journal(
            (1, "asked", "pack", STEP),
            (1, "asked", "sleep", {"kind": "timer", "name": "sleep", "due": at(99).isoformat()}),
            (8, "orphaned", "", {"by": "worker-1"}),
            (9, "ended", "pack", {"outcome": "done"}),
        ),
    )

    lost, again = (one.span for one in told if one.span.name == "attempt pack")
    assert (seconds(lost), lost.error) == ((1, 8), "worker-lost")
    assert lost.attributes["waypost.worker.id"] == "worker-1"
    assert (seconds(again), again.error) == ((8, 9), None)
    assert not [one for one in told if one.span.name == "turn order"]


def test_a_worker_that_died_with_nothing_under_way_is_in_the_trace_too() -> None:
    turn = spans((8, "orphaned", "", {"by": "worker-1"}))["turn order"]

    assert (seconds(turn), turn.error) == ((8, 8), "worker-lost")


def test_an_undo_is_named_after_what_it_undoes() -> None:
    undo = {**CALL, "kind": "undo", "name": "reserve"}
    found = spans((1, "asked", "reserve#2/undo", undo), (2, "ended", "reserve#2/undo", {"outcome": "done"}))

    assert found["compensate reserve"].attributes["waypost.saga.step"] == "reserve#2"
    assert found["compensate reserve"].parent == found["create inventory"].at.span_id


def test_a_sleep_and_a_wait_that_timed_out_are_no_errors() -> None:
    found = spans(
        (1, "asked", "sleep", {"kind": "timer", "name": "sleep", "due": at(4).isoformat()}),
        (1, "asked", "paid", {"kind": "event", "name": "paid", "args": {"type": "payment.paid", "key": "k"}}),
        (4, "ended", "sleep", {"outcome": "done"}),
        (5, "ended", "paid", {"outcome": "timed_out"}),
    )

    assert (seconds(found["timer sleep"]), found["timer sleep"].error) == ((1, 4), None)
    assert (seconds(found["wait payment.paid"]), found["wait payment.paid"].error) == ((1, 5), None)


def test_a_wait_for_a_person_is_named_after_its_subject_and_is_no_error_when_it_expires() -> None:
    asked = {"kind": "decision", "name": "decision", "args": {"subject": "spend"}, "due": at(60).isoformat()}

    told = spans(
        (1, "asked", "spend/decision", asked), (61, "ended", "spend/decision", {"outcome": "timed_out"})
    )

    span = told["approval spend"]
    assert (seconds(span), span.error) == ((1, 61), None)
    assert span.attributes["waypost.wait.kind"] == "decision"


def test_a_wait_links_to_the_event_that_it_got() -> None:
    received = {"type": "payment.paid", "key": "k", "source": "/bank", "id": "e-1"}
    facts = journal(
        (1, "asked", "paid", {"kind": "event", "name": "paid", "args": {"type": "payment.paid", "key": "k"}}),
        (2, "received", "", received),
        (2, "ended", "paid", {"outcome": "done", "of": 3}),
    )
    facts[2].actor = "sender:bank"

    wait = next(one.span for one in spans_of(ORDER, facts) if one.span.name == "wait payment.paid")

    [link] = wait.links
    arrival = Arrival(1, "bank", "/bank", "e-1", "payment.paid", "event", at(2), None, None)
    assert (link.to, link.kind) == (accepted(arrival).at, "event")
    assert link.to == event_anchor(received, sender="bank")


def test_what_a_person_decides_is_an_instant_and_ends_what_was_held() -> None:
    found = spans(
        (1, "asked", "reserve", CALL),
        (2, "ended", "reserve", {"outcome": "unknown", "error": {"code": "sent"}}),
        (2, "held", "reserve", {"code": "unknown-outcome", "reason": "secret"}),
        (9, "resolved", "reserve", {"verdict": "done", "by": "ada"}),
    )

    assert seconds(found["hold unknown-outcome"]) == (2, 9)
    assert seconds(found["operator resolve"]) == (9, 9)
    assert "secret" not in str(found)
    assert "ada" not in str(found)


def test_what_is_held_or_waits_at_the_end_of_the_journal_is_under_way() -> None:
    found = spans((1, "asked", "reserve", CALL), (2, "held", "", {"code": "program-fault"}))

    assert found["hold program-fault"].ended is None
    assert found["wait stock.reserve"].ended is None


@pytest.mark.parametrize(
    ("kind", "error"),
    [("completed", None), ("compensated", None), ("cancelled", None), ("failed", "declined")],
)
def test_the_end_says_how_it_ended_and_closes_what_was_open(kind: str, error: str | None) -> None:
    found = spans(
        (1, "asked", "reserve", CALL),
        (3, "finished", "", {"kind": kind, "error": {"code": "declined"}, "output": {"a": "secret"}}),
    )

    end = found["end order"]
    assert (end.attributes["waypost.workflow.outcome"], end.error) == (kind, error)
    assert end.attributes["waypost.workflow.duration_s"] == 3
    assert seconds(found["wait stock.reserve"]) == (1, 3)
    assert found["wait stock.reserve"].error is None


def test_an_end_by_a_person_is_an_order_and_an_end_that_is_an_error() -> None:
    error = {"class": "permanent", "type": "Terminated", "code": "terminated", "detail": "by ann: enough"}
    said: dict[str, Any] = {"kind": "failed", "by": "ann", "reason": "enough", "stands": [], "error": error}

    told = spans((1, "asked", "reserve", CALL), (3, "terminated", "", said))

    assert told["operator terminate"].error is None
    assert (told["end order"].error, seconds(told["wait stock.reserve"])) == ("terminated", (1, 3))


def test_a_span_is_told_with_the_turn_that_ends_it_and_the_start_with_the_first() -> None:
    told = spans_of(
        ORDER,
        journal(
            (1, "asked", "reserve", CALL),
            (3, "ended", "reserve", {"outcome": "done"}),
            (3, "asked", "pack", STEP),
            (4, "finished", "", {"kind": "completed"}),
        ),
    )

    def names(after: int, last: int) -> list[str]:
        return [span.name for span in closed_within(told, after=after, last=last)]

    assert names(1, 2) == ["start order", "create inventory"]
    assert names(2, 4) == ["wait stock.reserve"]
    assert names(4, 5) == ["attempt pack", "end order"]


def test_a_journal_makes_the_same_spans_however_far_it_is_read() -> None:
    said = [
        (1.0, "asked", "reserve", CALL),
        (3.0, "ended", "reserve", {"outcome": "done"}),
        (4.0, "finished", "", {"kind": "completed"}),
    ]
    whole = {str(one) for one in spans_of(ORDER, journal(*said)) if one.by}

    for length in range(len(said)):
        part = spans_of(ORDER, journal(*said[:length]))
        assert {str(one) for one in part if one.by} <= whole


# ---- segments --------------------------------------------------------------------------------------------------

GAP: Final = timedelta(minutes=15)
LATER: Final = (
    (1.0, "asked", "reserve", CALL),
    (3600.0, "ended", "reserve", {"outcome": "done"}),
    (3601.0, "asked", "pack", STEP),
    (3602.0, "ended", "pack", {"outcome": "done"}),
)


def test_an_execution_is_one_trace_however_long_it_waits() -> None:
    assert {span.at.trace_id for span in spans(*LATER).values()} == {trace.root(EXECUTION)[3:35]}


def test_with_a_gap_a_longer_pause_begins_another_trace_that_links_back() -> None:
    found = spans(*LATER, gap=GAP)

    segment, wait = found["segment order"], found["wait stock.reserve"]
    assert segment.parent is None
    assert segment.at.trace_id != found["start order"].at.trace_id
    assert [(link.to, link.kind) for link in segment.links] == [
        (found["start order"].at, "anchor"),
        (found["start order"].at, "previous_segment"),
    ]
    assert wait.parent == segment.at.span_id
    assert [(link.to, link.kind) for link in wait.links] == [(found["create inventory"].at, "command")]
    assert found["attempt pack"].at.trace_id == segment.at.trace_id


def test_a_shorter_pause_begins_none() -> None:
    assert "segment order" not in spans(*LATER, gap=timedelta(hours=2))


# ---- messages --------------------------------------------------------------------------------------------------

COMMAND: Final = trace.child(ROOT, execution_key(EXECUTION, 0, "reserve"))


def test_a_try_to_send_is_the_span_that_its_request_named() -> None:
    one = Delivery("m-1", 3, EXECUTION, "inventory", at(1), timedelta(seconds=0.5), "retry", 503, None)

    found = sent(one, COMMAND)

    assert str(found.at) == trace.child(COMMAND, "m-1/3")
    assert found.parent == COMMAND[36:52]
    assert (seconds(found), found.error) == ((1, 1.5), "503")
    assert found.attributes["http.request.resend_count"] == 2


@pytest.mark.parametrize(
    ("outcome", "status", "code", "error"),
    [
        ("delivered", 202, None, None),
        ("retry", None, "timeout", "timeout"),
        ("refused", 422, None, "422"),
        ("delivered", 200, "reply-conflict", None),
    ],
)
def test_a_try_is_an_error_unless_it_delivered(
    outcome: str, status: int | None, code: str | None, error: str | None
) -> None:
    one = Delivery("m", 1, EXECUTION, "inventory", at(1), timedelta(0), outcome, status, code)

    assert sent(one, COMMAND).error == error


def reply(command: str | None) -> Arrival:
    return Arrival(
        1, "inventory", "/inventory", "r-1", "stock.reserve.done", "mail", at(2), EXECUTION, command
    )


def test_a_reply_is_under_the_span_that_sent_it_when_that_is_in_our_trace() -> None:
    theirs = trace.child(COMMAND, "their own")

    found = accepted(reply(COMMAND), theirs, timedelta(seconds=0.25))

    assert (found.at.trace_id, found.parent, found.links) == (COMMAND[3:35], theirs[36:52], ())
    assert seconds(found) == (1.75, 2)


@pytest.mark.parametrize(
    "theirs", ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", None, "nonsense"]
)
def test_a_reply_of_another_trace_is_under_its_command_and_links_there(theirs: str | None) -> None:
    found = accepted(reply(COMMAND), theirs)

    assert (found.at.trace_id, found.parent) == (COMMAND[3:35], COMMAND[36:52])
    linked = trace.parse(theirs)
    assert [link.to for link in found.links] == ([] if linked is None else [linked])


def test_an_event_that_answers_nobody_is_a_trace_of_its_own() -> None:
    found = accepted(reply(None), QUIET)

    assert (found.parent, found.at.flags) == (None, 1)
    assert found.at.trace_id != QUIET[3:35]
    assert [link.to for link in found.links] == [Trace(QUIET[3:35], QUIET[36:52], 0)]


def test_what_is_not_sampled_stays_so_in_every_span() -> None:
    quiet = ROOT[:-2] + "00"
    facts = journal(*LATER)
    facts[0].data["traceparent"] = quiet

    told = spans_of(ORDER, facts, gap=GAP)

    assert {one.span.at.flags for one in told} == {0}
