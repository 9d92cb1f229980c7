"""The relay: takes messages out of the outbox to the endpoints that they name, until each has arrived or is
refused.

    claim (short transaction) ──▶ send (no transaction) ──▶ settle (short transaction)
      └ commits the attempt          └ many at a time          └ whatever has finished, together

A relay may die anywhere. Before the claim's commit nothing was sent; after it the claim expires, the message
counts as one that may have arrived, and is sent again under the same identity. Any number of relays work side
by side.
"""

import asyncio
import contextlib
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
from aiohttp.abc import AbstractResolver
from psycopg_pool import AsyncConnectionPool

from contracts.codec import PayloadKeyMissing, PayloadUnreadable
from contracts.errors import ContractViolation
from contracts.observer import Observer, Silent
from contracts.vault import Vault
from relay import health, outbox, replies
from relay.delivery import Answer, Retry, Spared, Try, judge, unsent
from relay.endpoints import Endpoint, Endpoints, Unusable
from relay.outbox import EndpointKey, Message, Result
from relay.patience import Patience, first_of, jittered
from relay.references import KNOWN, Manager
from relay.replies import Reply
from relay.settings import RelaySettings
from relay.settlement import Settlement
from relay.wire import Wire

RELEASE_SECONDS: Final = 5.0  # to write down which tries were given up


def utc_now() -> datetime:
    return datetime.now(UTC)


def this_try(message: Message, target: Endpoint | Unusable) -> Try:
    return Try(
        message_id=message.message_id,
        attempt=message.attempt - message.spared,
        endpoint=message.endpoint,
        command=message.command,
        age=message.age,
        schedule=target.schedule if isinstance(target, Endpoint) else None,
    )


def given_up(message: Message, started_at: datetime, now: datetime) -> Result:
    """A try that a relay did not wait for: its message may have arrived. It does not count, and comes again at once,
    unless it is sent at most once.
    """
    at_once = timedelta(0)
    answer = Answer(error_code="relay-stopped", reached=True, duration=now - started_at)
    again = Retry(at_once, reached=True) if message.at_most_once else Spared(at_once, reached=True)
    return Result(message, answer, again, started_at)


def nobody(_topic: str) -> None:
    """The hint of a relay that stands alone."""


