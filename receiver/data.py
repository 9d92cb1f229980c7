"""Data that messages name, given out to whoever has the ticket: `GET /data/{ticket}`.

    ticket: its form, its HMAC → the fact that it names, and whether its time is over → the object, opened and compared
    with the ticket's hash → bytes, no slower than a limit

A ticket is the whole right, since a service has nothing else that the receiver would know it by when it asks. Whatever
is no ticket, or is one no more, gets the same 404. What cannot be had now gets 503, and the moment says why.
"""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, LiteralString

from aiohttp import web
from psycopg_pool import AsyncConnectionPool

from contracts.codec import PayloadKeyMissing, PayloadUnreadable
from contracts.dataref import Ticket, Tickets
from contracts.limits import DATA_CHUNK_BYTES
from contracts.objects import JSON_TYPE, ObjectGone, Reference, StoreAway, digest_of, reference
from contracts.observer import Observer
from receiver.requests import Refusal, unavailable
from receiver.senders import CONNECTION_SECONDS
from receiver.settings import ReceiverSettings

PREFIX: Final = "/data/"
SHOWN: Final = "'/data/…'"
"""What a log has of the path of such a request: a ticket belongs in none."""

Fetch = Callable[[int, Reference], Awaitable[bytes]]
"""The object of a tenant, opened. Raises ObjectGone, StoreAway, PayloadKeyMissing, PayloadUnreadable."""

NAMED: Final[LiteralString] = """
    select j.payload -> 'objects' -> 'args.data' as reference
      from waypost.journal j
     where j.tenant_id = %(tenant)s::int
       and j.execution_id = %(execution)s::uuid
       and j.position = %(position)s::bigint
       and now() < to_timestamp(%(expires)s::bigint)
"""


class DataDesk:
    """Gives out what tickets name. `fetch` gets an object; None: this receiver has no payload store."""

    def __init__(
        self,
        pool: AsyncConnectionPool[Any],
        *,
        tickets: Tickets,
        fetch: Fetch | None,
        settings: ReceiverSettings,
        observer: Observer,
    ) -> None:
        self.pool = pool
        self.tickets = tickets
        self.fetch = fetch
        self.settings = settings
        self.observer = observer
        self.at_work: Counter[Ticket] = Counter()

    async def answer(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """The bytes, written. Raises Refusal: 405, 404 for what is no ticket (any more), 503 for what is not to be had
        now.
        """
        if request.method != "GET":
            raise Refusal(405, "method", {"Allow": "GET"})
        ticket = self.tickets.read(path.removeprefix(PREFIX))
        if ticket is None:
            raise Refusal(404, "no-ticket")
        settings = self.settings
        if (
            self.at_work.total() >= settings.data_concurrency_max
            or self.at_work[ticket] >= settings.data_same_max
        ):
            raise unavailable("data-concurrency")
        self.at_work[ticket] += 1
        try:
            return await self._give(request, ticket, await self._data(ticket))
        finally:
            self.at_work -= Counter({ticket: 1})

    async def _data(self, ticket: Ticket) -> bytes:
        """What the ticket names, compared with it."""
        async with self.pool.connection(CONNECTION_SECONDS) as conn:
            named = {
                "tenant": ticket.tenant,
                "execution": ticket.execution,
                "position": ticket.position,
                "expires": ticket.expires,
            }
            row = await (await conn.execute(NAMED, named)).fetchone()
        if row is None or row[0] is None:
            raise Refusal(404, "ticket-over")
        if self.fetch is None:
            raise self._cannot(ticket, "payload-unavailable", "this receiver has no payload store")
        try:
            data = await self.fetch(ticket.tenant, reference(row[0]))
        except (ObjectGone, StoreAway, PayloadKeyMissing, PayloadUnreadable) as error:
            raise self._cannot(ticket, error.code, str(error)) from None
        except ValueError as error:
            raise self._cannot(ticket, "payload-unavailable", str(error)) from None
        if len(data) != ticket.size or await asyncio.to_thread(digest_of, data) != ticket.sha256:
            raise self._cannot(ticket, "payload-unavailable", "they are not those that the message names")
        return data

    def _cannot(self, ticket: Ticket, code: str, why: str) -> Refusal:
        self.observer.saw(
            "data.unavailable",
            message=str(ticket.message),
            execution=str(ticket.execution),
            code=code,
            error=why,
        )
        return unavailable(code)

    async def _give(self, request: web.BaseRequest, ticket: Ticket, data: bytes) -> web.StreamResponse:
        """Write all of it, or cut whoever takes it too slowly."""
        digest = base64.b64encode(bytes.fromhex(ticket.sha256)).decode("ascii")
        response = web.StreamResponse(
            headers={
                "Content-Type": JSON_TYPE,
                "Content-Length": str(ticket.size),
                "ETag": f'"sha-256:{ticket.sha256}"',
                "Repr-Digest": f"sha-256=:{digest}:",
                "Cache-Control": "private, no-store",
                "X-Content-Type-Options": "nosniff",
                "Accept-Ranges": "none",
                "Server": "waypost",
            }
        )
        whole = memoryview(data)
        try:
            async with asyncio.timeout(
                self.settings.data_seconds + ticket.size / self.settings.data_bytes_per_second
            ):
                await response.prepare(request)
                for begin in range(0, len(data), DATA_CHUNK_BYTES):
                    await response.write(whole[begin : begin + DATA_CHUNK_BYTES])
                await response.write_eof()
        except (TimeoutError, ConnectionError):
            self.observer.saw("data.cut", message=str(ticket.message), size=ticket.size)
            if request.transport is not None:
                request.transport.abort()
            return response
        self.observer.saw("data.given", message=str(ticket.message), size=ticket.size)
        return response
