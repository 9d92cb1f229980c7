"""What a program waits for, when it is due, and what is decided about it."""

from __future__ import annotations

import heapq
from datetime import datetime
from typing import Any

from orchestrator.core.ask import Ask
from orchestrator.core.branch import Branch
from orchestrator.core.buffer import Buffer
from orchestrator.core.fact import Fact
from orchestrator.core.undoing import Held

Json = Any


class Agenda:
    """`open` has what is asked and not answered, by path, with the branch that waits; `needs` what a person has to
    decide about; `decisions` what the core itself knows about an ask; `buffer` the events that nobody took yet.
    `deadline` is when all has to be over; it stands at no path.
    """

    __slots__ = ("buffer", "deadline", "decisions", "due", "needs", "open")

    def __init__(self) -> None:
        self.open: dict[str, tuple[Branch, Ask]] = {}
        self.needs: dict[str, Held] = {}
        self.decisions: dict[str, dict[str, Json]] = {}
        self.buffer = Buffer()
        self.due: list[tuple[datetime, int, str]] = []
        self.deadline: datetime | None = None

    def add(self, branch: Branch, ask: Ask, fact: Fact) -> None:
        """`branch` waits for `ask`, as `fact` recorded it."""
        ask.position, ask.asked_at = fact.position, fact.at
        ask.args = fact.data.get("args", ask.args)
        self.open[ask.path] = (branch, ask)
        branch.at = ask
        due = fact.data.get("due")
        if due is not None:
            ask.due = datetime.fromisoformat(due)
            heapq.heappush(self.due, (ask.due, fact.position, ask.path))

    def sent_again(self, ask: Ask, fact: Fact) -> None:
        """The message of `ask` is made again, as `fact` says: what was probed has a time of its own then."""
        ask.retry_at, ask.sent_at = None, fact.at
        if "due" in fact.data:
            ask.due = datetime.fromisoformat(fact.data["due"])
            heapq.heappush(self.due, (ask.due, fact.position, ask.path))

    def close(self, ask: Ask) -> None:
        """Nobody waits for `ask` any more, and no person has to decide about it."""
        self.needs.pop(ask.path, None)
        del self.open[ask.path]

    def clear(self) -> None:
        """The program is over."""
        self.open.clear()
        self.needs.clear()
        self.decisions.clear()
        self.due.clear()
        self.deadline = None

    @property
    def children(self) -> int:
        """How many children are open."""
        return sum(ask.is_child for _, ask in self.open.values())

    # ---- times ---------------------------------------------------------------------------------------------

    def next_due(self) -> tuple[datetime, str] | None:
        """The earliest due time of all that is open, and its path: sleeps, timeouts, when to try again, and, at no
        path, the deadline.
        """
        deadline = self.deadline
        while self.due:
            at, _, path = self.due[0]
            found = self.open.get(path)
            if found is not None and at in (found[1].due, found[1].retry_at):
                return (at, path) if deadline is None or at <= deadline else (deadline, "")
            heapq.heappop(self.due)
        return None if deadline is None else (deadline, "")

    def take_due(self) -> Ask:
        """What is due next; its time has come, and does not count again."""
        return self.open[heapq.heappop(self.due)[2]][1]

    # ---- tries of local work -------------------------------------------------------------------------------

    def runnable(self) -> list[Ask]:
        """Local work whose time has come. A step that a person has to decide about is not run meanwhile."""
        return [ask for _, ask in self.open.values() if self._may_run(ask)]

    def has_runnable(self) -> bool:
        """Whether any is `runnable`."""
        for _, ask in self.open.values():  # noqa: SIM110  # it is asked at each turn, and a generator costs as much again
            if self._may_run(ask):
                return True
        return False

    def _may_run(self, ask: Ask) -> bool:
        return ask.is_local and ask.retry_at is None and not self.is_over(ask)

    def is_over(self, ask: Ask) -> bool:
        """Whether `ask` is open only for an answer: no try of it begins any more."""
        return ask.overdue or ask.probed is not None or ask.path in self.needs

    def attempted(self, ask: Ask, fact: Fact) -> None:
        """A try of `ask` failed, as `fact` says, and when the next one begins."""
        self.decisions.pop(ask.path, None)
        ask.attempt = fact.data["attempt"] + 1
        if ask.watch is not None:
            ask.watch.left = fact.data.get("left")
        ask.retry_at = datetime.fromisoformat(fact.data["next_at"])
        heapq.heappush(self.due, (ask.retry_at, fact.position, ask.path))

    def lose_tries(self, death: Fact) -> None:
        """The worker that ran local work died: its running tries are over.

        When the time to try again had come, the try may have run: that leaves no fact of its own.
        """
        for _, ask in self.open.values():
            waits = ask.retry_at is not None and ask.retry_at > death.at
            if ask.is_local and ask.position < death.position and not waits and ask.path not in self.needs:
                self._lose_try(ask, death.at)

    def _lose_try(self, ask: Ask, now: datetime) -> None:
        ask.retry_at = None
        ask.attempt += 1
        assert ask.asked_at is not None, "what is open was asked"
        if ask.overdue or not ask.retry.has_try(ask.attempt, asked_at=ask.asked_at, now=now):
            error = {"code": "worker-lost", "detail": f"its worker died at try {ask.attempt - 1}"}
            self.decisions[ask.path] = {"outcome": "refused" if ask.is_exact else "unknown", "error": error}

    # ---- what is decided without the world -----------------------------------------------------------------

    def decided(self) -> tuple[str, dict[str, Json]] | None:
        """What the core itself can say about something open, and its path: one that cannot be sent is refused, and
        the oldest event of a type and key goes to whoever has waited longest for it.
        """
        return self._decision() or self._gift()

    def _decision(self) -> tuple[str, dict[str, Json]] | None:
        while self.decisions:
            path, data = next(iter(self.decisions.items()))
            del self.decisions[path]
            if path in self.open:
                return path, data
        return None

    def _gift(self) -> tuple[str, dict[str, Json]] | None:
        """The next event to be given, and where to."""
        waits: dict[tuple[str, str], str] = {}
        for path, (_, ask) in self.open.items():
            if ask.is_event:
                waits.setdefault((ask.args["type"], ask.args["key"]), path)
        for event in self.buffer:
            path = waits.get((event.data["type"], event.data["key"]))
            if path is not None:
                return path, {"outcome": "done", "of": event.position}
        return None

    # ---- people --------------------------------------------------------------------------------------------

    def hold(self, held: Held) -> None:
        """A person is needed at `held.path`; it is still open for an answer."""
        self.needs[held.path] = held

    @property
    def held(self) -> Held | None:
        """The first of what a person is needed for."""
        return next(iter(self.needs.values()), None)

    def hold_of(self, entry: object) -> Held | None:
        """What a person is needed for because `entry` cannot be undone."""
        return next((held for held in self.needs.values() if held.entry is entry), None)
