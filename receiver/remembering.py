"""A memory and its thread: what is asked while it writes goes together into its next transaction.

So the cost of a durable write is shared by whoever waits for it, and who comes alone waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from receiver.memory import Memory

T = TypeVar("T")

Question = Callable[[], Any]
Waiting = tuple[Question, "asyncio.Future[Any]"]


class Remembering:
    """Asks `memory` from one event loop; everything happens in one thread, in the order of asking."""

    def __init__(self, memory: Memory, *, name: str) -> None:
        self._memory = memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: list[Waiting] = []
        self._at_work = False

    async def ask(self, question: Callable[[], T]) -> T:
        """What `question`, a call of the memory, returns or raises, once that is durable.

        Raises what the memory raises when the whole transaction fails; then nothing is known to be kept.
        """
        told: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, told))
        if not self._at_work:
            self._begin()
        return await told

    def close(self) -> None:
        """Wait for what is under way."""
        self._thread.shutdown(wait=True)

    def _begin(self) -> None:
        batch = [(question, told) for question, told in self._waiting if not told.done()]
        self._waiting = []
        self._at_work = bool(batch)
        if batch:
            asking = asyncio.get_running_loop().run_in_executor(
                self._thread, self._ask_all, [question for question, _ in batch]
            )
            asking.add_done_callback(lambda done: self._over(batch, done))

    def _ask_all(self, questions: Sequence[Question]) -> list[tuple[Any, Exception | None]]:
        """What each of `questions` returned, or raised. In the memory's thread."""
        with self._memory.together():
            return [answered(question) for question in questions]

    def _over(
        self, batch: Sequence[Waiting], done: asyncio.Future[list[tuple[Any, Exception | None]]]
    ) -> None:
        if not done.cancelled():
            failure = done.exception()
            answers = [(None, failure)] * len(batch) if failure else done.result()
            for (_, told), (answer, error) in zip(batch, answers, strict=True):
                if not told.done():
                    told.set_exception(error) if error else told.set_result(answer)
        self._begin()


def answered(question: Question) -> tuple[Any, Exception | None]:
    try:
        return question(), None
    except Exception as error:  # noqa: BLE001  # whoever asked gets it
        return None, error
