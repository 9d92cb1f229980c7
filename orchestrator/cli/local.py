"""All parts on one machine, as `demo` and `dev` run them: database, key, receiver, relay, worker."""

from __future__ import annotations

import asyncio
import base64
import secrets as chance
import shlex
import socket
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import psycopg

from contracts.vault import KEY_BYTES
from migrations import runner
from orchestrator.cli.output import note, plain
from orchestrator.cli.processes import Child, Children
from orchestrator.embedded import EmbeddedPostgres
from orchestrator.settings import HEALTH_PORTS, Address, Settings

LOOPBACK: Final = "127.0.0.0/8,::1/128"
HEALTH: Final = r'"event": "health\.started".*"port": (\d+)'
STARTED: Final = r'"event": "receiver\.started".*"port": (\d+)'


class Progress:
    """What goes on, live, on stderr: time since the start, a mark, words."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        encoding = (sys.stderr.encoding or "ascii").lower()
        self.good, self.bad = ("✔", "✖") if encoding.startswith("utf") else ("ok", "no")

    def done(self, what: str, detail: object = "") -> None:
        note(f"  {self.good} {what:<12}{plain(detail):<68} {self.seconds:6.1f} s")

    def failed(self, text: str) -> None:
        self.line(f"{self.bad} {text}")

    def line(self, text: str = "") -> None:
        note(f"  {plain(text)}" if text else "")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


def key_in(folder: Path) -> str:
    """The key that seals secrets, kept in `folder` for its owner only and made when it is not there."""
    file = folder / "secret-key"
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(base64.b64encode(chance.token_bytes(KEY_BYTES)).decode("ascii"))
    return file.read_text(encoding="ascii").strip()


def environment_of(settings: Settings, *, folder: Path, dsn: str, lease: str | None = None) -> dict[str, str]:
    """What the parts of a local installation have in common. What was configured stays as it was."""
    key = settings.secret_key.get_secret_value() if settings.secret_key else key_in(folder)
    allowed = ",".join([*map(str, settings.allow_addresses), LOOPBACK])
    return {
        "WAYPOST_DATABASE_URL": dsn,
        "WAYPOST_SECRET_KEY": key,
        "WAYPOST_ALLOW_ADDRESSES": allowed,
        "WAYPOST_SOURCE": settings.source,
        "WAYPOST_CHANGED_FLOWS": "accept",  # who develops a flow changes it
        "WAYPOST_LEASE": lease or f"{int(settings.lease.total_seconds() * 1000)}ms",
    }


def write_environment(file: Path, environment: Mapping[str, str]) -> None:
    """For other terminals: `. FILE`. It holds the database's password and the key: its owner reads it."""
    file.touch(mode=0o600)
    file.chmod(0o600)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    programs = shlex.quote(str(Path(sys.executable).parent))
    file.write_text("\n".join([*lines, f"export PATH={programs}:$PATH", ""]), encoding="utf-8")


class Stopping:
    """What signals do to a local installation: the first lets it drain, others make it hurry. All of it is said."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.children: Children | None = None

    def __call__(self, times: int) -> None:
        if times > 2:
            return
        self._progress.line("stopping …" if times == 1 else "stopping at once …")
        if times == 2 and self.children is not None:
            self.children.hurry()


@asynccontextmanager
async def embedded(server: EmbeddedPostgres, *, keep: bool) -> AsyncGenerator[str]:
    """The DSN of a server that runs while inside. Without `keep` its folder goes too."""
    try:
        yield await asyncio.to_thread(server.start)
    finally:
        await asyncio.to_thread(server.stop if keep else server.remove)


def migrate(dsn: str) -> int:
    """How many migrations were applied."""
    with psycopg.connect(dsn, autocommit=True, connect_timeout=3) as conn:
        return len(runner.migrate(conn))


async def start_receiver(children: Children, wanted: Address, **more: str) -> str:
    """Start the receiver where it is wanted, or where there is room; its URL, from now on also `replyto`."""
    host, port = wanted
    if taken(host, port):
        port = 0
    child = await children.start(
        "receiver", "orchestrator", "receiver", WAYPOST_RECEIVER_ADDR=f"{host}:{port}", **more
    )
    found = await child.says(STARTED)
    url = f"http://{host}:{found[1]}"
    children.environment["WAYPOST_RECEIVER_URL"] = url
    child.environment["WAYPOST_RECEIVER_ADDR"] = (
        f"{host}:{found[1]}"  # where it is found when it starts again
    )
    return url


def taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def health_of(settings: Settings, part: str) -> dict[str, str]:
    """Where a part says how it is, when all are on one machine: by default each at its own port, or another."""
    address, fixed = settings.health_of(part)
    if not fixed:
        return {}
    if address is None:
        return {"WAYPOST_HEALTH_ADDR": "off"}
    port = address.port and address.port + HEALTH_PORTS.index(part)
    return {"WAYPOST_HEALTH_ADDR": str(Address(address.host, port))}


async def start_worker(children: Children, name: str, *modules: str, **more: str) -> Child:
    child = await children.start(name, "orchestrator", "worker", *modules, **more)
    await child.says(r'"event": "worker.started"')
    return child


async def start_relay(children: Children, **more: str) -> Child:
    child = await children.start("relay", "orchestrator", "relay", **more)
    await child.says(r'"event": "relay\.started"')
    return child
