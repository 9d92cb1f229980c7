"""A service that answers as a test says: over HTTP, with the signatures of both sides verified."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar

import aiohttp
from aiohttp import web

from contracts.dataref import is_named
from contracts.envelope import STRUCTURED, Envelope, decode_structured
from contracts.errors import BadSignature
from contracts.limits import MESSAGE_BYTES_MAX
from contracts.messages import Command, plain
from contracts.observer import Silent
from contracts.signature import Secret, verify
from receiver import replies
from receiver.fetching import Fetcher
from receiver.replies import Poster, Reply

Json = Any
R = TypeVar("R")

PATIENCE_SECONDS: Final = 30.0
"""How long a test waits for a command."""


@dataclass(frozen=True, slots=True)
class Got:
    """A command that came: a try to deliver it, that is. The same message comes again under the same `id`."""

    id: str
    type: str
    data: Json
    key: str
    """Of the action, which is the same for every message of one ask."""
    headers: Mapping[str, str] = field(repr=False)


@dataclass(slots=True)
class Answer:
    """What is done about one try."""

    end: Literal["done", "refused", "failed"] | None = None
    value: Json = None
    code: str = ""
    detail: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    cut: bool = False
    lost: bool = False
    twice: bool = False
    told: asyncio.Event | None = None
    came: asyncio.Event = field(default_factory=asyncio.Event)


class Held:
    """A command that waits until the test says how it ends."""

    def __init__(self, answer: Answer, service: Service, type_: str) -> None:
        self._answer = answer
        self._service = service
        self._type = type_

    async def arrived(self) -> Got:
        """The command, once it is there. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._answer.came.wait()
        return next(got for got in reversed(self._service.got) if got.type == self._type)

    def replies(self, value: object = None) -> None:
        """It was done."""
        self._end("done", value=value)

    def refuses(self, code: str, detail: str = "") -> None:
        """Definitely not done."""
        self._end("refused", code=code, detail=detail)

    def fails(self, code: str = "failed", detail: str = "") -> None:
        """Given up; it may have acted."""
        self._end("failed", code=code, detail=detail)

    def _end(
        self,
        end: Literal["done", "refused", "failed"],
        *,
        value: object = None,
        code: str = "",
        detail: str = "",
    ) -> None:
        answer = self._answer
        assert answer.told is not None and not answer.told.is_set(), f"{self._type}: it is answered already"  # noqa: PT018  # one fault
        answer.end, answer.value, answer.code, answer.detail = end, plain(value), code, detail
        answer.told.set()


class Script(Generic[R]):
    """What becomes of the commands of one type. Each word is for one try, in the order in which they are said; the last
    one is for all that follow. A message that was answered gets the same reply again when it comes again, whatever the
    script has next.
    """

    def __init__(self, service: Service, type_: str) -> None:
        self._service = service
        self._type = type_

    def replies(self, value: R | None = None, *, twice: bool = False) -> Script[R]:
        """It was done; `twice` posts the reply a second time."""
        return self._add(Answer(end="done", value=plain(value), twice=twice))

    def refuses(self, code: str, detail: str = "") -> Script[R]:
        """Definitely not done."""
        return self._add(Answer(end="refused", code=code, detail=detail))

    def fails(self, code: str = "failed", detail: str = "") -> Script[R]:
        """Given up; it may have acted."""
        return self._add(Answer(end="failed", code=code, detail=detail))

    def loses_reply(self, value: R | None = None) -> Script[R]:
        """It was done, and neither the reply nor the answer arrives: the command comes again."""
        return self._add(Answer(end="done", value=plain(value), lost=True))

    def answers(self, status: int, *, retry_after: int | None = None) -> Script[R]:
        """An HTTP status and no reply, such as 500, 503, or 429 with `retry_after` seconds."""
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        return self._add(Answer(status=status, headers=headers))

    def cuts(self) -> Script[R]:
        """The connection breaks before an answer."""
        return self._add(Answer(cut=True))

    def stays_silent(self) -> Script[R]:
        """It takes the command (202), and never replies."""
        return self._add(Answer(status=202))

    def waits(self) -> Held:
        """It takes the command (202), and replies when the test says how."""
        answer = Answer(told=asyncio.Event())
        self._add(answer)
        return Held(answer, self._service, self._type)

    def _add(self, answer: Answer) -> Script[R]:
        self._service.scripts[self._type].append(answer)
        return self


