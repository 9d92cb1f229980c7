"""A worker process: it claims executions that are due, takes their turns, and takes over those of the dead."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal
from uuid import uuid4

import psycopg

from contracts.dataref import Tickets
from contracts.observer import Observer, Silent
from contracts.sensitive import unless_sensitive
from orchestrator.core.ask import Ask
from orchestrator.engine import attempt
from orchestrator.engine.claims import AWAY, Appetite, Claims, backoff, either
from orchestrator.engine.clock import Clock
from orchestrator.engine.committer import Committer
from orchestrator.engine.lease import Lease
from orchestrator.engine.message import Wire
from orchestrator.engine.ownership import Engine
from orchestrator.engine.parking import Parking
from orchestrator.engine.transaction import Transactions
from orchestrator.flows import Flows
from orchestrator.store import definitions, handing, mutexes, situation, tasks, transactions, workers
from orchestrator.store.database import Pool, check_settings, is_transient
from orchestrator.store.ending import end
from orchestrator.store.hints import Hints

STEP_THREADS: Final = "step"
"""What the names of threads that run plain functions begin with."""

STUCK_SHOWN_MAX: Final = 10
"""Executions without a reason to move that one moment names; all of them are counted."""


GRANTS_MAX: Final = 100
"""Mutexes that one transaction gives: it has the rows of all who get one."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one worker process takes on."""

    owned_max: int = 500
    """Executions owned at once."""
    claim_max: int = 100
    """Executions taken by one claim."""
    threads_max: int = 32
    """Plain functions that run at once as local steps."""
    parked_bytes_max: int = 64 * 1024 * 1024
    """Memory for executions that wait."""
    poll: timedelta = timedelta(milliseconds=500)
    """How often to look for work without a hint, ±20 %."""
    grant: timedelta = timedelta(seconds=1)
    """How often to look for mutexes that nobody has and somebody waits for, without having let one go, ±20 %."""
    watch: timedelta = timedelta(minutes=1)
    """How often to look for executions that have no reason to move, ±20 %."""
    drain: timedelta = timedelta(seconds=25)
    """How long local steps may take to end after SIGTERM, before they are left to others."""


