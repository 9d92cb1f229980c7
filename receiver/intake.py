"""Group commit: arrivals that come while a transaction is under way go together into the next one.

So the cost of a durable commit is shared by whoever waits for it, and an idle receiver still commits at once.
A transaction that fails for a passing reason is repeated, which is harmless since everything in it has a
name. One that fails on data is split until the arrival at fault stands alone, so that nobody can make the
others fail.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from psycopg_pool import AsyncConnectionPool, PoolTimeout
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from contracts.errors import Conflict, ContractViolation, Unavailable
from contracts.limits import RECEIVE_TRIES_MAX, RETRY_AFTER_SECONDS
from contracts.observer import Observer
from receiver import inbox
from receiver.arrivals import Arrival, fault_of, mail_of
from receiver.deadlines import Deadlines
from receiver.inbox import Connection, MailItem, Posted
from receiver.senders import CONNECTION_SECONDS
from receiver.settings import ReceiverSettings

T = TypeVar("T")
PAUSE_SECONDS: Final = 0.01
"""Before the second try of a transaction; later ones wait longer, by chance."""


class Unstorable(ContractViolation):
    """The database refuses the data of an event, though the event keeps to all rules that we know."""

    code = "unstorable"


class Conflicting(Conflict):
    """Something else has the name of an event already."""

    code = "event-conflict"


@dataclass(slots=True)
class Waiting:
    """An arrival and the promise to tell what became of it."""

    arrival: Arrival
    told: asyncio.Future[Posted]


class Held:
    """A connection that is kept between transactions, and given back when one fails."""

    def __init__(self, pool: AsyncConnectionPool[Any]) -> None:
        self.pool = pool
        self.conn: Connection | None = None

    async def __aenter__(self) -> Connection:
        if self.conn is not None:
            return self.conn
        conn: Connection = await self.pool.getconn(CONNECTION_SECONDS)
        assert conn.autocommit, "the receiver's connections are in autocommit: a post is a transaction"
        self.conn = conn
        return conn

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            await self.release()

    async def release(self) -> None:
        if self.conn is not None:
            conn, self.conn = self.conn, None
            await self.pool.putconn(conn)


class Intake:
    """Takes arrivals and returns when they are durable."""

    def __init__(
        self,
        pool: AsyncConnectionPool[Any],
        *,
        settings: ReceiverSettings,
        observer: Observer,
        hint: Callable[[str], None],
        traced: bool = False,
    ) -> None:
        self.pool = pool
        self.traced = traced
        self.settings = settings
        self.observer = observer
        self.hint = hint
        self.queue: deque[Waiting] = deque()
        self.deadlines: Deadlines[Posted] = Deadlines(settings.wait_seconds, unavailable)
        self.writers: set[asyncio.Task[None]] = set()
        self.writing = 0

    async def take(self, arrival: Arrival) -> Posted:
        """Store `arrival`, wake who waits for it, and return what became of it when that is durable.

        Raises NotAllowed, MalformedEvent or Unstorable when the arrival is at fault. Raises Unavailable when
        the database did not answer in time: then the arrival may have been stored, and sending it again is
        right.
        """
        waiting = Waiting(arrival, asyncio.get_running_loop().create_future())
        self.queue.append(waiting)
        self.deadlines.add(waiting.told)
        if self.writing < self.settings.writers:
            self.writing += 1
            writer = asyncio.create_task(self._write())
            self.writers.add(writer)
            writer.add_done_callback(self.writers.discard)
        return await waiting.told

    async def take_all(
        self, arrivals: Sequence[Arrival], before: Callable[[Connection], Awaitable[object]] | None = None
    ) -> list[Posted]:
        """Store all of them or none, and return what became of each when that is durable. `before` is done first, in
        the same transaction.

        Raises what `take` raises, Conflicting when a name is taken by something else, and what `before` raises.
        """
        items = [mail_of(arrival) for arrival in arrivals]

        async def work(conn: Connection) -> list[Posted]:
            if before is not None:
                await before(conn)
            return await self._post_all(conn, items)

        if not items and before is None:
            return []
        posted = await self.together(work)
        self.announce(posted)
        return posted

    async def together(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """What `work` comes to in a transaction of its own, again when that failed for a passing reason.

        Raises Unstorable, Unavailable, and what `work` raises.
        """
        try:
            return await AsyncRetrying(
                stop=stop_after_attempt(RECEIVE_TRIES_MAX),
                wait=wait_random_exponential(multiplier=2 * PAUSE_SECONDS, max=0.5),
                retry=retry_if_exception(self._is_passing),
                reraise=True,
            )(self._try_together, work)
        except Exception as error:
            if inbox.is_bad_data(error):
                self.observer.saw("event.unstorable", error=error)
                raise Unstorable("the database refuses the data of an event") from error
            raise failure(error) from error

    async def _try_together(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        async with (
            asyncio.timeout(self.settings.wait_seconds),
            self.pool.connection(CONNECTION_SECONDS) as conn,
            conn.transaction(),
        ):
            return await work(conn)

    async def _post_all(self, conn: Connection, items: Sequence[MailItem]) -> list[Posted]:
        posted = await inbox.post(conn, items, traced=self.traced) if items else []
        for one in posted:
            if fault := fault_of(one.outcome):
                raise fault
            if one.outcome == "conflict":
                raise Conflicting("another event has the name of one in the batch")
        return posted

    async def drain(self) -> None:
        """Return when nothing waits any more."""
        while self.writers:
            await asyncio.wait(self.writers)

    async def _write(self) -> None:
        """Store batches as long as something waits.

        What arrives while the connection is given back finds this writer still counted, so the queue is
        looked at again after that; between the last look and the end nothing is awaited.
        """
        try:
            while self.queue:
                await self._write_all()
        finally:
            self.writing -= 1

    async def _write_all(self) -> None:
        held = Held(self.pool)
        try:
            while batch := self._next_batch():
                await self._serve(held, batch)
        finally:
            await held.release()

    async def _serve(self, held: Held, batch: Sequence[Waiting]) -> None:
        try:
            told = await self._post(held, [waiting.arrival for waiting in batch])
        except Exception as error:  # noqa: BLE001  # whoever waits must be told, whatever it is
            told = [failure(error)] * len(batch)
        for waiting, answer in zip(batch, told, strict=True):
            tell(waiting.told, answer)

    def _next_batch(self) -> list[Waiting]:
        batch: list[Waiting] = []
        while self.queue and len(batch) < self.settings.batch_max:
            waiting = self.queue.popleft()
            if not waiting.told.done():  # else its sender has been told to come again
                batch.append(waiting)
        return batch

    async def _post(self, held: Held, arrivals: Sequence[Arrival]) -> Sequence[Posted | Exception]:
        """Store a batch, again when that failed for a passing reason. Raises what remains in the way."""
        try:
            return await self._try(held, arrivals)
        except Exception as error:
            if not self._is_passing(error):
                raise
        # What tries again costs as much as a small batch, so the first try goes without it.
        await asyncio.sleep(PAUSE_SECONDS)
        return await AsyncRetrying(
            stop=stop_after_attempt(RECEIVE_TRIES_MAX - 1),
            wait=wait_random_exponential(multiplier=2 * PAUSE_SECONDS, max=0.5),
            retry=retry_if_exception(self._is_passing),
            reraise=True,
        )(self._try, held, arrivals)

    async def _try(self, held: Held, arrivals: Sequence[Arrival]) -> Sequence[Posted | Exception]:
        async with asyncio.timeout(self.settings.wait_seconds), held as conn:
            return await self._store(conn, arrivals)

    def _is_passing(self, error: BaseException) -> bool:
        if isinstance(error, PoolTimeout) or not inbox.is_transient(error):
            return False
        self.observer.saw("post.failed", error=error)
        return True

    async def _store(self, conn: Connection, arrivals: Sequence[Arrival]) -> Sequence[Posted | Exception]:
        """In which order mail and errors stand that is of their arrivals."""
        told: list[Posted | Exception | None] = [None] * len(arrivals)
        items: list[tuple[int, MailItem]] = []
        for index, arrival in enumerate(arrivals):
            try:
                items.append((index, mail_of(arrival)))
            except ContractViolation as error:
                told[index] = error
        answers = await self._split(conn, [item for _, item in items])
        for (index, _), answer in zip(items, answers, strict=True):
            told[index] = (fault_of(answer.outcome) if isinstance(answer, Posted) else None) or answer
        self.announce(told)
        return [answer for answer in told if answer is not None]

    async def _split(self, conn: Connection, items: Sequence[MailItem]) -> Sequence[Posted | Exception]:
        """Post `items`; those at fault are told so, and the others are stored."""
        if not items:
            return []
        try:
            return await inbox.post(conn, items, traced=self.traced)
        except Exception as error:
            if not inbox.is_bad_data(error):
                raise
            if len(items) == 1:
                self.observer.saw("event.unstorable", error=f"{type(error).__name__} {state_of(error)}")
                return [Unstorable("the database refuses the data of the event")]
        half = len(items) // 2
        return [*await self._split(conn, items[:half]), *await self._split(conn, items[half:])]

    def announce(self, told: Sequence[Posted | Exception | None]) -> None:
        """Tell of what is durable now, and that somebody may be awake."""
        stored = [one for one in told if isinstance(one, Posted) and one.outcome == "stored"]
        self.observer.saw("post.batch", size=len(told), stored=len(stored))
        if any(one.answer != "unmatched" for one in stored):
            self.hint("execution")


def state_of(error: BaseException) -> str:
    """The SQLSTATE, and no word of the database: those may repeat the event."""
    return str(getattr(error, "sqlstate", None) or "")


def failure(error: Exception) -> Exception:
    """What to tell everybody of a batch that failed as a whole."""
    return unavailable(error) if is_away(error) else error


def is_away(error: Exception) -> bool:
    """Whether the database did not answer, or not now: asking again later is right."""
    return isinstance(error, TimeoutError) or inbox.is_transient(error)


def unavailable(cause: Exception | None = None) -> Unavailable:
    error = Unavailable("the database", retry_after=RETRY_AFTER_SECONDS)
    error.__cause__ = cause
    return error


def tell(told: asyncio.Future[Posted], answer: Posted | Exception) -> None:
    if told.done():
        return
    if isinstance(answer, Exception):
        told.set_exception(answer)
    else:
        told.set_result(answer)
