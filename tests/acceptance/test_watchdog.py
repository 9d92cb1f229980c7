"""Workers say which executions nothing would move. No fault of ours leaves one, so the row is broken by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.explanation import Code, Explanation
from orchestrator.store.situation import situation
from orchestrator.why import explain
from tests.acceptance.stand import Stand, stand
from tests.evidence import Evidence
from tests.waiting import until

WATCH_SECONDS = 90.0
"""Above the time between two looks, which is a minute and up to a fifth."""


@pytest.mark.proof
async def test_a_worker_that_starts_says_what_is_stuck_and_it_can_be_mended(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await break_one(it)
        assert not [line for line in it.part("worker").running.lines if "executions.stuck" in line]
        await it.part("worker").kill()
        await it.part("worker").start()
        assert await told(it, seconds=30) == [str(it.started["gated-1"])]
        assert (await why(it)).code == Code.STUCK

        await it.conn.execute("update waypost.execution set wake_at = now()")
        it.open_gate()
        [view] = await it.ended("gated-1")
        assert await it.at_rest() == []
    assert view.row.status == "completed"


@pytest.mark.proof
async def test_a_worker_that_runs_says_what_is_stuck_within_its_minute(
    dsn: str, tmp_path: Path, evidence: Evidence
) -> None:
    async with stand(dsn, tmp_path) as it:
        await break_one(it)
        assert await told(it, seconds=WATCH_SECONDS) == [str(it.started["gated-1"])]
        evidence.did("a worker said that an execution was stuck whose wake-up was taken away while it ran")


async def break_one(it: Stand) -> None:
    """An order waits for a reply, and its time to wake up is taken away."""

    async def waits() -> bool:
        found = await why(it)
        return (found.code, found.path) == (Code.AWAITING_REPLY, "create")

    await it.order("gated-1")
    await until(waits, what="an order that waits for a reply")
    await it.conn.execute("update waypost.execution set wake_at = null")


async def why(it: Stand) -> Explanation:
    """What `waypost why` says of the order."""
    found = await situation(it.conn, str(it.started["gated-1"]), tenant=1)
    assert found is not None
    return explain(found, found.around.now)


async def told(it: Stand, *, seconds: float) -> list[str]:
    """The executions that the worker says are stuck."""
    found = await it.part("worker").running.says(r"^.*executions\.stuck.*$", seconds=seconds)
    said: dict[str, Any] = json.loads(found[0])
    assert said["count"] == len(said["executions"])
    return said["executions"]
