"""A program under way, or a part of it that runs beside others."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import TYPE_CHECKING, Any, cast

from orchestrator.core.ask import Ask, Scope
from orchestrator.core.path import Frame

if TYPE_CHECKING:
    from orchestrator.core.fork import Fork

Json = Any


class Branch:
    """A coroutine driven by hand, the frame in which it counts names, and the scope that its work joins.

    `at` is what it waits for: an ask, a fork, or None while it runs. A branch that is `told` to end gets
    Cancelled once: at its await, or, while it is being resumed or undoes, at its next one; until then the reason
    is `pending`. While `shielded` it undoes, and nothing is thrown into it.

    One that is `scoped` (of `first` and `any`) has a scope of its own around all it does; `ending` is how its
    coroutine ended, kept while that scope is undone.
    """

    __slots__ = (
        "at", "coro", "ending", "fork", "frame", "index", "over", "pending", "scope", "scoped", "shielded",
        "started", "told",
    )  # fmt: skip

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        fork: Fork | None = None,
        index: int = 0,
        *,
        frame: Frame | None = None,
        scope: Scope | None = None,
        scoped: bool = False,
    ) -> None:
        self.coro = coro
        self.fork = fork
        self.index = index
        self.frame = frame or Frame()
        self.scope = Scope(scope) if scoped or scope is None else scope
        self.scoped = scoped
        self.at: Ask | Fork | None = None
        self.started = False
        self.over = False
        self.told = False
        self.shielded = False
        self.pending: str | None = None
        self.ending: tuple[Json, BaseException | None] | None = None

    def close(self) -> None:
        """End the coroutine where it stands. What its `finally` blocks raise or await is of no interest."""
        with contextlib.suppress(RuntimeError, ValueError, Exception):
            close(self.coro)


def close(coro: Coroutine[Any, Any, Any]) -> None:
    """End `coro`. One that was never started also drops the coroutines that it was given, so that Python does not
    complain about those that nobody awaited.
    """
    if inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:
        for given in inspect.getcoroutinelocals(coro).values():
            for one in cast("tuple[object, ...]", given) if isinstance(given, tuple) else (given,):
                if inspect.iscoroutine(one):
                    close(one)
    coro.close()


@coroutine
def suspend(request: object) -> Generator[object, Any, Any]:
    """Hand `request` to the machine that drives this branch, and wait for its answer."""
    return (yield request)
