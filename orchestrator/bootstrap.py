"""Where settings become parts. Nothing else makes a pool, a vault, a worker, a relay or a receiver."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg

from contracts.codec import Sealing
from contracts.dataref import Tickets
from contracts.errors import WaypostError
from contracts.log import JsonLines
from contracts.observer import Observer
from contracts.spans import has_collector
from contracts.vault import Vault
from migrations import runner
from orchestrator import libraries, registry
from orchestrator.client import Client
from orchestrator.flows import Flows, load
from orchestrator.objects.kept import Kept
from orchestrator.objects.large import Large
from orchestrator.settings import LEASE, Settings, SettingsInvalid
from orchestrator.store import database
from orchestrator.store.database import Connection, Pool
from orchestrator.store.hints import NOTIFY, Hints, running
from orchestrator.store.transactions import check_role
from orchestrator.task_worker import TASK_CONNECTIONS, TaskLimits, TaskWorker
from orchestrator.tasks import load as load_tasks
from orchestrator.worker import STEP_THREADS, Worker
from receiver import loop
from receiver.ingress import Receiver
from receiver.listener import CannotListen
from relay.relay import Relay
from relay.settings import RelaySettings

if TYPE_CHECKING:
    from orchestrator.telemetry.watch import Watch

T = TypeVar("T")

BLOCKED_EXIT: Final = 70
"""How a worker ends whose event loop does not come back (EX_SOFTWARE): start another one."""

STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WORKER_CONNECTIONS: Final = 8
RELAY_CONNECTIONS: Final = 4
RECEIVER_CONNECTIONS: Final = 4


class NotMigrated(WaypostError):
    """The database has not the tables that this release works with."""

    code = "not-migrated"

    def __init__(self, waiting: Sequence[str]) -> None:
        super().__init__(
            f"database: expected all migrations, found {len(waiting)} to apply ({', '.join(waiting)});"
            " run `waypost migrate`"
        )


def observer(part: str) -> Observer:
    """Log lines on stderr, under the name of this part."""
    return JsonLines(sys.stderr.write, part=part, now=lambda: datetime.now(UTC))


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a process's one coroutine."""
    return loop.run(main)


