"""The way back: results of tries gather while one settlement is in flight, and go together in the next."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg_pool import AsyncConnectionPool

from contracts.observer import Observer
from relay import health, outbox, replies
from relay.delivery import Retry
from relay.health import Change, Note
from relay.outbox import EndpointKey, Result
from relay.patience import Patience
from relay.replies import Reply
from relay.settings import RelaySettings

# To a later try it says, by the draft of Idempotency-Key, that the key stands for other bytes than before. Ours are the
# same, so somebody between us changes them, or the service remembers another.
UNPROCESSABLE: Final = 422
QUIET: Final = frozenset({"due", "delivered"})  # states of a message that nobody is told of


class Settlement:
    """Takes results and writes them, in order of arrival, until they are written or their claims are over.

    While the database is away results are kept: `relay.Relay` claims nothing then, so they are no more than
    what was in flight. `hint` is called with "execution" when an execution may have got mail, and `guarded` when
    claims must look at circuits from now on, `due` when there may be a message to claim.
    """

    def __init__(
        self,
        pool: AsyncConnectionPool[Any],
        *,
        settings: RelaySettings,
        observer: Observer,
        hint: Callable[[str], None],
        guarded: Callable[[], None],
        due: Callable[[], None],
        traced: bool = False,
    ) -> None:
        self._pool = pool
        self._guarded = guarded
        self._due = due
        self._traced = traced
        self._settings = settings
        self._observer = observer
        self._hint = hint
        self._waiting: list[Result] = []
        self._some = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, result: Result) -> None:
        self._waiting.append(result)
        self._idle.clear()
        self._some.set()

    async def settled(self) -> None:
        """Returns when every result that was added has been written or forgotten."""
        await self._idle.wait()

    async def run(self) -> None:
        """Settle for ever; cancel it when `settled` has returned."""
        patience = Patience(self._settings.reconnect_max)
        while True:
            await self._some.wait()
            try:
                async with self._pool.connection() as conn:
                    await self._settle_over(conn, patience)
            except psycopg.Error as error:
                self._observer.saw("database.failed", part="settlement", error=type(error).__name__)
                await patience.pause()

    async def _settle_over(self, conn: outbox.Connection, patience: Patience) -> None:
        """Settle for ever, as long as `conn` works."""
        while True:
            await self._some.wait()
            batch = self._waiting[: self._settings.settle_batch]
            await self.settle(conn, batch)
            patience.reset()
            self._done(batch)

    async def run_once(self, *, now: datetime | None = None) -> None:
        """Settle what waits; for tests."""
        async with self._pool.connection() as conn:
            while batch := self._waiting[: self._settings.settle_batch]:
                await self.settle(conn, batch, now=now)
                self._done(batch)

    def _done(self, batch: Sequence[Result]) -> None:
        del self._waiting[: len(batch)]
        if not self._waiting:
            self._some.clear()
            self._idle.set()

    async def settle(
        self, conn: outbox.Connection, batch: Sequence[Result], *, now: datetime | None = None
    ) -> None:
        """Write one batch: first the replies, then what matters else, then what is only worth reading.

        A reply counts whether the claim still lives or not. When this ends between a reply and its
        settlement, the message is marked as replied, and its claim expires into `delivered`.

        Raises psycopg.Error when the database is away or has no time; then nothing is known to be
        written, and doing it again is harmless: a result that was written no longer matches its claim.
        """
        batch = await self._post(conn, batch, now=now)
        states = await self._write(conn, batch, now=now)
        self._tell(batch, states)
        for commands in {result.message.command for result in batch if result.message.ordered}:
            if await outbox.advance(conn, limit=self._settings.sweep_batch, commands=commands, now=now):
                self._due()
        try:
            await self._keep(conn, batch, now=now)
        except psycopg.Error as error:
            self._observer.saw("deliveries.lost", count=len(batch), error=type(error).__name__)

    async def _post(
        self, conn: outbox.Connection, batch: Sequence[Result], *, now: datetime | None
    ) -> Sequence[Result]:
        """Store the replies among `batch`; the batch, with what is wrong with one as its error."""
        told = [result.reply for result in batch if result.reply is not None]
        if not told:
            return batch
        outcomes: list[str] = []
        for part in replies.in_parts(told):
            outcomes += await self._store(conn, part, now=now)
        told_of = iter(outcomes)
        return [with_fault(one, None if one.reply is None else next(told_of)) for one in batch]

    async def _store(
        self, conn: outbox.Connection, told: Sequence[Reply], *, now: datetime | None
    ) -> list[str]:
        """What became of each reply. One that the database refuses is `unstorable`, and the others are stored."""
        try:
            outcomes = await replies.post(conn, told, now=now)
        except psycopg.Error as error:
            if not outbox.is_bad_data(error):
                raise
            if len(told) == 1:
                return ["unstorable"]
            half = len(told) // 2
            return [
                *await self._store(conn, told[:half], now=now),
                *await self._store(conn, told[half:], now=now),
            ]
        self._observer.saw("replies.posted", count=len(told), stored=outcomes.count("stored"))
        if "stored" in outcomes:
            self._hint("execution")
        return outcomes

    async def _write(
        self, conn: outbox.Connection, batch: Sequence[Result], *, now: datetime | None
    ) -> dict[tuple[int, Any], str]:
        """Settle the batch; one that fails on its data is split, and a result that cannot be written is left
        to its claim, which expires.
        """
        try:
            return await outbox.settle(conn, batch, now=now)
        except psycopg.Error as error:
            if not outbox.is_bad_data(error):
                raise
            if len(batch) == 1:
                message = batch[0].message
                self._observer.saw(
                    "settlement.failed",
                    tenant=message.tenant_id,
                    message=message.message_id,
                    error=type(error).__name__,
                )
                return {}
            half = len(batch) // 2
            first = await self._write(conn, batch[:half], now=now)
            return first | await self._write(conn, batch[half:], now=now)

    def _tell(self, batch: Sequence[Result], states: dict[tuple[int, Any], str]) -> None:
        for result in batch:
            message, answer = result.message, result.answer
            if isinstance(result.verdict, Retry) and result.verdict.clamped:
                self._observer.saw("retry.clamped", tenant=message.tenant_id, endpoint=message.endpoint)
            if answer.status == UNPROCESSABLE and message.attempt - message.spared > 1:
                self._observer.saw(
                    "retry.unprocessable",
                    tenant=message.tenant_id,
                    message=message.message_id,
                    endpoint=message.endpoint,
                )
            self._observer.saw(
                "message.tried",
                tenant=message.tenant_id,
                message=message.message_id,
                attempt=message.attempt,
                endpoint=message.endpoint,
                outcome=result.verdict.word,
                state=states.get((message.tenant_id, message.message_id), "claim lost"),
                status=answer.status,
                error=answer.error_code,
                seconds=answer.duration.total_seconds(),
            )
        if any(state not in QUIET for state in states.values()):
            self._hint("execution")

    async def _keep(self, conn: outbox.Connection, batch: Sequence[Result], *, now: datetime | None) -> None:
        notes = health.notes_on(batch)
        if notes:
            changes = await health.write(conn, notes, now=now)
            self._tell_of(notes, changes)
        await outbox.record(conn, batch, traced=self._traced)

    def _tell_of(self, notes: dict[EndpointKey, Note], changes: Sequence[Change]) -> None:
        if paused := sorted(key for key, note in notes.items() if note.pause is not None):
            self._observer.saw("endpoints.paused", endpoints=paused)
        for change in changes:
            where = {"tenant": change.tenant_id, "endpoint": change.name}
            if change.disabled:
                self._observer.saw("endpoint.disabled", reason=change.disabled, **where)
            if change.opened:
                self._guarded()
                self._observer.saw("circuit.opened", **where)
            if change.closed:
                self._observer.saw("circuit.closed", **where)


def with_fault(result: Result, outcome: str | None) -> Result:
    """`result`, with what kept its reply from being stored."""
    if outcome in {None, "stored", "duplicate"}:
        return result
    return replace(result, answer=replace(result.answer, error_code=f"reply-{outcome}"))
