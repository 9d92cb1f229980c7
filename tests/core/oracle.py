"""What a journal says about undoing, children, events and branches, told again from its facts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from orchestrator.core.ask import STEP_VERDICTS, UNDO_VERDICTS
from orchestrator.core.errors import error_in
from orchestrator.core.fact import Fact
from orchestrator.core.path import undo_path

Json = Any

ROOT = ""
"""The scope that is the program."""

ENDS = frozenset({"finished", "terminated"})
"""Kinds of facts after which an execution says nothing more."""


@dataclass(slots=True)
class Kept:
    """Something that was asked with an undo, and may stand. `scopes` are those that it was asked in. A child without an
    undo may stand until it has ended: nothing before it is undone while it acts.
    """

    local: bool
    hold: bool
    action: Json
    scopes: tuple[str, ...]
    rank: int = 0
    known: bool = False
    answered: bool = False
    settling: bool = False
    tries: int = 1
    child: bool = False
    undone: bool = True
    """Whether it has an undo."""

    def is_needless(self, outcome: str) -> bool:
        """Whether nothing is left to be undone of what ended so."""
        return outcome in {"refused", "child_failed"} or (outcome == "done" and not self.undone)


@dataclass(slots=True)
class Scopes:
    """When each scope begins to be undone: read ahead of everything else, from the marks of its program.

    `begins` is the position from which on a scope that is left badly waits for that; a program without marks (its
    flow is one scope) is undone when nothing is open any more.
    """

    begins: dict[str, int] = field(default_factory=dict[str, int])
    marked: bool = False

    def read(self, journal: Sequence[Fact]) -> Scopes:
        asked = {fact.path: scopes_of(fact) for fact in journal if fact.kind == "asked"}
        closing: dict[str, int] = {}
        joined: set[str] = set()
        stopped: set[str] = set()
        badly: set[str] = set()
        for fact in journal:
            said = mark_of(fact)
            match said.get("what"):
                case "cancelled":
                    stopped.add(said["branch"])
                case "joined":
                    joined.add(said["fork"])
                case "closing":
                    closing[said["scope"]] = fact.position
                    # A branch that was told to end is undone however it ends; a flow that returns has completed.
                    if not said["well"] or (said["scope"] in stopped and said["scope"] != ROOT):
                        badly.add(said["scope"])
                case "closed" if not said["well"]:
                    badly.add(said["scope"])
                case _ if fact.kind == "asked" and fact.data["kind"] == "undo":
                    badly.update(
                        scope for scope in asked[fact.data["name"]]
                        if scope in closing and is_branch(scope) and fork_of(scope) not in joined
                    )  # fmt: skip
                case _ if fact.kind == "finished" and fact.data["kind"] != "completed":
                    badly.add(ROOT)
                case _:
                    pass
        self.begins = {scope: position for scope, position in closing.items() if scope in badly}
        self.marked = bool(closing)
        return self


def fork_of(branch: str) -> str:
    return branch.rpartition(".")[0]


def is_branch(scope: str) -> bool:
    """Whether a scope is a branch: then nothing marks how it was left, once it is undone."""
    return "." in scope.rpartition("/")[2]


def mark_of(fact: Fact) -> dict[str, Json]:
    return fact.data["args"] if fact.kind == "noted" and fact.data["kind"] == "mark" else {}


def scopes_of(fact: Fact) -> tuple[str, ...]:
    """The scopes that an ask says it stands in; the program alone when it says nothing."""
    found = asker_of(fact)
    return (ROOT,) if found is None else tuple(found[1])


def asker_of(fact: Fact) -> tuple[str, list[str]] | None:
    """At which path, and in which scopes, a call or a step says that it stands; None for what says nothing."""
    args: dict[str, Json] = fact.data.get("args") or {}
    data: Json = args.get("data")
    if fact.data["kind"] == "undo" or not data:
        return None
    if isinstance(data, list):
        at, scopes = cast("tuple[str, list[str]]", data)
        return at, scopes
    return None if "at" not in data else (data["at"], data["in"])


@dataclass(slots=True)
class Undoing:
    """Reads a journal fact by fact, and fails at the first that breaks a rule of undoing:

    each at most once, one at a time, never before its step has settled, exactly what may stand in the scopes that
    are left badly, the last that ended first, by the action that is known best; and the end says truly what became
    of it.
    """

    kept: dict[str, Kept] = field(default_factory=dict[str, Kept])
    asked: set[str] = field(default_factory=set[str])
    open: set[str] = field(default_factory=set[str])
    idle: set[str] = field(default_factory=set[str])
    told: set[str] = field(default_factory=set[str])
    """Children that were told to end; each is open until it has."""
    exact: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Transactions, which may be undone only once they are done; the scopes that each was asked in."""
    running: str | None = None
    failed: bool = False
    wanted: bool = True
    pivoted: bool = False
    undone: list[str] = field(default_factory=list[str])
    stands: list[str] = field(default_factory=list[str])
    passed: list[str] = field(default_factory=list[str])
    scopes: Scopes = field(default_factory=Scopes)
    now: int = 0

    def read(self, journal: Sequence[Fact]) -> Undoing:
        self.scopes.read(journal)
        readers = {
            "asked": self._asked, "ended": self._ended, "withdrawn": self._withdrawn, "late": self._late,
            "noted": self._noted, "cancel_asked": self._cancel_asked, "resolved": self._resolved,
            "orphaned": self._orphaned, "finished": self._finished, "attempted": self._attempted,
            "resent": self._resent,
        }  # fmt: skip
        for fact in journal:
            self.now = fact.position
            reader = readers.get(fact.kind)
            if reader is not None:
                reader(fact)
        return self

    # ---- what is asked -------------------------------------------------------------------------------------

    def _asked(self, fact: Fact) -> None:
        assert fact.path not in self.asked, f"a path is used twice: {fact}"
        self.asked.add(fact.path)
        self.open.add(fact.path)
        if fact.data["kind"] == "undo":
            self._asked_undo(fact, fact.data["name"])
            return
        scopes = scopes_of(fact)
        over = [scope for scope in scopes if self._is_undone_now(scope)]
        assert not over or "unfit" in fact.data, f"asked in {over}, which is being undone: {fact}"
        child = fact.data["kind"] == "child"
        if "undo" in fact.data or (child and "unfit" not in fact.data):
            self.kept[fact.path] = Kept(
                local=fact.data["kind"] == "step",
                hold=fact.data["name"].startswith("hold-"),
                action=fact.data.get("undo"),
                scopes=scopes,
                child=child,
                undone="undo" in fact.data,
            )
        elif fact.data["kind"] == "transaction":
            self.exact[fact.path] = scopes

    def _asked_undo(self, fact: Fact, of: str) -> None:
        assert of in self.kept, f"undoes what cannot stand: {fact}"
        entry = self.kept[of]
        if self.running is None:
            waiting = self._waiting()
            assert of in waiting, f"undoes what was not left badly: {fact}"
            acting = [path for path in waiting if not self.kept[path].rank]
            assert not acting, f"undoes while {acting} have not ended: {fact}"
            last = max(waiting, key=lambda path: self.kept[path].rank)
            assert of == last, f"undoes before what ended later, {last}: {fact}"
        else:
            assert of == self.running and not self.failed, f"a second undo while {self.running} runs: {fact}"
        assert entry.rank, f"undoes what has not ended: {fact}"
        assert not entry.settling, f"undoes before its step has settled: {fact}"
        assert fact.path == undo_path(of, entry.tries), f"a try that nobody ordered: {fact}"
        assert (fact.data["args"], fact.data["known"]) == (entry.action, entry.known), (
            f"undoes wrongly: {fact}"
        )
        assert self.wanted or self.running == of, f"undoes although nobody wants it: {fact}"
        self.running, self.failed = of, False

    def _is_undone_now(self, scope: str) -> bool:
        if not self.scopes.marked:
            return bool(self.running or self.undone or self.stands)
        return self.scopes.begins.get(scope, self.now) < self.now

    def _waiting(self) -> list[str]:
        """What is to be undone now: all that may stand in the scopes that are left badly."""
        if not self.scopes.marked:
            assert not self.open - {undo_path(path, entry.tries) for path, entry in self.kept.items()}
            return list(self.kept)
        return [path for path, entry in self.kept.items() if any(map(self._is_undone_now, entry.scopes))]

    # ---- what comes of it ----------------------------------------------------------------------------------

    def _ended(self, fact: Fact) -> None:
        assert fact.path in self.open, f"ends what is not open: {fact}"
        outcome = fact.data["outcome"]
        entry = self.kept.get(fact.path)
        if outcome != "unknown" or not fact.path.rpartition("/")[2].startswith("hold-"):
            self.open.discard(fact.path)
        if self.running is not None and fact.path == undo_path(self.running, self.kept[self.running].tries):
            if outcome == "done":
                self._is_undone()
            else:
                self.failed = True
        elif fact.path in self.exact:
            assert outcome in {"done", "refused"}, f"done or rolled back: {fact}"
            if "undo" in fact.data:
                self._kept_exactly(fact)
        elif entry is not None and entry.is_needless(outcome):
            del self.kept[fact.path]
        elif entry is not None:
            entry.rank = fact.position
            entry.answered = outcome != "unknown"
            entry.settling = bool(error_in(fact.data).get("settling"))
            if outcome == "done":
                entry.known, entry.action = True, fact.data["undo"]

    def _kept_exactly(self, fact: Fact) -> None:
        """A transaction can be undone once it is committed, and its undo is known from then on."""
        self.kept[fact.path] = Kept(
            local=True,
            hold=False,
            action=fact.data["undo"],
            scopes=self.exact[fact.path],
            rank=fact.position,
            known=True,
            answered=True,
        )

    def _withdrawn(self, fact: Fact) -> None:
        assert fact.path in self.open, f"withdraws what is not open: {fact}"
        entry = self.kept.get(fact.path)
        if entry is not None and entry.child:
            assert fact.path not in self.told, f"told to end twice: {fact}"
            self.told.add(fact.path)
            return  # it is waited for
        self.open.discard(fact.path)
        if entry is not None and not entry.rank:
            entry.rank, entry.settling = fact.position, fact.path not in self.idle

    def _attempted(self, fact: Fact) -> None:
        """A call that its service gave up is under way nowhere until it is sent again; a step says itself when it is
        over.
        """
        assert fact.path in self.open, f"a try of what is not open: {fact}"
        entry = self.kept.get(fact.path)
        if entry is not None and not entry.local:
            self.idle.add(fact.path)

    def _resent(self, fact: Fact) -> None:
        assert fact.path in self.open, f"sent again, and not open: {fact}"
        self.idle.discard(fact.path)

    def _late(self, fact: Fact) -> None:
        entry = self.kept.get(fact.path)
        if entry is None or not entry.rank or entry.answered:
            return
        outcome = fact.data["outcome"]
        entry.settling = False
        entry.answered = outcome != "unknown"
        needless = entry.is_needless(outcome)
        if outcome == "done" and not needless:
            entry.known, entry.action = True, fact.data["undo"]
        elif needless and undo_path(fact.path, entry.tries) not in self.asked:
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
        elif not undo and verdict in STEP_VERDICTS and fact.path in self.open:
            self.open.discard(fact.path)
            self._resolved_step(fact, verdict)

    def _resolved_step(self, fact: Fact, verdict: str) -> None:
        entry = self.kept.get(fact.path)
        if entry is None:
            return
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

    # ---- what is not undone --------------------------------------------------------------------------------

    def _noted(self, fact: Fact) -> None:
        said = mark_of(fact)
        if fact.data["kind"] == "pivot":
            self.pivoted = True
            self.passed += self.kept
            self.kept.clear()
        elif said.get("what") == "closing" and not self.wanted and self.scopes.begins.get(said["scope"]):
            self.now += 1  # from now on it is being undone
            self._give_up()
        elif said.get("what") == "closed" and not said["well"]:
            left = [path for path, entry in self.kept.items() if said["scope"] in entry.scopes]
            assert not left, f"{said['scope']} is left badly while {left} may stand"

    def _cancel_asked(self, fact: Fact) -> None:
        if not fact.data["undo"]:
            self.wanted = False
            if self.running is not None and (self.failed or not self._is_asked(self.running)):
                self.running, self.failed = None, False
            self._give_up()

    def _is_asked(self, of: str) -> bool:
        """Whether the undo of `of` is asked now; a person may have ordered one that nobody knows how to do."""
        return undo_path(of, self.kept[of].tries) in self.asked

    def _give_up(self) -> None:
        """What waits to be undone stands, but for what is being undone."""
        if self.scopes.marked:
            self._leave([path for path in self._waiting() if path != self.running])

    def _leave(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.stands.append(path)
            del self.kept[path]

    # ---- the end -------------------------------------------------------------------------------------------

    def _finished(self, fact: Fact) -> None:
        status = fact.data["kind"]
        assert not self.open, f"{status} while {self.open} are open"
        assert self.running is None, f"{status} while {self.running} is being undone"
        assert fact.data.get("undone", 0) == len(self.undone)
        stands = self.stands if status == "completed" else [*self.stands, *self.passed]
        assert sorted(fact.data.get("stands", [])) == sorted(stands), f"{fact}: {self}"
        if status != "completed":
            assert not self.kept, f"{status} while {sorted(self.kept)} may stand"
        if status in ("compensated", "failed"):
            whole = bool(self.undone) and not self.stands and not self.pivoted
            assert (status == "compensated") == whole, f"{fact}: {self}"


@dataclass(slots=True)
class Children:
    """Reads a journal fact by fact: `told` are the children that are to be told to end, each with the position of the
    fact that says so: that nobody waits for it any more, or that its time was over.

    Fails when a child ends twice, and when one that was told to end is left before it has.
    """

    asked: dict[str, str] = field(default_factory=dict[str, str])
    """The ids of those that are open, by path."""
    told: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])

    def read(self, journal: Sequence[Fact]) -> Children:
        for fact in journal:
            if fact.kind == "asked" and fact.data["kind"] == "child" and "unfit" not in fact.data:
                self.asked[fact.path] = fact.data["args"]["execution"]
            elif fact.kind == "withdrawn" and fact.path in self.asked:
                self._tell(fact)
            elif fact.kind == "ended" and fact.data["outcome"] == "unknown" and fact.path in self.asked:
                self._tell(fact)
                del self.asked[fact.path]
            elif fact.kind == "ended":
                self.asked.pop(fact.path, None)
            elif fact.kind == "finished":
                assert not self.asked, f"left: {self.asked}"
        return self

    def _tell(self, fact: Fact) -> None:
        self.told.append((fact.path, self.asked[fact.path], fact.position))


