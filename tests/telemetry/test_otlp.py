"""Spans as data reach a collector as they are, and what it does not take is kept within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

import pytest

from contracts.spans import Link, Span, has_collector
from contracts.trace import Trace
from receiver import otlp
from receiver.otlp import SPANS_MAX, SPOOLED_MAX, Otlp, Spool
from tests.moments import Moments
from tests.telemetry.collector import Collector, collecting

NOON: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)
TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"


def span(number: int = 1, **more: object) -> Span:
    made = Span(
        name="attempt pack",
        at=Trace(TRACE_ID, f"{number:016x}"),
        parent="00000000000000aa",
        began=NOON,
        ended=NOON + timedelta(microseconds=1500),
        kind="internal",
        attributes={"waypost.attempt.number": 2, "waypost.lease.expired": True, "s": "text", "f": 0.5},
    )
    return replace(made, **more)  # pyright: ignore[reportArgumentType]  # by name


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_spans_leave_where_the_environment_names_a_collector(
    environment: dict[str, str], expected: bool
) -> None:
    assert has_collector(environment) is expected


async def test_a_span_arrives_as_it_is(collector: Collector) -> None:
    other = Trace("1" * 32, "2" * 16)

    assert await Otlp("waypost-worker").export(
        [span(kind="consumer", error="worker-lost", links=(Link(other, "retry_of"),))]
    )

    [seen] = collector.spans
    assert (seen.service, seen.name, seen.kind, seen.is_error) == (
        "waypost-worker",
        "attempt pack",
        "consumer",
        True,
    )
    assert (seen.trace_id, seen.span_id, seen.parent_id) == (TRACE_ID, f"{1:016x}", "00000000000000aa")
    assert seen.ended - seen.began == 1_500_000
    assert datetime.fromtimestamp(seen.began / 1e9, UTC) == NOON
    assert seen.attributes == {**span().attributes, "error.type": "worker-lost"}
    assert seen.links == [("1" * 32, "2" * 16, "retry_of")]


async def test_the_service_is_called_as_the_environment_says(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")

    await Otlp("waypost-worker").export([span(parent=None)])

    [seen] = collector.spans
    assert (seen.service, seen.parent_id, seen.is_error) == ("shop", "", False)


async def test_what_is_not_sampled_or_under_way_stays_here(collector: Collector) -> None:
    assert await Otlp("w").export([span(at=Trace(TRACE_ID, "a" * 16, 0)), span(ended=None)])

    assert collector.requests == 0


async def test_many_spans_go_in_several_requests(collector: Collector) -> None:
    assert await Otlp("w").export([span(number) for number in range(1, SPANS_MAX + 2)])

    assert (collector.requests, len(collector.spans)) == (2, SPANS_MAX + 1)


async def test_a_refusal_is_said_and_the_rest_is_not_sent(collector: Collector) -> None:
    collector.answers.append(400)

    assert not await Otlp("w").export([span(number) for number in range(1, SPANS_MAX + 2)])

    assert collector.requests == 1


async def test_an_export_that_raises_raises_here(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await otlp.aside(broken)


class Picky:
    def __init__(self) -> None:
        self.takes = False
        self.spans: list[Span] = []

    async def export(self, spans: Sequence[Span]) -> bool:
        await asyncio.sleep(0)
        self.spans += spans if self.takes else ()
        return self.takes

    def close(self) -> None:
        """Nothing is under way."""


async def test_a_spool_keeps_what_was_not_taken_in_its_order() -> None:
    picky = Picky()
    spool = Spool(picky, Moments())
    spool.add(span(1))
    spool.add(span(2))

    await spool.flush()
    spool.add(span(3))
    picky.takes = True
    await spool.flush()
    await spool.flush()

    assert [int(one.at.span_id, 16) for one in picky.spans] == [1, 2, 3]


async def test_a_spool_that_is_full_drops_the_oldest_and_says_so() -> None:
    picky, moments = Picky(), Moments()
    spool = Spool(picky, moments)
    for number in range(1, SPOOLED_MAX + 3):
        spool.add(span(number))

    picky.takes = True
    await spool.flush()

    assert [int(one.at.span_id, 16) for one in picky.spans] == list(range(3, SPOOLED_MAX + 3))
    assert moments.count("spans.dropped") == 2


async def test_a_spool_sends_its_last_spans_when_its_service_ends() -> None:
    picky = Picky()
    picky.takes = True
    spool = Spool(picky, Moments())

    async with spool.running():
        spool.add(span(1))

    assert len(picky.spans) == 1
