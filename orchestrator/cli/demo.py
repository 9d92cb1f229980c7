"""`waypost demo`: every part and three services as processes of their own, and four orders that meet four fates.

Nothing that is printed is guessed: each line about an order is a fact of its journal or a try of the relay, read
from the database while it happens.
"""

from __future__ import annotations

import asyncio
import secrets as chance
import sys
import tempfile
from argparse import Namespace
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Final

from psycopg import sql
from psycopg.conninfo import make_conninfo

from contracts.signature import Secret
from contracts.vault import Vault
from orchestrator import bootstrap, registry
from orchestrator.cli import local
from orchestrator.cli.dev import until
from orchestrator.cli.local import Progress, Stopping
from orchestrator.cli.output import Exit
from orchestrator.cli.processes import Child, Children
from orchestrator.cli.stage import Order, Stage
from orchestrator.client import ExecutionView
from orchestrator.core.status import TERMINAL, Status
from orchestrator.embedded import EmbeddedPostgres, sweep
from orchestrator.flows import load
from orchestrator.settings import Address, Settings
from orchestrator.store.database import Connection

FLOWS: Final = "examples.shop.flows"
SERVICES: Final = ("inventory", "payments", "shipping")
LEASE: Final = "2s"
PATIENCE_SECONDS: Final = 60.0  # for all orders to be over
GOOD_CARD: Final = "4242424242424242"
STOLEN_CARD: Final = "4000000000000002"
LOOPBACK: Final = (ip_network("127.0.0.0/8"),)
ORDERS: Final = (
    Order("order-1001", "everybody agrees", Status.COMPLETED, GOOD_CARD),
    Order("order-1002", "the card is declined", Status.COMPENSATED, STOLEN_CARD),
    Order("order-1003", "shipping first answers 503", Status.COMPLETED, GOOD_CARD),
    Order("order-1004", "its worker is killed", Status.COMPLETED, GOOD_CARD),
)


def run(args: Namespace, settings: Settings) -> int:
    settings = settings.without_dev()
    stay = not args.once and sys.stdout.isatty()
    asyncio.run(show(settings, stay=stay))
    return Exit.OK


async def show(settings: Settings, *, stay: bool) -> None:
    progress = Progress()
    progress.line("Waypost demo: a saga over signed webhooks, with a crash in the middle")
    progress.line()
    stopping = Stopping(progress)
    async with bootstrap.stopping(stopping) as stop, database(settings, progress) as (dsn, folder):
        environment = {
            **local.environment_of(settings, folder=folder, dsn=dsn, lease=LEASE),
            "WAYPOST_HEALTH_ADDR": "127.0.0.1:0",  # workers come and go, and others may be at work here
        }
        async with Children(environment=environment, logs=folder / "logs") as children:
            stopping.children = children
            playing = asyncio.create_task(play(children, progress, dsn))
            await either(playing, stop)
            if stay and not stop.is_set():
                try_next(children, progress, folder)
                await until(stop, children, progress)


