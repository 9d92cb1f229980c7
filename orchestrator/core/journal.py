"""What a program and the world have said: what was recorded, and what is new."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, cast

from contracts import strict_json
from contracts.errors import TooLarge
from contracts.limits import PAYLOAD_BYTES_MAX
from orchestrator.core.ask import Ask
from orchestrator.core.errors import LimitExceeded, NonDeterminism
from orchestrator.core.fact import BYSTANDERS, Fact, saying
from orchestrator.core.follows import Follows, LeftChild, LetGo, TakenBack
from orchestrator.core.past import Past

Json = Any

BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Journal:
    """Facts in order: `position` and `at` are the last one's, `new` are those that are not yet committed; `before` came
    before the epoch that runs, and count for no limit.

    `follows` is what else follows from `new`. `past` is what was recorded, while the program runs through it: then what
    it says is compared, and is new where nothing was recorded. Once `closed`, nothing is written down any more.
    """

    __slots__ = (
        "at", "before", "closed", "facts_max", "follows", "new", "past", "payload_max", "position", "present",
        "sent_max",
    )  # fmt: skip

    def __init__(self, *, facts_max: int, payload_max: int, sent_max: int) -> None:
        self.facts_max = facts_max
        self.payload_max = payload_max
        self.sent_max = sent_max
        self.position = 0
        self.before = 0
        self.at = BEGINNING
        self.present = BEGINNING
        self.new: list[Fact] = []
        self.follows = Follows()
        self.past: Past | None = None
        self.closed = False

    # ---- the program speaks --------------------------------------------------------------------------------

    def produce(self, kind: str, path: str, data: dict[str, Json], text: str | None = None) -> Fact:
        """Record what the program says; in the past, check that it said so then.

        Raises NonDeterminism, LimitExceeded, and NotEncodable or TooLarge for what cannot be stored.
        """
        return self.recall(kind, path, data) or self.say(kind, path, data, text)

    def recall(self, kind: str, path: str, data: dict[str, Json]) -> Fact | None:
        """What was recorded when the program said this; None when that is new. The recorded fact wins."""
        if self.past is None:
            return None
        recorded = self.recall_if_said(kind, path, data)
        other = None if recorded is not None else self.recorded()
        if other is not None:
            raise NonDeterminism(
                f"the journal has {saying(other.kind, other.path, other.data)} at position "
                f"{other.position}; the program says {saying(kind, path, data)}"
            )
        return recorded

    def recall_if_said(self, kind: str, path: str, data: dict[str, Json]) -> Fact | None:
        """What was recorded when the program said this; None when the journal has something else here, or nothing."""
        past = self.past
        recorded = self.recorded() if past is not None else None
        if (
            past is None
            or recorded is None
            or recorded.says() != (kind, path, data.get("kind"), data.get("name"))
        ):
            return None
        past.take()
        self.position = recorded.position
        return recorded

    def say(self, kind: str, path: str, data: dict[str, Json], text: str | None = None) -> Fact:
        """A new fact; `text` is `data` in JSON, where that is known."""
        if self.closed:
            return Fact(self.position, kind, path, data, self.at)
        if self.position - self.before >= self.facts_max:
            raise LimitExceeded(f"facts_max: {self.facts_max} facts reached at {path}")
        text = text or self.encoded(
            data, what=f"{kind} {path}"
        )  # first: what cannot be stored takes no position
        self.position += 1
        fact = Fact(self.position, kind, path, data, self.at, text)
        self.new.append(fact)
        return fact

    def recorded(self) -> Fact | None:
        """The next recorded fact that the program should see. A worker's death on the way to it counts."""
        past = self.past
        if past is None:
            return None
        fact = past.recorded()
        self.position = max(self.position, past.position)
        while past.deaths:
            past.on_death(past.deaths.pop(0))
        return fact

    def due_in(self, span: timedelta) -> str:
        """When `span` has passed from now on, as facts say it."""
        return (max(self.at, self.present) + span).isoformat()

    # ---- the world speaks ----------------------------------------------------------------------------------

    def hear(self, kind: str, path: str, data: dict[str, Json], text: str, actor: str) -> Fact:
        """A new fact that drives the program. Raises LimitExceeded."""
        self.check_room()
        self.position += 1
        fact = Fact(self.position, kind, path, data, self.at, text, actor)
        self.new.append(fact)
        return fact

    def check_room(self) -> None:
        """Raises LimitExceeded when no further fact may drive the program."""
        if self.position - self.before >= self.facts_max:
            count = self.position - self.before
            raise LimitExceeded(f"facts_max: the journal has {count} facts, at most {self.facts_max}")

    def remark(self, kind: str, path: str, data: dict[str, Json], at: datetime, actor: str) -> None:
        """A new fact for people and for the projection; the program does not see it."""
        assert kind in BYSTANDERS, kind
        self.position += 1
        self.at = max(self.at, at)
        self.new.append(Fact(self.position, kind, path, data, self.at, self.encoded(data, what=kind), actor))

    # ---- what is new ---------------------------------------------------------------------------------------

    def take_new(self) -> list[Fact]:
        """The facts that are not yet committed; they are the caller's from now on."""
        facts, self.new = self.new, []
        return facts

    def is_new(self, fact: Fact) -> bool:
        """Whether `fact`, the last one, is not yet in the journal."""
        return bool(self.new) and self.new[-1] is fact

    def is_last(self, fact: Fact) -> bool:
        """Whether nothing was said after `fact`: what follows from it is to be written now."""
        return self.is_new(fact) or self.past is None or not self.past.has_more

    def takes_back(self, ask: Ask, position: int) -> None:
        """What `ask` left is not needed any more: so says the fact at `position`, which is new."""
        if ask.is_child:
            self.follows.add(LeftChild(ask.path, ask.args["execution"], position))
        if ask.is_sent and ask.asked_at is not None:
            at = ask.sent_at or ask.asked_at
            self.follows.add(TakenBack(ask.path, at, position, task=ask.is_task))

    def lets_go(self, path: str, *, position: int, asked: int = 0) -> None:
        """The mutex that was asked for at `path` is free for others: so says the fact at `position`."""
        self.follows.add(LetGo(path, asked, position))

    def forget_beyond(self, position: int, kept: int) -> None:
        """Nothing that a stopped program said counts, nor what follows from it: it will say it again.

        The first `kept` of what is new stay.
        """
        del self.new[kept:]
        self.follows.forget_beyond(position)
        self.position = position

    def check_complete(self, known: int) -> None:
        """Raises NonDeterminism when more than the first `known` of what is new was said in the past. What stands
        behind the fresh marker of a patch is meant to be.
        """
        if len(self.new) > known:
            first = self.new[known]
            if first.data.get("kind") == "patched":
                return
            raise NonDeterminism(
                f"the journal ends at position {first.position - 1}; "
                f"the program says {saying(first.kind, first.path, first.data)} before its end"
            )

    def encoded(self, data: dict[str, Json], *, what: str) -> str:
        """`data` in JSON. Raises NotEncodable, and TooLarge for a part beyond `payload_max` bytes; beyond `sent_max`
        for one that leaves in a message, and beyond PAYLOAD_BYTES_MAX for one that cannot be by reference.
        """
        text = strict_json.encode(data, what=what)
        if len(text) * 4 > PAYLOAD_BYTES_MAX:
            for part in ("args", "undo", "probe", "value", "input", "output", "error"):
                if part in data:
                    self._check_size(part, data, what)
        return text

    def _check_size(self, part: str, data: dict[str, Json], what: str) -> None:
        where = whereabouts(part, data)
        most = {"kept": self.payload_max, "sent": self.sent_max}.get(where, PAYLOAD_BYTES_MAX)
        try:
            strict_json.encode(data[part], what=f"{what}: {part}", bytes_max=most)
        except TooLarge as error:
            way = "" if most > PAYLOAD_BYTES_MAX else WAYS[where]
            raise TooLarge(error.what, error.size, most, way=way) from None


WAYS: Final = {
    "kept": "with WAYPOST_PAYLOAD_STORE it may have 16 MiB",
    "sent": "with WAYPOST_PAYLOAD_STORE and WAYPOST_SECRET_KEY for the worker it may have 16 MiB",
    "row": "",
}
"""How a part could be larger, by where it is."""


def whereabouts(part: str, data: dict[str, Json]) -> Literal["kept", "sent", "row"]:
    """Where a part of a fact goes: it is kept by us, and may be by reference; it is sent in a message, and may be named
    by it; or it lies in a row, for people or for whoever searches.
    """
    if part in ("value", "input", "output"):
        return "kept"
    if part not in ("args", "undo"):
        return "row"
    kind = data.get("kind")
    if part == "args" and kind in ("child", "start", "emit"):
        return "sent" if kind == "emit" else "kept"
    action: Json = data[part]
    does = cast("dict[str, Json]", action).get("do") if isinstance(action, dict) else None
    return "sent" if does == "call" else "kept" if does in ("step", "task") else "row"
