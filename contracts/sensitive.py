"""Fields whose values nobody is shown: declared once, on the contract, and `[redacted]` wherever people read.

    class Charge(Command[Charged], endpoint="payments", type="payment.charge"):
        card: Annotated[str, Sensitive]

`places_of` finds such fields in the JSON Schema of a type, so whatever pydantic understands is understood here:
nested models, lists, unions. A place is a JSON pointer in which `*` stands for any member or item; the empty one is
the whole value. Whoever shows data has places and values, and needs no class.

    places_of(Charge)                                    ("/card",)
    redacted({"order": "1", "card": "42…"}, ["/card"])   {"order": "1", "card": "[redacted]"}
    scrubbed("card 42… is stolen", ["42…"])              "card [redacted] is stolen"

Where it is not certain what is sensitive, everything is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, cast, get_type_hints

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema

Json = Any
Places: TypeAlias = tuple[str, ...]

REDACTED: Final = "[redacted]"
KEYWORD: Final = "x-sensitive"
"""What marks a sensitive field in a JSON Schema."""
WHOLE: Final[Places] = ("",)
ANY: Final = "*"
WORD_CHARACTERS: Final = 4
"""A shorter value is only taken for itself where it stands alone, as `17` in `code 17` and not in `2017`."""
VALUES_MAX: Final = 10_000
"""Sensitive values of one execution that texts are searched for; with more, no text is shown."""

known: Final[set[str]] = set()
"""Not empty once some type of this process has a sensitive field; until then nothing is looked for."""


class Sensitive:
    """Marks a field of a contract, of a flow's input or output, or a step's argument or result:
    `Annotated[str, Sensitive]`. The value itself is as without it: it is sent, stored and given to programs.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        known.add(KEYWORD)
        return handler(source)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), KEYWORD: True}


class Lenient(GenerateJsonSchema):
    """A schema of everything; what JSON Schema has no word for is left open."""

    ignored_warning_kinds: set[Any] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # declared so by its base

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:  # noqa: ARG002  # pydantic's signature
        return {}


def places_of(kind: Any) -> Places:
    """Where values of `kind`, a class or an adapter, are sensitive: in any form in which they are read or written.

    What cannot be described is sensitive as a whole.
    """
    if not known:
        return ()
    try:
        return _places_of(kind)
    except TypeError:  # it cannot be hashed
        return places_in(schemas_of(kind))


@lru_cache(maxsize=4096)
def _places_of(kind: Any) -> Places:
    return places_in(schemas_of(kind))


def schemas_of(kind: Any) -> list[JsonSchemaValue]:
    modes: tuple[Literal["validation", "serialization"], ...] = ("validation", "serialization")
    try:
        adapter = cast("TypeAdapter[Any]", kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind))
        return [
            adapter.json_schema(by_alias=by_alias, mode=mode, schema_generator=Lenient)
            for mode in modes
            for by_alias in (True, False)
        ]
    except (PydanticUserError, RecursionError, NameError):
        return [{KEYWORD: True}]


def places_in(schemas: Iterable[JsonSchemaValue]) -> Places:
    """The places that any of `schemas` marks, those inside others left out."""
    found = {place for schema in schemas for place in walk(schema, schema.get("$defs", {}), "", ())}
    return tuple(sorted(place for place in found if not any(is_inside(place, other) for other in found)))


def is_inside(place: str, other: str) -> bool:
    return place != other and place.startswith(f"{other}/")


def walk(schema: Any, definitions: Mapping[str, Any], place: str, within: tuple[str, ...]) -> Iterator[str]:
    """A model that contains itself has no last place; where it begins again, all is sensitive if any of it is."""
    if not isinstance(schema, dict):
        return
    found = cast("dict[str, Any]", schema)
    if found.get(KEYWORD):
        yield place
        return
    name = str(found.get("$ref", "")).removeprefix("#/$defs/")
    if name in within:
        if KEYWORD in json.dumps(definitions.get(name)):
            yield place
    elif name:
        yield from walk(definitions.get(name), definitions, place, (*within, name))
    for part, where in parts_of(found, place):
        yield from walk(part, definitions, where, within)


