"""A random world around one execution: answers in any order, again, late or never; events that somebody waits for
or nobody; time; deaths; operators who decide, cancel and deploy.

Every choice is one byte of a given string. When it is used up the world turns calm: everything is answered well,
so a run that does not end then waits for something that will never come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from contracts.errors import NotEncodable, TooLarge
from contracts.limits import CHILD_DEPTH_MAX
from orchestrator.core.ask import STEP_VERDICTS, UNDO_VERDICTS
from orchestrator.core.errors import Halt
from orchestrator.core.fact import Fact
from orchestrator.core.follows import LeftChild
from orchestrator.core.machine import Machine
from orchestrator.core.status import TERMINAL
from orchestrator.testing import NOON
from tests.core.programs import EVENTS, KEYS, RETRIED, Node, Program

Json = Any

MOVES_MAX = 600
CANCELS_MAX = 3
OUTCOMES = ("done", "refused", "failed", "unknown")
ENDS_OF_CHILDREN: tuple[tuple[str, str], ...] = (
    ("done", ""),
    ("child_failed", "failed"),
    ("child_failed", "compensated"),
    ("child_failed", "cancelled"),
    ("child_failed", "terminated"),
    ("refused", "key-taken"),
)
"""An outcome, and how the child ended or why it was not begun."""
REPLIES = ({"r": 1}, {"r": 2}, None, float("nan"))


@dataclass
class World:
    """One run of `tree`. `journal` is what is committed, and `left` the children that its commits have told to end;
    `machine` is at its end, and `drawn` is what its program has drawn on its way there.
    """

    tree: Node
    choices: bytes
    at: datetime = NOON
    mutex: str | None = None
    """That of the whole flow."""
    journal: list[Fact] = field(default_factory=list[Fact])
    left: list[LeftChild] = field(default_factory=list[LeftChild])
    drawn: list[str] = field(default_factory=list[str])
    _used: int = 0
    _said: tuple[str, str] | None = None
    _stopped: bool = False
    _cancels: int = 0
    program: Program = field(init=False)
    machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        self.program = Program(self.tree, mutex=self.mutex)
        self.machine = self.new_machine()

    def new_machine(self) -> Machine:
        return Machine(self.program.flow.program)

    def run(self) -> World:
        """From the start to the end. Fails when the execution waits for something that never comes."""
        try:
            self.begin()
            for _ in range(MOVES_MAX):
                if self.machine.status in TERMINAL:
                    break
                self._move()
            self.commit()
        finally:
            self.machine.evict()
        assert self.machine.status in TERMINAL, f"waits for ever: {self.journal}"
        self.drawn = list(self.program.drawn)
        return self

    def begin(self) -> None:
        depth = CHILD_DEPTH_MAX if self.pick(8) == 1 else 0  # too deep for a child of its own
        started = {"input": 1, "seed": "seed", "depth": depth}
        self.do(lambda: self.machine.tell("started", "", started, self.at))

    @property
    def is_stopped(self) -> bool:
        """Whether a bug stopped its program, and nobody has resumed it."""
        return self._stopped

    @property
    def is_calm(self) -> bool:
        """Whether nothing is left to chance."""
        return self._used >= len(self.choices)

    def pick(self, n: int) -> int:
        """A number below `n`; 0 when the choices are used up."""
        if self._used >= len(self.choices):
            return 0
        self._used += 1
        return self.choices[self._used - 1] % n

    def of(self, things: Sequence[Any]) -> Any:
        return things[self.pick(len(things))]

    # ---- moves ---------------------------------------------------------------------------------------------

    def _move(self) -> None:
        if self._stopped:
            self._resume()
            return
        self.at += timedelta(seconds=self.of([1, 0, 20, 400]))
        if self.pick(4) == 1:
            moves = [self._noise, self._reload, self._die, self._pass_time, self._send, self._cancel]
            (self._terminate if self.pick(32) == 1 else self.of(moves))()
        elif self.machine.held is not None:
            self._decide()
        else:
            self._answer()
        if self.pick(2) == 1:
            self.commit()

    def _answer(self) -> None:
        """Something that is waited for comes."""
        machine = self.machine
        calls = [path for path, (_, ask) in machine.open.items() if ask.is_sent or ask.is_child]
        settling = machine.settling()
        runs = [ask.path for ask in machine.runnable()]
        turns = self._turns()
        if turns and self.pick(3) != 2:
            self._grant(self.of(turns))
        elif self.pick(4) == 3:
            self._pass_time()
        elif runs and self.pick(3) == 2:
            path = self.of(runs)
            self._try_fails(path)
        elif calls or runs or settling:
            self._tell(self.of([*calls, *runs, *settling]), calm=settling == [] or bool(calls or runs))
        elif self._waits() and (self.machine.next_due() is None or self.pick(2) == 0):
            self._send(self._waits())
        else:
            self._pass_time()

    def _try_fails(self, path: str) -> None:
        """A try of a local step raises; or it is ended, nobody knows what it did, and it has left something."""
        error = {"code": self.of(["raised", RETRIED])}
        unknown = self.pick(3) == 2 and not self.machine.open[path][1].is_exact
        left = {"r": self.pick(3)} if unknown else None
        self.do(lambda: self.machine.attempt_failed(path, error, self.at, unknown=unknown, left=left))

    def _turns(self) -> list[str]:
        """Where it waits for a mutex that it may have: others may, and what it has itself nobody else gets."""
        held = set(self.machine.mutexes.held.values())
        return [
            path
            for path, (_, ask) in self.machine.open.items()
            if ask.kind == "mutex" and ask.args["key"] not in held
        ]

    def _grant(self, path: str) -> None:
        self.do(lambda: self.machine.tell("ended", path, {"outcome": "done", "value": None}, self.at))

    def _waits(self) -> list[tuple[str, str]]:
        return [(ask.args["type"], ask.args["key"]) for _, ask in self.machine.open.values() if ask.is_event]

    def _send(self, wanted: list[tuple[str, str]] | None = None) -> None:
        """An event comes: one of those that are `wanted`, or any; now and then twice, as two events."""
        type_, key = self.of(wanted) if wanted else (self.of(EVENTS), self.of(KEYS))
        for _ in range(1 + (self.pick(4) == 1)):
            said = {"type": type_, "key": key, "data": {"r": self.pick(8)}}
            self.do(lambda: self.machine.tell("received", "", said, self.at))  # noqa: B023  # at once
            if self._stopped or self.machine.status in TERMINAL:
                return

    def _cancel(self) -> None:
        """Somebody cancels it, more than once perhaps; what was done is undone, or not."""
        if self._cancels < CANCELS_MAX:
            self._cancels += 1
            order = {"by": "ann", "reason": "enough", "undo": self.pick(4) != 1}
            self.do(lambda: self.machine.tell("cancel_asked", "", order, self.at))

    def _tell(self, path: str, *, calm: bool = True) -> None:
        if self._was_asked(path, "child"):
            self.do(lambda: self._told(path, self._end_of_child()))
            return
        outcome = self.of(OUTCOMES if calm else ("unknown", *OUTCOMES))
        if self._is_exact(path) and (outcome != "done" or path not in self.machine.open):
            outcome = "refused"  # what has not ended is rolled back
        if outcome == "done":
            data: dict[str, Json] = {"outcome": "done", "value": self.of(REPLIES)}
        else:
            data = {"outcome": outcome, "error": {"code": "c", "detail": "as the world wants it"}}
        self.do(lambda: self._told(path, data))

    def _end_of_child(self) -> dict[str, Json]:
        """A child says itself how it ended, whether it was told to or not; or it was never begun."""
        outcome, how = self.of(ENDS_OF_CHILDREN)
        if outcome == "done":
            return {"outcome": outcome, "value": self.of(REPLIES[:3])}
        status = {"status": how} if outcome == "child_failed" else {}
        return {"outcome": outcome, "error": status | {"code": how, "detail": ""}}

    def _is_exact(self, path: str) -> bool:
        """Whether it was asked as a transaction, which is done or not."""
        return self._was_asked(path, "transaction")

    def _was_asked(self, path: str, kind: str) -> bool:
        said = [*self.journal, *self.machine.new]
        return any(it.path == path and it.kind == "asked" and it.data["kind"] == kind for it in said)

    def _told(self, path: str, data: dict[str, Json]) -> None:
        try:
            self.machine.tell("ended", path, data, self.at)
        except (NotEncodable, TooLarge):
            outcome = "refused" if self._is_exact(path) else "failed"
            self.machine.tell("ended", path, {"outcome": outcome, "error": {"code": "unfit"}}, self.at)

    def _pass_time(self) -> None:
        due = self.machine.next_due()
        if due is not None:
            self.at = max(self.at, due[0])
            self.do(lambda: self.machine.fire(self.at))

    def _noise(self) -> None:
        """An answer to anything that was ever asked, or an order that fits nothing."""
        asked = [fact.path for fact in [*self.journal, *self.machine.new] if fact.kind == "asked"]
        if asked and self.pick(2) == 0:
            path = self.of(asked)
            if not self._was_asked(path, "mutex"):
                self._tell(path)
            elif path in self._turns() or path not in self.machine.open:
                self._grant(path)
        else:
            held = self.machine.held
            order = {"verdict": "perhaps", "by": "ann", "reason": "", "value": None}
            self.do(lambda: self.machine.tell("resolved", held.path if held else "nowhere", order, self.at))

    def _decide(self) -> None:
        """A person decides about what is held; or what was missing comes after all."""
        held = self.machine.held
        assert held is not None
        asked = held.path if held.entry is None else held.entry.path
        if self.pick(4) == 3:
            self._tell(asked)
            return
        verdict = self.of(["done", *sorted(STEP_VERDICTS if held.entry is None else UNDO_VERDICTS)])
        order = {"verdict": verdict, "by": "ann", "reason": "because", "value": self.of(REPLIES[:3])}
        self.do(lambda: self.machine.tell("resolved", held.path, order, self.at))

    # ---- commits, deaths, deploys --------------------------------------------------------------------------

    def do(self, move: Callable[[], object]) -> None:
        """Make a move; a program that is stopped by it is held, as the engine holds it."""
        try:
            move()
        except Halt as halt:
            self._hold(halt)

    def commit(self) -> None:
        held = self.machine.held
        if held is not None and (held.code, held.path) != self._said:
            self._said = (held.code, held.path)
            self.machine.remark("held", held.path, {"code": held.code, "reason": held.reason}, self.at)
        self._write()

    def _write(self) -> None:
        """What is new is in the journal, and what follows from it has happened."""
        self.left += self.machine.follows.of(LeftChild)
        self.machine.follows.clear()
        self.journal += self.machine.take_new()

    def _hold(self, halt: Halt) -> None:
        self.machine.remark("held", "", {"code": halt.code, "reason": str(halt)}, self.at)
        self._write()
        self.machine.evict()
        self._stopped = True

    def _resume(self) -> None:
        """An operator resumes; perhaps after a deploy, perhaps after a worker died before it could."""
        self.program.mended = self.pick(3) != 1
        if self.pick(4) == 1:
            self._orphan()
        machine = self.machine = self.new_machine()
        machine.position = self.journal[-1].position
        machine.remark("resumed", "", {"by": "ann", "reason": ""}, self.at, actor="operator:ann")
        self._stopped = False
        self.do(lambda: machine.replay([*self.journal, *machine.new], now=self.at))

    def _reload(self) -> None:
        """The machine is let go after a commit and made again from the journal: nothing changes."""
        self.commit()
        before = self.machine
        self._load()
        if not self._stopped:
            assert state(self.machine, self.at) == state(before, self.at)
        before.evict()

    def _die(self) -> None:
        """The worker dies after a commit; its executions are taken over."""
        self.commit()
        self.machine.evict()
        self._orphan()
        self._load()

    def _terminate(self) -> None:
        """A person ends it without its program: the database writes that down, and asks its children to end."""
        self.commit()
        self.machine.evict()
        said = {"kind": "failed", "by": "ann", "reason": "enough"}
        position = self.journal[-1].position + 1
        self._append(Fact(position, "terminated", "", said, self.at, json.dumps(said), "operator:ann"))
        self._load()

    def _append(self, fact: Fact) -> None:
        """A fact that no machine has said."""
        self.journal.append(fact)

    def _orphan(self) -> None:
        position = self.journal[-1].position + 1
        self._append(Fact(position, "orphaned", "", {"by": "w"}, self.at, '{"by":"w"}', "worker"))

    def _load(self) -> None:
        machine = self.machine = self.new_machine()
        machine.position = self.journal[-1].position
        self.do(lambda: machine.replay(self.journal, now=self.at))


def state(machine: Machine, now: datetime) -> dict[str, object]:
    """All of a machine that decides what comes next. A time to try again that has come leaves no fact."""
    asks = {
        path: (ask.kind, ask.name, ask.args, ask.attempt, ask.due, ask.position,
               ask.retry_at if ask.retry_at is not None and ask.retry_at > now else None,
               ask.watch and ask.watch.left)
        for path, (_, ask) in machine.open.items()
    }  # fmt: skip
    branches = list(machine.branches.alive)
    kept = {
        **machine.undoing.unsettled,
        **{
            path: entry
            for branch in branches
            for one in branch.scope.around()
            for path, entry in one.entries.items()
        },
    }
    entries = {
        path: (entry.rank, entry.known, entry.settling, entry.action, entry.tries, entry.asked_at)
        for path, entry in kept.items()
    }
    held = machine.held
    return {
        "status": machine.status, "open": asks, "to undo": entries, "position": machine.position,
        "branches": [
            (branch.frame.prefix, branch.frame.counts, branch.scope.depth, branch.started, branch.told,
             branch.shielded, branch.pending, branch.at and branch.at.path)
            for branch in branches
        ],
        "events": [event.position for event in machine.agenda.buffer],
        "held": held and (held.code, held.path, held.reason, held.entry and held.entry.path),
        "undone": machine.undoing.undone, "stands": machine.undoing.stands, "undoing": bool(machine.undoing),
        "passed": machine.undoing.passed, "wanted": machine.undoing.wanted, "new": machine.new,
    }  # fmt: skip
