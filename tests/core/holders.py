"""Who had which mutex, and from when until when, told again from the journals of all executions alone.

Nothing here asks the machine: a mutex is had from the fact that gives it, until the fact at which nothing of its step
can act any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.ask import STEP_VERDICTS
from orchestrator.core.errors import error_in
from orchestrator.core.fact import Fact
from orchestrator.core.mutexes import FLOW
from orchestrator.core.path import mutex_path, name_at

Json = Any
Place = tuple[int, str]
"""The number of an execution, and a path in it."""
Key = tuple[bool, str]

LOCAL = frozenset({"step", "transaction"})


@dataclass(slots=True)
class Work:
    """A step that was asked for under a mutex. `acts`: something of it may be under way. `over`: nobody waits for it
    any more.
    """

    kind: str
    hold: bool
    acts: bool = True
    over: bool = False
    idle: bool = False
    """It waits for its next try, and is no work of this worker."""


@dataclass(slots=True)
class Holders:
    """Reads facts of several journals in the order of their commits, and fails at the first that breaks a rule of
    mutexes:

    at most one has it; it is given in the order of the asking; work under it begins with it, and has it until nothing
    of it can act; nothing has one after its end; and nobody waits for one that nobody has.
    """

    waiting: dict[Key, list[Place]] = field(default_factory=dict[Key, list[Place]])
    holder: dict[Key, Place] = field(default_factory=dict[Key, Place])
    keys: dict[Place, Key] = field(default_factory=dict[Place, Key])
    work: dict[Place, Work] = field(default_factory=dict[Place, Work])
    over: set[int] = field(default_factory=set[int])
    """Executions that have ended."""
    granted: int = 0

    def read(self, log: Sequence[tuple[int, Fact]]) -> Holders:
        readers = {
            "asked": self._asked, "ended": self._ended, "withdrawn": self._withdrawn, "late": self._late,
            "resolved": self._resolved, "orphaned": self._orphaned, "finished": self._finished,
            "terminated": self._terminated,
            "attempted": self._attempted, "resent": self._resent,
        }  # fmt: skip
        for number, fact in log:
            assert number not in self.over or fact.kind == "late", f"after its end: {fact}"
            reader = readers.get(fact.kind)
            if reader is not None:
                reader((number, fact.path), fact)
        lost = {key: places for key, places in self.waiting.items() if places and key not in self.holder}
        assert not lost, f"nobody has what is waited for: {lost}"
        return self

    # ---- turns ---------------------------------------------------------------------------------------------

    def _asked(self, place: Place, fact: Fact) -> None:
        number, path = place
        turn = (number, mutex_path(path))
        if fact.data["kind"] == "mutex":
            key = self.keys[place] = (path == FLOW, fact.data["args"]["key"])
            self.waiting.setdefault(key, []).append(place)
        elif turn in self.keys:
            assert self.holder.get(self.keys[turn]) == turn, f"begins without its mutex: {fact}"
            assert place not in self.work, f"begins twice: {fact}"
            hold = name_at(path).startswith("hold-") and fact.data["kind"] != "transaction"
            self.work[place] = Work(fact.data["kind"], hold, acts="unfit" not in fact.data)

    def _ended(self, place: Place, fact: Fact) -> None:
        if place in self.keys:
            self._given(place, fact)
        elif place in self.work:
            self._work_ended(place, fact)

    def _given(self, place: Place, fact: Fact) -> None:
        key = self.keys[place]
        assert key not in self.holder, f"{key} is had by {self.holder[key]}: {fact}"
        assert self.waiting[key][:1] == [place], f"{self.waiting[key]} wait in this order: {fact}"
        self.waiting[key].remove(place)
        self.holder[key] = place
        self.granted += 1

    # ---- work ----------------------------------------------------------------------------------------------

    def _work_ended(self, place: Place, fact: Fact) -> None:
        work = self.work[place]
        unknown = fact.data["outcome"] == "unknown"
        work.acts = unknown and bool(error_in(fact.data).get("settling"))
        work.over = not (unknown and work.hold)
        self._frees(place)

    def _withdrawn(self, place: Place, fact: Fact) -> None:
        if place in self.keys:
            self.waiting[self.keys[place]].remove(place)
        elif place in self.work:
            work = self.work[place]
            work.acts = work.acts and not work.idle
            work.over = True
            self._frees(place)

    def _late(self, place: Place, _: Fact) -> None:
        if place in self.work and self.work[place].over:
            self.work[place].acts = False
            self._frees(place)

    def _attempted(self, place: Place, _: Fact) -> None:
        self._is_had(place)
        if place in self.work:
            self.work[place].idle = self.work[place].kind not in LOCAL

    def _resent(self, place: Place, _: Fact) -> None:
        self._is_had(place)
        if place in self.work:
            self.work[place].idle = False

    def _resolved(self, place: Place, fact: Fact) -> None:
        work = self.work.get(place)
        if work is not None and not work.over and not work.acts and fact.data["verdict"] in STEP_VERDICTS:
            work.over = True
            self._frees(place)

    def _orphaned(self, place: Place, _: Fact) -> None:
        """Nothing runs any more of what this worker ran, and waits for nobody."""
        for (number, path), work in list(self.work.items()):
            if number == place[0] and work.kind in LOCAL and work.over:
                work.acts = False
                self._frees((number, path))

    def _is_had(self, place: Place) -> None:
        if place in self.work:
            turn = (place[0], mutex_path(place[1]))
            assert self.holder.get(self.keys[turn]) == turn, f"{place} is tried without its mutex"

    def _frees(self, place: Place) -> None:
        work = self.work[place]
        if work.over and not work.acts:
            del self.work[place]
            turn = (place[0], mutex_path(place[1]))
            assert self.holder.pop(self.keys[turn]) == turn

    def _finished(self, place: Place, fact: Fact) -> None:
        number = place[0]
        waits = [one for places in self.waiting.values() for one in places if one[0] == number]
        assert not waits, f"finished while {waits} wait: {fact}"
        self._terminated(place, fact)

    def _terminated(self, place: Place, _: Fact) -> None:
        """Its program has no say: what it waited for and what it had is free."""
        number = place[0]
        self.over.add(number)
        for places in self.waiting.values():
            places[:] = [one for one in places if one[0] != number]
        self.holder = {key: one for key, one in self.holder.items() if one[0] != number}
        self.work = {one: work for one, work in self.work.items() if one[0] != number}
