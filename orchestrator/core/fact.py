"""What a journal is made of."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

Json = Any

PRODUCED: Final = frozenset({"asked", "noted", "withdrawn", "finished"})
"""What the program says; compared on replay."""

BEGINNINGS: Final = frozenset({"started", "continued"})
"""What a program begins with; a replay begins at the last of these."""

BYSTANDERS: Final = frozenset({"held", "resumed", "orphaned", "ordered"})
"""Facts for people and for the projection. The program does not see them, wherever they stand."""


class Fact:
    """One line of a journal: at `position`, `kind` happened at `path`.

    `at` is what the program was told about the time, `actor` who said it. `text` is `data` as JSON once it is
    known: a fact is encoded once, when it is made, so that what cannot be stored is found before anything
    follows from it.
    """

    __slots__ = ("actor", "at", "data", "kind", "path", "position", "text")

    def __init__(  # noqa: PLR0917  # a fact is a tuple with names
        self,
        position: int,
        kind: str,
        path: str,
        data: dict[str, Json],
        at: datetime,
        text: str | None = None,
        actor: str = "program",
    ) -> None:
        self.position = position
        self.kind = kind
        self.path = path
        self.data = data
        self.at = at
        self.text = text
        self.actor = actor

    def __repr__(self) -> str:
        return f"{self.position}:{self.kind} {self.path} {self.data}"

    def says(self) -> tuple[str, str, Json, Json]:
        """What a replay compares: kind, path, kind of the ask, its name."""
        return (self.kind, self.path, self.data.get("kind"), self.data.get("name"))


def saying(kind: str, path: str, data: dict[str, Json]) -> str:
    """A produced fact in words, for an error that shows both sides."""
    what = " ".join(str(part) for part in (data.get("kind"), data.get("name")) if part)
    return f"{kind} {what} at {path!r}" if path else f"{kind} {what}"
