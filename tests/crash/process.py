"""A process of a stand: what `python -m orchestrator` and a service's own program would be, behind doors.

It is forked from a process that has imported everything, so that starting one anew costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Final

from orchestrator.cli import main
from orchestrator.cli.processes import die_with_parent
from orchestrator.telemetry import tracing, watch
from tests.crash import commits, flows, speech
from tests.crash.guard import Guard, opened
from tests.crash.services import SERVICES
from tests.crash.witness import FOLDER

FLOWS: Final = flows.__name__
CONTROL: Final = "CRASH_CONTROL"
"""Names the port of the proxy before the database."""
POLL: Final = timedelta(seconds=0.1)
"""Between two looks for what is to be exported."""
MARK_LEASE: Final = timedelta(seconds=2)
"""After which what a process took to export, and did not, is exported by the next one of its part."""


def forks() -> ForkServerContext:
    """Where processes are forked from: it lives as long as this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, watch.__name__])
    return context


def run(part: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """The life of a process: a role of Waypost, a command to it, or a service (`service NAME PORT`)."""
    die_with_parent()
    os.environ.update(environment)
    folder = Path(environment[FOLDER])
    for stream in (1, 2):
        os.dup2(opened(folder / f"{part}.log"), stream)
    tracing.POLL, tracing.MARK_LEASE = POLL, MARK_LEASE  # pyright: ignore[reportAttributeAccessIssue]  # for this process
    guard = Guard(folder, part, control=int(environment[CONTROL]))
    commits.install(guard)
    speech.install(guard)
    if command[0] == "service":
        SERVICES[command[1]]().run(port=int(command[2]))
        sys.exit(0)
    sys.exit(main(command))
