"""Group commit: while one commit is under way, the next batch gathers."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import psycopg

from contracts.observer import Observer
from contracts.sensitive import unless_sensitive
from orchestrator.engine.lease import Lease
from orchestrator.store.commits import KEYS_MAX, EventKey, Turn, commit, committed, keys_locked
from orchestrator.store.database import Connection, Pool, is_bad_data, is_transient

LANES: Final = 2
WORTH_A_LANE: Final = 16
"""Turns that must wait for a lane to begin while the other one works."""

BATCH_MAX: Final = 100
"""Turns in one transaction: beyond it a batch takes longer than it saves."""

BACKOFF_SECONDS_MAX: Final = 2.0

Waiting = tuple[Turn, "asyncio.Future[bool]"]


class LeaseLost(Exception):
    """Another worker may own what we held; nothing of ours was written after that."""


class BadTurn(Exception):
    """The database refuses what a turn says, alone as in a batch. Nothing of it was written."""


class Committer:
    """One per worker process: it gathers the turns that are ready, and LANES connections commit them.

    While one commit is in flight, the next batch gathers; with two lanes, this process works on one batch
    while the database works on the other. Their turns are disjoint, so they never wait for each other.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        lease: Lease,
        observer: Observer,
        hint: Callable[[str], None],
        wake: Callable[[], None],
        grant: Callable[[], None] = lambda: None,
        emitted: Callable[[], None] = lambda: None,
        traced: bool = False,
    ) -> None:
        self.pool = pool
        self.traced = traced
        self.lease = lease
        self.observer = observer
        self._hint = hint
        self._wake = wake
        self._grant = grant
        self._emitted = emitted
        self._waiting: deque[Waiting] = deque()
        self._wanted = asyncio.Event()
        self._idle = 0

    async def submit(self, turn: Turn) -> bool:
        """Commit `turn`; False when its row did not match any more: read again.

        Raises LeaseLost when the worker may no longer write, BadTurn when what it says cannot be stored.
        """
        if not self.lease.holds:
            raise LeaseLost(turn.execution)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, answer))
        if self._is_worth_a_lane:
            self._wanted.set()
        return await answer

    def lanes(self) -> list[Callable[[], Awaitable[None]]]:
        """What commits, each until it is cancelled; run them all at once, and side by side.

        Not in a group of their own: a group passes on one cancellation, and that one may be lost (see `end`).
        """
        return [Lane(self).run for _ in range(LANES)]

    async def gather(self) -> list[Waiting]:
        """The share of an idle lane in what waits; it waits until something does."""
        self._idle += 1
        try:
            while not self._is_worth_a_lane:
                self._wanted.clear()
                await self._wanted.wait()
                await asyncio.sleep(0)  # whoever is ready now joins this batch
            share = len(self._waiting) if self._is_quiet else -(-len(self._waiting) // self._idle)
        finally:
            self._idle -= 1
        return self._next(min(share, BATCH_MAX))

    def _next(self, most: int) -> list[Waiting]:
        """Up to `most` of what waits, as far as one transaction may lock their event keys; at least one turn."""
        batch: list[Waiting] = []
        keys: set[EventKey] = set()
        while self._waiting and len(batch) < most:
            keys |= keys_locked(self._waiting[0][0])
            if batch and len(keys) > KEYS_MAX:
                break
            batch.append(self._waiting.popleft())
        return batch

    @property
    def _is_worth_a_lane(self) -> bool:
        """Whether an idle lane should begin: with little to do, a second transaction costs more than it saves."""
        return len(self._waiting) >= WORTH_A_LANE or (bool(self._waiting) and self._idle == LANES)

    @property
    def _is_quiet(self) -> bool:
        return len(self._waiting) < WORTH_A_LANE

    def answer(self, batch: Sequence[Waiting], matched: dict[str, bool]) -> None:
        """Tell each turn of `batch` whether it is committed, and everybody else that there is work."""
        leaves = spreads = moves = tasks = emits = False
        for turn, answer in batch:
            ours = turn.execution in matched
            leaves = leaves or (ours and bool(turn.messages or turn.events))
            spreads = spreads or (ours and bool(turn.family))
            moves = moves or (ours and turn.moves_mutexes)
            tasks = tasks or (ours and bool(turn.tasks))
            emits = emits or (ours and bool(turn.events))
            if not answer.done():
                answer.set_result(ours)
        if leaves:
            self._hint("outbox")
        if spreads:
            self._hint("execution")
        if moves:
            self._grant()
        if tasks:
            self._hint("task")
        if emits:
            self._emitted()
        if any(matched.values()):
            self._wake()

    def give_up(self, batch: Sequence[Waiting]) -> None:
        """The lease is lost: nothing of `batch`, nor of what waits, will be committed."""
        for turn, answer in [*batch, *self._waiting]:
            _tell(answer, LeaseLost(turn.execution))
        self._waiting.clear()


class Lane:
    """One connection that commits batch after batch."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._observer = committer.observer
        self._lease = committer.lease
        self.batch: list[Waiting] = []
        self._unsure = False

    async def run(self) -> None:
        """Commit until cancelled. A connection that breaks is replaced, and what it left unknown is looked up."""
        failures = 0
        while True:
            try:
                async with self._committer.pool.connection() as conn:
                    await self._work(conn)
            except (psycopg.Error, OSError) as error:
                failures = failures + 1 if self.batch else 1
                await self._interrupted(error, failures)

    async def _interrupted(self, error: Exception, failures: int) -> None:
        self._unsure = bool(self.batch)
        what = "commit interrupted" if is_transient(error) else "commit refused"
        text = str(error).partition("\n")[0]
        self._observer.saw(
            what, error=type(error).__name__, detail=unless_sensitive(text), turns=len(self.batch)
        )
        if not self._lease.holds:
            self._committer.give_up(self.batch)
            self.batch, self._unsure = [], False
        pause = min(BACKOFF_SECONDS_MAX, 0.05 * 2 ** min(failures, 6))
        await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311  # jitter

    async def _work(self, conn: Connection) -> None:
        while True:
            if self._unsure:
                await self.look_up(conn)
            if not self.batch:
                self.batch = await self._committer.gather()
            await self._commit(conn, self.batch)
            self.batch = []

    async def _commit(self, conn: Connection, batch: Sequence[Waiting]) -> None:
        try:
            matched = await commit(
                conn, [turn for turn, _ in batch], me=self._lease.me, traced=self._committer.traced
            )
        except Exception as error:
            bad = is_bad_data(error) or isinstance(error, psycopg.DataError | ValueError)
            if is_transient(error) or not bad:
                raise
            await self._split(conn, batch, error)
            return
        self._committer.answer(batch, matched)

    async def _split(self, conn: Connection, batch: Sequence[Waiting], error: Exception) -> None:
        """A batch that fails on data is split until the bad turn stands alone; the others commit."""
        if len(batch) == 1:
            turn, answer = batch[0]
            text = str(error).partition("\n")[0]
            self._observer.saw("turn refused", execution=turn.execution, error=unless_sensitive(text))
            _tell(answer, BadTurn(text))
            return
        half = len(batch) // 2
        await self._commit(conn, batch[:half])
        await self._commit(conn, batch[half:])

    async def look_up(self, conn: Connection) -> None:
        """The answer to a COMMIT was lost: what took effect is in the journal, under our fence."""
        left = [(turn, answer) for turn, answer in self.batch if not answer.done()]
        silent = [(turn, answer) for turn, answer in left if not turn.facts]
        self._committer.answer(silent, {})  # what left no fact is to be read again, whatever became of it
        left = [(turn, answer) for turn, answer in left if turn.facts]
        found = await committed(conn, [turn for turn, _ in left])
        self._observer.saw("commit looked up", turns=len(left), committed=len(found))
        self._committer.answer([(turn, answer) for turn, answer in left if turn.execution in found], found)
        self.batch = [(turn, answer) for turn, answer in left if turn.execution not in found]
        self._unsure = False


def _tell(answer: asyncio.Future[bool], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