class Relay:
    """Run one with `run`; `run_once` does the same things one after the other, for tests.

    `pool` gives connections in autocommit; three are used at a time. `hint` is called with "execution" when
    mail may have come, and `hinted` is set by whoever knows that a message is due. `clock` gives the time
    that is signed; due times are the database's. `managers` fetch secrets that are kept elsewhere, by the kind of
    reference. `tls` and `resolver` are the wire's. With `traced`, each try
    is marked as to be exported.
    """

    def __init__(
        self,
        pool: AsyncConnectionPool[Any],
        *,
        vault: Vault,
        settings: RelaySettings | None = None,
        observer: Observer | None = None,
        hint: Callable[[str], None] = nobody,
        hinted: asyncio.Event | None = None,
        clock: Callable[[], datetime] = utc_now,
        tls: ssl.SSLContext | None = None,
        resolver: AbstractResolver | None = None,
        managers: Mapping[str, Manager] | None = None,
        traced: bool = False,
    ) -> None:
        self._pool = pool
        self._settings = settings or RelaySettings()
        self._observer = observer or Silent()
        self._hint = hint
        self._hinted = hinted or asyncio.Event()
        self._clock = clock
        self._wire = Wire(self._settings, tls=tls, resolver=resolver)
        self._endpoints = Endpoints(
            vault=vault,
            allow=self._settings.allow,
            keep=self._settings.endpoint_cache,
            clock=time.monotonic,
            observer=self._observer,
            managers={**KNOWN, **(managers or {})},
        )
        self._settlement = Settlement(
            pool,
            settings=self._settings,
            observer=self._observer,
            hint=self._hint,
            guarded=self._guard,
            due=self._hinted.set,
            traced=traced,
        )
        self._tries: set[asyncio.Task[None]] = set()
        self._releasing = False
        self._busy: Counter[EndpointKey] = Counter()
        self._room_at: dict[EndpointKey, int] = {}
        self._guarded = False
        self._freed = asyncio.Event()
        self._doubtful: list[UUID] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then finish what is in flight.

        Cancelled instead, it drops everything where it stands, as if the process had been killed.
        """
        self._observer.saw("relay.started")
        async with self._wire, asyncio.TaskGroup() as group:
            helpers = [group.create_task(self._settlement.run()), group.create_task(self._sweep_until(stop))]
            try:
                await self._claim_until(stop)
                await self._drain()
            finally:
                for task in (*helpers, *self._tries):
                    task.cancel()
                await asyncio.gather(*self._tries, return_exceptions=True)
        self._observer.saw("relay.stopped")

    async def run_once(self, *, now: datetime | None = None) -> int:
        """Sweep, claim one batch, send it and settle it; how many were sent. `now` is the database's time."""
        await self._sweep(now=now)
        async with self._wire, self._pool.connection() as conn:
            claimed = await self._claim(conn, self._settings.batch, now=now)
            await asyncio.gather(*self._tries)
        await self._settlement.run_once(now=now)
        return claimed

    # Claim

    async def _claim_until(self, stop: asyncio.Event) -> None:
        patience = Patience(self._settings.reconnect_max)
        while not stop.is_set():
            try:
                async with self._pool.connection() as conn:
                    await self._claim_over(conn, stop, patience)
            except psycopg.Error as error:
                self._observer.saw("database.failed", part="claim", error=type(error).__name__)
                await patience.pause(stop)

    async def _claim_over(self, conn: outbox.Connection, stop: asyncio.Event, patience: Patience) -> None:
        """Claim until `stop` is set, as long as `conn` works."""
        while not stop.is_set():
            self._freed.clear()
            limit = self._room()
            if limit == 0:
                await first_of(self._freed, stop, timeout=self._settings.poll.total_seconds())
                continue
            self._hinted.clear()
            claimed = await self._claim(conn, limit)
            patience.reset()
            if claimed < limit:
                await self._rest(stop)

    def _room(self) -> int:
        """How many messages may be claimed now. None while results pile up: the database is in trouble."""
        if len(self._settlement) > self._settings.concurrency:
            return 0
        return min(self._settings.batch, self._settings.concurrency - len(self._tries))

    async def _rest(self, stop: asyncio.Event) -> None:
        """Wait for a hint, for the poll, or for room at an endpoint that had none."""
        full = any(tries >= self._room_at[key] for key, tries in self._busy.items())
        wakers = (self._hinted, stop, self._freed) if full else (self._hinted, stop)
        await first_of(*wakers, timeout=jittered(self._settings.poll.total_seconds()))

    async def _claim(self, conn: outbox.Connection, limit: int, *, now: datetime | None = None) -> int:
        """Claim, and begin a try for each message once the claim is committed; how many."""
        token = uuid4()
        try:
            messages = await outbox.claim(
                conn,
                token=token,
                limit=limit,
                room=self._settings.endpoint_concurrency,
                busy=self._busy,
                timeout_max=self._settings.timeout_max,
                margin=self._settings.margin,
                guarded=self._guarded,
                now=now,
            )
            keys = {message.endpoint_key for message in messages}
            targets = await self._endpoints.look_up(conn, keys, now=now)
        except psycopg.Error:
            self._doubtful.append(token)  # the claim may have come through, and nothing of it will be sent
            raise
        if messages:
            self._observer.saw("messages.claimed", count=len(messages))
        for message in messages:
            self._begin(message, targets[message.endpoint_key])
        return len(messages)

    # Send

    def _begin(self, message: Message, target: Endpoint | Unusable) -> None:
        self._busy[message.endpoint_key] += 1
        self._room_at[message.endpoint_key] = message.concurrency
        task = asyncio.create_task(self._try(message, target))
        self._tries.add(task)
        task.add_done_callback(self._tries.discard)

    async def _try(self, message: Message, target: Endpoint | Unusable) -> None:
        started_at = self._clock()
        try:
            answer, reply = await self._send(message, target, started_at)
            verdict = judge(answer, this_try(message, target))
            self._settlement.add(Result(message, answer, verdict, started_at, reply))
        except asyncio.CancelledError:
            if self._releasing:
                self._settlement.add(given_up(message, started_at, self._clock()))
            raise
        finally:
            self._busy[message.endpoint_key] -= 1
            if not self._busy[message.endpoint_key]:
                del self._busy[message.endpoint_key], self._room_at[message.endpoint_key]
            self._freed.set()

    async def _send(
        self, message: Message, target: Endpoint | Unusable, now: datetime
    ) -> tuple[Answer, Reply | None]:
        if isinstance(target, Unusable):
            return unsent(target.error_code), None
        try:
            message = replace(message, body=outbox.body_to_send(message))
        except (PayloadKeyMissing, PayloadUnreadable) as error:
            self._observer.saw("payload.unreadable", message=message.message_id, error=str(error))
            return unsent(error.code), None
        try:
            return self._read(message, await self._wire.send(message, target, now=now))
        except Exception as error:  # noqa: BLE001  # a mistake of ours in one message must not stop the others
            self._observer.saw("send.failed", message=message.message_id, error=type(error).__name__)
            return Answer(error_code="internal-error", reached=True), None

    def _read(self, message: Message, answer: Answer) -> tuple[Answer, Reply | None]:
        """The reply in `answer`. One that breaks the contract is none: the same would come again, so the
        command is delivered, and the fault is said.
        """
        if answer.reply is None:
            return answer, None
        try:
            return answer, replies.read(
                answer.reply,
                tenant_id=message.tenant_id,
                message_id=message.message_id,
                command=message.body,
                replies_from=message.replies_from,
            )
        except ContractViolation as error:
            self._observer.saw(
                "reply.unfit",
                tenant=message.tenant_id,
                message=message.message_id,
                endpoint=message.endpoint,
                error=str(error),
            )
            return replace(answer, error_code=f"reply-{error.code}"), None

    # Sweep

    async def _sweep_until(self, stop: asyncio.Event) -> None:
        patience = Patience(self._settings.reconnect_max)
        while not stop.is_set():
            try:
                more = await self._sweep()
            except psycopg.Error as error:
                self._observer.saw("database.failed", part="sweep", error=type(error).__name__)
                await patience.pause(stop)
                continue
            patience.reset()
            if not more:
                await first_of(stop, timeout=jittered(self._settings.sweep.total_seconds()))

    async def _sweep(self, *, now: datetime | None = None) -> bool:
        """Expire claims and messages that are over; whether there may be more of them."""
        limit = self._settings.sweep_batch
        async with self._pool.connection() as conn:
            await self._give_back(conn)
            claims = await outbox.expire_claims(conn, limit=limit, now=now)
            messages = await outbox.expire_due(conn, limit=limit, now=now)
            lanes = [
                await outbox.advance(conn, limit=limit, commands=commands, now=now)
                for commands in (True, False)
            ]
            self._guarded = await health.guarded(conn)
        if any(lanes):
            self._hinted.set()
        if claims:
            self._observer.saw("claims.expired", count=claims)
            self._hinted.set()
            self._hint("execution")
        if messages:
            self._observer.saw("messages.expired", count=messages)
        return limit in (claims, messages, *lanes)

    def _guard(self) -> None:
        """A circuit has opened: do not wait for the next sweep to see it."""
        self._guarded = True

    async def _give_back(self, conn: outbox.Connection) -> None:
        """Settle what a claim took whose commit had no answer: it was never sent, so it is due at once."""
        while self._doubtful:
            messages = await outbox.claimed_under(conn, token=self._doubtful[0])
            del self._doubtful[0]
            for message in messages:
                again = Spared(timedelta(0))
                self._settlement.add(Result(message, unsent("claim-unknown"), again, started_at=None))
            if messages:
                self._observer.saw("claims.returned", count=len(messages))

    # Stop

    async def _drain(self) -> None:
        """Let the tries in flight end, and settle them. What does not end in time is given up, so that another relay
        sends it at once. When that cannot be written either, it is left to its claim.
        """
        self._observer.saw("relay.draining", in_flight=len(self._tries))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain.total_seconds()):
                if self._tries:
                    await asyncio.wait(self._tries)
                await self._settlement.settled()
                return
        self._releasing = True
        late = list(self._tries)
        for task in late:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                await asyncio.gather(*late, return_exceptions=True)
                self._observer.saw("tries.released", count=len(late))
                await self._settlement.settled()
