"""What the effect ledger wrote down, as tests read it."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = Any


@dataclass(frozen=True, slots=True)
class Arrival:
    """A command that reached a service: the `nth` under this id. `headers` have lower-case names."""

    name: str
    id: str
    nth: int
    headers: dict[str, str]
    sha256: str
    body: bytes

    @property
    def event(self) -> dict[str, Json]:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Effect:
    """What a service did, once for each key.

    `what` is done, refused or undone; "nothing to undo" (its command was refused), "undone before done" (its
    command never came, and would be refused).
    """

    what: str
    type: str
    order: str
    key: str
    id: str
    undoes: str = ""
    known: bool | None = None

    def __str__(self) -> str:
        return f"{self.what} {self.type}"


@dataclass(frozen=True, slots=True)
class Post:
    """One try of a reply. `status` is None when no answer came, and `error` says what did instead; `sent`: after the
    whole request was written.
    """

    id: str
    causation: str
    sha256: str
    sent: bool
    status: int | None
    answer: str
    inbox: str
    error: str

    @property
    def is_cut(self) -> bool:
        """Whether the connection ended under a reply that was sent whole: the receiver died over it."""
        return self.sent and self.status is None and self.error != "TimeoutError"


@dataclass(frozen=True, slots=True)
class Book:
    """Everything in the order in which it happened."""

    arrivals: list[Arrival]
    effects: list[Effect]
    posts: list[Post]
    answers: dict[str, list[int | str]]
    """By message id: a status for each arrival, or `cut` or `silence`."""
    unproven: list[str]
    """Ids of arrivals whose signature was wrong."""

    @classmethod
    def read(cls, file: Path) -> Book:
        book = cls([], [], [], defaultdict(list), [])
        for text in file.read_bytes().splitlines(keepends=True):
            if text.endswith(b"\n"):
                book._add(json.loads(text))
        return book

    def _add(self, line: dict[str, Json]) -> None:
        what = line.pop("what")
        line.pop("line", None)
        line.pop("time", None)
        match what:
            case "arrived":
                line["body"] = base64.b64decode(line["body"])
                self.arrivals.append(Arrival(**line))
            case "answered":
                self.answers[line["id"]].append(line["answer"])
            case "posted":
                self.posts.append(Post(**line))
            case "published":
                pass
            case "unproven":
                self.unproven.append(line["id"])
            case _:
                line.pop("code", None)
                self.effects.append(Effect(what, **line))

    def effects_of(self, order: str) -> list[str]:
        """What was done for an order, in words and in its order."""
        return [str(effect) for effect in self.effects if effect.order == order]

    def arrivals_of(self, order: str, kind: str) -> list[Arrival]:
        """The commands of type `kind` that came for an order."""
        return [
            one for one in self.arrivals if (one.event["type"], one.event["data"]["order"]) == (kind, order)
        ]
