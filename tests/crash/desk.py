"""Where a person types commands before a database, and where it is seen which of them die."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Final

from contracts.signature import Secret
from tests.acceptance.stand import LOOPBACK, free_port
from tests.crash.points import Point, Trap, passed
from tests.crash.process import CONTROL, FLOWS, forks, run
from tests.crash.proxy import proxied
from tests.crash.services import COMMANDS, REPLIES
from tests.crash.witness import FOLDER
from tests.waiting import until

CLIENT: Final = "client"
LEASE: Final = "3s"
FIRES_SECONDS: Final = 10.0
"""For a process that has nothing to do to pass a point."""


@dataclass(slots=True)
class Desk:
    """Processes before one database. What they print, what they pass and where they die is in `folder`."""

    folder: Path
    environment: Mapping[str, str]
    running: dict[str, BaseProcess] = field(default_factory=dict[str, BaseProcess])
    starts: dict[str, int] = field(default_factory=dict[str, int])
    _printed: dict[str, int] = field(default_factory=dict[str, int])
    """How much the earlier processes of each part have printed."""

    async def run(self, part: str, command: Sequence[str]) -> int:
        """Run a process to its end; its exit code, or minus the signal that ended it."""
        self._printed[part] = len(self.all_said(part))
        process = forks().Process(target=run, args=(part, command, dict(self.environment)), daemon=True)
        process.start()
        self.running[part] = process
        self.starts[part] = self.starts.get(part, 0) + 1
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(process.sentinel, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(process.sentinel)
        process.join()
        code = process.exitcode
        assert code is not None, "it is over"
        return code

    async def say(self, *command: str) -> int:
        """Give a command to Waypost."""
        return await self.run(CLIENT, command)

    def signal(self, part: str, sign: signal.Signals) -> None:
        pid = self.running[part].pid
        assert pid is not None, f"{part} was started"
        with suppress(ProcessLookupError):
            os.kill(pid, sign)

    def said(self, part: str) -> str:
        """What its last process printed."""
        return self.all_said(part)[self._printed.get(part, 0) :]

    def all_said(self, part: str) -> str:
        """What its processes printed, one after the other."""
        log = self.folder / f"{part}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def passed(self, part: str) -> list[Point]:
        """The points that its processes passed, in their order, again and again."""
        log = self.folder / f"{part}.passed"
        return list(passed(log.read_text().splitlines(), part)) if log.exists() else []

    def changed(self, part: str) -> set[str]:
        """The ids of what it sent with other bytes than before."""
        log = self.folder / f"{part}.sent"
        lines = log.read_text().splitlines() if log.exists() else []
        first: dict[str, str] = {}
        said = [json.loads(line) for line in lines]
        return {one["id"] for one in said if first.setdefault(one["id"], one["sha256"]) != one["sha256"]}

    def arm(self, point: Point, *, ignore: Sequence[str] = ()) -> None:
        """Kill the next process that comes to `point`, but for one of the executions to `ignore`; only this one."""
        for old in (*self.folder.glob("*.trap"), *self.folder.glob("*.fired")):
            old.unlink()
        Trap(point, tuple(ignore)).write(self.folder / f"{point.part}.trap")

    def fired(self, point: Point) -> bool:
        """Whether the trap that was armed last has fired."""
        return (self.folder / f"{point.part}.fired").exists()

    async def fires(self, point: Point) -> bool:
        """Whether it fires within FIRES_SECONDS."""

        async def fired() -> bool:
            return self.fired(point)

        with suppress(AssertionError):
            await until(fired, what=f"a passage of {point}", seconds=FIRES_SECONDS)
        return self.fired(point)


@asynccontextmanager
async def desk(
    dsn: str, folder: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> AsyncGenerator[Desk]:
    """A desk before the database at `dsn`, which every process reaches by way of a proxy."""
    receiver = free_port()
    async with proxied(dsn, made(folder)) as proxy:
        yield Desk(
            folder,
            {
                "WAYPOST_DATABASE_URL": proxy.dsn,
                "WAYPOST_FLOWS": FLOWS,
                "WAYPOST_SECRET_KEY": base64.b64encode(secrets.token_bytes(32)).decode("ascii"),
                "WAYPOST_ALLOW_ADDRESSES": LOOPBACK,
                "WAYPOST_LEASE": LEASE,
                "WAYPOST_RECEIVER_ADDR": f"127.0.0.1:{receiver}",
                "WAYPOST_RECEIVER_URL": f"http://127.0.0.1:{receiver}",
                "WAYPOST_HEALTH_ADDR": "off",
                "WAYPOST_DEBUG": "1",
                FOLDER: str(folder),
                CONTROL: str(proxy.control),
                COMMANDS: Secret.of(secrets.token_bytes(32)).text,
                REPLIES: Secret.of(secrets.token_bytes(32)).text,
                **environment,
            },
        )


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
