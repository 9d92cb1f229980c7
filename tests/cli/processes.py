"""Processes of Waypost under test: started with a bound, listened to, ended by their pid."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.waiting import until_true

ROOT: Final = Path(__file__).parents[2]
END_SECONDS: Final = 30.0
SAY_SECONDS: Final = 90.0  # several processes start one after the other, on a machine that may be busy


@dataclass(slots=True)
class Running:
    process: subprocess.Popen[bytes]
    output: Path

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def until_said(self, pattern: str) -> re.Match[str]:
        """The first match in what it printed. Fails when it ends before, or after a while."""

        def over() -> bool:
            return re.search(pattern, self.said()) is not None or self.process.poll() is not None

        deadline = time.monotonic() + SAY_SECONDS
        while not over() and time.monotonic() < deadline:
            time.sleep(0.02)
        found = re.search(pattern, self.said())
        assert found is not None, f"waited in vain for {pattern} in: {self.said()}"
        return found

    def end(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code after that signal."""
        self.process.send_signal(sign)
        return self.process.wait(END_SECONDS)


@contextmanager
def running(
    command: Sequence[str], *, environment: Mapping[str, str], output: Path, cwd: Path = ROOT
) -> Generator[Running]:
    """A process that runs while inside, with nothing of our environment but the path."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**inherited, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), **environment},
            cwd=cwd,
        )
    try:
        yield Running(process, output)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(END_SECONDS)


def waypost(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator", *arguments]


def eventually_gone(pid: int) -> None:
    """Return when no process has this id any more."""

    def gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"

    until_true(gone, what=f"the end of process {pid}")
