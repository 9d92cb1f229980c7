from __future__ import annotations

import socket
from datetime import timedelta
from ipaddress import ip_address, ip_network
from uuid import uuid4

import pytest

from contracts.addresses import forbidden
from relay.addresses import AddressBlocked, check_url, guarded
from relay.endpoints import Endpoint
from relay.outbox import Message
from relay.settings import RelaySettings
from relay.wire import Wire
from tests.relay.given import HERE, LOOPBACK, NOON, SECRET, Names
from tests.relay.hostile import answers, hostile

CLOSED = [
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b:1::a00:1",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
]

OPEN = ["1.1.1.1", "8.8.8.8", "172.15.0.1", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8"]


@pytest.mark.parametrize("address", CLOSED)
def test_an_address_that_is_not_public_is_forbidden(address: str) -> None:
    assert forbidden(address) is not None


@pytest.mark.parametrize("address", OPEN)
def test_a_public_address_is_open(address: str) -> None:
    assert forbidden(address) is None


@pytest.mark.parametrize("address", CLOSED)
def test_an_allow_list_opens_exactly_what_it_names(address: str) -> None:
    bare = ip_address(address.partition("%")[0])
    named = getattr(bare, "ipv4_mapped", None) or bare

    assert forbidden(address, allow=[ip_network(named)]) is None
    assert forbidden(address, allow=[ip_network("9.9.9.9/32")]) is not None


def test_a_socket_is_made_for_open_addresses_only() -> None:
    make = guarded([LOOPBACK])

    make((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))).close()
    make((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 1))).close()

    with pytest.raises(AddressBlocked):
        make((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 1)))
    with pytest.raises(AddressBlocked):
        make((socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1%lo", 1, 0, 1)))


def test_plain_http_never_leaves_the_allow_list() -> None:
    make = guarded([LOOPBACK], only_allowed=True)

    make((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))).close()

    with pytest.raises(AddressBlocked):
        make((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 1)))


def test_a_unix_socket_is_no_address() -> None:
    with pytest.raises(AddressBlocked):
        guarded([LOOPBACK])((socket.AF_UNIX, socket.SOCK_STREAM, 0, "", ("/run/x", 0)))


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/waypost",
        "https://hooks.example.com:8443/a/b?c=d&e=%20",
        "https://xn--bcher-kva.example/",
        "https://8.8.8.8/",
        "https://[2606:4700::1111]:8443/",
        "HTTPS://Example.COM./",
    ],
)
def test_a_public_https_url_is_good(url: str) -> None:
    assert check_url(url) == []


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("http://hooks.example.com/", "https"),
        ("file:///etc/passwd", "https"),
        ("gopher://example.com/", "https"),
        ("unix:/run/docker.sock", "https"),
        ("//example.com/", "https"),
        ("https:///path", "host"),
        ("https://", "host"),
        ("https://user@example.com/", "user name"),
        ("https://user:pass@127.0.0.1/", "user name"),
        ("https://example.com/#top", "fragment"),
        ("https://example.com:0/", "port"),
        ("https://example.com:65536/", "URL"),
        ("https://example.com:port/", "URL"),
        ("https://example.com:22/", "port"),
        ("https://example.com:25/", "port"),
        ("https://example.com:6379/", "port"),
        ("https://exa\tmple.com/", "printable"),
        ("https://example.com/\r\nHost: evil", "printable"),
        ("https://example.com/ x", "printable"),
        ("https://example.com\\@127.0.0.1/", "printable"),
        ("https://①②⑦.⓪.⓪.①/", "printable"),
        ("https://１２７.０.０.１/", "printable"),  # noqa: RUF001  # full-width digits are the point
        ("https://127.0.0.1/", "loopback"),
        ("https://[::1]/", "loopback"),
        ("https://[::ffff:127.0.0.1]/", "loopback"),
        ("https://[64:ff9b::7f00:1]/", "NAT64"),
        ("https://[2002:7f00:1::]/", "6to4"),
        ("https://[fe80::1%25eth0]/", "link-local"),
        ("https://169.254.169.254/latest/meta-data/", "link-local"),
        ("https://localhost/", "loopback"),
        ("https://localhost./", "loopback"),
        ("https://x.localhost/", "loopback"),
        ("https://127.1/", "usual form"),
        ("https://2130706433/", "usual form"),
        ("https://0x7f000001/", "usual form"),
        ("https://0x7f.1/", "usual form"),
        ("https://0177.0.0.1/", "usual form"),
        ("https://127.0.0.1./", "usual form"),
        ("https://%31%32%37.0.0.1/", "usual form"),
        ("https://exa_mple..com/", "letters"),
        ("https://-a.example/", "letters"),
        ("https://[::1/", "URL"),
        ("https://" + "a" * 2048, "characters"),
    ],
)
def test_a_bad_url_is_told_what_is_wrong(url: str, word: str) -> None:
    problems = check_url(url)

    assert any(word in problem for problem in problems), problems


