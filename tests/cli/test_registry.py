"""Endpoints and senders are registered with their secret or not at all; the secret is kept only sealed."""

from __future__ import annotations

from datetime import timedelta
from ipaddress import ip_network
from typing import Any

import psycopg
import pytest

from contracts.observer import Silent
from contracts.signature import Secret
from contracts.vault import Vault
from orchestrator.registry import NameTaken, NotRegistered, add_endpoint, add_sender
from receiver import senders
from relay.endpoints import Endpoint, Endpoints

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

VAULT = Vault(b"k" * 32)
LOOPBACK = [ip_network("127.0.0.0/8")]


async def rows(conn: Connection, table: str) -> int:
    cursor = await conn.execute(f"select count(*) from waypost.{table}".encode())
    [[count]] = await cursor.fetchall()
    return count


async def test_the_relay_can_sign_with_the_secret_of_a_new_endpoint(conn: Connection) -> None:
    added = await add_endpoint(conn, VAULT, name="payments", url="https://pay.example/waypost")

    endpoints = Endpoints(
        vault=VAULT, allow=(), keep=timedelta(seconds=1), clock=lambda: 0.0, observer=Silent()
    )
    found = await endpoints.look_up(conn, [(1, "payments")])
    assert found == {(1, "payments"): Endpoint("https://pay.example/waypost", (added.shared,))}


async def test_the_receiver_can_verify_with_the_secret_of_a_new_sender(conn: Connection) -> None:
    added = await add_sender(conn, VAULT, name="payments")

    found = await senders.read(conn, ("default", "payments"), vault=VAULT, observer=Silent())
    assert found is not None
    assert found.secrets == (added.secret,)


async def test_each_new_secret_is_another_and_none_is_stored_readable(conn: Connection) -> None:
    first = await add_endpoint(conn, VAULT, name="a", url="https://a.example/")
    second = await add_sender(conn, VAULT, name="a")

    assert first.secret != second.secret
    cursor = await conn.execute(
        "select string_agg(encode(ciphertext, 'hex') || key_id, '') from waypost.secret"
    )
    [[stored]] = await cursor.fetchall()
    assert first.shared.key.hex() not in stored
    assert second.shared.key.hex() not in stored


async def test_a_given_secret_is_used(conn: Connection) -> None:
    theirs = Secret.of(b"t" * 24)

    added = await add_sender(conn, VAULT, name="stripe", secret=theirs)

    assert added.secret == theirs


async def test_a_taken_name_is_refused_and_gets_no_second_secret(conn: Connection) -> None:
    await add_endpoint(conn, VAULT, name="payments", url="https://a.example/")
    await add_sender(conn, VAULT, name="payments")

    with pytest.raises(NameTaken, match="endpoint 'payments'"):
        await add_endpoint(conn, VAULT, name="payments", url="https://b.example/")
    with pytest.raises(NameTaken, match="sender 'payments'"):
        await add_sender(conn, VAULT, name="payments")

    assert (await rows(conn, "endpoint"), await rows(conn, "sender"), await rows(conn, "secret")) == (1, 1, 2)


@pytest.mark.parametrize("name", ["", "a/b", "\x1b[31m", "é", "x" * 129, ".a", "a b", "a\n"])
async def test_a_name_that_would_need_escaping_is_refused(conn: Connection, name: str) -> None:
    with pytest.raises(NotRegistered) as refused:
        await add_endpoint(conn, VAULT, name=name, url="https://a.example/")
    with pytest.raises(NotRegistered):
        await add_sender(conn, VAULT, name=name)

    assert str(refused.value).isprintable()
    assert await rows(conn, "secret") == 0


async def test_all_problems_of_an_endpoint_are_told_at_once(conn: Connection) -> None:
    with pytest.raises(NotRegistered) as refused:
        await add_endpoint(
            conn,
            VAULT,
            name="a b",
            url="ftp://a.example/",
            replies_from="c d",
            patience=timedelta(hours=1),
        )

    told = [problem.split(":")[0] for problem in refused.value.problems]
    assert "url" in told
    assert "replies-from" in told
    assert "timeout" in told


async def test_a_private_address_needs_the_allow_list(conn: Connection) -> None:
    with pytest.raises(NotRegistered, match="url"):
        await add_endpoint(conn, VAULT, name="a", url="http://127.0.0.1:8090/")

    added = await add_endpoint(conn, VAULT, name="a", url="http://127.0.0.1:8090/", allow=LOOPBACK)

    assert added.name == "a"


async def test_nobody_else_may_be_waypost(conn: Connection) -> None:
    with pytest.raises(NotRegistered, match="ourselves"):
        await add_sender(conn, VAULT, name="waypost")
