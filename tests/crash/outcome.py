"""What came of an order, without what differs from run to run: times, fences, tries, identities."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from difflib import ndiff
from pathlib import Path
from typing import Any, Final, cast

from orchestrator.client import ExecutionView
from tests.crash.witness import Act, acts

Json = Any

OF_TROUBLE: Final = frozenset({"orphaned", "attempted", "ordered", "resent"})
"""Kinds of facts that tell of dead workers, of tries of local steps and tasks, of which a dead worker uses one up, and
of orders that were given again and found nothing to do.
"""

CANCELLING: Final = "cancel_asked "
"""How the fact begins that keeps an order to cancel."""

OF_A_RUN: Final = frozenset({"due", "execution", "inbox_id", "of", "seed", "traceparent", "undoes_at"})
"""Members of facts that are times, positions and identities."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has to be the same whatever was killed; the order's own name is ORDER in it."""

    status: str
    output: str
    error: str
    facts: tuple[str, ...]
    effects: tuple[str, ...]
    messages: tuple[str, ...]
    spans: tuple[str, ...] = ()
    """What a collector got of it, in the order of their names; nothing where there is none."""


def outcome_of(view: ExecutionView, order: str, folder: Path, spans: Iterable[str] = ()) -> Outcome:
    execution = view.row.execution_id

    def plain(value: Json) -> str:
        text = json.dumps(value, sort_keys=True)
        return text.replace(order, "ORDER").replace(execution, "EXECUTION")

    return Outcome(
        status=view.row.status,
        output=plain(view.output),
        error=plain(view.error),
        facts=tuple(
            once(
                f"{fact.kind} {fact.path} {plain(steady(json.loads(fact.payload or 'null')))}"
                for fact in view.facts
                if fact.kind not in OF_TROUBLE
            )
        ),
        effects=tuple(f"{it.path}: {it.what}".replace(order, "ORDER") for it in effects(folder, execution)),
        messages=tuple(f"{message.path} {message.state}" for message in view.messages),
        spans=tuple(sorted(spans)),
    )


def once(lines: Iterable[str]) -> Iterator[str]:
    """`lines` without orders that were given again."""
    asked: set[str] = set()
    for line in lines:
        if line not in asked:
            yield line
        if line.startswith(CANCELLING):
            asked.add(line)


def steady(value: Json) -> Json:
    """A fact's data without what belongs to one run."""
    if isinstance(value, dict):
        members = cast("dict[str, Json]", value)
        ours = {"id"} if str(members.get("source")).startswith("waypost:") else set[str]()
        return {name: steady(item) for name, item in members.items() if name not in OF_A_RUN | ours}
    if isinstance(value, list):
        return [steady(item) for item in cast("list[Json]", value)]
    return value


def effects(folder: Path, execution: str) -> Iterator[Act]:
    """What the world saw: the first act under each key."""
    seen: set[str] = set()
    for one in acts(folder, execution):
        if one.key not in seen:
            seen.add(one.key)
            yield one


def untold(folder: Path, execution: str) -> list[str]:
    """What a service did again without having been told that it may have been done."""
    seen: set[str] = set()
    found: list[str] = []
    for one in acts(folder, execution):
        if one.key in seen and one.again is False:
            found.append(f"{one.path}: {one.what} again, as if it were new")
        seen.add(one.key)
    return found


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """Where an outcome is not as expected, in words: what is missing (-), and what there is instead (+)."""
    words: list[str] = []
    for field in fields(Outcome):
        was, now = (lines_of(getattr(one, field.name)) for one in (expected, found))
        changed = [line for line in ndiff(was, now) if line.startswith(("-", "+"))]
        if changed:
            words.append(f"{field.name}: {' '.join(changed)}")
    return words


def lines_of(value: str | tuple[str, ...]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


ORDERED: Final = ("facts", "effects", "messages")


def differences_in_any_order(expected: Outcome, found: Outcome) -> list[str]:
    """The same for branches, which wait for nobody."""
    return differences(in_order(expected), in_order(found))


def in_order(outcome: Outcome) -> Outcome:
    return replace(outcome, **{name: tuple(sorted(getattr(outcome, name))) for name in ORDERED})


def differences_in_effect(expected: Outcome, found: Outcome) -> list[str]:
    """The same where our own death makes a refusal uncertain: the end and the effects count, not the words."""
    return [it for it in differences(expected, found) if it.startswith(("status:", "effects:"))]


def told_once(expected: Outcome, found: Outcome) -> list[str]:
    """Where what may be sent only once is at fault. It was told, or not, or nobody knows; and never twice."""
    may_be: Mapping[str, AbstractSet[tuple[str, ...]]] = {
        '"told"': {expected.effects},
        '"not told"': {()},
        '"nobody knows"': {(), expected.effects},
    }
    if found.status == expected.status and found.effects in may_be.get(found.output, ()):
        return []
    return differences(expected, found)