class Service:
    """One endpoint, and the sender that may reply for it. `got` has every try that was authentic, `unexpected` those
    for which no script had a word: they are answered 503.
    """

    def __init__(
        self, name: str, *, secret: Secret, signs: Secret, receiver_url: str, in_answer: bool
    ) -> None:
        self.name = name
        self.url = ""
        self.got: list[Got] = []
        self.unexpected: list[str] = []
        self.scripts: dict[str, list[Answer]] = defaultdict(list)
        self._secret = secret
        self._signs = signs
        self._receiver_url = receiver_url
        self._in_answer = in_answer
        self._answered: dict[str, Reply] = {}
        self._came = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._poster: Poster | None = None

    def on(self, kind: type[Command[R]]) -> Script[R]:
        """What to do about commands of this class."""
        return Script(self, kind.type_)

    def on_type(self, type: str) -> Script[Json]:  # noqa: A002  # the attribute's name on the wire
        """What to do about commands of this type."""
        return Script(self, type)

    def did(self, kind: type[Command[R]]) -> list[Command[R]]:
        """The commands of this class that came, each message once, as they were sent."""
        first = {got.id: got for got in reversed(self.got) if got.type == kind.type_}
        found = [got for got in self.got if first.get(got.id) is got]
        return [kind.model_validate(got.data) for got in found]

    async def gets(self, kind: type[Command[Any]], *, times: int = 1) -> Got:
        """The `times`-th try of a command of this class, once it has come. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(found := [got for got in self.got if got.type == kind.type_]) < times:
                self._came.clear()
                await self._came.wait()
        return found[times - 1]

    # ---- HTTP ----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Serve within the block, at `url`."""
        app = web.Application(client_max_size=MESSAGE_BYTES_MAX)
        app.router.add_post("/waypost", self._receive)
        run = web.AppRunner(app, shutdown_timeout=1.0)
        await run.setup()
        async with aiohttp.ClientSession() as session:
            site = web.TCPSite(run, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{run.addresses[0][1]}/waypost"
            posts_to = replies.address_of(self._receiver_url, tenant="default", sender=self.name)
            self._poster = Poster(session, url=posts_to, secrets=[self._signs], observer=Silent())
            try:
                yield
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await run.cleanup()

    async def _receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            verify(
                [self._secret],
                message_id=request.headers.get("webhook-id", ""),
                timestamp=request.headers.get("webhook-timestamp", ""),
                signature=request.headers.get("webhook-signature", ""),
                body=body,
                now=int(time.time()),
            )
        except BadSignature as error:
            return web.Response(status=401, text=str(error))
        command = decode_structured(body)
        if is_named(command):
            async with Fetcher([replies.origin_in(self._receiver_url)]) as fetcher:
                command = await fetcher.whole(command)
        key = str(command.extensions.get("idempotencykey", ""))
        self.got.append(Got(command.id, command.type, command.data, key, dict(request.headers)))
        self._came.set()
        known = self._answered.get(command.id)
        if known is not None:
            return await self._tell(known, twice=False)
        return await self._act(request, command)

    async def _act(self, request: web.Request, command: Envelope) -> web.Response:
        answer = self._next(command.type)
        if answer is None:
            self.unexpected.append(command.type)
            return web.Response(status=503)
        answer.came.set()
        if answer.told is not None:
            self._later(command, answer)
            return web.Response(status=202)
        if answer.end is None and answer.status:
            return web.Response(status=answer.status, headers=answer.headers)
        if answer.end is not None:
            self._answered[command.id] = self._made(command, answer)
        if answer.cut or answer.lost:
            assert request.transport is not None, "it was open a moment ago"
            request.transport.abort()
            return web.Response(status=500)
        return await self._tell(self._answered[command.id], twice=answer.twice)

    def _next(self, type_: str) -> Answer | None:
        script = self.scripts[type_]
        return (script.pop(0) if len(script) > 1 else script[0]) if script else None

    def _made(self, command: Envelope, answer: Answer) -> Reply:
        source = f"/{self.name}"
        if answer.end == "done":
            return replies.done(command, source=source, value=answer.value)
        make = replies.refused if answer.end == "refused" else replies.failed
        return make(command, source=source, code=answer.code, message=answer.detail)

    def _later(self, command: Envelope, answer: Answer) -> None:
        async def reply() -> None:
            assert answer.told is not None, "it waits to be told"
            await answer.told.wait()
            self._answered[command.id] = self._made(command, answer)
            await self._post(self._answered[command.id])

        task = asyncio.create_task(reply())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, reply: Reply, *, twice: bool) -> web.Response:
        if self._in_answer:
            return web.Response(body=reply.body, content_type=STRUCTURED)
        for _ in range(2 if twice else 1):
            if not await self._post(reply):
                return web.Response(status=503)
        return web.Response(status=202)

    async def _post(self, reply: Reply) -> bool:
        assert self._poster is not None, "it serves"
        return await self._poster.post(reply.body)
