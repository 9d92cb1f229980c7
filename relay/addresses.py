"""Whom the relay may call. URLs come from people, names from DNS, and both can lie about where they lead.

The wall is `guarded`: it makes the socket, so it sees the very address that would be dialled, whether it came
from a literal, a name, a name that changed its mind, or digits in another script. `check_url` is only
politeness: it tells somebody who registers an endpoint at once what the wall would say later.
"""

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import urlsplit

from contracts.errors import shown

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
AddressInfo = tuple[
    int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]
]
SocketFactory = Callable[[AddressInfo], socket.socket]

URL_CHARACTERS_MAX: Final = 2048

# `is_global` is not enough: of these, Python 3.11 calls multicast, NAT64, 6to4, fec0::/10 and some more
# global. Sources: the IANA special-purpose address registries; RFC 6890.
CLOSED: Final = {
    ipaddress.ip_network(network): reason
    for network, reason in {
        "0.0.0.0/8": "this host",
        "10.0.0.0/8": "private",
        "100.64.0.0/10": "shared by a carrier",
        "127.0.0.0/8": "loopback",
        "169.254.0.0/16": "link-local",
        "172.16.0.0/12": "private",
        "192.0.0.0/24": "reserved",
        "192.0.2.0/24": "documentation",
        "192.88.99.0/24": "6to4 relay",
        "192.168.0.0/16": "private",
        "198.18.0.0/15": "benchmarks",
        "198.51.100.0/24": "documentation",
        "203.0.113.0/24": "documentation",
        "224.0.0.0/4": "multicast",
        "240.0.0.0/4": "reserved",
        "::/96": "this host, loopback or IPv4-compatible",
        "64:ff9b::/96": "NAT64",
        "64:ff9b:1::/48": "NAT64",
        "100::/64": "discard",
        "2001::/32": "Teredo",
        "2001:db8::/32": "documentation",
        "2002::/16": "6to4",
        "3fff::/20": "documentation",
        "5f00::/16": "segment routing",
        "fc00::/7": "private",
        "fe80::/10": "link-local",
        "fec0::/10": "site-local",
        "ff00::/8": "multicast",
    }.items()
}

# Ports of services that would take an HTTP request for commands of theirs; above 1024 the common databases.
CLOSED_PORTS: Final = frozenset(range(1, 1024)) - {80, 443} | {
    1433,
    1521,
    2049,
    3306,
    5432,
    6379,
    11211,
    27017,
}


class AddressBlocked(OSError):
    """The endpoint's name leads to an address that the relay must not call.

    An OSError, so that the next address of the name is tried. It never names the address: whoever registers
    endpoints shall not be able to map the relay's network by reading errors.
    """

    def __init__(self) -> None:
        super().__init__("the endpoint's address is blocked")


def forbidden(address: str | Address, *, allow: Iterable[Network] = ()) -> str | None:
    """Why `address` must not be called, or None when it may be.

    An IPv4-mapped address is judged as the IPv4 address that the kernel would dial. `allow` overrides every
    reason.
    """
    if isinstance(address, str):
        address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in allow):
        return None
    for network, reason in CLOSED.items():
        if address in network:
            return reason
    return None if address.is_global else "not global"


def guarded(allow: Iterable[Network], *, only_allowed: bool = False) -> SocketFactory:
    """A maker of sockets for `aiohttp.TCPConnector(socket_factory=…)` that makes none towards a forbidden
    address.

    `only_allowed` closes the public addresses too; it is for plain HTTP, which may not leave the operator's
    networks.
    """
    allowed = tuple(allow)

    def make(info: AddressInfo) -> socket.socket:
        family, kind, protocol, _, target = info
        if family not in (socket.AF_INET, socket.AF_INET6):
            raise AddressBlocked
        address = ipaddress.ip_address(target[0].partition("%")[0])
        if forbidden(address, allow=allowed) or (only_allowed and not _within(address, allowed)):
            raise AddressBlocked
        return socket.socket(family, kind, protocol)

    return make


def _within(address: Address, networks: Iterable[Network]) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any((mapped or address) in network for network in networks)


def check_url(url: str, *, allow: Iterable[Network] = ()) -> list[str]:
    """What is wrong with `url` as an endpoint's address; empty when nothing is.

    Looks at the raw text: parsers repair what they are given (a tab inside a host disappears), and a repaired
    URL is not the one that a person has seen. A name is not resolved here; where it leads is checked at each
    connection. Plain http is accepted only with an allow-list, and then reaches only what that list names.
    """
    if len(url) > URL_CHARACTERS_MAX:
        return [f"expected at most {URL_CHARACTERS_MAX} characters, found {len(url)}"]
    if found := re.search(r"[^\x21-\x7e]|[\\\"<>^`{|}]", url):
        return [
            f"expected printable ASCII without spaces, found {shown(found[0])} (write other letters encoded)"
        ]
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        return [f"expected a URL, found {shown(url)} ({shown(str(error))})"]
    allowed = tuple(allow)
    return [
        *_scheme_problems(parts.scheme, allowed),
        *(["expected no user name or password in the URL"] if "@" in parts.netloc else []),
        *([f"expected no fragment, found #{shown(parts.fragment)}"] if "#" in url else []),
        *(
            [f"expected another port than {port}: it belongs to another protocol"]
            if port in CLOSED_PORTS
            else []
        ),
        *(["expected a port from 1 to 65535, found 0"] if port == 0 else []),
        *_host_problems(parts.scheme, host, allowed),
    ]


def _scheme_problems(scheme: str, allow: tuple[Network, ...]) -> list[str]:
    if scheme == "https" or (scheme == "http" and allow):
        return []
    if scheme == "http":
        return [
            "expected https; plain http reaches only what WAYPOST_ALLOW_ADDRESSES lists, and it lists nothing"
        ]
    return [f"expected https, found {shown(scheme)}"]


def _host_problems(scheme: str, host: str, allow: tuple[Network, ...]) -> list[str]:
    if not host:
        return ["expected a host, found none"]
    bare = host.removesuffix(".")
    if bare == "localhost" or bare.endswith(".localhost"):
        reason = forbidden("127.0.0.1", allow=allow) and forbidden("::1", allow=allow)
        return [closed(host, reason)] if reason else []
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return _name_problems(host)
    reason = forbidden(address, allow=allow)
    if reason:
        return [closed(host, reason)]
    if scheme == "http" and not _within(address, allow):
        return ["expected https; plain http reaches only what WAYPOST_ALLOW_ADDRESSES lists"]
    return []


def closed(host: str, reason: str) -> str:
    return f"host {shown(host)} is closed: {reason}; WAYPOST_ALLOW_ADDRESSES may list its network"


def _name_problems(host: str) -> list[str]:
    bare = host.removesuffix(".")
    if re.fullmatch(
        r"(0x[0-9a-f]*|[0-9]+)", bare.rpartition(".")[2]
    ):  # WHATWG: such a host is an IPv4 address
        return [f"expected a name or an address in its usual form, found {shown(host)}"]
    if len(bare) > 253 or not all(
        re.fullmatch(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?", p) for p in bare.split(".")
    ):
        return [f"expected a host name of letters, digits and hyphens, found {shown(host)}"]
    return []
