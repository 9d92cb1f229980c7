"""aiohttp's server with limits on what comes before a request: connections, heads, silence, nonsense.

aiohttp by itself keeps a half-sent head for an hour, answers what is no HTTP by repeating it, and logs a
traceback for each. Framing (both lengths, obs-fold, bare line feeds, NUL) its parser refuses by itself: 400,
and the connection is closed. A head that is too large gets 431 (RFC 6585), a request line 414.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from contracts.errors import WaypostError
from contracts.limits import (
    RECEIVE_FIELD_BYTES_MAX,
    RECEIVE_HEADERS_MAX,
    RECEIVE_LINE_BYTES_MAX,
)
from contracts.observer import Observer
from receiver.acceptance import Accepted, is_plain
from receiver.requests import problem
from receiver.settings import ReceiverSettings


class CannotListen(WaypostError):
    """An address cannot be listened on. `setting` is what says which one it is, `otherwise` what else may be done."""

    code = "cannot-listen"

    def __init__(self, setting: str, host: str, port: int, error: OSError, *, otherwise: str = "") -> None:
        unnamed = (f"which cannot be used ({error.strerror or error})", "name another one")
        fault, way = OBSTACLES.get(error.errno or 0, unnamed)
        if isinstance(error, socket.gaierror):
            fault, way = "whose host has no address", OF_THIS_MACHINE
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        ways = f"{way}, {otherwise}" if otherwise else way
        super().__init__(f"{setting}: expected an address to listen on, found {at}, {fault}; {ways}")
        self.setting = setting
        self.host = host
        self.port = port


OF_THIS_MACHINE: Final = "name one of this machine, such as 127.0.0.1, or 0.0.0.0 for all it has"
OBSTACLES: Final = {
    errno.EADDRINUSE: (
        "where something listens already",
        "stop that, or name another port, or 0 for any free one",
    ),
    errno.EADDRNOTAVAIL: ("which is not of this machine", OF_THIS_MACHINE),
    errno.EACCES: ("which this user may not use", "name a port above 1023"),
}
"""What may be in the way, and what to do about it."""

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Factory = Callable[..., web.BaseRequest]
"""Makes the request that is handed on; an application has one of its own."""
TOO_MANY: Final = "Too many headers"
"""How the server says that a head has more fields than it may; it has no error of its own for that."""
BACKLOG: Final = 1024
LINGER_SECONDS: Final = 1.0
"""To read on after a refusal, so that the sender sees the answer instead of a reset."""
CLOSE_SECONDS: Final = 1.0
"""For answers that are being written when the listener ends."""


class Listener(web.Server):
    """A server whose connections are `Connection`s, and no more than `connections_max` of them."""

    def __init__(
        self,
        handle: Handle,
        *,
        settings: ReceiverSettings,
        observer: Observer,
        factory: Factory | None = None,
    ) -> None:
        super().__init__(handle, request_factory=factory)
        self.settings = settings
        self.observer = observer

    def __call__(self) -> web.RequestHandler:
        if len(self.connections) >= self.settings.connections_max:
            self.observer.saw("connection.refused", connections=self.settings.connections_max)
            return Refused(self)
        return Connection(self)


class Connection(web.RequestHandler):
    """One connection of a stranger."""

    __slots__ = ("observer",)

    def __init__(self, listener: Listener) -> None:
        super().__init__(
            listener,
            loop=asyncio.get_running_loop(),
            access_log=None,  # pyright: ignore[reportArgumentType]  # None is no log
            auto_decompress=False,
            keepalive_timeout=listener.settings.header_seconds,
            lingering_time=LINGER_SECONDS,
            max_line_size=RECEIVE_LINE_BYTES_MAX,
            max_field_size=RECEIVE_FIELD_BYTES_MAX,
            max_headers=RECEIVE_HEADERS_MAX,
        )
        self.observer = listener.observer

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """As the server does; what is accepted on a connection that is kept goes out as it was made beforehand."""
        if isinstance(resp, Accepted) and is_plain(request) and self.transport is not None:
            self.transport.write(resp.on_the_wire())
            return resp, False
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002  # it repeats what was sent
    ) -> web.StreamResponse:
        """Answer what is no HTTP, or too much of it, without repeating it, and close."""
        status, reason = fault_of(status, exc)
        self.observer.saw("request.refused", status=status, reason=reason, error=type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        response = problem(status, {})
        response.force_close()
        return response


def fault_of(status: int, error: BaseException | None) -> tuple[int, str]:
    """Status and reason for what the server refuses by itself with `status`."""
    match error:
        case LineTooLong() if str(error.args[1]) == str(RECEIVE_LINE_BYTES_MAX):
            return HTTPStatus.REQUEST_URI_TOO_LONG, "request-line"
        case LineTooLong():
            return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "header-size"
        case BadHttpMessage() if TOO_MANY in error.message:
            return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "header-count"
        case _:
            return status, "no-http" if status == HTTPStatus.BAD_REQUEST else "bug"


class Refused(Connection):
    """A connection above the limit: closed before anything is read from it."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.force_close()


@dataclass(frozen=True, slots=True)
class Listening:
    """A listener at work. `port` is the one it got."""

    port: int
    server: asyncio.Server

    def stop_accepting(self) -> None:
        self.server.close()


@asynccontextmanager
async def listen(
    handle: Handle,
    *,
    host: str,
    port: int,
    settings: ReceiverSettings,
    observer: Observer,
    factory: Factory | None = None,
    close_seconds: float = CLOSE_SECONDS,
) -> AsyncGenerator[Listening]:
    """Serve `handle` at `host` and `port` (0 for any) within the block; then close every connection, those that are
    answering after `close_seconds`.
    """
    listener = Listener(handle, settings=settings, observer=observer, factory=factory)
    server = await asyncio.get_running_loop().create_server(listener, host, port, backlog=BACKLOG)
    try:
        yield Listening(server.sockets[0].getsockname()[1], server)
    finally:
        server.close()
        listener.pre_shutdown()
        await listener.shutdown(close_seconds)
