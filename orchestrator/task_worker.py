"""A worker of queues: it claims tasks, does them, says that they live, and reports what became of them.

    claim ──▶ do ──▶ report (with the result mail, in one transaction)
                └ beat, so that the lease lasts; the answer says whether anybody still waits

Several may serve one queue, and one several queues. A worker that dies leaves a lease that runs out; then the flow's
policy decides about another try. So the effect of a task happens at least once, and once for who honours its key.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg

from contracts import strict_json, trace
from contracts.errors import WaypostError, shown
from contracts.limits import NAME_BYTES_MAX
from contracts.objects import ObjectGone
from contracts.observer import Observer, Silent
from contracts.trace import Trace
from orchestrator.core.errors import UsageError
from orchestrator.core.names import is_name
from orchestrator.engine.attempt import called
from orchestrator.engine.claims import AWAY, backoff
from orchestrator.engine.pulse import CURRENT, Attempt, Pulse
from orchestrator.objects.large import Large
from orchestrator.store import database, objects
from orchestrator.store import tasks as store
from orchestrator.store.database import Pool, is_bad_data, is_transient
from orchestrator.store.ending import end
from orchestrator.store.hints import Hints, running
from orchestrator.store.tasks import Report, Task
from orchestrator.tasks import Tasks, asked, done, failed, lost, raised
from orchestrator.worker import STEP_THREADS

Json = Any

SETTLED_MAX: Final = 100
"""Reports in one transaction."""

CLAIM_SECONDS: Final = 5.0
"""For a claim that is under way when its worker stops."""

TASK_CONNECTIONS: Final = 3
"""Of one worker: claims, beats and reports never wait for each other."""


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """What one worker of queues takes on."""

    concurrency: int = 8
    """Tasks that it does at once, in threads or on the event loop."""
    lease: timedelta = timedelta(seconds=60)
    """For which a task is its own since it last said that it lives; it says so five times as often."""
    poll: timedelta = timedelta(seconds=1)
    """How often to look for tasks without a hint, ±20 %."""
    drain: timedelta = timedelta(seconds=25)
    """How long tasks may take to end after SIGTERM, before they are left to other tries."""


class LateReport(WaypostError):
    """A try was reported whose lease was over; it changed nothing."""

    code = "late-report"

    def __init__(self, task: Task) -> None:
        super().__init__(
            f"task {task.task_id}, try {task.attempt}: late report: an old attempt cannot overwrite a new one"
        )


@dataclass(slots=True)
class Running:
    """A task that is done now; `beat_at` is when its lease was last known to last (monotonic seconds)."""

    task: Task
    pulse: Pulse
    beat_at: float
    job: asyncio.Task[None] | None = None
    told: Json = None
    report: Report | None = None
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def stop(self, why: str) -> None:
        """Nobody waits for it any more: a coroutine is cancelled, a thread learns it when it beats."""
        if not self.pulse.over and self.report is None:
            self.pulse.over = why
            if self.job is not None:
                self.job.cancel()


Current = Callable[[Trace], AbstractContextManager[None]]
Ended = Callable[[Task, str, datetime, datetime], None]


class TaskWorker:
    """Does `tasks` of `queues` until asked to stop. `owner` is shown to operators.

    `current` makes libraries trace under a span, and `ended` hears of each try when it was reported: the task, what
    became of it, and from when to when.
    """

    def __init__(
        self,
        pool: Pool,
        tasks: Tasks,
        *,
        queues: Sequence[str],
        hints: Hints,
        observer: Observer | None = None,
        limits: TaskLimits | None = None,
        owner: str | None = None,
        current: Current | None = None,
        ended: Ended | None = None,
    ) -> None:
        for queue in queues:
            if not is_name(queue, NAME_BYTES_MAX):
                raise UsageError(
                    f"queue {shown(queue)}: expected 1 to {NAME_BYTES_MAX} bytes of printable text"
                )
        if not queues:
            raise UsageError("queues: expected at least one, found none")
        self._pool = pool
        self._tasks = tasks
        self._queues = list(queues)
        self._hints = hints
        self._observer = observer or Silent()
        self._limits = limits or TaskLimits()
        self._owner = owner or f"{socket.gethostname()}:{os.getpid()}"
        self._current = current
        self._ended = ended
        self._threads = ThreadPoolExecutor(
            self._limits.concurrency, thread_name_prefix=f"{STEP_THREADS}-task"
        )
        self._running: dict[UUID, Running] = {}
        self._reports: asyncio.Queue[Running] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._unsure: UUID | None = None
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain: claim no more, let what runs end, and leave the rest to other tries."""
        self._observer.saw("task worker started", queues=self._queues, owner=self._owner)
        loops = [asyncio.create_task(self._forever(loop)) for loop in (self._claim, self._beat, self._settle)]
        try:
            await stop.wait()
            self._stopping = True
            self._changed.set()
            await asyncio.wait({loops[0]}, timeout=CLAIM_SECONDS)  # what a claim has taken is begun
            self._observer.saw("task worker draining", running=len(self._running))
            await self._idle(self._limits.drain.total_seconds())
            for one in list(self._running.values()):
                one.stop("its worker stops")
            await self._idle(2.0 if any(not one.report for one in self._running.values()) else 0.5)
        finally:
            await end(loops)
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._observer.saw("task worker stopped", left=len(self._running))

    async def _idle(self, seconds: float) -> None:
        """Until nothing runs, and all is reported; at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._running:
                    self._changed.clear()
                    await self._changed.wait()

    async def _forever(self, loop: Callable[[], Any]) -> None:
        failures = 0
        while not (self._stopping and loop == self._claim):
            began = time.monotonic()
            try:
                await loop()
            except Exception as error:  # noqa: BLE001  # a loop must go on
                failures = failures + 1 if time.monotonic() - began < 10 else 1
                away = isinstance(error, AWAY) and not (
                    isinstance(error, psycopg.Error) and not is_transient(error)
                )
                self._observer.saw(
                    "database away" if away else "task worker failed",
                    error=type(error).__name__ if away else f"{type(error).__name__}: {error}",
                    tries=failures,
                )
                await asyncio.sleep(backoff(failures))

    # ---- claiming ------------------------------------------------------------------------------------------

    async def _claim(self) -> None:
        hinted = self._hints.event("task")
        while not self._stopping:
            room = self._limits.concurrency - len(self._running)
            hinted.clear()
            if not self._stopping:
                self._changed.clear()
            if room > 0 and await self._take(room):
                continue
            pause = self._limits.poll.total_seconds() * random.uniform(0.8, 1.2)  # noqa: S311  # jitter
            waits = [asyncio.create_task(event.wait()) for event in (hinted, self._changed)]
            try:
                await asyncio.wait(waits, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end(waits)

    async def _take(self, room: int) -> int:
        """Claim up to `room` tasks and begin them; how many. Of a claim whose answer was lost, what it took is looked
        up first.
        """
        sent = time.monotonic()
        async with self._pool.connection() as conn:
            if self._unsure is not None:
                taken = await store.claimed_under(conn, token=self._unsure)
                self._unsure = None
            else:
                token = self._unsure = uuid4()
                taken = await store.claim(
                    conn,
                    queues=self._queues,
                    limit=room,
                    owner=self._owner,
                    token=token,
                    lease=self._limits.lease,
                )
                self._unsure = None
        for task in taken:
            self._begin(task, sent)
        return len(taken)

    def _begin(self, task: Task, sent: float) -> None:
        if task.task_id in self._running:
            return
        one = self._running[task.task_id] = Running(task, Pulse(), sent)
        one.job = asyncio.create_task(self._do(one))
        self._observer.saw(
            "task.claimed",
            queue=task.queue,
            type=task.type,
            task=str(task.task_id),
            execution=task.execution_id,
            attempt=task.attempt,
            waited=(task.began_at - task.available_at).total_seconds(),
        )

    # ---- doing ---------------------------------------------------------------------------------------------

    async def _do(self, one: Running) -> None:
        """One try; whatever it comes to is reported."""
        try:
            one.report = await self._tried(one)
        except asyncio.CancelledError:
            one.report = lost(one.task)
        except BaseException as error:  # noqa: BLE001  # whatever a function raises is its outcome
            one.report = raised(one.task, error)
        self._reports.put_nowait(one)

    async def _tried(self, one: Running) -> Report:
        task = one.task.opened()
        handler = self._tasks.get(task.type)
        if handler is None:
            return failed(task, "no-handler", f"{self._owner} has no function for {task.type}")
        if task.at is not None:
            task = await self._whole(task, task.at)
        command = asked(handler, task)
        CURRENT.set(Attempt(task.key, task.attempt, task.expires_at, task.left, one.pulse))
        at = span_of(task)
        with contextlib.nullcontext() if at is None or self._current is None else self._current(at):
            value = await called(handler.fn, (command,), one.pulse, self._threads)
        return done(task, handler, value)

    async def _whole(self, task: Task, position: int) -> Task:
        """`task` with its data, which are part of a fact in the payload store. Raises ObjectGone, StoreAway."""
        async with self._pool.connection() as conn:
            try:
                one = await objects.of_fact(conn, task.execution_id, position, tenant=task.tenant_id)
            except ValueError as error:
                raise ObjectGone(f"task {task.task_id}: {error}") from None
        return replace(task, payload=(await Large.get(task.tenant_id, one)).decode())

    # ---- beating -------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        span = self._limits.lease.total_seconds()
        while True:
            await asyncio.sleep(span / 5 * random.uniform(0.8, 1.0))  # noqa: S311  # jitter
            try:
                await self.beat_once()
            finally:
                now = time.monotonic()
                for one in list(self._running.values()):
                    if now - one.beat_at > span:
                        one.stop("its lease is over")

    async def beat_once(self) -> None:
        """Say of all that run that they live, with what they said of themselves; hear who is not needed any more."""
        ours = [one for one in self._running.values() if one.report is None]
        if not ours:
            return
        sent = time.monotonic()
        news = [(one, one.pulse.left if one.pulse.left != one.told else None) for one in ours]
        async with self._pool.connection() as conn:
            states = await store.beat(
                conn,
                [
                    (one.task, None if left is None else strict_json.encode(left, what="progress"))
                    for one, left in news
                ],
                lease=self._limits.lease,
            )
        for one, left in news:
            state = states.get(one.task.task_id)
            if left is not None:
                one.told = left
            if state is not None:
                one.beat_at = sent
            if state == "stopping":
                one.stop("it was withdrawn, or its time is over")
            elif state is None:
                one.stop("its lease is over")

    # ---- reporting -----------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Report what has ended. What cannot be written now is kept, and written later."""
        while True:
            batch = [await self._reports.get()]
            while not self._reports.empty() and len(batch) < SETTLED_MAX:
                batch.append(self._reports.get_nowait())
            try:
                await self._write(batch)
            except BaseException:
                for one in batch:
                    if one.task.task_id in self._running:
                        self._reports.put_nowait(one)
                raise

    async def _write(self, batch: Sequence[Running]) -> None:
        try:
            async with self._pool.connection() as conn:
                verdicts = await store.settle(conn, [one.report for one in batch if one.report is not None])
        except psycopg.Error as error:
            if not is_bad_data(error):
                raise
            await self._split(batch, error)
            return
        for one in batch:
            self._over(one, *verdicts.get(one.task.task_id, ("late", "gone")))
        self._hints.give("execution")

    async def _split(self, batch: Sequence[Running], error: psycopg.Error) -> None:
        """A batch that fails on its data is split until the one at fault stands alone; that one failed."""
        if len(batch) > 1:
            half = len(batch) // 2
            await self._write(batch[:half])
            await self._write(batch[half:])
            return
        [one] = batch
        if one.report is not None and one.report.state == "failed":
            raise error
        one.report = failed(one.task, "not-encodable", str(error).partition("\n")[0])
        await self._write(batch)

    def _over(self, one: Running, verdict: str, state: str) -> None:
        task, now = one.task, datetime.now(UTC)
        del self._running[task.task_id]
        self._changed.set()
        word = one.report.state if one.report is not None else "lost"
        self._observer.saw(
            "task.tried",
            queue=task.queue,
            type=task.type,
            task=str(task.task_id),
            execution=task.execution_id,
            attempt=task.attempt,
            outcome=word if verdict != "late" else "late",
            seconds=(now - one.began).total_seconds(),
        )
        if verdict == "late":
            self._observer.saw("task late", error=str(LateReport(task)), state=state)
        elif self._ended is not None:
            self._ended(task, word, one.began, now)


def span_of(task: Task) -> Trace | None:
    """The span of a try, under that of its task; None when it belongs to no trace."""
    if task.traceparent is None:
        return None
    return trace.parse(trace.child(task.traceparent, trace.hop(task.task_id, task.attempt)))


@asynccontextmanager
async def task_worker(
    dsn: str,
    tasks: Tasks,
    *,
    queues: Sequence[str],
    observer: Observer | None = None,
    limits: TaskLimits | None = None,
) -> AsyncGenerator[TaskWorker]:
    """A worker of `queues` that runs in this process while inside, on connections of its own; it drains when left."""
    stop = asyncio.Event()
    async with (
        running(Hints(dsn)) as hints,
        database.pool(dsn, size=TASK_CONNECTIONS, name="tasks") as pool,
    ):
        worker = TaskWorker(pool, tasks, queues=queues, hints=hints, observer=observer, limits=limits)
        job = asyncio.create_task(worker.run(stop))
        try:
            yield worker
        finally:
            stop.set()
            await job
