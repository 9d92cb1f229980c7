"""Which mutexes an execution has, and until which fact.

A step that names a key is asked for when it is its turn; before that, its turn is: an ask of kind `mutex`, at
`<path>/mutex`. It keeps the mutex until it has ended and settled, so that nothing of it acts when the next one begins.
While it has it, it waits for nothing else that has a mutex. The mutex of a whole flow stands at `flow:mutex`: it is
asked for first, and kept until the last fact. Nothing that such a flow waits for, its children and theirs, asks for the
mutex of a flow. So whoever waits for one keeps none that others wait for, and no two wait for each other.
"""

from __future__ import annotations

from typing import Any, Final

from contracts.errors import shown
from contracts.limits import KEY_BYTES_MAX
from orchestrator.core.ask import Ask
from orchestrator.core.errors import UsageError, error_in
from orchestrator.core.fact import Fact
from orchestrator.core.journal import Journal
from orchestrator.core.names import is_name
from orchestrator.core.path import mutex_path

Json = Any

FLOW: Final = "flow:mutex"
"""Where the mutex of a flow stands: outside of all frames, so that it moves no other path."""


def key_of(what: str, key: object) -> str:
    """`key` as the key of a mutex. Raises UsageError for what is none; `what` says whose it would be."""
    if not (isinstance(key, str) and is_name(key, KEY_BYTES_MAX)):
        raise UsageError(
            f"{what}: mutex= expected 1 to {KEY_BYTES_MAX} bytes of printable text, found {shown(key)}"
        )
    return key


def turn_for(ask: Ask) -> Ask:
    """The ask that comes before `ask`, whose path is known: its turn to have its mutex."""
    turn = Ask("mutex", ask.path, {"key": ask.mutex})
    turn.path, turn.behind = mutex_path(ask.path), ask
    return turn


def turn_of_flow(key: str) -> Ask:
    """The ask that comes before all others of a flow."""
    turn = Ask("mutex", "flow", {"key": key})
    turn.path = FLOW
    return turn


class Mutexes:
    """`held` is where mutexes were asked for that are had now, with their keys; `leaving` are steps that are over,
    and keep theirs until it is known what became of them, each with whether it is local. `under_mutex`: the flow, or
    one that waits for it to end, has the mutex of a flow until its own end.
    """

    __slots__ = ("_journal", "held", "leaving", "under_mutex")

    def __init__(self, journal: Journal) -> None:
        self.held: dict[str, str] = {}
        self.leaving: dict[str, bool] = {}
        self.under_mutex = False
        self._journal = journal

    def begin(self, started: dict[str, Json]) -> None:
        """What the first fact of an epoch says: the flow may have its mutex since an earlier one."""
        self.under_mutex = bool(started.get("under_mutex"))
        if "mutex" in started:
            self._has(FLOW, started["mutex"])

    def granted(self, turn: Ask) -> None:
        self._has(turn.path, turn.args["key"])

    def _has(self, path: str, key: str) -> None:
        self.held[path] = key
        self.under_mutex = self.under_mutex or path == FLOW

    def withdrawn(self, turn: Ask, fact: Fact) -> None:
        """Nobody waits for `turn` any more."""
        if self._journal.is_new(fact):
            self._journal.lets_go(turn.path, asked=turn.position, position=fact.position)

    def over(self, ask: Ask, fact: Fact, *, settling: bool) -> None:
        """`fact` ends a step that has a mutex; it keeps it while it is `settling`."""
        if settling:
            self.leaving[ask.path] = ask.is_local
            return
        del self.held[mutex_path(ask.path)]
        # The end of a transaction is committed before all that follows from it.
        if self._journal.is_last(fact) if ask.is_exact else self._journal.is_new(fact):
            self._journal.lets_go(mutex_path(ask.path), position=fact.position)

    def settled(self, path: str, fact: Fact) -> None:
        """`fact` says what became of the step at `path`."""
        if self.leaving.pop(path, None) is not None:
            del self.held[mutex_path(path)]
            if self._journal.is_new(fact):
                self._journal.lets_go(mutex_path(path), position=fact.position)

    def settle_local(self, death: Fact) -> None:
        """The worker that ran local steps died. Who wrote that down did nothing that follows from it."""
        for path in [path for path, local in self.leaving.items() if local]:
            del self.leaving[path], self.held[mutex_path(path)]
            if self._journal.is_last(death):
                self._journal.lets_go(mutex_path(path), position=death.position)

    def end(self, fact: Fact, *, flow: bool) -> None:
        """`fact` is the last of the epoch; with `flow`, of the execution."""
        for path in [path for path in self.held if flow or path != FLOW]:
            del self.held[path]
            if self._journal.is_new(fact):
                self._journal.lets_go(path, position=fact.position)
        self.leaving.clear()


def is_settling(fact: Fact) -> bool:
    """Whether what `fact` ends may still act."""
    return bool(error_in(fact.data).get("settling"))