@pytest.mark.parametrize("url", ["https://exa\nmple.com/", "https://example.com/\x1b[31m", "x\u202e"])
def test_a_problem_shows_hostile_text_escaped(url: str) -> None:
    text = "; ".join(check_url(url))

    assert text.isascii()
    assert text.isprintable()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9999/x", "http://localhost:9999/", "https://127.0.0.1/"])
def test_an_allow_list_admits_http_and_its_own_addresses(url: str) -> None:
    assert check_url(url, allow=[LOOPBACK]) == []


def command(**changes: object) -> Message:
    values: dict[str, object] = {
        "tenant_id": 1,
        "message_id": uuid4(),
        "token": uuid4(),
        "attempt": 1,
        "endpoint": "payments",
        "content_type": "application/cloudevents+json",
        "body": b"{}",
        "timeout": timedelta(seconds=10),
        "command": True,
        "replies_from": "payments",
        **changes,
    }
    return Message(**values)  # pyright: ignore[reportArgumentType]  # a test's shorthand


HOSTS = [
    "127.0.0.1",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "0x7f000001",
    "localhost",
    "localhost.",
    "127.0.0.1.",
    "127.1",
    "2130706433",
    "１２７.０.０.１",  # noqa: RUF001  # full-width digits are the point
    "①②⑦.⓪.⓪.①",
    "169.254.169.254",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
]


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("host", HOSTS)
async def test_a_blocked_address_is_never_dialled(host: str, scheme: str) -> None:
    async with hostile(answers(204)) as server, Wire(RelaySettings()) as wire:
        url = f"{scheme}://{host}:{server.port}/"

        answer = await wire.send(command(), Endpoint(url, (SECRET,)), now=NOON)

        assert answer.status is None
        assert not answer.reached
        assert answer.error_code in {"address-blocked", "bad-url", "dns-failed"}
        assert server.connections == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"])
async def test_an_allowed_address_is_dialled(host: str) -> None:
    async with hostile(answers(204)) as server, Wire(HERE) as wire:
        url = f"http://{host}:{server.port}/"

        answer = await wire.send(command(), Endpoint(url, (SECRET,)), now=NOON)

        assert answer.status == 204


async def test_a_name_that_changes_its_mind_is_caught_at_the_next_connection() -> None:
    """The check is where the socket is made, so there is no moment between check and use."""
    names = Names(rebound_test=["127.0.0.2", "169.254.169.254"])
    settings = RelaySettings(allow=(ip_network("127.0.0.2/32"),), keepalive=timedelta(milliseconds=1))
    async with Wire(settings, resolver=names) as wire:
        target = Endpoint("http://rebound.test:9/", (SECRET,))

        first = await wire.send(command(), target, now=NOON)
        for session in wire._sessions.values():  # pyright: ignore[reportPrivateUsage]  # forget the name, as time would
            session.connector.clear_dns_cache()  # pyright: ignore[reportOptionalMemberAccess, reportUnknownMemberType, reportAttributeAccessIssue]
        second = await wire.send(command(), target, now=NOON)

    assert first.error_code == "connection-refused"
    assert second.error_code == "address-blocked"
