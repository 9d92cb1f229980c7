from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from standardwebhooks import Webhook

from contracts import trace
from contracts.signature import Secret
from relay.endpoints import Endpoint
from relay.outbox import Message
from relay.settings import RelaySettings
from relay.wire import Wire, retry_after, tls_context
from tests.relay.certificates import HOST, Certificate, self_signed
from tests.relay.given import HERE, LOOPBACK, NOON, SECRET, Names, body_of
from tests.relay.hostile import (
    Behaviour,
    Exchange,
    answers,
    cuts_after_reading,
    cuts_before_reading,
    cuts_inside_the_status_line,
    drips,
    floods,
    hangs,
    hostile,
    in_turn,
    response,
    says,
    then,
)

LONG = timedelta(seconds=30)  # a deadline that a test must not come to
SHORT = timedelta(milliseconds=300)  # a deadline that a test waits for


def command(
    *, attempt: int = 1, body: bytes | None = None, timeout: timedelta = LONG, **changes: Any
) -> Message:
    message_id = uuid4()
    return Message(
        tenant_id=1,
        message_id=message_id,
        token=uuid4(),
        attempt=attempt,
        endpoint="payments",
        content_type=changes.get("content_type", "application/cloudevents+json"),
        body=body_of(message_id, uuid4()) if body is None else body,
        timeout=timeout,
        command=True,
        replies_from="payments",
        at_most_once=changes.get("at_most_once", False),
    )


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with Wire(HERE) as wire:
        yield wire


def to(url: str, *secrets: Secret) -> Endpoint:
    return Endpoint(url, secrets or (SECRET,))


# Connections that were kept


def closes_after(status: int) -> Behaviour:
    """The first request of each connection is answered; the second is read, and the connection is cut."""

    async def behave(exchange: Exchange) -> None:
        await exchange.read()
        await exchange.write(response(status))
        await exchange.read()

    return behave


async def test_what_is_cut_on_a_kept_connection_is_sent_once_more_on_a_new_one_within_the_try(
    wire: Wire,
) -> None:
    async with hostile(closes_after(204)) as server:
        await wire.send(command(), to(server.url), now=NOON)
        message = command()

        answer = await wire.send(message, to(server.url), now=NOON)

        cut, again = server.requests[1:]
        assert (answer.status, answer.cut_before, server.connections) == (204, True, 2)
        assert cut.body == again.body == message.body
        assert again.headers == {**cut.headers, "connection": "close"}


async def test_what_is_sent_at_most_once_is_not_sent_again_on_a_new_connection(wire: Wire) -> None:
    async with hostile(closes_after(204)) as server:
        await wire.send(command(), to(server.url), now=NOON)

        answer = await wire.send(command(at_most_once=True), to(server.url), now=NOON)

        assert (answer.error_code, answer.reached, len(server.requests)) == ("connection-cut", True, 2)


async def test_what_is_cut_on_a_new_connection_is_not_sent_again_within_the_try(wire: Wire) -> None:
    async with hostile(cuts_after_reading) as server:
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert (answer.error_code, len(server.requests)) == ("connection-cut", 1)


async def test_what_was_misdirected_is_sent_once_more_on_a_new_connection(wire: Wire) -> None:
    async with hostile(in_turn(then(421), then(204))) as server:
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert (answer.status, answer.cut_before, server.connections) == (204, False, 2)


# What is sent


async def test_a_request_is_the_stored_bytes_under_a_signature_that_others_verify(wire: Wire) -> None:
    async with hostile(answers(204)) as server:
        message = command()

        await wire.send(message, to(server.url), now=datetime.now(UTC))

        [request] = server.requests
        assert request.line == "POST /hook?a=b HTTP/1.1"
        assert request.body == message.body
        assert Webhook(SECRET.text).verify(request.body, request.headers) == json.loads(message.body)


async def test_each_attempt_has_a_timestamp_and_signature_of_its_own_over_the_same_bytes(wire: Wire) -> None:
    async with hostile(answers(204)) as server:
        message = command()

        await wire.send(message, to(server.url), now=NOON)
        await wire.send(message, to(server.url), now=NOON + timedelta(minutes=10))

        first, second = server.requests
        assert first.body == second.body
        assert first.headers["webhook-id"] == second.headers["webhook-id"] == str(message.message_id)
        assert int(second.headers["webhook-timestamp"]) - int(first.headers["webhook-timestamp"]) == 600
        assert first.headers["webhook-signature"] != second.headers["webhook-signature"]


async def test_every_live_secret_signs(wire: Wire) -> None:
    old = Secret.of(b"the secret that is being replaced")
    async with hostile(answers(204)) as server:
        await wire.send(command(), to(server.url, SECRET, old), now=datetime.now(UTC))

        [request] = server.requests
        for secret in (SECRET, old):
            Webhook(secret.text).verify(request.body, request.headers)


