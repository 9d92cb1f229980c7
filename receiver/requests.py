"""Requests and answers: what is looked at before anything is believed, and how little is said."""

from __future__ import annotations

import asyncio
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote

from aiohttp import web
from multidict import CIMultiDict

from contracts.binary import REQUIRED, decode_binary
from contracts.envelope import (
    ABSENT,
    BATCH,
    CORE,
    STRUCTURED,
    Envelope,
    decode_structured,
    encode_structured,
    media_type,
)
from contracts.errors import BadSignature, MalformedEvent, Unavailable, WaypostError
from contracts.limits import RETRY_AFTER_SECONDS
from receiver.answers import challenged
from receiver.authenticity import Proof
from receiver.mapping import challenge_in, content_of, event_from
from receiver.senders import Sender
from receiver.sequence import SEQUENCE
from receiver.settings import ReceiverSettings

FORMATS: Final = "application/cloudevents"
"""How the media types of events begin: single ones, batches, and those of formats other than JSON."""

GZIP: Final = 16 + zlib.MAX_WBITS
"""What zlib calls gzip."""

PATHS_KEPT_MAX: Final = 512  # in memory; senders post to the same one again and again

FAULTS_TOLD_MAX: Final = 3  # of an event, with what was expected; the others are named only


Headers = Mapping[str, str]
"""Names and values; names have no case."""


