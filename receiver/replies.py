"""Replies of a participant: made once, kept, and posted as the same bytes however often that is."""

from __future__ import annotations

import asyncio
import json
import random
import secrets as chance
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlsplit

import aiohttp

from contracts import strict_json
from contracts.envelope import ABSENT, STRUCTURED, Envelope, decode_structured, encode_structured
from contracts.errors import NotEncodable, TooLarge
from contracts.identifiers import uuid7
from contracts.limits import EVENT_BYTES_MAX
from contracts.observer import Observer
from contracts.signature import Secret, sign
from receiver.memory import End

POST_ATTEMPTS_MAX: Final = 3  # in one go; after that the command itself comes again
POST_SECONDS: Final = 3.0  # one attempt, its answer included; the relay waits 15 s for all of it
POST_PAUSE_SECONDS: Final = 0.1  # at most, after the first attempt; twice as long after each further one

PATIENCE: Final = aiohttp.ClientTimeout(total=POST_SECONDS)


@dataclass(frozen=True, slots=True)
class Reply:
    end: End
    body: bytes


def done(command: Envelope, *, source: str, value: Any) -> Reply:
    """It was done. When no reply can carry the value, it was done too but cannot be told: `failed`."""
    try:
        return _reply(command, "done", source=source, data=ABSENT if value is None else value)
    except (NotEncodable, TooLarge) as error:
        return failed(command, source=source, code=error.code, message=str(error))


def refused(command: Envelope, *, source: str, code: str, message: str = "", detail: Any = None) -> Reply:
    """Definitely not done."""
    return _no(command, "refused", source=source, code=code, message=message, detail=detail)


def failed(command: Envelope, *, source: str, code: str, message: str = "", detail: Any = None) -> Reply:
    """Given up; it may have acted."""
    return _no(command, "failed", source=source, code=code, message=message, detail=detail)


def repeated(stored: bytes, command: Envelope) -> Reply:
    """The outcome that another message of the same action had, told to this one."""
    before = decode_structured(stored)
    return _reply(command, "done", source=before.source, data=before.data)


def _no(command: Envelope, end: End, *, source: str, code: str, message: str, detail: Any) -> Reply:
    said = {"code": code, "message": message, "detail": detail}
    try:
        return _reply(command, end, source=source, data=said)
    except (NotEncodable, TooLarge):
        # The word counts more than its explanation: what cannot be sent is left out.
        return _reply(command, end, source=source, data={"code": code[:128], "message": ""})


def _reply(command: Envelope, end: End, *, source: str, data: Any) -> Reply:
    """A new reply. Its id is drawn, so that a service that lost its memory contradicts no earlier one. It says the
    traceparent of `command`: of the run, where runs are spans, else of the command.
    """
    if data is not ABSENT:
        strict_json.encode(data, what=f"{end} reply to {command.type}", bytes_max=EVENT_BYTES_MAX)
    now = datetime.now(UTC)
    identity = str(uuid7(at=now, chance=chance.token_bytes(10)))
    extensions: dict[str, Any] = {"causationid": command.id}
    if isinstance(correlation := command.extensions.get("correlationid"), str):
        extensions["correlationid"] = correlation
    if isinstance(traceparent := command.extensions.get("traceparent"), str):
        extensions["traceparent"] = traceparent
    envelope = Envelope(
        id=identity,
        source=source,
        type=f"{command.type}.{end}",
        subject=command.subject,
        time=now.isoformat().replace("+00:00", "Z"),
        datacontenttype=None if data is ABSENT else "application/json",
        dataschema=None,
        data=data,
        extensions=extensions,
    )
    body = encode_structured(envelope)
    if len(body) > EVENT_BYTES_MAX:
        raise TooLarge(f"{end} reply to {command.type}", len(body), EVENT_BYTES_MAX)
    return Reply(end, body)


class NotTaken(Exception):
    """The receiver did not take a reply this time."""


class Poster:
    """Posts replies to one receiver. Redirects are never followed: an answer elsewhere took nothing."""

    def __init__(
        self, session: aiohttp.ClientSession, *, url: str, secrets: Sequence[Secret], observer: Observer
    ) -> None:
        self._session = session
        self._url = url
        self._secrets = secrets
        self._observer = observer

    async def post(self, body: bytes) -> bool:
        """Whether the receiver took `body`, one of our replies, in one of a few attempts. The network never
        makes it raise.
        """
        identity: str = json.loads(body)["id"]
        for attempt in range(1, POST_ATTEMPTS_MAX + 1):
            try:
                await self._once(body, identity)
            except NotTaken as error:
                if attempt == POST_ATTEMPTS_MAX:
                    self._observer.saw("reply.not_taken", url=self._url, error=str(error))
                    return False
                longest = POST_PAUSE_SECONDS * 2 ** (attempt - 1)
                await asyncio.sleep(random.uniform(0, longest))  # noqa: S311  # it spreads load
            else:
                return True
        raise AssertionError("the last attempt returns")

    async def _once(self, body: bytes, identity: str) -> None:
        timestamp = int(time.time())
        signature = sign(self._secrets, message_id=identity, timestamp=timestamp, body=body)
        headers = {
            "content-type": STRUCTURED,
            "webhook-id": identity,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature,
        }
        try:
            async with self._session.post(
                self._url, data=body, headers=headers, allow_redirects=False, timeout=PATIENCE
            ) as answer:
                if not 200 <= answer.status < 300:
                    raise NotTaken(f"status {answer.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NotTaken(type(error).__name__) from error


def origin_in(receiver_url: str) -> str:
    """Scheme, host and port of the receiver, where it gives out data too."""
    parts = urlsplit(receiver_url)
    return f"{parts.scheme}://{parts.netloc}"


def address_of(receiver_url: str, *, tenant: str, sender: str) -> str:
    """Where the replies of `sender` go, as `replyto` of its commands says."""
    return f"{receiver_url.rstrip('/')}/events/{quote(tenant, safe='')}/{quote(sender, safe='')}"
