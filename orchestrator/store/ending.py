"""The end of tasks that use the database: a cancellation that is certain to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

AGAIN_SECONDS: Final = 0.1


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks`, and return when all are over; what they raised is not raised here.

    Asks until they are: before Python 3.12 `asyncio.wait_for`, with which psycopg and its pool wait, drops a
    cancellation that meets the result it waits for (gh-86296), and the task goes on as if nobody had asked.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        over, left = await asyncio.wait(left, timeout=AGAIN_SECONDS)
        for task in over:
            if not task.cancelled():
                task.exception()  # it was looked at: nobody need be told that it never was
