"""What a journal says is open, without running its program: for people, who have no program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from orchestrator.core.ask import STEP_VERDICTS
from orchestrator.core.errors import error_in
from orchestrator.core.fact import Fact

Json = Any


@dataclass(frozen=True, slots=True)
class OpenAsk:
    """Something that was asked and has not ended. `what` is the command or the function that is asked for.

    `tries` have ended without an end of the step, the last one with `error`; the next one comes at `next_at`, and a
    call is sent again then. `key` is that of an event, `args` all that is asked. One that is `withdrawn` nobody waits
    for any more. While it is `probing`, nobody knows what became of it, and that is asked, once it has settled.
    """

    path: str
    kind: str
    name: str
    what: str
    do: str
    asked_at: datetime
    due: datetime | None
    tries: int = 0
    error: dict[str, Json] | None = None
    next_at: datetime | None = None
    key: str = ""
    args: dict[str, Json] = field(default_factory=dict[str, Json])
    has_undo: bool = False
    has_probe: bool = False
    probing: bool = False
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """`asks` have not ended, in the order of their asking; `settling` ran out of time or were withdrawn, and what
    became of them comes yet: before that they are not undone, no person is asked, and they keep their mutexes. What has
    one is `exclusive`.
    """

    asks: list[OpenAsk]
    settling: list[OpenAsk]
    exclusive: set[str] = field(default_factory=set[str])


def open_in(journal: Iterable[Fact]) -> Open:
    found = Open([], [])
    for fact in journal:
        READ.get(fact.kind, lambda _found, _fact: None)(found, fact)
    return found


def asked(found: Open, fact: Fact) -> None:
    found.asks.append(ask_of(fact))


def attempted(found: Open, fact: Fact) -> None:
    for i, ask in enumerate(found.asks):
        if ask.path == fact.path:
            found.asks[i] = replace(
                ask,
                tries=fact.data["attempt"],
                error=error_in(fact.data),
                next_at=datetime.fromisoformat(fact.data["next_at"]),
                probing=False,
                due=None if ask.probing else ask.due,
            )


def resent(found: Open, fact: Fact) -> None:
    for i, ask in enumerate(found.asks):
        if ask.path == fact.path:
            due = fact.data.get("due")
            found.asks[i] = replace(
                ask, next_at=None, due=ask.due if due is None else datetime.fromisoformat(due)
            )


def ended(found: Open, fact: Fact) -> None:
    drop(found.settling, fact.path)
    ask = drop(found.asks, fact.path)
    if ask is not None and ask.kind == "mutex":
        found.exclusive.add(fact.path.removesuffix("/mutex"))
    is_asked = fact.data["outcome"] == "unknown" and "probed" not in error_in(fact.data)
    if ask is not None and ask.has_probe and is_asked:
        found.asks.append(replace(ask, probing=True))
    if ask is not None and error_in(fact.data).get("settling"):
        found.settling.append(ask)


def withdrawn(found: Open, fact: Fact) -> None:
    """A child that is told to end is waited for all the same."""
    for i, one in enumerate(found.asks):
        if one.path == fact.path and one.kind == "child" and one.args:
            found.asks[i] = replace(one, withdrawn=True, due=None)
            return
    ask = drop(found.asks, fact.path)
    idle = ask is not None and ask.do in ("call", "task") and ask.next_at is not None
    if ask is not None and (ask.has_undo or ask.path in found.exclusive) and not idle:
        found.settling.append(replace(ask, withdrawn=True))


def resolved(found: Open, fact: Fact) -> None:
    if fact.data.get("verdict") in STEP_VERDICTS:
        drop(found.asks, fact.path)


def late(found: Open, fact: Fact) -> None:
    drop(found.settling, fact.path)


def orphaned(found: Open, _: Fact) -> None:
    found.settling[:] = [ask for ask in found.settling if ask.do != "step"]


def over(found: Open, _: Fact) -> None:
    """What was asked before is of no interest any more: the flow goes on as new, or was ended without its program."""
    found.asks.clear()
    found.settling.clear()


READ: Final[dict[str, Callable[[Open, Fact], None]]] = {
    "asked": asked,
    "attempted": attempted,
    "resent": resent,
    "ended": ended,
    "withdrawn": withdrawn,
    "resolved": resolved,
    "late": late,
    "orphaned": orphaned,
    "continued": over,
    "terminated": over,
}
"""What each kind of fact changes; the others change nothing that is open."""


def drop(asks: list[OpenAsk], path: str) -> OpenAsk | None:
    """Take what stands at `path` out of `asks`."""
    for i, ask in enumerate(asks):
        if ask.path == path:
            return asks.pop(i)
    return None


def ask_of(fact: Fact) -> OpenAsk:
    args: dict[str, Json] = fact.data.get("args") or {}
    due = fact.data.get("due")
    return OpenAsk(
        path=fact.path,
        kind=fact.data["kind"],
        name=fact.data["name"],
        what=str(args.get("name") or args.get("type") or fact.data["name"]),
        do=str(args.get("do") or ""),
        asked_at=fact.at,
        due=None if due is None else datetime.fromisoformat(due),
        key=str(args.get("key") or ""),
        args=args,
        has_undo="undo" in fact.data,
        has_probe="probe" in fact.data,
    )
