"""An endpoint whose URL says how it behaves: `/status/503?retry_after=5`, `/hang`, `/flaky?fail=3`.

What came is remembered as `Seen`: what may be shown of it, which is nothing of a body, of headers the ids alone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Final

from contracts.signature import Verifier
from orchestrator.simulators.behaviours import then
from orchestrator.simulators.kinds import ANY, BehaviourInvalid, Named, checked, parsed
from orchestrator.simulators.reply import id_of, verdict
from orchestrator.simulators.server import Exchange, Request, Server, Unreadable, listening

MADE_MAX: Final = 1_000
"""URLs that are remembered, with what they count."""
SHOWN_MAX: Final = 128
"""Characters of each text of a request that is shown."""
PATIENCE_SECONDS: Final = 30.0
"""How long `Zoo.gets` waits."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that came. `request` is all of it; the rest is what may be shown, each text bounded.

    `signature` is what `verdict` says. `connection` is which of the server's it came over, from 1.
    """

    at: str
    method: str
    path: str
    behaviour: str
    id: str
    attempt: str
    key: str
    bytes: int
    signature: str
    connection: int
    request: Request = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        return {it.name: getattr(self, it.name) for it in fields(self) if it.repr}


@dataclass(slots=True)
class Turns:
    """Behaviours one after the other; the last one goes on for ever."""

    steps: list[Named]
    count: int = 0

    def next(self) -> Named:
        self.count += 1
        return self.steps[min(self.count, len(self.steps)) - 1]


class Zoo:
    """The endpoint at work. `seen` is what came, the newest last."""

    def __init__(
        self,
        *,
        secrets: Sequence[Verifier] = (),
        script: Mapping[str, Sequence[str]] | None = None,
        told: Callable[[Seen], None] | None = None,
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.server = Server(self._behave, *address)
        self._secrets = tuple(secrets)
        self._told = told
        self._came = asyncio.Event()
        self._made: OrderedDict[str, Named] = OrderedDict()
        self._script = {
            path: Turns([parsed(step, self._secrets) for step in steps])
            for path, steps in checked(script or {}).items()
        }
        self._seen: list[Seen] = []

    @property
    def url(self) -> str:
        return self.server.url

    def at(self, behaviour: str) -> str:
        """The URL of a behaviour, such as `flaky?fail=2`. Raises BehaviourInvalid."""
        parsed(behaviour)
        return f"{self.url}/{behaviour.removeprefix('/')}"

    @property
    def seen(self) -> list[Seen]:
        """What came and is remembered, the oldest first."""
        return list(self._seen)

    async def gets(self, *, times: int = 1, path: str = "") -> Seen:
        """The `times`-th request, at `path` if that is said, once it has come. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(found := [it for it in self._seen if path in ("", it.path)]) < times:
                self._came.clear()
                await self._came.wait()
        return found[times - 1]

    async def _behave(self, exchange: Exchange) -> None:
        while True:
            try:
                request = await exchange.read()
            except Unreadable as error:
                unread = Request("", {}, b"")
                self.server.remember(unread)
                self._saw(exchange, unread, f"unreadable: {error.status}")
                raise
            name, step = self._for(request)
            self._saw(exchange, request, name)
            await step(exchange, request)
            if request.headers.get("connection", "").lower() == "close":
                return

    def _for(self, request: Request) -> Named:
        """What the script says about its path, or else what its path says."""
        if turns := self._script.get(request.path) or self._script.get(ANY):
            return turns.next()
        text = request.target
        if text not in self._made:
            try:
                self._made[text] = parsed(text, self._secrets)
            except BehaviourInvalid as error:
                page = str(error).encode()
                return "unknown", then(404, "Content-Type: text/plain; charset=us-ascii", body=page)
            if len(self._made) > MADE_MAX:
                self._made.popitem(last=False)
        return self._made[text]

    def _saw(self, exchange: Exchange, request: Request, behaviour: str) -> None:
        header = request.headers.get
        seen = Seen(
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            method=request.line.partition(" ")[0][:SHOWN_MAX],
            path=request.path[:SHOWN_MAX],
            behaviour=behaviour,
            id=id_of(request)[:SHOWN_MAX],
            attempt=header("waypost-attempt", "")[:SHOWN_MAX],
            key=header("idempotency-key", "")[:SHOWN_MAX],
            bytes=len(request.body),
            signature=verdict(request, self._secrets),
            connection=exchange.number,
            request=request,
        )
        self._seen.append(seen)
        del self._seen[: max(len(self._seen) - len(self.server.requests), 0)]  # the server remembers no more
        self._came.set()
        if self._told is not None:
            self._told(seen)


@asynccontextmanager
async def zoo(
    *,
    secrets: Sequence[Verifier] = (),
    script: Mapping[str, Sequence[str]] | None = None,
    told: Callable[[Seen], None] | None = None,
    address: tuple[str, int] = ("127.0.0.1", 0),
) -> AsyncGenerator[Zoo]:
    """An endpoint within the block. Its URLs say how it behaves, unless `script` has their path.

    `secrets` are those whose signatures are verified; `told` hears of each request when it has come. Raises
    BehaviourInvalid, and OSError when it cannot listen.
    """
    made = Zoo(secrets=secrets, script=script, told=told, address=address)
    async with listening(made.server):
        yield made
