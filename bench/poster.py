"""A client that costs little: requests that were made beforehand, posted over connections that are kept.

It is the same for whatever is measured, and takes a small part of what a server takes for the same request.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, cast

ANSWER_MAX_SECONDS: Final = 20.0
HEAD_ENDS: Final = b"\r\n\r\n"
LENGTH: Final = b"Content-Length: "


@dataclass(slots=True)
class Load:
    """Requests that are still to be posted, and how many got which status so far."""

    requests: Iterator[bytes]
    statuses: Counter[int] = field(default_factory=Counter[int])
    open: bool = True

    @property
    def answered(self) -> int:
        return self.statuses.total()

    def next(self) -> bytes | None:
        """The next request; None when time is over. Raises RanOut when there are none left."""
        if not self.open:
            return None
        request = next(self.requests, None)
        if request is None:
            raise RanOut
        return request


class RanOut(Exception):
    """There were fewer requests than the window could take: a figure of it would be too low."""


class Posting(asyncio.Protocol):
    """One connection: the next request goes out when the answer to the last one is there."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # TCP gives one; uvloop's is not of that class
        self._post()

    def data_received(self, data: bytes) -> None:
        self.received = received = self.received + data if self.received else data
        ends = received.find(HEAD_ENDS)
        if ends < 0 or len(received) - ends - len(HEAD_ENDS) < length_in(received, ends):
            return
        self.received = b""
        self.load.statuses[int(received[9:12])] += 1
        self._post()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(exc or ConnectionError("the server closed a connection"))

    def _post(self) -> None:
        try:
            request = self.load.next()
        except RanOut as error:
            self.over.set_exception(error)
            return
        if request is not None:
            self.transport.write(request)
        elif not self.over.done():
            self.over.set_result(None)
            self.transport.close()


def length_in(received: bytes, ends: int) -> int:
    """What an answer's head, which ends there, says about its body. Both servers write the name alike."""
    begins = received.index(LENGTH, 0, ends) + len(LENGTH)
    return int(received[begins : received.index(b"\r\n", begins)])


def request_of(path: str, port: int, headers: dict[str, str], body: bytes) -> bytes:
    """The bytes of a POST."""
    lines = {"Host": f"127.0.0.1:{port}", **headers, "Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def rate_of(
    port: int, requests: Iterator[bytes], *, connections: int, warm_up: float, window: float
) -> tuple[float, Counter[int]]:
    """Answers per second within `window` seconds, and all statuses that came, from the first request on.

    Raises RanOut when `requests` are too few, and what a connection raises.
    """
    load = Load(requests)
    loop = asyncio.get_running_loop()
    pairs = [
        await loop.create_connection(lambda: Posting(load), "127.0.0.1", port) for _ in range(connections)
    ]
    overs = [protocol.over for _, protocol in pairs]
    await asyncio.wait(overs, timeout=warm_up, return_when=asyncio.FIRST_EXCEPTION)
    before, began = load.answered, time.perf_counter()
    await asyncio.wait(overs, timeout=window, return_when=asyncio.FIRST_EXCEPTION)
    after, ended = load.answered, time.perf_counter()
    load.open = False
    async with asyncio.timeout(ANSWER_MAX_SECONDS):
        await asyncio.gather(*overs)
    return (after - before) / (ended - began), load.statuses
