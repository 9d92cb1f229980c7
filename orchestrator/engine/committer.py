"""Group commit: while one commit is under way, the next batch gathers."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import psycopg
from psycopg_pool import PoolTimeout

from contracts.observer import Observer
from orchestrator.engine.lease import Lease
from orchestrator.store.commits import Turn, commit, committed
from orchestrator.store.database import Connection, Pool, is_bad_data, is_transient

BATCH_MAX: Final = 200
"""Turns in one transaction: beyond it a batch takes longer than it saves."""

BACKOFF_SECONDS_MAX: Final = 2.0

Waiting = tuple[Turn, "asyncio.Future[bool]"]


class LeaseLost(Exception):
    """Another worker may own what we held; nothing of ours was written after that."""


class BadTurn(Exception):
    """The database refuses what a turn says, alone as in a batch. Nothing of it was written."""


class Committer:
    """One per worker process. Every turn that is ready while a commit is in flight goes with the next one."""

    def __init__(
        self,
        pool: Pool,
        *,
        lease: Lease,
        observer: Observer,
        hint: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._lease = lease
        self._observer = observer
        self._hint = hint
        self._wake = wake
        self._waiting: deque[Waiting] = deque()
        self._wanted = asyncio.Event()
        self._batch: list[Waiting] = []
        self._unsure = False

    async def submit(self, turn: Turn) -> bool:
        """Commit `turn`; False when its row did not match any more: read again.

        Raises LeaseLost when the worker may no longer write, BadTurn when what it says cannot be stored.
        """
        if not self._lease.holds:
            raise LeaseLost(turn.execution)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, answer))
        self._wanted.set()
        return await answer

    async def run(self) -> None:
        """Commit until cancelled. A connection that breaks is replaced, and what it left unknown is looked up."""
        failures = 0
        while True:
            try:
                async with self._pool.connection() as conn:
                    await self._work(conn)
            except (psycopg.Error, PoolTimeout, OSError) as error:
                self._unsure = bool(self._batch)
                failures += 1
                self._observer.saw("commit interrupted", error=type(error).__name__, turns=len(self._batch))
                if not self._lease.holds:
                    self._give_up()
                pause = min(BACKOFF_SECONDS_MAX, 0.05 * 2 ** min(failures, 6))
                await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311  # jitter
                if not is_transient(error) and not isinstance(error, PoolTimeout | OSError):
                    self._observer.saw("commit refused", error=str(error).splitlines()[0])
            else:
                failures = 0

    async def _work(self, conn: Connection) -> None:
        while True:
            if self._unsure:
                await self._look_up(conn)
            if not self._batch:
                await self._gather()
            await self._commit(conn, self._batch)
            self._batch = []

    async def _gather(self) -> None:
        while not self._waiting:
            self._wanted.clear()
            await self._wanted.wait()
            await asyncio.sleep(0)  # whoever is ready now joins this batch
        while self._waiting and len(self._batch) < BATCH_MAX:
            self._batch.append(self._waiting.popleft())

    async def _commit(self, conn: Connection, batch: Sequence[Waiting]) -> None:
        try:
            matched = await commit(conn, [turn for turn, _ in batch], me=self._lease.me)
        except Exception as error:
            if is_transient(error) or not (
                is_bad_data(error) or isinstance(error, psycopg.DataError | ValueError)
            ):
                raise
            await self._split(conn, batch, error)
            return
        self._answer(batch, matched)

    async def _split(self, conn: Connection, batch: Sequence[Waiting], error: Exception) -> None:
        """A batch that fails on data is split until the bad turn stands alone; the others commit."""
        if len(batch) == 1:
            turn, answer = batch[0]
            self._observer.saw("turn refused", execution=turn.execution, error=str(error).splitlines()[0])
            _tell(answer, BadTurn(str(error).splitlines()[0]))
            return
        half = len(batch) // 2
        await self._commit(conn, batch[:half])
        await self._commit(conn, batch[half:])

    async def _look_up(self, conn: Connection) -> None:
        """The answer to a COMMIT was lost: what took effect is in the journal, under our fence."""
        left = [(turn, answer) for turn, answer in self._batch if not answer.done()]
        found = await committed(conn, [turn for turn, _ in left])
        self._observer.saw("commit looked up", turns=len(left), committed=len(found))
        self._answer([(turn, answer) for turn, answer in left if turn.execution in found], found)
        self._batch = [(turn, answer) for turn, answer in left if turn.execution not in found]
        self._unsure = False

    def _answer(self, batch: Sequence[Waiting], matched: dict[str, bool]) -> None:
        leaves = False
        for turn, answer in batch:
            ours = turn.execution in matched
            leaves = leaves or (ours and bool(turn.messages))
            if not answer.done():
                answer.set_result(ours)
        if leaves:
            self._hint("outbox")
        if any(matched.values()):
            self._wake()

    def _give_up(self) -> None:
        for turn, answer in [*self._batch, *self._waiting]:
            _tell(answer, LeaseLost(turn.execution))
        self._batch, self._unsure = [], False
        self._waiting.clear()


def _tell(answer: asyncio.Future[bool], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
