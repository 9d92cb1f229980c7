"""Conditions about attributes as people write them: `stage=paid`, `amount>=100`, `paid_at<2026-12-01T00:00Z`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, ClassVar, Final, cast

from contracts import strict_json
from contracts.errors import ContractViolation, MalformedJson, shown
from contracts.limits import ATTRIBUTE_NAME_BYTES_MAX, CONDITIONS_MAX
from orchestrator.core.attributes import NAME, checked
from orchestrator.core.errors import UsageError
from orchestrator.store.attributes import Condition, Operator

PARTS: Final = re.compile(r"([^=!<>]*)(>=|<=|!=|=|>|<)(.*)", re.DOTALL)
NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
TIME: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?(Z|[+-][0-9]{2}:[0-9]{2})"
)
WORD: Final = re.compile(r"[^\W\d][^\s\"'=!<>]*")
"""A text that needs no quotes: it begins with a letter or an underscore."""


class ConditionInvalid(ContractViolation):
    """No condition about attributes can be this."""

    code: ClassVar[str] = "condition-invalid"


def condition(text: str) -> Condition:
    """The condition that `text` says: name, operator (`= != >= <= > <`), value, without spaces between them.

    A value is `true` or `false`, a number as JSON writes it, a time with its zone (`2026-12-01T00:00Z`), or a text: a
    word that begins with a letter, or anything in double quotes, as JSON writes it. Raises ConditionInvalid.
    """
    found = PARTS.fullmatch(text)
    if found is None:
        raise ConditionInvalid(
            f"condition {shown(text)}: expected NAME=VALUE, or one of != >= <= > < instead of =, found no operator"
        )
    name, operator, value = found[1], cast("Operator", found[2]), read(found[3], text)
    return checked_condition(Condition(name, operator, value), text)


def checked_condition(given: Condition, text: str | None = None) -> Condition:
    """`given`, if it can be asked. Raises ConditionInvalid."""
    what = f"condition {shown(text or f'{given.name}{given.operator}{given.value}')}"
    if not NAME.fullmatch(given.name) or len(given.name) > ATTRIBUTE_NAME_BYTES_MAX:
        raise ConditionInvalid(
            f"{what}: expected a name of 1 to {ATTRIBUTE_NAME_BYTES_MAX} letters, digits and underscores that begins "
            f"with no digit, found {shown(given.name)}"
        )
    if given.operator not in ("=", "!=", ">=", "<=", ">", "<"):
        raise ConditionInvalid(f"{what}: expected one of = != >= <= > <, found {shown(given.operator)}")
    if isinstance(given.value, bool) and given.operator not in ("=", "!="):
        raise ConditionInvalid(f"{what}: true and false are compared by = and != only")
    try:
        checked(given.name, given.value)
    except UsageError as error:
        raise ConditionInvalid(f"{what}: {error}") from None
    return given


def conditions(given: Sequence[Condition | str]) -> list[Condition]:
    """All of `given`, each as it is or as text. Raises ConditionInvalid, also for too many."""
    if len(given) > CONDITIONS_MAX:
        raise ConditionInvalid(f"conditions: expected at most {CONDITIONS_MAX}, found {len(given)}")
    return [condition(one) if isinstance(one, str) else checked_condition(one) for one in given]


def read(value: str, text: str) -> str | int | float | bool | datetime:
    """The value that stands behind the operator in `text`."""
    if value in ("true", "false"):
        return value == "true"
    if value.startswith('"'):
        return quoted(value, text)
    if NUMBER.fullmatch(value):
        return float(value) if any(sign in value for sign in ".eE") else int(value)
    if TIME.fullmatch(value):
        return moment(value, text)
    if WORD.fullmatch(value):
        return value
    raise ConditionInvalid(
        f"condition {shown(text)}: expected a word, a number, true, false, a time with its zone such as "
        f"2026-12-01T00:00Z, or a text in double quotes, found {shown(value) if value else 'nothing'}"
    )


def quoted(value: str, text: str) -> str:
    try:
        found: Any = strict_json.decode(value, what="value")
    except MalformedJson:
        found = None
    if not isinstance(found, str):
        raise ConditionInvalid(
            f"condition {shown(text)}: expected one text in double quotes, as JSON writes it, found {shown(value)}"
        )
    return found


def moment(value: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(value)
    except ValueError as error:
        raise ConditionInvalid(
            f"condition {shown(text)}: expected a time, found {shown(value)}: {error}"
        ) from None
