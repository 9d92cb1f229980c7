"""The branches of a program: they go on one at a time, part, are stopped and are joined again."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

from contracts.limits import RESUMES_MAX
from orchestrator.core.ask import Ask, Scope, Unwind
from orchestrator.core.branch import Branch, drop
from orchestrator.core.errors import (
    Cancelled,
    Continue,
    Halt,
    LimitExceeded,
    ProgramFault,
    UsageError,
    in_full,
    in_words,
)
from orchestrator.core.fork import Fork
from orchestrator.core.path import Frame

Json = Any

FOREIGN_AWAITS_MAX: Final = 100
"""Times that a program may await something foreign, and catch what it gets for it."""

CLINGS_MAX: Final = 100
"""Times that a program which is let go may catch that; then it is left at its next await."""


class End:
    """How the coroutine of a branch is over: its value, or what it raised."""

    __slots__ = ("error", "value")

    def __init__(self, value: Json, error: BaseException | None) -> None:
        self.value = value
        self.error = error


class Branches:
    """All branches that are not over, in the order of their start. `ready` are those that can go on, and with what;
    `current` is the one that runs now, `resumes` how often one went on since the world last spoke. `fault` is why none
    may go on: a program that catches everything cannot hide it.
    """

    __slots__ = ("_clung", "_evicted", "_foreigners", "alive", "current", "fault", "ready", "resumes", "root")

    def __init__(self) -> None:
        self.root: Branch | None = None
        self.alive: dict[Branch, None] = {}
        self.ready: deque[tuple[Branch, Json, BaseException | None]] = deque()
        self.current: Branch | None = None
        self.fault: Halt | None = None
        self.resumes = 0
        self._foreigners = 0
        self._clung = 0
        self._evicted = False

    def begin(self, coro: Coroutine[Any, Any, Json]) -> None:
        """The program is `coro`."""
        self.root = Branch(coro)
        self.alive[self.root] = None
        self.resume(self.root)

    def stop(self, halt: Halt) -> Halt:
        """Remember `halt`: nothing goes on any more."""
        self.fault = halt
        return halt

    # ---- run -----------------------------------------------------------------------------------------------

    def resume(self, branch: Branch, value: Json = None, *, error: BaseException | None = None) -> None:
        """`branch` goes on when its turn comes; it waits for nothing any more."""
        branch.at = None
        self.ready.append((branch, value, error))

    def next(self) -> tuple[Branch, Json, BaseException | None]:
        """Who goes on now, and with what. Raises LimitExceeded when the program runs without waiting."""
        self.resumes += 1
        if self.resumes > RESUMES_MAX:
            raise LimitExceeded(f"resumes_max: {RESUMES_MAX} asks in one turn; it runs without waiting")
        return self.ready.popleft()

    def run(
        self, branch: Branch, value: Json, error: BaseException | None
    ) -> Ask | Fork | Unwind | End | None:
        """Let `branch` go on until it waits, or ends: for what, or how; None when it can go on at once.

        Raises the Halt that stopped the program, even if the program caught it.
        """
        if not branch.started and inspect.getcoroutinestate(branch.coro) != inspect.CORO_CREATED:
            raise ProgramFault("RuntimeError: cannot reuse already awaited coroutine")
        branch.started = True
        self.current = branch
        request: object = None
        try:
            request = branch.coro.send(value) if error is None else branch.coro.throw(error)
        except StopIteration as stop:
            request = End(stop.value, None)
        except Halt as halt:
            self.fault = self.fault or halt
        except (Exception, Cancelled, Continue) as failure:  # noqa: BLE001  # whatever a program raises is its end
            request = End(None, failure)
        except BaseException as leaving:  # noqa: BLE001  # a flow may not end its worker
            self.fault = self.fault or ProgramFault(in_full(leaving))
        finally:
            self.current = None
        if self.fault is not None:
            if isinstance(request, Fork):
                request.close()
            raise self.fault
        if isinstance(request, (Ask, Fork)) and branch.pending is None:
            return request
        return self._requested(branch, request)

    def _requested(self, branch: Branch, request: object) -> Unwind | End | None:
        """A branch that is told to end waits for nothing but its undoing; none waits for something foreign."""
        if isinstance(request, Unwind | End):
            return request
        if branch.pending is not None:
            self._interrupt(branch, request)
        else:
            self.resume(branch, error=self._foreign(request))
        return None

    def _interrupt(self, branch: Branch, request: object) -> None:
        """`branch` is told to end: what it was about to ask keeps its place in the paths, and is not asked."""
        if isinstance(request, Ask | Fork):
            branch.frame.next(request.name)
        if isinstance(request, Fork):
            request.close()
        error = Cancelled(branch.pending)
        branch.pending = None
        self.resume(branch, error=error)

    def _foreign(self, request: object) -> TypeError:
        """What the program gets for awaiting something else than its context gives; soon it is held for that."""
        error = TypeError(
            f"a flow may await only what its context gives, not {type(request).__name__}: use ctx.sleep for "
            f"asyncio.sleep and ctx.step for any other I/O"
        )
        self._foreigners += 1
        if self._foreigners > FOREIGN_AWAITS_MAX:
            raise ProgramFault(in_words(error))
        return error

    # ---- fork and join -------------------------------------------------------------------------------------

    def fork(self, branch: Branch, fork: Fork, path: str) -> None:
        """`branch` waits for the branches of `fork`, which begin now."""
        for kid in fork.start(branch, path):
            self.alive[kid] = None
            self.resume(kid)
        if not fork.running:
            self._join(fork)

    def over(self, branch: Branch, value: Json, error: BaseException | None) -> list[Ask]:
        """`branch` has ended, its undoing included; its siblings may be stopped by that, and its fork be joined.

        Returns what is to be withdrawn.
        """
        branch.over = True
        branch.at = None
        self.alive.pop(branch, None)
        fork = branch.fork
        if fork is None:
            return []
        waits: list[Ask] = []
        if fork.over(branch, value, error):
            fork.close()
            for kid in list(fork.running.values()):
                waits += self.cancel(kid, "a sibling decided")
        following = fork.next()
        if following is not None:
            self.alive[following] = None
            self.resume(following)
        if not fork.running:
            self._join(fork)
        return waits

    def _join(self, fork: Fork) -> None:
        """All branches have ended, cleanup and undo included: whoever waits goes on. Once."""
        if not fork.joined:
            fork.joined = True
            assert fork.branch is not None, "a fork is started before it is joined"
            value, error = fork.outcome()
            self.resume(fork.branch, value, error=error)

    # ---- stop ----------------------------------------------------------------------------------------------

    def cancel(self, branch: Branch, reason: str) -> list[Ask]:
        """Ask `branch` to end, at most once, whatever causes follow. Returns what is to be withdrawn."""
        if branch.over or branch.told:
            return []
        branch.told = True
        waits = branch.at
        if not branch.started:
            drop(branch.coro)
            return self.over(branch, None, Cancelled(reason))
        if branch.shielded or waits is None:
            branch.pending = reason
        elif isinstance(waits, Ask) and waits.is_child:
            waits.stopped = reason
            return [waits]
        elif isinstance(waits, Ask):
            self.resume(branch, error=Cancelled(reason))
            return [waits]
        elif waits.decided is not None or waits.cancelled is not None:
            branch.pending = reason
        else:
            waits.cancelled = reason
            waits.close()
            return [ask for kid in list(waits.running.values()) for ask in self.cancel(kid, reason)]
        return []

    def evict(self) -> None:
        """Let the program go. Its `finally` blocks run now; whatever they ask is ignored."""
        self._evicted = True
        for branch in reversed(self.alive):
            if isinstance(branch.at, Fork):
                branch.at.close()
            branch.close()

    # ---- where the program is ------------------------------------------------------------------------------

    def here(self) -> Branch:
        """The branch that runs now. Raises UsageError outside of the flow, GeneratorExit while it is let go."""
        if self._evicted:
            return self._leaving()
        if self.current is None:
            raise UsageError(
                "this context belongs to a flow: it can be used only while the flow runs, not from a step or a callback"
            )
        return self.current

    def _leaving(self) -> Branch:
        """Raises GeneratorExit, but not for ever: a program that catches that in a loop gets to its await, where
        Python leaves it.
        """
        self._clung += 1
        if self._clung > CLINGS_MAX and self.root is not None:
            return self.root
        raise GeneratorExit

    def place(self, name: str) -> str:
        """The path of what is called `name` where the program is. Raises LimitExceeded, which stops it."""
        try:
            return self.here().frame.next(name)
        except LimitExceeded as error:
            raise self.stop(error) from None

    def opens(self, name: str | None) -> tuple[Scope, Frame]:
        """The scope and the frame of a saga that begins here; without a name it moves no path."""
        branch = self.here()
        try:
            frame = branch.frame if name is None else Frame.inside(branch.frame.next(name))
            return Scope(branch.scope), frame
        except LimitExceeded as error:
            raise self.stop(error) from None
