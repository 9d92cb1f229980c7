"""JSON Schema, as far as contracts of events need it: what pydantic writes, and what people write by hand.

The dialect is 2020-12, without what reaches beyond one document or one value: no remote references, no `if`, no
`unevaluated…`, no `$dynamicRef`. A schema with a keyword that is not known here is refused when it is registered, since
one that is passed over would let pass what it forbids. `format` says what is meant, and is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from contracts.errors import ContractViolation, shown
from contracts.json_places import pointer
from contracts.limits import (
    PROBLEMS_MAX,
    SCHEMA_DEPTH_MAX,
    SCHEMA_PATTERN_CHARACTERS_MAX,
    SCHEMA_STEPS_MAX,
)
from contracts.strict_json import Json, canonical

Place = tuple[str | int, ...]
Schema = Mapping[str, Any]

SAID_ONLY: Final = frozenset(
    {
        *(
            "$schema",
            "$id",
            "$comment",
            "$defs",
            "definitions",
            "title",
            "description",
            "default",
            "examples",
        ),
        *(
            "deprecated",
            "readOnly",
            "writeOnly",
            "format",
            "discriminator",
            "contentEncoding",
            "contentMediaType",
        ),
    }
)
"""Keywords that say something and forbid nothing."""
TYPES: Final[Mapping[str, Callable[[Json], bool]]] = {
    "null": lambda it: it is None,
    "boolean": lambda it: isinstance(it, bool),
    "object": lambda it: isinstance(it, dict),
    "array": lambda it: isinstance(it, list),
    "string": lambda it: isinstance(it, str),
    "number": lambda it: isinstance(it, int | float) and not isinstance(it, bool),
    "integer": lambda it: (
        (isinstance(it, int) and not isinstance(it, bool)) or (isinstance(it, float) and it.is_integer())
    ),
}


class SchemaInvalid(ContractViolation):
    """A schema is none that can be checked here; the message names the place."""

    code = "schema-invalid"
    http_status = 422


class Violated(Exception):
    """A value does not fit; each problem is a place in it and what was expected there."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class Checker:
    """One schema. Raises SchemaInvalid for what it does not know."""

    def __init__(self, schema: Json) -> None:
        self._root = schema
        self._steps = 0
        self._check_schema(schema, ())

    def check(self, value: Json) -> None:
        """Raises Violated, with the first places that do not fit."""
        self._steps = 0
        problems: list[str] = []
        for place, expected in self._faults(self._root, value, (), 0):
            problems.append(f"{pointer(place)}: expected {expected}")
            if len(problems) == PROBLEMS_MAX:
                break
        if problems:
            raise Violated(problems)

    def _faults(self, schema: Json, value: Json, place: Place, depth: int) -> Iterator[tuple[Place, str]]:
        self._steps += 1
        if self._steps > SCHEMA_STEPS_MAX or depth > SCHEMA_DEPTH_MAX:
            yield place, "a value that is simpler to check"
            return
        if isinstance(schema, bool):
            if not schema:
                yield place, "nothing"
            return
        for keyword, argument in schema.items():
            if keyword == "$ref":
                yield from self._faults(self._at(argument), value, place, depth + 1)
            elif keyword in COMBINED:
                yield from self._combined(keyword, argument, value, place, depth)
            elif keyword in PARTS:
                yield from self._parts(keyword, schema, value, place, depth)
            elif keyword in RULES and (fault := RULES[keyword](argument, value)):
                yield place, fault

    def _fits(self, schema: Json, value: Json, place: Place, depth: int) -> bool:
        return next(self._faults(schema, value, place, depth + 1), None) is None

    def _combined(
        self, keyword: str, argument: Json, value: Json, place: Place, depth: int
    ) -> Iterator[tuple[Place, str]]:
        if keyword == "allOf":
            for each in argument:
                yield from self._faults(each, value, place, depth + 1)
            return
        if keyword == "not":
            if self._fits(argument, value, place, depth):
                yield place, "another value"
            return
        fitting = sum(self._fits(each, value, place, depth) for each in argument)
        if fitting == 0:
            faults = [next(self._faults(each, value, place, depth + 1)) for each in argument]
            # The alternative that got furthest is the one that was meant.
            yield max(faults, key=lambda fault: len(fault[0])) if faults else (place, "nothing")
        elif keyword == "oneOf" and fitting > 1:
            yield place, "what fits one alternative only"

    def _parts(
        self, keyword: str, schema: Schema, value: Json, place: Place, depth: int
    ) -> Iterator[tuple[Place, str]]:
        """Members or items, each with the schema that is theirs."""
        argument = schema[keyword]
        found: list[tuple[Json, Json, str | int]] = []
        if isinstance(value, dict):
            members = cast("dict[str, Json]", value)
            known: Schema = schema.get("properties", {})
            if keyword == "properties":
                found = [(argument[name], members[name], name) for name in argument if name in members]
            elif keyword == "additionalProperties":
                found = [(argument, members[name], name) for name in members if name not in known]
        elif isinstance(value, list):
            items = cast("list[Json]", value)
            first = len(schema.get("prefixItems", ()))
            if keyword == "prefixItems":
                found = [(each, items[at], at) for at, each in enumerate(argument[: len(items)])]
            elif keyword == "items":
                found = [(argument, item, at) for at, item in enumerate(items[first:], first)]
        for each, part, step in found:
            yield from self._faults(each, part, (*place, step), depth + 1)

    def _at(self, reference: str) -> Json:
        found: Any = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            found = found[step.replace("~1", "/").replace("~0", "~")]
        return found

    def _check_schema(self, schema: Json, place: Place) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict) or len(place) > SCHEMA_DEPTH_MAX:
            raise SchemaInvalid(f"schema: expected an object or a boolean at {pointer(place)}")
        for keyword, argument in cast("dict[str, Json]", schema).items():
            self._check_keyword(keyword, argument, (*place, keyword))

    def _check_keyword(self, keyword: str, argument: Json, at: Place) -> None:
        if keyword in SCHEMAS_BY_NAME | SCHEMAS_IN_A_ROW:
            self._check_each(argument, dict if keyword in SCHEMAS_BY_NAME else list, at)
        elif keyword in {"not", "items", "additionalProperties"}:
            self._check_schema(argument, at)
        elif keyword == "$ref":
            if not self._is_reference(argument):
                raise SchemaInvalid(
                    f"schema: expected a reference into it at {pointer(at)}, found {shown(argument)}"
                )
        elif keyword in FORMS:
            if not FORMS[keyword](argument):
                raise SchemaInvalid(
                    f"schema: expected another value at {pointer(at)}, found {shown(argument)}"
                )
        elif keyword not in SAID_ONLY:
            raise SchemaInvalid(f"schema: expected keywords that are checked, found {pointer(at)}")

    def _check_each(self, schemas: Json, kind: type, place: Place) -> None:
        if not isinstance(schemas, kind):
            raise SchemaInvalid(f"schema: expected {kind.__name__} at {pointer(place)}")
        found: Any = schemas
        each = found.items() if kind is dict else enumerate(found)
        for name, schema in each:
            self._check_schema(schema, (*place, name))

    def _is_reference(self, reference: Json) -> bool:
        if not (isinstance(reference, str) and reference.startswith("#")):
            return False
        try:
            self._at(reference)
        except (KeyError, TypeError):
            return False
        return True