class Worker:
    """Runs `flows` until asked to stop. Any number of workers share the work.

    When its lease is lost (it was frozen, or the database was away for longer), all it owned is let go, and it
    goes on as a new worker. `blocked` is called, from a thread, when the event loop does not come back: only
    ending the process helps then. With `traced`, what it commits is marked as to be exported; after a pause of more
    than `segment_gap` an execution goes on in another trace. `changed_flows` says whether it starts when a version of a
    flow has other code than it had. The functions of transactions run as `application_role`, where there is one.
    With `tickets`, and a payload store, messages name data that are too large to go with them.
    `forgetful` is for tests: each execution is let go after each of its facts.
    """

    def __init__(
        self,
        pool: Pool,
        flows: Flows,
        *,
        dsn: str,
        hints: Hints,
        lease: timedelta = timedelta(seconds=30),
        source: str = "/waypost",
        receiver_url: str = "http://127.0.0.1:8081",
        observer: Observer | None = None,
        limits: WorkerLimits | None = None,
        blocked: Callable[[], None] = lambda: None,
        forgetful: bool = False,
        traced: bool = False,
        segment_gap: timedelta | None = None,
        changed_flows: Literal["refuse", "accept"] = "refuse",
        application_role: str | None = None,
        tickets: Tickets | None = None,
    ) -> None:
        self._pool = pool
        self._flows = flows
        self._dsn = dsn
        self._hints = hints
        self._span = lease
        self._observer = observer or Silent()
        self._limits = limits or WorkerLimits()
        self._blocked = blocked
        self._forgetful = forgetful
        self._traced = traced
        self._changed: Literal["refuse", "accept", "pass"] = changed_flows
        self._application_role = application_role
        self._transactions = transactions.pool(dsn)
        self._lease: Lease | None = None
        self._wire = Wire(source, receiver_url, segment_gap=segment_gap, tickets=tickets)
        self._threads = ThreadPoolExecutor(self._limits.threads_max, thread_name_prefix=STEP_THREADS)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain: claim no more, let running steps end, leave the rest to others.

        Raises UnsafeDatabase when a setting of the database would break a promise, ChangedFlows when a version of a
        flow has other code than it had.
        """
        try:
            while not stop.is_set():
                await self._incarnation(stop)
        finally:
            await self._transactions.close()
            self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def holds_lease(self) -> bool:
        """Whether it may write now."""
        return self._lease is not None and self._lease.holds

    # ---- one identity --------------------------------------------------------------------------------------

    async def _incarnation(self, stop: asyncio.Event) -> None:
        """The life of one worker row: from its registration until stopped, or until its lease is lost."""
        registered = await self._register(stop)
        if registered is None:
            return
        me, granted = registered
        loop = asyncio.get_running_loop()
        lost = asyncio.Event()

        def blocked(stack: list[str]) -> None:
            self._observer.saw("event loop blocked", worker=me, stack=stack)
            self._blocked()

        lease = Lease(
            self._dsn,
            me=me,
            span=self._span,
            granted=granted,
            lost=lambda: _set(loop, lost),
            blocked=blocked,
        )
        engine = self._engine(lease)
        flows = {(flow.name, flow.version): flow for flow in self._flows}
        appetite = Appetite(self._limits.owned_max, self._limits.claim_max, self._limits.poll)
        claims = Claims(engine, self._pool, flows, appetite)
        engine.reload = claims.reload
        lease.start()
        self._lease = lease
        self._observer.saw("worker started", worker=me, flows=[f"{n}@{v}" for n, v in self._flows.names()])
        loops: list[Callable[[], Awaitable[None]]] = [
            lambda: self._tick(lease),
            lambda: claims.run(self._hints.event("execution")),
            claims.watch_mail,
            self._take_over,
            self._grant,
            self._hand_on,
            self._watch,
            *engine.committer.lanes(),
        ]
        async with _all(loops, self._failed):
            await _first(stop.wait(), lost.wait())
            if not lost.is_set():
                engine.draining = True
                self._observer.saw("worker draining", owned=len(engine.owned))
                await _first(claims.drained(seconds=self._limits.drain.total_seconds()), lost.wait())
            await claims.let_go()
        lease.stop()
        if not stop.is_set():
            await asyncio.to_thread(lease.join)  # its connection is gone before the next lease has one
        with contextlib.suppress(*AWAY):
            async with self._pool.connection() as conn:
                await workers.retire(conn, me=me)
        self._observer.saw("worker lost its lease" if lost.is_set() else "worker stopped", worker=me)

    async def _register(self, stop: asyncio.Event) -> tuple[str, float] | None:
        """Our identity, and the moment from which its lease counts (monotonic seconds); None when asked to stop
        before.

        Each try is another identity: one whose answer was lost may be registered, and is buried after its lease.
        """
        failures = 0
        while not stop.is_set():
            me = str(uuid4())
            try:
                async with self._pool.connection() as conn:
                    await check_settings(conn)
                    await definitions.publish(conn, self._flows.definitions(), changed=self._changed)
                    self._changed = (
                        "pass"  # others may accept other code meanwhile: this one goes on with its own
                    )
                    sent = time.monotonic()
                    names = [f"{name}@{version}" for name, version in self._flows.names()]
                    await workers.register(
                        conn, me=me, lease=self._span, host=socket.gethostname(), definitions=names
                    )
                    return me, sent
            except AWAY as error:
                if isinstance(error, psycopg.Error) and not is_transient(error):
                    raise
                failures += 1
                self._observer.saw("database away", error=type(error).__name__, tries=failures)
                await asyncio.sleep(backoff(failures))
        return None

    def _engine(self, lease: Lease) -> Engine:
        clock = Clock()
        committer = Committer(
            self._pool,
            lease=lease,
            observer=self._observer,
            hint=self._hints.give,
            wake=self._hints.event("execution").set,
            grant=self._hints.event("mutex").set,
            emitted=self._hints.event("event").set,
            traced=self._traced,
        )

        def run_step(ask: Ask, key: str) -> asyncio.Task[attempt.Result]:
            now = None if ask.watch is None else clock.now()
            return asyncio.create_task(attempt.run(ask, key=key, threads=self._threads, now=now))

        return Engine(
            lease=lease,
            clock=clock,
            committer=committer,
            parking=Parking(bytes_max=self._limits.parked_bytes_max),
            wire=self._wire,
            observer=self._observer,
            run_step=run_step,
            transactions=Transactions(
                self._transactions,
                self._pool,
                lease=lease,
                observer=self._observer,
                role=self._application_role,
                traced=self._traced,
            ),
            forgetful=self._forgetful,
        )

    # ---- loops ---------------------------------------------------------------------------------------------

    async def _tick(self, lease: Lease) -> None:
        while True:
            lease.tick()
            await asyncio.sleep(self._span.total_seconds() / 20)

    async def _take_over(self) -> None:
        """Bury workers whose lease is over, and free what they owned; then anybody may claim it."""
        while True:
            async with self._pool.connection() as conn:
                for dead in await workers.bury(conn):
                    self._observer.saw("worker buried", worker=dead)
                while taken := await workers.take_over(conn, limit=500, traced=self._traced):
                    self._observer.saw("executions taken over", number=len(taken), executions=taken[:10])
                    self._hints.give("execution")
                await workers.forget(conn)
                if lost := await tasks.expire(conn, limit=500):
                    self._observer.saw("tasks lost", number=lost)
                    self._hints.give("execution")
                self._wire.routes = await definitions.reply_routes(conn)
            await asyncio.sleep(min(1.0, self._span.total_seconds() / 4) * random.uniform(0.8, 1.2))  # noqa: S311  # jitter

    async def _grant(self) -> None:
        """Give each mutex that nobody has to whoever waits for it: when a turn of ours asked for one or let one go, and
        now and then, since others may have died before they did.
        """
        wanted = self._hints.event("mutex")
        while True:
            wanted.clear()
            async with self._pool.connection() as conn:
                again = True
                while again:
                    granted, again = await mutexes.grant(conn, limit=GRANTS_MAX)
                    if granted:
                        self._hints.give("execution")
            await either(wanted, seconds=self._limits.grant.total_seconds() * random.uniform(0.8, 1.2))  # noqa: S311  # jitter

    async def _hand_on(self) -> None:
        """Give what flows and applications emit to flows: right after a commit of ours, when hinted, when polled."""
        emitted = self._hints.event("event")
        pause = Appetite(self._limits.owned_max, self._limits.claim_max, self._limits.poll)
        while True:
            emitted.clear()
            async with self._pool.connection() as conn:
                while handed := await handing.hand_on(conn):
                    self._handed(handed)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause.pause):
                    await emitted.wait()

    def _handed(self, handed: list[handing.Handed]) -> None:
        self._hints.give("execution")
        self._observer.saw("events.handed", number=len(handed))
        for one in handed:
            what = {"type": one.type, "key": one.key, "source": one.source, "id": one.event_id}
            if one.outcome == "conflict":
                self._observer.saw("events.conflict", **what)
            if one.looped:
                self._observer.saw("events.looped", **what, hops=one.hops)

    async def _watch(self) -> None:
        """Say which executions have no reason to move: in normal life none, so this is a bug that shows.

        The first look is at once: a worker that does not live for long looks too.
        """
        while True:
            async with self._pool.connection() as conn:
                count, found = await situation.stuck(conn, limit=STUCK_SHOWN_MAX)
                self._observer.saw(
                    "executions.watched", stuck=await situation.stuck_by(conn) if count else {}
                )
            if count:
                self._observer.saw("executions.stuck", count=count, executions=found)
            await asyncio.sleep(self._limits.watch.total_seconds() * random.uniform(0.8, 1.2))  # noqa: S311  # jitter

    # ---- trouble -------------------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        self._observer.saw("worker failed", error=f"{type(error).__name__}: {unless_sensitive(str(error))}")


@contextlib.asynccontextmanager
async def _all(
    loops: list[Callable[[], Awaitable[None]]], failed: Callable[[BaseException], None]
) -> AsyncGenerator[None]:
    """All `loops` run while inside; one that fails is reported and begins anew."""

    async def forever(loop: Callable[[], Awaitable[None]]) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await loop()
                return
            except Exception as error:  # noqa: BLE001  # a loop must go on
                failed(error)
                failures = failures + 1 if time.monotonic() - began < 10 else 1
            await asyncio.sleep(backoff(failures))

    tasks = [asyncio.create_task(forever(loop)) for loop in loops]
    try:
        yield
    finally:
        await end(tasks)


async def _first(*events: Awaitable[object]) -> None:
    """Until one of `events` has happened."""
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set `event` from any thread; a loop that is closed needs it no more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)
