"""The local steps of one execution that are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

from contracts.errors import NotEncodable, TooLarge
from contracts.identifiers import execution_key
from contracts.observer import Observer, Silent
from orchestrator.core.ask import Ask
from orchestrator.core.errors import storable
from orchestrator.core.machine import Machine
from orchestrator.core.path import undo_path
from orchestrator.engine.attempt import Done, Failure, Lost, Refusal, Result, Settled, Stopped
from orchestrator.engine.clock import Clock
from orchestrator.engine.transaction import Offer, Transactions
from orchestrator.store.executions import Claim

Json = Any
Run: TypeAlias = Callable[[Ask, str], "asyncio.Task[Result]"]


class Work:
    """What runs, and what has come of it. `arrive` is called when a try is over.

    A result that is told but not yet committed is kept: should the turn have to be decided again, the step
    does not run again for that.
    """

    def __init__(
        self,
        claim: Claim,
        run: Run,
        *,
        arrive: Callable[[], None],
        observer: Observer | None = None,
        transactions: Transactions | None = None,
    ) -> None:
        self._claim = claim
        self._observer = observer or Silent()
        self._run = run
        self._transactions = transactions
        self._offers: list[Offer] = []
        self._arrive = arrive
        self._running: dict[str, asyncio.Task[Result]] = {}
        self._stopping: set[str] = set()
        self._arrived: list[tuple[str, Result]] = []
        self._told: list[tuple[str, Result]] = []

    def __bool__(self) -> bool:
        """Whether anything runs, or has come and is not told."""
        return bool(self._running or self._arrived)

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrived)

    @property
    def has_offers(self) -> bool:
        """Whether a transaction waits for its fact."""
        return bool(self._offers)

    @property
    def is_unstored(self) -> bool:
        """Whether results were told that are not committed."""
        return bool(self._told)

    def begin(self, machine: Machine, *, position: int) -> None:
        """Start what may act: its `asked` is committed (`position`), or it is plain and follows nothing unstored.

        What ended meanwhile and is not told yet does not begin again.
        """
        arrived = {path for path, _ in self._arrived}
        for ask in machine.runnable():
            path, stored = ask.path, ask.position <= position
            if path in self._running or path in arrived:
                continue
            if stored or not (self.is_unstored or ask.needs_commit):
                action = path if ask.kind != "undo" else undo_path(ask.name, 1)
                key = execution_key(self._claim.execution, self._claim.epoch, action)
                self._follow(path, self._begun(ask, key))

    def _begun(self, ask: Ask, key: str) -> asyncio.Task[Result]:
        if not ask.is_exact:
            return self._run(ask, key)
        assert self._transactions is not None, "this worker has no transactions"
        return self._transactions.begin(ask, key, self._offered)

    def _offered(self, offer: Offer) -> None:
        self._offers.append(offer)
        self._arrive()

    def next_offer(self) -> Offer | None:
        """The next transaction that waits for its fact; none that was stopped meanwhile."""
        while self._offers:
            offer = self._offers.pop(0)
            if offer.path in self._running and offer.path not in self._stopping:
                return offer
        return None

    def settled(self, path: str) -> None:
        """What the transaction at `path` came to is known: it has nothing more to tell."""
        self._running.pop(path, None)
        self._saw_try(path, Settled())

    def _follow(self, path: str, task: asyncio.Task[Result]) -> None:
        self._running[path] = task
        task.add_done_callback(lambda done: self._over(path, done))

    def _over(self, path: str, task: asyncio.Task[Result]) -> None:
        if self._running.pop(path, None) is not None:
            if not task.cancelled():  # it was cancelled before it began
                result = task.result()
                if isinstance(result, Lost) and result.rest is not None:
                    self._stopping.add(path)
                    self._follow(path, result.rest)
                self._arrived.append((path, result))
                self._saw_try(path, result)
            self._arrive()

    def _saw_try(self, path: str, result: Result) -> None:
        self._observer.saw(
            "step.tried",
            flow=self._claim.definition,
            version=self._claim.version,
            path=path,
            outcome=result.word,
        )

    def stop_closed(self, machine: Machine) -> None:
        """Cancel tries of steps that are over (they timed out), once each."""
        if not self._running:
            return
        for path in [path for path in self._running if path not in self._stopping]:
            if machine.has_no_use_for(path):
                self._stopping.add(path)
                self._running[path].cancel()

    def tell(self, machine: Machine, clock: Clock) -> None:
        """Tell `machine` what has come of the tries that are over, and of those that it waits for in vain.

        A local step may time out while nothing of it runs: between two tries, or before its new owner began
        one. Nobody would ever say that it has settled, and its undo would wait for ever.
        """
        while self._arrived:
            path, result = self._arrived.pop(0)
            self._told.append((path, result))
            tell(machine, path, result, clock)
        for path in machine.settling(local=True):
            if path not in self._running:
                machine.tell("ended", path, idle(machine, path), clock.now())

    def stored(self) -> None:
        """What was told is committed."""
        self._told.clear()

    def again(self) -> None:
        """What was told was not committed: it is to be told again."""
        self._arrived = self._told + self._arrived
        self._told = []

    def abandon(self) -> None:
        """The execution is no longer ours: stop all, and forget what comes of it."""
        running, self._running = self._running, {}
        self._arrive = forget  # so nothing is left for the garbage collector to find
        self._offers.clear()
        for task in running.values():
            task.cancel()


def forget() -> None:
    """Nobody is told any more."""


def idle(machine: Machine, path: str) -> dict[str, Json]:
    """What became of a step that nobody waits for, and of which no try runs: it may have acted before, unless it was
    withdrawn in the very turn that asked for it.
    """
    if {"asked", "withdrawn"} <= {fact.kind for fact in machine.new if fact.path == path}:
        return {
            "outcome": "refused",
            "error": {"code": "never-sent", "detail": "it was withdrawn in the turn that asked"},
        }
    detail = "its time ran out, or it was withdrawn, while no try of it ran"
    return {"outcome": "unknown", "error": {"code": "not-running", "detail": detail}}


def tell(machine: Machine, path: str, result: Result, clock: Clock) -> None:
    """One result of a try as a fact; what cannot be stored is `failed`, and is not tried again."""
    at = clock.now()
    match result:
        case Done(value):
            try:
                machine.tell("ended", path, {"outcome": "done", "value": value}, at)
            except (NotEncodable, TooLarge) as error:
                machine.attempt_failed(
                    path, {"code": error.code, "detail": storable(str(error))}, at, again=False
                )
        case Refusal(error):
            machine.tell("ended", path, {"outcome": "refused", "error": error}, at)
        case Failure(error, raised, unknown, left):
            machine.attempt_failed(path, error, at, raised=raised, unknown=unknown, left=left)
        case Lost(error, left, None):
            machine.attempt_failed(path, error, at, unknown=True, left=left)
        case Lost(error):  # of a try that still runs there is no other; and no undo, before it has ended
            machine.tell("ended", path, {"outcome": "unknown", "error": error | {"settling": True}}, at)
        case Settled():
            pass
        case Stopped():
            detail = {"code": "stopped", "detail": "it was cancelled half-way"}
            machine.attempt_failed(path, detail, at, unknown=True)
