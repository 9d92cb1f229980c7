"""A whole deployment under test: workers, relay, receiver and the effect ledger, each a process of its own.

The processes are started through the command, as anybody starts them; they are killed by their ids.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import re
import secrets
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final, Literal
from uuid import UUID

import psycopg

from contracts.signature import Secret
from contracts.vault import Vault
from orchestrator import registry
from orchestrator.cli.processes import Child, die_with_parent
from orchestrator.client import Client, ExecutionView
from orchestrator.core.status import TERMINAL
from orchestrator.flows import Flows, load
from orchestrator.store.database import Connection
from orchestrator.store.hints import Hints, running
from tests.acceptance.book import Book
from tests.acceptance.flows import FOLDER, GATE
from tests.acceptance.outsider import NAME, Outsider
from tests.acceptance.sockets import ports_of, sockets_to
from tests.invariants import at_rest
from tests.waiting import until, until_true

MODULES: Final = ("examples.shop.flows", "tests.acceptance.flows")
SERVICES: Final = ("inventory", "payments", "shipping")
"""The ledger's."""
DESKS: Final = ("labels", "stamps")
MORE_MODULES: Final = ("tests.acceptance.scenario_flows", "tests.acceptance.desk_flows")
LEASE: Final = "2s"
LOOPBACK: Final = "127.0.0.0/8"
PORTS: Final = range(20_000, 32_000)
"""Below those that the system gives to connections, so that none of these takes a receiver's port while it is
dead."""
LEDGER: Final = Path(__file__).with_name("ledger.py")

BOUGHT: Final = ["done stock.reserve", "done payment.charge"]
"""What the ledger did for an order that got so far."""

Role = Literal["worker", "relay", "receiver", "desk"]
STARTED: Final[dict[Role, str]] = {
    "worker": r'"event": "worker started"',
    "relay": r'"event": "relay\.started"',
    "receiver": r'"event": "receiver\.started"',
    "desk": r"listens on http:",
}