@dataclass(slots=True)
class Events:
    """Reads a journal fact by fact, and fails at the first that breaks a rule of events:

    each is given at most once, the oldest of its type and key first, to whoever has waited longest for it; and
    nothing else happens while somebody waits for what is there.
    """

    waits: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    buffer: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    given: int = 0

    def read(self, journal: Sequence[Fact]) -> Events:
        for fact in journal:
            if fact.kind in ("received", "cancel_asked", "late", "attempted", "resolved"):
                assert not self._pairs(), f"{self._pairs()} could be given before {fact}"
            if fact.kind == "asked" and fact.data["kind"] == "event":
                self.waits[fact.path] = (fact.data["args"]["type"], fact.data["args"]["key"])
            elif fact.kind == "received":
                self.buffer[fact.position] = (fact.data["type"], fact.data["key"])
            elif fact.kind == "ended" and "of" in fact.data:
                self._gift(fact)
            elif fact.kind in ("ended", "withdrawn"):
                self.waits.pop(fact.path, None)
            elif fact.kind == "finished":
                assert not self.waits, f"finished while {self.waits} wait"
        return self

    def _gift(self, fact: Fact) -> None:
        of = fact.data["of"]
        assert of in self.buffer, f"given twice, or never received: {fact}"
        assert fact.path in self.waits, f"given to who does not wait: {fact}"
        what = self.buffer[of]
        assert self.waits[fact.path] == what, f"{what} for who waits for {self.waits[fact.path]}: {fact}"
        assert of == min(position for position, one in self.buffer.items() if one == what), (
            f"not the oldest: {fact}"
        )
        assert fact.path == next(path for path, wanted in self.waits.items() if wanted == what), (
            f"not to who waited longest: {fact}"
        )
        del self.buffer[of], self.waits[fact.path]
        self.given += 1

    def _pairs(self) -> set[tuple[str, str]]:
        return set(self.waits.values()) & set(self.buffer.values())


