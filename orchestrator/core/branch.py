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
        self.scope = Scope() if scope is None else scope
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
        with contextlib.suppress(BaseException):
            drop_arguments(self.coro)
            self.coro.close()


def drop(coro: Coroutine[Any, Any, Any]) -> None:
    """End `coro` if it was never started; one that somebody awaits is left to whoever does."""
    if inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:
        drop_arguments(coro)
        coro.close()


def drop_arguments(coro: Coroutine[Any, Any, Any]) -> None:
    """Drop the coroutines that `coro` was given and never came to await: nobody else will, and Python would
    complain about each.
    """
    if inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:
        for given in inspect.getcoroutinelocals(coro).values():
            for one in cast("tuple[object, ...]", given) if isinstance(given, tuple | list) else (given,):
                if inspect.iscoroutine(one):
                    drop(one)


@coroutine
def suspend(request: object) -> Generator[object, Any, Any]:
    """Hand `request` to the machine that drives this branch, and wait for its answer."""
    return (yield request)
