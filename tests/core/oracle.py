"""What a journal says about undoing, told again from its facts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.ask import STEP_VERDICTS, UNDO_VERDICTS
from orchestrator.core.errors import error_in
from orchestrator.core.fact import Fact
from orchestrator.core.path import undo_path

Json = Any


@dataclass(slots=True)
class Kept:
    """Something that was asked with an undo, and may stand."""

    local: bool
    hold: bool
    action: Json
    rank: int = 0
    known: bool = False
    answered: bool = False
    settling: bool = False
    tries: int = 1


@dataclass(slots=True)
class Undoing:
    """Reads a journal fact by fact, and fails at the first that breaks a rule of undoing:

    each at most once, one at a time, never before its step has settled, exactly what may stand, the last that
    ended first, by the action that is known best; and the end says truly what became of it.
    """

    kept: dict[str, Kept] = field(default_factory=dict[str, Kept])
    asked: set[str] = field(default_factory=set[str])
    held_steps: set[str] = field(default_factory=set[str])
    running: str | None = None
    failed: bool = False
    undone: list[str] = field(default_factory=list[str])
    stands: list[str] = field(default_factory=list[str])

    def read(self, journal: Sequence[Fact]) -> Undoing:
        for fact in journal:
            reader = {
                "asked": self._asked, "ended": self._ended, "late": self._late, "resolved": self._resolved,
                "orphaned": self._orphaned, "finished": self._finished,
            }.get(fact.kind)  # fmt: skip
            if reader is not None:
                reader(fact)
        return self

    def _asked(self, fact: Fact) -> None:
        assert fact.path not in self.asked, f"a path is used twice: {fact}"
        self.asked.add(fact.path)
        if fact.data["kind"] == "undo":
            self._asked_undo(fact, fact.data["name"])
            return
        assert self.running is None and not self.undone and not self.stands, f"asked after undoing: {fact}"
        if "undo" in fact.data:
            self.kept[fact.path] = Kept(
                local=fact.data["kind"] == "step",
                hold=fact.data["name"].startswith("hold-"),
                action=fact.data["undo"],
            )

    def _asked_undo(self, fact: Fact, of: str) -> None:
        assert of in self.kept, f"undoes what cannot stand: {fact}"
        entry = self.kept[of]
        if self.running is None:
            assert of == self._last(), f"undoes before what ended later, {self._last()}: {fact}"
        else:
            assert of == self.running and not self.failed, f"a second undo while {self.running} runs: {fact}"
        assert entry.rank, f"undoes what has not ended: {fact}"
        assert not entry.settling, f"undoes before its step has settled: {fact}"
        assert fact.path == undo_path(of, entry.tries), f"a try that nobody ordered: {fact}"
        assert (fact.data["args"], fact.data["known"]) == (entry.action, entry.known), (
            f"undoes wrongly: {fact}"
        )
        self.running, self.failed = of, False

    def _last(self) -> str:
        return max(self.kept, key=lambda path: self.kept[path].rank)

    def _ended(self, fact: Fact) -> None:
        outcome = fact.data["outcome"]
        entry = self.kept.get(fact.path)
        if self.running is not None and fact.path == undo_path(self.running, self.kept[self.running].tries):
            if outcome == "done":
                self._is_undone()
            else:
                self.failed = True
        elif entry is not None and outcome == "refused":
            del self.kept[fact.path]
        elif entry is not None:
            entry.rank = fact.position
            entry.answered = outcome != "unknown"
            entry.settling = bool(error_in(fact.data).get("settling"))
            if outcome == "done":
                entry.known, entry.action = True, fact.data["undo"]

    def _late(self, fact: Fact) -> None:
        entry = self.kept.get(fact.path)
        if entry is None or not entry.rank or entry.answered:
            return
        outcome = fact.data["outcome"]
        entry.settling = False
        entry.answered = outcome != "unknown"
        if outcome == "done":
            entry.known, entry.action = True, fact.data["undo"]
        elif outcome == "refused" and undo_path(fact.path, entry.tries) not in self.asked:
            del self.kept[fact.path]
            if self.running == fact.path:
                self.running = None

    def _resolved(self, fact: Fact) -> None:
        verdict = fact.data["verdict"]
        of, undo, _ = fact.path.rpartition("/undo")
        if undo and verdict in UNDO_VERDICTS and of in self.kept:
            assert self.running in (None, of)
            self.running, self.failed = of, False
            if verdict == "retry":
                self.kept[of].tries += 1
            elif verdict == "done":
                self._is_undone()
            else:
                self.stands.append(of)
                self._is_over()
        elif not undo and verdict in STEP_VERDICTS and fact.path in self.kept:
            entry = self.kept[fact.path]
            if verdict == "not_done":
                del self.kept[fact.path]
            elif verdict == "done":
                entry.rank, entry.known, entry.answered, entry.settling = fact.position, True, True, False
                entry.action = fact.data["undo"]

    def _orphaned(self, _: Fact) -> None:
        for entry in self.kept.values():
            entry.settling = entry.settling and not entry.local

    def _is_undone(self) -> None:
        assert self.running is not None and self.running not in self.undone, f"{self.running} undone twice"
        self.undone.append(self.running)
        self._is_over()

    def _is_over(self) -> None:
        assert self.running is not None
        del self.kept[self.running]
        self.running, self.failed = None, False

    def _finished(self, fact: Fact) -> None:
        status = fact.data["kind"]
        if status == "completed":
            assert not self.undone and not self.stands, f"completed, and undid {self.undone}"
            return
        assert not self.kept, f"{status} while {sorted(self.kept)} may stand"
        assert (fact.data.get("undone", 0), fact.data.get("stands", [])) == (len(self.undone), self.stands)
        assert (status == "compensated") == (bool(self.undone) and not self.stands), f"{fact}: {self}"
