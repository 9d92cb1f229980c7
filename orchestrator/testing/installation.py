"""A whole installation for one test: a database, a worker, a relay, a receiver, and services that answer as told.

async with installed(order_saga) as here:
bank = await here.service("payments")
bank.on(Charge).refuses("declined")
order = await here.start(order_saga, ORDER)
assert (await here.ended(order)).row.status == "compensated"
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets as chance
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar
from uuid import UUID

import aiohttp

from contracts.dataref import Tickets
from contracts.envelope import STRUCTURED, Envelope, encode_structured
from contracts.errors import WaypostError
from contracts.messages import Event
from contracts.observer import Silent
from contracts.signature import Secret, sign
from contracts.vault import KEY_BYTES, Vault
from orchestrator import registry
from orchestrator.bootstrap import RECEIVER_CONNECTIONS, RELAY_CONNECTIONS, WORKER_CONNECTIONS
from orchestrator.cli.processes import Children
from orchestrator.client import Client, ExecutionView
from orchestrator.flows import Flows, load
from orchestrator.objects.large import Large
from orchestrator.simulators.kinds import ANY
from orchestrator.simulators.provider import Provider, provider
from orchestrator.simulators.zoo import Zoo, zoo
from orchestrator.store import database
from orchestrator.store.database import Connection
from orchestrator.store.hints import Hints, running
from orchestrator.testing import clock
from orchestrator.testing.databases import Databases
from orchestrator.testing.service import PATIENCE_SECONDS, Service
from orchestrator.worker import Worker, WorkerLimits
from orchestrator.workflow import Workflow
from receiver import replies
from receiver.authenticity import parse_secret
from receiver.ingress import Receiver
from receiver.schemes import policy_of
from receiver.settings import ReceiverSettings
from relay.relay import Relay
from relay.settings import RelaySettings

I = TypeVar("I")  # noqa: E741  # what a flow is given

SOURCE: Final = "/waypost"
LOOPBACK: Final = (ip_network("127.0.0.0/8"),)
OUTSIDE: Final = "outside"
"""The sender of events that a test posts."""
LOOK: Final = timedelta(milliseconds=100)
"""Between two looks of the parts when nobody hints, and of the test."""


class Unexpected(WaypostError):
    """Commands came for which the test had said no answer."""

    code = "unexpected-commands"


@dataclass(slots=True)
class Place:
    """Where an installation is, as its processes are told."""

    dsn: str
    vault: Vault
    key: str
    port: int

    @property
    def receiver_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Installation:
    """What a test does with it. `client` starts, shows and decides; `conn` is a connection of the test's own."""

    def __init__(self, place: Place, conn: Connection, hints: Hints, stack: AsyncExitStack) -> None:
        self.dsn = place.dsn
        self.receiver_url = place.receiver_url
        self.conn = conn
        self.client = Client(conn, hint=hints.give)
        self.services: dict[str, Service] = {}
        self._place = place
        self._stack = stack
        self._outside: tuple[aiohttp.ClientSession, Secret] | None = None
        self._events = 0

    async def service(self, name: str, *, in_answer: bool = False) -> Service:
        """The service behind the endpoint `name`, which is registered at the first time. With `in_answer` it replies in
        its answers, else by posts to the receiver.
        """
        if name not in self.services:
            endpoint, sender = Secret.of(chance.token_bytes(32)), Secret.of(chance.token_bytes(32))
            service = Service(
                name,
                secret=endpoint,
                signs=sender,
                receiver_url=self.receiver_url,
                in_answer=in_answer,
            )
            await self._stack.enter_async_context(service.serving())
            await registry.add_endpoint(
                self.conn, self._place.vault, name=name, url=service.url, secret=endpoint, allow=LOOPBACK
            )
            await registry.add_sender(self.conn, self._place.vault, name=name, secret=sender)
            self.services[name] = service
        return self.services[name]

    async def endpoint(self, name: str, *behaviours: str) -> Zoo:
        """An endpoint that misbehaves, registered as `name`: its requests get `behaviours` one after the other, such as
        `reset` or `status/503`, and the last one for ever. Raises BehaviourInvalid.
        """
        secret = Secret.of(chance.token_bytes(32))
        made = await self._stack.enter_async_context(zoo(secrets=[secret], script={ANY: behaviours}))
        await registry.add_endpoint(
            self.conn, self._place.vault, name=name, url=made.url, secret=secret, allow=LOOPBACK
        )
        return made

    async def provider(self, scheme: str, *, settings: Mapping[str, Any] | None = None) -> Provider:
        """A provider of webhooks that is registered as a sender of its scheme's name, and posts to the receiver. Raises
        SettingsInvalid.
        """
        form = policy_of(scheme, settings or {}).signature
        # Hexadecimal digits are a secret however that is written.
        text = Secret.of(chance.token_bytes(32)).text if form.spelling == "whsec" else chance.token_hex(32)
        await registry.add_sender(
            self.conn,
            self._place.vault,
            name=scheme,
            scheme=scheme,
            settings=settings,
            secret=parse_secret(form, text),
        )
        url = replies.address_of(self.receiver_url, tenant="default", sender=scheme)
        return await self._stack.enter_async_context(provider(scheme, to=url, secret=text, settings=settings))

    async def start(self, flow: Workflow[I, Any], input: I, *, key: str | None = None) -> UUID:  # noqa: A002  # an execution's input, everywhere
        """Start an execution, and tell its id."""
        return (await self.client.start(flow, input, key=key)).execution_id

    async def ended(self, execution: UUID, *, seconds: float = PATIENCE_SECONDS) -> ExecutionView:
        """The execution, once it has ended or is held. Raises TimeoutError, which says where it is; Unexpected."""
        over = time.monotonic() + seconds
        while True:
            left = over - time.monotonic()
            try:
                view = await self.client.wait(execution, seconds=max(0.0, min(0.5, left)))
            except TimeoutError:
                self.check()  # what has no script is told soon, and not when patience ends
                if left <= 0.5:
                    raise TimeoutError(await self._where(execution)) from None
            else:
                self.check()
                return view

    async def asks(self, execution: UUID, what: str) -> ExecutionView:
        """The execution, once it has asked for `what`: a path or a name, as `sleep`, `charge#2` or an event's type."""
        found: list[ExecutionView] = []

        async def has_asked() -> bool:
            found[:] = [await self.client.show(execution)]
            asked = [fact for fact in found[0].facts if fact.kind == "asked"]
            return any(what in (fact.path, json.loads(fact.payload or "{}").get("name")) for fact in asked)

        await self.until(has_asked, what=f"{execution} to ask for {what}")
        return found[0]

    async def waits_for_try(self, execution: UUID, path: str) -> None:
        """Wait until the command at `path` is due to be sent again later: its last try is settled, and told nothing."""

        async def is_due() -> bool:
            messages = (await self.client.show(execution)).messages
            return any(it.path == path and it.state == "due" and it.attempts > 0 for it in messages)

        await self.until(is_due, what=f"{path} of {execution} to be due again")

    async def until(self, condition: Callable[[], Awaitable[bool]], *, what: str) -> None:
        """Wait for what a test can see. Raises TimeoutError, which says what was waited for."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while not await condition():
            if time.monotonic() > ends:
                raise TimeoutError(f"waited {PATIENCE_SECONDS:.0f} s in vain for {what}")
            await asyncio.sleep(LOOK.total_seconds() / 4)

    async def passes(self, span: timedelta) -> None:
        """Let time pass, at once: sleeps, timeouts, deadlines and tries that are due by then are due now, as after an
        outage of that length.
        """
        if span <= timedelta(0):
            raise ValueError(f"passes: expected more than 0, found {span}: time goes on only")
        await clock.move(self.conn, span)

    async def receives(self, event: Event, *, id: str | None = None) -> None:  # noqa: A002  # the attribute's name on the wire
        """Post an event from outside, signed, to the receiver; returns when it is stored. Of events with one `id` the
        first counts. Raises RuntimeError when it is not taken.
        """
        session, secret = await self._sender()
        self._events += 1
        kind = type(event)
        identity = id or f"event-{self._events}"
        envelope = Envelope(
            id=identity,
            source="/outside",
            type=kind.type_,
            subject=None if kind.key_ is None else str(getattr(event, kind.key_)),
            time=None,
            datacontenttype="application/json",
            data=event.model_dump(mode="json", by_alias=True),
            extensions={},
        )
        body, stamp = encode_structured(envelope), int(time.time())
        headers = {
            "content-type": STRUCTURED,
            "webhook-id": identity,
            "webhook-timestamp": str(stamp),
            "webhook-signature": sign([secret], message_id=identity, timestamp=stamp, body=body),
        }
        url = replies.address_of(self.receiver_url, tenant="default", sender=OUTSIDE)
        async with session.post(url, data=body, headers=headers) as answer:
            if answer.status != 202:
                raise RuntimeError(
                    f"{kind.type_}: the receiver answered {answer.status}: {await answer.text()}"
                )

    def check(self) -> None:
        """Raises Unexpected when a service got a command for which there is no script."""
        found = [f"{name} got {type_}" for name, it in self.services.items() for type_ in it.unexpected]
        if found:
            raise Unexpected(
                f"{', '.join(dict.fromkeys(found))}: expected a script, `service.on(…)`, found none"
            )

    async def _sender(self) -> tuple[aiohttp.ClientSession, Secret]:
        if self._outside is None:
            secret = Secret.of(chance.token_bytes(32))
            session = await self._stack.enter_async_context(aiohttp.ClientSession())
            await registry.add_sender(self.conn, self._place.vault, name=OUTSIDE, secret=secret)
            self._outside = session, secret
        return self._outside

    async def _where(self, execution: UUID) -> str:
        view = await self.client.show(execution)
        last = view.facts[-1]
        return f"{execution} is {view.row.state}; its last fact is {last.kind} {last.path}"


@asynccontextmanager
async def installed(
    *flows: Workflow[Any, Any],
    modules: Sequence[str] = (),
    databases: Databases | None = None,
    processes: bool = False,
) -> AsyncGenerator[Installation]:
    """A new installation that runs `flows` (and those in `modules`) while inside, on a database of its own.

    Its parts run in this process, or, with `processes`, each as a process of the command `waypost`, which imports
    `modules`. Without `databases` it starts a PostgreSQL of its own, which takes some seconds: give it one to keep.
    Raises Unexpected at the end when a service got what the test had said no answer for.
    """
    if processes and (flows or not modules):
        raise ValueError(
            "installed: expected modules=, and no flows, with processes=True, which import their flows"
        )
    key = base64.b64encode(chance.token_bytes(KEY_BYTES)).decode("ascii")
    async with AsyncExitStack() as stack:
        dsn = stack.enter_context(_fresh(databases))
        place = Place(dsn, Vault.from_text(key), key, free_port())
        hints = await stack.enter_async_context(running(Hints(dsn)))
        conn = await stack.enter_async_context(
            await Connection.connect(dsn, **database.connection_arguments(dsn, name="test"))
        )
        here = Installation(place, conn, hints, stack)
        parts = _processes(place, modules) if processes else _tasks(place, _all_of(flows, modules), hints)
        async with parts:
            yield here
            here.check()


@contextmanager
def _fresh(databases: Databases | None) -> Generator[str]:
    if databases is not None:
        with databases.fresh() as dsn:
            yield dsn
        return
    with Databases() as ours, ours.fresh() as dsn:
        yield dsn


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _all_of(flows: Sequence[Workflow[Any, Any]], modules: Sequence[str]) -> Flows:
    return Flows([*flows, *load(modules)]) if modules else Flows(flows)


@asynccontextmanager
async def _tasks(place: Place, flows: Flows, hints: Hints) -> AsyncGenerator[None]:
    """The parts as tasks of this loop, as the processes would have them."""
    stop = asyncio.Event()
    async with (
        database.pool(place.dsn, size=WORKER_CONNECTIONS, name="worker") as of_worker,
        database.pool(place.dsn, size=RELAY_CONNECTIONS, name="relay") as of_relay,
        database.pool(place.dsn, size=RECEIVER_CONNECTIONS, name="receiver") as of_receiver,
    ):
        receiver = Receiver(
            of_receiver,
            vault=place.vault,
            hint=hints.give,
            settings=ReceiverSettings(drain_seconds=1.0),
            fetch=Large.get,
        )
        relay = Relay(
            of_relay,
            vault=place.vault,
            settings=RelaySettings(allow=LOOPBACK, poll=LOOK, sweep=LOOK, drain=timedelta(seconds=1)),
            hint=hints.give,
            hinted=hints.event("outbox"),
        )
        worker = Worker(
            of_worker,
            flows,
            dsn=place.dsn,
            hints=hints,
            source=SOURCE,
            receiver_url=place.receiver_url,
            observer=Silent(),
            limits=WorkerLimits(poll=LOOK, drain=timedelta(seconds=1)),
            tickets=Tickets(place.vault),
        )
        tasks = [
            asyncio.create_task(receiver.serve("127.0.0.1", place.port, stop)),
            asyncio.create_task(relay.run(stop)),
            asyncio.create_task(worker.run(stop)),
        ]
        try:
            while not (receiver.listening and worker.holds_lease):
                for task in tasks:
                    if task.done():
                        await task
                await asyncio.sleep(0.01)
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)


READY: Final[Mapping[str, str]] = {
    "worker": "worker started",
    "relay": "relay.started",
    "receiver": "receiver.started",
}
"""The moment from which a process works."""


@asynccontextmanager
async def _processes(place: Place, modules: Sequence[str]) -> AsyncGenerator[None]:
    """The parts as processes of the command."""
    environment = {
        "WAYPOST_DATABASE_URL": place.dsn,
        "WAYPOST_SECRET_KEY": place.key,
        "WAYPOST_FLOWS": ",".join(modules),
        "WAYPOST_RECEIVER_ADDR": f"127.0.0.1:{place.port}",
        "WAYPOST_RECEIVER_URL": place.receiver_url,
        "WAYPOST_ALLOW_ADDRESSES": "127.0.0.0/8",
        "WAYPOST_HEALTH_ADDR": "off",
    }
    with TemporaryDirectory(prefix="waypost-") as logs:
        async with Children(environment=environment, logs=Path(logs)) as children:
            for part, moment in READY.items():
                child = await children.start(part, "orchestrator", part)
                await child.says(f'"event": {json.dumps(moment)}')
            yield
