"""A shop of real processes, with a collector."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import environment_of
from tests.cli.processes import ROOT, Running, running, waypost
from tests.telemetry.collector import Collector, collecting

STARTED = {
    "worker": r'"event": "worker.started"',
    "relay": r'"event": "relay.started"',
    "receiver": r'"event": "receiver.started".*"port": (\d+)',
}
SERVICES = ("inventory", "payments", "shipping")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@dataclass(slots=True)
class Shop:
    """Parts and services as processes, in `folder`. `more` of their environment is what tests turn."""

    stack: ExitStack
    folder: Path
    environment: dict[str, str]

    def start(self, name: str, command: list[str], **more: str) -> Running:
        environment = {**self.environment, **more}
        number = len(list(self.folder.glob(f"{name}.*.out")))
        output = self.folder / f"{name}.{number}.out"
        return self.stack.enter_context(
            running(command, environment=environment, output=output, cwd=self.folder)
        )

    def part(self, name: str, **more: str) -> Running:
        process = self.start(name, waypost(name), **more)
        process.until_said(STARTED[name])
        return process

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            waypost(*arguments),
            env={**self.environment, "PYTHONPATH": f"{ROOT}:{self.folder}"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def open(self, *services: str, **more: str) -> None:
        """A receiver, services with `more` in their environment, and a relay."""
        port = self.part("receiver").until_said(STARTED["receiver"])[1]
        self.environment["WAYPOST_RECEIVER_URL"] = f"http://127.0.0.1:{port}"
        for name in services:
            (self.folder / f"{name}.reply").write_text(self.ask("sender", "add", name).stdout)
            (self.folder / f"{name}.command").write_text(f"whsec_{'c' * 43}=")
            secrets = {
                f"{name.upper()}_REPLY_SECRET_FILE": f"{name}.reply",
                f"{name.upper()}_COMMAND_SECRET_FILE": f"{name}.command",
            }
            service = self.start(name, [*waypost()[:2], f"examples.shop.{name}"], **secrets, **more)
            url = service.until_said(r"listens on (\S+)")[1]
            added = self.ask("endpoint", "add", name, url, "--secret-file", f"{name}.command")
            assert added.returncode == 0, added.stderr
        self.part("relay")


@pytest.fixture
def shop(dsn: str, tmp_path: Path, collector: Collector) -> Iterator[Shop]:
    environment = {**environment_of(dsn), "WAYPOST_HEALTH_ADDR": "off", **collector.environment}
    with ExitStack() as stack:
        yield Shop(stack, tmp_path, environment)
