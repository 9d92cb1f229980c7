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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web
from psycopg_pool import AsyncConnectionPool

from contracts.dataref import Tickets
from contracts.envelope import element_of, elements_in
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
from receiver.acceptance import Status, accepted, accepted_all, set_apart
from receiver.admission import Admission, Piece
from receiver.answers import consent, is_allowed
from receiver.authenticity import Proof
from receiver.data import PREFIX, SHOWN, DataDesk, Fetch
from receiver.inbox import Posted
from receiver.intake import Intake, is_away
from receiver.listener import listen
from receiver.mapping import Unmapped
from receiver.quarantine import Kept, headers_for, told
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
    path_of,
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
from receiver.streams import Became, Streams

PATIENCE: Final = 60
"""Seconds after which a sender that is switched off may ask again."""
RECALLS_MAX: Final = 4
"""Requests with an old signature that one receiver looks up at once."""


def accepted_batch(became: Sequence[Became], *, told_each: bool, status: Status) -> web.Response:
    """The answer to a batch of which that became."""
    events = [one for one in became if one.reason in (None, "ahead")]
    each = [one.reason or ("stored" if one.new else "duplicate") for one in became] if told_each else None
    new = any(one.new for one in became)
    apart = len(became) - len(events)
    return accepted_all([not one.new for one in events], apart, new=new, told=each, status=status)


class Receiver:
    """`POST /events/{tenant}/{sender}`: signed CloudEvents in, durable mail out. `GET /data/{ticket}`: data that
    messages name; `fetch` gets them from the payload store, where there is one.

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
        fetch: Fetch | None = None,
    ) -> None:
        self.settings = settings or ReceiverSettings()
        self.observer = observer or Silent()
        self.clock = clock
        self.senders = Senders(
            pool, vault=vault, settings=self.settings, observer=self.observer, clock=time.monotonic
        )
        self.intake = Intake(pool, settings=self.settings, observer=self.observer, hint=hint, traced=traced)
        self.streams = Streams(
            pool,
            vault=vault,
            observer=self.observer,
            hint=hint,
            clock=self.now,
            traced=traced,
        )
        self.admission = Admission(
            pool, intake=self.intake, streams=self.streams, observer=self.observer, clock=self.now
        )
        self.desk = DataDesk(
            pool, tickets=Tickets(vault), fetch=fetch, settings=self.settings, observer=self.observer
        )
        self.rates = Rates(time.monotonic)
        self.at_work = self.recalling = 0
        self.idle = asyncio.Event()
        self.draining = False
        self.listening = False

    def now(self) -> float:
        """Seconds since 1970."""
        return self.clock()

    def app(self) -> web.Application:
        """The receiver as an application, for other servers; `serve` also bounds what precedes a request."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle, expect_handler=expect_nothing)
        app.on_shutdown.append(self._drain_app)
        app.cleanup_ctx.append(self._stream_app)
        return app

    async def _stream_app(self, _: web.Application) -> AsyncIterator[None]:
        async with self._streaming():
            yield

    @asynccontextmanager
    async def _streaming(self) -> AsyncGenerator[None]:
        """Within it, events that wait for their turn get it."""
        work = asyncio.create_task(self.streams.run())
        try:
            yield
        finally:
            work.cancel()
            await asyncio.wait([work])

    async def serve(self, host: str, port: int, stop: asyncio.Event) -> None:
        """Listen until `stop` is set; then accept nothing more, finish what is at work, and return.

        The moment `receiver.started` has the port, also when `port` was 0. Raises OSError when it cannot
        listen.
        """
        async with (
            listen(self.handle, host=host, port=port, settings=self.settings, observer=self.observer) as at,
            self._streaming(),
        ):
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
        path = path_of(request)
        if path.startswith(PREFIX):
            return await self.desk.answer(request, path)
        name = route(request, path)
        sender = self.senders.fresh(name) or await self.senders.get(name)
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
        policy = sender.policy
        if policy.origin_required and not is_allowed(
            policy.origins, request.headers.get("webhook-request-origin", "")
        ):
            raise Refusal(403, "origin")
        if policy.challenge is not None and (said := answer_to_challenge(request, body, sender)):
            self.observer.saw("sender.challenged", sender=sender.name)
            return said
        name = signed_name(sender, proof, body)
        if is_batch(request.headers):
            return await self._take_batch(sender, name, body, asked_at)
        try:
            envelope, kept = event_in(request.headers, body, sender)
        except Unmapped as error:
            headers = headers_for(sender, request.headers)
            why = told(error.problems)
            became = await self.admission.keep(Kept(sender, headers, body, name, None, "mapping", why))
        else:
            piece = Piece(sender, name, envelope, kept, request.headers, body, asked_at)
            became = await self.admission.admit(piece)
        if became.reason is None:
            assert became.posted is not None, "what is not kept apart is mail"
            return accepted(became.posted, status=policy.answers.ack)
        return self._told(sender, became, mapped=is_mapped(request.headers, sender))

    def _told(self, sender: Sender, became: Became, *, mapped: bool) -> web.StreamResponse:
        """What a sender is told of what became of its event that is no mail."""
        answers = sender.policy.answers
        match became.reason:
            case "ahead":  # as mail: a person has nothing to do about it
                outcome = "stored" if became.new else "duplicate"
                return accepted(Posted(outcome, None, "event"), status=answers.ack)
            case "conflict" if (answers.conflict or (202 if mapped else 409)) == 409:
                raise Refusal(409, "apart-conflict")  # a provider that is told so says it again and again
            case "contract" if answers.contract == 422:
                raise Refusal(
                    422, "apart-contract", detail="the data breaks the contract of the event's type"
                )
            case _:
                return set_apart(new=became.new, status=answers.ack)

    async def _take_batch(
        self, sender: Sender, name: str | None, body: bytes, asked_at: float
    ) -> web.StreamResponse:
        """Take all events of a batch, or none; or, if its sender wants that, each as if it had come alone."""
        policy = sender.policy
        try:
            elements = elements_in(body, events_max=RECEIVE_EVENTS_MAX)
        except LimitExceeded as error:
            raise Refusal(413, "batch-size", detail=str(error)) from None
        if not elements:
            self.observer.saw("batch.empty", sender=sender.name)
        if policy.batch == "partial":
            became = await self.admission.admit_each(sender, name, elements, asked_at=asked_at)
            return accepted_batch(became, told_each=True, status=policy.answers.ack)
        events = [element_of(element, place) for place, element in enumerate(elements)]
        pieces = [
            Piece.element(sender, name, event, place, asked_at=asked_at) for place, event in enumerate(events)
        ]
        became = await self.admission.admit_all(pieces)
        return accepted_batch(became, told_each=False, status=policy.answers.ack)

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
        where = SHOWN if request.path.startswith(PREFIX) else shown(request.path)
        self.observer.saw("request.refused", status=refusal.status, reason=refusal.reason, path=where, **told)
        response = problem(refusal.status, refusal.headers, detail=refusal.detail, faults=faults_of(error))
        if not request.content.is_eof():
            response.force_close()
        return response
