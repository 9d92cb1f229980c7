"""Whoever connects to a service: what is no HTTP, what never ends, and what says a thing twice begins nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from contracts.envelope import STRUCTURED, Envelope, encode_structured
from contracts.messages import Command
from contracts.signature import Secret, sign
from receiver import participant as edge
from receiver.memory import LocalMemory
from receiver.participant import CannotListen, Participant
from receiver.settings import ReceiverSettings
from tests.moments import Moments

COMMANDS = Secret.of(b"c" * 32)
PATIENCE_SECONDS = 30.0


class Charge(Command[None], endpoint="payments", type="payment.charge"):
    order: str


@dataclass
class Edge:
    """A service that listens at `port`, and what it said."""

    port: int
    moments: Moments
    acted: list[str]

    async def says(self, *parts: bytes) -> bytes:
        """All that it answers, up to the end of the connection, to `parts`, each sent when it has read the last."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            for part in parts:
                writer.write(part)
                await writer.drain()
            try:
                return await reader.read()
            finally:
                writer.close()


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Edge]:
    monkeypatch.setattr(edge, "EDGE", ReceiverSettings(header_seconds=0.2, connections_max=2))
    moments, acted = Moments(), list[str]()
    bank = Participant(
        name="bank",
        accepts={"/waypost": COMMANDS},
        reply_in_answer=True,
        memory=LocalMemory(),
        observer=moments,
    )

    @bank.does(Charge)
    def _(command: Charge) -> None:
        acted.append(command.order)

    async with bank.serving() as port:
        yield Edge(port, moments, acted)


def command(*more: str, key: str = "e/0/charge") -> bytes:
    """A signed command as a request that ends the connection, with header lines besides."""
    body = encode_structured(
        Envelope(
            id="m1",
            source="/waypost/executions/e",
            type="payment.charge",
            datacontenttype="application/json",
            data={"order": "A"},
            extensions={"correlationid": "e", "idempotencykey": key},
        )
    )
    now = int(time.time())
    lines = [
        "POST /waypost HTTP/1.1",
        "host: bank",
        "connection: close",
        f"content-type: {STRUCTURED}",
        f"content-length: {len(body)}",
        "webhook-id: m1",
        f"webhook-timestamp: {now}",
        f"webhook-signature: {sign([COMMANDS], message_id='m1', timestamp=now, body=body)}",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def test_a_command_is_served(service: Edge) -> None:
    assert status(await service.says(command())) == 200
    assert service.acted == ["A"]


@pytest.mark.parametrize("head", [b"", b"POST /waypost HTTP/1.1\r\nhost: bank\r\nx-slow: "])
async def test_a_head_that_does_not_end_is_not_waited_for(service: Edge, head: bytes) -> None:
    assert await service.says(head) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"strange-words\x1b[31m\r\n\r\n",
        b"\x16\x03\x01strange-words",
        b"POST /waypost HTTP/1.1\r\nhost: bank\r\ncontent-length: 1\r\ncontent-length: 2\r\nx: strange-words\r\n\r\n",
        command("transfer-encoding: chunked", "x: strange-words"),
    ],
    ids=["words", "TLS", "two lengths", "both framings"],
)
async def test_what_is_no_request_is_refused_without_repeating_it(
    service: Edge, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    caplog.set_level(logging.DEBUG)

    answer = await service.says(sent)

    assert status(answer) == 400
    assert b"strange-words" not in answer
    assert "strange-words" not in caplog.text
    assert service.moments.count("request.refused", status=400, reason="no-http") == 1
    assert service.acted == []


async def test_a_head_that_is_too_large_is_refused_without_repeating_it(
    service: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    answer = await service.says(command("x: " + "strange-words" * 1000))

    assert status(answer) == 431
    assert b"strange-words" not in answer
    assert "strange-words" not in caplog.text
    assert service.acted == []


async def test_no_more_connections_are_served_than_the_limit(service: Edge) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        open_ones = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(2)]
        assert await service.says() == b""
        await service.moments.until("connection.refused")
        for _, writer in open_ones:
            writer.close()


@pytest.mark.parametrize("line", ["webhook-id: m1", "webhook-timestamp: 1", "webhook-signature: v1,AAAA"])
async def test_what_is_signed_may_be_said_only_once(service: Edge, line: str) -> None:
    """Others on the way may have read the second one."""
    assert status(await service.says(command(line))) == 401
    assert service.acted == []


async def test_a_command_without_a_key_is_none(service: Edge) -> None:
    """All such would be one action."""
    assert status(await service.says(command(key=""))) == 400
    assert service.acted == []


async def test_who_leaves_the_block_by_an_error_of_the_network_gets_that(service: Edge) -> None:
    bank = Participant(
        name="bank", accepts={"/waypost": COMMANDS}, reply_in_answer=True, memory=LocalMemory()
    )
    with pytest.raises(CannotListen):
        async with bank.serving(port=service.port):
            pass
    with pytest.raises(ConnectionResetError):
        async with bank.serving():
            raise ConnectionResetError
