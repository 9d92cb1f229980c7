"""Sessions of the database that take one step at a time, in an order that somebody chooses.

A step is what a session does until its next stop: one in a function of the database (see `instrument`), or one that
its program makes between two statements. Whether a session that has not come to its next stop waits for another is
asked of the database (`pg_blocking_pids`), and is never concluded from how long it takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg.pq import TransactionStatus

from orchestrator.store.database import Connection
from orchestrator.store.ending import end
from tests.explorer.instrument import GATE_CLASS
from tests.explorer.orders import Choice, Chooser

PATIENCE_SECONDS: Final = 30.0
PACE_SECONDS: Final = 0.001
"""After this long without news the database is asked, and later and later after answers that decide nothing."""

OPTIONS: Final = "-c synchronous_commit=off -c deadlock_timeout=10ms -c plan_cache_mode=force_generic_plan"
"""What is explored is who sees what, so nothing need outlive the server. Deadlocks are found soon, and plans are made
once: otherwise each function of each session would make its first five anew."""

Program = Callable[["Session"], Awaitable[Any]]


class At(Enum):
    """Where a session is."""

    START = auto()
    RUNNING = auto()
    STOP = auto()
    LOCK = auto()
    END = auto()


class Session:
    """One connection, and the program that runs on it in the present order."""

    def __init__(self, number: int, conn: Connection) -> None:
        self.number = number
        self.conn = conn
        self.pid = conn.info.backend_pid
        self.at = At.END
        self.stop_name = ""
        self.gate: int | None = None
        self.moved = asyncio.Event()
        self.task: asyncio.Task[Any] | None = None
        self._go: asyncio.Future[None] | None = None
        self._transactions = 0
        conn.add_notice_handler(self._noticed)

    def begin(self, program: Program) -> None:
        """Be about to run `program`: its first step begins it."""
        self.at, self.stop_name, self.gate = At.START, "start", None
        self._program = program
        self._transactions = 0
        self.task = None

    def run(self) -> None:
        """Take the first step, or that after a stop of the program. `moved` is set at the next."""
        self.moved.clear()
        if self.task is None:
            self.task = asyncio.ensure_future(self._program(self))
            self.task.add_done_callback(lambda _: self.moved.set())
        elif self._go is not None:
            self._go.set_result(None)
            self._go = None
        self.at = At.RUNNING

    def _noticed(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        word, number, name = (diagnostic.message_primary or "").split(" ", 2)
        assert word == "stop", diagnostic.message_primary
        self.gate, self.stop_name = int(number), name
        self.moved.set()

    async def stop(self, name: str) -> None:
        """A stop between two statements of a program."""
        self.stop_name = name
        self._go = asyncio.get_running_loop().create_future()
        self.moved.set()
        await self._go

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Connection]:
        """A transaction with a stop before its commit, and one before it when it is not the program's first."""
        if self._transactions:
            await self.stop("between two transactions")
        self._transactions += 1
        async with self.conn.transaction():
            yield self.conn
            await self.stop("before the commit")

    @property
    def result(self) -> Any:
        """What the program returned, or its error."""
        assert self.task is not None
        return self.task.exception() or self.task.result()


@dataclass(slots=True)
class Walk:
    """How programs ran: the order, what each returned or raised, who ended when, and who ever waited.

    `steps`: each step, by its session and the stop that it began at.
    """

    choices: list[Choice] = field(default_factory=list[Choice])
    results: list[Any] = field(default_factory=list[Any])
    finished: list[int] = field(default_factory=list[int])
    waited: set[int] = field(default_factory=set[int])
    steps: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])


