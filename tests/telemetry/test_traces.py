"""Traces as a collector gets them: whole, once under each id, and whatever dies on the way."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest

from contracts import trace
from tests.cli.processes import ROOT
from tests.telemetry.collector import Collector, Seen
from tests.telemetry.conftest import SERVICES, Shop
from tests.waiting import until_true

ORDER = {"id": "order-1", "customer": "ada", "total": 4200}


def check_whole(spans: Sequence[Seen]) -> None:
    """One trace, and every parent is in it."""
    there = {span.span_id for span in spans}
    assert len({span.trace_id for span in spans}) == 1, sorted((span.trace_id, span.name) for span in spans)
    orphans = [(span.name, span.service) for span in spans if span.parent_id and span.parent_id not in there]
    assert orphans == []
    assert [span.name for span in spans if not span.parent_id] == ["start order"]


def once(spans: Sequence[Seen]) -> list[Seen]:
    return list({span.span_id: span for span in spans}.values())


def of(spans: Sequence[Seen], name: str) -> list[Seen]:
    return [span for span in spans if span.name == name]


def started(shop: Shop, order: dict[str, Any], *more: str) -> str:
    done = shop.ask("start", "order", "--input", json.dumps(order), "--wait", "-o", "json", *more)
    return json.loads(done.stdout)["execution_id"]


def marks(shop: Shop) -> int:
    with psycopg.connect(shop.environment["WAYPOST_DATABASE_URL"]) as conn:
        row = conn.execute("select count(*) from waypost.span_due").fetchone()
    assert row is not None
    return row[0]


@pytest.mark.timeout(240)
def test_an_order_is_one_trace_from_its_start_through_services_and_back(
    shop: Shop, collector: Collector
) -> None:
    shop.open(*SERVICES)
    shop.part("worker")

    good, bad = started(shop, ORDER), started(shop, {**ORDER, "id": "order-2", "card": "4000000000000002"})
    collector.until("end order", times=2)
    until_true(lambda: marks(shop) == 0, what="the export of all marks")
    for name, times in (
        ("stock.reserve", 2),
        ("payment.charge", 2),
        ("shipment.create", 1),
        ("stock.release", 1),
    ):
        collector.until(f"process {name}", times=times)
    completed, compensated = (
        [span for span in once(collector.spans) if span.trace_id == trace.root(execution)[3:35]]
        for execution in (good, bad)
    )

    assert len(completed) + len(compensated) == len(once(collector.spans))
    check_completed(completed)
    check_compensated(compensated)
    check_told(shop, good, completed)


def check_completed(spans: Sequence[Seen]) -> None:
    check_whole(spans)
    by_id = {span.span_id: span for span in spans}
    for endpoint in SERVICES:
        [created] = of(spans, f"create {endpoint}")
        [sent] = of(spans, f"send {endpoint}")
        [accepted] = of(spans, f"POST /events/{endpoint}")
        assert by_id[created.parent_id].name == "start order"
        assert by_id[sent.parent_id] == created
        processed = by_id[accepted.parent_id]
        assert processed.name.startswith("process ")
        assert by_id[processed.parent_id] == created
        assert processed.links == [(sent.trace_id, sent.span_id, "delivery")]
        assert (created.kind, sent.kind, processed.kind, accepted.kind) == (
            "producer", "client", "consumer", "server",
        )  # fmt: skip
        assert (created.service, sent.service, processed.service, accepted.service) == (
            "waypost-worker", "waypost-relay", endpoint, "waypost-receiver",
        )  # fmt: skip
        assert created.began <= sent.began <= sent.ended
    assert of(spans, "end order")[0].attributes["waypost.workflow.outcome"] == "completed"
    assert of(spans, "turn order")
    assert not [span.name for span in spans if span.is_error]
    assert "order-1" not in str([span.attributes for span in spans])


def check_compensated(spans: Sequence[Seen]) -> None:
    check_whole(spans)
    [refused] = of(spans, "wait payment.charge")
    [undone] = of(spans, "compensate reserve")
    assert (refused.is_error, refused.attributes["waypost.wait.outcome"]) == (True, "refused")
    assert (undone.is_error, undone.attributes["waypost.wait.outcome"]) == (False, "done")
    assert of(spans, "end order")[0].attributes["waypost.workflow.outcome"] == "compensated"


def check_told(shop: Shop, execution: str, spans: Sequence[Seen]) -> None:
    """`waypost trace` says from the database what the collector got of us."""
    told = json.loads(shop.ask("trace", execution, "-o", "json").stdout)["spans"]
    ours = {span.span_id for span in spans if not span.name.startswith(("turn", "process"))}
    assert {span["span_id"] for span in told} == ours
    text = shop.ask("trace", execution).stdout
    for line in ("start order", "create payments", "wait payment.charge", "send shipping #1", "end order"):
        assert line in text


SLOW = """
import asyncio
from pathlib import Path
from orchestrator import Context, workflow

