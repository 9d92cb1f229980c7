"""A whole deployment: worker, relay, receiver and the three services of the example shop, a process each.

They are started through the command, with every default, and reach one another by HTTP on 127.0.0.1.
"""

from __future__ import annotations

import base64
import secrets as chance
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Final

import psycopg

from bench.processes import Processes, family_seconds, processes
from bench.server import Server
from contracts.signature import Secret
from contracts.vault import KEY_BYTES, Vault
from migrations import runner
from orchestrator import registry
from orchestrator.client import Client
from orchestrator.store.database import Connection, connection_arguments
from orchestrator.store.hints import Hints, running

FLOWS: Final = "examples.shop.flows"
SERVICES: Final = ("inventory", "payments", "shipping")
LOOPBACK: Final = "127.0.0.0/8"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is measured, and the connection and the client of whoever measures it."""

    dsn: str
    conn: Connection
    client: Client
    parts: Processes
    server: Server

    def seconds(self) -> dict[str, float]:
        """The processor time of every part so far, the services as one, the database with all its processes."""
        found = self.parts.seconds()
        services = sum(found.pop(name) for name in SERVICES)
        return {**found, "services": services, "postgres": family_seconds(self.server.pid)}


@asynccontextmanager
async def deployed(server: Server) -> AsyncGenerator[Deployment]:
    """A deployment on a database of its own, at work. Raises Ended when a part does not start, or ends early."""
    key = base64.b64encode(chance.token_bytes(KEY_BYTES)).decode("ascii")
    with server.database("deployment") as dsn, tempfile.TemporaryDirectory(prefix="waypost-bench-") as folder:
        with psycopg.connect(dsn, autocommit=True) as conn:
            runner.migrate(conn)
        environment = {
            "WAYPOST_DATABASE_URL": dsn,
            "WAYPOST_SECRET_KEY": key,
            "WAYPOST_ALLOW_ADDRESSES": LOOPBACK,
            "WAYPOST_HEALTH_ADDR": "127.0.0.1:0",
            "SHOP_DATA_DIR": folder,
        }
        with processes(Path(folder), environment) as parts:
            async with (
                await Connection.connect(dsn, **connection_arguments(dsn, name="bench")) as conn,
                running(Hints(dsn)) as hints,
            ):
                await start(parts, conn, Vault.from_text(key))
                yield Deployment(dsn, conn, Client(conn, hint=hints.give), parts, server)


async def start(parts: Processes, conn: Connection, vault: Vault) -> None:
    """All parts, in an order in which nobody misses anybody."""
    receiver = parts.start("receiver", "orchestrator", "receiver", WAYPOST_RECEIVER_ADDR="127.0.0.1:0")
    port = receiver.says(r'"event": "receiver\.started".*"port": (\d+)')[1]
    parts.environment["WAYPOST_RECEIVER_URL"] = f"http://127.0.0.1:{port}"
    for name in SERVICES:
        await start_service(parts, conn, vault, name)
    parts.start("relay", "orchestrator", "relay").says(r'"event": "relay\.started"')
    parts.start("worker", "orchestrator", "worker", FLOWS).says(r'"event": "worker.started"')


async def start_service(parts: Processes, conn: Connection, vault: Vault, name: str) -> None:
    """One service with its two secrets, and its registration with the same."""
    command, reply = (Secret.of(chance.token_bytes(registry.SECRET_BYTES)) for _ in range(2))
    service = parts.start(
        name,
        f"examples.shop.{name}",
        **{f"{name.upper()}_COMMAND_SECRET": command.text, f"{name.upper()}_REPLY_SECRET": reply.text},
    )
    url = service.says(r"listens on (http://\S+)")[1]
    await registry.add_endpoint(conn, vault, name=name, url=url, secret=command, allow=[ip_network(LOOPBACK)])
    await registry.add_sender(conn, vault, name=name, secret=reply)
