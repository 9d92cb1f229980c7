"""The listener on which a process says how it is: `/livez`, `/readyz`, `/metrics`.

It has no authentication, so it listens on loopback unless it is told otherwise. Answers are given again for a
moment, so that whoever asks often costs the process nothing.

    /livez     200 while the event loop turns: no database, or its outage would restart every process
    /readyz    200 when all checks say so, else 503; one line for each says what is in the way
    /metrics   what is counted, in the text format of Prometheus
"""

from __future__ import annotations

import errno
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import Final

from aiohttp import web
from multidict import CIMultiDict
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from contracts.observer import Observer, Silent
from orchestrator.settings import Address
from receiver.listener import CannotListen, Listening, listen
from receiver.requests import problem
from receiver.settings import ReceiverSettings

FRESH_SECONDS: Final = 1.0
"""An answer is given again for so long."""

CONNECTIONS_MAX: Final = 64
"""Open at once; more are closed."""

Check = Callable[[], Awaitable[str | None]]
"""What is in the way of being ready; None when nothing is."""

TEXT: Final = "text/plain; charset=utf-8"


class Health:
    """What is answered. `checks` are asked in their order; `page` gives the metrics."""

    def __init__(self, checks: Mapping[str, Check], page: Callable[[], bytes]) -> None:
        self._checks = checks
        self._page = page
        self._ready = (-FRESH_SECONDS, HTTPStatus.OK, "")
        self._metrics = (-FRESH_SECONDS, b"")

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method not in {"GET", "HEAD"}:
            return problem(405, {"Allow": "GET, HEAD"})
        match request.rel_url.raw_path:
            case "/livez":
                return answer(HTTPStatus.OK, "ok\n")
            case "/readyz":
                status, text = await self.ready()
                return answer(status, text)
            case "/metrics":
                return answer(HTTPStatus.OK, self.metrics(), CONTENT_TYPE_PLAIN_0_0_4)
            case _:
                return problem(404, {})

    async def ready(self) -> tuple[HTTPStatus, str]:
        """Whether this process may be given work, and a line for each check."""
        at, status, text = self._ready
        if time.monotonic() - at < FRESH_SECONDS:
            return status, text
        found = {name: await check() for name, check in self._checks.items()}
        status = HTTPStatus.SERVICE_UNAVAILABLE if any(found.values()) else HTTPStatus.OK
        text = "".join(f"{name}: {why or 'ok'}\n" for name, why in found.items())
        self._ready = (time.monotonic(), status, text)
        return status, text

    def metrics(self) -> bytes:
        at, page = self._metrics
        if time.monotonic() - at >= FRESH_SECONDS:
            page = self._page()
            self._metrics = (time.monotonic(), page)
        return page


def answer(status: HTTPStatus, body: str | bytes, content_type: str = TEXT) -> web.Response:
    fields = CIMultiDict({"Content-Type": content_type, "Cache-Control": "no-store", "Server": "waypost"})
    return web.Response(status=status, body=body, headers=fields)


@asynccontextmanager
async def serving(
    health: Health, address: Address | None, *, fixed: bool, observer: Observer
) -> AsyncGenerator[None]:
    """Answer at `address` within the block; the moment `health.started` says where. None: nowhere.

    Who asked for this address (`fixed`) gets CannotListen when it cannot be had; else any free port will do.
    """
    if address is None:
        yield
        return
    async with AsyncExitStack() as stack:
        listening = await bound(stack, health, address, fixed=fixed)
        observer.saw("health.started", host=address.host, port=listening.port)
        yield


async def bound(stack: AsyncExitStack, health: Health, address: Address, *, fixed: bool) -> Listening:
    """The listener at `address`, or at another port when that one is taken and may be another."""
    settings, host = ReceiverSettings(connections_max=CONNECTIONS_MAX), address.host
    for port in (address.port, 0):
        try:
            return await stack.enter_async_context(
                # Silent: what comes here is no event, and is not counted as one.
                listen(health.handle, host=host, port=port, settings=settings, observer=Silent())
            )
        except OSError as error:
            if fixed or port == 0 or error.errno != errno.EADDRINUSE:
                raise CannotListen("WAYPOST_HEALTH_ADDR", *address, error, otherwise="or say `off`") from None
    raise AssertionError("the last port is any, or raises")