@asynccontextmanager
async def stopping(asked: Callable[[int], None] | None = None) -> AsyncGenerator[asyncio.Event]:
    """An event that SIGTERM, SIGINT or SIGHUP sets: drain. A second signal ends the process at once.

    `asked` decides instead what each signal does besides; it is told how many there have been.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    asked = asked or leave_at_second
    times = 0

    def ask() -> None:
        nonlocal times
        times += 1
        stop.set()
        asked(times)

    # Who starts us with nohup does not want us to hear SIGHUP.
    signs = [sign for sign in STOPPING if signal.getsignal(sign) != signal.SIG_IGN or sign != signal.SIGHUP]
    for sign in signs:
        loop.add_signal_handler(sign, ask)
    try:
        yield stop
    finally:
        for sign in signs:
            loop.remove_signal_handler(sign)


def leave_at_second(times: int) -> None:
    if times > 1:
        os._exit(130)


@asynccontextmanager
async def pool(settings: Settings, *, part: str, size: int) -> AsyncGenerator[Pool]:
    """A pool on a database that was looked at: reachable, safe, migrated. Raises what is wrong with it."""
    async with connection(settings, part=part) as conn:
        await database.check_settings(conn)
    await asyncio.to_thread(check_migrated, settings.dsn())
    async with database.pool(settings.dsn(), size=size, name=part) as found:
        yield found


@asynccontextmanager
async def connection(settings: Settings, *, part: str = "cli") -> AsyncGenerator[Connection]:
    """One connection, in autocommit. Raises psycopg.OperationalError when there is no database."""
    dsn = settings.dsn()
    Sealing.codec = settings.codec()
    Large.kept = None if (objects := settings.objects()) is None else Kept(objects)
    async with await Connection.connect(dsn, **database.connection_arguments(dsn, name=part)) as conn:
        yield conn


def check_migrated(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True, connect_timeout=3) as conn:
        if waiting := runner.pending(conn):
            raise NotMigrated([migration.name for migration in waiting])


@asynccontextmanager
async def client(settings: Settings) -> AsyncGenerator[Client]:
    """What starts, shows and decides, over a connection of its own."""
    async with connection(settings) as conn, client_over(conn) as found:
        yield found


@asynccontextmanager
async def client_over(conn: Connection) -> AsyncGenerator[Client]:
    """A client whose hints have reached the workers when it is left."""
    given: list[asyncio.Task[None]] = []

    async def notify(topic: str) -> None:
        await conn.execute(NOTIFY, {"topics": [topic]})

    try:
        yield Client(
            conn,
            hint=lambda topic: given.append(asyncio.create_task(notify(topic))),
            traced=has_collector(os.environ),
        )
    finally:
        await asyncio.gather(*given, return_exceptions=True)  # a hint that is lost costs a poll


def watch_of(settings: Settings, part: str) -> Watch:
    """Who counts and answers for a process of `part`."""
    from orchestrator.telemetry.watch import Watch  # noqa: PLC0415  # commands that end at once need none of it

    return Watch(settings, part, observer(part))


async def worker(settings: Settings, modules: Sequence[str]) -> None:
    """A worker, until it is asked to stop."""
    flows = flows_of(settings, modules)
    check_keys(flows, settings)
    watch = watch_of(settings, "worker")
    said = watch.said
    libraries.hear(said)
    collect_less()
    async with (
        stopping() as stop,
        pool(settings, part="worker", size=WORKER_CONNECTIONS) as found,
        running(Hints(settings.listen_dsn())) as hints,
    ):
        if Large.kept is not None:
            await Large.kept.check()
        if settings.application_role is not None:
            async with found.connection() as conn:
                await check_role(conn, settings.application_role)
        work = Worker(
            found,
            flows,
            dsn=settings.listen_dsn(),
            hints=hints,
            lease=settings.lease,
            source=settings.source,
            receiver_url=settings.receiver_url,
            observer=said,
            blocked=partial(os._exit, BLOCKED_EXIT),
            traced=watch.traced,
            segment_gap=settings.trace_segment_gap,
            changed_flows=settings.changed_flows,
            application_role=settings.application_role,
            tickets=await tickets_of(settings, found),
        )

        async def lease() -> str | None:
            return None if work.holds_lease else "not held"

        async with watch.serving(found, stop, lease=lease):
            await work.run(stop)
    leave_threads()


async def task_worker(
    settings: Settings, modules: Sequence[str], *, queues: Sequence[str], concurrency: int
) -> None:
    """A worker of queues, until it is asked to stop."""
    from orchestrator.telemetry.processed import Processed  # noqa: PLC0415  # as in `watch_of`

    tasks = load_tasks(modules)
    watch = watch_of(settings, "tasks")
    said = watch.said
    libraries.hear(said)
    async with (
        stopping() as stop,
        pool(settings, part="tasks", size=TASK_CONNECTIONS) as found,
        running(Hints(settings.listen_dsn())) as hints,
        Processed.exporting(said, traced=watch.traced) as spans,
    ):
        work = TaskWorker(
            found,
            tasks,
            queues=queues,
            hints=hints,
            observer=said,
            limits=TaskLimits(concurrency=concurrency, lease=task_lease(settings)),
            current=spans.current,
            ended=spans.ended,
        )
        async with watch.serving(found, stop):
            await work.run(stop)
    leave_threads()


def task_lease(settings: Settings) -> timedelta:
    """A lease below the default asks for quick recovery everywhere: then a task is held no longer either."""
    ours = TaskLimits().lease
    return ours if settings.lease >= LEASE else min(ours, settings.lease)


def leave_threads() -> None:
    """End the process although a local step does not end: its execution is for others to take over.

    Python would wait for the step's thread, for ever perhaps, after everything else is over.
    """
    stuck = [thread for thread in threading.enumerate() if thread.name.startswith(STEP_THREADS)]
    for thread in stuck:
        thread.join(timeout=0.5)
    if any(thread.is_alive() for thread in stuck):
        sys.stderr.flush()
        os._exit(0)


def collect_less() -> None:
    """Let the garbage collector look less often, and never at what was imported.

    A worker keeps thousands of coroutines that are alive on purpose. With Python's defaults, walking them
    again and again costs a third of its processor time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def tickets_of(settings: Settings, pool: Pool) -> Tickets | None:
    """What lets services get data that are too large for messages; none without a payload store, or without our key.

    Raises WrongKey when it is not that of this database.
    """
    if Large.kept is None or settings.secret_key is None:
        return None
    return Tickets(await vault_of(settings, pool))