class Refusal(Exception):
    """A request ends here with `status`. `reason` is for operators only, `detail` for whoever asked."""

    def __init__(
        self, status: int, reason: str, headers: Mapping[str, str] | None = None, *, detail: str = ""
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.headers = dict(headers or {})
        self.detail = detail


def unavailable(reason: str, retry_after: int = RETRY_AFTER_SECONDS) -> Refusal:
    """503: the only answer that makes every sender come again."""
    return Refusal(503, reason, {"Retry-After": str(retry_after)})


def path_of(request: web.BaseRequest) -> str:
    """A query is not signed, so it means nothing."""
    target = request.raw_path
    return target.partition("?")[0] if target.startswith("/") else request.rel_url.raw_path


def route(request: web.BaseRequest, path: str) -> tuple[str, str]:
    """Tenant and sender of `/events/{tenant}/{sender}`."""
    names = names_in(path)
    if names is None:
        raise Refusal(404, "route")
    if request.method not in {"POST", "OPTIONS"}:
        raise Refusal(405, "method", {"Allow": "POST"})
    return names


@lru_cache(maxsize=PATHS_KEPT_MAX)
def names_in(path: str) -> tuple[str, str] | None:
    """Tenant and sender that a path names; None when it is another one."""
    parts = path.split("/")
    if len(parts) != 4 or parts[0] or parts[1] != "events":
        return None
    return unquote(parts[2]), unquote(parts[3])


def check_headers(request: web.BaseRequest, sender: Sender) -> Proof:
    """Refuse what can be refused before a byte of the body is read.

    aiohttp takes a header that comes twice, and gives the first; here it is an ambiguity. An encoded body could be a
    bomb, so it is taken only from those whose settings say so.
    """
    headers = request.headers
    if len(set(map(str.lower, headers))) < len(headers) and any(
        len(headers.getall(name, ())) > 1 for name in sender.single
    ):
        raise Refusal(400, "duplicate-header")
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity" and not (encoding == "gzip" and sender.policy.gzip):
        raise Refusal(415, "content-encoding")
    if not (is_structured(headers) or is_batch(headers) or is_binary(headers) or is_mapped(headers, sender)):
        raise Refusal(415, "content-type", detail=f"expected an event as {STRUCTURED}")
    return sender.verifier.proof(headers)


def is_structured(headers: Headers) -> bool:
    """Whether the body is the event; headers that repeat its attributes mean nothing then."""
    return media_type(headers.get("content-type", "")) == STRUCTURED


def is_batch(headers: Headers) -> bool:
    """Whether the body is an array of events."""
    return media_type(headers.get("content-type", "")) == BATCH


def is_binary(headers: Headers) -> bool:
    """Whether the headers are the event's attributes. Formats that we do not read are no data."""
    if media_type(headers.get("content-type", "")).startswith(FORMATS):
        return False
    return any(name in headers for name in REQUIRED)


def is_mapped(headers: Headers, sender: Sender) -> bool:
    """Whether it may be a webhook that is no event, and is made one by its sender's rules."""
    if sender.policy.event is None:
        return False
    return not media_type(headers.get("content-type", "")).startswith(FORMATS)


def signed_name(sender: Sender, proof: Proof, body: bytes) -> str | None:
    """What was signed as the name of a request: its id, or else all of its body; None when neither names one.

    Ids have no dot, so no body is named like one.
    """
    if sender.policy.signature.signs_id:
        return proof.message_id
    return f"sha256.{hashlib.sha256(body).hexdigest()}" if sender.policy.once else None


def unpacked(request: web.BaseRequest, body: bytes, settings: ReceiverSettings) -> bytes:
    """The authentic body as it was before it was compressed, at most `body_bytes_max` of it. Raises Refusal."""
    if request.headers.get("content-encoding", "identity").lower() == "identity":
        return body
    stream = zlib.decompressobj(GZIP)
    try:
        plain = stream.decompress(body, settings.body_bytes_max + 1)
    except zlib.error:
        raise Refusal(400, "content-encoding") from None
    if len(plain) > settings.body_bytes_max:
        raise Refusal(413, "body-size")
    if not stream.eof or stream.unused_data:
        raise Refusal(400, "content-encoding")
    return plain


def answer_to_challenge(request: web.BaseRequest, body: bytes, sender: Sender) -> web.Response | None:
    """The answer to an authentic request that only asks whether we are there; None when it is another."""
    policy = sender.policy
    if policy.challenge is None or policy.event is None:
        return None
    content = content_of(policy.event, request.headers.get("content-type", ""), body)
    text = challenge_in(policy.challenge, request.headers, content)
    return None if text is None else challenged(text)


def event_in(headers: Headers, body: bytes, sender: Sender) -> tuple[Envelope, bytes]:
    """The event of a request, and what is kept of it: structured JSON.

    Of one in binary mode, and of a webhook that is none, that is all of its attributes, and the bytes that were signed
    as `data_base64`. Raises Refusal when the mode is not the sender's, MalformedEvent, MalformedJson, Unmapped.
    """
    if is_structured(headers):
        return decode_structured(body), body
    if sender.policy.event is not None and not (sender.binary_mode and is_binary(headers)):
        kind = headers.get("content-type", "")
        content = content_of(sender.policy.event, kind, body)
        envelope = event_from(sender.policy.event, headers, content, kind)
        return envelope, encode_structured(replace(envelope, data=body or ABSENT))
    if not sender.binary_mode:
        raise Refusal(
            415,
            "binary-mode",
            detail=f"expected an event as {STRUCTURED}: this sender may not use the binary content mode",
        )
    envelope = decode_binary(headers.items(), body)
    return envelope, encode_structured(replace(envelope, data=body or ABSENT))


async def read(request: web.BaseRequest, settings: ReceiverSettings) -> bytes:
    """Read the body, at most `body_bytes_max` of it, within `body_seconds`."""
    if (request.content_length or 0) > settings.body_bytes_max:
        raise Refusal(413, "body-size")
    if "expect" in request.headers:
        await expect(request)
    if request.content.is_eof():  # a small request comes in one piece
        body = request.content.read_nowait()
        if len(body) > settings.body_bytes_max:
            raise Refusal(413, "body-size")
        return body
    return await read_slowly(request, settings)


async def read_slowly(request: web.BaseRequest, settings: ReceiverSettings) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > settings.body_bytes_max:
                    raise Refusal(413, "body-size")
    except TimeoutError:
        raise Refusal(408, "body-time") from None
    except (web.RequestPayloadError, ConnectionError):
        raise Refusal(400, "body-cut") from None
    return bytes(body)


async def expect(request: web.BaseRequest) -> None:
    """Answer `Expect: 100-continue` only here, when the headers are good."""
    if request.headers["expect"].lower() != "100-continue":
        raise Refusal(417, "expectation")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # it is no part of the response; aiohttp does the same


async def expect_nothing(_: web.BaseRequest) -> None:
    """Keep an application's router from answering 100 before any header was looked at."""


def problem(
    status: int, headers: Mapping[str, str], *, detail: str = "", faults: Mapping[str, str] | None = None
) -> web.Response:
    """A problem document (RFC 9457): what the status says, which attributes of an event are at fault, and why."""
    members: dict[str, object] = {"title": HTTPStatus(status).phrase, "status": status}
    if faults:
        members["attributes"] = list(faults)
        told = [f"{name}: {expected}" for name, expected in faults.items()]
        detail = "; ".join(told[:FAULTS_TOLD_MAX])
    if detail:
        members["detail"] = detail
    fields = CIMultiDict(headers, **{"Content-Type": "application/problem+json", "Server": "waypost"})
    return web.Response(status=status, body=json.dumps(members).encode(), headers=fields)


def refusal_of(error: WaypostError) -> Refusal:
    """The answer to an error that carries its own status."""
    if isinstance(error, Unavailable):
        return unavailable(error.code, error.retry_after)
    if isinstance(error, BadSignature):
        # What cannot be signed unambiguously is not a wrong proof but a wrong form.
        return Refusal(400 if error.reason == "malformed" else 401, f"signature-{error.reason}")
    return Refusal(error.http_status, error.code)


NAMES: Final = ("specversion", *CORE, SEQUENCE, "data", "data_base64")


def faults_of(error: Exception | None) -> dict[str, str]:
    """What was expected of each attribute at fault. What was found, and names of the sender's own, are its text."""
    if not isinstance(error, MalformedEvent):
        return {}
    told: dict[str, str] = {}
    for problem in error.problems:
        name, _, expected = problem.partition(", found ")[0].partition(": ")
        told[name] = expected
    return {name: told[name] for name in NAMES if name in told}
