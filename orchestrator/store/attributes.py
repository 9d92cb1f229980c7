"""Conditions about attributes, as parts of a statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, LiteralString, TypeAlias

Operator: TypeAlias = Literal["=", "!=", ">=", "<=", ">", "<"]


@dataclass(frozen=True, slots=True)
class Condition:
    """That an execution has the attribute `name`, and that its value stands so to `value`, which is of the same type;
    with `!=`, that it is another value, of whatever type.
    """

    name: str
    operator: Operator
    value: str | int | float | bool | datetime


HAS: Final[LiteralString] = """
       and exists (select 1
                     from waypost.attribute a
                    where a.tenant_id = e.tenant_id
                      and a.execution_id = e.execution_id
                      and a.name = %(name_{n})s
                      and """

SUCH: Final[Mapping[tuple[type, Operator], LiteralString]] = {
    (str, "="): "a.text = %(value_{n})s::text)",
    (str, "!="): "a.text is distinct from %(value_{n})s::text)",
    (str, ">="): "a.text >= %(value_{n})s::text)",
    (str, "<="): "a.text <= %(value_{n})s::text)",
    (str, ">"): "a.text > %(value_{n})s::text)",
    (str, "<"): "a.text < %(value_{n})s::text)",
    (int, "="): "a.number = %(value_{n})s::numeric)",
    (int, "!="): "a.number is distinct from %(value_{n})s::numeric)",
    (int, ">="): "a.number >= %(value_{n})s::numeric)",
    (int, "<="): "a.number <= %(value_{n})s::numeric)",
    (int, ">"): "a.number > %(value_{n})s::numeric)",
    (int, "<"): "a.number < %(value_{n})s::numeric)",
    (bool, "="): "a.flag = %(value_{n})s::bool)",
    (bool, "!="): "a.flag is distinct from %(value_{n})s::bool)",
    (datetime, "="): "a.moment = %(value_{n})s::timestamptz)",
    (datetime, "!="): "a.moment is distinct from %(value_{n})s::timestamptz)",
    (datetime, ">="): "a.moment >= %(value_{n})s::timestamptz)",
    (datetime, "<="): "a.moment <= %(value_{n})s::timestamptz)",
    (datetime, ">"): "a.moment > %(value_{n})s::timestamptz)",
    (datetime, "<"): "a.moment < %(value_{n})s::timestamptz)",
}
"""How a value of a type is compared: each with its own column, so that an index serves it."""

NUMBERS: Final[Sequence[LiteralString]] = ("0", "1", "2", "3", "4", "5", "6", "7")


def clauses(where: Sequence[Condition]) -> tuple[LiteralString, dict[str, object]]:
    """What `where` asks of the execution `e`, as the end of a statement, and its parameters."""
    text: LiteralString = ""
    parameters: dict[str, object] = {}
    for n, condition in zip(NUMBERS, where, strict=False):
        text += (HAS + SUCH[compared(condition.value), condition.operator]).format(n=n)
        parameters[f"name_{n}"] = condition.name
        parameters[f"value_{n}"] = (
            str(condition.value) if compared(condition.value) is int else condition.value
        )
    return text, parameters


def compared(value: object) -> type:
    """The type as which `value` is compared: numbers are one."""
    return next(kind for kind in (bool, str, datetime, int) if isinstance(value, kind) or kind is int)
