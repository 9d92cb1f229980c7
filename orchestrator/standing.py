"""What is not undone and will not be: as the end says it, and who decided so."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.store.reading import FactRow

Json = Any

ENDS: Final = frozenset({"finished", "terminated"})
"""Kinds of facts after which a journal has no other."""

UNDO_CODES: Final = frozenset({"undo-failed", "undo-unknown"})


@dataclass(frozen=True, slots=True)
class Standing:
    """A step that was done, or may have been, and stays so; `by` whom and for which `reason`, if a person said it."""

    path: str
    by: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.path} (left by {self.by}: {self.reason})" if self.by else self.path


def stands(facts: Sequence[FactRow]) -> list[Standing]:
    """What stands, as the end says it; before the end, what a person has decided to leave."""
    left, last = {one.path: one for one in skipped(facts)}, facts[-1]
    if last.kind not in ENDS:
        return list(left.values())
    paths: list[str] = json.loads(last.payload or "{}").get("stands", [])
    return [left.get(path, Standing(path)) for path in paths]


def skipped(facts: Iterable[FactRow]) -> Iterator[Standing]:
    """What persons left standing when its undo could not be done."""
    undo_at = ""
    for fact in facts:
        said: dict[str, Json] = json.loads(fact.payload or "{}")
        if fact.kind == "held":
            undo_at = fact.path if said.get("code") in UNDO_CODES else ""
        elif fact.kind == "resolved" and fact.path == undo_at and said.get("verdict") == "skip":
            yield Standing(undo_at.rpartition("/undo")[0], said.get("by"), said.get("reason"))
