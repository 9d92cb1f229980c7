"""What one transaction of the committer takes on."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any, cast

import pytest

from orchestrator.engine.committer import Committer
from orchestrator.engine.lease import Lease
from orchestrator.store.commits import KEYS_MAX, ClosedWait, NewWait, Turn
from tests.moments import Moments


def turn(name: int, *, waits: int = 0, closes: int = 0) -> Turn:
    """A turn that registers and closes waits for keys of its own."""
    return Turn(
        tenant=1, execution=str(name), fence=1, position=1, epoch=0, facts=[], mail=0, orders=0, status="open",
        undoing=False, release=True, due=None, guard=None, asks=False,
        waits=[NewWait(f"w{n}", "paid", f"{name} {n}") for n in range(waits)],
        closed_waits=[ClosedWait(f"x{n}", "paid", f"{name} x {n}", was_open=True) for n in range(closes)],
    )  # fmt: skip


async def batches(*turns: Turn) -> list[list[int]]:
    """The turns of each batch that one lane takes, by name, all having been ready before the first."""
    lease = Lease("", me="w", span=timedelta(minutes=1), granted=time.monotonic(), lost=lambda: None)
    owner = Committer(
        cast("Any", None), lease=lease, observer=Moments(), hint=lambda _: None, wake=lambda: None
    )
    other_lane = asyncio.ensure_future(owner.gather())
    await asyncio.sleep(0)
    submitted = [asyncio.ensure_future(owner.submit(one)) for one in turns]
    await asyncio.sleep(0)
    found: list[list[int]] = []
    while sum(map(len, found)) < len(turns):
        found.append([int(one.execution) for one, _ in await owner.gather()])
    for task in [other_lane, *submitted]:
        task.cancel()
    return found


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([100, 100, 56], [[0, 1, 2]]),
        ([100, 100, 57], [[0, 1], [2]]),
        ([KEYS_MAX, 1, 1], [[0], [1, 2]]),
        ([1, KEYS_MAX + 1, 1], [[0], [1], [2]]),
        ([0, 0, KEYS_MAX], [[0, 1, 2]]),
    ],
    ids=str,
)
async def test_a_batch_locks_no_more_keys_than_one_transaction_may(
    keys: list[int], expected: list[list[int]]
) -> None:
    """A turn that locks more than that by itself goes alone. The order is kept."""
    assert await batches(*(turn(n, waits=count) for n, count in enumerate(keys))) == expected


async def test_keys_of_waits_that_were_open_count_and_equal_ones_count_once() -> None:
    half = KEYS_MAX // 2
    same = turn(0, waits=half, closes=half)

    assert await batches(same, same, turn(1, closes=1)) == [[0, 0], [1]]
