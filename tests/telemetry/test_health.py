"""The health listener says whether a process lives and is ready, and when it cannot listen, why."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import pytest

from orchestrator.settings import Address, Settings
from orchestrator.store import database
from orchestrator.store.database import Pool
from orchestrator.telemetry import watch
from orchestrator.telemetry.health import Check, Health, serving
from receiver.listener import CannotListen
from tests.moments import Moments
from tests.receiver.world import Answer

ANY = Address("127.0.0.1", 0)


async def ask(port: object, target: str, method: str = "GET") -> Answer:
    assert isinstance(port, int)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(30):
        raw = await reader.read()
    writer.close()
    return Answer(raw)


@asynccontextmanager
async def listening(checks: Mapping[str, Check], page: bytes = b"") -> AsyncGenerator[object]:
    """The port of a listener with these checks."""
    moments = Moments()
    async with serving(Health(checks, lambda: page), ANY, fixed=True, observer=moments):
        yield (await moments.until("health.started"))["port"]


async def fine() -> str | None:
    return None


async def broken() -> str | None:
    return "gone"


async def test_a_process_that_turns_lives_whatever_its_checks_say() -> None:
    async with listening({"database": broken}) as port:
        answer = await ask(port, "/livez")

    assert (answer.status, answer.raw.partition(b"\r\n\r\n")[2]) == (200, b"ok\n")


async def test_a_process_is_ready_when_all_its_checks_say_so() -> None:
    async with listening({"database": fine, "lease": fine}) as port:
        ready = await ask(port, "/readyz")
    async with listening({"database": fine, "lease": broken}) as port:
        unready = await ask(port, "/readyz")

    assert (ready.status, ready.raw.partition(b"\r\n\r\n")[2]) == (200, b"database: ok\nlease: ok\n")
    assert (unready.status, unready.raw.partition(b"\r\n\r\n")[2]) == (503, b"database: ok\nlease: gone\n")


async def test_metrics_are_the_page_in_the_form_that_prometheus_asks_for() -> None:
    async with listening({}, b"x_total 1.0\n") as port:
        answer = await ask(port, "/metrics")

    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.raw.endswith(b"\r\n\r\nx_total 1.0\n")


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [("GET", "/", 404), ("GET", "/livez/x", 404), ("POST", "/livez", 405), ("GET", "/LIVEZ", 404)],
)
async def test_nothing_else_is_there(method: str, target: str, status: int) -> None:
    async with listening({}) as port:
        assert (await ask(port, target, method)).status == status


async def test_who_asks_often_gets_the_same_answer_for_a_moment() -> None:
    asked: list[int] = []

    async def counted() -> str | None:
        asked.append(1)
        return None

    it = Health({"database": counted}, lambda: b"%d" % len(asked))

    first, second = await it.ready(), await it.ready()

    assert first == second
    assert asked == [1]
    assert it.metrics() == it.metrics()


def taken() -> tuple[socket.socket, Address]:
    busy = socket.create_server(("127.0.0.1", 0))
    return busy, Address("127.0.0.1", busy.getsockname()[1])


async def test_an_address_that_was_asked_for_and_is_taken_is_an_error_that_names_it() -> None:
    busy, address = taken()
    with (
        busy,
        pytest.raises(CannotListen, match=rf"WAYPOST_HEALTH_ADDR: .*found {address}, where .* or say `off`"),
    ):
        async with serving(Health({}, bytes), address, fixed=True, observer=Moments()):
            pass


async def test_an_address_that_nobody_has_is_one_too() -> None:
    nowhere = Address("192.0.2.1", 8082)
    with pytest.raises(CannotListen, match=r"found 192\.0\.2\.1:8082, which is not of this machine"):
        async with serving(Health({}, bytes), nowhere, fixed=False, observer=Moments()):
            pass


async def test_a_default_that_is_taken_gives_way_to_any_port() -> None:
    busy, address = taken()
    moments = Moments()
    with busy:
        async with serving(Health({}, bytes), address, fixed=False, observer=moments):
            port = (await moments.until("health.started"))["port"]
            answer = await ask(port, "/livez")

    assert port != address.port
    assert answer.status == 200


async def test_nobody_listens_when_it_is_off() -> None:
    moments = Moments()
    async with serving(Health({}, bytes), None, fixed=True, observer=moments):
        assert moments.all == []


@pytest.mark.parametrize(
    ("environment", "part", "expected"),
    [
        ({}, "worker", (Address("127.0.0.1", 8082), False)),
        ({}, "relay", (Address("127.0.0.1", 8083), False)),
        ({}, "receiver", (Address("127.0.0.1", 8084), False)),
        ({"WAYPOST_HEALTH_ADDR": "0.0.0.0:9000"}, "relay", (Address("0.0.0.0", 9000), True)),
        ({"WAYPOST_HEALTH_ADDR": "off"}, "worker", (None, True)),
    ],
)
def test_each_part_has_a_port_of_its_own_until_it_is_told_where(
    environment: dict[str, str], part: str, expected: tuple[Address | None, bool]
) -> None:
    assert Settings.from_environment(environment).health_of(part) == expected


async def test_the_database_is_ready_when_it_answers_with_the_migrations_that_we_know(pool: Pool) -> None:
    assert await watch.usable(pool) is None


async def test_a_migration_that_we_do_not_know_is_in_the_way_unless_it_is_compatible(pool: Pool) -> None:
    async with pool.connection() as conn:
        newer = (
            "insert into waypost.migration (number, name, sha256, compatible) values (9000, 'x', '', true)"
        )
        await conn.execute(newer)
        assert await watch.usable(pool) is None
        await conn.execute("update waypost.migration set compatible = false where number = 9000")

        told = await watch.usable(pool)

    assert told is not None
    assert "9000" in told


async def test_a_migration_that_is_missing_is_in_the_way(pool: Pool) -> None:
    async with pool.connection() as conn:
        last = "delete from waypost.migration where number = (select max(number) from waypost.migration)"
        await conn.execute(last)

    assert await watch.usable(pool) == "1 migrations to apply"


async def test_a_database_that_is_away_is_in_the_way_and_its_address_is_not_told() -> None:
    dsn = "postgresql://secret-user:secret-word@127.0.0.1:1/nowhere"
    async with asyncio.timeout(60):
        pool = database.pool(dsn, size=1, name="test")
        await pool.open(wait=False)
        told = await watch.usable(pool)
        await pool.close()

    assert told is not None
    assert "secret" not in told
