"""The services: one that posts its replies, and one that gives them in its answers."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from aiohttp import web

from contracts.errors import Unavailable
from contracts.messages import Refused
from contracts.signature import Secret
from receiver.memory import SqliteMemory
from receiver.participant import Delivery, Participant
from tests.crash.contracts import (
    Carrier,
    Charge,
    Charged,
    Refund,
    Release,
    Reserve,
    Reserved,
    Ship,
    Shipped,
    Tell,
)
from tests.crash.witness import FOLDER, act

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]

COMMANDS: Final = "CRASH_COMMANDS"
REPLIES: Final = "CRASH_REPLIES"
"""Names of the secrets, of commands and of replies."""


def accepts() -> dict[str, Secret]:
    return {"/waypost": Secret.parse(os.environ[COMMANDS])}


def memory(name: str) -> SqliteMemory:
    return SqliteMemory(Path(os.environ[FOLDER]) / f"{name}.sqlite")


class Gated(Participant):
    """A service behind a gate that answers some commands by itself."""

    def app(self, path: str = "/waypost") -> web.Application:
        app = super().app(path)
        app.middlewares.append(gate)
        return app


@web.middleware
async def gate(request: web.Request, handler: Handle) -> web.StreamResponse:
    """410 to parcels for a carrier that is gone, and 429 to the first try of one for a busy carrier."""
    data = json.loads(await request.read())["data"]
    if data.get("carrier") == Carrier.GONE:
        return web.Response(status=410)
    if data.get("busy") and request.headers.get("waypost-attempt") == "1":
        return web.Response(status=429, headers={"retry-after": "1"})
    return await handler(request)


def stock() -> Participant:
    """The warehouse, and the carrier that comes there."""
    service = Gated(
        name="stock",
        receiver_url=os.environ["WAYPOST_RECEIVER_URL"],
        secret=Secret.parse(os.environ[REPLIES]),
        accepts=accepts(),
        memory=memory("stock"),
    )

    @service.does(Reserve)
    def _(command: Reserve, delivery: Delivery) -> Reserved:
        act(delivery.key, "reserved", again=delivery.again)
        return Reserved(reservation=f"shelf of {command.order}")

    @service.does(Release)
    def _(command: Release, delivery: Delivery) -> None:
        if command.jammed:
            raise Refused("jammed")
        act(delivery.key, f"released {command.reservation}", again=delivery.again)

    @service.does(Ship)
    def _(command: Ship, delivery: Delivery) -> Shipped:
        if command.carrier == Carrier.REFUSES:
            raise Refused("too-heavy", "the carrier does not take it", detail={"limit": 40})
        act(delivery.key, "shipped", again=delivery.again)
        return Shipped(tracking=f"track of {command.order}")

    @service.does(Tell)
    def _(_: Tell, delivery: Delivery) -> None:
        act(delivery.key, "told", again=delivery.again)

    return service


def bank() -> Participant:
    service = Participant(name="bank", accepts=accepts(), reply_in_answer=True, memory=memory("bank"))

    @service.does(Charge)
    def _(command: Charge, delivery: Delivery) -> Charged:
        if command.busy and delivery.attempt == 1:
            raise Unavailable("the bank")
        act(delivery.key, "charged", again=delivery.again)
        return Charged(charge=f"charge of {command.order}")

    @service.does(Refund)
    def _(command: Refund, delivery: Delivery) -> None:
        act(delivery.key, f"refunded {command.charge}", again=delivery.again)

    return service


SERVICES: Final[Mapping[str, Callable[[], Participant]]] = {"stock": stock, "bank": bank}