SCHEMAS_BY_NAME: Final = frozenset({"$defs", "definitions", "properties"})
SCHEMAS_IN_A_ROW: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})


def type_fault(names: Json, value: Json) -> str | None:
    wanted = [names] if isinstance(names, str) else names
    return None if any(TYPES[name](value) for name in wanted) else " or ".join(wanted)


def same(one: Json, other: Json) -> bool:
    """JSON has numbers, and no whole ones beside them; booleans are none."""
    return isinstance(one, bool) == isinstance(other, bool) and (one == other)


def unique_fault(wanted: Json, value: Json) -> str | None:
    if not wanted or not isinstance(value, list):
        return None
    items = [canonical(item) for item in cast("list[Json]", value)]
    return "items that differ" if len(set(items)) < len(items) else None


def required_fault(names: Json, value: Json) -> str | None:
    if not isinstance(value, dict):
        return None
    missing = [name for name in names if name not in value]
    return f"a member {shown(missing[0])}" if missing else None


@lru_cache(maxsize=512)
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def pattern_fault(pattern: Json, value: Json) -> str | None:
    if not isinstance(value, str):
        return None
    if len(value) > SCHEMA_PATTERN_CHARACTERS_MAX:
        return f"at most {SCHEMA_PATTERN_CHARACTERS_MAX} characters where there is a pattern"
    return None if compiled(pattern).search(value) else f"text like {shown(pattern)}"


