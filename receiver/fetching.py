"""Participant: data that a command names, got before its handler is called.

The URL stands in a signed command, and is not believed for that: it must be of an origin that the service's own
settings name, the address that is dialled must be one that may be, nothing is followed, and what comes is bounded
and compared.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from contracts import strict_json
from contracts.addresses import Network, may_be_dialled
from contracts.dataref import DataAway, DataWrong, Named, checked, named
from contracts.envelope import Envelope, media_type
from contracts.errors import ContractViolation, shown
from contracts.limits import DATA_CONNECT_SECONDS, DATA_FETCH_SECONDS, PAYLOAD_STORED_BYTES_MAX

VISIBLE: Final = re.compile(r"[\x21-\x5b\x5d-\x7e]+")
"""What a URL may be made of here: parsers repair the rest, each in its way."""
PORTS: Final = {"http": 80, "https": 443}
LOCAL: Final = (ip_network("127.0.0.0/8"), ip_network("::1/128"))

Origin = tuple[str, str, int]
"""Scheme, host, port."""


class AddressClosed(OSError):
    """A name leads to an address that is not public, and that the settings do not name."""


class Fetcher:
    """Gets data from `origins`, such as https://waypost.example, and from nowhere else. Use as an async context
    manager.

    An address that is not public is dialled only when it is in `networks`, or is itself what an origin names. Over
    plain http no other is. Raises ValueError for an origin that is none.
    """

    def __init__(self, origins: Sequence[str], networks: Sequence[str] = ()) -> None:
        self._origins = {checked_origin(one) for one in origins}
        own = [network for _, host, _ in self._origins for network in own_networks(host)]
        self._allow: tuple[Network, ...] = (*map(ip_network, networks), *own)
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Self:
        self._sessions = {scheme: self._session(only_allowed=scheme == "http") for scheme in PORTS}
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions = {}

    def _session(self, *, only_allowed: bool) -> aiohttp.ClientSession:
        def dial(info: tuple[Any, ...]) -> socket.socket:
            family, kind, protocol, _, target = info
            if family not in (socket.AF_INET, socket.AF_INET6) or not may_be_dialled(
                target[0], allow=self._allow, only_allowed=only_allowed
            ):
                raise AddressClosed("the address is not public, and no setting names it")
            return socket.socket(family, kind, protocol)

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=dial, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            headers={"Accept": "*/*", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=DATA_FETCH_SECONDS, connect=DATA_CONNECT_SECONDS),
        )

    async def whole(self, event: Envelope) -> Envelope:
        """`event` with the data that it names. Raises DataAway, when it may be had later; DataWrong, when never."""
        one = named(event)
        data = await self._got(one)
        return replace(event, data=await asyncio.to_thread(read, event, one, data))

    async def _got(self, one: Named) -> bytes:
        origin = origin_of(one.url)
        if origin not in self._origins:
            raise DataAway("data-origin", "expected it at an origin that data_from= names")
        try:
            async with self._sessions[origin[0]].get(
                URL(one.url, encoded=True), allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    raise DataAway("data-status", f"expected status 200, found {answer.status}")
                if answer.headers.get("content-encoding", "identity").lower() != "identity":
                    raise DataAway("data-encoded", "expected it without a content-encoding")
                return await up_to(answer, one.size + 1)
        except TimeoutError:
            raise DataAway("data-timeout", f"expected it within {DATA_FETCH_SECONDS:.0f} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if is_closed(error):
                why = "expected a public address, or one in data_networks="
                raise DataAway("data-address-closed", why) from None
            raise DataAway("data-connection", type(error).__name__) from None


async def up_to(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, or the first `most` bytes of it, should it be longer."""
    found = bytearray()
    async for chunk in answer.content.iter_any():
        found += chunk
        if len(found) >= most:
            break
    return bytes(found[:most])


def read(event: Envelope, one: Named, data: bytes) -> Any:
    """`data` compared with what the event says, and as it would carry them. Raises DataWrong."""
    checked(one, data)
    kind = media_type(event.datacontenttype or "application/json")
    if kind != "application/json" and not kind.endswith("+json"):
        return data
    try:
        return strict_json.decode(data, what="data", bytes_max=PAYLOAD_STORED_BYTES_MAX)
    except ContractViolation as error:
        raise DataWrong(str(error)) from None


def is_closed(error: BaseException) -> bool:
    """Whether no address that may be dialled was left, wherever in `error` that stands."""
    if isinstance(error, AddressClosed):
        return True
    if isinstance(error, aiohttp.ClientConnectorError):
        return is_closed(error.os_error)
    inner: Sequence[BaseException] = getattr(error, "exceptions", ())
    return bool(inner) and all(map(is_closed, inner))


def checked_origin(text: str) -> Origin:
    found = origin_of(text)
    if found is None or urlsplit(text).path not in ("", "/"):
        raise ValueError(f"data_from: expected origins such as https://waypost.example, found {shown(text)}")
    return found


def origin_of(url: str) -> Origin | None:
    """None for what is no plain http or https URL."""
    if not VISIBLE.fullmatch(url):
        return None
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in PORTS or not host or "@" in parts.netloc:
        return None
    return parts.scheme, host, PORTS[parts.scheme] if port is None else port


def own_networks(host: str) -> list[Network]:
    """The addresses that an origin itself names."""
    if host == "localhost":
        return [*LOCAL]
    try:
        return [ip_network(ip_address(host))]
    except ValueError:
        return []
