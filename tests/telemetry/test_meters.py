"""Moments become counts under the names and labels of docs/telemetry.md, and no label grows without end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.core.fact import Fact
from orchestrator.telemetry import instruments
from orchestrator.telemetry.instruments import Instrument, Kind
from orchestrator.telemetry.meters import NAMES_MAX, OTHER, Meters, node_of

NOON: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)
ORDER: Final = {"workflow_name": "order", "workflow_version": "1"}


@pytest.fixture
def meters() -> Meters:
    return Meters("worker")


def found(meters: Meters, one: Instrument, suffix: str = "") -> dict[tuple[str, ...], float]:
    """The samples of a metric, by the values of its labels in their order."""
    samples = [
        sample
        for family in text_string_to_metric_families(meters.page().decode())
        for sample in family.samples
        if sample.name == one.prometheus + suffix
    ]
    for sample in samples:
        assert set(sample.labels) - {"le"} <= set(one.labels)
    return {tuple(sample.labels.get(label, "") for label in one.labels): sample.value for sample in samples}


def committed(meters: Meters, *facts: Fact, taken_back: tuple[int, ...] = ()) -> None:
    meters.saw(
        "turn.committed", flow="order", version="1", facts=facts, taken_back=list(taken_back), began=NOON
    )


def fact(kind: str, path: str = "", /, *, actor: str = "worker", position: int = 2, **data: Any) -> Fact:
    return Fact(position, kind, path, data, NOON + timedelta(seconds=90), actor=actor)


def test_a_first_claim_is_a_start_and_what_it_waited_is_a_delay(meters: Meters) -> None:
    meters.saw("execution.owned", flow="order", version="1", trigger="start", waited=0.2)
    meters.saw("execution.owned", flow="order", version="1", trigger=None, waited=0.3)
    meters.saw("execution.owned", flow="order", version="1", trigger="event", waited=None)

    assert found(meters, instruments.STARTED) == {("order", "1", "start"): 1, ("order", "1", "event"): 1}
    assert found(meters, instruments.QUEUE_DELAY, "_count") == {("default", "order"): 2}
    assert found(meters, instruments.QUEUE_DELAY, "_sum") == {("default", "order"): pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [("completed", "success"), ("compensated", "compensated"), ("cancelled", "cancelled")],
)
def test_an_end_that_is_no_failure_completes(meters: Meters, kind: str, outcome: str) -> None:
    committed(meters, fact("finished", kind=kind))

    assert found(meters, instruments.COMPLETED) == {("order", "1", outcome): 1}
    assert found(meters, instruments.FAILED) == {}
    assert found(meters, instruments.DURATION, "_sum") == {("order", outcome): 90}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"class": "business", "type": "StepRefused"}, "business"),
        ({"class": "unknown", "type": "OutcomeUnknown"}, "unknown_outcome"),
        ({"class": "permanent", "type": "StepFailed"}, "infrastructure"),
    ],
)
def test_a_failure_says_of_which_class_it_is(meters: Meters, error: dict[str, str], expected: str) -> None:
    committed(meters, fact("finished", kind="failed", error=error))

    assert found(meters, instruments.FAILED) == {("order", "1", expected, error["type"]): 1}
    assert found(meters, instruments.DURATION, "_count") == {("order", "failed"): 1}


def test_a_local_step_is_counted_by_its_tries_and_not_again_by_its_end(meters: Meters) -> None:
    for outcome in ("failed", "done"):
        meters.saw("step.tried", flow="order", version="1", path="pack#2", outcome=outcome)
    committed(meters, fact("attempted", "pack#2"), fact("ended", "pack#2", outcome="done", value=1))

    assert found(meters, instruments.NODE_ATTEMPT) == {
        ("order", "1", "pack", "failed"): 1,
        ("order", "1", "pack", "done"): 1,
    }
    assert found(meters, instruments.NODE_RETRY) == {("order", "1", "pack", "infrastructure"): 1}


def test_a_call_is_counted_by_its_end_whoever_says_it(meters: Meters) -> None:
    committed(
        meters,
        fact("ended", "reserve", outcome="done", actor="participant:inventory"),
        fact("ended", "charge", outcome="refused", actor="relay"),
        fact("ended", "ship", outcome="unknown", error={"code": "timeout"}, position=9),
        taken_back=(9,),
    )

    assert found(meters, instruments.NODE_ATTEMPT) == {
        ("order", "1", "reserve", "done"): 1,
        ("order", "1", "charge", "refused"): 1,
        ("order", "1", "ship", "unknown"): 1,
    }
    assert found(meters, instruments.NODE_TIMEOUT) == {("order", "1", "ship", "reply"): 1}


def test_what_a_try_ran_out_of_is_told(meters: Meters) -> None:
    committed(
        meters,
        fact("attempted", "pack", attempt=1, error={"code": "heartbeat-lost"}),
        fact("attempted", "pack", attempt=2, error={"code": "attempt-timeout"}),
        fact("ended", "pack", outcome="unknown", error={"code": "attempt-timeout"}),
        fact("finished", kind="failed", error={"code": "attempt-timeout"}),
    )

    assert found(meters, instruments.NODE_TIMEOUT) == {
        ("order", "1", "pack", "heartbeat"): 1,
        ("order", "1", "pack", "attempt"): 2,
    }


def test_a_command_that_its_service_gave_up_is_an_attempt_that_is_followed_by_another(meters: Meters) -> None:
    committed(
        meters, fact("attempted", "charge", attempt=1, error={"code": "busy"}, actor="participant:bank")
    )

    assert found(meters, instruments.NODE_ATTEMPT) == {("order", "1", "charge", "failed"): 1}
    assert found(meters, instruments.NODE_RETRY) == {("order", "1", "charge", "infrastructure"): 1}


def test_a_sleep_is_no_attempt_and_a_local_step_may_run_out_of_time(meters: Meters) -> None:
    committed(
        meters,
        fact("ended", "sleep", outcome="done"),
        fact("ended", "pack", outcome="unknown", error={"code": "timeout", "settling": True}),
    )

    assert found(meters, instruments.NODE_ATTEMPT) == {}
    assert found(meters, instruments.NODE_TIMEOUT) == {("order", "1", "pack", "total"): 1}


def test_a_wait_for_an_event_is_no_attempt_and_may_time_out(meters: Meters) -> None:
    committed(
        meters, fact("ended", "paid", outcome="done", of=3), fact("ended", "paid#2", outcome="timed_out")
    )

    assert found(meters, instruments.NODE_ATTEMPT) == {}
    assert found(meters, instruments.NODE_TIMEOUT) == {("order", "1", "paid", "event"): 1}


def test_an_undo_is_counted_under_the_name_of_what_it_undoes(meters: Meters) -> None:
    committed(meters, fact("ended", "reserve#3/undo#2", outcome="done", actor="participant:inventory"))

    assert found(meters, instruments.COMPENSATION) == {("order", "1", "reserve", "done"): 1}


def test_takeovers_are_counted_by_executions(meters: Meters) -> None:
    meters.saw("executions taken over", number=3, executions=["a", "b", "c"])
    meters.saw("executions taken over", number=1, executions=["d"])

    assert found(meters, instruments.ORPHANED) == {("default", "lease_expired"): 4}


def test_what_is_stuck_is_shown_until_it_is_not_and_counted_once(meters: Meters) -> None:
    stuck = ("order", "no-reason")
    for look in ({stuck: 2}, {stuck: 2}, {stuck: 3}, {}):
        meters.saw("executions.watched", stuck=look)
        assert found(meters, instruments.STUCK_NOW).get(stuck, 0) == look.get(stuck, 0)

    assert found(meters, instruments.STUCK) == {stuck: 3}
    assert found(meters, instruments.STUCK_NOW) == {stuck: 0}


def test_a_try_of_the_relay_is_counted_by_endpoint_outcome_and_class_of_status(meters: Meters) -> None:
    for outcome, status in (("retry", 503), ("delivered", 202), ("retry", None)):
        meters.saw(
            "message.tried",
            tenant=1,
            message="m",
            endpoint="payments",
            outcome=outcome,
            status=status,
            seconds=0.2,
        )

    assert found(meters, instruments.DELIVERY_ATTEMPT) == {
        ("payments", "retry", "5xx"): 1,
        ("payments", "delivered", "2xx"): 1,
        ("payments", "retry", "none"): 1,
    }
    assert found(meters, instruments.DELIVERY_DURATION, "_count") == {
        ("payments", "retry"): 2,
        ("payments", "delivered"): 1,
    }


def test_requests_are_counted_by_what_became_of_them(meters: Meters) -> None:
    meters.saw("event.stored", sender="payments", answer="mail")
    meters.saw("event.stored", sender="payments", answer="unmatched")
    meters.saw("event.duplicate", tenant=1, sender="payments")
    meters.saw("event.conflict", tenant=1, sender="payments")
    meters.saw("event.quarantined", sender="payments", reason="conflict")
    meters.saw("request.refused", status=409, reason="apart-conflict", path="/events/default/payments")
    meters.saw("sender.challenged", sender="slack")
    meters.saw("batch.empty", sender="payments")
    meters.saw("request.refused", status=401, reason="signature-mismatch", path="/x", error="no")

    assert found(meters, instruments.RECEIVED) == {
        ("payments", "accepted", ""): 1,
        ("payments", "unmatched", ""): 1,
        ("payments", "duplicate", ""): 1,
        ("payments", "quarantined", "conflict"): 1,
        ("slack", "asked", ""): 1,
        ("payments", "empty", ""): 1,
        ("", "rejected", "signature-mismatch"): 1,
    }


def test_names_that_a_flow_makes_up_are_bounded(meters: Meters) -> None:
    for number in range(NAMES_MAX + 5):
        meters.saw("step.tried", flow="order", version="1", path=f"charge-{number}", outcome="done")

    counts = found(meters, instruments.NODE_ATTEMPT)
    assert len(counts) == NAMES_MAX + 1
    assert counts["order", "1", OTHER, "done"] == 5


def test_a_label_cannot_forge_a_line(meters: Meters) -> None:
    meters.saw("event.stored", sender='a"} 1\nworkflow_started_total{x="', answer="mail")

    assert (
        sum(
            family.name == "workflow_started"
            for family in text_string_to_metric_families(meters.page().decode())
        )
        == 0
    )


def test_every_metric_reaches_prometheus_as_its_instrument_says(meters: Meters) -> None:
    meters.saw("execution.owned", flow="f", version="1", trigger="start", waited=0.0)
    meters.saw("step.tried", flow="f", version="1", path="a", outcome="done")
    late = {"code": "timeout"}
    committed(
        meters,
        fact("attempted", "a"),
        fact("ended", "a/undo", outcome="unknown", error=late),
        fact("finished", kind="completed"),
        fact("finished", kind="failed", error={}),
    )
    meters.saw("executions taken over", number=1)
    meters.saw("executions.watched", stuck={("f", "no-reason"): 1})
    meters.saw("message.tried", endpoint="e", outcome="delivered", status=202, seconds=0.1)
    meters.saw("event.stored", sender="s", answer="mail")
    meters.saw("task.claimed", queue="q", waited=0.1)
    meters.saw("task.tried", queue="q", type="t", outcome="done", seconds=0.1)

    families = {family.name: family for family in text_string_to_metric_families(meters.page().decode())}

    for one in instruments.ALL:
        family = families[one.prometheus.removesuffix("_total")]
        assert family.type == one.kind
        bounds = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
        assert list(dict.fromkeys(bounds)) == (
            [*one.buckets, float("inf")] if one.kind is Kind.HISTOGRAM else []
        )


@pytest.mark.parametrize(
    ("path", "node"),
    [
        ("charge", "charge"),
        ("charge#12", "charge"),
        ("charge/undo", "charge/undo"),
        ("charge#2/undo#3", "charge/undo"),
        ("all/0/charge#2", "charge"),
        ("all/0/charge#2/undo", "charge/undo"),
        ("undo", "undo"),
        ("%", "%"),
    ],
)
def test_a_node_is_the_name_without_branches_and_numbers(path: str, node: str) -> None:
    assert node_of(path) == node
