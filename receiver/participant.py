"""A service that acts on commands: what every service would else write itself, between HTTP and its function.

    payments = Participant(
        name="payments",
        receiver_url="http://127.0.0.1:8081",
        secret=Secret.parse(...),                     # signs its replies: `waypost sender add` shows it once
        accepts={"/waypost": Secret.parse(...)},      # of the commands: `waypost endpoint add` shows it once
    )

    @payments.does(Charge)
    def charge(command: Charge) -> Charged:
        if command.card in STOLEN:
            raise Refused("declined", "the card was reported stolen")
        return Charged(charge=bank.charge(command.order, command.amount))

    payments.run(port=8091)

What it answers, and why:

    202   the receiver has the reply, durably. Only then nobody needs the command again.
    200   this is the reply (with `reply_in_answer`). Until it has arrived, the command comes again.
    503   not yet: a run goes on, the reply was not taken, the handler said Unavailable, or the data that the
          command names cannot be got now.
    500   the handler raised something else; it may have acted. The command comes again.
    400 401 403 404 405 413 415 501   never begun: no event, not authentic, not its sender's, no handler.

Everything else is said in a signed reply and not by a status, because a status speaks of one attempt and a
reply of the command. So `refused` is the reply to a command whose data does not fit its contract (`invalid`),
that comes after its undo has begun (`undone`), or after its `expirytime` (`expired`: nobody waits, so it is
not begun, and the orchestrator learns that there is nothing to undo), or names data that are others than it says
(`data-mismatch`). Where an earlier run may have acted, these are said as `failed`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import aiohttp
from aiohttp import web

from contracts.dataref import DataAway
from contracts.envelope import STRUCTURED, decode_structured, media_type
from contracts.errors import BadSignature, ContractViolation, Unavailable
from contracts.limits import MESSAGE_BYTES_MAX, RECEIVE_BODY_SECONDS
from contracts.log import JsonLines
from contracts.messages import Command
from contracts.observer import Observer
from contracts.signature import Secret, verify
from contracts.spans import has_collector
from receiver import loop, replies
from receiver.fetching import Fetcher
from receiver.handlers import Delivery, Failed, Handler, Registration
from receiver.listener import CannotListen, listen
from receiver.memory import Begin, Busy, Errand, Known, Memory, NothingToUndo, SqliteMemory, Undone
from receiver.remembering import Remembering
from receiver.replies import Poster, Reply
from receiver.run import Run
from receiver.settings import ReceiverSettings

if TYPE_CHECKING:
    from receiver.otlp import Spool

__all__ = ["Delivery", "Failed", "Participant"]

R = TypeVar("R")
T = TypeVar("T")

RUNS_MAX: Final = 64  # commands at work in one process; more are told to come again
DRAIN_SECONDS: Final = 10.0  # for runs to end after SIGTERM
EDGE: Final = ReceiverSettings()  # what is bounded of whoever connects


class NotAdmitted(Exception):
    """A request that is answered with a status and begins nothing."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Participant:
    """One service. `accepts` maps the source of commands (`WAYPOST_SOURCE`) to its secret, or to several
    while they change. `sender` is the name under which it may post (default: `name`); `secret` signs replies.
    With `reply_in_answer` it posts none and needs neither, nor a `receiver_url`: for what is done within the
    endpoint's timeout. Raises TypeError when it could not reply at all.

    Without `memory` it remembers in the file `<name>.sqlite` of the working directory.

    Data that a command names are got from the origins in `data_from` (default: that of `receiver_url`), whose names
    lead to public addresses or to those in `data_networks`. Raises ValueError for what is no origin, or no network.
    """

    def __init__(
        self,
        *,
        name: str,
        accepts: Mapping[str, Secret | Sequence[Secret]],
        receiver_url: str | None = None,
        secret: Secret | None = None,
        reply_in_answer: bool = False,
        sender: str | None = None,
        tenant: str = "default",
        memory: Memory | None = None,
        observer: Observer | None = None,
        data_from: Sequence[str] | None = None,
        data_networks: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._source = f"/{name}"
        self._posts_to: tuple[str, Secret] | None = None
        if not reply_in_answer:
            if receiver_url is None or secret is None:
                raise TypeError(f"{name}: expected receiver_url= and secret=, or reply_in_answer=True")
            url = replies.address_of(receiver_url, tenant=tenant, sender=sender or name)
            self._posts_to = url, secret
        self._accepts = {
            source: [of] if isinstance(of, Secret) else list(of) for source, of in accepts.items()
        }
        self._handlers: dict[str, Handler] = {}
        self._memory = memory or SqliteMemory(Path(f"{name}.sqlite"))
        loop.open_standard_files()
        self._observer = observer or JsonLines(sys.stderr.write, part=name, now=lambda: datetime.now(UTC))
        self._runs: set[asyncio.Task[web.Response]] = set()
        self._threads = ThreadPoolExecutor(RUNS_MAX, thread_name_prefix=f"{name}-run")
        self._remembering = Remembering(self._memory, name=f"{name}-memory")
        self._poster: Poster | None = None
        self._spool: Spool | None = None
        if data_from is None:
            data_from = [] if receiver_url is None else [replies.origin_in(receiver_url)]
        self._fetcher = Fetcher(data_from, data_networks)

    def does(self, kind: type[Command[R]], /) -> Registration[R]:
        """Register the handler of a command: `handler(command)` or `handler(command, delivery)`.

        One that is not `async` runs in a thread. Raises TypeError for a class without `type=`, or when
        the type has a handler already.
        """
        if not kind.type_:
            raise TypeError(f"{kind.__name__}: expected a command with endpoint= and type=, found neither")
        if kind.type_ in self._handlers:
            raise TypeError(f"{kind.__name__}: expected one handler of {kind.type_!r}, found a second")

        def add(function: Callable[..., Any]) -> None:
            self._handlers[kind.type_] = Handler.of(kind, function)

        return Registration(add)

    def app(self, path: str = "/waypost") -> web.Application:
        """What serves commands at `path`. Its clean-up waits for runs, then closes the memory."""
        app = web.Application(client_max_size=MESSAGE_BYTES_MAX)
        app.router.add_post(path, self._receive)
        app.cleanup_ctx.append(self._life)
        return app

    def run(self, *, host: str = "127.0.0.1", port: int = 0, path: str = "/waypost") -> None:
        """Serve until SIGTERM or SIGINT, then let runs end. Stdout says the address; port 0 takes any.

        Ends the process (SystemExit, with what to do) when it cannot listen there.
        """
        try:
            loop.run(self._serve(host, port, path))
        except CannotListen as error:
            raise SystemExit(f"{self.name}: {error}") from None

    async def _serve(self, host: str, port: int, path: str) -> None:
        stop = asyncio.Event()
        for sign in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sign, stop.set)
        async with self.serving(host=host, port=port, path=path) as found:
            print(f"{self.name} listens on http://{host}:{found}{path}", flush=True)  # noqa: T201  # data
            await stop.wait()

    @asynccontextmanager
    async def serving(
        self, *, host: str = "127.0.0.1", port: int = 0, path: str = "/waypost"
    ) -> AsyncGenerator[int]:
        """Serve within the block, on the port that it is told; then let runs end. Raises CannotListen.

        What comes before a request is bounded as at the receiver: connections, heads, silence, nonsense.
        """
        async with AsyncExitStack() as stack:
            runner = web.AppRunner(self.app(path))
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            server = runner.server
            assert server is not None, "it was set up"
            listening = listen(
                server.request_handler,
                host=host,
                port=port,
                settings=EDGE,
                observer=self._observer,
                factory=server.request_factory,
                close_seconds=DRAIN_SECONDS,
            )
            try:
                found = await stack.enter_async_context(listening)
            except OSError as error:
                raise CannotListen("run(host=, port=)", host, port, error) from None
            yield found.port

    async def _life(self, _: web.Application) -> AsyncGenerator[None]:
        async with (
            self._tracing(),
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
            self._fetcher,
        ):
            if self._posts_to is not None:
                url, secret = self._posts_to
                self._poster = Poster(session, url=url, secrets=[secret], observer=self._observer)
            yield
            over = await self._drained()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._remembering.close()
        if over:
            self._memory.close()  # else runs go on in threads, and count as such until the process ends

    @asynccontextmanager
    async def _tracing(self) -> AsyncGenerator[None]:
        """Export what runs do, where the environment names a collector."""
        if not has_collector(os.environ):
            yield
            return
        from receiver.otlp import Otlp, Spool  # noqa: PLC0415  # without a collector nobody needs its libraries

        self._spool = Spool(Otlp(self.name), self._observer)
        async with self._spool.running():
            yield

    async def _drained(self) -> bool:
        if not self._runs:
            return True
        _, late = await asyncio.wait(self._runs, timeout=DRAIN_SECONDS)
        for run in late:
            run.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return not late

    async def _receive(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(RECEIVE_BODY_SECONDS):
                body = await request.read()
            handler, delivery, errand = self._admit(request, body)
        except TimeoutError:
            return self._answer(408, "slow")
        except NotAdmitted as no:
            return self._answer(no.status, no.reason)
        # The run belongs to the service and not to the connection: a caller that hangs up cancels nothing.
        run = asyncio.create_task(self._do(handler, delivery, errand))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        return await asyncio.shield(run)

    def _admit(self, request: web.Request, body: bytes) -> tuple[Handler, Delivery, Errand]:
        """What to do and for whom. Nothing is read before it is authenticated. Raises NotAdmitted."""
        signers = self._signers(request, body)
        if not signers:
            raise NotAdmitted(401, "not authentic")
        if media_type(request.headers.get("content-type", "")) != STRUCTURED:
            raise NotAdmitted(415, "expected " + STRUCTURED)
        try:
            delivery = Delivery.of(decode_structured(body), request.headers)
        except ContractViolation as error:
            raise NotAdmitted(400, error.code) from error
        sender = next((it for it in signers if speaks_for(it, delivery.event.source)), None)
        if sender is None:
            raise NotAdmitted(403, "not the source of this sender")
        handler = self._handlers.get(delivery.event.type)
        if handler is None:
            raise NotAdmitted(501, "no handler of this type")
        if len(self._runs) >= RUNS_MAX:
            raise NotAdmitted(503, "busy")
        return handler, delivery, Errand(sender, delivery.key, delivery.message, delivery.undoes)

    def _signers(self, request: web.Request, body: bytes) -> list[str]:
        """The senders whose secrets signed these bytes. All are tried, so the time tells nothing."""
        now = int(time.time())
        found: list[str] = []
        for sender, secrets in self._accepts.items():
            try:
                verify(
                    secrets,
                    message_id=only(request, "webhook-id"),
                    timestamp=only(request, "webhook-timestamp"),
                    signature=only(request, "webhook-signature"),
                    body=body,
                    now=now,
                )
            except BadSignature:
                continue
            found.append(sender)
        return found

    def _answer(self, status: int, reason: str, **more: object) -> web.Response:
        self._observer.saw("command.answered", status=status, reason=reason, **more)
        headers = {"retry-after": "1"} if status == 503 else None
        return web.Response(status=status, text=reason if status >= 300 else None, headers=headers)

    async def _do(self, handler: Handler, delivery: Delivery, errand: Errand) -> web.Response:
        run = None if self._spool is None else Run.of(delivery)
        if run is None or self._spool is None:
            return await self._answer_to(handler, delivery, errand)
        with run.current():
            answer = await self._answer_to(handler, run.delivery, errand)
        self._spool.add(run.span(answer.status))
        return answer

    async def _answer_to(self, handler: Handler, delivery: Delivery, errand: Errand) -> web.Response:
        about: dict[str, Any] = {
            "message": delivery.message,
            "type": delivery.event.type,
            "attempt": delivery.attempt,
        }
        try:
            body = await self._reply(handler, delivery, errand)
        except Unavailable as error:
            if isinstance(error, DataAway):
                about["error"] = str(error)
            reason = error.fault if isinstance(error, DataAway) else "not available"
            return self._answer(503, reason, **about)
        except Exception as error:  # noqa: BLE001  # a handler may raise anything; the command comes again
            return self._answer(500, "raised", error=handler.told(error, delivery), **about)
        if body is None:
            return self._answer(503, "a run goes on", **about)
        if self._posts_to is None:
            self._observer.saw("command.answered", status=200, reason="replied", **about)
            return web.Response(body=body, headers={"content-type": STRUCTURED})
        assert self._poster is not None, "requests come while the app lives"
        if not await self._poster.post(body):
            return self._answer(503, "the receiver did not take the reply", **about)
        return self._answer(202, "taken", **about)

    async def _reply(self, handler: Handler, delivery: Delivery, errand: Errand) -> bytes | None:
        """The bytes to post, already kept; None while another run goes on."""
        try:
            verdict = await self._remember(self._memory.begin, errand)
        except Exception as error:
            raise Unavailable("the memory") from error
        match verdict:
            case Busy():
                return None
            case Known(reply, same=True):
                return reply
            case Known(reply):
                return await self._keep(errand, replies.repeated(reply, delivery.event))
            case NothingToUndo():
                return await self._keep(errand, replies.done(delivery.event, source=self._source, value=None))
            case Undone():
                no = replies.refused(delivery.event, source=self._source, code="undone")
                return await self._keep(errand, no)
            case Begin(again):
                return await self._run(handler, replace(delivery, again=again), errand)

    async def _run(self, handler: Handler, delivery: Delivery, errand: Errand) -> bytes:
        try:
            reply = await handler.act(
                delivery, source=self._source, threads=self._threads, fetch=self._fetcher.whole
            )
        except Exception as error:
            acted = not isinstance(error, Unavailable)
            await self._remember(partial(self._memory.release, acted=acted), errand)
            raise
        # A run that is cancelled at the end of the process is not released: its thread may still be acting.
        return await self._keep(errand, reply)

    async def _keep(self, errand: Errand, reply: Reply) -> bytes:
        return await self._remember(partial(self._memory.settle, end=reply.end, reply=reply.body), errand)

    async def _remember(self, ask: Callable[[Errand], T], errand: Errand) -> T:
        return await self._remembering.ask(partial(ask, errand))


def only(request: web.BaseRequest, name: str) -> str:
    """The header `name`; nothing when it comes twice, for others may read the other one."""
    found = request.headers.getall(name, ())
    return found[0] if len(found) == 1 else ""


def speaks_for(sender: str, source: str) -> bool:
    """Whether `source` is `sender` or lies under it: `/waypost` speaks for `/waypost/executions/…`."""
    return source == sender or source.startswith(sender.rstrip("/") + "/")
