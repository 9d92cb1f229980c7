"""What is kept of an answer's headers: few, nothing secret, and never in the way of the settlement."""

from __future__ import annotations

import secrets
from typing import Any
from uuid import UUID

import pytest
from multidict import CIMultiDict
from psycopg_pool import AsyncConnectionPool

from contracts.codec import Codec, Sealing
from orchestrator.outbox import explained, see
from relay.kept import VALUE_MAX, kept
from tests.relay import given
from tests.relay.given import NOON, Connection
from tests.relay.hostile import answers, hostile
from tests.relay.test_complaints import subscriber
from tests.relay.test_relay import relay

Pool = AsyncConnectionPool[Any]


async def headers(conn: Connection, message: UUID) -> dict[str, str] | None:
    """Those of its only try."""
    [(found,)] = await (
        await conn.execute("select headers from waypost.delivery where message_id = %s", (message,))
    ).fetchall()
    return found


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("Server", "nginx", "nginx"),
        ("Retry-After", "120", "120"),
        ("X-Request-Id", "r-1", "r-1"),
        ("Content-Type", "text/html; charset=utf-8", "text/html; charset=utf-8"),
        (
            "Location",
            "https://ann:pw@new.test:8443/hook/7?token=abc#top",
            "https://new.test:8443/hook/7?[redacted]",
        ),
        ("Location", "/hook", "/hook"),
        ("Location", "https://[bad", "[redacted]"),
        ("Server", "a\x00b\r\nc\udcff\N{SNOWMAN}", "a?b??c??"),
        ("Server", "x" * 9_000, "x" * VALUE_MAX),
        ("Set-Cookie", "session=abc", None),
        ("Authorization", "Bearer abc", None),
        ("webhook-signature", "v1,abc", None),
        ("X-Anything", "abc", None),
    ],
)
def test_headers_that_help_are_kept_and_those_that_may_be_secret_are_not(
    name: str, value: str, found: str | None
) -> None:
    assert kept(CIMultiDict({name: value})) == ({} if found is None else {name.lower(): found})


async def test_a_redirect_is_kept_with_where_it_leads_and_what_to_do(conn: Connection, pool: Pool) -> None:
    told = ("Location: https://new.test/hook?token=abc", "Set-Cookie: a=b", "server: \xff\xfe")
    async with hostile(answers(308, *told, body=b"moved")) as server:
        await subscriber(conn, server.url, "audit")
        message = await given.message(conn, await given.execution(conn), endpoint="audit")

        await relay(pool).run_once(now=NOON)

        assert len(server.requests) == 1
    found = await headers(conn, message)
    assert found is not None
    assert (sorted(found), found["location"]) == (["location", "server"], "https://new.test/hook?[redacted]")
    why = explained(await see(conn, message))
    assert "redirect to https://new.test/hook?[redacted]" in why
    assert "`waypost endpoint set audit --url URL`" in why


async def test_where_payloads_are_sealed_a_redirect_tells_its_host_alone(
    conn: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hostile(answers(302, "Location: https://new.test/orders/ann")) as server:
        await given.endpoint(conn, server.url)
        message = await given.message(conn, await given.execution(conn))
        monkeypatch.setattr(Sealing, "codec", Codec([("k1", bytes(32))], secrets.token_bytes))

        await relay(pool).run_once(now=NOON)

    assert await headers(conn, message) == {"location": "https://new.test/[redacted]"}


async def test_what_cannot_be_told_of_a_try_is_no_header(conn: Connection, pool: Pool) -> None:
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        message = await given.message(conn, await given.execution(conn))

        await relay(pool).run_once(now=NOON)

    assert await headers(conn, message) is None
