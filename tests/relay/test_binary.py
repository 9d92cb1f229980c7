"""Messages in the binary mode: the same event, its data byte for byte, and nothing that a server would refuse."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from psycopg_pool import AsyncConnectionPool
from standardwebhooks import Webhook

from contracts.binary import decode_binary
from contracts.envelope import decode_structured
from orchestrator import endpoints
from relay.binary import COUNT_MAX, FIELD_MAX, in_binary
from tests.relay import given
from tests.relay.given import NOON, SECRET, Connection
from tests.relay.hostile import answers, hostile
from tests.relay.test_relay import relay

Pool = AsyncConnectionPool[Any]

EVENT: dict[str, Any] = {
    "specversion": "1.0",
    "id": "7",
    "source": "/shop",
    "type": "shop.paid",
    "datacontenttype": "application/json",
}


def written(**more: Any) -> bytes:
    return json.dumps({**EVENT, **more}, ensure_ascii=False).encode()


def headers_in(found: Any) -> dict[str, str]:
    return {**found.headers, "content-type": found.content_type}


@pytest.mark.parametrize(
    "more",
    [
        {"data": {"a": 1}},
        {"data": None},
        {"data": "text"},
        {"data": [1, "é", "\N{SNOWMAN}\N{GRINNING FACE}"]},
        {
            "data": 1,
            "subject": 'a "quoted" 100 % é \N{GRINNING FACE}~!',
            "correlationid": "c",
            "number": 7,
            "flag": True,
        },
        {"data_base64": "AP8=", "datacontenttype": "application/octet-stream"},
        {"data": "plain é", "datacontenttype": "text/plain"},
        {"data": {"x": 1}, "datacontenttype": "application/vnd.shop+json; charset=utf-8"},
    ],
)
def test_it_is_the_same_event(more: Mapping[str, Any]) -> None:
    body = written(**more)
    found = in_binary(body)
    assert found is not None

    ours, stored = decode_binary(headers_in(found).items(), found.body), decode_structured(body)

    told = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in stored.extensions.items()
    }
    plain = (
        stored.data.encode()
        if "text/plain" in found.content_type and isinstance(stored.data, str)
        else stored.data
    )
    assert ours == replace(stored, extensions=told, data=plain)


def test_the_published_library_reads_it() -> None:
    body = written(data={"a": "é"}, subject="ordre é 7")
    found = in_binary(body)
    assert found is not None

    event = from_http_event(HTTPMessage(headers_in(found), found.body))

    assert (event.get_id(), event.get_subject(), event.get_data()) == ("7", "ordre é 7", {"a": "é"})


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (b'{"data":{"b":1,"a":1.0,"a":2,"aa":1e2}}', b'{"b":1,"a":1.0,"a":2,"aa":1e2}'),
        (b'\n{ "id" : "x" ,\t"data" : [ 1 , 2 ] \r\n, "z":1 }', b"[ 1 , 2 ]"),
        (b'{"data":"\\u0000\\ud800"}', b'"\\u0000\\ud800"'),
        (b'{"data":1e400000}', b"1e400000"),
        (b'{"x":"\\"data\\":3","data":{"data":4}}', b'{"data":4}'),
        (b'{"data":1,"data":2}', b"2"),
    ],
)
def test_its_data_are_written_as_they_are_stored(text: bytes, data: bytes) -> None:
    found = in_binary(text)

    assert found is not None
    assert found.body == data


@pytest.mark.parametrize(
    "body",
    [
        written(),
        written(dataref="https://w.test/data/t", datahash="sha-256:00", datasize=9),
        written(data="", datacontenttype="text/plain"),
        written(data=1, subject="x" * FIELD_MAX),
        written(data=1, subject="é" * (FIELD_MAX // 6)),
        written(data=1, **{f"x{number}": "y" for number in range(COUNT_MAX)}),
        written(data=1, **{f"x{number}": "y" * 7_000 for number in range(3)}),
        written(data=1, datacontenttype="text/\r\nx: y"),
        written(data=1, datacontenttype=7),
        written(data=1, **{"not-a-name": "y"}),
        written(data=1, nothing=None),
        written(data_base64="AP8"),
        json.dumps({**EVENT, "data": 1, "subject": "\ud800"}).encode(),
        b'"no object"',
        b"no json",
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_what_does_not_fit_or_has_no_data_goes_structured(body: bytes) -> None:
    assert in_binary(body) is None


@pytest.fixture
async def sent(conn: Connection, pool: Pool) -> AsyncIterator[Any]:
    """What an endpoint gets that wants the binary mode: its request, and the message."""
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        await endpoints.change(conn, "payments", {"mode": "binary"})
        execution = await given.execution(conn)
        message = await given.message(conn, execution)
        await relay(pool).run_once(now=NOON)
        [request] = server.requests
        yield request, given.body_of(message, execution)


async def test_what_is_signed_is_what_is_sent(sent: Any) -> None:
    request, stored = sent

    Webhook(SECRET.text).verify(request.body, request.headers)
    assert request.headers["content-type"] == "application/json"
    assert request.headers["webhook-id"] == request.headers["ce-id"]
    assert request.headers["idempotency-key"] == request.headers["ce-idempotencykey"]
    assert json.loads(request.body) == json.loads(stored)["data"]
    assert request.headers["traceparent"] != request.headers["ce-traceparent"]