@dataclass(slots=True)
class Part:
    """A worker, relay, receiver or desk: the same part again after it was killed and started anew."""

    role: Role
    name: str
    arguments: list[str]
    environment: dict[str, str]
    logs: Path
    child: Child | None = None

    async def start(self) -> None:
        """Start it; returns when it works."""
        self.child = await Child.start(
            self.name, self.arguments, environment=self.environment, logs=self.logs
        )
        await self.child.says(STARTED[self.role])

    @property
    def running(self) -> Child:
        assert self.child is not None, f"{self.name} was not started"
        return self.child

    @property
    def worker_id(self) -> UUID:
        """The identity under which this worker owns executions now."""
        lines = self.running.log.read_text(encoding="utf-8").splitlines()
        started = next(line for line in reversed(lines) if re.search(STARTED["worker"], line))
        return UUID(json.loads(started)["worker"])

    def freeze(self) -> None:
        """Stop it where it stands: when this returns, it does nothing until it is thawed."""
        process = self.running.process
        process.send_signal(signal.SIGSTOP)
        stopped = os.WSTOPPED | os.WNOHANG
        until_true(
            lambda: os.waitid(os.P_PID, process.pid, stopped) is not None, what=f"{self.name} to stand still"
        )

    def thaw(self) -> None:
        """Let it go on; nothing when it was killed meanwhile."""
        with suppress(ProcessLookupError):
            self.running.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL."""
        await self.running.kill()

    async def stop(self) -> None:
        """SIGTERM: it drains."""
        if self.child is not None:
            await self.child.stop()


@dataclass(slots=True)
class Stand:
    """What tests do with a deployment: start orders, look at them, and kill its parts (all but the ledger's)."""

    conn: Connection
    client: Client
    flows: Flows
    parts: list[Part]
    folder: Path
    ledger_ports: list[int]
    environment: dict[str, str]
    outsider: Outsider
    started: dict[str, UUID] = field(default_factory=dict[str, UUID])

    def part(self, role: Role) -> Part:
        return next(part for part in self.parts if part.role == role)

    async def order(self, name: str, *, flow: str = "order", total: int = 4200) -> UUID:
        """Start an order; the ledger behaves as the first word of its name says."""
        order = {"id": name, "customer": "ada", "total": total, "lines": [{"sku": "lamp", "count": 1}]}
        self.started[name] = (await self.client.start(self.flows.get(flow), order, key=name)).execution_id
        return self.started[name]

    async def ended(self, *orders: str) -> list[ExecutionView]:
        """Wait for each of `orders` to be over, whatever its end; half a minute for each."""
        for order in orders:
            await until(lambda order=order: self.is_over(order), what=f"the end of {order}")
        return [await self.client.show(self.started[order]) for order in orders]

    async def at_rest(self) -> list[str]:
        """What does not hold once all has had the time to come to rest."""
        return await at_rest(self.conn)

    async def is_over(self, order: str) -> bool:
        status = await self.one(
            "select status from waypost.execution where execution_id = %s", self.started[order]
        )
        return status in TERMINAL

    async def one(self, query: Any, *values: object) -> Any:
        """The one value that a query finds."""
        row = await (await self.conn.execute(query, values)).fetchone()
        return None if row is None else row[0]

    def book(self) -> Book:
        return Book.read(self.folder / "book")

    def open_gate(self) -> None:
        """Let go on what waits for it: the packing of `packed`, replies about shipments of gated orders."""
        (self.folder / GATE).touch()

    async def waypost(self, *arguments: str) -> str:
        """What the command prints; fails when it does."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "orchestrator", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self.environment},
            preexec_fn=die_with_parent,
        )
        said, complained = await process.communicate()
        assert process.returncode == 0, complained.decode()
        return said.decode()

    async def posting(self) -> int:
        """How many replies the ledger has written to the receiver without having its answer yet."""
        return sum(it["posting"] for it in await self._standing())

    async def is_answered(self, relay: Part) -> bool:
        """Whether no command of that relay is at work in the ledger."""
        standing = zip(self.ledger_ports, await self._standing(), strict=True)
        pid = relay.running.process.pid
        return not any(ports_of(pid, sockets_to(port)) & set(it["handling"]) for port, it in standing)

    async def _standing(self) -> list[dict[str, Any]]:
        return await asyncio.gather(*(standing_at(port) for port in self.ledger_ports))

    async def owed(self) -> int:
        """How many replies the ledger has to post, now or again, and has not been able to."""
        return sum(it["owed"] for it in await self._standing())

    def runs_of(self, desk: Part) -> set[str]:
        """The keys on which this process of a desk acts now."""
        begun: set[str] = set()
        for pid, what, key in self.runs(desk.name):
            if pid == desk.running.process.pid:
                begun = begun - {key} if what == "left" else begun | {key}
        return begun

    def runs(self, desk: str) -> list[tuple[int, str, str]]:
        """What a desk wrote of its runs: the process, what it did (begun, again, left), and the key."""
        file = self.folder / f"{desk}.runs"
        lines = file.read_text(encoding="ascii").splitlines() if file.exists() else []
        return [(int(pid), what, key) for pid, what, key in map(str.split, lines)]

    async def connect(self, dsn: str) -> None:
        """Look through a new connection, the database having been away."""
        await self.conn.close()
        self.conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        self.client = Client(self.conn)

    def living(self) -> dict[int, tuple[str, str]]:
        """By pid the names and roles of the parts that live."""
        children = [(part, part.child) for part in self.parts]
        return {
            child.process.pid: (part.name, part.role)
            for part, child in children
            if child is not None and child.process.returncode is None
        }

    async def start_all(self) -> None:
        """Start every part."""
        await asyncio.gather(*(part.start() for part in self.parts))

    async def kill_all(self) -> None:
        await asyncio.gather(*(part.kill() for part in self.parts))


async def standing_at(port: int) -> dict[str, Any]:
    """What is on its way from the ledger's process at `port`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nhost: ledger\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def facts(view: ExecutionView, *kinds: str) -> list[str]:
    """The facts of these kinds, as "kind path"; an end that is not `done` says so."""
    found: list[str] = []
    for fact in view.facts:
        outcome = json.loads(fact.payload or "{}").get("outcome", "done")
        if fact.kind in kinds:
            found.append(f"{fact.kind} {fact.path}" + ("" if outcome == "done" else f" {outcome}"))
    return found


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, and that no connection will be given."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def environment_of(dsn: str, folder: Path) -> tuple[dict[str, str], Vault]:
    """What all parts have in common, and the vault that they open."""
    key = base64.b64encode(secrets.token_bytes(32)).decode("ascii")
    port = free_port()
    environment = {
        "WAYPOST_DATABASE_URL": dsn,
        "WAYPOST_SECRET_KEY": key,
        "WAYPOST_ALLOW_ADDRESSES": LOOPBACK,
        "WAYPOST_LEASE": LEASE,
        "WAYPOST_RECEIVER_ADDR": f"127.0.0.1:{port}",
        "WAYPOST_RECEIVER_URL": f"http://127.0.0.1:{port}",
        FOLDER: str(folder),
    }
    return environment, Vault.from_text(key)


async def start_ledger(
    folder: Path, *options: str, services: Sequence[str] = SERVICES
) -> tuple[Child, int, dict[str, Any]]:
    """A process of the ledger for `services`, where it listens, and the secrets that it has with each of them."""
    pairs = {name: secrets_of_service() for name in services}
    name = "-".join(["ledger", *services])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        LEDGER,
        *("--book", folder / "book", "--gate", folder / GATE, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "LEDGER_SECRETS": json.dumps(pairs)},
        preexec_fn=die_with_parent,
    )
    child = Child(name, process, folder / f"{name}.log")
    found = await child.says(r"ledger at (\d+)")
    return child, int(found[1]), pairs


