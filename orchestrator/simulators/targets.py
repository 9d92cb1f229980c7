"""Whom a simulated provider may post to: what posts must be no weapon.

Without a word that is this machine and private networks. A host elsewhere must be named twice, in the URL and as
allowed; link-local addresses, where clouds keep their secrets, are closed to all. What counts is the address that is
dialled, so a name that leads elsewhere is no way around it.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from ipaddress import ip_network
from typing import Final
from urllib.parse import urlsplit

from contracts.errors import ContractViolation, shown
from relay.addresses import CLOSED_PORTS, URL_CHARACTERS_MAX, SocketFactory, forbidden, guarded

PRIVATE: Final = tuple(
    ip_network(network)
    for network in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7")
)


class TargetRefused(ContractViolation):
    """A URL that a simulated provider must not post to."""

    code = "target-refused"
    http_status = 403


def host_of(url: str) -> str:
    """The host of a URL that one may post to. Raises TargetRefused."""
    if len(url) > URL_CHARACTERS_MAX or re.search(r"[^\x21-\x7e]|[\\\"<>^`{|}]", url):
        raise TargetRefused(f"to: expected a URL of at most {URL_CHARACTERS_MAX} plain characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise TargetRefused(f"to: expected a URL, found {shown(url)}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise TargetRefused(f"to: expected http://HOST or https://HOST, found {shown(url)}")
    if "@" in parts.netloc:
        raise TargetRefused("to: expected no user name or password in the URL")
    if port in CLOSED_PORTS or port == 0:
        raise TargetRefused(f"to: expected another port than {port}: it belongs to another protocol")
    return host


def sockets(host: str, allowed: Sequence[str]) -> SocketFactory:
    """Makes sockets towards addresses that `host` may have."""
    return guarded(PRIVATE, only_allowed=not is_allowed(host, allowed))


def is_allowed(host: str, allowed: Sequence[str]) -> bool:
    return host.lower() in {name.lower() for name in allowed}


async def check(url: str, allowed: Sequence[str]) -> None:
    """Say at once what `sockets` would say later, and whether nobody knows the host. Raises TargetRefused."""
    host = host_of(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        raise TargetRefused(f"to: expected a host that is known here, found {shown(host)}") from None
    addresses = {str(each[4][0]) for each in found}
    if is_allowed(host, allowed):
        if all(forbidden(address, allow=PRIVATE) for address in addresses):
            raise TargetRefused(f"to: {shown(host)} is closed, whoever allows it")
    elif not any(map(is_private, addresses)):
        raise TargetRefused(
            f"to: expected this machine or a private network, found {shown(host)}; who may post there says"
            f" --allow-host {host}"
        )


def is_private(address: str) -> bool:
    """Whether it is one of PRIVATE: closed, unless those are allowed."""
    return bool(forbidden(address)) and not forbidden(address, allow=PRIVATE)