async def test_headers_repeat_what_the_signed_body_says(wire: Wire) -> None:
    async with hostile(answers(204)) as server:
        message = command(attempt=3)

        await wire.send(message, to(server.url), now=NOON)

        [request] = server.requests
        event = json.loads(message.body)
        parent, hop = trace.parse(event["traceparent"]), trace.parse(request.headers["traceparent"])
        assert request.headers["idempotency-key"] == event["idempotencykey"]
        assert request.headers["waypost-attempt"] == "3"
        assert request.headers["content-type"] == "application/cloudevents+json"
        assert request.headers["user-agent"] == "Waypost"
        assert parent is not None
        assert hop is not None
        assert hop.trace_id == parent.trace_id
        assert hop.span_id != parent.span_id


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[1, 2]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"idempotencykey": 7, "traceparent": "nonsense", "tracestate": "a\\r\\nb: c"}',
        b'{"idempotencykey": ""}',
    ],
)
async def test_a_body_that_says_nothing_goes_as_it_is(wire: Wire, body: bytes) -> None:
    async with hostile(answers(204)) as server:
        answer = await wire.send(command(body=body), to(server.url), now=datetime.now(UTC))

        [request] = server.requests
        assert answer.status == 204
        assert request.body == body
        assert not {"idempotency-key", "traceparent", "tracestate"} & request.headers.keys()


async def test_no_header_can_be_smuggled_through_an_idempotency_key(wire: Wire) -> None:
    async with hostile(answers(204)) as server:
        body = json.dumps({"idempotencykey": "a\r\nX-Evil: 1\u00e9\u202e%/#2"}).encode()

        await wire.send(command(body=body), to(server.url), now=NOON)

        [request] = server.requests
        assert "x-evil" not in request.headers
        assert request.headers["idempotency-key"] == "a%0D%0AX-Evil:%201%C3%A9%E2%80%AE%25/#2"


async def test_a_content_type_that_would_break_the_request_is_never_sent(wire: Wire) -> None:
    async with hostile(answers(204)) as server:
        message = command(content_type="text/plain\r\nX-Evil: 1")

        answer = await wire.send(message, to(server.url), now=NOON)

        assert answer.error_code == "request-invalid"
        assert server.requests == []


# What comes back


@pytest.mark.parametrize("status", [200, 202, 204, 301, 307, 400, 404, 410, 422, 429, 500, 503, 599])
async def test_the_status_is_the_peers_own_word(wire: Wire, status: int) -> None:
    async with hostile(answers(status, body=b"" if status == 204 else b"so it is")) as server:
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert (answer.status, answer.error_code, answer.reached) == (status, None, True)
        assert answer.body == (b"" if status == 204 else b"so it is")
        assert not answer.truncated


async def test_a_redirect_is_not_followed(wire: Wire) -> None:
    async with hostile(answers(204)) as target, hostile(answers(307, f"Location: {target.url}")) as server:
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert answer.status == 307
        assert target.connections == 0


async def test_connections_are_used_again(wire: Wire) -> None:
    async with hostile(answers(202, body=b"taken")) as server:
        for _ in range(3):
            await wire.send(command(), to(server.url), now=NOON)

        assert len(server.requests) == 3
        assert server.connections == 1


async def test_a_connection_that_the_server_closed_while_it_was_idle_is_not_used_again(wire: Wire) -> None:
    closed = asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        await exchange.read()
        await exchange.write(response(204))
        if exchange.server.connections == 1:
            exchange.writer.write_eof()
        await exchange.left()  # the client has seen the end, too
        closed.set()

    async with hostile(behave) as server:
        await wire.send(command(), to(server.url), now=NOON)
        async with asyncio.timeout(LONG.total_seconds()):
            await closed.wait()

        answer = await wire.send(command(), to(server.url), now=NOON)

        assert (answer.status, answer.error_code) == (204, None)
        assert (len(server.requests), server.connections) == (2, 2)


async def test_a_connection_that_nobody_needs_is_closed() -> None:
    """So that of an endpoint that is removed nothing stays open."""
    closed = asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        await exchange.read()
        await exchange.write(response(204))
        await exchange.left()
        closed.set()

    async with Wire(replace(HERE, keepalive=timedelta(milliseconds=20))) as wire, hostile(behave) as server:
        await wire.send(command(), to(server.url), now=NOON)

        async with asyncio.timeout(LONG.total_seconds()):
            await closed.wait()


async def test_no_more_than_the_limit_of_a_body_is_kept(wire: Wire) -> None:
    async with hostile(floods(500)) as server:
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert answer.status == 500
        assert answer.body == b"\x00" * HERE.response_max
        assert answer.truncated


