"""What an endpoint has of its own: headers, how it wants its key, certificates, and secrets that are kept elsewhere."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg.types.json import Jsonb
from psycopg_pool import AsyncConnectionPool
from standardwebhooks import Webhook

from contracts.errors import BadSecret, BadSignature, LimitExceeded
from contracts.signature import PublicKey, Secret, SigningKey, verify
from orchestrator import registry
from orchestrator.registry import NotRegistered, UnknownEndpoint, rotate_endpoint
from relay.endpoints import Endpoint
from relay.particulars import Certificates, header_problems, tls_problems
from relay.references import KNOWN, resolve
from relay.wire import Wire
from tests.relay import given
from tests.relay.certificates import HOST, self_signed
from tests.relay.given import HERE, NOON, SECRET, VAULT, Connection, Names, Watcher
from tests.relay.hostile import answers, hostile
from tests.relay.test_relay import relay
from tests.relay.test_wire import command, to

Pool = AsyncConnectionPool[Any]


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with Wire(HERE) as wire:
        yield wire


def particular(url: str, **own: Any) -> Endpoint:
    return Endpoint(url, (SECRET,), **own)


# Headers


@pytest.mark.parametrize(
    "name",
    [
        "Content-Type",
        "content-length",
        "HOST",
        "Connection",
        "Transfer-Encoding",
        "User-Agent",
        "webhook-id",
        "Webhook-Signature",
        "webhook-anything",
        "ce-type",
        "CE-anything",
        "traceparent",
        "tracestate",
        "waypost-attempt",
        "Idempotency-Key",
        "Expect",
        "TE",
        "Upgrade",
        "Proxy-Authorization",
        "a b",
        "a:b",
        "",
        "é",
        "a\r\nb",
        "x" * 129,
    ],
)
def test_a_header_that_is_ours_or_is_none_is_refused(name: str) -> None:
    assert header_problems({name: "x"})


@pytest.mark.parametrize("value", ["", "a\r\nb: c", "a\nb", "a\x00b", " a", "é", "x" * 4097, 7, None])
def test_a_value_that_could_end_a_header_is_refused_and_not_repeated(value: object) -> None:
    problems = header_problems({"x-token": value})

    assert problems
    assert all(problem.isprintable() and repr(value) not in problem for problem in problems)


@pytest.mark.parametrize("headers", [[], "x", {"A": "1", "a": "2"}, {f"x-{n}": "1" for n in range(21)}])
def test_what_are_no_headers_are_refused(headers: object) -> None:
    assert header_problems(headers)


async def test_an_endpoint_s_own_headers_are_sent_and_change_nothing_of_ours(wire: Wire) -> None:
    own = {"authorization": "Bearer abc", "X-Team": "billing"}
    assert header_problems(own) == []
    async with hostile(answers(204)) as server:
        message = command()

        await wire.send(message, particular(server.url, headers=own), now=datetime.now(UTC))

        [request] = server.requests
        assert (request.headers["authorization"], request.headers["x-team"]) == ("Bearer abc", "billing")
        assert Webhook(SECRET.text).verify(request.body, request.headers)


# Idempotency-Key


@pytest.mark.parametrize(
    ("mode", "wanted"), [("bare", 'a/0/b"c\\d'), ("quoted", '"a/0/b\\"c\\\\d"'), ("off", None)]
)
async def test_the_idempotency_key_is_bare_or_quoted_or_not_sent(
    wire: Wire, mode: str, wanted: str | None
) -> None:
    body = json.dumps({"idempotencykey": 'a/0/b"c\\d'}).encode()
    async with hostile(answers(204)) as server:
        await wire.send(command(body=body), particular(server.url, idempotency=mode), now=NOON)

        assert server.requests[0].headers.get("idempotency-key") == wanted


# Certificates


async def test_an_endpoint_has_its_own_authority_and_shows_its_own_certificate(tmp_path: Path) -> None:
    self_signed(tmp_path)
    pem = str(tmp_path / "certificate.pem")
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asking.load_cert_chain(pem)
    asking.load_verify_locations(pem)
    asking.verify_mode = ssl.CERT_REQUIRED
    both = Certificates().context({"ca": pem, "certificate": pem})
    only_ca = Certificates().context({"ca": pem})
    names = Names(hooks_example_test=["127.0.0.1"])
    async with hostile(answers(204), tls=asking) as server, Wire(HERE, resolver=names) as wire:
        shown = await wire.send(command(), particular(server.url, tls=both), now=NOON)
        unshown = await wire.send(command(), particular(server.url, tls=only_ca), now=NOON)
        unknown = await wire.send(command(), particular(server.url), now=NOON)

    assert HOST in server.url
    assert both is not None
    assert both.minimum_version == ssl.TLSVersion.TLSv1_2
    assert shown.status == 204
    assert unshown.status is None
    assert unknown.error_code == "tls-certificate"


def test_a_context_is_made_once_until_a_file_changes(tmp_path: Path) -> None:
    self_signed(tmp_path)
    pem = tmp_path / "certificate.pem"
    made = Certificates()

    first, same = made.context({"ca": str(pem)}), made.context({"ca": str(pem)})
    self_signed(tmp_path)

    assert first is same
    assert made.context({"ca": str(pem)}) is not first
    assert made.context({}) is None


@pytest.mark.parametrize("tls", [[], {"else": "/a"}, {"ca": "a.pem"}, {"ca": 7}, {"key": "/a"}])
def test_what_names_no_files_of_certificates_is_refused(tls: object) -> None:
    assert tls_problems(tls)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tls", {"ca": "/nowhere/ca.pem"}),
        ("headers", {"Host": "evil.test"}),
        ("schedule", {"delays": "soon"}),
    ],
)
async def test_settings_that_cannot_be_used_cost_no_try(
    conn: Connection, pool: Pool, column: str, value: Mapping[str, Any]
) -> None:
    await given.endpoint(conn, "https://payments.test/")
    await conn.execute(f"update waypost.endpoint set {column} = %s".encode(), (Jsonb(value),))
    message = await given.message(conn, await given.execution(conn))

    await relay(pool).run_once(now=NOON)

    assert await given.deliveries(conn, message) == [(1, "spared", None, "bad-settings")]
    assert (await given.row(conn, message))["spared"] == 1


# Secrets that are kept elsewhere


class Shelf:
    """A manager of secrets, with one."""

    async def fetch(self, name: str) -> str:
        return {"billing": SECRET.text}[name]


async def test_a_secret_is_fetched_from_the_environment_a_file_or_a_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = SigningKey(b"s" * 32)
    (tmp_path / "secret").write_text(f"{key.text}\n")
    monkeypatch.setenv("BILLING", SECRET.text)

    assert await resolve("env:BILLING", KNOWN) == SECRET
    assert await resolve(f"file:{tmp_path}/secret", KNOWN) == key
    assert await resolve("shelf:billing", {**KNOWN, "shelf": Shelf()}) == SECRET


@pytest.mark.parametrize(
    "reference", ["env:NOBODY_SET_THIS", "file:/nowhere", "file:relative", "shelf:x", "env:", "x"]
)
async def test_a_secret_that_is_not_there_is_an_error_that_names_its_reference(reference: str) -> None:
    with pytest.raises(BadSecret, match="secret"):
        await resolve(reference, KNOWN)


async def test_a_fault_in_a_fetched_secret_does_not_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILLING", "hunter2")

    with pytest.raises(BadSecret) as refused:
        await resolve("env:BILLING", KNOWN)

    assert "hunter2" not in str(refused.value)


async def test_messages_are_signed_with_a_fetched_secret(conn: Connection, pool: Pool) -> None:
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url, secret=None)
        await rotate_endpoint(conn, VAULT, "payments", reference="shelf:billing")
        await given.message(conn, await given.execution(conn))

        await relay(pool, managers={"shelf": Shelf()}, watcher=Watcher()).run_once(now=NOON)

        [request] = server.requests
        Webhook(SECRET.text).verify(request.body, request.headers)


# Rotation


async def live(conn: Connection, after: timedelta = timedelta(0)) -> int:
    cursor = await conn.execute(
        "select count(*) from waypost.secret where expires_at is null or expires_at > now() + %s", (after,)
    )
    return (await cursor.fetchone() or (0,))[0]


async def test_old_and_new_secrets_sign_until_the_grace_is_over(conn: Connection, pool: Pool) -> None:
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        new = (await rotate_endpoint(conn, VAULT, "payments")).secret
        assert isinstance(new, Secret)
        await given.message(conn, await given.execution(conn))

        await relay(pool).run_once(now=NOON)

        [request] = server.requests
        for secret in (SECRET, new):
            Webhook(secret.text).verify(request.body, request.headers)
        assert await live(conn, timedelta(hours=23)) == 2
        assert await live(conn, timedelta(hours=25)) == 1


async def test_a_second_rotation_leaves_each_old_secret_its_own_end(conn: Connection) -> None:
    """Elsewhere it took over the end of the one before, which was past."""
    await given.endpoint(conn, "https://payments.test/")
    await rotate_endpoint(conn, VAULT, "payments", grace=timedelta(hours=1))

    await rotate_endpoint(conn, VAULT, "payments")

    assert await live(conn) == 3
    assert await live(conn, timedelta(hours=2)) == 2
    assert await live(conn, timedelta(hours=25)) == 1


async def test_an_endpoint_changes_from_a_secret_to_a_key_without_a_message_that_nobody_verifies(
    conn: Connection, pool: Pool
) -> None:
    async with hostile(answers(204)) as server:
        await given.endpoint(conn, server.url)
        key = registry.signing_key()
        await rotate_endpoint(conn, VAULT, "payments", secret=key)
        await given.message(conn, await given.execution(conn))

        await relay(pool).run_once(now=NOON)

        [request] = server.requests
        for verifier in (SECRET, PublicKey.parse(key.public.text)):
            verify(
                [verifier],
                message_id=request.headers["webhook-id"],
                timestamp=request.headers["webhook-timestamp"],
                signature=request.headers["webhook-signature"],
                body=request.body,
                now=int(request.headers["webhook-timestamp"]),
            )
        with pytest.raises(BadSignature):
            verify(
                [registry.signing_key().public],
                message_id=request.headers["webhook-id"],
                timestamp=request.headers["webhook-timestamp"],
                signature=request.headers["webhook-signature"],
                body=request.body,
                now=int(request.headers["webhook-timestamp"]),
            )


async def test_what_cannot_be_rotated_is_refused_and_nothing_is_changed(conn: Connection) -> None:
    await given.endpoint(conn, "https://payments.test/")

    with pytest.raises(NotRegistered, match="grace"):
        await rotate_endpoint(conn, VAULT, "payments", grace=timedelta(days=8))
    with pytest.raises(NotRegistered, match="reference"):
        await rotate_endpoint(conn, VAULT, "payments", reference="nothing")
    with pytest.raises(UnknownEndpoint):
        await rotate_endpoint(conn, VAULT, "nobody")
    for _ in range(9):
        await rotate_endpoint(conn, VAULT, "payments")
    with pytest.raises(LimitExceeded):
        await rotate_endpoint(conn, VAULT, "payments")

    assert await live(conn, timedelta(hours=25)) == 1
    assert await live(conn) == 10


def test_an_endpoint_shows_its_secrets_nowhere() -> None:
    shown = repr(to("https://payments.test/"))

    assert SECRET.text not in shown
    assert "Secret(…)" in shown
