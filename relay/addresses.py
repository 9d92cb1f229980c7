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

from contracts.addresses import Network, forbidden, may_be_dialled, within
from contracts.errors import shown

AddressInfo = tuple[
    int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]
]
SocketFactory = Callable[[AddressInfo], socket.socket]

URL_CHARACTERS_MAX: Final = 2048

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
        if not may_be_dialled(target[0], allow=allowed, only_allowed=only_allowed):
            raise AddressBlocked
        return socket.socket(family, kind, protocol)

    return make


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
    if scheme == "http" and not within(address, allow):
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
