"""A task that is to end ends, although a library drops the first cancellation."""

from __future__ import annotations

import asyncio

from orchestrator.store.ending import end


async def test_a_task_that_drops_a_cancellation_is_cancelled_again() -> None:
    begun = asyncio.Event()
    dropped: list[int] = []

    async def deaf() -> None:
        while True:
            try:
                begun.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                dropped.append(len(dropped))
                if len(dropped) == 2:
                    raise

    task = asyncio.create_task(deaf())
    await begun.wait()

    await end([task])

    assert task.cancelled()
    assert dropped == [0, 1]


async def test_what_a_task_raised_is_not_raised_at_its_end() -> None:
    async def failing() -> None:
        raise ValueError

    task = asyncio.create_task(failing())

    await end([task])

    assert task.done()
