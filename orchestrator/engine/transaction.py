"""Functions that write the application's own tables: what they write and the fact that they ended are one commit.

The function runs first and takes its locks; the execution's row is locked last, by the commit of the fact, which
checks owner, fence and position as every commit does. Who locked that row first would keep mail for the execution
waiting as long as the function runs, and would lock in the other order than an application that writes its tables and
then signals the execution.

The fact is the owner's to write, since nobody else knows the position. So a function that has returned makes an offer,
with its transaction open, and its execution answers with the turn to commit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

import psycopg
from pydantic import ValidationError

from contracts import strict_json
from contracts.errors import NotEncodable, TooLarge
from contracts.messages import Refused
from contracts.observer import Observer
from orchestrator.core.ask import Ask
from orchestrator.core.errors import code_of, in_words, is_fault, storable
from orchestrator.core.terms import result_adapter
from orchestrator.engine.attempt import Refusal, Result, Settled, failure, refusal, stored, where
from orchestrator.engine.lease import Lease
from orchestrator.engine.pulse import CURRENT, Attempt, Pulse
from orchestrator.objects.large import Large
from orchestrator.store.commits import Turn, commit, committed
from orchestrator.store.database import Connection, Pool, is_bad_data
from orchestrator.store.transactions import TRANSACTIONS_MAX, Commits, enter, guarded, leave

Json = Any

TRANSACTION_SECONDS_MAX: Final = 5.0
"""For one run of a function, its waits for locks included: its row locks are in the way of others."""

TRANSACTION_TRIES_MAX: Final = 10
"""Runs of a function that others came in between of: serialization failures, deadlocks, lost connections."""

BACKOFF_SECONDS_MAX: Final = 1.0

CONTENTION: Final = frozenset({"40001", "40P01", "55P03"})
"""Serialization failure, deadlock, a lock that others kept for too long (a worker that was frozen, say): the whole
transaction is to be run again."""

ABORTED: Final = "25P02"
"""The transaction failed before, and its function went on all the same."""


class Offer:
    """What the function at `path` returned, while its transaction is open: `commit` it with a turn, or `reject` it."""

    def __init__(self, path: str, value: Json) -> None:
        loop = asyncio.get_running_loop()
        self.path = path
        self.value = value
        self.turn: asyncio.Future[Turn] = loop.create_future()
        self.answer: asyncio.Future[bool | None] = loop.create_future()

    async def commit(self, turn: Turn) -> bool | None:
        """Whether `turn` is committed; False when its row did not match, None when the function is not done: it runs
        again, or was refused.
        """
        self.turn.set_result(turn)
        return await self.answer

    def reject(self, why: NotEncodable | TooLarge) -> None:
        """What it returned cannot be stored: it is rolled back."""
        self.turn.set_exception(why)

    def close(self, answer: bool | None) -> None:  # noqa: FBT001  # the answer
        if not self.answer.done():
            self.answer.set_result(answer)
        if self.turn.done() and not self.turn.cancelled():
            self.turn.exception()  # it was seen


class Over(Exception):
    """The function is over, and rolled back: `result` is what came of it."""

    def __init__(self, result: Result) -> None:
        self.result = result


class Again(Exception):
    """Rolled back because of others: the function is run again. What was never begun is not `counted`."""

    def __init__(self, why: BaseException, *, counted: bool = True) -> None:
        super().__init__(in_words(why))
        self.counted = counted


class Transactions:
    """Runs the functions of one worker, TRANSACTIONS_MAX at once, as `role` where there is one."""

    def __init__(
        self,
        pool: Pool,
        journal: Pool,
        *,
        lease: Lease,
        observer: Observer,
        role: str | None = None,
        traced: bool = False,
    ) -> None:
        self._pool = pool
        self._journal = journal
        self._lease = lease
        self._observer = observer
        self._role = role
        self._traced = traced
        self._room = asyncio.Semaphore(TRANSACTIONS_MAX)

    def begin(self, ask: Ask, key: str, offer: Callable[[Offer], None]) -> asyncio.Task[Result]:
        """Run the function of `ask`; what it returned is told by `offer`, and its result is what came of it else."""
        return asyncio.create_task(self._run(ask, key, offer))

    async def _run(self, ask: Ask, key: str, offer: Callable[[Offer], None]) -> Result:
        """Raises nothing: whatever the function raises is a result."""
        CURRENT.set(Attempt(key, ask.attempt, None))
        tries, pauses, why = 0, 0, ""
        try:
            while tries < TRANSACTION_TRIES_MAX:
                try:
                    return await self._once(ask, offer)
                except Again as again:
                    tries, pauses = tries + again.counted, pauses + 1
                    why = str(again)
                self._observer.saw("transaction runs again", path=ask.path, tries=tries, error=why)
                await asyncio.sleep(backoff(pauses))
        except asyncio.CancelledError:
            return Refusal(
                {"code": "withdrawn", "detail": "nobody waits for it any more: it was rolled back"}
            )
        except BaseException as error:  # noqa: BLE001  # of ours: it is tried again as a bug of the function is
            return failure(error, Pulse())
        detail = f"rolled back {tries} times, last because of {why}"
        return Refusal({"code": "contention", "detail": storable(detail)})

    async def _once(self, ask: Ask, offer: Callable[[Offer], None]) -> Result:
        """One run, and its commit. Raises Again."""
        async with self._room:
            attempt = Run(self, ask, offer)
            try:
                return await attempt.run()
            except Over as over:
                return over.result
            finally:
                if attempt.offered is not None:
                    attempt.offered.close(None)

    async def connection(self) -> Any:
        """The way to a connection; the first one opens the pool."""
        await self._pool.open()
        return self._pool.connection()

    async def store(self, conn: Connection, turn: Turn) -> bool:
        """Write `turn` in the transaction of `conn`; False when its row did not match."""
        matched = await commit(conn, [turn], me=self._lease.me, traced=self._traced)
        return turn.execution in matched

    async def look_up(self, turn: Turn) -> bool:
        """Whether `turn` took effect, after the answer to its COMMIT was lost. It asks until somebody can say."""
        failures = 0
        while True:
            try:
                async with self._journal.connection() as conn:
                    found = turn.execution in await committed(conn, [turn])
            except (psycopg.Error, OSError):
                failures += 1
                await asyncio.sleep(backoff(failures))
            else:
                self._observer.saw("commit looked up", turns=1, committed=int(found))
                return found

    @property
    def role(self) -> str | None:
        return self._role


class Run:
    """One run of a function in one transaction. `offered` is what it returned, `turn` what is to be committed."""

    def __init__(self, transactions: Transactions, ask: Ask, offer: Callable[[Offer], None]) -> None:
        self._all = transactions
        self._ask = ask
        self._offer = offer
        self.offered: Offer | None = None
        self.turn: Turn | None = None

    async def run(self) -> Result:
        """Raises Again, and Over when it was rolled back for good."""
        matched = False
        try:
            async with await self._all.connection() as conn:
                async with conn.transaction() as transaction:
                    await enter(conn, role=self._all.role)
                    matched = await self._transact(conn)
                    if not matched:
                        raise psycopg.Rollback
                if matched and transaction.status is not transaction.Status.COMMITTED:
                    raise psycopg.OperationalError("the connection was lost before the COMMIT")
                self._close(matched)
        except (psycopg.Error, OSError) as error:
            if not await self._took_effect(error):
                raise Again(error, counted=self.turn is not None) from error
            self._close(True)
        return Settled()

    async def _transact(self, conn: Connection) -> bool:
        value = await self._call(conn)
        try:
            await leave(conn)
        except psycopg.Error as error:
            raise self._failed(conn, error) from error
        self.offered = Offer(self._ask.path, value)
        self._offer(self.offered)
        try:
            self.turn = await self.offered.turn
        except (NotEncodable, TooLarge) as error:
            raise Over(Refusal({"code": error.code, "detail": storable(str(error))})) from None
        return await self._all.store(conn, self.turn)

    async def _took_effect(self, error: BaseException) -> bool:
        """Whether the turn is committed although `error` was raised. Raises Over when it cannot be."""
        if self.turn is None or (isinstance(error, psycopg.Error) and error.sqlstate in CONTENTION):
            return False
        if is_bad_data(error):
            raise Over(Refusal({"code": "not-storable", "detail": storable(in_words(error))})) from error
        return await self._all.look_up(self.turn)

    def _close(self, answer: bool) -> None:  # noqa: FBT001  # the answer
        if self.offered is not None:
            self.offered.close(answer)

    async def _call(self, conn: Connection) -> Json:
        """What the function returned, as a journal can keep it. Raises Over and Again."""
        assert self._ask.work is not None, "the program that asks for a transaction has its function"
        fn, args = self._ask.work
        limit = asyncio.timeout(TRANSACTION_SECONDS_MAX)
        try:
            with guarded(conn):
                async with limit:
                    value = await fn(conn, *args)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # whatever a function raises is its outcome
            if limit.expired():
                raise Over(too_long()) from error
            raise self._failed(conn, error) from error
        if limit.expired():
            raise Over(too_long())
        if conn.info.transaction_status is psycopg.pq.TransactionStatus.IDLE:
            raise Over(Refusal({"code": Commits.code, "detail": str(Commits("commit or rollback"))}))
        return kept(fn, value)

    def _failed(self, conn: Connection, error: BaseException) -> Over | Again:
        """What follows from what the function raised, or from what it had put off until the commit."""
        if isinstance(error, Refused):
            return Over(Refusal(refusal(error)))
        if conn.closed or any(state_of(one) in CONTENTION for one in causes(error)):
            return Again(error)
        return Over(failure(error, Pulse()) if is_fault(error) else Refusal(told(error)))


def kept(fn: Callable[..., Any], value: Any) -> Json:
    """`value` as the journal will give it back. Raises Over when it would not, or not as the function promised."""
    found, adapter = stored(fn, value), result_adapter(fn)
    try:
        strict_json.encode(found, what="result", bytes_max=Large.bytes_max())
        if adapter is not None:
            adapter.validate_python(found)
    except (NotEncodable, TooLarge) as error:
        raise Over(Refusal({"code": error.code, "detail": storable(str(error))})) from None
    except ValidationError as error:
        detail = f"its result does not fit its annotation: {error.error_count()} errors"
        raise Over(Refusal({"code": "reply-invalid", "detail": detail})) from None
    return found


def told(error: BaseException) -> dict[str, Json]:
    """An error as data; one of the database has its SQLSTATE as code: `sql-23505`."""
    state = state_of(error)
    detail = in_words(error)
    if state == ABORTED:
        detail = f"the function went on after an error of the database: {detail}"
    code = code_of(error) if state is None else f"sql-{state}"
    return {"code": code, "detail": storable(detail), "at": where(error)}


def too_long() -> Refusal:
    return Refusal({"code": "timeout", "detail": f"it took more than {TRANSACTION_SECONDS_MAX:g} s"})


def causes(error: BaseException) -> list[BaseException]:
    """`error`, and what it was raised from or during."""
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__ or at.__context__
    return found


def state_of(error: BaseException) -> str | None:
    return error.sqlstate if isinstance(error, psycopg.Error) else None


def backoff(failures: int) -> float:
    """Seconds before the next run, after so many that failed."""
    return min(BACKOFF_SECONDS_MAX, 0.01 * 2 ** min(failures, 7)) * random.uniform(0.5, 1)  # noqa: S311  # jitter
