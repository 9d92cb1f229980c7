"""The doors around aiohttp: what a process sends is named by the function that sends, and what it answers is
about what it was asked.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import aiohttp
from aiohttp import web

from tests.crash.guard import Guard, hang
from tests.crash.points import Subject
from tests.crash.statements import PACKAGES

SENDING: Final[contextvars.ContextVar[tuple[str, Subject]]] = contextvars.ContextVar("sending")
ANSWER: Final = "http"


def install(guard: Guard) -> None:
    sends, answers = Sends(guard), Answers(guard)
    hang(aiohttp.ClientSession, "_request", sends.request)
    hang(aiohttp.ClientResponse, "start", sends.start)
    hang(web.BaseRequest, "read", answers.read)
    hang(web.RequestHandler, "finish_response", answers.finish)


@dataclass(slots=True)
class Sends:
    """Requests that this process makes: before a byte leaves, written whole, and once the answer has begun."""

    guard: Guard

    def request(self, request: Any) -> Any:
        async def door(session: aiohttp.ClientSession, *args: Any, **more: Any) -> Any:
            name, subject = caller(sys._getframe()), self.guard.sends(more["data"])  # pyright: ignore[reportPrivateUsage]  # documented so
            SENDING.set((name, subject))
            self.guard.passes("before", "send", name, [subject])
            return await request(session, *args, **more)

        return door

    def start(self, start: Any) -> Any:
        async def door(response: aiohttp.ClientResponse, connection: Any) -> Any:
            name, subject = SENDING.get()
            await flushed(connection.transport)
            self.guard.passes("sent", "send", name, [subject])
            found = await start(response, connection)
            self.guard.passes("after", "send", name, [subject])
            return found

        return door


@dataclass(slots=True)
class Answers:
    """What this process says to those who ask it. The receiver's commits tell what it was asked; a service reads."""

    guard: Guard

    def read(self, read: Any) -> Any:
        async def door(request: web.BaseRequest) -> bytes:
            body: bytes = await read(request)
            self.guard.note(body)
            return body

        return door

    def finish(self, finish: Any) -> Any:
        async def door(handler: Any, request: web.BaseRequest, answer: web.Response, began: Any) -> Any:
            subject = self.guard.known(request.headers.get("webhook-id"), f" {answer.status}")
            transport = request.transport
            self.guard.passes("before", "answer", ANSWER, [subject])
            found = await finish(handler, request, answer, began)
            await flushed(transport)
            self.guard.passes("after", "answer", ANSWER, [subject])
            return found

        return door


def caller(frame: FrameType | None) -> str:
    """The function of the product that is at work."""
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in PACKAGES:
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "unknown"


async def flushed(transport: asyncio.BaseTransport | None) -> None:
    """Until all that was written has left this process."""
    await asyncio.sleep(0)  # a task that writes, and an event loop that writes at the end of its round
    while is_writing(transport):  # noqa: ASYNC110  # a transport has no event for it
        await asyncio.sleep(0)


def is_writing(transport: asyncio.BaseTransport | None) -> bool:
    return (
        isinstance(transport, asyncio.WriteTransport)
        and not transport.is_closing()
        and transport.get_write_buffer_size() > 0
    )
