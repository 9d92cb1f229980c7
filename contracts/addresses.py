"""Which addresses lead out of the machine and its networks, and which do not.

URLs come from people, names from DNS, and both can lie about where they lead. So whoever dials asks this of the very
address that is about to be dialled.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

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


def within(address: Address, networks: Iterable[Network]) -> bool:
    """Whether an address, or the one that the kernel would dial, is in one of `networks`."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any((mapped or address) in network for network in networks)


def may_be_dialled(host: str, *, allow: tuple[Network, ...], only_allowed: bool = False) -> bool:
    """Whether the address `host`, as a socket has it, may be called: one that is `allow`ed, and one that is public
    unless `only_allowed`.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    return not forbidden(address, allow=allow) and (not only_allowed or within(address, allow))
