"""Branches side by side, and what their ends mean for whoever waits for them."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, Literal, TypeAlias

from orchestrator.core.ask import Scope
from orchestrator.core.branch import Branch, drop
from orchestrator.core.errors import AllFailed, Cancelled, FlowError, in_words
from orchestrator.core.path import Frame

Json = Any
Mode: TypeAlias = Literal["all", "settle", "first", "any", "map"]


class Fork:
    """What a program waits for when it has branches: it never ends before all of them have.

    `all` and `map` are decided by the first error, `first` by the first end, `any` by the first success, `settle` by
    none. What is decided stops the branches that still run; `cancelled` says that whoever waits is to end, and why. An
    error is a value of `settle` when it is one that authors may expect; any other passes, once all have ended.

    It asks for `width` branches, of which no more than `concurrency` (None: all) run at once; `map` for at most
    `items_max`.
    """

    __slots__ = (
        "branch", "cancelled", "concurrency", "decided", "errors", "items_max", "joined", "mode", "name", "path",
        "results", "running", "started", "waiting", "width",
    )  # fmt: skip

    def __init__(
        self,
        mode: Mode,
        coros: Iterable[Coroutine[Any, Any, Any]],
        *,
        name: str,
        width: int,
        items_max: int | None = None,
        concurrency: int | None = None,
    ) -> None:
        self.mode: Mode = mode
        self.name = name
        self.width = width
        self.items_max = items_max
        self.concurrency = concurrency
        self.path = ""
        self.started = 0
        self.waiting = iter(coros)
        self.branch: Branch | None = None
        self.running: dict[int, Branch] = {}
        self.results: list[Json] = []
        self.errors: list[BaseException] = []
        self.decided: tuple[Json, BaseException | None] | None = None
        self.cancelled: str | None = None
        self.joined = False

    def start(self, branch: Branch, path: str) -> list[Branch]:
        """Its branches, in order, as many as may run at once. Those of `first` and `any` are scopes: what a loser did
        is undone.

        Raises LimitExceeded when they are too deep.
        """
        self.branch, self.path = branch, path
        self.results = [None] * self.width
        return [kid for _ in range(self.concurrency or self.width) if (kid := self.next()) is not None]

    def next(self) -> Branch | None:
        """The next branch to begin; None when there is none, or nobody waits for it any more.

        Raises LimitExceeded when it is too deep.
        """
        if self.started == self.width or self.decided is not None or self.cancelled is not None:
            return None
        assert self.branch is not None, "a fork is started before its branches are"
        index, scope = self.started, self.branch.scope
        scoped = self.mode in ("first", "any")
        frame = Frame.inside(f"{self.path}.{index}")
        own = Scope(scope) if scoped else scope
        kid = self.running[index] = Branch(
            next(self.waiting), self, index, frame=frame, scope=own, scoped=scoped
        )
        self.started += 1
        return kid

    def over(self, kid: Branch, value: Json, error: BaseException | None) -> bool:
        """A branch has ended; whether this decides what the others are still for."""
        del self.running[kid.index]
        self.results[kid.index] = value if error is None else error
        if error is not None and (self.mode == "settle" or not isinstance(error, Cancelled)):
            self.errors.append(error)
        if self.decided is not None or self.cancelled is not None:
            return False
        match self.mode:
            case "all" | "map":
                decides = error is not None
            case "any":
                decides = error is None
            case "first":
                decides = True
            case "settle":
                decides = False
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
        for coro in self.waiting:
            drop(coro)
