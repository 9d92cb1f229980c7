"""The listener: what comes from the network is refused as early and as cheaply as it can be.

    connection and header limits → method, path → sender → headers → body, bounded in size and time →
    signature over the raw bytes → timestamp → strict decoding → inbox, in one transaction with whoever it
    wakes → 202

Nothing is parsed before it is authentic, and nothing is acknowledged before it is durable. A refusal changes
nothing and repeats nothing of what was sent; its reason goes to the observer, for operators.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web
from psycopg_pool import AsyncConnectionPool

from contracts.envelope import STRUCTURED, Envelope, decode_batch, encode_structured
from contracts.errors import (
    BadSignature,
    LimitExceeded,
    MalformedEvent,
    MalformedJson,
    NotAllowed,
    WaypostError,
    shown,
)
from contracts.limits import RECEIVE_EVENTS_MAX
from contracts.observer import Observer, Silent
from contracts.vault import Vault
from receiver.acceptance import accepted, accepted_all, set_apart
from receiver.answers import consent
from receiver.arrivals import Arrival
from receiver.authenticity import Proof
from receiver.inbox import Posted
from receiver.intake import Intake, is_away
from receiver.listener import listen
from receiver.mapping import Unmapped
from receiver.quarantine import Kept, Reason, fault_of, headers_for, keep, told
from receiver.rates import Rates, TooMany
from receiver.recall import recalled
from receiver.requests import (
    Refusal,
    answer_to_challenge,
    check_headers,
    event_in,
    expect_nothing,
    faults_of,
    is_batch,
    is_mapped,
    problem,
    read,
    refusal_of,
    route,
    signed_name,
    unavailable,
    unpacked,
)
from receiver.senders import CONNECTION_SECONDS, NOBODY, Sender, Senders
from receiver.settings import ReceiverSettings

PATIENCE: Final = 60
"""Seconds after which a sender that is switched off may ask again."""
RECALLS_MAX: Final = 4
"""Requests with an old signature that one receiver looks up at once."""


class Receiver:
    """`POST /events/{tenant}/{sender}`: signed CloudEvents in, durable mail out.

    `pool` is in autocommit. `hint` is called with "execution" when mail may have made one due. `clock` gives
    seconds since 1970. With `traced`, what is stored is marked as to be exported.
    """

    def __init__(
        self,
        pool: AsyncConnectionPool[Any],
        *,
        vault: Vault,
        settings: ReceiverSettings | None = None,
        observer: Observer | None = None,
        hint: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        traced: bool = False,
    ) -> None:
        self.settings = settings or ReceiverSettings()
        self.observer = observer or Silent()
        self.clock = clock
        self.senders = Senders(
            pool, vault=vault, settings=self.settings, observer=self.observer, clock=time.monotonic
        )
        self.intake = Intake(pool, settings=self.settings, observer=self.observer, hint=hint, traced=traced)
        self.rates = Rates(time.monotonic)
        self.at_work = self.recalling = 0
        self.idle = asyncio.Event()
        self.draining = False
        self.listening = False

    def app(self) -> web.Application:
        """The receiver as an application, for other servers; `serve` also bounds what precedes a request."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle, expect_handler=expect_nothing)
        app.on_shutdown.append(self._drain_app)
        return app

    async def serve(self, host: str, port: int, stop: asyncio.Event) -> None:
        """Listen until `stop` is set; then accept nothing more, finish what is at work, and return.

        The moment `receiver.started` has the port, also when `port` was 0. Raises OSError when it cannot
        listen.
        """
        async with listen(
            self.handle, host=host, port=port, settings=self.settings, observer=self.observer
        ) as at:
            self.listening = True
            self.observer.saw("receiver.started", host=host, port=at.port)
            await stop.wait()
            self.observer.saw("receiver.draining", at_work=self.at_work)
            at.stop_accepting()
            await self.drain()
        self.observer.saw("receiver.stopped")

    async def drain(self) -> None:
        """Refuse new requests, and return when those at work are answered, or `drain_seconds` are over."""
        self.draining = True
        try:
            async with asyncio.timeout(self.settings.drain_seconds):
                while self.at_work:
                    self.idle.clear()
                    await self.idle.wait()
                await self.intake.drain()
        except TimeoutError:
            self.observer.saw("receiver.gave_up", at_work=self.at_work)

    async def _drain_app(self, _: web.Application) -> None:
        await self.drain()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to a request, whatever happens. Never raises but when it is cancelled."""
        if self.draining or self.at_work >= self.settings.concurrency_max:
            return self._refuse(request, unavailable("draining" if self.draining else "concurrency"))
        self.at_work += 1
        try:
            return await self._answer(request)
        except Refusal as refusal:
            return self._refuse(request, refusal)
        except TooMany as many:
            return self._refuse(request, Refusal(429, "rate", {"Retry-After": str(many.seconds)}))
        except WaypostError as error:
            return self._refuse(request, refusal_of(error), error)
        except Exception as error:  # noqa: BLE001  # an answer is owed; the observer hears the error
            refusal = unavailable("database") if is_away(error) else Refusal(500, "bug")
            return self._refuse(request, refusal, error)
        finally:
            self.at_work -= 1
            if not self.at_work:
                self.idle.set()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        asked_at = time.monotonic()
        name = route(request)
        sender = await self.senders.get(name)
        if request.method == "OPTIONS":
            return self._consent(request, sender)
        body, proof, stale = await self._authentic(request, sender)
        assert sender is not None, "a request of nobody is not authentic"
        if stale is not None:
            return await self._recall(request, sender, proof, body, stale)
        with self.rates.taking(sender):
            return await self._take(request, sender, proof, body, asked_at)

    async def _recall(
        self, request: web.BaseRequest, sender: Sender, proof: Proof, body: bytes, stale: BadSignature
    ) -> web.StreamResponse:
        """Acknowledge again what was signed too long ago and is durable since: a late retry under its first signature.

        Raises `stale` for all else. It does not count for the sender's rate, since whoever has seen a request can post
        it again for ever; instead a receiver looks up few at once.
        """
        if self.recalling >= RECALLS_MAX:
            raise TooMany(1)
        self.recalling += 1
        try:
            async with self.senders.pool.connection(CONNECTION_SECONDS) as conn:
                told = await recalled(conn, request.headers, sender, signed_name(sender, proof, body), body)
        except (MalformedEvent, MalformedJson, NotAllowed, LimitExceeded, Refusal):
            raise stale from None
        finally:
            self.recalling -= 1
        if told is None:
            raise stale
        self.observer.saw("event.duplicate", tenant=sender.tenant_id, sender=sender.name)
        return told

    async def _take(
        self, request: web.BaseRequest, sender: Sender, proof: Proof, body: bytes, asked_at: float
    ) -> web.StreamResponse:
        """Take what is authentic."""
        if sender.policy.challenge is not None and (said := answer_to_challenge(request, body, sender)):
            self.observer.saw("sender.challenged", sender=sender.name)
            return said
        name = signed_name(sender, proof, body)
        if is_batch(request.headers):
            return await self._take_batch(sender, name, body, asked_at)

        def apart(event: Envelope | None, reason: Reason, detail: str) -> Kept:
            return Kept(sender, headers_for(sender, request.headers), body, name, event, reason, detail)

        try:
            envelope, kept = event_in(request.headers, body, sender)
        except Unmapped as error:
            return await self._keep(apart(None, "mapping", told(error.problems)))
        if fault := fault_of(sender, envelope, now=self.clock()):
            return await self._keep(apart(envelope, *fault))
        posted = await self._store(Arrival.of(sender, name, envelope, kept, asked_at=asked_at))
        if posted.outcome != "conflict":
            return accepted(posted)
        detail = f"id: expected what inbox row {posted.inbox_id} says, found something else under its name"
        answer = await self._keep(apart(envelope, "conflict", detail))
        if is_mapped(request.headers, sender):
            return answer  # a provider that is told 409 says it again and again
        raise Refusal(409, "conflict")

    async def _keep(self, *kept: Kept) -> web.Response:
        """Keep apart what is no mail, durably, and acknowledge it."""
        async with self.senders.pool.connection(CONNECTION_SECONDS) as conn, conn.transaction():
            new = [await keep(conn, one) for one in kept]
        for one in kept:
            self.observer.saw("event.quarantined", sender=one.sender.name, reason=one.reason)
        return set_apart(new=any(new))

    async def _take_batch(
        self, sender: Sender, name: str | None, body: bytes, asked_at: float
    ) -> web.StreamResponse:
        """Take all events of a batch, or none. What was signed as one name names each by its place."""
        try:
            envelopes = decode_batch(body, events_max=RECEIVE_EVENTS_MAX)
        except LimitExceeded as error:
            raise Refusal(413, "batch-size", detail=str(error)) from None
        apart: list[Kept] = []
        arrivals: list[Arrival] = []
        for place, it in enumerate(envelopes):
            part = name and f"{name}.{place}"
            if fault := fault_of(sender, it, now=self.clock()):
                apart.append(
                    Kept(sender, {"content-type": STRUCTURED}, encode_structured(it), part, it, *fault)
                )
            else:
                arrivals.append(Arrival.of(sender, part, it, encode_structured(it), asked_at=asked_at))
        posted = await self.intake.take_all(arrivals)
        if apart:
            await self._keep(*apart)
        for one in posted:
            if one.outcome == "stored":
                self.observer.saw("event.stored", sender=sender.name, answer=one.answer)
            else:
                self.observer.saw(f"event.{one.outcome}", tenant=sender.tenant_id, sender=sender.name)
        return accepted_all(posted, len(apart))

    async def _store(self, arrival: Arrival) -> Posted:
        posted = await self.intake.take(arrival)
        sender = arrival.sender
        if posted.outcome == "stored":
            self.observer.saw("event.stored", sender=sender.name, answer=posted.answer)
        else:
            self.observer.saw(f"event.{posted.outcome}", tenant=sender.tenant_id, sender=sender.name)
        return posted

    async def _authentic(
        self, request: web.BaseRequest, sender: Sender | None
    ) -> tuple[bytes, Proof, BadSignature | None]:
        """The body, decoded, and the proof that `sender` made it; and that it was too long ago, if it was.

        A sender that is not there costs the same work.
        """
        stands = NOBODY if sender is None else sender
        if stands.unreadable and not stands.secrets:
            raise unavailable("sender-unreadable")
        proof = check_headers(request, stands)
        body = await read(request, self.settings)
        refused: BadSignature | None = None
        try:
            stands.verifier.verify(
                proof, body, now=int(self.clock()), tolerance=self.settings.tolerance_seconds
            )
        except BadSignature as error:
            refused = error
        if sender is None:
            raise Refusal(404, "unknown-sender")
        if not sender.secrets or (refused is not None and refused.reason != "stale"):
            raise refused or BadSignature("mismatch")
        if sender.state != "enabled":
            raise Refusal(410, "retired") if sender.state == "retired" else unavailable("disabled", PATIENCE)
        return unpacked(request, body, self.settings), proof, refused

    def _consent(self, request: web.BaseRequest, sender: Sender | None) -> web.Response:
        """The answer to whoever asks whether it may post."""
        origin = request.headers.get("webhook-request-origin", "")
        rate = request.headers.get("webhook-request-rate")
        given = None if sender is None else consent(sender.policy, origin, rate)
        if given is None:
            raise Refusal(405, "no-consent", {"Allow": "POST"})
        self.observer.saw("sender.consented", sender="" if sender is None else sender.name)
        return given

    def _refuse(
        self, request: web.BaseRequest, refusal: Refusal, error: Exception | None = None
    ) -> web.Response:
        # What callers did wrong is told in a line; what we did wrong, with where it was.
        told = {} if error is None else {"error": str(error) if isinstance(error, WaypostError) else error}
        where = shown(request.path)
        self.observer.saw("request.refused", status=refusal.status, reason=refusal.reason, path=where, **told)
        response = problem(refusal.status, refusal.headers, detail=refusal.detail, faults=faults_of(error))
        if not request.content.is_eof():
            response.force_close()
        return response
