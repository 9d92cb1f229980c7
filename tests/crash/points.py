"""Where a process can be killed, by name; how a process says that it passed there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

Door = Literal["commit", "send", "answer"]
When = Literal["before", "sent", "after", "lost"]
"""`sent`: a request was written whole, and its answer not read. `lost`: the process goes on, but the database's
answer to what it committed does not reach it."""


FOUND: Final = "found"
NOTHING: Final = "nothing"
"""What a look for work is about that found some, or none."""

SERVICES_OWN: Final = "receiver.memory."
"""The memory of a service is a file: its answers are not lost."""

TELLS_BY_ROWS: Final = frozenset(
    {
        "orchestrator.store.executions.CLAIM",
        "orchestrator.store.handing.HAND",
        "orchestrator.store.spans.TAKE",
        "orchestrator.store.tasks.CLAIM",
        "orchestrator.store.workers.BURY",
        "orchestrator.store.workers.TAKE_OVER",
        "relay.outbox.CLAIM",
        "relay.outbox.CLAIM_GUARDED",
    }
)
"""Only the answer says whether something was found. So the answer that has rows is one to lose, too."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What passes a door: what it is about (a fact, a type of event), and for which execution, if that is known."""

    about: str = ""
    execution: str | None = None


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A place in the life of a process: before or after what it commits, sends or answers.

    `name` is that of the statement (those of one transaction are joined by +), or of the function that sends.
    """

    part: str
    door: Door
    name: str
    about: str
    when: When

    def lost(self) -> Iterator[Point]:
        """The same commit, carried out, without its answer."""
        if self.door != "commit" or self.name.startswith(SERVICES_OWN):
            return
        if self.when == "before":
            yield replace(self, when="lost")
        elif self.name in TELLS_BY_ROWS and self.about != NOTHING:
            yield replace(self, about=FOUND, when="lost")

    def __str__(self) -> str:
        about = f" ({self.about})" if self.about else ""
        return f"{self.part}: {self.when} {self.door} {self.name}{about}"


@dataclass(frozen=True, slots=True)
class Trap:
    """Where a process is to be killed: at `point`, but not for one of the executions to `ignore`."""

    point: Point
    ignore: tuple[str, ...] = ()

    def catches(self, passed: Point, subjects: Iterable[Subject]) -> bool:
        """Whether a process that passes the nameless point `passed` is to be killed there."""
        when = "before" if self.point.when == "lost" else self.point.when
        about = "" if self.waits_for_rows else self.point.about
        return replace(passed, about=about) == replace(self.point, when=when, about=about) and any(
            subject.about == about and subject.execution not in self.ignore for subject in subjects
        )

    @property
    def waits_for_rows(self) -> bool:
        """Whether only the answer shows if this is the one: it is lost if it has rows."""
        return self.point.when == "lost" and self.point.about == FOUND

    def write(self, file: Path) -> None:
        whole = file.with_suffix(".new")
        whole.write_text(json.dumps(asdict(self)))
        whole.rename(file)

    @classmethod
    def read(cls, file: Path) -> Trap | None:
        try:
            found = json.loads(file.read_text())
        except FileNotFoundError:
            return None
        return cls(Point(**found["point"]), tuple(found["ignore"]))


def passed(lines: Iterable[str], part: str) -> Iterator[Point]:
    """The points in what a part wrote down as it passed them; of several subjects the first speaks for all."""
    for line in lines:
        yield Point(part, **json.loads(line))
