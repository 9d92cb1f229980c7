"""What became of something that was asked for, in the one form that mail carries and facts store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from contracts.errors import MalformedJson, shown
from contracts.strict_json import Json

Kind = Literal["done", "refused", "failed", "unknown", "timed_out"]
KINDS: Final = frozenset(get_args(Kind))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One of: `done` with its value; `refused`, definitely not done; `failed`, gave up and may have acted;
    `unknown`, nobody can say; `timed_out`, no answer in time.

    `code` is for programs, `detail` for people, `data` whatever the service added.
    """

    kind: Kind
    value: Json = None
    code: str = ""
    detail: str = ""
    data: Json = None

    def as_json(self) -> dict[str, Json]:
        if self.kind == "done":
            return {"outcome": "done", "value": self.value}
        return {"outcome": self.kind, "error": {"code": self.code, "detail": self.detail, "data": self.data}}

    @classmethod
    def from_json(cls, stored: Json) -> Outcome:
        """Reads also the flat form that the database's own functions write: `{"outcome", "code"}`.

        Raises MalformedJson when `stored` is neither.
        """
        if not isinstance(stored, Mapping):
            raise MalformedJson("outcome", "the top", shown(stored))
        members = cast("Mapping[str, Json]", stored)
        kind = cast("Kind", members.get("outcome"))
        if not isinstance(kind, str) or kind not in KINDS:  # pyright: ignore[reportUnnecessaryIsInstance]  # anything can be stored
            raise MalformedJson("outcome", "/outcome", shown(kind))
        if kind == "done":
            return cls("done", value=members.get("value"))
        error = members.get("error", members)
        if not isinstance(error, Mapping):
            raise MalformedJson("outcome", "/error", shown(error))
        facts = cast("Mapping[str, Json]", error)
        return cls(
            kind,
            code=text_of(facts.get("code")),
            detail=text_of(facts.get("detail")),
            data=facts.get("data"),
        )


def text_of(value: Json) -> str:
    return value if isinstance(value, str) else ""
