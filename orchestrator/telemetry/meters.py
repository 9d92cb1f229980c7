"""The observer that counts: moments become OpenTelemetry metrics, and those a page for Prometheus.

A turn of an execution takes a tenth of a millisecond, and adding to a counter of the SDK twenty times less; so
counts are kept in plain dictionaries, which the SDK reads when somebody asks. Labels are names that code and
configuration have, never ids, and no more than NAMES_MAX of each: a name that a flow makes up as it goes is
counted as `other`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from prometheus_client import CollectorRegistry, generate_latest

from orchestrator.core.errors import error_in
from orchestrator.core.fact import Fact
from orchestrator.core.path import name_at, undone_at
from orchestrator.core.status import Status
from orchestrator.telemetry import instruments
from orchestrator.telemetry.instruments import Instrument, Kind

NAMES_MAX: Final = 500
"""Different values of one label, in one process."""

OTHER: Final = "other"
QUEUE: Final = "default"

OUTCOMES: Final = {
    Status.COMPLETED: "success",
    Status.COMPENSATED: "compensated",
    Status.CANCELLED: "cancelled",
}
CLASSES: Final = {"business": "business", "unknown": "unknown_outcome"}
"""What the class of a flow's error is called; every other one is `infrastructure`."""

RUN_OUT: Final = {"attempt-timeout": "attempt", "heartbeat-lost": "heartbeat"}
"""What a try ran out of, by the code of its error."""


class Names:
    """The values that a label has had. One more than `most`, and it is OTHER."""

    def __init__(self, most: int = NAMES_MAX) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(name)
        return name


APART: Final = "apart-"
"""How reasons of refusals begin whose events are kept apart."""


class Tally:
    """Counts by label values, which the SDK reads when it is asked. `names` bound the values, label by label."""

    def __init__(self, instrument: Instrument, names: Sequence[Names]) -> None:
        self._labels = instrument.labels
        self._names = names
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, *values: str, count: int = 1) -> None:
        if values not in self._counts:  # what was counted once is within its bounds
            values = self.bounded(values)
            self._counts.setdefault(values, 0)
        self._counts[values] += count

    def bounded(self, values: Sequence[str]) -> tuple[str, ...]:
        return tuple(name(value) for name, value in zip(self._names, values, strict=True))

    def replace(self, counts: Mapping[tuple[str, ...], int]) -> None:
        """What is counted is `counts`; what was there and is not any more is 0."""
        self._counts = dict.fromkeys(self._counts, 0) | dict(counts)

    def of(self, *values: str) -> int:
        return self._counts.get(values, 0)

    def observe(self, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(count, dict(zip(self._labels, values, strict=True)))
            for values, count in self._counts.items()
        ]


