"""Processes of our own, for `demo` and `dev`: started, listened to, drained in order, never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from contracts.errors import WaypostError
from orchestrator.cli.output import plain

STOP_SECONDS: Final = 25.0  # for a process to drain; above what relay and receiver take
LINE_BYTES_MAX: Final = 1 << 20
LINES_MAX: Final = 200  # of a process, kept in memory; its log file has all
ROOT: Final = Path(__file__).resolve().parents[2]  # where the packages lie, in a clone and when installed
PR_SET_PDEATHSIG: Final = 1
FALLS_MAX: Final = 5  # of one process within FALLS_SECONDS; with one more it does not stay up
FALLS_SECONDS: Final = 60.0
REST_SECONDS: Final = 0.5  # before a process is started again; twice as long each time


Hear = Callable[[str], None]


class ProcessEnded(WaypostError):
    """A process that should go on has ended; its last line says why."""

    code = "process-ended"

    def __init__(self, name: str, code: int | None, last: str, log: Path) -> None:
        super().__init__(f"{name} {how(code, last)}; its log: {log}")


def how(code: int | None, last: str) -> str:
    """How a process ended. What it said before a signal explains nothing."""
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}: {plain(last) or 'it said nothing'}"


class Child:
    """A process whose every line goes to a log file and to those who wait for it."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        log: Path,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        hear: Hear = lambda _: None,
    ) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.environment = dict(environment or {})
        self.process = process
        self.log = log
        self.lines: deque[str] = deque(maxlen=LINES_MAX)
        self._heard = asyncio.Event()
        self._hear = hear
        self._readers = [
            asyncio.create_task(self._read(stream)) for stream in (process.stdout, process.stderr) if stream
        ]

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        logs: Path,
        hear: Hear = lambda _: None,
    ) -> Child:
        """`python -m arguments…`, in a session of its own: Ctrl-C reaches us, and we stop it in order.

        `hear` is given each line that it says.
        """
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            limit=LINE_BYTES_MAX,
            preexec_fn=die_with_parent,
        )
        return cls(
            name, process, logs / f"{name}.log", arguments=arguments, environment=environment, hear=hear
        )

    async def says(self, pattern: str, *, seconds: float = 60.0) -> re.Match[str]:
        """The first line that matches. Raises ProcessEnded, TimeoutError."""
        async with asyncio.timeout(seconds):
            while True:
                for line in self.lines:
                    if found := re.search(pattern, line):
                        return found
                if self.process.returncode is not None and all(reader.done() for reader in self._readers):
                    raise self.ended()
                self._heard.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._heard.wait(), 0.5)

    def ended(self) -> ProcessEnded:
        return ProcessEnded(
            self.name, self.process.returncode, self.lines[-1] if self.lines else "", self.log
        )

    async def kill(self) -> None:
        """SIGKILL: it gets no chance to do anything."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self._over()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when draining takes too long."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self._over(), STOP_SECONDS)
        except TimeoutError:
            await self.kill()

    async def _over(self) -> None:
        await self.process.wait()
        await asyncio.gather(*self._readers)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        with self.log.open("ab") as log:
            while True:
                try:
                    line = await stream.readline()
                except ValueError:  # longer than LINE_BYTES_MAX: it is dropped, and reading goes on
                    continue
                if not line:
                    break
                log.write(line)
                log.flush()
                self.lines.append(line.decode("utf-8", "replace").rstrip())
                self._hear(self.lines[-1])
                self._heard.set()
        self._heard.set()


class Children:
    """Those that run now. Leaving stops them all, in the reverse order of their start."""

    def __init__(self, *, environment: Mapping[str, str], logs: Path, hear: Hear = lambda _: None) -> None:
        self.environment = dict(environment)
        self.logs = logs
        self.hear = hear
        self.all: list[Child] = []

    async def __aenter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in reversed(self.all):
            await child.stop()

    async def start(self, name: str, *arguments: str, **environment: str) -> Child:
        child = await Child.start(
            name,
            arguments,
            environment={**self.environment, **environment},
            logs=self.logs,
            hear=self.hear,
        )
        self.all.append(child)
        return child

    async def kill(self, child: Child) -> None:
        self.all.remove(child)
        await child.kill()

    def hurry(self) -> None:
        """Let those that still drain end now."""
        for child in self.all:
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()

    async def keep(self, tell: Callable[[str], None]) -> None:
        """Start again whatever ends, later each time. Return never; raise ProcessEnded when one does not stay up."""
        falls: dict[str, deque[float]] = {}
        while True:
            for child in list(self.all):
                if child.process.returncode is not None:
                    await self._again(child, falls.setdefault(child.name, deque(maxlen=FALLS_MAX)), tell)
            await asyncio.sleep(0.2)

    async def _again(self, child: Child, falls: deque[float], tell: Callable[[str], None]) -> None:
        if not stands_up(falls):
            raise child.ended()
        tell(f"{child.ended()}; it is started again")
        await asyncio.sleep(REST_SECONDS * 2 ** (len(falls) - 1))
        self.all.remove(child)
        self.all.append(
            await Child.start(
                child.name,
                child.arguments,
                environment=child.environment,
                logs=self.logs,
                hear=self.hear,
            )
        )


def stands_up(falls: deque[float]) -> bool:
    """Whether what has fallen once more may be started again: not more than FALLS_MAX times within FALLS_SECONDS."""
    now = time.monotonic()
    while falls and now - falls[0] >= FALLS_SECONDS:
        falls.popleft()
    if len(falls) == FALLS_MAX:
        return False
    falls.append(now)
    return True


def libc_prctl() -> Callable[[int, int], int] | None:
    """Linux's prctl, looked up before any fork: after one, little may be called."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None


PRCTL: Final = libc_prctl()


def die_with_parent() -> None:
    """In the child, before it becomes another program: drain when our parent dies, however it dies."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)
