"""Processes under measurement: started, found ready by what they log, asked for their processor time, stopped.

Each writes into a file of its own, as under a supervisor: who reads along would take part in what is measured.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.environment import ROOT
from orchestrator.cli.processes import die_with_parent

START_MAX_SECONDS: Final = 60.0
STOP_MAX_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.02
LAST_WORDS: Final = 2000


class Ended(Exception):
    """A process that should run has ended, or never said that it is ready; its last words are in the message."""

    def __init__(self, process: Process, what: str) -> None:
        super().__init__(f"{process.name} {what}: {process.log.read_text(errors='replace')[-LAST_WORDS:]}")


@dataclass(frozen=True, slots=True)
class Process:
    name: str
    running: subprocess.Popen[bytes]
    log: Path

    def says(self, pattern: str) -> re.Match[str]:
        """The first match in its log. Raises Ended when it ends before, or does not say it within a minute."""
        deadline = time.monotonic() + START_MAX_SECONDS
        while True:
            if found := re.search(pattern, self.log.read_text(errors="replace")):
                return found
            if self.running.poll() is not None:
                raise Ended(self, f"ended with {self.running.returncode}")
            if time.monotonic() > deadline:
                raise Ended(self, f"did not say {pattern!r}")
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when it does not drain in time. Raises Ended when it had ended by itself."""
        if self.running.poll() is not None:
            raise Ended(self, f"ended with {self.running.returncode}")
        self.running.send_signal(signal.SIGTERM)
        try:
            self.running.wait(STOP_MAX_SECONDS)
        except subprocess.TimeoutExpired:
            self.running.kill()
            self.running.wait()
            raise Ended(self, "did not drain") from None

    @property
    def seconds(self) -> float:
        """Processor time that it has taken so far."""
        return processor_seconds(self.running.pid)


@dataclass(slots=True)
class Processes:
    """Those of one measurement, by name. `environment` is what they have in common."""

    folder: Path
    environment: dict[str, str]
    all: dict[str, Process] = field(default_factory=dict[str, Process])

    def start(self, name: str, *arguments: str, **environment: str) -> Process:
        """`python -m arguments…`."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            running = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment, **environment, "PYTHONUNBUFFERED": "1"},
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  # no thread of ours runs
            )
        self.all[name] = Process(name, running, log)
        return self.all[name]

    def seconds(self) -> dict[str, float]:
        """The processor time of each so far."""
        return {name: process.seconds for name, process in self.all.items()}


@contextmanager
def processes(folder: Path, environment: Mapping[str, str]) -> Generator[Processes]:
    """None yet; whatever is started within is stopped at the end, the last one first."""
    found = Processes(folder, dict(environment))
    try:
        yield found
    except BaseException:
        for process in found.all.values():
            process.running.kill()
            process.running.wait()
        raise
    for process in reversed(found.all.values()):
        process.stop()


TICKS: Final = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float:
    """What process `pid` has taken; NaN where the system does not tell."""
    fields = stat_of(pid)
    return float("nan") if fields is None else sum(map(int, fields[11:13])) / TICKS


def family_seconds(pid: int) -> float:
    """What process `pid` and its children have taken, those that have ended included."""
    fields = stat_of(pid)
    if fields is None:
        return float("nan")
    children = [
        int(name.name)
        for name in Path("/proc").iterdir()
        if name.name.isdigit() and parent_of(int(name.name)) == pid
    ]
    each = [of[11:13] for child in children if (of := stat_of(child)) is not None]
    return sum(map(int, itertools.chain(fields[11:15], *each))) / TICKS


def parent_of(pid: int) -> int | None:
    fields = stat_of(pid)
    return None if fields is None else int(fields[1])


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat behind the name, which may hold anything: state, parent, …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