class Meters:
    """Hears the moments of one process, `part`; `page` is what Prometheus reads. Moments that it does not know
    are none of its business.
    """

    def __init__(self, part: str) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(scope_info_enabled=False, registry=self._registry)
        resource = Resource.create({SERVICE_NAME: f"waypost-{part}"})
        self._provider = MeterProvider(
            [reader], resource=resource, shutdown_on_exit=False, exemplar_filter=AlwaysOffExemplarFilter()
        )
        self._meter = self._provider.get_meter("waypost")
        self._names = {label: Names() for one in instruments.ALL for label in one.labels}
        self._tallies = {
            one.name: self._tally(one) for one in instruments.ALL if one.kind is not Kind.HISTOGRAM
        }
        self._duration = self._histogram(instruments.DURATION)
        self._queue_delay = self._histogram(instruments.QUEUE_DELAY)
        self._delivery = self._histogram(instruments.DELIVERY_DURATION)
        self._task_delay = self._histogram(instruments.TASK_DELAY)
        self._task_duration = self._histogram(instruments.TASK_DURATION)
        self._hears: Mapping[str, Callable[..., None]] = {
            "execution.owned": self._owned,
            "turn.committed": self._committed,
            "step.tried": self._tried,
            "executions taken over": self._taken_over,
            "executions.watched": self._watched,
            "message.tried": self._sent,
            "task.claimed": self._task_claimed,
            "task.tried": self._task_tried,
            "event.stored": self._stored,
            "event.duplicate": self._duplicate,
            "request.refused": self._refused,
            "event.quarantined": self._quarantined,
            "batch.empty": self._empty,
            "sender.challenged": self._asked,
            "sender.consented": self._asked,
        }

    def _tally(self, one: Instrument) -> Tally:
        tally = Tally(one, [self._names[label] for label in one.labels])
        make = (
            self._meter.create_observable_counter
            if one.kind is Kind.COUNTER
            else self._meter.create_observable_gauge
        )
        make(one.name, [tally.observe], unit=one.unit, description=one.says)
        return tally

    def _histogram(self, one: Instrument) -> Callable[..., None]:
        made = self._meter.create_histogram(
            one.name, unit=one.unit, description=one.says, explicit_bucket_boundaries_advisory=one.buckets
        )

        def record(seconds: float, *values: str) -> None:
            made.record(max(0.0, seconds), dict(zip(one.labels, values, strict=True)))

        return record

    def saw(self, moment: str, /, **fields: object) -> None:
        hears = self._hears.get(moment)
        if hears is not None:
            hears(**fields)

    def page(self) -> bytes:
        """All metrics in the text format of Prometheus, version 0.0.4."""
        return generate_latest(self._registry)

    def close(self) -> None:
        self._provider.shutdown()

    def _add(self, one: Instrument, *values: str, count: int = 1) -> None:
        self._tallies[one.name].add(*values, count=count)

    # ---- a worker ------------------------------------------------------------------------------------------

    def _owned(self, *, flow: str, version: str, trigger: str | None, waited: float | None) -> None:
        if trigger is not None:
            self._add(instruments.STARTED, flow, version, trigger)
        if waited is not None:
            self._queue_delay(waited, QUEUE, self._names["workflow_name"](flow))

    def _tried(self, *, flow: str, version: str, path: str, outcome: str) -> None:
        self._add(instruments.NODE_ATTEMPT, flow, version, node_of(path), outcome)

    def _committed(
        self, *, flow: str, version: str, facts: Sequence[Fact], taken_back: Iterable[int], began: datetime
    ) -> None:
        """`taken_back` are positions of facts that say that a call's time is over."""
        for fact in facts:
            kind = RUN_OUT.get(str(error_in(fact.data).get("code")))
            if kind is not None and fact.kind in ("attempted", "ended"):
                self._add(instruments.NODE_TIMEOUT, flow, version, node_of(fact.path), kind)
            match fact.kind:
                case "ended":
                    self._ended(flow, version, fact, late=fact.position in taken_back)
                case "attempted":
                    if (
                        fact.actor != "worker"
                    ):  # a service gave up; tries of local steps are counted as they end
                        self._add(instruments.NODE_ATTEMPT, flow, version, node_of(fact.path), "failed")
                    self._add(instruments.NODE_RETRY, flow, version, node_of(fact.path), "infrastructure")
                case "finished" if fact.data["kind"] != "continued":
                    self._finished(flow, version, fact, (fact.at - began).total_seconds())
                case _:
                    continue

    def _ended(self, flow: str, version: str, fact: Fact, *, late: bool) -> None:
        outcome = str(fact.data.get("outcome"))
        if late or fact.actor != "worker":
            self._add(instruments.NODE_ATTEMPT, flow, version, node_of(fact.path), outcome)
        if error_in(fact.data).get("code") == "timeout":
            kind = "reply" if late else "total"
            self._add(instruments.NODE_TIMEOUT, flow, version, node_of(fact.path), kind)
        if outcome == "timed_out":
            self._add(instruments.NODE_TIMEOUT, flow, version, node_of(fact.path), "event")
        step = undone_at(fact.path)
        if step is not None:
            self._add(instruments.COMPENSATION, flow, version, name_at(step), outcome)

    def _finished(self, flow: str, version: str, fact: Fact, seconds: float) -> None:
        outcome = OUTCOMES.get(Status(fact.data["kind"]), "failed")
        if outcome == "failed":
            error = error_in(fact.data)
            failure_class = CLASSES.get(str(error.get("class")), "infrastructure")
            self._add(instruments.FAILED, flow, version, failure_class, str(error.get("type")))
        else:
            self._add(instruments.COMPLETED, flow, version, outcome)
        self._duration(seconds, self._names["workflow_name"](flow), outcome)

    def _taken_over(self, *, number: int, **_: object) -> None:
        self._add(instruments.ORPHANED, QUEUE, "lease_expired", count=number)

    def _watched(self, *, stuck: Mapping[tuple[str, str], int]) -> None:
        """`stuck` counts by flow and cause. More than at the last look are new."""
        now = self._tallies[instruments.STUCK_NOW.name]
        found = {now.bounded(key): count for key, count in stuck.items()}
        for key, count in found.items():
            if count > now.of(*key):
                self._add(instruments.STUCK, *key, count=count - now.of(*key))
        now.replace(found)

    # ---- a relay -------------------------------------------------------------------------------------------

    def _sent(self, *, endpoint: str, outcome: str, status: int | None, seconds: float, **_: object) -> None:
        status_class = "none" if status is None else f"{status // 100}xx"
        self._add(instruments.DELIVERY_ATTEMPT, endpoint, outcome, status_class)
        self._delivery(seconds, self._names["endpoint"](endpoint), outcome)

    # ---- a worker of queues --------------------------------------------------------------------------------

    def _task_claimed(self, *, queue: str, waited: float, **_: object) -> None:
        self._task_delay(waited, self._names["queue"](queue))

    def _task_tried(self, *, queue: str, type: str, outcome: str, seconds: float, **_: object) -> None:  # noqa: A002  # its name
        self._add(instruments.TASK_ATTEMPT, queue, type, outcome)
        self._task_duration(seconds, self._names["queue"](queue), outcome)

    # ---- a receiver ----------------------------------------------------------------------------------------

    def _stored(self, *, sender: str, answer: str) -> None:
        outcome = "unmatched" if answer == "unmatched" else "accepted"
        self._add(instruments.RECEIVED, sender, outcome, "")

    def _duplicate(self, *, sender: str, **_: object) -> None:
        self._add(instruments.RECEIVED, sender, "duplicate", "")

    def _quarantined(self, *, sender: str, reason: str) -> None:
        self._add(instruments.RECEIVED, sender, "quarantined", reason)

    def _empty(self, *, sender: str) -> None:
        self._add(instruments.RECEIVED, sender, "empty", "")

    def _asked(self, *, sender: str) -> None:
        """Whether we are there, or may be posted to."""
        self._add(instruments.RECEIVED, sender, "asked", "")

    def _refused(self, *, reason: str, **_: object) -> None:
        """Nobody is named: who is refused has not proved who it is. What was kept apart before is counted as that."""
        if not reason.startswith(APART):
            self._add(instruments.RECEIVED, "", "rejected", reason)


def node_of(path: str) -> str:
    """The name of what is asked at `path`, whichever time and in whichever branch; of an undo with `/undo`."""
    step = undone_at(path) if "/" in path else None
    return name_at(path) if step is None else f"{name_at(step)}/undo"
