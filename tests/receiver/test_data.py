"""Data that messages name, at the receiver: given to who has a ticket, at a pace, and to nobody else."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID, uuid4

import pytest

from contracts.codec import PayloadKeyMissing
from contracts.dataref import Ticket, Tickets
from contracts.objects import ObjectDamaged, Reference, StoreAway, digest_of
from contracts.vault import Vault
from receiver.settings import ReceiverSettings
from tests.receiver.world import VAULT, Answer, Connection, Pool, World, event, request, running

TICKETS: Final = Tickets(VAULT)
DATA: Final = b'{"text": "much"}'
LATER: Final = 4_000_000_000


@dataclass(slots=True)
class Objects:
    """What the receiver gets objects from: `data`, or an error; it waits for `go`."""

    data: bytes = DATA
    error: Exception | None = None
    asked: list[tuple[int, Reference]] = field(default_factory=list[tuple[int, Reference]])
    go: asyncio.Event = field(default_factory=asyncio.Event)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.go.set()

    async def get(self, tenant: int, one: Reference) -> bytes:
        self.asked.append((tenant, one))
        self.came.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return self.data


async def add_fact(conn: Connection, objects: object = None, *, at: int = 2) -> Ticket:
    """A fact that asks for something whose data are an object, and a ticket for it."""
    execution = uuid4()
    one = Reference("ab" * 32, 99).as_json()
    await conn.execute(
        """
        insert into waypost.journal (tenant_id, execution_id, position, fence, path, kind, payload, actor, at)
        values (1, %s, %s, 1, 'store', 'asked', %s::jsonb, 'flow', now())
        """,
        (execution, at, json.dumps({"objects": {"args.data": one} if objects is None else objects})),
    )
    return Ticket(1, execution, at, uuid4(), digest_of(DATA), len(DATA), LATER)


def asking(ticket: Ticket | str, *, method: str = "GET", more: Sequence[str] = ()) -> bytes:
    text = ticket if isinstance(ticket, str) else TICKETS.issue(ticket)
    lines = [f"{method} /data/{text} HTTP/1.1", "host: receiver.test", "connection: close", *more, "", ""]
    return "\r\n".join(lines).encode()


def body_of(answer: Answer) -> bytes:
    return answer.raw.partition(b"\r\n\r\n")[2]


async def test_who_has_a_ticket_gets_the_bytes_and_how_to_check_them(pool: Pool, conn: Connection) -> None:
    objects = Objects()
    ticket = await add_fact(conn)
    async with running(pool, conn, fetch=objects.get) as world:
        answer = await world.send(asking(ticket))
        asked_as_a_proxy_does = await world.send(
            asking(ticket).replace(b"GET /", b"GET http://receiver.test/")
        )
        posted = await world.refused(asking(ticket, method="POST", more=["content-length: 0"]))

    assert (answer.status, body_of(answer)) == (200, DATA)
    assert body_of(asked_as_a_proxy_does) == DATA
    assert objects.asked == [(1, Reference("ab" * 32, 99))] * 2
    assert (
        answer.headers.items()
        >= {
            "content-type": "application/json",
            "content-length": str(len(DATA)),
            "etag": f'"sha-256:{digest_of(DATA)}"',
            "repr-digest": "sha-256=:NAGDzXfCnxRqissmtLE1RdB8TfxQasf4iyEqcnfK4EE=:",
            "cache-control": "private, no-store",
            "x-content-type-options": "nosniff",
            "accept-ranges": "none",
            "server": "waypost",
        }.items()
    )
    assert (posted.status, posted.headers["allow"]) == (405, "GET")


async def test_whatever_is_no_ticket_or_is_one_no_more_gets_the_same_answer_and_no_log_has_it(
    pool: Pool, conn: Connection
) -> None:
    objects = Objects()
    ticket = await add_fact(conn)
    naming_nothing = await add_fact(conn, objects={"undo.data": Reference("ab" * 32, 99).as_json()}, at=3)
    text = TICKETS.issue(ticket)
    others: list[Ticket | str] = [
        replace(ticket, expires=1),
        replace(ticket, tenant=2),
        replace(ticket, execution=UUID(int=1)),
        replace(ticket, position=1),
        naming_nothing,
        Tickets(Vault(bytes(32))).issue(ticket),
        text.swapcase(),
        text[:-1],
        f"{text}/",
        "..%2f..%2fetc",
        "",
    ]
    async with running(pool, conn, fetch=objects.get) as world:
        answers = [await world.send(asking(other)) for other in others]
        told = json.dumps(world.moments.all, default=str)

    assert {(it.status, body_of(it)) for it in answers} == {(404, b'{"title": "Not Found", "status": 404}')}
    assert objects.asked == []
    assert {seen["path"] for name, seen in world.moments.all if name == "request.refused"} == {"'/data/…'"}
    assert text[:40] not in told


FAULTS: Final = [
    (StoreAway("file:///x", "no answer"), DATA, "payload-store-away"),
    (ObjectDamaged("ab" * 32, "file:///x", "others"), DATA, "payload-unavailable"),
    (PayloadKeyMissing("2026-12"), DATA, "payload-key-missing"),
    (None, DATA.upper(), "payload-unavailable"),
    (None, DATA + b"!", "payload-unavailable"),
]


async def test_what_cannot_be_had_now_is_asked_for_again_and_a_moment_says_why(
    pool: Pool, conn: Connection
) -> None:
    objects = Objects()
    ticket = await add_fact(conn)
    async with running(pool, conn, fetch=objects.get) as world:
        for objects.error, objects.data, _ in FAULTS:
            answer = await world.send(asking(ticket))
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")

    told = [seen for name, seen in world.moments.all if name == "data.unavailable"]
    assert [seen["code"] for seen in told] == [code for _, _, code in FAULTS]
    assert {seen["message"] for seen in told} == {str(ticket.message)}


async def test_a_receiver_without_a_store_and_a_reference_that_is_none_give_nothing(
    pool: Pool, conn: Connection
) -> None:
    ticket, odd = await add_fact(conn), await add_fact(conn, objects={"args.data": {"sha256": "../etc"}})
    async with running(pool, conn) as world:
        assert (await world.send(asking(ticket))).status == 503
    async with running(pool, conn, fetch=Objects().get) as world:
        assert (await world.send(asking(odd))).status == 503


async def test_one_ticket_takes_two_places_and_all_of_them_eight(pool: Pool, conn: Connection) -> None:
    objects = Objects()
    objects.go.clear()
    tickets = [await add_fact(conn) for _ in range(5)]
    async with running(pool, conn, fetch=objects.get) as world:
        held = [asyncio.create_task(world.send(asking(tickets[0]))) for _ in range(2)]
        await asked(objects, 2)
        third = await world.send(asking(tickets[0]))
        held += [asyncio.create_task(world.send(asking(one))) for one in tickets[1:4] for _ in range(2)]
        await asked(objects, 8)
        ninth = await world.send(asking(tickets[4]))
        busy = await world.post(event())
        objects.go.set()
        answers = [await one for one in held]
        again = await world.send(asking(tickets[4]))

    assert (third.status, ninth.status, again.status) == (503, 503, 200)
    assert [it.status for it in answers] == [200] * 8
    assert busy.status == 404  # nobody: events are answered all the same


async def asked(objects: Objects, times: int) -> None:
    async with asyncio.timeout(30):
        while len(objects.asked) < times:
            objects.came.clear()
            await objects.came.wait()


async def test_whoever_takes_the_bytes_too_slowly_is_cut_and_keeps_no_place(
    pool: Pool, conn: Connection
) -> None:
    much = bytes(16 * 1024 * 1024)
    ticket = replace(await add_fact(conn), sha256=digest_of(much), size=len(much))
    settings = ReceiverSettings(data_same_max=1, data_seconds=0.1, data_bytes_per_second=2**40)
    async with running(pool, conn, settings=settings, fetch=Objects(much).get) as world:
        with slow_reader() as idle:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(idle, ("127.0.0.1", world.port))
            await loop.sock_sendall(idle, asking(ticket))
            began = await loop.sock_recv(idle, 12)
            await world.moments.until("data.cut", size=len(much))
            await until_free(world)
    assert began == b"HTTP/1.1 200"


def slow_reader() -> socket.socket:
    idle = socket.socket()
    idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    idle.setblocking(False)
    return idle


async def until_free(world: World) -> None:
    async with asyncio.timeout(30):
        while world.receiver.at_work:
            world.receiver.idle.clear()
            await world.receiver.idle.wait()
    assert world.receiver.desk.at_work.total() == 0


async def test_an_event_from_outside_that_names_data_is_stored_and_nothing_is_fetched(world: World) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/data"
    named = event(dataref=url, datahash="sha-256:" + "0" * 64, datasize=1)
    del named["data"]

    answer = await world.send(request(named))

    row = await (await world.conn.execute("select data, body from waypost.inbox")).fetchone()
    assert (answer.status, answer.json) == (202, {"answer": "event"})
    assert row is not None
    assert row[0] is None
    assert json.loads(row[1])["dataref"] == url
    with listener, pytest.raises(BlockingIOError):
        listener.accept()