def parts_of(schema: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """The schemas inside a schema, each with the place of what it describes."""
    for keyword in ("anyOf", "oneOf", "allOf"):
        yield from ((part, place) for part in schema.get(keyword, ()))
    for index, part in enumerate(schema.get("prefixItems", ())):
        yield part, f"{place}/{index}"
    for member, part in schema.get("properties", {}).items():
        yield part, f"{place}/{step_of(member)}"
    for part in (schema.get("items"), schema.get("additionalProperties")):
        yield part, f"{place}/{ANY}"
    yield from ((part, f"{place}/{ANY}") for part in schema.get("patternProperties", {}).values())


def step_of(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def steps_in(place: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in place.split("/")[1:]]


# ---- functions that steps run ----------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def hints_of(fn: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return get_type_hints(fn, include_extras=True)
    except (NameError, TypeError):
        return {}


def result_places(fn: Callable[..., Any]) -> Places:
    """Where the result of `fn` is sensitive, by its annotation."""
    return places_of(hints_of(fn)["return"]) if known and "return" in hints_of(fn) else ()


def argument_places(names: Iterable[str], fn: Callable[..., Any], args: Sequence[object]) -> Places:
    """Where the arguments of `fn`, as a list, are sensitive: by its annotations, and by what they are."""
    if not known:
        return ()
    hints, found = hints_of(fn), dict[str, None]()
    for index, (name, value) in enumerate(zip(names, args, strict=False)):
        places = (*(places_of(hints[name]) if name in hints else ()), *value_places(value))
        found.update((f"/{index}{place}", None) for place in places)
    return tuple(found)


def value_places(value: object) -> Places:
    """Where `value`, once it is data, is sensitive, by what it is: a model, or models in a list or a dict."""
    if not known:
        return ()
    if isinstance(value, BaseModel):
        return places_of(type(value))
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return tuple(f"/{step_of(str(name))}{place}" for name, item in items for place in value_places(item))
    if isinstance(value, list | tuple | set | frozenset):
        found = {place for item in cast("Iterable[object]", value) for place in value_places(item)}
        return tuple(f"/{ANY}{place}" for place in sorted(found))
    return ()


# ---- showing ---------------------------------------------------------------------------------------------------


def redacted(value: Json, places: Iterable[str]) -> Json:
    """`value` with REDACTED at each of `places` that it has. A copy; null stays null."""
    for place in places:
        value = replaced(value, steps_in(place))
    return value


def replaced(value: Json, steps: Sequence[str]) -> Json:
    if not steps:
        return None if value is None else REDACTED
    step, rest = steps[0], steps[1:]
    if isinstance(value, dict):
        members = cast("dict[str, Json]", value)
        return {name: replaced(item, rest) if step in (ANY, name) else item for name, item in members.items()}
    if isinstance(value, list):
        items = cast("list[Json]", value)
        return [
            replaced(item, rest) if step in (ANY, str(index)) else item for index, item in enumerate(items)
        ]
    return value


def values_at(value: Json, places: Iterable[str]) -> Iterator[str]:
    """The texts and numbers at `places` of `value`, as texts."""
    for place in places:
        yield from values_in(value, steps_in(place))


def values_in(value: Json, steps: Sequence[str]) -> Iterator[str]:
    step, rest = (steps[0], steps[1:]) if steps else (ANY, ())
    if isinstance(value, dict):
        for name, item in cast("dict[str, Json]", value).items():
            if step in (ANY, name):
                yield from values_in(item, rest)
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[Json]", value)):
            if step in (ANY, str(index)):
                yield from values_in(item, rest)
    elif not steps and isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


class Scrubber:
    """Takes `values` out of texts, also in the forms that `repr` and JSON give them. A part of a value, or one that
    was changed, it does not know. `blind`: there are values that it does not know, so it shows no text.
    """

    __slots__ = ("_blind", "_pattern")

    def __init__(self, values: Iterable[str], *, blind: bool = False) -> None:
        forms = {form for value in values for form in forms_of(value)}
        self._blind = blind or len(forms) > 5 * VALUES_MAX
        words = [] if self._blind else sorted(forms, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(pattern_of, words))) if words else None

    def __call__(self, text: str) -> str:
        if self._blind:
            return REDACTED
        return text if self._pattern is None else self._pattern.sub(REDACTED, text)

    def data(self, value: Json) -> Json:
        """`value` with every text in it scrubbed, and every name; a number that is one of the values too."""
        if self._pattern is None and not self._blind:
            return value
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            members = cast("dict[str, Json]", value)
            return {self(name): self.data(item) for name, item in members.items()}
        if isinstance(value, list):
            return [self.data(item) for item in cast("list[Json]", value)]
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and len(str(value)) >= WORD_CHARACTERS
        ):
            return REDACTED if self(str(value)) == REDACTED else value
        return value


def forms_of(value: str) -> set[str]:
    if not value.strip():
        return set()
    quoted = repr(value)[1:-1]
    return {value, quoted, ascii(value)[1:-1], quoted.replace("'", "\\'"), json.dumps(value)[1:-1]}


def pattern_of(form: str) -> str:
    found = re.escape(form)
    return found if len(form) >= WORD_CHARACTERS else rf"(?<!\w){found}(?!\w)"


def scrubbed(text: str, values: Iterable[str]) -> str:
    """`text` without `values`."""
    return Scrubber(values)(text)


def unless_sensitive(text: str) -> str:
    """`text`, which may repeat somebody's data, for a log: nothing of it where a type of this process is sensitive."""
    return REDACTED if known else text


INPUT: Final = re.compile(r"input_value=[^\n]*, input_type=")


def without_inputs(text: str) -> str:
    """`text`, that may quote errors of pydantic, without the values that those quote."""
    return INPUT.sub(f"input_value={REDACTED}, input_type=", text) if "input_value=" in text else text


TELLING: Final = ("missing", "extra_forbidden", "_type", "_parsing", "_too_short", "_too_long")
"""How the names of pydantic's errors end whose words repeat nothing of the value, whatever that is."""


def faults_of(error: ValidationError, places: Places) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Each place that does not fit, and what was expected there: never the value that was found.

    Where something is sensitive, no more is told than what cannot repeat it: the words of a validator that somebody
    wrote can.
    """
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        is_told = not places or fault["type"].endswith(TELLING)
        yield fault["loc"], fault["msg"] if is_told else f"the value does not fit ({REDACTED})"
