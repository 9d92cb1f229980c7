"""One program and its journal, and nothing else.

Input facts (the world) drive the program; produced facts (the program) are compared with the journal while
there is a past, and are new when there is none. A live run and a replay are the same function, `apply`:
"live" only means that what the program produces has no recorded counterpart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, NoReturn

from contracts import strict_json
from contracts.errors import NotEncodable, TooLarge, shown
from contracts.limits import FACTS_MAX, PAYLOAD_BYTES_MAX, STARTS_MAX, UNDOS_MAX
from orchestrator.core import attributes
from orchestrator.core.agenda import Agenda
from orchestrator.core.ask import ANSWERED, MAY_HAVE_ACTED, STEP_VERDICTS, UNDO_VERDICTS, Ask
from orchestrator.core.branch import Branch
from orchestrator.core.branches import Branches
from orchestrator.core.children import id_of
from orchestrator.core.driver import Driver, found_by, making_undo
from orchestrator.core.errors import (
    ENDINGS,
    Cancelled,
    Continue,
    Halt,
    InputInvalid,
    LimitExceeded,
    NonDeterminism,
    UsageError,
    error_in,
    reason_of,
)
from orchestrator.core.fact import BYSTANDERS, Fact
from orchestrator.core.follows import Follows, SentAgain
from orchestrator.core.journal import BEGINNING, Journal
from orchestrator.core.mutexes import FLOW, Mutexes
from orchestrator.core.past import Past
from orchestrator.core.path import patch_path
from orchestrator.core.segments import Segments
from orchestrator.core.status import Status
from orchestrator.core.task import is_tried_again
from orchestrator.core.undoing import Held, Undoing

Json = Any
Program = Callable[["Machine", Json], Coroutine[Any, Any, Json]]


class Machine:
    """What a flow's context talks to: it turns what the program asks into facts, and facts into answers.

    Feed it a journal once (`replay`), then the world (`tell`, `fire`). `new` holds the facts that are not
    yet committed, `follows` what else follows from them; `open` what the program waits for; `held` why a person is
    needed. Once it `continues` as new, nothing more is heard: a machine of its own goes on from the last fact. Ids of
    children are made of `execution`.

    Its parts: the `journal` (what was said), the `agenda` (what is open, and when it is due), the `branches`
    (where the program stands), what is to be undone, and the driver, which lets the program speak.
    """

    def __init__(
        self,
        program: Program,
        *,
        execution: str = "",
        facts_max: int = FACTS_MAX,
        payload_max: int = PAYLOAD_BYTES_MAX,
        sent_max: int = PAYLOAD_BYTES_MAX,
    ) -> None:
        self.program = program
        self.execution = execution
        self.started: dict[str, Json] = {}
        self.began = BEGINNING
        self.segments: Segments | None = None  # of its trace, for who makes messages of what it asks
        self.journal = Journal(facts_max=facts_max, payload_max=payload_max, sent_max=sent_max)
        self.continues = False
        self.started_now = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing is open, nothing is to be undone, and the program stands nowhere."""
        self.agenda = Agenda()
        self.undoing = Undoing(entries_max=UNDOS_MAX)
        self.branches = Branches()
        self._driver = Driver(self.journal, self.agenda, self.branches, self.undoing, self.execution)
        self._seed = b""
        self._patches: dict[str, bool] = {}
        self.attributes: dict[str, Json] = {}

    # ---- what it comes to ----------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        return self._driver.status

    @property
    def result(self) -> Json:
        """What the program returned or raised."""
        return self._driver.result

    @property
    def open(self) -> dict[str, tuple[Branch, Ask]]:
        return self.agenda.open

    @property
    def at(self) -> datetime:
        return self.journal.at

    @property
    def position(self) -> int:
        return self.journal.position

    @position.setter
    def position(self, position: int) -> None:
        self.journal.position = position

    @property
    def new(self) -> list[Fact]:
        return self.journal.new

    @property
    def follows(self) -> Follows:
        """What else follows from `new`."""
        return self.journal.follows

    @property
    def mutexes(self) -> Mutexes:
        """Which mutexes it has."""
        return self._driver.mutexes

    @property
    def held(self) -> Held | None:
        """The first of what a person is needed for."""
        return self.agenda.held

    def is_held(self, path: str) -> bool:
        """Whether `path` is a step that a person has to decide about; it is still open for an answer."""
        return path in self.agenda.needs

    def next_due(self) -> tuple[datetime, str] | None:
        """The earliest due time of all that is open, and its path: sleeps, timeouts, when to try again, and, at no
        path, the deadline.
        """
        return self.agenda.next_due()

    def runnable(self) -> list[Ask]:
        """Local work whose time has come. A step that a person has to decide about is not run meanwhile."""
        return self.agenda.runnable()

    def has_runnable(self) -> bool:
        """Whether there is local work whose time has come."""
        return self.agenda.has_runnable()

    def has_no_use_for(self, path: str) -> bool:
        """Whether a try at `path` that runs is to be stopped: its step is over, or its time has run out."""
        return path not in self.open or self.open[path][1].overdue

    def settling(self, *, local: bool | None = None) -> list[str]:
        """Paths of what has timed out and may still turn out to be done or not; only local work, or only other."""
        waits = {path: entry.local for path, entry in self.undoing.unsettled.items() if entry.settling}
        for path, (_, ask) in self.open.items():
            if ask.overdue:
                waits[path] = ask.is_local
        waits |= self.mutexes.leaving
        return [path for path, is_local in waits.items() if local is None or is_local is local]

    def take_new(self) -> list[Fact]:
        """The facts that are not yet committed; they are the caller's from now on."""
        return self.journal.take_new()

    # ---- the two ways in: a journal, or the world ----------------------------------------------------------

    def replay(self, journal: Sequence[Fact], *, complete: bool = True, now: datetime = BEGINNING) -> None:
        """Run the program through its past. Raises NonDeterminism where the two disagree.

        `complete` says that all the program produced at the journal's last input is in the journal, so that
        a step inserted in the past is found; a prefix of a journal is not. What the program asks beyond the
        journal is due from `now` on, not from when an execution that had to wait for a worker was started.
        """
        kept = len(self.new)
        self.journal.present = now
        try:
            self._replay(journal, complete=complete)
        except Halt:
            self.journal.forget_beyond(journal[-1].position if journal else 0, kept)
            raise
        self.journal.past = None
        self._decide()

    def _replay(self, journal: Sequence[Fact], *, complete: bool) -> None:
        past = self.journal.past = Past(journal, on_death=self._bury)
        known = len(self.new)
        unchecked = complete and not past.is_unfinished
        while True:
            fact = past.next_input()
            if unchecked and past.is_at_its_end:
                unchecked = False
                self.journal.check_complete(known)
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
        if data.get("outcome") == "refused":
            never_sent = actor == "relay" or error_in(data).get("code") == "never-sent"
            if never_sent and self._was_given_up(path):
                data = data | {"outcome": "failed"}
        # Nobody answers a timer, an event comes by its name, an unknown tells a held step nothing.
        if kind == "ended":
            found = self.agenda.open.get(path)
            if (
                found is None
                or found[1].kind not in ANSWERED
                or (
                    data.get("outcome") == "unknown"
                    and (path in self.agenda.needs or found[1].probed is not None)
                )
            ):
                kind = "late"
            elif found[1].kind == "probe" and found_by(data) is None:
                kind, data = self._probe_unclear(found[1], data, max(self.at, at))
            elif (found[1].is_message and data.get("outcome") == "failed") or (
                found[1].is_task and is_tried_again(found[1], data)
            ):
                kind, data = self._given_up(found[1], data, max(self.at, at))
        self._tell(kind, path, data, at, actor)

    def _tell(self, kind: str, path: str, data: dict[str, Json], at: datetime, actor: str = "worker") -> None:
        if self._driver.status is not Status.OPEN or self.continues:
            return
        journal = self.journal
        if data.get("outcome") == "done" or data.get("verdict") == "done":
            data = self._with_undo(path, data)
        text = journal.encoded(data, what=f"{kind} {path}".rstrip())
        journal.at = max(journal.at, at)
        self._input(kind, path, data, text, actor)
        self._decide()

    def _was_given_up(self, path: str) -> bool:
        """Whether the command at `path` was sent before, and may have acted then. That its last message never arrived
        says nothing of that.
        """
        found = self.open.get(path)
        entry = self.undoing.unsettled.get(path)
        return (found is not None and found[1].sent_at is not None) or (entry is not None and entry.again)

    def _given_up(self, ask: Ask, data: dict[str, Json], now: datetime) -> tuple[str, dict[str, Json]]:
        """The fact that says that a service, or a worker of tasks, gave up: it is sent again later, or that was the
        end.
        """
        error = error_in(data)
        again = not self.agenda.is_over(ask) and ask.retry.covers(str(error.get("code")))
        next_at = self._next_try(ask, now) if again else None
        if next_at is None or (ask.due is not None and next_at >= ask.due):
            return "ended", data
        error = error | {"attempts": ask.attempt}
        return "attempted", {"attempt": ask.attempt, "error": error, "next_at": next_at.isoformat()}

    def _probe_unclear(self, ask: Ask, data: dict[str, Json], now: datetime) -> tuple[str, dict[str, Json]]:
        """The fact that says that a probe found nothing out: it is asked again later, or that was the end."""
        error = error_in(data)
        if data["outcome"] == "done":
            error = {"code": "probe-unclear", "detail": "its probe cannot say"}
        next_at = self._next_try(ask, now) if ask.retry.covers(str(error.get("code"))) else None
        if next_at is None or ask.due is None or next_at >= ask.due:
            return "ended", {"outcome": "unknown", "error": error}
        error = error | {"attempts": ask.attempt}
        return "attempted", {"attempt": ask.attempt, "error": error, "next_at": next_at.isoformat()}

    def fire(self, now: datetime) -> bool:
        """Let the earliest due time pass, if it has come; False when none has."""
        due = self.next_due()
        if due is None or due[0] > now:
            return False
        if not due[1]:
            self._overrun(due[0], now)
            return True
        ask = self.agenda.take_due()
        if ask.retry_at == due[0] and ask.is_sent:
            said: dict[str, Json] = {"attempt": ask.attempt}
            if ask.due is None and ask.timeout is not None:  # its time was over, and its probe says: not done
                said["due"] = (max(self.at, now) + ask.timeout).isoformat()
            self._tell("resent", ask.path, said, now)
        elif ask.retry_at == due[0]:
            ask.retry_at = None
        elif ask.kind in MAY_HAVE_ACTED:
            self._time_out(ask, now)
        else:
            late = ask.is_event or ask.is_decision
            self._tell("ended", ask.path, {"outcome": "timed_out" if late else "done"}, now)
        return True

    def _overrun(self, deadline: datetime, now: datetime) -> None:
        """The time of the whole execution is over: it is asked to end, as by a person."""
        reason = f"its deadline was over at {deadline.isoformat()}"
        said = {"by": "deadline", "reason": reason, "undo": True, "deadline": deadline.isoformat()}
        self._tell("cancel_asked", "", said, now)

    def _time_out(self, ask: Ask, now: datetime) -> None:
        """What was sent, or runs, has to settle; nothing of what waits for its next try is under way."""
        error: dict[str, Json] = {"code": "timeout", "detail": "no answer until its due time"}
        under_way = ask.retry_at is None
        if under_way:
            error["settling"] = True
        position = self.position + 1
        try:
            self.tell("ended", ask.path, {"outcome": "unknown", "error": error}, now)
        finally:  # a program that is stopped by this fact keeps it, so its message is taken back all the same
            if under_way and self.position >= position:
                self.journal.takes_back(ask, position)

    def attempt_failed(
        self,
        path: str,
        error: dict[str, Json],
        at: datetime,
        *,
        again: bool = True,
        raised: BaseException | None = None,
        unknown: bool = False,
        left: Json = None,
    ) -> None:
        """A try of a local step failed: it is tried again later, or has ended `failed`; `unknown`, when nobody knows
        what the try did.

        `again` is False when another try cannot help (a result that cannot be stored). A step that is held
        because its time ran out is not tried again either. `raised` is what the try raised, `left` what it left
        for the next one.
        """
        outcome = "unknown" if unknown else "failed"
        if path not in self.open:
            self.tell("late", path, {"outcome": outcome, "error": error}, at)
            return
        ask = self.open[path][1]
        if ask.is_exact:  # it was rolled back
            outcome = "refused"
        error = error | {"attempts": ask.attempt}
        again = again and not self.agenda.is_over(ask) and ask.retry.covers(str(error.get("code")), raised)
        next_at = self._next_try(ask, max(self.at, at)) if again else None
        if next_at is None:
            self.tell("ended", path, {"outcome": outcome, "error": error}, at)
        else:
            more = {} if left is None else {"left": left}
            said = {"attempt": ask.attempt, "error": error, "next_at": next_at.isoformat()}
            self.tell("attempted", path, said | more, at)

    def _next_try(self, ask: Ask, now: datetime) -> datetime | None:
        assert ask.asked_at is not None, "what is open was asked"
        key = self._seed + f"{ask.path}/{ask.attempt}".encode()
        return ask.retry.next_at(ask.attempt, key=key, asked_at=ask.asked_at, now=now)

    def foresee(self, path: str, value: Json, at: datetime) -> Fact:
        """The fact that `path` ended with `value`, for who stores it before the program sees it (`believe`).

        Raises NotEncodable or TooLarge when it cannot be stored, and a Halt when the execution must be held.
        """
        journal = self.journal
        data = self._with_undo(path, {"outcome": "done", "value": value})
        text = journal.encoded(data, what=f"ended {path}")
        journal.check_room()
        return Fact(journal.position + 1, "ended", path, data, max(journal.at, at), text, "worker")

    def believe(self, fact: Fact) -> None:
        """`fact`, which is stored already, drives the program. Raises a Halt when the execution must be held."""
        kept = len(self.new)
        try:
            self.apply(fact)
        except Halt:
            self.journal.forget_beyond(fact.position, kept)
            raise
        self._decide()

    def remark(
        self, kind: str, path: str, data: dict[str, Json], at: datetime, *, actor: str = "worker"
    ) -> None:
        """Append a fact for people and for the projection; the program does not see it."""
        self.journal.remark(kind, path, data, at, actor)

    def evict(self) -> None:
        """Let the program go. Its `finally` blocks run now; whatever they ask is ignored, nothing is recorded."""
        self.journal.closed = True
        self.branches.evict()

    # ---- facts have effect ---------------------------------------------------------------------------------

    def _input(self, kind: str, path: str, data: dict[str, Json], text: str, actor: str) -> None:
        journal = self.journal
        fact = journal.hear(kind, path, data, text, actor)
        kept = len(journal.new)
        try:
            self.apply(fact)
        except Halt:
            journal.forget_beyond(fact.position, kept)
            raise

    def apply(self, fact: Fact) -> None:
        """The one place where facts have effect, live and replayed alike."""
        journal = self.journal
        journal.position = fact.position
        if fact.kind not in BYSTANDERS:
            journal.at = fact.at
        self.branches.resumes = self.started_now = 0
        try:
            getattr(self, "on_" + fact.kind)(fact)
            self._driver.drive()
            if self._driver.next is not None and journal.recorded() is None and not self.continues:
                self._continue(self._driver.next)
        except Halt as halt:
            self.branches.stop(halt)
            raise

    def _continue(self, go_on: Continue) -> None:
        """The first fact of the next epoch, in the commit that ends this one. Events that nobody took go along."""
        journal = self.journal
        kept = {
            name: value
            for name, value in self.started.items()
            if name not in ("attributes", "event", "events", "input")
        }
        events = [
            {"position": event.position, "at": event.at.isoformat(), "data": event.data}
            for event in self.agenda.buffer
        ]
        if self.attributes:
            kept["attributes"] = self.attributes
        data = kept | {"input": go_on.input, "epoch": self.epoch + 1, "events": events}
        if FLOW in self.mutexes.held:
            data["mutex"] = self.mutexes.held[FLOW]
        journal.hear("continued", "", data, strict_json.encode(data, what="continued"), "program")
        self.continues = True

    def _decide(self) -> None:
        """Live only: what the core itself knows about an ask becomes an input fact."""
        agenda, journal = self.agenda, self.journal
        while (agenda.decisions or agenda.buffer.events) and self.status is Status.OPEN:
            decided = agenda.decided()
            if decided is None:
                return
            path, data = decided
            journal.at = max(journal.at, journal.present)
            kind, found = "ended", agenda.open[path][1]
            if found.probe is not None and data["outcome"] == "refused" and found.probes:
                kind, data = self._given_up(found, data, journal.at)
            elif data["outcome"] == "done" and "of" not in data:
                data = self._with_undo(path, data)
            self._input(kind, path, data, journal.encoded(data, what=f"{kind} {path}"), "worker")

    def _with_undo(self, path: str, data: dict[str, Json]) -> dict[str, Json]:
        """`data` with the undo that its reply makes exact; from then on that one counts."""
        found = self.open.get(path)
        if found is not None and found[1].is_exact:
            return data if found[1].undo is None else self._made_exact(path, found[1].undo, data)
        entry = (
            found[1].entry
            if found is not None and found[1].kind != "undo"
            else self.undoing.unsettled.get(path)
        )
        if entry is None or entry.undo is None or not self.undoing.waits(entry):
            return data
        return self._made_exact(entry.path, entry.undo, data)

    def _made_exact(
        self, path: str, undo: Callable[[bool, Json], Json], data: dict[str, Json]
    ) -> dict[str, Json]:
        try:
            return data | {"undo": making_undo(path, undo, True, data.get("value"))}
        except Halt as halt:
            self.branches.stop(halt)
            raise

    def on_started(self, fact: Fact) -> None:
        self.started, self.began = fact.data, fact.at
        self.journal.before = fact.position - 1
        self._seed = str(fact.data.get("seed", "")).encode()
        self.attributes = fact.data.get("attributes", {})
        self.agenda.deadline = moment(fact.data.get("deadline"))
        self._driver.depth, self._driver.epoch = int(fact.data.get("depth", 0)), self.epoch
        self.mutexes.begin(fact.data)
        self.branches.begin(self.program(self, fact.data.get("input")))

    def on_continued(self, fact: Fact) -> None:
        """A new epoch: the program begins again, and nothing repeats that depends on the seed or on a path."""
        self._begin_anew()
        self.on_started(fact)
        self._seed += f"/{self.epoch}".encode()
        for event in fact.data["events"]:
            at = datetime.fromisoformat(event["at"])
            self.agenda.buffer.add(Fact(event["position"], "received", "", event["data"], at))

    @property
    def epoch(self) -> int:
        """How often the flow has continued as new."""
        return int(self.started.get("epoch", 0))

    def on_ended(self, fact: Fact) -> None:
        agenda = self.agenda
        found = agenda.open.get(fact.path)
        if found is None:
            raise NonDeterminism(
                f"the journal has {fact.kind} at {fact.path!r}, position {fact.position}; the program never asked there"
            )
        branch, ask = found
        agenda.decisions.pop(fact.path, None)
        outcome: str = fact.data["outcome"]
        if ask.kind in {"mutex", "probe", "undo"}:
            self._own_ended(branch, ask, fact)
            return
        if ask.is_exact and outcome == "done" and ask.undo is not None:
            self.undoing.register(ask, fact.data.get("undo"), branch.scope)
        self._driver.withdraw_probe(ask)
        self.undoing.ended(ask, fact, outcome)
        if outcome == "unknown" and self._stays_open(branch, ask, fact):
            return
        self._driver.close(ask, fact)
        if ask.stopped is not None:
            self.branches.resume(branch, error=Cancelled(ask.stopped))
        elif ask.kind == "fork":
            self.branches.resume(branch, error=UsageError(error_in(fact.data).get("detail")))
        elif outcome == "done":
            value = self._event_of(fact) if "of" in fact.data else fact.data.get("value")
            self.branches.resume(branch, value)
        else:
            error = ENDINGS[outcome](ask.path, ask.name, error_in(fact.data))
            self.branches.resume(branch, error=error)

    def _own_ended(self, branch: Branch, ask: Ask, fact: Fact) -> None:
        """An ask ended that the program did not make itself."""
        if ask.kind == "mutex":
            self._driver.granted(branch, ask, fact)
        elif ask.kind == "probe":
            self._driver.probe_ended(ask, fact)
        elif ask.is_local and error_in(fact.data).get("settling"):
            ask.due, ask.overdue = None, True  # it still runs, and may turn out to be done
        else:
            self._driver.undo_ended(ask, fact)

    def _stays_open(self, branch: Branch, ask: Ask, fact: Fact) -> bool:
        """Whether `ask`, of which nobody knows, stays open: once it has settled, its probe is asked, or a person."""
        error = error_in(fact.data)
        probes = ask.probe is not None and "probed" not in error
        if not probes and not ask.hold:
            return False
        ask.due = ask.retry_at = None
        ask.overdue = bool(error.get("settling"))
        if probes:
            ask.lost = ask.lost or error
        if ask.overdue:  # it may yet turn out what became of it
            return True
        if probes:
            self._driver.ask_probe(branch, ask)
        else:
            self.agenda.hold(Held("unknown-outcome", ask.path, reason_of(fact.data)))
        return True

    def _event_of(self, fact: Fact) -> Json:
        """What was received where `fact` says."""
        event = self.agenda.buffer.take(fact.data["of"])
        if event is None:
            raise NonDeterminism(
                f"the journal gives {fact.path!r} the event of position {fact.data['of']}; there is none"
            )
        return event.data.get("data")

    def on_received(self, fact: Fact) -> None:
        self.agenda.buffer.add(fact)

    def on_attempted(self, fact: Fact) -> None:
        found = self.open.get(fact.path)
        if found is not None:
            self.agenda.attempted(found[1], fact)

    def on_resent(self, fact: Fact) -> None:
        """A command that its service gave up is sent again, as another message for the same action; a task likewise."""
        found = self.open.get(fact.path)
        if found is None:
            return
        ask = found[1]
        self.agenda.sent_again(ask, fact)
        ask.lost = {}
        if ask.entry is not None and ask.kind != "undo":
            ask.entry.asked_at, ask.entry.again = fact.at, True
        if self.journal.is_new(fact):
            self.journal.follows.add(SentAgain(ask, ask.attempt, fact.position, fact.at))

    def on_late(self, fact: Fact) -> None:
        """An answer for a path that is over: it settles, or makes the unknown known; it resumes nothing."""
        self.mutexes.settled(fact.path, fact)
        needless = self.undoing.late(fact)
        if needless is None:
            return
        held = self.agenda.hold_of(needless)
        if held is not None and held.code == "undo-unknown":
            del self.agenda.needs[held.path]  # nobody knew how to undo it, and nobody has to
            self.undoing.current = None
        if needless is not self.undoing.current:
            self._driver.undone(self.undoing.dropped(needless))

    def on_terminated(self, fact: Fact) -> None:
        """A person ended it without its program, which gets no say, and is let go."""
        self._driver.status = Status(fact.data["kind"])
        self.agenda.clear()
        self.undoing.forget()
        self.evict()

    # ---- facts of people -----------------------------------------------------------------------------------

    def on_cancel_asked(self, fact: Fact) -> None:
        """Whoever runs the flow wants it to end: it is stopped as a whole, and undone unless that is not wanted.

        While it undoes nothing is thrown into it; without `undo`, nothing more is undone after what runs.
        """
        root = self.branches.root
        assert root is not None, "what was not started cannot be cancelled"
        if not fact.data.get("undo", True):
            self._stop_undoing()
        if "deadline" in fact.data:
            self.agenda.deadline = None
            self._driver.overdue = self._driver.overdue or not root.told
        reason = str(fact.data.get("reason") or "cancelled")
        self._driver.withdraw(self.branches.cancel(root, reason))

    def _stop_undoing(self) -> None:
        failed = next((held for held in self.agenda.needs.values() if held.entry is not None), None)
        if failed is not None and failed.entry is not None:
            del self.agenda.needs[failed.path]
            self._driver.undone(self.undoing.over(failed.entry, stands=True))
        self._driver.undone(self.undoing.give_up())

    def on_resolved(self, fact: Fact) -> None:
        """A person decided about what was held. What does not fit has no effect."""
        held = self.agenda.needs.get(fact.path)
        if held is None:
            return
        verdict = fact.data.get("verdict")
        fit = STEP_VERDICTS if held.entry is None else UNDO_VERDICTS
        if not isinstance(verdict, str) or verdict not in fit:
            return
        del self.agenda.needs[held.path]
        if held.entry is None:
            self._resolve_step(fact, verdict)
        elif verdict == "retry":
            self._driver.ask_undo(held.entry)
        else:
            self._driver.undone(self.undoing.over(held.entry, stands=verdict != "done"))

    def _resolve_step(self, fact: Fact, verdict: str) -> None:
        """A person said what became of a step: the branch that waits goes on with that."""
        branch, ask = self.open[fact.path]
        self._driver.close(ask, fact)
        detail = f"{verdict} by {fact.data.get('by')}: {fact.data.get('reason')}"
        said = {"code": "resolved", "detail": detail}
        if verdict == "done":
            self.undoing.ended(ask, fact, "done")
            self.branches.resume(branch, fact.data.get("value"))
        elif verdict == "not_done":
            self.undoing.ended(ask, fact, "refused")
            self.branches.resume(branch, error=ENDINGS["refused"](ask.path, ask.name, said))
        else:
            self.branches.resume(branch, error=ENDINGS["unknown"](ask.path, ask.name, said))

    def on_held(self, fact: Fact) -> None: ...

    def on_resumed(self, fact: Fact) -> None: ...

    def on_ordered(self, fact: Fact) -> None: ...

    def on_orphaned(self, fact: Fact) -> None:
        self._bury(fact)

    def _bury(self, death: Fact) -> None:
        """The worker that ran this died: its running tries are over, and what it was settling is settled."""
        self.agenda.lose_tries(death)
        self.undoing.settle_local()
        self.mutexes.settle_local(death)

    # ---- what the context needs at once --------------------------------------------------------------------

    def note(self, kind: str, name: str, args: Json = None) -> Fact:
        """Write down what takes effect with the turn. Raises UsageError for what cannot be stored."""
        return self._note(self.branches.place(name), kind, name, args)

    def _note(self, path: str, kind: str, name: str, args: Json = None) -> Fact:
        """A replay refuses what was refused when it was new, so what the journal has is looked at first."""
        data = {"kind": kind, "name": name, "args": args}
        try:
            recorded = self.journal.recall_if_said("noted", path, data)
            if recorded is not None:
                return recorded
            return self.journal.produce("noted", path, data, self.journal.encoded(data, what=f"noted {path}"))
        except Halt as halt:
            self.branches.stop(halt)
            raise
        except (NotEncodable, TooLarge) as error:
            raise UsageError(str(error)) from None

    def publish(self, published: dict[str, Json]) -> None:
        """Change what the execution says about itself. Raises UsageError for too many attributes."""
        path = self.branches.place("publish")
        after = attributes.merged(self.attributes, published)
        recorded = self.journal.recorded()
        if recorded is None or recorded.says() != ("noted", path, "publish", "publish"):
            attributes.check_room(after)
        self._note(path, "publish", "publish", published)
        self.attributes = after

    def start(self, name: str, args: dict[str, Json]) -> str:
        """Write down that another execution is begun; its id. Raises UsageError for what cannot be stored."""
        self.started_now += 1
        if self.started_now > STARTS_MAX:
            raise self.branches.stop(
                LimitExceeded(f"starts_max: {STARTS_MAX} executions are started at one input")
            )
        path = self.branches.place(name)
        identity = id_of(self.execution, self.epoch, path, flow=args["flow"], key=args["key"])
        fact = self._note(path, "start", name, args | {"execution": str(identity)})
        return fact.data["args"]["execution"]

    def continue_as_new(self, input: Json) -> NoReturn:  # noqa: A002  # an execution's input, everywhere
        """The program ends here, and begins again with `input`. Raises UsageError where it may not."""
        branch = self.branches.here()
        if branch.fork is not None:
            raise UsageError(
                "continue_as_new inside a branch would leave its siblings: call it where they have joined"
            )
        left = [path for scope in branch.scope.around() for path in scope.entries]
        if left:
            raise UsageError(
                f"continue_as_new: {', '.join(left)} would not be undone any more; leave the scope, or pivot() first"
            )
        raise Continue(input)

    def check_input(self, input: Json) -> None:  # noqa: A002  # an execution's input, everywhere
        """Raises UsageError for an input that cannot be stored."""
        try:
            self.journal.encoded({"input": input}, what="the next input")
        except (NotEncodable, TooLarge) as error:
            raise UsageError(f"continue_as_new: {error}") from None

    def pivot(self) -> None:
        """What was done stands from here on, whatever comes. Raises UsageError inside of a branch."""
        branch = self.branches.here()
        if branch.fork is not None:
            raise UsageError(
                "pivot() inside a branch would decide for its siblings: call it where the branches have joined"
            )
        self.note("pivot", "pivot")
        self.undoing.pivot(branch.scope)

    def patched(self, name: str) -> bool:
        """Whether what stands behind patch `name` is part of this execution: as it was when it first came here."""
        self.branches.here()
        known = self._patches.get(name)
        if known is None:
            path = patch_path(name)
            recorded = self.journal.recorded()
            known = recorded is None or recorded.says() == ("noted", path, "patched", name)
            self._patches[name] = known
            if known:
                self._note(path, "patched", name)
        return known

    def deprecate_patch(self, name: str) -> None:
        """Pass the marker of a patch that nobody asks for any more."""
        self.branches.here()
        path = patch_path(name)
        recorded = self.journal.recorded()
        if recorded is not None and recorded.says() == ("noted", path, "patched", name):
            self._note(path, "patched", name)

    def draw(self, name: str) -> bytes:
        """Sixteen bytes that depend on the seed and on where the program is: the same in every replay."""
        path = self.branches.place(name)
        return hashlib.blake2b(path.encode(), key=self._seed[:64], digest_size=16).digest()


def moment(text: Json) -> datetime | None:
    """A deadline as the first fact says it. Raises InputInvalid for what is none."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        found = None
    if found is None or found.tzinfo is None:
        raise InputInvalid(
            f"the recorded deadline: expected a moment with its time zone, found {shown(text)}"
        )
    return found
