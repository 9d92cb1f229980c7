"""The server that `waypost simulate endpoint` is made of, told one behaviour for all that comes."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from orchestrator.simulators import behaviours
from orchestrator.simulators.behaviours import Step, every, then
from orchestrator.simulators.server import Behaviour, Exchange, Request, Server, listening, response
from tests.relay.certificates import HOST

__all__ = ["Behaviour", "Exchange", "Request", "response", "then"]


@dataclass(slots=True)
class Hostile(Server):
    @property
    def url(self) -> str:
        return f"{self.scheme}://{HOST if self.scheme == 'https' else self.host}:{self.port}/hook?a=b"


@contextlib.asynccontextmanager
async def hostile(behaviour: Behaviour, *, tls: ssl.SSLContext | None = None) -> AsyncGenerator[Hostile]:
    """A server on a port of its own, on 127.0.0.1."""
    server = Hostile(behaviour, scheme="https" if tls else "http")
    async with listening(server, tls=tls):
        yield server


hangs = every(behaviours.hangs)
cuts_after_reading = every(behaviours.cuts)
cuts_inside_the_status_line = every(behaviours.breaks_off(b"HTTP/1.1 20"))


async def cuts_before_reading(exchange: Exchange) -> None:
    exchange.cut()


def answers(status: int, *fields: str, body: bytes = b"") -> Behaviour:
    return every(then(status, *fields, body=body))


def in_turn(*steps: Step) -> Behaviour:
    """The first request gets the first step, and so on; the last one goes on for ever."""
    count = 0

    async def step(exchange: Exchange, request: Request) -> None:
        nonlocal count
        count += 1
        await steps[min(count, len(steps)) - 1](exchange, request)

    return every(step)


def drips(status: int) -> Behaviour:
    return every(behaviours.drips(behaviours.endless(status)))


def floods(status: int) -> Behaviour:
    return every(behaviours.floods(status))


def says(data: bytes) -> Behaviour:
    return every(behaviours.says(data))
