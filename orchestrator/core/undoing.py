"""What a flow did and may have to undo: when, in which order, and what is left standing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from orchestrator.core.ask import Ask, Entry, Scope
from orchestrator.core.branch import Branch
from orchestrator.core.errors import LimitExceeded, error_in
from orchestrator.core.fact import Fact

Json = Any


NOTHING_LEFT: Final = frozenset({"refused", "child_failed"})
"""Outcomes after which nothing of a step is left to undo: it was not done, or it has undone itself."""


@dataclass(frozen=True, slots=True)
class Held:
    """Why a person is needed at `path`: `entry` could not be undone, or (None) a step's outcome is unknown."""

    code: str
    path: str
    reason: str
    entry: Entry | None = None


class Undoing:
    """One list for the whole execution: one undo at a time, the highest rank first, none before it settled.

    `stands` was left as it is by a person's decision, `passed` by a pivot of the program.
    """

    def __init__(self, *, entries_max: int) -> None:
        self.undone = 0
        self.stands: list[str] = []
        self.passed: list[str] = []
        self.pivoted = False
        self.wanted = True
        self.unsettled: dict[str, Entry] = {}
        self.current: Entry | None = None
        self._entries_max = entries_max
        self._unwinding: list[tuple[Scope, Branch]] = []

    def __bool__(self) -> bool:
        """Whether something is being undone."""
        return bool(self._unwinding)

    def register(self, ask: Ask, action: Json, scope: Scope) -> None:
        """`ask` has left: from now on it may have to be undone. Raises LimitExceeded."""
        if len(scope.entries) >= self._entries_max:
            raise LimitExceeded(f"undos_max: {self._entries_max} steps would have to be undone")
        scope.entries[ask.path] = ask.entry = Entry(ask, action, scope)

    def ended(self, ask: Ask, fact: Fact, outcome: str) -> None:
        """What an outcome means for the undo of what it ends: only a definite refusal drops it."""
        entry = ask.entry
        if entry is None:
            return
        if outcome in NOTHING_LEFT or (outcome == "done" and ask.is_child and ask.undo is None):
            self._drop(entry)
            return
        entry.rank = fact.position
        entry.settling = bool(error_in(fact.data).get("settling"))
        if outcome == "done":
            entry.known = True
            entry.action = fact.data.get("undo", entry.action)
        if outcome == "unknown":
            self.unsettled[ask.path] = entry
        else:
            self.unsettled.pop(ask.path, None)

    def withdrawn(self, ask: Ask, fact: Fact, *, settling: bool) -> None:
        """Nobody waits for `ask` any more: while `settling`, what became of it will be told, and is not undone before
        that.
        """
        entry = ask.entry
        if entry is not None:
            entry.rank, entry.settling = fact.position, settling
            self.unsettled[ask.path] = entry

    def pivot(self, scope: Scope) -> None:
        """What was done in `scope` and around it stands, whatever comes."""
        self.pivoted = True
        for one in scope.around():
            self.passed += one.entries
            for entry in list(one.entries.values()):
                self._drop(entry)

    def give_up(self) -> list[Branch]:
        """Undo nothing more than what is being undone; the branches that may go on now."""
        self.wanted = False
        for scope, _ in self._unwinding:
            self._leave(scope)
        return self._freed()

    def forget(self) -> None:
        """Nothing of it is undone, nor waited for."""
        self.current = None
        self.unsettled.clear()
        self._unwinding.clear()

    def _leave(self, scope: Scope) -> None:
        """All of `scope` stands, but for what is being undone."""
        for entry in [entry for entry in scope.entries.values() if entry is not self.current]:
            self.stands.append(entry.path)
            self._drop(entry)

    def late(self, fact: Fact) -> Entry | None:
        """An answer for what is over: it settles, and the first one makes the unknown known.

        Returns the entry that a late refusal, or a child's end, shows to need no undo, unless its undo is under way.
        """
        entry = self.unsettled.get(fact.path)
        if entry is None:
            return None
        entry.settling = False
        outcome = fact.data["outcome"]
        if outcome != "unknown":
            del self.unsettled[fact.path]
        if not self.waits(entry):
            return None
        if outcome == "done":
            entry.known = True
            entry.action = fact.data.get("undo", entry.action)
        needless = outcome in NOTHING_LEFT or (outcome == "done" and entry.undo is None)
        return entry if needless else None

    def waits(self, entry: Entry) -> bool:
        """Whether `entry` may still have to be undone."""
        return entry.scope.entries.get(entry.path) is entry

    def settle_local(self) -> None:
        """The worker that ran local steps died: nothing of them runs any more."""
        for entry in self.unsettled.values():
            if entry.local:
                entry.settling = False

    def unwind(self, scope: Scope, branch: Branch) -> bool:
        """Undo all of `scope` before `branch` goes on; False when there is nothing to undo."""
        if not self.wanted:
            self._leave(scope)
        if scope.entries:
            self._unwinding.append((scope, branch))
        return bool(scope.entries)

    def next(self) -> Entry | None:
        """What is to be undone now: of all that wait, what ended last, unless that has not settled yet.

        Strict order: it waits rather than overtake.
        """
        if self.current is not None or not self._unwinding:
            return None
        entry = max((e for scope, _ in self._unwinding for e in scope.entries.values()), key=lambda e: e.rank)
        return None if entry.settling else entry

    def branch_of(self, entry: Entry) -> Branch:
        """The branch that waits for `entry` to be undone."""
        return next(branch for scope, branch in self._unwinding if scope is entry.scope)

    def over(self, entry: Entry, *, stands: bool) -> list[Branch]:
        """`entry` is undone, or left standing; the branches that may go on now."""
        self.current = None
        if stands:
            self.stands.append(entry.path)
        else:
            self.undone += 1
        return self.dropped(entry)

    def dropped(self, entry: Entry) -> list[Branch]:
        """`entry` needs no undo; the branches that may go on now."""
        self._drop(entry)
        return self._freed()

    def _freed(self) -> list[Branch]:
        free = [branch for scope, branch in self._unwinding if not scope.entries]
        self._unwinding = [one for one in self._unwinding if one[0].entries]
        return free

    def _drop(self, entry: Entry) -> None:
        entry.scope.entries.pop(entry.path, None)
        self.unsettled.pop(entry.path, None)
