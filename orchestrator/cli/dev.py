"""`waypost dev`: every part on this machine, over a data folder that is kept.

The database is the configured one, or a PostgreSQL of our own in the data folder. The relay may call loopback
addresses.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from orchestrator import bootstrap
from orchestrator.cli import local
from orchestrator.cli.failures import Failures
from orchestrator.cli.local import Progress, Stopping
from orchestrator.cli.output import Exit
from orchestrator.cli.processes import FALLS_MAX, Children, stands_up
from orchestrator.embedded import EmbeddedPostgres, ServerFailed, take_lock
from orchestrator.settings import Settings

LOOK_SECONDS: Final = 0.2  # between two looks whether the database still runs


def run(args: Namespace, settings: Settings) -> int:
    settings = settings.without_dev()
    modules = tuple(args.modules) or settings.flows
    bootstrap.flows_of(settings, modules)  # what is wrong with them is told before anything is started
    asyncio.run(serve(settings, modules))
    return Exit.OK


async def serve(settings: Settings, modules: Sequence[str]) -> None:
    folder = settings.data_dir.resolve()
    progress = Progress()
    stopping = Stopping(progress)
    async with bootstrap.stopping(stopping) as stop, database(settings, folder, progress) as (dsn, server):
        applied = await asyncio.to_thread(local.migrate, dsn)
        progress.done("migrate", f"{applied} migrations applied" if applied else "up to date")
        environment = local.environment_of(settings, folder=folder, dsn=dsn)
        hear = Failures(progress.failed)
        async with Children(environment=environment, logs=folder / "logs", hear=hear) as children:
            stopping.children = children
            url = await local.start_receiver(
                children, settings.receiver_addr, **local.health_of(settings, "receiver")
            )
            port = settings.receiver_addr.port
            moved = "" if port == 0 or url.endswith(f":{port}") else f" (port {port} is taken)"
            progress.done("receiver", url + moved)
            await local.start_relay(children, **local.health_of(settings, "relay"))
            progress.done("relay", "may reach loopback")
            await local.start_worker(children, "worker", *modules, **local.health_of(settings, "worker"))
            progress.done("worker", ", ".join(modules))
            file = folder / "environment"
            ours = {} if settings.database_url else {"WAYPOST_DEV": str(folder)}
            local.write_environment(
                file, {**children.environment, **ours, "WAYPOST_FLOWS": ",".join(modules)}
            )
            progress.line()
            progress.line(
                f"In another terminal:  . {file}   then   waypost endpoint add NAME URL · sender add NAME"
            )
            progress.line("                      waypost start FLOW --input JSON · show ID · list")
            if settings.health_addr is not None:
                progress.line(f"Health and metrics:   {await health_at(children)}")
            progress.line(f"Logs: {folder / 'logs'}. Ctrl-C stops. The data stays in {folder}.")
            await until(stop, children, progress, server)


async def health_at(children: Children) -> str:
    """Where each part says how it is."""
    told = [f"{child.name} :{(await child.says(local.HEALTH))[1]}" for child in children.all]
    return " · ".join([*told, "with /livez, /readyz, /metrics"])


async def until(
    stop: asyncio.Event, children: Children, progress: Progress, server: EmbeddedPostgres | None = None
) -> None:
    """Wait for `stop`, and start again what ends. Raises ProcessEnded or ServerFailed when it does not stay up."""
    waits: list[asyncio.Task[Any]] = [
        asyncio.create_task(stop.wait()),
        asyncio.create_task(children.keep(progress.line)),
    ]
    if server is not None:
        waits.append(asyncio.create_task(keep(server, progress)))
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in done:
            wait.result()
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def keep(server: EmbeddedPostgres, progress: Progress) -> None:
    """Start the database again when it ends. Returns never; raises ServerFailed when it does not stay up."""
    falls: deque[float] = deque(maxlen=FALLS_MAX)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if server.is_over:
            if not stands_up(falls):
                raise ServerFailed("postgres", f"it does not stay up; its log: {server.log}")
            progress.line(f"postgres has ended; its log: {server.log}; it is started again")
            await asyncio.to_thread(server.start_again)


@asynccontextmanager
async def database(
    settings: Settings, folder: Path, progress: Progress
) -> AsyncGenerator[tuple[str, EmbeddedPostgres | None]]:
    """The DSN of the configured database, or of our own in `folder`, with its server then."""
    if settings.database_url is not None:
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        with take_lock(folder):
            async with bootstrap.connection(settings):
                progress.done("postgres", "the one of WAYPOST_DATABASE_URL")
            yield settings.dsn(), None
        return
    server = EmbeddedPostgres(folder)
    async with local.embedded(server, keep=True) as dsn:
        progress.done(
            "postgres", f"{server.binaries.major}, embedded, 127.0.0.1:{server.port}, data in {folder}"
        )
        yield dsn, server