def multiple_fault(of: Json, value: Json) -> str | None:
    return None if not is_number(value) or value % of == 0 else f"a multiple of {of}"


def is_number(value: Json) -> bool:
    return TYPES["number"](value)


def is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_names(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(it, str) for it in cast("list[Json]", value))


def is_type(value: Json) -> bool:
    names = [value] if isinstance(value, str) else value
    return is_names(names) and bool(names) and all(name in TYPES for name in names)


def is_pattern(value: Json) -> bool:
    try:
        compiled(value)
    except (re.error, TypeError):
        return False
    return True


def bounded(kind: type | tuple[type, ...], size: Callable[[Any], float], told: str, *, most: bool) -> Rule:
    def fault(bound: Json, value: Json) -> str | None:
        if not isinstance(value, kind) or isinstance(value, bool):
            return None
        found = size(value)
        return None if (found <= bound if most else found >= bound) else told.format(bound)

    return fault


Rule = Callable[[Json, Json], str | None]
COMBINED: Final = frozenset({"allOf", "anyOf", "oneOf", "not"})
PARTS: Final = frozenset({"properties", "additionalProperties", "items", "prefixItems"})
NUMBER: Final = (int, float)
RULES: Final[Mapping[str, Rule]] = {
    "type": type_fault,
    "enum": lambda of, it: None if any(same(it, each) for each in of) else f"one of {shown(of)}",
    "const": lambda of, it: None if same(it, of) else shown(of),
    "required": required_fault,
    "uniqueItems": unique_fault,
    "pattern": pattern_fault,
    "multipleOf": multiple_fault,
    "minLength": bounded(str, len, "at least {} characters", most=False),
    "maxLength": bounded(str, len, "at most {} characters", most=True),
    "minItems": bounded(list, len, "at least {} items", most=False),
    "maxItems": bounded(list, len, "at most {} items", most=True),
    "minProperties": bounded(dict, len, "at least {} members", most=False),
    "maxProperties": bounded(dict, len, "at most {} members", most=True),
    "minimum": bounded(NUMBER, lambda it: it, "{} or more", most=False),
    "maximum": bounded(NUMBER, lambda it: it, "{} or less", most=True),
    "exclusiveMinimum": lambda of, it: None if not is_number(it) or it > of else f"more than {of}",
    "exclusiveMaximum": lambda of, it: None if not is_number(it) or it < of else f"less than {of}",
}
FORMS: Final[Mapping[str, Callable[[Json], bool]]] = {
    "type": is_type,
    "enum": lambda it: isinstance(it, list),
    "const": lambda _: True,
    "required": is_names,
    "uniqueItems": lambda it: isinstance(it, bool),
    "pattern": is_pattern,
    "multipleOf": lambda it: is_number(it) and it > 0,
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), is_count
    ),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), is_number),
}
