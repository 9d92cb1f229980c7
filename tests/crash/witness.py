"""What was done outside of Waypost: a file that all who act append to, and that no crash takes back.

It stands for the world that honours idempotency keys: of all lines under one key, the first is the effect, and the
others are repetitions that change nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = "CRASH_FOLDER"
"""Names the folder that the processes of a stand share."""


@dataclass(frozen=True, slots=True)
class Act:
    """Something that was done under `key`. `again`: who did it was told that it may have been done before."""

    key: str
    what: str
    again: bool | None

    @property
    def path(self) -> str:
        """Where in its flow it was asked for: a key is execution, epoch and path."""
        return self.key.split("/", 2)[2]


def act(key: str, what: str, *, again: bool | None = None) -> None:
    """Do it: when this returns, it was done."""
    file = os.open(book(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps([key, what, again]).encode() + b"\n")
    finally:
        os.close(file)


def acts(folder: Path, execution: str) -> list[Act]:
    """All that was done for an execution, in its order, repetitions too."""
    if not book(folder).exists():
        return []
    all_acts = [Act(*json.loads(line)) for line in book(folder).read_text().splitlines()]
    return [one for one in all_acts if one.key.startswith(f"{execution}/")]


def book(folder: Path | None = None) -> Path:
    return (folder or Path(os.environ[FOLDER])) / "acts"