class Explorer:
    """Runs programs on sessions of one database, step by step. Spoilt when a run broke off in the middle."""

    def __init__(self, warden: psycopg.Connection[Any], sessions: Sequence[Session]) -> None:
        self._warden = warden
        self._sessions = sessions
        self.is_spoilt = False

    @classmethod
    @asynccontextmanager
    async def over(cls, dsn: str, *, sessions: int) -> AsyncGenerator[Self]:
        """An explorer with as many sessions, until the block ends."""
        async with AsyncExitStack() as stack:
            warden = stack.enter_context(psycopg.connect(dsn, autocommit=True, options=OPTIONS))
            made: list[Session] = []
            for number in range(sessions):
                options = f"{OPTIONS} -c explorer.session={number}"
                conn = await Connection.connect(dsn, autocommit=True, options=options)
                made.append(Session(number, await stack.enter_async_context(conn)))
            explorer = cls(warden, made)
            for session in made:
                explorer._close_first_gate(session)
            yield explorer

    async def run(self, programs: Sequence[Program], choose: Chooser) -> Walk:
        """Run `programs` to their ends, each step by the one that `choose` takes of those who can."""
        sessions = self._sessions[: len(programs)]
        for session, program in zip(sessions, programs, strict=True):
            session.begin(program)
        try:
            return await self._walk(sessions, choose)
        except BaseException:
            self.is_spoilt = True
            await end(session.task for session in sessions if session.task is not None)
            raise

    async def _walk(self, sessions: Sequence[Session], choose: Chooser) -> Walk:
        walk = Walk()
        while any(session.at is not At.END for session in sessions):
            can = tuple(s.number for s in sessions if s.at in {At.START, At.STOP})
            if not can:
                await self._end_deadlock(sessions, walk)
                continue
            taken = choose(can)
            walk.choices.append(Choice(can, taken))
            walk.steps.append((taken, sessions[taken].stop_name))
            await self._step(sessions[taken], sessions, walk)
        walk.results = [session.result for session in sessions]
        return walk

    async def _step(self, session: Session, sessions: Sequence[Session], walk: Walk) -> None:
        """Let `session` on to its next stop, its end, or a lock; and with it whoever waited for what it gave up."""
        gate, session.gate = session.gate, None
        session.run()
        if gate is not None:
            self._open_gate(session, gate)
        await self._arrive(session, sessions, walk)
        if session.conn.info.transaction_status == TransactionStatus.IDLE:
            for other in sessions:
                if other.at is At.LOCK and other is not session:
                    await self._arrive(other, sessions, walk)

    async def _arrive(self, session: Session, sessions: Sequence[Session], walk: Walk) -> None:
        """Return when `session` is at a stop, at its end, or seen to wait for another."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        pace = 0.0 if session.at is At.LOCK else PACE_SECONDS
        while not session.moved.is_set():
            if await heard(session.moved, within=pace):
                break
            if self._is_blocked(session, sessions):
                session.at = At.LOCK
                walk.waited.add(session.number)
                return
            pace = max(PACE_SECONDS, pace * 2)
            assert time.monotonic() < deadline, f"session {session.number} came to nothing after {walk.steps}"
        if session.task is not None and session.task.done():
            session.at, session.stop_name = At.END, "end"
            walk.finished.append(session.number)
        else:
            session.at = At.STOP

    async def _end_deadlock(self, sessions: Sequence[Session], walk: Walk) -> None:
        """All that are not at their end wait for one another. The server ends that; return when it has."""
        waiting = [session for session in sessions if session.at is At.LOCK]
        news = [asyncio.ensure_future(session.moved.wait()) for session in waiting]
        over, left = await asyncio.wait(news, timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        assert over, f"all wait for one another, and nobody ended it, after {walk.steps}"
        for session in waiting:
            await self._arrive(session, sessions, walk)

    BLOCKING: Final[LiteralString] = "select pg_blocking_pids(%s)"

    def _is_blocked(self, session: Session, sessions: Sequence[Session]) -> bool:
        row = self._warden.execute(self.BLOCKING, (session.pid,)).fetchone()
        assert row is not None
        return any(other.pid in row[0] for other in sessions if other is not session)

    FIRST: Final[LiteralString] = """
        select pg_advisory_lock(%(lock)s, 1), setval(%(gates)s, 1, false)
    """
    PASS: Final[LiteralString] = "select pg_advisory_lock(%s, %s), pg_advisory_unlock(%s, %s)"

    def _close_first_gate(self, session: Session) -> None:
        number = session.number
        parameters = {"lock": GATE_CLASS + number, "gates": f"explorer.gate_{number}"}
        self._warden.execute(self.FIRST, parameters)

    def _open_gate(self, session: Session, gate: int) -> None:
        """Let the session through `gate`, its next one being closed."""
        lock = GATE_CLASS + session.number
        self._warden.execute(self.PASS, (lock, gate + 1, lock, gate))


async def heard(event: asyncio.Event, *, within: float) -> bool:
    """Whether `event` is set, or was within so many seconds."""
    if within == 0:
        return event.is_set()
    try:
        async with asyncio.timeout(within):
            return await event.wait()
    except TimeoutError:
        return False