async def either(playing: asyncio.Task[None], stop: asyncio.Event) -> None:
    """Until the play is over or somebody wants to stop."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([playing, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not playing.done():
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        raise KeyboardInterrupt
    playing.result()


async def play(children: Children, progress: Progress, dsn: str) -> None:
    worker = await start_parts(children, progress, dsn)
    progress.line()
    async with (
        await Connection.connect(dsn, autocommit=True) as conn,
        bootstrap.client_over(conn) as client,
    ):
        stage = Stage(conn, client, load([FLOWS]).get("order"), progress)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await perform(stage, children, worker, progress)
        progress.line()
        await stage.summary(ORDERS)


async def perform(stage: Stage, children: Children, worker: Child, progress: Progress) -> None:
    """Three orders at once; then one whose worker is killed after its first step."""
    *first, last = ORDERS
    for order in first:
        await stage.start(order)
    await stage.until(first, over)
    await stage.start(last)
    await stage.until([last], between_steps)
    pid = worker.process.pid
    await children.kill(worker)
    progress.line(f"{progress.seconds:6.2f} s  SIGKILL to worker-1 (process {pid}): nobody works now")
    await local.start_worker(children, "worker-2", FLOWS)
    progress.line(f"{progress.seconds:6.2f} s  worker-2 is started")
    await stage.until([last], over)
    progress.line(f"{progress.seconds:6.2f} s  {await stage.burial()}")


async def start_parts(children: Children, progress: Progress, dsn: str) -> Child:
    """Start all but the database, in an order in which nobody misses anybody; the worker."""
    applied = await asyncio.to_thread(local.migrate, dsn)
    progress.done("migrate", f"{applied} migrations applied")
    url = await local.start_receiver(children, Address("127.0.0.1", 0))
    progress.done("receiver", url)
    for name in SERVICES:
        progress.done(name, await start_service(children, name, dsn))
    await local.start_relay(children)
    progress.done("relay", "signs each command, may reach loopback only")
    worker = await local.start_worker(children, "worker-1", FLOWS)
    progress.done("worker", f"flow order, lease {LEASE}")
    return worker


async def start_service(children: Children, name: str, dsn: str) -> str:
    """Start a service with two fresh secrets and register it with the same; where it listens."""
    command, reply = (Secret.of(chance.token_bytes(registry.SECRET_BYTES)) for _ in range(2))
    child = await children.start(
        name,
        f"examples.shop.{name}",
        **{
            f"{name.upper()}_COMMAND_SECRET": command.text,
            f"{name.upper()}_REPLY_SECRET": reply.text,
            "SHOP_DATA_DIR": str(children.logs.parent),
            "SHOP_DECLINED_CARDS": STOLEN_CARD,
            "SHOP_BUSY_ORDERS": "order-1003",
            "SHOP_SLOW_ORDERS": "order-1004",
            "SHOP_SLOW_SECONDS": "1",
        },
    )
    url = (await child.says(r"listens on (http://\S+)"))[1]
    vault = Vault.from_text(children.environment["WAYPOST_SECRET_KEY"])
    async with await Connection.connect(dsn, autocommit=True) as conn:
        await registry.add_endpoint(conn, vault, name=name, url=url, secret=command, allow=LOOPBACK)
        await registry.add_sender(conn, vault, name=name, secret=reply)
    return url


def over(views: Sequence[ExecutionView]) -> bool:
    return all(view.row.status in TERMINAL for view in views)


def between_steps(views: Sequence[ExecutionView]) -> bool:
    """The stock is reserved, and the card is not charged yet."""
    [view] = views
    ended = {fact.path for fact in view.facts if fact.kind == "ended"}
    asked = {fact.path for fact in view.facts if fact.kind == "asked"}
    return "reserve" in ended and "charge" in asked - ended


@asynccontextmanager
async def database(settings: Settings, progress: Progress) -> AsyncGenerator[tuple[str, Path]]:
    """The DSN of a database of the demo's own, and a folder, both gone afterwards.

    On the configured server, beside the configured database, which is left alone; else on one that we start.
    """
    if settings.database_url is None:
        await asyncio.to_thread(sweep, Path(tempfile.gettempdir()))
        server = EmbeddedPostgres.temporary()
        async with local.embedded(server, keep=False) as dsn:
            where = f"{server.binaries.major}, embedded, on 127.0.0.1:{server.port}, in {server.data_dir}"
            progress.done("postgres", where)
            yield dsn, server.data_dir
        return
    name = f"waypost_demo_{chance.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="waypost-demo-") as folder:
        async with await Connection.connect(settings.dsn(), autocommit=True) as conn:
            await conn.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        progress.done("postgres", f"database {name} on the server of WAYPOST_DATABASE_URL")
        try:
            yield make_conninfo(settings.dsn(), dbname=name), Path(folder)
        finally:
            async with await Connection.connect(settings.dsn(), autocommit=True) as conn:
                await conn.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def try_next(children: Children, progress: Progress, folder: Path) -> None:
    file = folder / "environment"
    local.write_environment(
        file, {**children.environment, "WAYPOST_FLOWS": FLOWS, "WAYPOST_DEV": str(folder)}
    )
    order = '{"id": "order-2001", "customer": "you", "total": 100, "lines": []}'
    progress.line()
    progress.line("Everything is still running. In another terminal:")
    progress.line()
    progress.line(f"  . {file}")
    progress.line(f"  waypost start order --input '{order}' --wait")
    progress.line("  waypost list                 every order, and how it stands")
    progress.line("  waypost show ID              its journal, its messages, each try")
    progress.line()
    progress.line(f"Ctrl-C stops. Logs of all parts: {children.logs}")
