"""What a program waits for, and what it would undo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from contracts.limits import SPAN_MAX
from orchestrator.core.errors import LimitExceeded, UsageError
from orchestrator.core.path import DEPTH_MAX
from orchestrator.core.retry import ONCE, Retry

Json = Any

MAY_HAVE_ACTED: Final = frozenset({"call", "probe", "step", "task", "undo", "child"})
"""Kinds of asks that a timeout leaves unknown. A timer's due time is its end, and an event's is a timeout."""

ANSWERED: Final = MAY_HAVE_ACTED | {"decision", "mutex", "transaction"}
"""Kinds of asks that an answer for their path ends."""

UNDO_VERDICTS: Final = frozenset({"retry", "done", "skip"})
"""What a person may decide about an undo: ask again, it counts as undone, or what was done stands."""

STEP_VERDICTS: Final = frozenset({"done", "not_done", "skip"})
"""What a person may decide about a step whose outcome is unknown: its reply, a refusal, or still unknown."""


PROBED: Final = "probe"
"""The effect of a step whose probe is asked before it is tried again."""


@dataclass(slots=True)
class Watch:
    """What is looked at while a local step is tried: `timeout` bounds one try, `heartbeat` its silence. Before it is
    tried again, `probe` is asked, with the step's arguments. `left` is what the last try that failed had left.
    """

    timeout: timedelta | None = None
    heartbeat: timedelta | None = None
    probe: Callable[..., Any] | None = None
    left: Json = None


class Ask:
    """One thing that a program asked for and waits for.

    `args` is what is asked, as data. `work` is the function behind a local step, with its arguments as the program
    holds them; it is never stored. It is due `timeout` after it is asked, or at `until`. `undo` makes the action that
    would undo it, from (known, reply). `effect` is what holds when its outcome is unknown; empty for `keyed`.
    `sent_at` is when its message was last made again. `undoes` is what an undo says about what it takes back. `stopped`
    is why a child that was told to end is; whoever waits for it gets that when it has. One whose flow has a mutex is
    `exclusive`. Nothing else with the same `mutex` is asked for meanwhile; `behind` an ask for that comes what is to
    have it. `probe` asks what became of a call; `probed` is such an ask that is open, one of `probes`, which has its
    call `behind` it; `lost` is why nobody knows.
    """

    __slots__ = (
        "args", "asked_at", "attempt", "behind", "due", "effect", "entry", "exclusive", "hold", "kind", "lost", "mutex",
        "name", "overdue", "path", "position", "probe", "probed", "probes", "retry", "retry_at", "sent_at", "stopped",
        "timeout", "undo", "undoes", "until", "watch", "work",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        name: str,
        args: Json = None,
        *,
        undo: Callable[[bool, Json], Json] | None = None,
        timeout: timedelta | None = None,
        until: datetime | None = None,
        retry: Retry = ONCE,
        hold: bool = False,
        effect: str = "",
        work: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.args = args
        self.undo = undo
        self.timeout = timeout
        self.until = until
        self.retry = retry
        self.hold = hold
        self.effect = effect
        self.work = work
        self.watch: Watch | None = None
        self.path = ""
        self.position = 0
        self.asked_at: datetime | None = None
        self.due: datetime | None = None
        self.attempt = 1
        self.retry_at: datetime | None = None
        self.sent_at: datetime | None = None
        self.stopped: str | None = None
        self.overdue = False
        self.entry: Entry | None = None
        self.undoes: dict[str, Json] = {}
        self.mutex: str | None = None
        self.exclusive = False
        self.behind: Ask | None = None
        self.probe: Json = None
        self.probed: Ask | None = None
        self.probes = 0
        self.lost: dict[str, Json] = {}

    @property
    def is_local(self) -> bool:
        """Whether a worker does it in its own process: a step, a transaction, or an undo by a local function."""
        return self.kind in {"step", "transaction"} or (self.kind == "undo" and self.args["do"] == "step")

    @property
    def is_message(self) -> bool:
        """Whether it leaves as a message: a call, its probe, or an undo by a command."""
        return self.kind in {"call", "probe"} or (self.kind == "undo" and self.args["do"] == "call")

    @property
    def is_task(self) -> bool:
        """Whether it is work for the workers of a queue."""
        return self.kind == "task"

    @property
    def is_sent(self) -> bool:
        """Whether somebody else does it, as a message or as a task: each try of it is one of its own."""
        return self.is_message or self.is_task

    @property
    def is_exact(self) -> bool:
        """Whether its effect and the fact that it ended are one commit: what has not ended is not done."""
        return self.kind == "transaction"

    @property
    def is_event(self) -> bool:
        """Whether it waits for an event: then it has a row among the waits while it is open."""
        return self.kind == "event"

    @property
    def is_child(self) -> bool:
        """Whether it waits for another execution to end. One that is told to end is waited for all the same."""
        return self.kind == "child"

    @property
    def is_between_sends(self) -> bool:
        """Whether it is a message or a task that was answered, and that will be sent again: nothing of it is under
        way.
        """
        return self.retry_at is not None and self.is_sent

    @property
    def is_decision(self) -> bool:
        """Whether it waits for a person, whose decision is mail for its path."""
        return self.kind == "decision"

    @property
    def needs_commit(self) -> bool:
        """Whether a local step may begin only after its `asked` is committed."""
        return self.undo is not None or self.is_exact or self.effect in {"at_most_once", PROBED}


class Scope:
    """What was done in one part of a program and may have to be undone, by path.

    Raises LimitExceeded when it is more than DEPTH_MAX scopes deep.
    """

    __slots__ = ("depth", "entries", "parent")

    def __init__(self, parent: Scope | None = None) -> None:
        self.parent = parent
        self.entries: dict[str, Entry] = {}
        self.depth = 0 if parent is None else parent.depth + 1
        if self.depth > DEPTH_MAX:
            raise LimitExceeded(f"depth_max: {DEPTH_MAX} scopes inside each other")

    def around(self) -> Iterator[Scope]:
        """This scope and all that it is inside of, from the inside out."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def merge(self) -> None:
        """Left well: what was done here becomes part of the scope around it."""
        if self.parent is not None:
            for entry in self.entries.values():
                entry.scope = self.parent
            self.parent.entries.update(self.entries)
            self.entries = {}


class Entry:
    """One thing to undo. `rank` is the position of the fact that ended it: the highest is undone first.

    `action` is None when nobody knows how; then a person is asked. While `settling`, it is not yet known what
    became of what was asked, and its undo waits. `asked_at` is of its last message; there were others before that
    one when it was sent `again`.
    """

    __slots__ = (
        "action",
        "again",
        "asked_at",
        "known",
        "local",
        "message",
        "path",
        "rank",
        "scope",
        "settling",
        "tries",
        "undo",
    )

    def __init__(self, ask: Ask, action: Json, scope: Scope) -> None:
        self.path = ask.path
        self.local = ask.is_local
        self.message = ask.is_message
        self.asked_at = ask.asked_at
        self.undo = ask.undo
        self.action: Json = action
        self.scope = scope
        self.rank = ask.position
        self.known = False
        self.again = False
        self.settling = False
        self.tries = 0


class Unwind:
    """A scope asks to be undone before it is left."""

    __slots__ = ("scope",)

    def __init__(self, scope: Scope) -> None:
        self.scope = scope


def since(span: timedelta | None) -> timedelta | None:
    """`span` as an ask may carry it. Raises UsageError outside of (0, ten years]."""
    if span is not None and not timedelta(0) < span <= SPAN_MAX:
        raise UsageError(f"a timeout of {span}: expected more than 0 and at most ten years")
    return span
