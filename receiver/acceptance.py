"""202: durable, not yet acted on. There are thousands a second and few different ones, so each is written once.

A sender that wants another status for it has it in its settings: 200, or 204 without a body.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, Literal

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from receiver.inbox import Answer, Posted

Status = Literal[200, 202, 204]
ACCEPTED: Final = 202
NO_CONTENT: Final = 204
STATUSES: Final[tuple[Status, ...]] = (200, 202, 204)
BODIES: Final[dict[Answer, bytes]] = {
    "mail": b'{"answer": "mail"}',
    "event": b'{"answer": "event"}',
    "unmatched": b'{"answer": "unmatched"}',
}
STORED: Final = CIMultiDict({"Content-Type": "application/json", "Server": "waypost"})
DUPLICATE: Final = CIMultiDict({**STORED, "X-Inbox": "duplicate"})


class Accepted(web.Response):
    """A response as any other; `on_the_wire` has the bytes of it for a connection that is kept."""

    def __init__(self, answer: Answer, *, duplicate: bool, status: Status = ACCEPTED) -> None:
        kind: Kind = answer, duplicate, status
        body, headers = SAID[kind]
        super().__init__(status=status, body=body, headers=headers.copy())
        self._kind = kind

    @property
    def keep_alive(self) -> bool:
        """Whether the connection is kept: yes, unless the request said otherwise when this was prepared."""
        return super().keep_alive is not False

    def on_the_wire(self) -> bytes:
        """Head and body, as HTTP/1.1 (RFC 9112, section 2.1)."""
        return HEADS[self._kind] + b"Date: " + today() + b"\r\n\r\n" + (SAID[self._kind][0] or b"")


def body_of(status: Status, body: bytes) -> dict[str, Any]:
    return {"status": status, "body": None if status == NO_CONTENT else body}


def with_type(status: Status, headers: CIMultiDict[str]) -> CIMultiDict[str]:
    """The headers of such an answer; one without a body has no type."""
    made = headers.copy()
    if status == NO_CONTENT:
        del made["Content-Type"]
    return made


def accepted(posted: Posted, *, status: Status = ACCEPTED) -> Accepted:
    """The answer to what was stored. A duplicate gets what the first got, and a header that says so."""
    return Accepted(posted.answer or "unmatched", duplicate=posted.outcome == "duplicate", status=status)


def accepted_all(
    duplicates: Sequence[bool],
    quarantined: int,
    *,
    new: bool,
    told: Sequence[str] | None = None,
    status: Status = ACCEPTED,
) -> web.Response:
    """The answer to a batch: which of its events are duplicates, how many elements are kept apart; and `told` of each
    element, if its sender is told. One of which nothing is `new` is a duplicate.
    """
    headers = STORED if new or not (duplicates or quarantined) else DUPLICATE
    said: dict[str, object] = {
        "answer": "batch",
        "events": len(duplicates),
        "duplicates": sum(duplicates),
        "quarantined": quarantined,
    }
    if told is not None:
        said["items"] = list(told)
    return web.Response(**body_of(status, json.dumps(said).encode()), headers=with_type(status, headers))


def set_apart(*, new: bool, status: Status = ACCEPTED) -> web.Response:
    """The answer to what was kept apart: sending it again would not help."""
    headers = with_type(status, STORED if new else DUPLICATE)
    return web.Response(**body_of(status, b'{"answer": "quarantined"}'), headers=headers)


def is_plain(request: web.BaseRequest) -> bool:
    """Whether the answer needs no header that depends on the request."""
    return request.version == HttpVersion11 and request.keep_alive and "Upgrade" not in request.headers


Kind = tuple[Answer, bool, Status]
"""What is told, whether it is a duplicate, and with which status."""
KINDS: Final[list[Kind]] = [
    (answer, twice, one) for answer in BODIES for twice in (False, True) for one in STATUSES
]
SAID: Final[dict[Kind, tuple[bytes | None, CIMultiDict[str]]]] = {
    (answer, twice, status): (
        None if status == NO_CONTENT else BODIES[answer],
        with_type(status, DUPLICATE if twice else STORED),
    )
    for answer, twice, status in KINDS
}
"""Body and headers of each kind of answer."""


def head(status: Status, body: bytes | None, headers: CIMultiDict[str]) -> bytes:
    lines = dict(headers) if body is None else {**headers, "Content-Length": str(len(body))}
    line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
    return (line + "".join(f"{name}: {value}\r\n" for name, value in lines.items())).encode()


HEADS: Final = {(answer, twice, one): head(one, *said) for (answer, twice, one), said in SAID.items()}


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
