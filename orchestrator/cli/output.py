"""What people and programs read. Data goes to stdout, everything else to stderr.

Names, keys and values come from anywhere, so nothing reaches a terminal unescaped: a business key cannot move
the cursor, hide a line or turn text around.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any
from uuid import UUID


class Exit(IntEnum):
    """How a command ended, for scripts."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 4
    REFUSED = 5
    """The state machine, or something that is there already, says no."""
    TIMED_OUT = 7
    FAILED = 8
    """What was waited for finished, but not well."""
    INTERRUPTED = 130


def plain(value: object) -> str:
    """`value` as one line of visible characters; others are escaped as Python does."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in str(value)
    )


def say(text: str) -> None:
    """Print a line of data."""
    try:
        print(text, flush=True)  # noqa: T201  # this is the command line
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from None


def note(text: str) -> None:
    """Print a line about what goes on."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # this is the command line


def terminal_width() -> int | None:
    """How many characters fit into a line of stdout; None when it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, width: int | None = None) -> str:
    """Columns as wide as their widest cell. An empty cell shows a dash, so that programs can cut them.

    A line that is longer than `width` is cut there.
    """
    cells = [list(headings), *([plain(cell) or "-" for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(fitting(line.rstrip(), width) for line in lines)


def fitting(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else line[: max(width - 1, 0)] + "…"


def as_json(value: Any) -> str:
    """`value` as JSON in ASCII: what a terminal would obey is escaped."""
    return json.dumps(value, ensure_ascii=True, indent=2, default=jsonable)


def jsonable(value: object) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case UUID():
            return str(value)
        case timedelta():
            return value.total_seconds()
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case _:
            return str(value)


def ago(moment: datetime | None, *, now: datetime) -> str:
    """How long ago, or in how long, as people say it: `3 s`, `5 m`, `2 h`, `4 d`, `in 10 s`."""
    if moment is None:
        return ""
    seconds = int((now - moment).total_seconds())
    size = abs(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if size >= length:
            return f"{'in ' if seconds < 0 else ''}{size // length} {unit}"
    return "now"
