"""What a journal says is open, without running its program: for people, who have no program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from orchestrator.core.ask import STEP_VERDICTS
from orchestrator.core.errors import error_in
from orchestrator.core.fact import Fact

Json = Any


@dataclass(frozen=True, slots=True)
class OpenAsk:
    """Something that was asked and has not ended. `what` is the command or the function that is asked for.

    `tries` of a local step have ended without an end of the step, the last one with `error`; the next one comes
    at `next_at`.
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


@dataclass(frozen=True, slots=True)
class Open:
    """`asks` have not ended, in the order of their asking; `settling` ran out of time, and what became of them
    comes yet: before that they are not undone, and no person is asked.
    """

    asks: list[OpenAsk]
    settling: list[OpenAsk]


def open_in(journal: Iterable[Fact]) -> Open:
    asks: dict[str, OpenAsk] = {}
    settling: dict[str, OpenAsk] = {}
    for fact in journal:
        match fact.kind:
            case "asked":
                asks[fact.path] = ask_of(fact)
            case "attempted" if fact.path in asks:
                asks[fact.path] = replace(
                    asks[fact.path],
                    tries=fact.data["attempt"],
                    error=error_in(fact.data),
                    next_at=datetime.fromisoformat(fact.data["next_at"]),
                )
            case "ended":
                ask = asks.pop(fact.path, None)
                settling.pop(fact.path, None)
                if ask is not None and error_in(fact.data).get("settling"):
                    settling[fact.path] = ask
            case "resolved" if fact.data.get("verdict") in STEP_VERDICTS:
                asks.pop(fact.path, None)
            case "late":
                settling.pop(fact.path, None)
            case "orphaned":
                settling = {path: ask for path, ask in settling.items() if ask.do != "step"}
            case _:
                pass
    return Open(list(asks.values()), list(settling.values()))


def ask_of(fact: Fact) -> OpenAsk:
    args: dict[str, Json] = fact.data.get("args") or {}
    due = fact.data.get("due")
    return OpenAsk(
        path=fact.path,
        kind=fact.data["kind"],
        name=fact.data["name"],
        what=str(args.get("name") or fact.data["name"]),
        do=str(args.get("do") or ""),
        asked_at=fact.at,
        due=None if due is None else datetime.fromisoformat(due),
    )