async def test_a_body_of_exactly_the_limit_is_whole(wire: Wire) -> None:
    async with hostile(answers(200, body=b"x" * HERE.response_max)) as server:
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert len(answer.body) == HERE.response_max
        assert not answer.truncated


async def test_a_compressed_body_is_kept_as_it_came(wire: Wire) -> None:
    """Nothing is unpacked, so nothing can explode."""
    async with hostile(answers(200, "Content-Encoding: gzip", body=b"\x1f\x8bnot gzip")) as server:
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert answer.status == 200
        assert answer.body == b"\x1f\x8bnot gzip"


@pytest.mark.parametrize("status", [200, 503])
async def test_a_body_that_drips_for_ever_does_not_hide_the_status(wire: Wire, status: int) -> None:
    async with hostile(drips(status)) as server:
        answer = await wire.send(command(timeout=SHORT), to(server.url), now=NOON)

        assert answer.status == status
        assert answer.body == b"x"
        assert answer.truncated


async def test_a_body_that_breaks_off_does_not_hide_the_status(wire: Wire) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.read()
        await exchange.write(b"HTTP/1.1 202 OK\r\nContent-Length: 100\r\n\r\nbroken")

    async with hostile(behave) as server:
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert answer.status == 202
        assert answer.truncated


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (hangs, "timeout"),
        (says(b""), "timeout"),
        (says(b"HTTP/1.1 200 OK\r\nX-Slow: "), "timeout"),
        (says(b"HTTP/1.1 100 Continue\r\n\r\n" * 3), "timeout"),
    ],
    ids=["hangs", "silent", "drips its head", "continues only"],
)
async def test_no_answer_in_time_may_have_reached_the_service(
    wire: Wire, behaviour: Behaviour, code: str
) -> None:
    async with hostile(behaviour) as server:
        answer = await wire.send(command(timeout=SHORT), to(server.url), now=NOON)

        assert (answer.status, answer.error_code, answer.reached) == (None, code, True)


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (cuts_before_reading, "connection-cut"),
        (cuts_after_reading, "connection-cut"),
        (cuts_inside_the_status_line, "connection-cut"),
        (says(b"nonsense\r\n\r\n"), "protocol-error"),
        (says(b"HTTP/1.1 banana OK\r\n\r\n"), "protocol-error"),
        (says(b"HTTP/1.1 99999 OK\r\n\r\n"), "protocol-error"),
        (says(b"HTTP/1.1 777 Jackpot\r\nContent-Length: 0\r\n\r\n"), "protocol-error"),
        (says(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"), "protocol-error"),
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"), "protocol-error"),
        (says(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20_000 + b"\r\n\r\n"), "protocol-error"),
        (says(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n"), "protocol-error"),
    ],
    ids=[
        "cut before reading",
        "cut after reading",
        "cut in the status line",
        "no HTTP",
        "no status",
        "status too long",
        "unknown status",
        "switching protocols",
        "two lengths",
        "huge header",
        "many headers",
    ],
)
async def test_a_broken_answer_may_have_reached_the_service(
    wire: Wire, behaviour: Behaviour, code: str
) -> None:
    async with hostile(behaviour) as server:
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert (answer.status, answer.error_code, answer.reached) == (None, code, True)


async def test_a_connection_that_the_server_closed_meanwhile_is_not_provably_unreached(wire: Wire) -> None:
    """The request may have been read and the answer lost; only the service could tell."""

    async def cut(exchange: Exchange, _request: object) -> None:
        exchange.writer.transport.abort()

    async with hostile(in_turn(then(204), cut)) as server:
        await wire.send(command(), to(server.url), now=NOON)
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert answer.error_code == "connection-cut"
        assert answer.reached


# What never arrives


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_refused_connection_reached_nobody(wire: Wire) -> None:
    answer = await wire.send(command(), to(f"http://127.0.0.1:{free_port()}/"), now=NOON)

    assert (answer.status, answer.error_code, answer.reached) == (None, "connection-refused", False)


async def test_a_name_that_does_not_exist_reached_nobody(wire: Wire) -> None:
    answer = await wire.send(command(), to("https://nowhere.invalid/"), now=NOON)

    assert (answer.status, answer.error_code, answer.reached) == (None, "dns-failed", False)


async def test_a_connection_that_never_comes_about_reached_nobody() -> None:
    """A listener whose backlog is full leaves the handshake unanswered."""
    settings = RelaySettings(allow=(LOOPBACK,), connect_timeout=SHORT)
    with socket.socket() as listener, socket.socket() as filler, socket.socket() as another:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for each in (filler, another):
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        async with Wire(settings) as wire:
            answer = await wire.send(
                command(), to(f"http://127.0.0.1:{listener.getsockname()[1]}/"), now=NOON
            )

    assert (answer.status, answer.error_code, answer.reached) == (None, "connect-timeout", False)


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return self_signed(tmp_path)


def at(server_port: int, host: str = HOST) -> str:
    return f"https://{host}:{server_port}/"


NAMES = {HOST.replace(".", "_"): ["127.0.0.1"], "other_example_test": ["127.0.0.1"]}


async def test_a_trusted_certificate_is_spoken_to(certificate: Certificate) -> None:
    async with (
        hostile(answers(204), tls=certificate.server) as server,
        Wire(HERE, tls=certificate.client, resolver=Names(**NAMES)) as wire,
    ):
        answer = await wire.send(command(), to(at(server.port)), now=NOON)

        assert answer.status == 204


@pytest.mark.parametrize("host", [HOST, "other.example.test"], ids=["unknown authority", "another name"])
async def test_a_certificate_that_does_not_fit_reached_nobody(certificate: Certificate, host: str) -> None:
    trusts = certificate.client if host != HOST else None
    async with (
        hostile(answers(204), tls=certificate.server) as server,
        Wire(HERE, tls=trusts, resolver=Names(**NAMES)) as wire,
    ):
        answer = await wire.send(command(), to(at(server.port, host)), now=NOON)

        assert (answer.status, answer.error_code, answer.reached) == (None, "tls-certificate", False)
        assert server.requests == []


async def test_a_server_without_tls_reached_nobody() -> None:
    async def greets(exchange: Exchange) -> None:
        await exchange.write(b"220 mail.example.test ESMTP\r\n")
        await exchange.left()

    async with hostile(greets) as server, Wire(HERE, resolver=Names(**NAMES)) as wire:
        answer = await wire.send(command(), to(at(server.port)), now=NOON)

        assert (answer.status, answer.error_code, answer.reached) == (None, "tls-failed", False)


async def test_a_handshake_that_hangs_reached_nobody() -> None:
    async def hangs_in_handshake(exchange: Exchange) -> None:
        await exchange.left()

    settings = RelaySettings(allow=(LOOPBACK,), connect_timeout=SHORT)
    async with hostile(hangs_in_handshake) as server, Wire(settings, resolver=Names(**NAMES)) as wire:
        answer = await wire.send(command(), to(at(server.port)), now=NOON)

        assert (answer.status, answer.error_code, answer.reached) == (None, "connect-timeout", False)


async def test_a_handshake_that_is_cut_reached_nobody() -> None:
    async with hostile(cuts_before_reading) as server, Wire(HERE, resolver=Names(**NAMES)) as wire:
        answer = await wire.send(command(), to(at(server.port)), now=NOON)

        assert answer.status is None
        assert not answer.reached


def test_tls_is_verified_and_not_old() -> None:
    context = tls_context()

    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


# Retry-After


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", timedelta(0)),
        ("120", timedelta(minutes=2)),
        (" 7 ", timedelta(seconds=7)),
        ("1.2", timedelta(seconds=2)),
        ("Mon, 01 Jun 2020 12:00:30 GMT", timedelta(seconds=30)),
        ("Monday, 01-Jun-20 12:00:30 GMT", timedelta(seconds=30)),
        ("Mon Jun  1 12:00:30 2020", timedelta(seconds=30)),
        ("Mon, 01 Jun 2020 11:00:00 GMT", timedelta(0)),
        ("", None),
        ("-5", None),
        ("+5", None),
        ("soon", None),
        ("1e9", None),
        ("９", None),  # noqa: RUF001  # a full-width digit is no digit
        ("9" * 400, None),
        ("Mon, 99 Jun 2020 12:00:30 GMT", None),
        ("Mon, 01 Jun 2020 12:00:30 +99999999", None),
    ],
)
def test_retry_after_is_read_in_all_forms_of_http(text: str, wanted: timedelta | None) -> None:
    assert retry_after(text, now=NOON) == wanted


async def test_retry_after_comes_with_the_answer(wire: Wire) -> None:
    async with hostile(answers(429, "Retry-After: 30")) as server:
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert answer.retry_after == timedelta(seconds=30)


async def test_an_answer_never_holds_what_the_peer_wrote_as_its_error(wire: Wire) -> None:
    async with hostile(says(b"HTTP/1.1 \x1b[31mevil\r\n\r\n")) as server:
        answer = await wire.send(command(), to(server.url), now=NOON)

        assert re.fullmatch(r"[a-z-]+", answer.error_code or "")


async def test_many_tries_run_side_by_side(wire: Wire) -> None:
    """The client has no queue of its own: a try that waited there would lose its deadline."""
    together = asyncio.Barrier(80)

    async def behave(exchange: Exchange) -> None:
        await exchange.read()
        await together.wait()
        await exchange.write(b"HTTP/1.1 204 OK\r\n\r\n")

    async with hostile(behave) as server:
        got = await asyncio.gather(*(wire.send(command(), to(server.url), now=NOON) for _ in range(80)))

        assert {answer.status for answer in got} == {204}
