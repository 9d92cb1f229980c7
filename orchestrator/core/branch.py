"""A program under way."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any

from orchestrator.core.ask import Scope
from orchestrator.core.path import Frame


class Branch:
    """A coroutine driven by hand, the frame in which it counts names, and the scope that its work joins."""

    __slots__ = ("coro", "frame", "scope")

    def __init__(self, coro: Coroutine[Any, Any, Any]) -> None:
        self.coro = coro
        self.frame = Frame()
        self.scope = Scope()

    def close(self) -> None:
        """End the coroutine where it stands. What its `finally` blocks raise or await is of no interest."""
        with contextlib.suppress(RuntimeError, ValueError, Exception):
            self.coro.close()


@coroutine
def suspend(request: object) -> Generator[object, Any, Any]:
    """Hand `request` to the machine that drives this branch, and wait for its answer."""
    return (yield request)
