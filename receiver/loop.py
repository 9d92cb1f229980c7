"""The event loop of a process, and the files that it stands on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a process's one coroutine, on uvloop where it is installed."""
    try:
        import uvloop  # noqa: PLC0415  # it is optional
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def open_standard_files() -> None:
    """Open /dev/null for those of stdin, stdout and stderr that this process was started without.

    Else a socket becomes one of them: others print into it, and libuv ends the process when it is closed. stdout stays
    None to Python, for who has something to say there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            assert os.open(os.devnull, os.O_RDWR) == number, "the lowest that is free"
            os.set_inheritable(number, True)
    stderr: object = sys.stderr  # None when it was closed
    if stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115  # as Python's own
