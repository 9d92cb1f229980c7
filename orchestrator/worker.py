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
from uuid import uuid4

import psycopg
from psycopg_pool import PoolTimeout

from contracts.observer import Observer, Silent
from orchestrator.core.ask import Ask
from orchestrator.core.machine import Machine
from orchestrator.engine import attempt
from orchestrator.engine.clock import Clock
from orchestrator.engine.committer import Committer, LeaseLost
from orchestrator.engine.lease import Lease
from orchestrator.engine.message import Wire
from orchestrator.engine.ownership import Engine, Loaded, Ownership
from orchestrator.engine.parking import Parking
from orchestrator.flows import Flows
from orchestrator.store import definitions, executions, workers
from orchestrator.store.database import Connection, Pool, check_settings
from orchestrator.store.executions import Claim
from orchestrator.store.hints import Hints

AWAY = (psycopg.Error, PoolTimeout, OSError)
"""What it looks like when the database is away; then every loop waits and tries again."""


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
    drain: timedelta = timedelta(seconds=25)
    """How long local steps may take to end after SIGTERM, before they are left to others."""


class Worker:
    """Runs `flows` until asked to stop. Any number of workers share the work.

    When its lease is lost (it was frozen, or the database was away for longer), all it owned is let go, and it
    goes on as a new worker. `forgetful` is for tests: each execution is let go after each of its facts.
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
        forgetful: bool = False,
    ) -> None:
        self._pool = pool
        self._flows = flows
        self._dsn = dsn
        self._hints = hints
        self._span = lease
        self._observer = observer or Silent()
        self._limits = limits or WorkerLimits()
        self._forgetful = forgetful
        self._wire = Wire(source, receiver_url)
        self._threads = ThreadPoolExecutor(self._limits.threads_max, thread_name_prefix="step")
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain: claim no more, let running steps end, leave the rest to others.

        Raises UnsafeDatabase when a setting of the database would break a promise.
        """
        try:
            while not stop.is_set():
                await self._incarnation(stop)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- one identity --------------------------------------------------------------------------------------

    async def _incarnation(self, stop: asyncio.Event) -> None:
        """The life of one worker row: from its registration until stopped, or until its lease is lost."""
        me = str(uuid4())
        granted = await self._register(me, stop)
        if granted is None:
            return
        loop = asyncio.get_running_loop()
        lost = asyncio.Event()
        lease = Lease(self._dsn, me=me, span=self._span, granted=granted, lost=lambda: _set(loop, lost))
        engine = self._engine(lease)
        lease.start()
        self._observer.saw("worker started", worker=me, flows=[f"{n}@{v}" for n, v in self._flows.names()])
        loops: list[Callable[[], Awaitable[None]]] = [
            lambda: self._tick(lease),
            lambda: self._claim(engine),
            self._take_over,
            lambda: self._watch_mail(engine),
            engine.committer.run,
        ]
        async with _all(loops, self._failed):
            await _first(stop.wait(), lost.wait())
            if not lost.is_set():
                await self._drain(engine, lost)
            await self._let_go(engine)
        lease.stop()
        with contextlib.suppress(*AWAY):
            async with self._pool.connection() as conn:
                await workers.retire(conn, me=me)
        self._observer.saw("worker lost its lease" if lost.is_set() else "worker stopped", worker=me)

    async def _register(self, me: str, stop: asyncio.Event) -> float | None:
        """The moment from which the lease counts (monotonic seconds); None when asked to stop before."""
        failures = 0
        while not stop.is_set():
            try:
                async with self._pool.connection() as conn:
                    await check_settings(conn)
                    await definitions.publish(conn, self._flows.names())
                    sent = time.monotonic()
                    names = [f"{name}@{version}" for name, version in self._flows.names()]
                    await workers.register(
                        conn, me=me, lease=self._span, host=socket.gethostname(), definitions=names
                    )
                    return sent
            except AWAY as error:
                failures += 1
                await self._away(error, failures)
        return None

    def _engine(self, lease: Lease) -> Engine:
        clock = Clock()
        committer = Committer(
            self._pool,
            lease=lease,
            observer=self._observer,
            hint=self._hints.give,
            wake=self._hints.event("execution").set,
        )

        def run_step(ask: Ask, key: str) -> asyncio.Task[attempt.Result]:
            return asyncio.create_task(attempt.run(ask, key=key, threads=self._threads))

        async def reload(claim: Claim, read: int) -> Loaded:
            return await self._reload(engine, claim, read)

        engine = Engine(
            lease=lease,
            clock=clock,
            committer=committer,
            parking=Parking(bytes_max=self._limits.parked_bytes_max),
            wire=self._wire,
            observer=self._observer,
            run_step=run_step,
            reload=reload,
            forgetful=self._forgetful,
        )
        return engine

    async def _drain(self, engine: Engine, lost: asyncio.Event) -> None:
        engine.draining = True
        self._observer.saw("worker draining", owned=len(engine.owned))
        for ownership in engine.owned.values():
            ownership.wake()
        if self._tasks:
            await _first(asyncio.wait(self._tasks, timeout=self._limits.drain.total_seconds()), lost.wait())

    async def _let_go(self, engine: Engine) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        engine.owned.clear()
        engine.parking.clear()

    # ---- loops ---------------------------------------------------------------------------------------------

    async def _tick(self, lease: Lease) -> None:
        while True:
            lease.tick()
            await asyncio.sleep(self._span.total_seconds() / 20)

    async def _claim(self, engine: Engine) -> None:
        """Take what is due, as long as there is room; look when hinted, when polled, and while there is more."""
        hinted = self._hints.event("execution")
        names = self._flows.names()
        async with self._pool.connection() as conn:
            while not engine.draining:
                room = self._limits.owned_max - len(engine.owned)
                if room <= 0:
                    self._room.clear()
                    await self._room.wait()
                    continue
                hinted.clear()
                wanted = min(room, self._limits.claim_max)
                claims = await executions.claim(conn, me=engine.lease.me, definitions=names, limit=wanted)
                if claims:
                    engine.clock.told(max(claim.at for claim in claims))
                    await self._load(conn, engine, claims)
                if len(claims) < wanted:
                    await _either(hinted, seconds=self._pause())

    def _pause(self) -> float:
        return self._limits.poll.total_seconds() * random.uniform(0.8, 1.2)  # noqa: S311  # jitter

    async def _load(self, conn: Connection, engine: Engine, claims: list[Claim]) -> None:
        """Read journals and unread mail of all `claims` at once, and let each take its turns."""
        parked: dict[str, Machine] = {}
        for claim in claims:
            machine = engine.parking.take(claim.execution, fence=claim.fence, position=claim.position)
            if machine is not None:
                parked[claim.execution] = machine
        cold = [(claim.tenant, claim.execution) for claim in claims if claim.execution not in parked]
        mailed = [(c.tenant, c.execution, c.mail_read) for c in claims if c.mail_received > c.mail_read]
        journals = await executions.journals(conn, cold) if cold else {}
        mail = await executions.unread(conn, mailed) if mailed else {}
        for claim in claims:
            loaded = Loaded(journals.get(claim.execution), mail.get(claim.execution, []))
            self._own(engine, claim, loaded, parked.get(claim.execution))

    def _own(self, engine: Engine, claim: Claim, loaded: Loaded, machine: Machine | None) -> None:
        ownership = Ownership(engine, claim, self._flows.get(claim.definition, claim.version))
        engine.owned[claim.execution] = ownership
        task = asyncio.create_task(ownership.run(loaded, machine))
        self._tasks.add(task)

        def over(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if engine.owned.get(claim.execution) is ownership:
                del engine.owned[claim.execution]
            self._room.set()
            if not done.cancelled() and (error := done.exception()) is not None:
                self._failed(error)

        task.add_done_callback(over)

    async def _reload(self, engine: Engine, claim: Claim, read: int) -> Loaded:
        """Read one execution again. Raises LeaseLost when it is no longer ours."""
        failures = 0
        while engine.lease.holds:
            try:
                async with self._pool.connection() as conn:
                    row = (await executions.standing(conn, [(claim.tenant, claim.execution)])).get(
                        claim.execution
                    )
                    if row is None or row.owner != engine.lease.me or row.fence != claim.fence:
                        break
                    journal = await executions.journals(conn, [(claim.tenant, claim.execution)])
                    mail = await executions.unread(conn, [(claim.tenant, claim.execution, read)])
                    return Loaded(journal[claim.execution], mail[claim.execution])
            except AWAY as error:
                failures += 1
                await self._away(error, failures)
        raise LeaseLost(claim.execution)

    async def _take_over(self) -> None:
        """Bury workers whose lease is over, and free what they owned; then anybody may claim it."""
        while True:
            async with self._pool.connection() as conn:
                for dead in await workers.bury(conn):
                    self._observer.saw("worker buried", worker=dead)
                while taken := await workers.take_over(conn, limit=500):
                    self._observer.saw("executions taken over", number=len(taken), executions=taken[:10])
                    self._hints.give("execution")
                await workers.forget(conn)
                self._wire.routes = await definitions.reply_routes(conn)
            await asyncio.sleep(min(1.0, self._span.total_seconds() / 4) * random.uniform(0.8, 1.2))  # noqa: S311  # jitter

    async def _watch_mail(self, engine: Engine) -> None:
        """Tell executions whose local steps run of mail that came meanwhile."""
        while True:
            await asyncio.sleep(self._pause())
            waiting = [one for one in engine.owned.values() if one.waits_for_work]
            if waiting:
                async with self._pool.connection() as conn:
                    rows = await executions.standing(
                        conn, [(o.claim.tenant, o.claim.execution) for o in waiting]
                    )
                for ownership in waiting:
                    row = rows.get(ownership.claim.execution)
                    if row is not None and row.mail_received > ownership.mail_known:
                        ownership.notice_mail()

    # ---- trouble -------------------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        self._observer.saw("worker failed", error=f"{type(error).__name__}: {error}")

    async def _away(self, error: BaseException, failures: int) -> None:
        self._observer.saw("database away", error=type(error).__name__, tries=failures)
        await asyncio.sleep(min(5.0, 0.1 * 2 ** min(failures, 6)) * random.uniform(0.5, 1))  # noqa: S311  # jitter


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
            await asyncio.sleep(min(5.0, 0.1 * 2 ** min(failures, 6)) * random.uniform(0.5, 1))  # noqa: S311  # jitter

    tasks = [asyncio.create_task(forever(loop)) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first(*events: Awaitable[object]) -> None:
    """Until one of `events` has happened."""
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _either(event: asyncio.Event, *, seconds: float) -> None:
    """Until `event` is set, or `seconds` have passed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set `event` from any thread; a loop that is closed needs it no more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)
