"""The observer that writes: one JSON object per line, in ASCII, so that no text can forge or paint a line."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final, cast
from uuid import UUID

from contracts.errors import shown
from contracts.observer import COUNTED
from contracts.sensitive import without_inputs

FIELD_CHARACTERS_MAX: Final = (
    2000  # of one field; a traceback is cut from its beginning, to keep its last line
)


class JsonLines:
    """Hears moments and gives `write` a line for each, but for those that are COUNTED.

    `now` is asked for each line; `part` names the process. A field that is an exception is written as its
    class, its message and where it was raised. `write` gets text that ends in a line feed; when it raises,
    the line is lost and nobody else is disturbed.
    """

    __slots__ = ("_now", "_part", "_write")

    def __init__(self, write: Callable[[str], object], *, part: str, now: Callable[[], datetime]) -> None:
        self._write = write
        self._part = part
        self._now = now

    def saw(self, moment: str, /, **fields: object) -> None:
        if moment in COUNTED:
            return
        line: dict[str, object] = {
            "time": self._now().astimezone(UTC).isoformat(),
            "part": self._part,
            "event": moment,
        }
        for name, value in fields.items():
            line[name if name not in line else f"{name}_"] = loggable(value)
        try:
            self._write(json.dumps(line, ensure_ascii=True) + "\n")
        except (OSError, ValueError):
            return


def loggable(value: object) -> object:
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if value == value and abs(value) != float("inf") else str(value)  # noqa: PLR0124  # NaN
        case str() | UUID():
            text = str(value)
            return text if len(text) <= FIELD_CHARACTERS_MAX else text[:FIELD_CHARACTERS_MAX] + "…"
        case BaseException():
            return told(value)
        case list() | tuple() | set() | frozenset():
            return [loggable(item) for item in cast("Iterable[object]", value)]
        case _:
            return shown(value)


def told(error: BaseException) -> str:
    text = without_inputs("".join(traceback.format_exception(error)))
    return text if len(text) <= FIELD_CHARACTERS_MAX else "…" + text[-FIELD_CHARACTERS_MAX:]
