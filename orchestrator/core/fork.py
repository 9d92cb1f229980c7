"""Branches side by side, and what their ends mean for whoever waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any, Literal, TypeAlias

from orchestrator.core.branch import Branch, drop
from orchestrator.core.errors import AllFailed, Cancelled, FlowError, in_words
from orchestrator.core.path import Frame

Json = Any
Mode: TypeAlias = Literal["all", "settle", "first", "any"]


class Fork:
    """What a program waits for when it has branches: it never ends before all of them have.

    `all` is decided by the first error, `first` by the first end, `any` by the first success, `settle` by none.
    What is decided stops the branches that still run; `cancelled` says that whoever waits is to end, and why. An error
    is a value of `settle` when it is one that authors may expect; any other passes, once all branches have ended.
    """

    __slots__ = (
        "branch", "cancelled", "decided", "errors", "joined", "mode", "name", "path", "results", "running",
        "waiting",
    )  # fmt: skip

    def __init__(self, mode: Mode, coros: Iterable[Coroutine[Any, Any, Any]], *, name: str) -> None:
        self.mode: Mode = mode
        self.name = name
        self.path = ""
        self.waiting = deque(coros)
        self.branch: Branch | None = None
        self.running: dict[int, Branch] = {}
        self.results: list[Json] = []
        self.errors: list[BaseException] = []
        self.decided: tuple[Json, BaseException | None] | None = None
        self.cancelled: str | None = None
        self.joined = False

    @property
    def width(self) -> int:
        """How many branches it asks for, before it is started."""
        return len(self.waiting)

    def start(self, branch: Branch, path: str) -> list[Branch]:
        """Its branches, in order. Those of `first` and `any` are scopes: what a loser did is undone.

        Raises LimitExceeded when they are too deep.
        """
        self.branch, self.path = branch, path
        scoped = self.mode in ("first", "any")
        kids = [
            Branch(coro, self, i, frame=Frame.inside(f"{path}.{i}"), scope=branch.scope, scoped=scoped)
            for i, coro in enumerate(self.waiting)
        ]
        self.waiting.clear()
        self.running = dict(enumerate(kids))
        self.results = [None] * len(kids)
        return kids

    def over(self, kid: Branch, value: Json, error: BaseException | None) -> bool:
        """A branch has ended; whether this decides what the others are still for."""
        del self.running[kid.index]
        self.results[kid.index] = value if error is None else error
        if error is not None and (self.mode == "settle" or not isinstance(error, Cancelled)):
            self.errors.append(error)
        if self.decided is not None or self.cancelled is not None:
            return False
        decides = {"all": error is not None, "first": True, "any": error is None, "settle": False}[self.mode]
        if decides:
            self.decided = (value, error)
        return decides

    def outcome(self) -> tuple[Json, BaseException | None]:
        """What whoever waits gets, now that all branches have ended: a value, or an error to raise."""
        if self.cancelled is not None:
            return None, Cancelled(self.cancelled)
        if self.decided is not None:
            value, error = self.decided
            return value, error if error is None else self._noted(error)
        if self.mode == "any":
            return None, AllFailed(self.errors)
        passing = next((error for error in self.errors if not isinstance(error, FlowError)), None)
        return (self.results, None) if passing is None else (None, self._noted(passing))

    def _noted(self, error: BaseException) -> BaseException:
        """`error`, with what else failed."""
        for other in self.errors:
            if other is not error:
                error.add_note(f"also failed beside it: {in_words(other)}")
        return error

    def close(self) -> None:
        """Drop the branches that were never started, silently."""
        while self.waiting:
            drop(self.waiting.popleft())