async def pack() -> str:
    tries = Path('tries')
    tries.write_text(str(int(tries.read_text() or '0') + 1) if tries.exists() else '1')
    while tries.read_text() == '1':
        await asyncio.sleep(0.02)
    return 'packed'

@workflow(name='slow', version='1')
async def slow(ctx: Context, given: int) -> str:
    return await ctx.step(pack)
"""


def slow_step(shop: Shop) -> str:
    """An execution whose step runs until its worker dies; its id."""
    (shop.folder / "slow.py").write_text(SLOW)
    shop.environment |= {
        "WAYPOST_FLOWS": "slow",
        "PYTHONPATH": f"{ROOT}:{shop.folder}",
        "WAYPOST_LEASE": "1s",
    }
    return shop.ask("start", "slow", "--input", "1").stdout.split()[0]


@pytest.mark.proof
def test_the_try_of_a_killed_worker_is_in_the_trace_and_ends_with_an_error(
    shop: Shop, collector: Collector
) -> None:
    execution = slow_step(shop)
    first = shop.part("worker")
    until_true((shop.folder / "tries").exists, what="the step")
    until_true(
        lambda: "asked" in shop.ask("show", execution).stdout, what="the commit of what the step is asked for"
    )

    first.process.send_signal(signal.SIGKILL)
    shop.part("worker")
    collector.until("end slow")
    until_true(lambda: marks(shop) == 0, what="the export of all marks")
    spans = once(collector.spans)

    lost, again = sorted(
        of(spans, "attempt pack"), key=lambda span: span.attributes["waypost.attempt.number"]
    )
    assert lost.is_error
    assert lost.attributes["error.type"] == "worker-lost"
    assert lost.attributes["waypost.lease.expired"] is True
    assert lost.attributes["waypost.worker.id"]
    assert lost.ended > lost.began
    assert not again.is_error
    assert again.links == [(lost.trace_id, lost.span_id, "retry_of")]
    assert [span.name for span in spans if not span.parent_id] == ["start slow"]


@pytest.mark.proof
def test_what_was_committed_before_a_worker_died_is_exported_by_the_next(
    shop: Shop, collector: Collector
) -> None:
    collector.hang.set()
    execution = slow_step(shop)
    (shop.folder / "tries").write_text("1")  # the step ends at once
    first = shop.part("worker")
    until_true(lambda: "completed" in shop.ask("show", execution).stdout, what="the end of the execution")
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(30)
    assert collector.spans == []
    waiting = marks(shop)

    collector.hang.clear()
    with psycopg.connect(shop.environment["WAYPOST_DATABASE_URL"], autocommit=True) as conn:
        conn.execute(
            "update waypost.span_due set free_at = now()"
        )  # the dead worker's marks, half a minute early
    shop.part("worker")
    until_true(lambda: marks(shop) == 0, what="the export of all marks")

    assert waiting > 0
    names = {span.name for span in collector.spans}
    assert {"start slow", "attempt pack", "turn slow", "end slow"} <= names