def secrets_of_service() -> dict[str, str]:
    return {side: Secret.of(secrets.token_bytes(32)).text for side in ("commands", "replies")}


async def register(conn: Connection, vault: Vault, *, port: int, pairs: dict[str, Any]) -> None:
    """Endpoints and senders for the services of the ledger's process at `port`."""
    for name, pair in pairs.items():
        await register_service(conn, vault, name=name, url=f"http://127.0.0.1:{port}/{name}", pair=pair)


async def register_service(
    conn: Connection, vault: Vault, *, name: str, url: str, pair: dict[str, str]
) -> None:
    secret = Secret.parse(pair["commands"])
    await registry.add_endpoint(conn, vault, name=name, url=url, secret=secret, allow=[ip_network(LOOPBACK)])
    await registry.add_sender(conn, vault, name=name, secret=Secret.parse(pair["replies"]))


async def desk(conn: Connection, vault: Vault, name: str, environment: dict[str, str], folder: Path) -> Part:
    """A desk that is registered and not started yet."""
    pair, port = secrets_of_service(), free_port()
    await register_service(conn, vault, name=name, url=f"http://127.0.0.1:{port}/waypost", pair=pair)
    arguments = ["tests.acceptance.desk", name, "--port", str(port), "--folder", str(folder)]
    own = {**environment, "DESK_COMMANDS": pair["commands"], "DESK_REPLIES": pair["replies"]}
    return Part("desk", name, arguments, own, folder)


async def outsider_of(conn: Connection, vault: Vault, environment: dict[str, str]) -> Outsider:
    secret = secrets_of_service()["replies"]
    await registry.add_sender(conn, vault, name=NAME, secret=Secret.parse(secret))
    return Outsider(environment["WAYPOST_RECEIVER_URL"], secret)


@asynccontextmanager
async def stand(
    dsn: str,
    folder: Path,
    *,
    roles: Sequence[Role] = ("receiver", "relay", "worker"),
    ledger_options: Sequence[str] = (),
    desks: Sequence[str] = (),
) -> AsyncGenerator[Stand]:
    """A deployment on the migrated database at `dsn`; one part for each of `roles`, a process for each service.
    Leaving stops all of it.
    """
    modules = [*MODULES, *MORE_MODULES]
    environment, vault = environment_of(dsn, folder)
    ledgers = await asyncio.gather(
        *(start_ledger(folder, *ledger_options, services=[name]) for name in SERVICES)
    )
    parts = [
        Part(
            role,
            f"{role}-{n}",
            ["orchestrator", role, *(modules if role == "worker" else ())],
            environment,
            folder,
        )
        for n, role in enumerate(roles)
    ]
    try:
        async with running(Hints(dsn)) as hints:
            conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
            for _, port, pairs in ledgers:
                await register(conn, vault, port=port, pairs=pairs)
            parts += [await desk(conn, vault, name, environment, folder) for name in desks]
            ports = [port for _, port, _ in ledgers]
            client = Client(conn, hint=hints.give)
            outsider = await outsider_of(conn, vault, environment)
            found = Stand(conn, client, load(modules), parts, folder, ports, environment, outsider)
            await found.start_all()
            try:
                yield found
            finally:
                await found.conn.close()
    finally:
        await asyncio.gather(*(part.stop() for part in parts))
        await asyncio.gather(*(ledger.kill() for ledger, *_ in ledgers))
    for ledger, *_ in ledgers:
        assert_ledger_was_well(ledger)


def assert_ledger_was_well(ledger: Child) -> None:
    assert not [line for line in ledger.lines if "Traceback" in line], "\n".join(ledger.lines)
