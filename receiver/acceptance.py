"""202: durable, not yet acted on. There are thousands a second and few different ones, so each is written once."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from email.utils import formatdate
from typing import Final

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from receiver.inbox import Answer, Posted

BODIES: Final[dict[Answer, bytes]] = {
    "mail": b'{"answer": "mail"}',
    "event": b'{"answer": "event"}',
    "unmatched": b'{"answer": "unmatched"}',
}
STORED: Final = CIMultiDict({"Content-Type": "application/json", "Server": "waypost"})
DUPLICATE: Final = CIMultiDict({**STORED, "X-Inbox": "duplicate"})


class Accepted(web.Response):
    """A response as any other; `on_the_wire` has the bytes of it for a connection that is kept."""

    def __init__(self, answer: Answer, *, duplicate: bool) -> None:
        headers = DUPLICATE if duplicate else STORED
        super().__init__(status=202, body=BODIES[answer], headers=headers.copy())
        self._kind = answer, duplicate

    @property
    def keep_alive(self) -> bool:
        """Whether the connection is kept: yes, unless the request said otherwise when this was prepared."""
        return super().keep_alive is not False

    def on_the_wire(self) -> bytes:
        """Head and body, as HTTP/1.1 (RFC 9112, section 2.1)."""
        return HEADS[self._kind] + b"Date: " + today() + b"\r\n\r\n" + BODIES[self._kind[0]]


def accepted(posted: Posted) -> Accepted:
    """The answer to what was stored. A duplicate gets what the first got, and a header that says so."""
    return Accepted(posted.answer or "unmatched", duplicate=posted.outcome == "duplicate")


def accepted_all(posted: Sequence[Posted], quarantined: int) -> web.Response:
    """The answer to a batch. One of which nothing is new is a duplicate."""
    repeated = sum(one.outcome == "duplicate" for one in posted)
    headers = DUPLICATE if posted and repeated == len(posted) else STORED
    told = {"answer": "batch", "events": len(posted), "duplicates": repeated, "quarantined": quarantined}
    body = json.dumps(told).encode()
    return web.Response(status=202, body=body, headers=headers.copy())


def set_apart(*, new: bool) -> web.Response:
    """The answer to what was kept apart: sending it again would not help."""
    headers = STORED if new else DUPLICATE
    return web.Response(status=202, body=b'{"answer": "quarantined"}', headers=headers.copy())


def is_plain(request: web.BaseRequest) -> bool:
    """Whether the answer needs no header that depends on the request."""
    return request.version == HttpVersion11 and request.keep_alive and "Upgrade" not in request.headers


def head(answer: Answer, headers: CIMultiDict[str]) -> bytes:
    lines = {**headers, "Content-Length": str(len(BODIES[answer]))}
    return b"HTTP/1.1 202 Accepted\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()).encode()


HEADS: Final = {
    (answer, duplicate): head(answer, DUPLICATE if duplicate else STORED)
    for answer in BODIES
    for duplicate in (False, True)
}


class Clock:
    """The time of day as HTTP says it (RFC 9110, section 5.6.7), formatted once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._text = b""

    def __call__(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True).encode()
        return self._text


today: Final = Clock()
