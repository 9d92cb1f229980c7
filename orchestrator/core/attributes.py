"""What an execution says about itself: names with a text, a number, yes or no, or a time; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias, cast

from contracts.errors import shown
from contracts.limits import ATTRIBUTE_NAME_BYTES_MAX, ATTRIBUTE_TEXT_BYTES_MAX, ATTRIBUTES_MAX
from orchestrator.core.errors import UsageError
from orchestrator.core.names import is_name

Json = Any
Value: TypeAlias = "str | int | float | bool | datetime"

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
INTEGER_MAX: Final = 2**63 - 1
"""The largest whole number, and its negative the smallest."""


def said(attributes: Mapping[str, Value | None]) -> dict[str, Json]:
    """`attributes` as a journal keeps them: a time is `{"time": …}`, and what is to be removed is null.

    Raises UsageError for a name or a value that cannot be one.
    """
    if not attributes:
        raise UsageError("ctx.publish(): expected at least one attribute, as in publish(stage='paid')")
    return {checked_name(name): checked(name, value) for name, value in attributes.items()}


def checked_name(name: str) -> str:
    if not NAME.fullmatch(name) or len(name) > ATTRIBUTE_NAME_BYTES_MAX:
        raise UsageError(
            f"attribute {shown(name)}: expected a name of 1 to {ATTRIBUTE_NAME_BYTES_MAX} letters, digits and "
            f"underscores that begins with no digit"
        )
    return name


def checked(name: str, value: object) -> Json:
    match value:
        case None | bool():
            return value
        case int() if abs(value) <= INTEGER_MAX:
            return value
        case float() if math.isfinite(value):
            return value
        case str() if not value or is_name(value, ATTRIBUTE_TEXT_BYTES_MAX):
            return str(value)
        case datetime() if value.tzinfo is not None:
            return {"time": value.astimezone(UTC).isoformat()}
        case int():
            expected = "a whole number of 64 bits"
        case float():
            expected = "a finite number"
        case str():
            expected = f"at most {ATTRIBUTE_TEXT_BYTES_MAX} bytes of printable text"
        case datetime():
            expected = "a time with a zone"
        case _:
            expected = "a text, a number, True or False, a time, or None"
    raise UsageError(f"attribute {name}: expected {expected}, found {shown(value)}")


def merged(before: Mapping[str, Json], published: Mapping[str, Json]) -> dict[str, Json]:
    """The attributes `before` after more were `published`: what is null there is gone."""
    return {name: value for name, value in {**before, **published}.items() if value is not None}


def check_room(attributes: Mapping[str, Json]) -> None:
    """Raises UsageError for more attributes than one execution may have."""
    if len(attributes) > ATTRIBUTES_MAX:
        raise UsageError(
            f"ctx.publish: expected at most {ATTRIBUTES_MAX} attributes of one execution, found {len(attributes)}; "
            f"None removes one"
        )


def value_of(data: Json) -> Value:
    """What was published, from what the journal keeps of it."""
    if isinstance(data, dict):
        return datetime.fromisoformat(cast("dict[str, str]", data)["time"])
    return data
