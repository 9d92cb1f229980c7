"""One try: a signed request out, an answer back, within one deadline and whatever the other side does.

The answer says two things that must not be confused: what the peer said (`status`), and whether it can have
seen the request at all (`reached`). Bytes are only written on a connection that stands, TLS included; so
until aiohttp reports one, nothing has left.

Source: Standard Webhooks, "Webhook Headers"; CloudEvents HTTP Webhook 1.0, section 2 (no redirects).
"""

import asyncio
import errno
import json
import math
import re
import ssl
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import Any, Final, Literal, Self, cast
from urllib.parse import quote

import aiohttp
from aiohttp.abc import AbstractResolver

from contracts import trace
from contracts.envelope import STRUCTURED, media_type
from contracts.limits import EVENT_BYTES_MAX
from contracts.signature import sign
from relay.addresses import AddressBlocked, guarded
from relay.binary import Binary, in_binary
from relay.delivery import REPLY_CUT, Answer
from relay.endpoints import Endpoint
from relay.kept import kept
from relay.outbox import Message
from relay.settings import RelaySettings

USER_AGENT: Final = "Waypost"
DNS_SECONDS: Final = 10  # an answer is reused so long; where it leads is checked at each connection anyway
CONTENT_TYPE_MAX: Final = 256
VISIBLE: Final = (
    "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # beside letters and digits; all visible ASCII but the percent sign
)

MISDIRECTED: Final = 421
REPLIES: Final = frozenset({200, 201})  # statuses whose CloudEvent is the reply
REPLY_FAULTS: Final = {"whole": None, "cut": REPLY_CUT, "more": "reply-too-large"}

CONNECT_ERRORS: Final = {
    errno.ECONNREFUSED: "connection-refused",
    errno.ENETUNREACH: "network-unreachable",
    errno.EHOSTUNREACH: "network-unreachable",
    errno.ETIMEDOUT: "connect-timeout",
    errno.EMFILE: "out-of-files",
    errno.ENFILE: "out-of-files",
}

# In this order: the first that fits.
CODES: Final[dict[type[Exception], str]] = {
    aiohttp.ClientConnectorDNSError: "dns-failed",
    aiohttp.ClientConnectorCertificateError: "tls-certificate",
    aiohttp.ClientConnectorSSLError: "tls-failed",
    aiohttp.ClientResponseError: "protocol-error",  # its status is aiohttp's own, not the peer's
    aiohttp.InvalidURL: "bad-url",
    ValueError: "request-invalid",
}


@dataclass(slots=True)
class Progress:
    """How far a request has come; aiohttp's tracing sets it from inside. `reused`: over a connection that was kept."""

    connected: bool = False
    reused: bool = False


class Wire:
    """The relay's HTTP client: connections are kept and shared by all endpoints. Use as an async context
    manager.

    `tls` and `resolver` replace the system's, for private authorities and for tests.
    """

    def __init__(
        self,
        settings: RelaySettings,
        *,
        tls: ssl.SSLContext | None = None,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._settings = settings
        self._tls = tls
        self._resolver = resolver
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Self:
        self._sessions = {
            "https": self._session(only_allowed=False),
            "http": self._session(only_allowed=True),
            "fresh https": self._session(only_allowed=False, keep=False),
            "fresh http": self._session(only_allowed=True, keep=False),
        }
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions = {}

    def _session(self, *, only_allowed: bool, keep: bool = True) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=0,  # the relay bounds its tries itself, and a try must not spend its deadline in a queue
            ttl_dns_cache=DNS_SECONDS,
            keepalive_timeout=self._settings.keepalive.total_seconds() if keep else None,
            force_close=not keep,
            ssl=self._tls or tls_context(),
            socket_factory=guarded(self._settings.allow, only_allowed=only_allowed),
            resolver=self._resolver,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            headers={"User-Agent": USER_AGENT, "Accept": "*/*", "Accept-Encoding": "identity"},
            trace_configs=[progress_trace()],
        )

    async def send(self, message: Message, endpoint: Endpoint, *, now: datetime) -> Answer:
        """Post `message` once. Never raises for what the network or the peer does; `now` is the time that is
        signed.

        The message's timeout covers everything from the name to the last byte of the answer. A status line
        decides even when the body after it never ends, but where the body is the reply.

        A kept connection may be one that the peer has just closed. So what is cut there is sent once more over a new
        one, as part of the same try; and so is what was misdirected (421). Unless it may be sent only once.
        """
        began = time.monotonic()
        form = form_of(message, endpoint)
        headers = headers_of(message, endpoint, form, now=now)
        message = replace(message, body=form.body)
        answer, stale = await self._post(message, endpoint, headers, began, now)
        if stale and not message.at_most_once:
            answer, _ = await self._post(message, endpoint, headers, began, now, kind="fresh ")
            answer = replace(answer, reached=True, cut_before=stale == "cut")
        return answer

    async def _post(
        self,
        message: Message,
        endpoint: Endpoint,
        headers: dict[str, str],
        began: float,
        now: datetime,
        *,
        kind: str = "",
    ) -> tuple[Answer, Literal["cut", "misdirected"] | None]:
        """The answer, and why a new connection may bring another one."""
        progress = Progress()
        left = message.timeout - since(began)
        try:
            response = await self._sessions[kind + endpoint.url.partition(":")[0].lower()].post(
                endpoint.url,
                data=message.body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(
                    total=max(left.total_seconds(), 0.001),  # nothing would mean for ever
                    connect=self._settings.connect_timeout.total_seconds(),
                ),
                allow_redirects=False,
                ssl=endpoint.tls or True,
                trace_request_ctx=progress,
            )
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            code = code_of(error, progress)
            answer = Answer(error_code=code, reached=progress.connected, duration=since(began))
            return answer, "cut" if progress.reused and code == "connection-cut" else None
        if not 200 <= response.status <= 599:
            response.close()
            return Answer(error_code="protocol-error", reached=True, duration=since(began)), None
        answer = await self._read(message, response, began, now)
        return answer, "misdirected" if response.status == MISDIRECTED else None

    async def _read(
        self, message: Message, response: aiohttp.ClientResponse, began: float, now: datetime
    ) -> Answer:
        content_type = response.headers.get("Content-Type", "")
        replies = message.command and response.status in REPLIES and media_type(content_type) == STRUCTURED
        most = self._settings.response_max
        body, end = await read_up_to(response, EVENT_BYTES_MAX if replies else most)
        return Answer(
            status=response.status,
            error_code=REPLY_FAULTS[end] if replies else None,
            reached=True,
            content_type=content_type[:CONTENT_TYPE_MAX],
            headers=kept(response.headers),
            body=body[:most],
            truncated=end != "whole" or len(body) > most,
            reply=body if replies and end == "whole" else None,
            retry_after=retry_after(response.headers.get("Retry-After", ""), now=now),
            duration=since(began),
        )


def tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def progress_trace() -> aiohttp.TraceConfig:
    config = aiohttp.TraceConfig()

    async def connected(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
        context.trace_request_ctx.connected = True

    async def reused(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
        context.trace_request_ctx.connected = context.trace_request_ctx.reused = True

    config.on_connection_create_end.append(connected)
    config.on_connection_reuseconn.append(reused)
    return config


def since(began: float) -> timedelta:
    return timedelta(seconds=time.monotonic() - began)


def form_of(message: Message, endpoint: Endpoint) -> Binary:
    """The message as it is sent: as it is stored, or in the binary mode, where it goes in that."""
    binary = in_binary(message.body) if endpoint.mode == "binary" else None
    return binary or Binary(message.body, message.content_type, {})


def headers_of(message: Message, endpoint: Endpoint, form: Binary, *, now: datetime) -> dict[str, str]:
    """Signed afresh for each attempt: a receiver refuses a timestamp of five minutes ago."""
    timestamp = int(now.timestamp())
    message_id = str(message.message_id)
    return {
        "Content-Type": form.content_type,
        **form.headers,
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(
            endpoint.secrets, message_id=message_id, timestamp=timestamp, body=form.body
        ),
        "waypost-attempt": str(message.attempt),
        **repeated(message, endpoint.idempotency),
        **endpoint.headers,
    }


def repeated(message: Message, idempotency: str = "bare") -> dict[str, str]:
    """What headers repeat of the signed body, for those who route or trace without reading bodies. `idempotency` is
    how the key is written: `bare`, `quoted` as a structured field, or `off`.

    The span of this hop is a child of the one in the body, which stays what it was when the message was
    created.
    """
    try:
        event: Any = json.loads(message.body)
    except (ValueError, RecursionError):
        return {}  # not ours to judge: the body goes as it was stored
    if not isinstance(event, dict):
        return {}
    attributes = cast("dict[str, Any]", event)
    headers: dict[str, str] = {}
    key = attributes.get("idempotencykey")
    if isinstance(key, str) and key and idempotency != "off":
        bare = quote(key, safe=VISIBLE)
        headers["Idempotency-Key"] = quoted(bare) if idempotency == "quoted" else bare
    parent = attributes.get("traceparent")
    if isinstance(parent, str) and trace.parse(parent):
        headers["traceparent"] = trace.child(parent, trace.hop(message.message_id, message.attempt))
        state = attributes.get("tracestate")
        if isinstance(state, str) and re.fullmatch(r"[\x20-\x7e]{1,512}", state):
            headers["tracestate"] = state
    return headers


def quoted(text: str) -> str:
    """Visible ASCII as a string of structured fields (RFC 9651, section 3.3.3)."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


async def read_up_to(
    response: aiohttp.ClientResponse, limit: int
) -> tuple[bytes, Literal["whole", "cut", "more"]]:
    """At most `limit` bytes of the body, and whether that is the whole of it, or there is more.

    A body that drips until the deadline is cut, like one that breaks off. A connection whose answer was not
    read to its end is closed.
    """
    body = bytearray()
    try:
        while len(body) <= limit:
            chunk = await response.content.read(limit + 1 - len(body))
            if not chunk:
                response.release()
                return bytes(body), "whole"
            body += chunk
    except (aiohttp.ClientError, OSError):
        response.close()
        return bytes(body), "cut"
    except asyncio.CancelledError:
        response.close()
        raise
    response.close()
    return bytes(body[:limit]), "more"


def code_of(error: Exception, progress: Progress) -> str:
    """What went wrong, as a fixed word; never the error's own text, which may name an address."""
    for kind, code in CODES.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, AddressBlocked):
            return "address-blocked"
        return CONNECT_ERRORS.get(error.os_error.errno or 0, "connect-failed")
    if isinstance(error, TimeoutError):
        return "timeout" if progress.connected else "connect-timeout"
    return "connection-cut" if progress.connected else "connect-failed"


def retry_after(value: str, *, now: datetime) -> timedelta | None:
    """How long the peer asks to be left alone: seconds, or a date in one of HTTP's three forms. None for any
    other text.

    Source: RFC 9110, section 10.2.3.
    """
    text = value.strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text, re.ASCII):
        return timedelta(seconds=math.ceil(float(text)))
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return max((date if date.tzinfo else date.replace(tzinfo=UTC)) - now, timedelta(0))
