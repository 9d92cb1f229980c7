"""One program and its journal, and nothing else.

Input facts (the world) drive the program; produced facts (the program) are compared with the journal while
there is a past, and are new when there is none. A live run and a replay are the same function, `apply`:
"live" only means that what the program produces has no recorded counterpart.
"""

from __future__ import annotations

import hashlib
import heapq
import inspect
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from contracts import strict_json
from contracts.errors import NotEncodable, TooLarge
from contracts.limits import (
    CALL_TIMEOUT,
    FACTS_MAX,
    FORK_WIDTH_MAX,
    OPEN_ASKS_MAX,
    PAYLOAD_BYTES_MAX,
    RESUMES_MAX,
    SPAN_MAX,
    UNDOS_MAX,
)
from orchestrator.core.ask import MAY_HAVE_ACTED, STEP_VERDICTS, UNDO_VERDICTS, Ask, Entry, Scope, Unwind
from orchestrator.core.branch import Branch, drop
from orchestrator.core.buffer import Buffer
from orchestrator.core.errors import (
    ENDINGS,
    FAULTS,
    Cancelled,
    Halt,
    LimitExceeded,
    NonDeterminism,
    ProgramFault,
    StepFailed,
    UsageError,
    error_in,
    in_full,
    in_words,
    reason_of,
    storable,
    structure,
)
from orchestrator.core.fact import BYSTANDERS, Fact, saying
from orchestrator.core.fork import Fork
from orchestrator.core.past import Past
from orchestrator.core.path import Frame, undo_path
from orchestrator.core.retry import ONCE, UNDO_RETRY
from orchestrator.core.segments import Segments
from orchestrator.core.status import Status
from orchestrator.core.undoing import Held, Undoing

Json = Any
Program = Callable[["Machine", Json], Coroutine[Any, Any, Json]]

FOREIGN_AWAITS_MAX: Final = 100
"""Times that a program may await something foreign, and catch what it gets for it."""

CLINGS_MAX: Final = 100
"""Times that a program which is let go may catch that; then it is left at its next await."""

BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A message that nobody waits for any more, and the position of the fact that says so."""

    path: str
    asked_at: datetime
    position: int


@dataclass(frozen=True, slots=True)
class ClosedWait:
    """A wait for an event that is over, and the position of the fact that says so."""

    ask: Ask
    position: int


class Machine:
    """What a flow's context talks to: it turns what the program asks into facts, and facts into answers.

    Feed it a journal once (`replay`), then the world (`tell`, `fire`). `new` holds the facts that are not
    yet committed; `open` what the program waits for; `held` why a person is needed. `taken_back` and
    `closed_waits` are what else follows from `new`.
    """

    def __init__(
        self,
        program: Program,
        *,
        facts_max: int = FACTS_MAX,
        payload_max: int = PAYLOAD_BYTES_MAX,
    ) -> None:
        self.program = program
        self.facts_max = facts_max
        self.payload_max = payload_max
        self.status = Status.OPEN
        self.open: dict[str, tuple[Branch, Ask]] = {}
        self.new: list[Fact] = []
        self.taken_back: list[TakenBack] = []
        self.closed_waits: list[ClosedWait] = []
        self.position = 0
        self.at = BEGINNING
        self.started: dict[str, Json] = {}
        self.began = BEGINNING
        self.segments: Segments | None = None  # of its trace, for who makes messages of what it asks
        self.result: Json = None
        self.undoing = Undoing(entries_max=UNDOS_MAX)
        self.current: Branch | None = None
        self._seed = b""
        self._root: Branch | None = None
        self._branches: dict[Branch, None] = {}
        self._buffer = Buffer()
        self._needs: dict[str, Held] = {}
        self._resumes = 0
        self._ready: deque[tuple[Branch, Json, BaseException | None]] = deque()
        self._due: list[tuple[datetime, int, str]] = []
        self._past: Past | None = None
        self._present = BEGINNING
        self._decisions: dict[str, dict[str, Json]] = {}
        self._kept = 0
        self._fault: Halt | None = None
        self._foreigners = 0
        self._clung = 0
        self._evicted = False

    # ---- the two ways in: a journal, or the world ----------------------------------------------------------

    def replay(self, journal: Sequence[Fact], *, complete: bool = True, now: datetime = BEGINNING) -> None:
        """Run the program through its past. Raises NonDeterminism where the two disagree.

        `complete` says that all the program produced at the journal's last input is in the journal, so that
        a step inserted in the past is found; a prefix of a journal is not. What the program asks beyond the
        journal is due from `now` on, not from when an execution that had to wait for a worker was started.
        """
        kept = len(self.new)
        self._present = now
        try:
            self._replay(journal, complete=complete)
        except Halt:
            self._forget_beyond(journal[-1].position if journal else 0, kept)
            raise
        self._past = None
        self._kept = len(self.new)
        self._decide()

    def _replay(self, journal: Sequence[Fact], *, complete: bool) -> None:
        past = self._past = Past(journal)
        known = len(self.new)
        unchecked = complete and not past.is_unfinished
        while True:
            fact = past.next_input()
            if unchecked and past.is_at_its_end:
                unchecked = False
                self._check_complete(known)
            if fact is None:
                return
            past.take()
            self.apply(fact)

    def tell(
        self, kind: str, path: str, data: dict[str, Json], at: datetime, *, actor: str = "worker"
    ) -> None:
        """The world speaks: append the input fact and let the program run until every branch is blocked.

        Raises NotEncodable or TooLarge, with nothing changed, when the fact cannot be stored, and a Halt
        when the execution must be held; `new` then ends with the input at which the program stopped.
        """
        if (
            kind == "ended"
        ):  # nobody answers a timer, an event comes by its name, an unknown tells a held step nothing
            found = self.open.get(path)
            if (
                found is None
                or found[1].kind not in MAY_HAVE_ACTED
                or (path in self._needs and data.get("outcome") == "unknown")
            ):
                kind = "late"
        self._tell(kind, path, data, at, actor)

    def _tell(self, kind: str, path: str, data: dict[str, Json], at: datetime, actor: str = "worker") -> None:
        self._kept = len(self.new)
        if self.status is not Status.OPEN:
            return
        if data.get("outcome") == "done" or data.get("verdict") == "done":
            data = self._with_undo(path, data)
        text = self._encoded(data, what=f"{kind} {path}".rstrip())
        self.at = max(self.at, at)
        self._input(kind, path, data, text, actor)
        self._decide()

    def fire(self, now: datetime) -> bool:
        """Let the earliest due time pass, if it has come; False when none has."""
        due = self.next_due()
        if due is None or due[0] > now:
            return False
        path = heapq.heappop(self._due)[2]
        ask = self.open[path][1]
        if ask.retry_at == due[0]:
            ask.retry_at = None
        elif ask.kind in MAY_HAVE_ACTED:
            self._time_out(path, ask, now)
        else:
            self._tell("ended", path, {"outcome": "timed_out" if ask.is_event else "done"}, now)
        return True

    def _time_out(self, path: str, ask: Ask, now: datetime) -> None:
        """What was sent, or runs, has to settle; a local step that waits for its next try runs nowhere."""
        error: dict[str, Json] = {"code": "timeout", "detail": "no answer until its due time"}
        if ask.is_message or ask.retry_at is None:
            error["settling"] = True
        position = self.position + 1
        try:
            self.tell("ended", path, {"outcome": "unknown", "error": error}, now)
        finally:  # a program that is stopped by this fact keeps it, so its message is taken back all the same
            if ask.is_message and ask.asked_at is not None and self.position >= position:
                self.taken_back.append(TakenBack(path, ask.asked_at, position))

    def attempt_failed(self, path: str, error: dict[str, Json], at: datetime, *, again: bool = True) -> None:
        """A try of a local step failed: it is tried again later, or has ended `failed`.

        `again` is False when another try cannot help (a result that cannot be stored). A step that is held
        because its time ran out is not tried again either.
        """
        if path not in self.open:
            self.tell("late", path, {"outcome": "failed", "error": error}, at)
            return
        ask = self.open[path][1]
        key = self._seed + f"{path}/{ask.attempt}".encode()
        delay = ask.retry.delay_after(ask.attempt, key=key) if again and not self._is_over(ask) else None
        error = error | {"attempts": ask.attempt}
        if delay is None:
            self.tell("ended", path, {"outcome": "failed", "error": error}, at)
        else:
            next_at = (max(self.at, at) + delay).isoformat()
            self.tell("attempted", path, {"attempt": ask.attempt, "error": error, "next_at": next_at}, at)

    def next_due(self) -> tuple[datetime, str] | None:
        """The earliest due time of all that is open, and its path: sleeps, timeouts, and when to try again."""
        while self._due:
            at, _, path = self._due[0]
            found = self.open.get(path)
            if found is not None and at in (found[1].due, found[1].retry_at):
                return at, path
            heapq.heappop(self._due)
        return None

    def runnable(self) -> list[Ask]:
        """Local work whose time has come. A step that a person has to decide about is not run meanwhile."""
        return [
            ask
            for _, ask in self.open.values()
            if ask.is_local and ask.retry_at is None and not self._is_over(ask)
        ]

    def settling(self, *, local: bool | None = None) -> list[str]:
        """Paths of what has timed out and may still turn out to be done or not; only local work, or only other."""
        waits = {path: entry.local for path, entry in self.undoing.unsettled.items() if entry.settling}
        waits |= {path: ask.is_local for path, (_, ask) in self.open.items() if ask.overdue}
        return [path for path, is_local in waits.items() if local is None or is_local is local]

    def has_no_use_for(self, path: str) -> bool:
        """Whether a try at `path` that runs is to be stopped: its step is over, or its time has run out."""
        return path not in self.open or self.open[path][1].overdue

    def _is_over(self, ask: Ask) -> bool:
        """Whether `ask` is open only for an answer: no try of it begins any more."""
        return ask.overdue or self.is_held(ask.path)

    def is_held(self, path: str) -> bool:
        """Whether `path` is a step that a person has to decide about; it is still open for an answer."""
        return path in self._needs

    @property
    def held(self) -> Held | None:
        """The first of what a person is needed for."""
        return next(iter(self._needs.values()), None)

    def _hold(self, held: Held) -> None:
        self._needs[held.path] = held

    def take_new(self) -> list[Fact]:
        """The facts that are not yet committed; they are the caller's from now on."""
        facts, self.new = self.new, []
        return facts

    def remark(
        self, kind: str, path: str, data: dict[str, Json], at: datetime, *, actor: str = "worker"
    ) -> None:
        """Append a fact for people and for the projection; the program does not see it."""
        assert kind in BYSTANDERS, kind
        self.position += 1
        self.at = max(self.at, at)
        self.new.append(Fact(self.position, kind, path, data, self.at, self._encoded(data, what=kind), actor))

    # ---- facts ---------------------------------------------------------------------------------------------

    def _input(self, kind: str, path: str, data: dict[str, Json], text: str, actor: str) -> None:
        if self.position >= self.facts_max:
            raise LimitExceeded(f"facts_max: the journal has {self.position} facts, at most {self.facts_max}")
        position = self.position = self.position + 1
        fact = Fact(position, kind, path, data, self.at, text, actor)
        self.new.append(fact)
        self._kept = len(self.new)
        try:
            self.apply(fact)
        except Halt:
            self._forget_beyond(position, self._kept)
            raise

    def _forget_beyond(self, position: int, kept: int) -> None:
        """Nothing that a stopped program said counts, nor what follows from it: it will say it again."""
        del self.new[kept:]
        self.taken_back[:] = [one for one in self.taken_back if one.position <= position]
        self.closed_waits[:] = [one for one in self.closed_waits if one.position <= position]
        self.position = position

    def apply(self, fact: Fact) -> None:
        """The one place where facts have effect, live and replayed alike."""
        self.position = fact.position
        self._resumes = 0
        if fact.kind not in BYSTANDERS:
            self.at = fact.at
        getattr(self, "on_" + fact.kind)(fact)
        self._pump()

    def _produce(self, kind: str, path: str, data: dict[str, Json], text: str | None = None) -> Fact:
        """Record what the program says; in the past, check that it said so then."""
        return self._recall(kind, path, data) or self._say(kind, path, data, text)

    def _recall(self, kind: str, path: str, data: dict[str, Json]) -> Fact | None:
        """What was recorded when the program said this; None when that is new. The recorded fact wins."""
        recorded = self._recorded() if self._past is not None else None
        if recorded is None:
            return None
        if recorded.says() != (kind, path, data.get("kind"), data.get("name")):
            raise self._stop(
                NonDeterminism(
                    f"the journal has {saying(recorded.kind, recorded.path, recorded.data)} at position "
                    f"{recorded.position}; the program says {saying(kind, path, data)}"
                )
            )
        assert self._past is not None, "what is recorded is in the past"
        self._past.take()
        self.position = recorded.position
        return recorded

    def _say(self, kind: str, path: str, data: dict[str, Json], text: str | None = None) -> Fact:
        if self._evicted:
            return Fact(self.position, kind, path, data, self.at)
        if self.position >= self.facts_max:
            raise self._stop(LimitExceeded(f"facts_max: {self.facts_max} facts reached at {path}"))
        self.position += 1
        fact = Fact(
            self.position, kind, path, data, self.at, text or self._encoded(data, what=f"{kind} {path}")
        )
        self.new.append(fact)
        return fact

    def _recorded(self) -> Fact | None:
        """The next recorded fact that the program should see. A worker's death on the way to it counts."""
        past = self._past
        if past is None:
            return None
        fact = past.recorded()
        self.position = max(self.position, past.position)
        while past.deaths:
            self.on_orphaned(past.deaths.pop(0))
        return fact

    def _encoded(self, data: dict[str, Json], *, what: str) -> str:
        text = strict_json.encode(data, what=what)
        if len(text) * 4 > self.payload_max:
            for part in ("args", "undo", "value", "input", "output", "error"):
                if part in data:
                    strict_json.encode(data[part], what=f"{what}: {part}", bytes_max=self.payload_max)
        return text

    def _with_undo(self, path: str, data: dict[str, Json]) -> dict[str, Json]:
        """`data` with the undo that its reply makes exact; from then on that one counts."""
        found = self.open.get(path)
        entry = (
            found[1].entry
            if found is not None and found[1].kind != "undo"
            else self.undoing.unsettled.get(path)
        )
        if entry is None or entry.undo is None or not self.undoing.waits(entry):
            return data
        return data | {"undo": self._making_undo(entry.path, entry.undo, True, data.get("value"))}

    def _making_undo(self, path: str, undo: Callable[[bool, Json], Json], known: bool, value: Json) -> Json:  # noqa: FBT001  # the undo's own shape
        try:
            return undo(known, value)
        except Halt:
            raise
        except BaseException as error:
            raise self._stop(ProgramFault(f"the undo of {path} raised {in_full(error)}")) from error

    def _decide(self) -> None:
        """Live only: what the core itself knows about an ask becomes an input fact: one that cannot be sent is
        refused, and the oldest event of a type and key goes to whoever has waited longest for it.
        """
        while (self._decisions or self._buffer.events) and self.status is Status.OPEN:
            decided = self._decision() or self._gift()
            if decided is None:
                return
            path, data = decided
            self.at = max(self.at, self._present)
            self._input("ended", path, data, self._encoded(data, what=f"ended {path}"), "worker")

    def _decision(self) -> tuple[str, dict[str, Json]] | None:
        while self._decisions:
            path, data = next(iter(self._decisions.items()))
            del self._decisions[path]
            if path in self.open:
                return path, data
        return None

    def _gift(self) -> tuple[str, dict[str, Json]] | None:
        """The next event to be given, and where to."""
        waits: dict[tuple[str, str], str] = {}
        for path, (_, ask) in self.open.items():
            if ask.is_event:
                waits.setdefault((ask.args["type"], ask.args["key"]), path)
        for event in self._buffer:
            path = waits.get((event.data["type"], event.data["key"]))
            if path is not None:
                return path, {"outcome": "done", "of": event.position}
        return None

    def _check_complete(self, known: int) -> None:
        if len(self.new) > known:
            first = self.new[known]
            raise NonDeterminism(
                f"the journal ends at position {first.position - 1}; "
                f"the program says {saying(first.kind, first.path, first.data)} before its end"
            )

    def _stop(self, halt: Halt) -> Halt:
        """Remember `halt`, so that a program that catches everything cannot hide it."""
        self._fault = halt
        return halt

    # ---- what each input does ------------------------------------------------------------------------------

    def on_started(self, fact: Fact) -> None:
        self.started, self.began = fact.data, fact.at
        self._seed = str(fact.data.get("seed", "")).encode()
        self._root = Branch(self.program(self, fact.data.get("input")))
        self._branches[self._root] = None
        self._resume(self._root)

    def on_ended(self, fact: Fact) -> None:
        found = self.open.get(fact.path)
        if found is None:
            raise NonDeterminism(
                f"the journal has {fact.kind} at {fact.path!r}, position {fact.position}; the program never asked there"
            )
        branch, ask = found
        self._decisions.pop(fact.path, None)
        outcome: str = fact.data["outcome"]
        if ask.kind == "undo":
            del self.open[fact.path]
            self._undo_ended(fact, ask)
            return
        self.undoing.ended(ask, fact, outcome)
        if outcome == "unknown" and ask.hold:
            ask.due = ask.retry_at = None
            ask.overdue = bool(error_in(fact.data).get("settling"))
            if not ask.overdue:  # else it may yet turn out what became of it
                self._hold(Held("unknown-outcome", ask.path, reason_of(fact.data)))
            return
        self._close(ask, fact)
        if ask.kind == "fork":
            self._resume(branch, error=UsageError(error_in(fact.data).get("detail")))
        elif outcome == "done":
            self._resume(branch, self._event_of(fact) if "of" in fact.data else fact.data.get("value"))
        else:
            self._resume(branch, error=ENDINGS[outcome](ask.path, ask.name, error_in(fact.data)))

    def _close(self, ask: Ask, fact: Fact) -> None:
        """`fact` ends the waiting at `ask`."""
        self._needs.pop(ask.path, None)
        del self.open[ask.path]
        if ask.kind == "event" and self._is_new(fact):
            self.closed_waits.append(ClosedWait(ask, fact.position))

    def _is_new(self, fact: Fact) -> bool:
        """Whether `fact`, the last one, is not yet in the journal."""
        return bool(self.new) and self.new[-1] is fact

    def _event_of(self, fact: Fact) -> Json:
        """What was received where `fact` says."""
        event = self._buffer.take(fact.data["of"])
        if event is None:
            raise NonDeterminism(
                f"the journal gives {fact.path!r} the event of position {fact.data['of']}; there is none"
            )
        return event.data.get("data")

    def on_received(self, fact: Fact) -> None:
        self._buffer.add(fact)

    def on_cancel_asked(self, fact: Fact) -> None:
        """Whoever runs the flow wants it to end: it is stopped as a whole, and undone unless that is not wanted.

        While it undoes nothing is thrown into it; without `undo`, nothing more is undone after what runs.
        """
        assert self._root is not None, "what was not started cannot be cancelled"
        if not fact.data.get("undo", True):
            self._stop_undoing()
        self._stop_branch(self._root, str(fact.data.get("reason") or "cancelled"))

    def _stop_undoing(self) -> None:
        failed = next((held for held in self._needs.values() if held.entry is not None), None)
        if failed is not None and failed.entry is not None:
            del self._needs[failed.path]
            self._go_on(self.undoing.over(failed.entry, stands=True))
        self._go_on(self.undoing.give_up())

    def on_late(self, fact: Fact) -> None:
        """An answer for a path that is over: it settles, or makes the unknown known; it resumes nothing."""
        needless = self.undoing.late(fact)
        if needless is None:
            return
        held = next((one for one in self._needs.values() if one.entry is needless), None)
        if held is not None and held.code == "undo-unknown":
            del self._needs[held.path]  # nobody knew how to undo it, and nobody has to
            self.undoing.current = None
        if needless is not self.undoing.current:
            self._go_on(self.undoing.dropped(needless))

    def on_attempted(self, fact: Fact) -> None:
        found = self.open.get(fact.path)
        if found is None:
            return
        ask = found[1]
        ask.attempt = fact.data["attempt"] + 1
        ask.retry_at = datetime.fromisoformat(fact.data["next_at"])
        heapq.heappush(self._due, (ask.retry_at, fact.position, ask.path))

    def on_resolved(self, fact: Fact) -> None:
        """A person decided about what was held. What does not fit has no effect."""
        held = self._needs.get(fact.path)
        if held is None:
            return
        verdict = fact.data.get("verdict")
        fit = STEP_VERDICTS if held.entry is None else UNDO_VERDICTS
        if not isinstance(verdict, str) or verdict not in fit:
            return
        del self._needs[held.path]
        if held.entry is None:
            self._resolve_step(fact, verdict)
        elif verdict == "retry":
            self._ask_undo(held.entry)
        else:
            self._go_on(self.undoing.over(held.entry, stands=verdict != "done"))

    def on_held(self, fact: Fact) -> None: ...

    def on_resumed(self, fact: Fact) -> None: ...

    def on_ordered(self, fact: Fact) -> None: ...

    def on_orphaned(self, fact: Fact) -> None:
        """The worker that ran this died: its running tries are over, and what it was settling is settled.

        When the time to try again had come, the try may have run: that leaves no fact of its own.
        """
        for _, ask in self.open.values():
            waits = ask.retry_at is not None and ask.retry_at > fact.at
            if ask.is_local and ask.position < fact.position and not waits and not self.is_held(ask.path):
                self._lose_try(ask)
        self.undoing.settle_local()

    def _lose_try(self, ask: Ask) -> None:
        ask.retry_at = None
        ask.attempt += 1
        if ask.overdue or ask.attempt > ask.retry.attempts:
            error = {"code": "worker-lost", "detail": f"its worker died at try {ask.attempt - 1}"}
            self._decisions[ask.path] = {"outcome": "unknown", "error": error}

    # ---- running branches ----------------------------------------------------------------------------------

    def _pump(self) -> None:
        while True:
            while self._ready:
                self._resumes += 1
                if self._resumes > RESUMES_MAX:
                    raise self._stop(
                        LimitExceeded(f"resumes_max: {RESUMES_MAX} asks in one turn; it runs without waiting")
                    )
                branch, value, error = self._ready.popleft()
                if not branch.over:  # it was stopped before it was started
                    self._run(branch, value, error)
            self._next_undo()
            if not self._ready:
                return

    def _resume(self, branch: Branch, value: Json = None, *, error: BaseException | None = None) -> None:
        """`branch` goes on when its turn comes; it waits for nothing any more."""
        branch.at = None
        self._ready.append((branch, value, error))

    def _run(self, branch: Branch, value: Json, error: BaseException | None) -> None:
        if branch.ending is not None:  # its scope is undone now
            self._branch_over(branch, *branch.ending)
            return
        if not branch.started and inspect.getcoroutinestate(branch.coro) != inspect.CORO_CREATED:
            raise self._stop(ProgramFault("RuntimeError: cannot reuse already awaited coroutine"))
        branch.started = True
        self.current = branch
        request: object = None
        ended: tuple[Json, BaseException | None] | None = None
        try:
            request = branch.coro.send(value) if error is None else branch.coro.throw(error)
        except StopIteration as stop:
            ended = (stop.value, None)
        except Halt as halt:
            self._fault = self._fault or halt
        except (Exception, Cancelled) as failure:  # noqa: BLE001  # whatever a program raises is its end
            ended = (None, failure)
        except BaseException as leaving:  # noqa: BLE001  # a flow may not end its worker
            self._fault = self._fault or ProgramFault(in_full(leaving))
        finally:
            self.current = None
        if self._fault is not None:
            if isinstance(request, Fork):
                request.close()
            raise self._fault
        if ended is not None:
            self._ended(branch, *ended)
        else:
            self._requested(branch, request)

    def _requested(self, branch: Branch, request: object) -> None:
        """What `branch` waits for now. One that is told to end waits for nothing but its undoing."""
        if isinstance(request, Ask) and branch.pending is None:
            self._ask(branch, request)
        elif isinstance(request, Unwind):
            self._unwind(request.scope, branch)
        elif branch.pending is not None:
            self._interrupt(branch, request)
        elif isinstance(request, Fork):
            self._fork(branch, request)
        else:
            self._resume(branch, error=self._foreign(request))

    def _interrupt(self, branch: Branch, request: object) -> None:
        """`branch` is told to end: what it was about to ask keeps its place in the paths, and is not asked."""
        if isinstance(request, Ask | Fork):
            branch.frame.next(request.name)
        if isinstance(request, Fork):
            request.close()
        error = Cancelled(branch.pending)
        branch.pending = None
        self._resume(branch, error=error)

    def _foreign(self, request: object) -> TypeError:
        """What the program gets for awaiting something else than its context gives; soon it is held for that."""
        error = TypeError(
            f"a flow may await only what its context gives, not {type(request).__name__}: use ctx.sleep for "
            f"asyncio.sleep and ctx.step for any other I/O"
        )
        self._foreigners += 1
        if self._foreigners > FOREIGN_AWAITS_MAX:
            raise self._stop(ProgramFault(in_words(error)))
        return error

    def _ask(self, branch: Branch, ask: Ask) -> None:
        if len(self.open) >= OPEN_ASKS_MAX:
            raise self._stop(LimitExceeded(f"open_asks_max: {OPEN_ASKS_MAX} asks are open"))
        ask.path = branch.frame.next(ask.name)
        data: dict[str, Json] = {"kind": ask.kind, "name": ask.name, "args": ask.args}
        if ask.timeout is not None:
            data["due"] = self._due_in(ask.timeout)
        if ask.undo is not None:
            data["undo"] = self._making_undo(ask.path, ask.undo, False, None)
        if ask.at_most_once:
            data["effect"] = "at_most_once"
        fact = self._recall("asked", ask.path, data)
        if fact is None:
            text, unfit = self._fit(data, ask)
            fact = self._say("asked", ask.path, unfit or data, text)
        self._listen(branch, ask, fact)
        if "unfit" in fact.data:
            self._decisions[ask.path] = {"outcome": "refused", "error": fact.data["unfit"]}
        elif ask.undo is not None:
            try:
                self.undoing.register(ask, fact.data.get("undo"), branch.scope)
            except LimitExceeded as error:
                raise self._stop(error) from None

    def _due_in(self, span: timedelta) -> str:
        return (max(self.at, self._present) + span).isoformat()

    def _fit(self, data: dict[str, Json], ask: Ask) -> tuple[str | None, dict[str, Json] | None]:
        """`data` as text; or, when it cannot be stored, the ask as it is recorded instead: refused."""
        try:
            return self._encoded(data, what=f"{ask.kind} {ask.path}"), None
        except (NotEncodable, TooLarge) as error:
            code = "too-large" if isinstance(error, TooLarge) else "not-encodable"
            return None, {
                "kind": ask.kind,
                "name": ask.name,
                "unfit": {"code": code, "detail": storable(str(error))},
            }

    def _listen(self, branch: Branch, ask: Ask, fact: Fact) -> None:
        ask.position, ask.asked_at = fact.position, fact.at
        ask.args = fact.data.get("args", ask.args)
        self.open[ask.path] = (branch, ask)
        branch.at = ask
        due = fact.data.get("due")
        if due is not None:
            ask.due = datetime.fromisoformat(due)
            heapq.heappush(self._due, (ask.due, fact.position, ask.path))

    def _resolve_step(self, fact: Fact, verdict: str) -> None:
        """A person said what became of a step: the branch that waits goes on with that."""
        branch, ask = self.open[fact.path]
        self._close(ask, fact)
        detail = f"{verdict} by {fact.data.get('by')}: {fact.data.get('reason')}"
        said = {"code": "resolved", "detail": detail}
        if verdict == "done":
            self.undoing.ended(ask, fact, "done")
            self._resume(branch, fact.data.get("value"))
        elif verdict == "not_done":
            self.undoing.ended(ask, fact, "refused")
            self._resume(branch, error=ENDINGS["refused"](ask.path, ask.name, said))
        else:
            self._resume(branch, error=ENDINGS["unknown"](ask.path, ask.name, said))

    # ---- branches side by side -----------------------------------------------------------------------------

    def _fork(self, branch: Branch, fork: Fork) -> None:
        branch.at = fork
        path = branch.frame.next(fork.name)
        if self._is_too_wide(fork, path):
            self._refuse_fork(branch, fork, path)
            return
        for kid in fork.start(branch, path):
            self._branches[kid] = None
            self._resume(kid)
        if not fork.running:
            self._join(fork)

    def _is_too_wide(self, fork: Fork, path: str) -> bool:
        """As recorded; else by the limit of today. So a replay is the same after the limit was raised."""
        recorded = self._recorded()
        if recorded is None:
            return fork.width > FORK_WIDTH_MAX
        return recorded.says() == ("asked", path, "fork", fork.name)

    def _refuse_fork(self, branch: Branch, fork: Fork, path: str) -> None:
        detail = f"fork_width_max: {fork.name} of {fork.width} branches, at most {FORK_WIDTH_MAX}"
        fork.close()
        error = {"code": "too-wide", "detail": detail}
        fact = self._produce("asked", path, {"kind": "fork", "name": fork.name, "unfit": error})
        ask = Ask("fork", fork.name)
        ask.path = path
        self._listen(branch, ask, fact)
        self._decisions[path] = {"outcome": "refused", "error": fact.data["unfit"]}

    def _ended(self, branch: Branch, value: Json, error: BaseException | None) -> None:
        """The coroutine of `branch` is over. A branch with a scope of its own undoes what it did, if it failed."""
        if error is not None and is_fault(error):
            raise self._stop(ProgramFault(in_full(error))) from error
        if not branch.scoped:
            self._branch_over(branch, value, error)
            return
        if error is None and branch.told:  # it went on to its end, and lost all the same
            error, branch.pending = Cancelled(branch.pending or "a sibling decided"), None
        branch.ending = (value, error)
        if error is None:
            branch.scope.merge()
            self._branch_over(branch, value, None)
        else:
            self._unwind(branch.scope, branch)

    def _branch_over(self, branch: Branch, value: Json, error: BaseException | None) -> None:
        branch.over = True
        branch.at = None
        self._branches.pop(branch, None)
        fork = branch.fork
        if fork is None:
            self._over(value, error)
            return
        if fork.over(branch, value, error):
            for kid in list(fork.running.values()):
                self._stop_branch(kid, "a sibling decided")
        if not fork.running:
            self._join(fork)

    def _join(self, fork: Fork) -> None:
        """All branches have ended, cleanup and undo included: whoever waits goes on. Once."""
        if not fork.joined:
            fork.joined = True
            assert fork.branch is not None, "a fork is started before it is joined"
            value, error = fork.outcome()
            self._resume(fork.branch, value, error=error)

    def _stop_branch(self, branch: Branch, reason: str) -> None:
        """Ask `branch` to end, at most once, whatever causes follow."""
        if branch.over or branch.told:
            return
        branch.told = True
        waits = branch.at
        if not branch.started:
            drop(branch.coro)
            self._branch_over(branch, None, Cancelled(reason))
        elif branch.shielded or waits is None:
            branch.pending = reason
        elif isinstance(waits, Ask):
            self._withdraw(waits)
            self._resume(branch, error=Cancelled(reason))
        elif waits.decided is not None or waits.cancelled is not None:
            branch.pending = reason
        else:
            waits.cancelled = reason
            for kid in list(waits.running.values()):
                self._stop_branch(kid, reason)

    def _withdraw(self, ask: Ask) -> None:
        """Nobody waits for `ask` any more. What may be under way has to settle, unless its time was over before."""
        settled = self._is_over(ask)
        fact = self._produce("withdrawn", ask.path, {"kind": ask.kind, "name": ask.name})
        was_sent = self._decisions.pop(ask.path, None) is None
        self._close(ask, fact)
        if settled:
            return
        self.undoing.withdrawn(ask, fact)
        if ask.is_message and was_sent and ask.asked_at is not None and self._is_new(fact):
            self.taken_back.append(TakenBack(ask.path, ask.asked_at, fact.position))

    # ---- undoing -------------------------------------------------------------------------------------------

    def _unwind(self, scope: Scope, branch: Branch) -> None:
        branch.shielded = True
        if not self.undoing.unwind(scope, branch):
            self._go_on([branch])

    def _go_on(self, branches: Sequence[Branch]) -> None:
        """What `branches` had to undo is undone."""
        for branch in branches:
            branch.shielded = False
            self._resume(branch)

    def _next_undo(self) -> None:
        """One undo at a time, and none while a person is needed."""
        entry = self.undoing.next() if self.undoing and not self._needs else None
        if entry is not None:
            self.undoing.current = entry
            self._ask_undo(entry)

    def _ask_undo(self, entry: Entry) -> None:
        entry.tries += 1
        path = undo_path(entry.path, entry.tries)
        action = entry.action
        if action is None:
            self._hold(Held("undo-unknown", path, f"nobody knows how to undo {entry.path}", entry))
            return
        local = action["do"] == "step"
        ask = Ask("undo", entry.path, action, retry=UNDO_RETRY if local else ONCE)
        ask.path, ask.entry = path, entry
        data: dict[str, Json] = {"kind": "undo", "name": entry.path, "args": action, "known": entry.known}
        if not local:
            data["due"] = self._due_in(CALL_TIMEOUT)
        if not entry.local and entry.asked_at is not None:
            data["undoes_at"] = entry.asked_at.isoformat()
        self._listen(self.undoing.branch_of(entry), ask, self._produce("asked", path, data))

    def _undo_ended(self, fact: Fact, ask: Ask) -> None:
        entry = self.undoing.current
        assert entry is not None, f"{fact}: no undo runs"
        assert entry is ask.entry, f"{fact} ends an undo that does not run"
        if fact.data["outcome"] == "done":
            self._go_on(self.undoing.over(entry, stands=False))
        else:
            self._hold(Held("undo-failed", ask.path, reason_of(fact.data), entry))

    # ---- the end -------------------------------------------------------------------------------------------

    def _over(self, value: Json, error: BaseException | None) -> None:
        if error is None:
            self._complete(value)
        elif isinstance(error, Cancelled):
            self._finish(Status.CANCELLED, {"reason": storable(str(error))})
            self.result = error
        else:
            done = self.undoing.undone > 0 and not self.undoing.stands and not self.undoing.pivoted
            self._finish(Status.COMPENSATED if done else Status.FAILED, {"error": self._told_of(error)})
            self.result = error

    def _told_of(self, error: BaseException) -> dict[str, Json]:
        """`error` as it can be stored: without its data, where that is too large or no JSON."""
        told = structure(error)
        try:
            self._encoded({"error": told}, what="the flow's error")
        except (NotEncodable, TooLarge):
            del told["data"]
        return told

    def _complete(self, value: Json) -> None:
        try:
            text = self._encoded({"kind": str(Status.COMPLETED), "output": value}, what="the flow's output")
        except (NotEncodable, TooLarge) as error:
            code = "too-large" if isinstance(error, TooLarge) else "not-encodable"
            failed = StepFailed("", "the flow's output", {"code": code, "detail": str(error)})
            self._finish(Status.FAILED, {"error": structure(failed)})
            self.result = failed
            return
        self._finish(Status.COMPLETED, {"output": value}, text)
        self.result = value

    def _finish(self, status: Status, data: dict[str, Json], text: str | None = None) -> None:
        """`text` is the fact in JSON, when nothing was undone on the way."""
        undoing = self.undoing
        counted = undoing.undone > 0 or status is Status.COMPENSATED
        undone: dict[str, Json] = {"undone": undoing.undone} if counted else {}
        left = list(undoing.stands)
        if status is not Status.COMPLETED and self._root is not None:
            left = [*undoing.passed, *left, *self._root.scope.entries]
        stands: dict[str, Json] = {"stands": left} if left else {}
        whole = {"kind": str(status), **data, **undone, **stands}
        self._produce("finished", "", whole, None if undone or stands else text)
        self.status = status
        self.open.clear()
        self._due.clear()

    # ---- what the context needs at once --------------------------------------------------------------------

    def here(self) -> Branch:
        """The branch that runs now. Raises UsageError outside of the flow, GeneratorExit while it is let go."""
        if self._evicted:
            return self._leaving()
        if self.current is None:
            raise UsageError(
                "this context belongs to a flow: it can be used only while the flow runs, not from a step or a callback"
            )
        return self.current

    def _leaving(self) -> Branch:
        """Raises GeneratorExit, but not for ever: a program that catches that in a loop gets to its await, where
        Python leaves it.
        """
        self._clung += 1
        if self._clung > CLINGS_MAX and self._root is not None:
            return self._root
        raise GeneratorExit

    def opens(self, name: str | None) -> tuple[Scope, Frame]:
        """The scope and the frame of a saga that begins here; without a name it moves no path."""
        branch = self.here()
        try:
            frame = branch.frame if name is None else Frame.inside(branch.frame.next(name))
            return Scope(branch.scope), frame
        except LimitExceeded as error:
            raise self._stop(error) from None

    def note(self, kind: str, name: str, args: Json = None) -> Fact:
        """Write down what takes effect with the turn. Raises UsageError for what cannot be stored."""
        branch = self.here()
        try:
            path = branch.frame.next(name)
            return self._produce("noted", path, {"kind": kind, "name": name, "args": args})
        except LimitExceeded as error:
            raise self._stop(error) from None
        except (NotEncodable, TooLarge) as error:
            raise UsageError(str(error)) from None

    def pivot(self) -> None:
        """What was done stands from here on, whatever comes. Raises UsageError inside of a branch."""
        branch = self.here()
        if branch.fork is not None:
            raise UsageError(
                "pivot() inside a branch would decide for its siblings: call it where the branches have joined"
            )
        self.note("pivot", "pivot")
        self.undoing.pivot(branch.scope)

    def draw(self, name: str) -> bytes:
        """Sixteen bytes that depend on the seed and on where the program is: the same in every replay."""
        branch = self.here()
        try:
            path = branch.frame.next(name)
        except LimitExceeded as error:
            raise self._stop(error) from None
        return hashlib.blake2b(path.encode(), key=self._seed[:64], digest_size=16).digest()

    def evict(self) -> None:
        """Let the program go. Its `finally` blocks run now; whatever they ask is ignored, nothing is recorded."""
        self._evicted = True
        for branch in reversed(self._branches):
            if isinstance(branch.at, Fork):
                branch.at.close()
            branch.close()


MISUSES: Final = ("event loop", "already awaited", "being awaited already")
"""What a RuntimeError says that comes of a program's own mistake."""


def is_fault(error: BaseException) -> bool:
    """Whether only a new deploy can mend `error`: also a library that needs a loop, or a coroutine awaited twice."""
    return isinstance(error, FAULTS) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in MISUSES)
    )


def since(span: timedelta | None) -> timedelta | None:
    """`span` as an ask may carry it. Raises UsageError outside of (0, ten years]."""
    if span is not None and not timedelta(0) < span <= SPAN_MAX:
        raise UsageError(f"a timeout of {span}: expected more than 0 and at most ten years")
    return span
