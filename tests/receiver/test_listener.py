"""What happens before there is a request, and when there are too many."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from contracts.limits import RECEIVE_FIELD_BYTES_MAX, RECEIVE_HEADERS_MAX, RECEIVE_LINE_BYTES_MAX
from receiver.settings import ReceiverSettings
from tests.receiver.world import (
    PATIENCE_SECONDS,
    Connection,
    Pool,
    World,
    add_sender,
    dump,
    event,
    one,
    request,
    running,
    until,
)

SENT = request(event(id="hostile", source="/hostile"))
HEAD, _, BODY = SENT.partition(b"\r\n\r\n")
LENGTH = b"content-length: %d" % len(BODY)

FRAMING: dict[str, bytes] = {
    "two framings": SENT.replace(LENGTH, LENGTH + b"\r\ntransfer-encoding: chunked"),
    "two lengths": SENT.replace(LENGTH, LENGTH + b"\r\ncontent-length: 5"),
    "a length with a sign": SENT.replace(LENGTH, b"content-length: +5"),
    "a negative length": SENT.replace(LENGTH, b"content-length: -5"),
    "a folded line": SENT.replace(LENGTH, LENGTH + b"\r\nx-hostile: a\r\n b"),
    "a bare line feed": SENT.replace(LENGTH, LENGTH + b"\nx-hostile: a"),
    "a blank before the colon": SENT.replace(LENGTH, LENGTH + b"\r\nx-hostile : a"),
    "NUL in a header": SENT.replace(LENGTH, LENGTH + b"\r\nx-hostile: \0"),
    "no HTTP": b"hostile hostile hostile\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03hostile",
    "chunks that are none": HEAD.replace(LENGTH, b"transfer-encoding: chunked") + b"\r\n\r\nhostile\r\n",
}


LARGE: dict[str, tuple[int, bytes]] = {
    "a long request line": (
        414,
        SENT.replace(b"/payments", b"/" + b"hostile" * (RECEIVE_LINE_BYTES_MAX // 7)),
    ),
    "a long header": (
        431,
        SENT.replace(LENGTH, LENGTH + b"\r\nx-hostile: " + b"x" * 2 * RECEIVE_FIELD_BYTES_MAX),
    ),
    "many headers": (431, SENT.replace(LENGTH, LENGTH + b"\r\nx-hostile: a" * RECEIVE_HEADERS_MAX)),
}
CASES = LARGE | {name: (400, sent) for name, sent in FRAMING.items()}


@pytest.mark.parametrize(("status", "sent"), CASES.values(), ids=CASES.keys())
async def test_what_is_framed_badly_is_refused_and_the_connection_closed(
    world: World, status: int, sent: bytes
) -> None:
    answer = await world.refused(sent)

    assert answer.status == status
    assert world.moments.count("request.refused", status=status) == 1


async def test_a_body_longer_than_it_says_is_refused(world: World) -> None:
    answer = await world.refused(SENT.replace(LENGTH, b"content-length: 40"))

    assert answer.status == 400  # what follows a request that closes is no HTTP


async def test_a_body_shorter_than_what_was_signed_is_not_authentic(world: World) -> None:
    answer = await world.refused(SENT[:-40].replace(LENGTH, b"content-length: %d" % (len(BODY) - 40)))

    assert answer.status == 401


async def test_a_head_that_drips_is_cut(pool: Pool, conn: Connection) -> None:
    async with running(pool, conn, settings=ReceiverSettings(header_seconds=0.2)) as world:
        assert (await world.send(HEAD[:50])).raw == b""
        assert (await world.send(b"")).raw == b""


async def test_a_connection_that_was_used_is_cut_when_it_falls_silent(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    async with running(pool, conn, settings=ReceiverSettings(header_seconds=0.2)) as world:
        answer = await world.send(request(event(), replace={"connection": "keep-alive"}))

    assert answer.status == 202


async def test_a_body_that_drips_is_cut_with_408(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    async with running(pool, conn, settings=ReceiverSettings(body_seconds=0.2)) as world:
        answer = await world.refused(SENT[:-1])

    assert answer.status == 408


async def test_a_body_that_breaks_off_is_nothing(world: World) -> None:
    before = await dump(world.conn)
    _, writer = await asyncio.open_connection("127.0.0.1", world.port)

    writer.write(SENT[:-1])
    await writer.drain()
    await until(lambda: world.receiver.at_work == 1)
    writer.close()

    await world.moments.until("request.refused", reason="body-cut")
    assert await dump(world.conn) == before


async def test_connections_beyond_the_limit_are_closed_at_once(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    async with running(pool, conn, settings=ReceiverSettings(connections_max=2)) as world:
        held = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(2)]
        assert (await world.send(b"")).raw == b""
        await world.moments.until("connection.refused")

        held[0][1].write(request(event()))
        assert (await held[0][0].read()).startswith(b"HTTP/1.1 202")
        for _, writer in held:
            writer.close()


async def test_requests_beyond_the_limit_are_asked_to_come_later(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    async with running(pool, conn, settings=ReceiverSettings(concurrency_max=1)) as world:
        async with conn.transaction():
            await conn.execute("lock table waypost.inbox in exclusive mode")
            first = asyncio.create_task(world.post(event()))
            await until(lambda: world.receiver.at_work == 1)
            second = await world.post(event())
        assert (await first).status == 202

    assert (second.status, second.headers["retry-after"]) == (503, "1")


async def test_a_receiver_that_stops_finishes_what_is_at_work_and_takes_no_more(
    pool: Pool, conn: Connection
) -> None:
    await add_sender(conn)
    async with running(pool, conn) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(request(event(), replace={"connection": "keep-alive"}))
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 202")
        async with conn.transaction():
            await conn.execute("lock table waypost.inbox in exclusive mode")
            first = asyncio.create_task(world.post(event()))
            await until(lambda: world.receiver.at_work == 1)

            world.stop.set()
            await world.moments.until("receiver.draining")
            await until(lambda: world.receiver.draining)
            writer.write(request(event(), replace={"connection": "keep-alive"}))
            late = await reader.readuntil(b"}")
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", world.port)
        assert (await first).status == 202
        assert late.startswith(b"HTTP/1.1 503")
        assert b"Retry-After" in late
        await world.moments.until("receiver.stopped")
        writer.close()
    assert await one(conn, "select count(*) from waypost.inbox") == 2


async def test_a_receiver_that_stops_reads_the_bodies_that_are_on_their_way(
    pool: Pool, conn: Connection
) -> None:
    await add_sender(conn)
    async with running(pool, conn) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(SENT[:-1])
        await until(lambda: world.receiver.at_work == 1)

        world.stop.set()
        await until(lambda: world.receiver.draining)
        writer.write(SENT[-1:])

        assert (await reader.read()).startswith(b"HTTP/1.1 202")
        writer.close()


async def test_a_receiver_that_cannot_finish_gives_up(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    async with running(pool, conn, settings=ReceiverSettings(drain_seconds=0.1)) as world, conn.transaction():
        await conn.execute("lock table waypost.inbox in exclusive mode")
        first = asyncio.create_task(world.post(event()))
        await until(lambda: world.receiver.at_work == 1)

        world.stop.set()
        await world.moments.until("receiver.stopped")

        assert world.moments.count("receiver.gave_up", at_work=1) == 1
        assert (await first).raw == b""


async def test_a_port_that_is_taken_is_said_so(world: World) -> None:
    with pytest.raises(OSError, match="in use"):
        await world.receiver.serve("127.0.0.1", world.port, asyncio.Event())


async def test_a_bug_is_answered_without_a_word_about_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: object) -> None:
        raise RuntimeError("hostile detail")

    monkeypatch.setattr(world.receiver.intake, "take", broken)

    answer = await world.refused(SENT)

    assert answer.status == 500
    assert isinstance(world.moments.all[-1][1]["error"], RuntimeError)


async def test_as_an_application_it_answers_the_same(world: World) -> None:
    runner = web.AppRunner(world.receiver.app(), access_log=None)
    await runner.setup()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        await web.SockSite(runner, listening).start()
        world.port = listening.getsockname()[1]

        assert (await world.post(event())).status == 202
        assert (await world.post(event(), more=[("expect", "100-continue")])).raw.count(b"100 Continue") == 1
        assert (await world.refused(request(b"", method="GET"))).status == 405
        await runner.cleanup()


async def test_half_a_minute_is_more_than_any_of_these_needs() -> None:
    assert ReceiverSettings().drain_seconds < PATIENCE_SECONDS
