"""What a long proof says while it runs, and what it did: the log of a run is evidence only if it has both."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest

PROPERTY: Final = "evidence"
PROGRESS_SECONDS: Final = 20.0


class Evidence:
    """Of one test. `did` is printed after the last test of the run; `goes_on` at once, past pytest's capture."""

    def __init__(
        self, name: str, record: Callable[[str, object], None], capture: pytest.CaptureFixture[str]
    ) -> None:
        self._name = name
        self._record = record
        self._capture = capture
        self._begun = time.monotonic()
        self._said = self._begun

    def did(self, text: str) -> None:
        """One line of what the test has done and seen, with its counts."""
        self._record(PROPERTY, text)

    def goes_on(self, text: str, *, always: bool = False) -> None:
        """How far it is; what comes within PROGRESS_SECONDS of the last line is not said, unless `always`."""
        now = time.monotonic()
        if not always and now - self._said < PROGRESS_SECONDS:
            return
        self._said = now
        with self._capture.disabled():
            print(f"  {now - self._begun:4.0f} s  {self._name}: {text}", file=sys.stderr, flush=True)  # noqa: T201


def lines_of(reports: Iterable[Any]) -> list[str]:
    """What the tests with these reports did, below the name of each."""
    lines: list[str] = []
    for report in reports:
        found = [text for name, text in report.user_properties if name == PROPERTY]
        if found:
            lines.append(f"{report.nodeid}  {report.outcome} in {report.duration:.0f} s")
            lines += [f"    {text}" for text in found]
    return lines
