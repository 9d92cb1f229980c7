"""A journal as people may see it: without what its contracts declare as Sensitive.

Where something sensitive is stands in the journal itself, written by the program that had the classes: beside the
arguments of what it asks (`args.sensitive`: in its `data`, in the `value` that comes back, in what is to be shown), and
for input and output in the first fact, or with the flow's version in the database. So whoever shows a journal needs
none of the flow's code. Values from these places are then taken out of every text too: an error may repeat them.

What says that something is sensitive and cannot be read makes all of it sensitive. When something sensitive is in the
payload store, no text of the execution is shown: it is not got only to learn what to hide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from contracts.objects import OBJECTS
from contracts.sensitive import REDACTED, VALUES_MAX, WHOLE, Places, Scrubber, redacted, values_at

Json = Any


class Line(NamedTuple):
    """What of a fact a redaction looks at."""

    kind: str
    path: str
    data: dict[str, Json]


Marks = Mapping[str, Places]
"""What is sensitive in what: `data`, `value`, `input`, `output`."""
ALL: Final[Marks] = {"data": WHOLE, "value": WHOLE, "input": WHOLE, "output": WHOLE}
FREE: Final = frozenset(
    {"input", "output", "value", "data", "args", "undo", "error", "reason", "left", "events"}
)
"""Members of facts in which anything may stand; the others are the engine's own, and are kept as they are."""
FOREIGN: Final = ("data", "left")
"""Members of an error that a service or a step may fill as it likes."""


def marks_in(said: Json) -> Marks:
    """What `sensitive` says, of a fact or of a flow's version; everything, where it says nothing that can be read."""
    if said is None:
        return {}
    if not isinstance(said, Mapping):
        return ALL
    found: dict[str, Places] = {}
    for what, places in cast("Mapping[str, Json]", said).items():
        if not isinstance(places, list) or not all(
            isinstance(one, str) for one in cast("list[Json]", places)
        ):
            return ALL
        found[what] = tuple(cast("list[str]", places))
    return found


class Redaction:
    """How to show one journal; `declared` is what the flow's version says about input and output.

    `lines` are its facts as they may be shown, `text` takes what is sensitive out of any other text about it.
    """

    def __init__(self, facts: Sequence[Line], declared: Json = None) -> None:
        self._asks: dict[str, Marks] = {}
        self._events: dict[str, Places] = {}
        self._whole = marks_in(declared)
        self.finds = bool(self._whole)
        """Whether anything is sensitive; else all is shown as it is."""
        for fact in facts:
            self._learn(fact)
        values: dict[str, None] = {}
        for fact in facts if self.finds else ():
            for part, places in self._sensitive(fact.kind, fact.path, fact.data):
                values.update(dict.fromkeys(values_at(part, places)))
            if len(values) > VALUES_MAX:
                break
        self.text = Scrubber(values, blind=self.finds and any(map(self._is_elsewhere, facts)))
        self.lines = [self._shown(fact) for fact in facts] if self.finds else list(facts)

    def _learn(self, fact: Line) -> None:
        said = fact.data
        if fact.kind in ("started", "continued") and "sensitive" in said:
            self.finds, found = True, marks_in(said["sensitive"])
            self._whole = {
                what: tuple({*self._whole.get(what, ()), *found.get(what, ())})
                for what in {*self._whole, *found}
            }
        for action in actions_in(said):
            if "sensitive" not in action:
                continue
            self.finds, marks = True, marks_in(action["sensitive"])
            if fact.kind == "asked" and action is said.get("args"):
                self._asks[fact.path] = marks
                if "type" in action:
                    known = self._events.get(str(action["type"]), ())
                    self._events[str(action["type"])] = (*known, *marks.get("value", ()))

    def marks(self, path: str) -> Marks:
        """What is sensitive of what is asked at `path`, and of what comes back."""
        return self._of(path)

    def _of(self, path: str) -> Marks:
        """The marks of the ask that a fact at `path` is about, in whatever epoch."""
        return self._asks.get(path.split("/", 1)[-1] if path.startswith("epoch:") else path, {})

    def _sensitive(self, kind: str, path: str, said: dict[str, Json]) -> Iterator[tuple[Json, Places]]:
        """Each part of a fact that may be sensitive, with where it is."""
        for action in actions_in(said):
            yield action.get("data"), marks_in(action.get("sensitive")).get("data", ())
        yield said.get("value"), self._of(path).get("value", ())
        for what in ("input", "output"):
            yield said.get(what), self._whole.get(what, ())
        if kind == "received":
            yield said.get("data"), self._events.get(str(said.get("type")), ())
        for event in events_in(said):
            yield event.get("data"), self._events.get(str(event.get("type")), ())

    def _is_elsewhere(self, fact: Line) -> bool:
        """Whether something sensitive of a fact is in the payload store, where nobody looks who shows it."""
        named: Json = fact.data.get(OBJECTS)
        if not named:
            return False
        if not isinstance(named, dict):
            return True
        asked = {
            f"{name}.data": marks_in(fact.data[name].get("sensitive"))
            for name in ("args", "undo")
            if isinstance(fact.data.get(name), dict)
        }
        own = {"value": self._of(fact.path), "input": self._whole, "output": self._whole, **asked}
        return any(own.get(part, ALL).get(part.rpartition(".")[2]) for part in cast("dict[str, Json]", named))

    def _shown(self, fact: Line) -> Line:
        said = self._parts_shown(fact.kind, fact.path, fact.data)
        return fact._replace(
            data={name: self.text.data(item) if name in FREE else item for name, item in said.items()}
        )

    def _parts_shown(self, kind: str, path: str, said: dict[str, Json]) -> dict[str, Json]:
        said = dict(said)
        for name in ("args", "undo"):
            if isinstance(said.get(name), dict):
                action = cast("dict[str, Json]", said[name])
                places = marks_in(action.get("sensitive")).get("data", ())
                said[name] = {**action, **with_shown(action, "data", places)}
        said |= with_shown(said, "value", self._of(path).get("value", ()))
        for what in ("input", "output"):
            said |= with_shown(said, what, self._whole.get(what, ()))
        if kind == "received":
            said |= with_shown(said, "data", self._events.get(str(said.get("type")), ()))
        if events_in(said):
            said["events"] = [
                {**event, **with_shown(event, "data", self._events.get(str(event.get("type")), ()))}
                for event in events_in(said)
            ]
        if self._of(path) and isinstance(said.get("error"), dict):
            error = cast("dict[str, Json]", said["error"])
            said["error"] = {name: REDACTED if name in FOREIGN else item for name, item in error.items()}
        if self._of(path) and "left" in said:
            said["left"] = REDACTED
        return said


def with_shown(said: Mapping[str, Json], what: str, places: Places) -> dict[str, Json]:
    return {what: redacted(said[what], places)} if places and what in said else {}


def actions_in(said: Mapping[str, Json]) -> Iterable[dict[str, Json]]:
    return [said[name] for name in ("args", "undo") if isinstance(said.get(name), dict)]


def events_in(said: Mapping[str, Json]) -> list[dict[str, Json]]:
    found = said.get("events")
    return (
        [one for one in cast("list[Json]", found) if isinstance(one, dict)] if isinstance(found, list) else []
    )
