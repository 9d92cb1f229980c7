"""What a program says becomes facts: what it asks, what it takes back, what is undone, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC
from typing import Any, cast

from contracts.errors import NotEncodable, TooLarge
from contracts.identifiers import child_id
from contracts.limits import FORK_WIDTH_MAX, OPEN_ASKS_MAX
from orchestrator.core.agenda import Agenda
from orchestrator.core.ask import Ask, Entry, Scope
from orchestrator.core.bounds import bounds_of
from orchestrator.core.branch import Branch
from orchestrator.core.branches import Branches, End
from orchestrator.core.children import refusal
from orchestrator.core.errors import (
    Cancelled,
    Continue,
    Halt,
    LimitExceeded,
    Overdue,
    ProgramFault,
    in_full,
    is_fault,
    reason_of,
    storable,
)
from orchestrator.core.fact import Fact
from orchestrator.core.finished import finished
from orchestrator.core.follows import ClosedWait
from orchestrator.core.fork import Fork
from orchestrator.core.journal import Journal
from orchestrator.core.mutexes import Mutexes, is_settling, turn_for
from orchestrator.core.path import probe_path, undo_path
from orchestrator.core.status import Status
from orchestrator.core.undoing import Held, Undoing

Json = Any


class Driver:
    """Lets the branches of a program go on until all are blocked, and writes down what they say.

    `status` and `result` are its end, once it has one; `next` is what it goes on with as new. `overdue`: its deadline
    is what stops it. `depth` is how many children deep it is itself; ids of children are made of `execution` and
    `epoch`.
    """

    __slots__ = (
        "agenda",
        "branches",
        "depth",
        "epoch",
        "execution",
        "journal",
        "mutexes",
        "next",
        "overdue",
        "result",
        "status",
        "undoing",
    )

    def __init__(
        self,
        journal: Journal,
        agenda: Agenda,
        branches: Branches,
        undoing: Undoing,
        execution: str,
    ) -> None:
        self.execution = execution
        self.epoch = 0
        self.depth = 0
        self.journal = journal
        self.agenda = agenda
        self.branches = branches
        self.undoing = undoing
        self.mutexes = Mutexes(journal)
        self.status = Status.OPEN
        self.result: Json = None
        self.next: Continue | None = None
        self.overdue = False

    def drive(self) -> None:
        """Until every branch is blocked. Raises a Halt when the execution must be held."""
        branches = self.branches
        while True:
            while branches.ready:
                self._go_on(*branches.next())
            self._next_undo()
            if not branches.ready:
                return

    def _go_on(self, branch: Branch, value: Json, error: BaseException | None) -> None:
        if branch.over:  # it was stopped before it was started
            return
        if branch.ending is not None:  # its scope is undone now
            self._over(branch, *branch.ending)
            return
        request = self.branches.run(branch, value, error)
        if isinstance(request, Ask):
            self._ask(branch, request)
        elif isinstance(request, End):
            self._ended(branch, request.value, request.error)
        elif isinstance(request, Fork):
            self._fork(branch, request)
        elif request is not None:
            self._unwind(request.scope, branch)

    # ---- asking --------------------------------------------------------------------------------------------

    def _ask(self, branch: Branch, ask: Ask) -> None:
        agenda, journal = self.agenda, self.journal
        if len(agenda.open) >= OPEN_ASKS_MAX:
            raise LimitExceeded(f"open_asks_max: {OPEN_ASKS_MAX} asks are open")
        ask = placed(branch, ask)
        if ask.is_child:
            ask.args["execution"] = str(child_id(self.execution, self.epoch, ask.path))
        data: dict[str, Json] = {"kind": ask.kind, "name": ask.name, "args": ask.args}
        if ask.timeout is not None:
            data["due"] = journal.due_in(ask.timeout)
        elif ask.until is not None:
            data["due"] = ask.until.astimezone(UTC).isoformat()
        undo = None if ask.is_exact else ask.undo  # what has not ended then needs none
        if undo is not None:
            data["undo"] = making_undo(ask.path, undo, False, None)
        if ask.effect or ask.probe is not None:
            data |= promised(ask)
        fact = journal.recall("asked", ask.path, data)
        if fact is None:
            text, unfit = self._fit(data, ask)
            fact = journal.say("asked", ask.path, unfit or data, text)
        agenda.add(branch, ask, fact)
        if "unfit" in fact.data:
            agenda.decisions[ask.path] = {"outcome": "refused", "error": fact.data["unfit"]}
        elif undo is not None or ask.is_child:
            self.undoing.register(ask, fact.data.get("undo"), branch.scope)

    def _fit(self, data: dict[str, Json], ask: Ask) -> tuple[str | None, dict[str, Json] | None]:
        """`data` as text; or, when it cannot be stored or is a child that may not be, the ask as it is recorded
        instead: refused.
        """
        refused = self._refusal(ask) if ask.is_child else None
        if refused is not None:
            return None, {"kind": ask.kind, "name": ask.name, "unfit": refused}
        try:
            return self.journal.encoded(data, what=f"{ask.kind} {ask.path}"), None
        except (NotEncodable, TooLarge) as error:
            code = "too-large" if isinstance(error, TooLarge) else "not-encodable"
            return None, {
                "kind": ask.kind,
                "name": ask.name,
                "unfit": {"code": code, "detail": storable(str(error))},
            }

    def _refusal(self, child: Ask) -> dict[str, Json] | None:
        under = self.mutexes.under_mutex
        return refusal(self.depth, self.agenda.children, exclusive=child.exclusive, under_mutex=under)

    def granted(self, branch: Branch, turn: Ask, fact: Fact) -> None:
        """It is the `turn` of what waits behind it, which is asked for now; the program itself, if nothing does."""
        self.close(turn, fact)
        self.mutexes.granted(turn)
        if turn.behind is None:
            self.branches.resume(branch)
        else:
            self._ask(branch, turn.behind)

    def close(self, ask: Ask, fact: Fact) -> None:
        """`fact` ends the waiting at `ask`."""
        self.agenda.close(ask)
        if ask.mutex is not None and fact.kind != "withdrawn":
            self.mutexes.over(ask, fact, settling=is_settling(fact))
        if ask.kind == "event" and self.journal.is_new(fact):
            self.journal.follows.add(ClosedWait(ask, fact.position))

    def ask_probe(self, branch: Branch, call: Ask) -> None:
        """Ask what became of `call`, of which nobody knows, and which has settled. Its branch waits as before."""
        call.probes += 1
        timeout, retry = bounds_of(call.probe, probes=True)
        probe = Ask("probe", call.path, call.probe, timeout=timeout, retry=retry)
        probe.path, probe.behind, call.probed = probe_path(call.path, call.probes), call, probe
        data: dict[str, Json] = {"kind": "probe", "name": call.path, "args": call.probe}
        if timeout is not None:
            data["due"] = self.journal.due_in(timeout)
        self.agenda.add(branch, probe, self.journal.produce("asked", probe.path, data))
        branch.at = call

    def probe_ended(self, probe: Ask, fact: Fact) -> None:
        """What a probe found out is decided about its call; when it found nothing out, the call stays unknown."""
        call = probe.behind
        assert call is not None, f"{fact}: a probe has its call behind it"
        self.agenda.close(probe)
        call.probed = None
        self.agenda.decisions[call.path] = found_by(fact.data) or {
            "outcome": "unknown",
            "error": {name: said for name, said in call.lost.items() if name != "settling"}
            | {"probed": True},
        }

    def withdraw_probe(self, call: Ask) -> None:
        """Nobody needs to ask any more what became of `call`."""
        if call.probed is not None:
            probe, call.probed = call.probed, None
            self._withdraw(probe)

    def withdraw(self, asks: Iterable[Ask]) -> None:
        """Nobody waits for `asks` any more. What may be under way has to settle, unless its time was over before."""
        for ask in asks:
            self._withdraw(ask)

    def _withdraw(self, ask: Ask) -> None:
        settled, idle = self.agenda.is_over(ask), ask.is_between_sends
        self.withdraw_probe(ask)
        fact = self.journal.produce("withdrawn", ask.path, {"kind": ask.kind, "name": ask.name})
        if ask.is_child:
            self._stop_child(ask, fact)
            return
        was_sent = self.agenda.decisions.pop(ask.path, None) is None
        self.close(ask, fact)
        if ask.kind == "mutex":
            self.mutexes.withdrawn(ask, fact)
        elif ask.mutex is not None:
            self.mutexes.over(ask, fact, settling=ask.overdue or (was_sent and not (settled or idle)))
        if settled:
            return
        self.undoing.withdrawn(ask, fact, settling=not idle)
        if was_sent and not idle and self.journal.is_new(fact):
            self.journal.takes_back(ask, fact.position)

    def _stop_child(self, ask: Ask, fact: Fact) -> None:
        """A child is told to end, and waited for until it has; one that never was is not."""
        if self.agenda.decisions.pop(ask.path, None) is not None:
            branch, _ = self.agenda.open[ask.path]
            self.close(ask, fact)
            self.branches.resume(branch, error=Cancelled(ask.stopped))
            return
        ask.due = None
        if self.journal.is_new(fact):
            self.journal.takes_back(ask, fact.position)

    # ---- branches ------------------------------------------------------------------------------------------

    def _fork(self, branch: Branch, fork: Fork) -> None:
        branch.at = fork
        path = branch.frame.next(fork.name)
        if self._is_too_wide(fork, path):
            self._refuse(branch, fork, path)
        else:
            self.branches.fork(branch, fork, path)

    def _is_too_wide(self, fork: Fork, path: str) -> bool:
        """As recorded; else by the limit of today. So a replay is the same after the limit was raised."""
        recorded = self.journal.recorded()
        if recorded is None:
            return fork.width > (fork.items_max or FORK_WIDTH_MAX)
        return recorded.says() == ("asked", path, "fork", fork.name)

    def _refuse(self, branch: Branch, fork: Fork, path: str) -> None:
        limit, most = ("items_max", fork.items_max) if fork.items_max else ("fork_width_max", FORK_WIDTH_MAX)
        detail = f"{limit}: {fork.name} of {fork.width} branches, at most {most}"
        fork.close()
        error = {"code": "too-wide", "detail": detail}
        fact = self.journal.produce("asked", path, {"kind": "fork", "name": fork.name, "unfit": error})
        ask = Ask("fork", fork.name)
        ask.path = path
        self.agenda.add(branch, ask, fact)
        self.agenda.decisions[path] = {"outcome": "refused", "error": fact.data["unfit"]}

    def _ended(self, branch: Branch, value: Json, error: BaseException | None) -> None:
        """The coroutine of `branch` is over. A branch with a scope of its own undoes what it did, if it failed."""
        if error is not None and is_fault(error):
            raise ProgramFault(in_full(error)) from error
        if not branch.scoped:
            self._over(branch, value, error)
            return
        if error is None and branch.told:  # it went on to its end, and lost all the same
            error, branch.pending = Cancelled(branch.pending or "a sibling decided"), None
        branch.ending = (value, error)
        if error is None:
            branch.scope.merge()
            self._over(branch, value, None)
        else:
            self._unwind(branch.scope, branch)

    def _over(self, branch: Branch, value: Json, error: BaseException | None) -> None:
        """`branch` is over and undone; if it is the program, all is."""
        for ask in self.branches.over(branch, value, error):
            self._withdraw(ask)
        if branch is self.branches.root and isinstance(error, Continue):
            self._continue(error)
        elif branch is self.branches.root:
            self._finish(value, error, list(branch.scope.entries))

    def _finish(self, value: Json, error: BaseException | None, standing: list[str]) -> None:
        if self.overdue and isinstance(error, Cancelled):
            error = Overdue(str(error))
        status, result, data, text = finished(self.journal, self.undoing, standing, value, error)
        self.mutexes.end(self.journal.produce("finished", "", data, text), flow=True)
        self.status, self.result = status, result
        self.agenda.clear()

    def _continue(self, error: Continue) -> None:
        """The program goes on as new: what follows is not of this epoch."""
        said = self.journal.produce("finished", "", {"kind": "continued", "input": error.input})
        self.mutexes.end(said, flow=False)
        self.next = error
        self.agenda.clear()

    # ---- undoing -------------------------------------------------------------------------------------------

    def _unwind(self, scope: Scope, branch: Branch) -> None:
        branch.shielded = True
        if not self.undoing.unwind(scope, branch):
            self.undone([branch])

    def undone(self, branches: Sequence[Branch]) -> None:
        """What `branches` had to undo is undone: they go on."""
        for branch in branches:
            branch.shielded = False
            self.branches.resume(branch)

    def _next_undo(self) -> None:
        """One undo at a time, and none while a person is needed."""
        entry = self.undoing.next() if self.undoing and not self.agenda.needs else None
        if entry is not None:
            self.undoing.current = entry
            self.ask_undo(entry)

    def ask_undo(self, entry: Entry) -> None:
        """Ask, once more perhaps, to undo `entry`; a person, when nobody knows how."""
        entry.tries += 1
        path = undo_path(entry.path, entry.tries)
        action = entry.action
        if action is None:
            self.agenda.hold(Held("undo-unknown", path, f"nobody knows how to undo {entry.path}", entry))
            return
        timeout, retry = bounds_of(action)
        ask = Ask("undo", entry.path, action, timeout=timeout, retry=retry)
        ask.path, ask.entry = path, entry
        data: dict[str, Json] = {"kind": "undo", "name": entry.path, "args": action, "known": entry.known}
        if timeout is not None:
            data["due"] = self.journal.due_in(timeout)
        if entry.message and entry.asked_at is not None:
            data["undoes_at"] = entry.asked_at.isoformat()
        fact = self.journal.produce("asked", path, data)
        ask.undoes = {name: fact.data[name] for name in ("known", "undoes_at") if name in fact.data}
        self.agenda.add(self.undoing.branch_of(entry), ask, fact)

    def undo_ended(self, ask: Ask, fact: Fact) -> None:
        """An undo was done; or it was not, and a person is asked."""
        entry = self.undoing.current
        assert entry is not None, f"{fact}: no undo runs"
        assert entry is ask.entry, f"{fact} ends an undo that does not run"
        del self.agenda.open[ask.path]
        if fact.data["outcome"] == "done":
            self.undone(self.undoing.over(entry, stands=False))
        else:
            self.agenda.hold(Held("undo-failed", ask.path, reason_of(fact.data), entry))


def promised(ask: Ask) -> dict[str, Json]:
    """What holds when nobody knows what became of `ask`, where that is said."""
    said = {"effect": ask.effect or None, "probe": ask.probe}
    return {name: one for name, one in said.items() if one is not None}


def placed(branch: Branch, ask: Ask) -> Ask:
    """`ask` with its path; or what comes before it, when it is to have a mutex and has no path yet."""
    if ask.path:
        return ask
    ask.path = branch.frame.next(ask.name)
    return ask if ask.mutex is None else turn_for(ask)


def found_by(said: dict[str, Json]) -> dict[str, Json] | None:
    """What the end of a probe says became of its call; None when it does not say."""
    value: Json = said.get("value")
    if said["outcome"] != "done" or not isinstance(value, dict):
        return None
    finding = cast("dict[str, Json]", value)
    match finding.get("found"):
        case "done":
            return {"outcome": "done", "value": finding.get("reply")}
        case "not_done":
            return {
                "outcome": "refused",
                "error": {"code": "not-done", "detail": "its probe says that it was not done"},
            }
        case _:
            return None


def making_undo(path: str, undo: Callable[[bool, Json], Json], known: bool, value: Json) -> Json:  # noqa: FBT001  # the undo's own shape
    """What would undo what stands at `path`, as data. Raises ProgramFault when the program cannot say."""
    try:
        return undo(known, value)
    except Halt:
        raise
    except BaseException as error:
        raise ProgramFault(f"the undo of {path} raised {in_full(error)}") from error