async def vault_of(settings: Settings, pool: Pool) -> Vault:
    """The vault with our key. Raises SettingsInvalid without a key, WrongKey when it is not that of this database."""
    vault = settings.vault()
    async with pool.connection() as conn:
        await registry.check_key(conn, vault)
    return vault


async def relay(settings: Settings) -> None:
    """A relay, until it is asked to stop."""
    watch = watch_of(settings, "relay")
    said = watch.said
    libraries.hear(said)
    collect_less()
    async with (
        stopping() as stop,
        pool(settings, part="relay", size=RELAY_CONNECTIONS) as found,
        running(Hints(settings.listen_dsn())) as hints,
    ):
        work = Relay(
            found,
            vault=await vault_of(settings, found),
            settings=relay_settings(settings),
            observer=said,
            hint=hints.give,
            hinted=hints.event("outbox"),
            traced=watch.traced,
        )
        async with watch.serving(found, stop):
            await work.run(stop)


def relay_settings(settings: Settings) -> RelaySettings:
    """A lease below the default asks for quick recovery everywhere: then a claim lasts no longer either."""
    ours = RelaySettings(allow=settings.allow_addresses)
    if settings.lease >= LEASE:
        return ours
    return RelaySettings(allow=settings.allow_addresses, claim_lease=settings.lease)


async def receiver(settings: Settings) -> None:
    """A receiver, until it is asked to stop."""
    watch = watch_of(settings, "receiver")
    said = watch.said
    libraries.hear(said)
    collect_less()
    async with (
        stopping() as stop,
        pool(settings, part="receiver", size=RECEIVER_CONNECTIONS) as found,
        running(Hints(settings.listen_dsn())) as hints,
    ):
        work = Receiver(
            found,
            vault=await vault_of(settings, found),
            observer=said,
            hint=hints.give,
            traced=watch.traced,
            fetch=None if Large.kept is None else Large.get,
        )

        async def listening() -> str | None:
            return None if work.listening else "not yet"

        async with watch.serving(found, stop, listening=listening):
            try:
                await work.serve(*settings.receiver_addr, stop)
            except OSError as error:
                raise CannotListen("WAYPOST_RECEIVER_ADDR", *settings.receiver_addr, error) from None


def check_keys(flows: Flows, settings: Settings) -> None:
    """Raises SettingsInvalid for a flow whose business key lies in an event's data, where payloads are sealed."""
    inside = [f"{flow.name}@{flow.version}" for flow in flows if flow.key is not None]
    if settings.payload_keys is not None and inside:
        found = (
            f"found {', '.join(inside)} with key= in the data: whoever stores a sealed event cannot read it"
        )
        raise SettingsInvalid(
            [f"WAYPOST_PAYLOAD_KEYS: expected flows that events start by their subject, {found}"]
        )


def flows_of(settings: Settings, modules: Sequence[str]) -> Flows:
    """The flows in `modules`, else in WAYPOST_FLOWS. Raises SettingsInvalid when neither names any."""
    named = tuple(modules) or settings.flows
    if not named:
        raise SettingsInvalid(
            ["WAYPOST_FLOWS: expected modules with flows, here, as arguments or with --module, found none"]
        )
    return load(named)