@dataclass(slots=True)
class Branches:
    """Reads a journal fact by fact, and fails at the first that breaks a rule of branches:

    one is told to end at most once; a fork is joined once, after all of its branches; and what a loser did is undone
    before that.
    """

    heard: Counter[str] = field(default_factory=Counter[str])
    joined: set[str] = field(default_factory=set[str])
    open: set[str] = field(default_factory=set[str])

    def read(self, journal: Sequence[Fact]) -> Branches:
        for fact in journal:
            said = mark_of(fact)
            late = [fork for fork in self.joined if fact.kind != "late" and is_inside(fact.path, fork)]
            assert not late or fact.path.endswith("/undo") or "/undo#" in fact.path, f"{fact} after {late}"
            if fact.kind == "asked":
                self.open.add(fact.path)
            elif fact.kind in ("ended", "withdrawn"):
                self.open.discard(fact.path)
            elif said.get("what") == "cancelled":
                self.heard[said["branch"]] += 1
                assert self.heard[said["branch"]] == 1, f"told to end twice: {fact}"
            elif said.get("what") == "joined":
                self._joined(said["fork"])
        return self

    def _joined(self, fork: str) -> None:
        assert fork not in self.joined, f"joined twice: {fork}"
        self.joined.add(fork)
        waiting = [path for path in self.open if is_inside(path, fork)]
        assert not waiting, f"{fork} is joined before {waiting}"


def is_inside(path: str, fork: str) -> bool:
    """Whether `path` stands in a branch of `fork`."""
    return path.startswith(f"{fork}.")
