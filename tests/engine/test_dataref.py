"""Data that are too large for a message: named by it, got by its service, and by nobody else. All parts are real."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Final
from uuid import UUID

import aiohttp
import pytest
from pydantic import BaseModel

from contracts.codec import Sealing
from contracts.dataref import Tickets, named
from contracts.envelope import ABSENT, Envelope, decode_structured
from contracts.limits import PAYLOAD_BYTES_MAX
from contracts.messages import Command, Event
from contracts.objects import digest_of
from contracts.signature import Secret
from orchestrator import Context, Retry, Sensitive, StepRefused, discretion, outbox, registry, workflow
from orchestrator.client import Client
from orchestrator.flows import Flows
from orchestrator.objects.files import FileStore
from orchestrator.objects.large import Large
from orchestrator.objects.sweep import sweep
from orchestrator.rekey import rekey
from orchestrator.store.database import Connection, Pool
from receiver.ingress import Receiver
from receiver.memory import LocalMemory
from receiver.participant import Delivery, Failed, Participant
from receiver.settings import ReceiverSettings
from relay.relay import Relay
from relay.settings import RelaySettings
from tests.engine.conftest import Working
from tests.engine.test_emit import subscriber
from tests.engine.test_large import (
    FIRST,
    LARGE,
    SECOND,
    changes,
    cuts,
    loses,
    objects_in,
    quiet,
    referring_facts,
    seal_with,
    until_over,
    use,
)
from tests.moments import Moments
from tests.receiver.world import VAULT

COMMANDS, REPLIES = Secret.of(b"c" * 32), Secret.of(b"r" * 32)
TICKETS: Final = Tickets(VAULT)
SOON: Final = timedelta(milliseconds=50)
WEEK: Final = timedelta(days=7)


class Stored(BaseModel):
    size: int


class Store(Command[Stored], endpoint="archive", type="archive.store"):
    text: str


class Lose(Command[Stored], endpoint="archive", type="archive.lose"):
    text: str


class Drop(Command[None], endpoint="archive", type="archive.drop"):
    text: str


class Card(Command[None], endpoint="archive", type="archive.card"):
    number: Annotated[str, Sensitive]
    text: str


class Printed(Event, type="paper.printed", key="paper"):
    paper: str
    text: str


@workflow(name="archives", version="1")
async def archives(ctx: Context, text: str) -> int:
    return (await ctx.call(Store(text=text), undo=Drop(text=text))).size


@workflow(name="archives-in-vain", version="1")
async def archives_in_vain(ctx: Context, text: str) -> None:
    await ctx.call(Lose(text=text), undo=Drop(text=text), retry=Retry(attempts=2, first=SOON))


@workflow(name="archives-much", version="1")
async def archives_much(ctx: Context, times: int) -> int:
    return (await ctx.call(Store(text=LARGE * times))).size


@workflow(name="archives-or-says-why", version="1")
async def archives_or_says_why(ctx: Context, times: int) -> str:
    try:
        await ctx.call(Store(text=LARGE * times))
    except StepRefused as refused:
        return f"{refused.code}: {refused.detail}"
    return "stored"


@workflow(name="archives-card", version="1")
async def archives_card(ctx: Context, text: str) -> None:
    await ctx.call(Card(number="4242-4242", text=text))


@workflow(name="prints", version="1")
async def prints(ctx: Context, text: str) -> None:
    ctx.emit(Printed(paper="p1", text=text))


@workflow(name="reads", version="1")
async def reads(ctx: Context, paper: str) -> int:
    return len((await ctx.event(Printed, key=paper)).text)


FLOWS: Final = Flows(
    [archives, archives_in_vain, archives_much, archives_or_says_why, archives_card, prints, reads]
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    use(FileStore(tmp_path / "objects"))
    yield tmp_path / "objects"
    Large.kept = None
    Sealing.codec = None


@dataclass
class Here:
    """All parts around one service, `archive`, which keeps what it got."""

    conn: Connection
    client: Client
    receiver_url: str
    moments: Moments
    got: list[tuple[str, str, Delivery]] = field(default_factory=list[tuple[str, str, Delivery]])

    async def events(self) -> list[Envelope]:
        """What the outbox has, as it is sent."""
        rows = await (
            await self.conn.execute("select message_id::text from waypost.outbox order by message_id")
        ).fetchall()
        return [decode_structured((await outbox.see(self.conn, UUID(name))).message.body) for (name,) in rows]


Everything = Any


@pytest.fixture
def everything(working: Working, client: Client, conn: Connection, dsn: str, pool: Pool) -> Everything:
    @asynccontextmanager
    async def one() -> AsyncGenerator[Here]:
        stop, moments = asyncio.Event(), Moments()
        receiver = Receiver(
            pool, vault=VAULT, observer=moments, fetch=Large.get, settings=ReceiverSettings(drain_seconds=1.0)
        )
        relay = Relay(
            pool,
            vault=VAULT,
            settings=RelaySettings(
                allow=(ip_network("127.0.0.0/8"),), poll=SOON, sweep=SOON, drain=timedelta(seconds=1)
            ),
        )
        async with AsyncExitStack() as stack:
            serving = asyncio.create_task(receiver.serve("127.0.0.1", 0, stop))
            url = f"http://127.0.0.1:{(await moments.until('receiver.started'))['port']}"
            here = Here(conn, client, url, moments)
            port = await stack.enter_async_context(service(here).serving())
            await registry.add_endpoint(
                conn,
                VAULT,
                name="archive",
                url=f"http://127.0.0.1:{port}/waypost",
                secret=COMMANDS,
                allow=(ip_network("127.0.0.0/8"),),
                replace=True,
            )
            await registry.add_sender(conn, VAULT, name="archive", secret=REPLIES, replace=True)
            relaying = asyncio.create_task(relay.run(stop))
            try:
                async with working(flows=FLOWS, receiver_url=url, tickets=TICKETS, forgetful=True):
                    yield here
            finally:
                stop.set()
                await asyncio.gather(serving, relaying)

    return one


def service(here: Here) -> Participant:
    archive = Participant(
        name="archive",
        receiver_url=here.receiver_url,
        secret=REPLIES,
        accepts={"/waypost": COMMANDS},
        memory=LocalMemory(),
        observer=here.moments,
    )

    @archive.does(Store)
    def store(command: Store, delivery: Delivery) -> Stored:
        here.got.append(("store", command.text, delivery))
        return Stored(size=len(command.text))

    @archive.does(Lose)
    def lose(command: Lose, delivery: Delivery) -> Stored:
        here.got.append(("lose", command.text, delivery))
        raise Failed("lost")

    @archive.does(Drop)
    def drop(command: Drop, delivery: Delivery) -> None:
        here.got.append(("drop", command.text, delivery))

    @archive.does(Card)
    def card(command: Card, delivery: Delivery) -> None:
        here.got.append(("card", command.text, delivery))

    return archive


async def get(url: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    async with aiohttp.ClientSession() as session, session.request(method, url) as answer:
        return (
            answer.status,
            {name.lower(): value for name, value in answer.headers.items()},
            await answer.read(),
        )


@pytest.mark.parametrize("sealed", [True, pytest.param(False, marks=pytest.mark.proof)])
async def test_a_service_gets_what_a_command_names_as_if_it_had_come_with_it(
    everything: Everything, folder: Path, *, sealed: bool
) -> None:
    if sealed:
        seal_with(f"first:{FIRST}")
    async with everything() as here:
        started = (await here.client.start(FLOWS.get("archives"), LARGE)).execution_id
        view = await until_over(here.client, started)
        [event] = await here.events()
        [(_, text, delivery)] = here.got
        one = named(event)
        status, headers, body = await get(one.url)

    assert (view.output, text) == (len(LARGE), LARGE)
    assert delivery.event.data == {"text": LARGE}
    assert event.data is ABSENT
    assert event.datacontenttype == "application/json"
    assert one.url.startswith(f"{here.receiver_url}/data/")
    assert (status, json.loads(body)) == (200, {"text": LARGE})
    assert (digest_of(body), len(body)) == (one.sha256, one.size)
    assert headers["etag"] == f'"sha-256:{one.sha256}"'
    assert headers["cache-control"] == "private, no-store"
    stored = b"".join(path.read_bytes() for path in objects_in(folder))
    assert (b"xxxxxxxxxxxx" in stored) is not sealed
    told = json.dumps(here.moments.all, default=str)
    assert one.url.rpartition("/")[2] not in told


@pytest.mark.proof
async def test_an_undo_names_its_data_too_and_so_does_a_command_that_is_made_again(
    everything: Everything,
) -> None:
    async with everything() as here:
        started = (await here.client.start(FLOWS.get("archives-in-vain"), LARGE)).execution_id
        view = await until_over(here.client, started)
        events = await here.events()
        found = [await get(named(event).url) for event in events]

    assert view.row.status == "compensated"
    assert [(what, text) for what, text, _ in here.got] == [
        ("lose", LARGE),
        ("lose", LARGE),
        ("drop", LARGE),
    ]
    assert [event.type for event in events] == ["archive.lose", "archive.lose", "archive.drop"]
    assert [status for status, _, _ in found] == [200, 200, 200]
    assert len({named(event).url for event in events}) == 3


@pytest.mark.proof
async def test_urls_stay_as_they_are_when_objects_are_sealed_anew_and_nothing_that_they_need_is_swept(
    everything: Everything, folder: Path, conn: Connection
) -> None:
    seal_with(f"first:{FIRST}")
    async with everything() as here:
        started = (await here.client.start(FLOWS.get("archives"), LARGE)).execution_id
        await until_over(here.client, started)
        [event] = await here.events()
        await rekey(conn, seal_with(f"second:{SECOND},first:{FIRST}"), progress=quiet)
        for path in objects_in(folder):
            os.utime(path, (0, 0))
        before = len(objects_in(folder))
        swept = await sweep(conn, FileStore(folder), age=WEEK, progress=quiet)
        seal_with(f"second:{SECOND}")
        use(FileStore(folder))
        status, _, body = await get(named(event).url)

    assert (status, digest_of(body)) == (200, named(event).sha256)
    assert (before, swept) == (8, 4)


@pytest.mark.proof
async def test_bytes_that_the_store_has_no_more_or_has_changed_are_given_to_nobody(
    everything: Everything, folder: Path
) -> None:
    async with everything() as here:
        started = (await here.client.start(FLOWS.get("archives"), LARGE)).execution_id
        await until_over(here.client, started)
        [event] = await here.events()
        for fault in (changes, cuts, loses):
            fault(folder)
            use(FileStore(folder))
            assert (await get(named(event).url))[0] == 503
        Large.kept = None
        assert (await get(named(event).url))[0] == 503

    assert here.moments.count("data.unavailable", code="payload-unavailable") == 4


@pytest.mark.proof
async def test_a_ticket_ends_with_the_time_of_its_command(everything: Everything) -> None:
    async with everything() as here:
        started = (await here.client.start(FLOWS.get("archives"), LARGE)).execution_id
        await until_over(here.client, started)
        [event] = await here.events()

    ticket = TICKETS.read(named(event).url.rpartition("/")[2])
    assert ticket is not None
    until = datetime.fromisoformat(str(event.extensions["expirytime"]))
    assert ticket.expires == int(until.timestamp())
    assert (ticket.execution, str(ticket.message)) == (started, event.id)


@pytest.mark.proof
async def test_a_worker_that_dies_before_its_commit_leaves_an_object_that_nothing_names(
    everything: Everything, folder: Path, conn: Connection
) -> None:
    store = Stuck(FileStore(folder))
    use(store)
    async with everything() as here:
        started = (await here.client.start(FLOWS.get("archives-much"), 1)).execution_id
        await store.has_put.wait()
    assert await referring_facts(conn, started) == []
    for path in objects_in(folder):
        os.utime(path, (0, 0))

    assert len(objects_in(folder)) == 1
    assert await sweep(conn, FileStore(folder), age=WEEK, progress=quiet) == 1
    use(FileStore(folder))
    async with everything() as here:
        assert (await until_over(here.client, started)).output == len(LARGE)


class Stuck:
    """A store that has what it is given, and never says so."""

    name = "stuck:"

    def __init__(self, store: FileStore) -> None:
        self.store = store
        self.has_put = asyncio.Event()

    async def put(self, digest: str, data: bytes) -> None:
        await self.store.put(digest, data)
        self.has_put.set()
        await asyncio.Event().wait()

    async def get(self, digest: str, *, size: int) -> bytes:
        return await self.store.get(digest, size=size)

    async def delete(self, digest: str, *, than: Any) -> None:
        await self.store.delete(digest, than=than)

    async def older(self, than: Any, *, after: str, limit: int) -> list[str]:
        return await self.store.older(than, after=after, limit=limit)


@pytest.mark.proof
async def test_an_emitted_event_names_its_data_and_flows_of_the_same_installation_get_it_whole(
    everything: Everything, conn: Connection
) -> None:
    await subscriber(conn, "press", of="paper.printed")
    async with everything() as here:
        reader = (await here.client.start(FLOWS.get("reads"), "p1")).execution_id
        printer = (await here.client.start(FLOWS.get("prints"), LARGE)).execution_id
        assert (await until_over(here.client, printer)).row.status == "completed"
        assert (await until_over(here.client, reader)).output == len(LARGE)
        [event] = await here.events()
        status, _, body = await get(named(event).url)

    assert (event.type, event.subject) == ("paper.printed", "p1")
    assert (status, json.loads(body)["text"]) == (200, LARGE)


@pytest.mark.proof
async def test_nobody_is_shown_a_ticket_and_of_sensitive_data_no_hash(
    everything: Everything, conn: Connection
) -> None:
    async with everything() as here:
        for flow in ("archives", "archives-card"):
            await until_over(here.client, (await here.client.start(FLOWS.get(flow), LARGE)).execution_id)
        seen = {event.type: await outbox.see(conn, UUID(event.id)) for event in await here.events()}
    shown = {kind: (await discretion.message(conn, one, tenant=1)).message.body for kind, one in seen.items()}
    plain, card = (json.loads(shown[kind]) for kind in ("archive.store", "archive.card"))

    assert plain["dataref"] == f"{here.receiver_url}/data/…"
    assert plain["datasize"] == len(LARGE) + 11
    assert plain["datahash"].startswith("sha-256:")
    body = base64.b64encode(seen["archive.store"].message.body).decode()
    assert body in outbox.curl(seen["archive.store"], "http://a.test")
    assert TICKETS.read(json.loads(seen["archive.store"].message.body)["dataref"].rpartition("/")[2])
    assert card == {"[redacted]": "[redacted]"}


def test_of_an_event_with_sensitive_data_elsewhere_people_see_neither_where_nor_which() -> None:
    event = {"type": "t", "dataref": "https://a.test/x", "datahash": "sha-256:00", "datasize": 2}

    shown = json.loads(discretion.shown_body(json.dumps(event).encode(), ("number",), []))

    assert shown == event | {"dataref": "[redacted]", "datahash": "[redacted]"}


@pytest.mark.parametrize(
    ("store", "tickets", "way"),
    [
        (True, None, "with WAYPOST_PAYLOAD_STORE and WAYPOST_SECRET_KEY for the worker it may have 16 MiB"),
        (
            False,
            TICKETS,
            "with WAYPOST_PAYLOAD_STORE and WAYPOST_SECRET_KEY for the worker it may have 16 MiB",
        ),
    ],
)
async def test_without_a_store_or_a_key_a_large_command_is_refused_and_says_what_would_take_it(
    working: Working, client: Client, *, store: bool, tickets: Tickets | None, way: str
) -> None:
    if not store:
        Large.kept = None
    started = (await client.start(FLOWS.get("archives-or-says-why"), 1)).execution_id
    async with working(flows=FLOWS, tickets=tickets):
        said = (await until_over(client, started)).output

    size = len(LARGE) + len('{"do":"call","endpoint":"archive","name":"archive.store","data":{"text":""}}')
    assert (
        said
        == f"too-large: call store: args: expected at most {PAYLOAD_BYTES_MAX} bytes, found {size}; {way}"
    )
