"""CloudEvents 1.0.2 in the structured JSON form, one or many: what is signed and sent, as immutable values.

The published SDK is not used on this path: it invents `id` and `time` where they are missing, so that every
retry of such an event would be a new one, and it accepts what the specification forbids. Here a missing
attribute is a problem, `time` stays the text that was sent, and whether `data` was there is kept apart from
its being null.

Source: CloudEvents 1.0.2, sections 3.1 (attributes) and 2.3 (naming); JSON event format 1.0.2, section 3.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from contracts import strict_json
from contracts.errors import LimitExceeded, MalformedEvent, shown
from contracts.limits import (
    ATTRIBUTE_BYTES_MAX,
    EXTENSION_NAME_CHARACTERS_MAX,
    EXTENSIONS_MAX,
    IDENTITY_BYTES_MAX,
    KEY_BYTES_MAX,
    SOURCE_BYTES_MAX,
)
from contracts.strict_json import Json

STRUCTURED: Final = "application/cloudevents+json"
BATCH: Final = "application/cloudevents-batch+json"


class Absent(Enum):
    """The type of ABSENT, so that type checkers can tell it from data."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent.ABSENT
"""The data of an event that has none. An event may also have the data None: JSON's null."""

Extension = str | bool | int


@dataclass(frozen=True, slots=True)
class Envelope:
    """An event. `data` is JSON-like, or bytes when it is not JSON (`data_base64` on the wire), or ABSENT."""

    id: str
    source: str
    type: str
    subject: str | None = None
    time: str | None = None
    """RFC 3339, as it was or will be sent: it is never computed with."""
    datacontenttype: str | None = None
    dataschema: str | None = None
    data: Json | bytes | Literal[Absent.ABSENT] = ABSENT
    extensions: Mapping[str, Extension] = field(default_factory=lambda: MappingProxyType({}))


CORE: Final = ("id", "source", "type", "subject", "time", "datacontenttype", "dataschema")
NEEDED: Final = ("id", "source", "type")
USUAL_CHARACTERS_MAX: Final = 128
"""Of text that is short enough for any attribute, whatever its characters."""
KEPT_MAX: Final = 512
"""Values in memory, of each attribute whose values are few and come again and again."""
RESERVED: Final = frozenset({*CORE, "specversion", "data", "data_base64"})


def encode_structured(envelope: Envelope) -> bytes:
    """The bytes of `envelope`, the same for equal ones. Raises MalformedEvent, NotEncodable."""
    members: dict[str, Json] = {"specversion": "1.0"}
    members |= {name: value for name in CORE if (value := getattr(envelope, name)) is not None}
    members |= envelope.extensions
    if isinstance(envelope.data, bytes):
        members["data_base64"] = base64.b64encode(envelope.data).decode("ascii")
    elif envelope.data is not ABSENT:
        members["data"] = envelope.data
    if foreign := list(foreign_extensions(envelope.extensions)):
        raise MalformedEvent([*foreign, *problems_of(members, envelope.extensions)])
    check(members, envelope.extensions)
    return strict_json.encode(members, what="event").encode()


def foreign_extensions(extensions: Mapping[str, Extension]) -> Iterator[str]:
    for name in extensions:
        if name in RESERVED:
            yield f"{name}: expected an extension's own name, found one of the specification's"


def decode_structured(body: bytes) -> Envelope:
    """The event in `body`. Attributes that are null count as absent, unknown ones are extensions.

    Raises MalformedJson when the body is no strict JSON, else MalformedEvent with every problem that it has.
    """
    return event_of(strict_json.decode(body, what="event"))


def decode_batch(body: bytes, *, events_max: int) -> list[Envelope]:
    """The events in `body`, in their order; there may be none, and one may be there twice.

    Raises MalformedJson, LimitExceeded, and MalformedEvent with the problems of the first element that is no event.
    """
    return [
        element_of(element, number) for number, element in enumerate(elements_in(body, events_max=events_max))
    ]


def elements_in(body: bytes, *, events_max: int) -> list[Json]:
    """The elements of a batch, whatever they are. Raises MalformedJson, LimitExceeded, MalformedEvent."""
    elements = strict_json.decode(body, what="batch")
    if not isinstance(elements, list):
        raise MalformedEvent([f"expected an array of events, found {kind_of(elements)}"])
    found = cast("list[Json]", elements)
    if len(found) > events_max:
        raise LimitExceeded("events of a batch", len(found), events_max)
    return found


def element_of(element: Json, number: int) -> Envelope:
    """The event that an element is. Raises MalformedEvent, whose problems name the element by its place."""
    try:
        return event_of(element)
    except MalformedEvent as error:
        told = (line.replace("expected ", f"in element {number} expected ", 1) for line in error.problems)
        raise MalformedEvent(list(told)) from None


def event_of(members: Json) -> Envelope:
    """The event of that JSON. Raises MalformedEvent with every problem that it has."""
    if not isinstance(members, dict):
        raise MalformedEvent([f"expected an object, found {kind_of(members)}"])
    event = cast("dict[str, Any]", members)
    extensions = {name: value for name, value in event.items() if value is not None and name not in RESERVED}
    check(event, extensions)
    encoded = event.get("data_base64")
    return Envelope(
        id=event["id"],
        source=event["source"],
        type=event["type"],
        subject=event.get("subject"),
        time=event.get("time"),
        datacontenttype=event.get("datacontenttype"),
        dataschema=event.get("dataschema"),
        data=event.get("data", ABSENT) if encoded is None else base64.b64decode(encoded),
        extensions=MappingProxyType(extensions),
    )


def check(event: Mapping[str, Json], extensions: Mapping[str, Json]) -> None:
    """Raises MalformedEvent with every problem that `problems_of` finds."""
    if not is_usual(event, extensions) and (problems := list(problems_of(event, extensions))):
        raise MalformedEvent(problems)


def is_usual(event: Mapping[str, Json], extensions: Mapping[str, Json]) -> bool:
    """Whether `event` is so plain that nothing can be wrong with it; what is not may be right too.

    Almost every event is, and that is told three times faster than what would be wrong.
    """
    return (
        event.get("specversion") == "1.0"
        and "data_base64" not in event
        and has_usual_attributes(event)
        and has_usual_extensions(extensions)
    )


def has_usual_attributes(event: Mapping[str, Json]) -> bool:
    said = event.get
    identity, subject, time = said("id"), said("subject"), said("time")
    origin = said("source"), said("type"), said("datacontenttype"), said("dataschema")
    for value in origin:
        if value is not None and not is_usual_text(value):
            return False
    return (
        (is_usual_text(identity) and identity != "")
        and (subject is None or (is_usual_text(subject) and subject != ""))
        and (time is None or (is_usual_text(time) and is_timestamp(time)))
        and is_usual_origin(*origin)
    )


@lru_cache(maxsize=KEPT_MAX)
def is_usual_origin(
    source: str | None, kind: str | None, datacontenttype: str | None, dataschema: str | None
) -> bool:
    """Whether these attributes are what they may be; many events share theirs."""
    found = {"source": source, "type": kind, "datacontenttype": datacontenttype, "dataschema": dataschema}
    if source is None or kind is None:
        return False
    return all(
        value is None or attribute_fault(value, *ATTRIBUTES[name]) is None for name, value in found.items()
    )


def has_usual_extensions(extensions: Mapping[str, Json]) -> bool:
    for name, value in extensions.items():
        if not (is_usual_text(value) or type(value) is bool) or not is_extension_name(name):
            return False
    return len(extensions) <= EXTENSIONS_MAX


def is_usual_text(value: Json) -> bool:
    return type(value) is str and len(value) <= USUAL_CHARACTERS_MAX and value.isprintable()


@lru_cache(maxsize=KEPT_MAX)
def is_extension_name(name: str) -> bool:
    return EXTENSION_NAME.fullmatch(name) is not None


def problems_of(event: Mapping[str, Json], extensions: Mapping[str, Json]) -> Iterator[str]:
    """What the specification forbids about `event`, of whose members `extensions` are some; a line for each."""
    if event.get("specversion") != "1.0":
        yield f"specversion: expected '1.0', found {shown(event.get('specversion'))}"
    for name in NEEDED:
        if event.get(name) is None:
            yield f"{name}: expected a non-empty string, found none"
    for name, (bytes_max, form, fits) in ATTRIBUTES.items():
        value = event.get(name)
        if value is not None and (fault := attribute_fault(value, bytes_max, form, fits)):
            yield f"{name}: expected {fault}, found {shown(value)}"
    yield from extension_problems(extensions)
    if event.get("data_base64") is not None:
        yield from data_problems(event)


def extension_problems(extensions: Mapping[str, Json]) -> Iterator[str]:
    if len(extensions) > EXTENSIONS_MAX:
        yield f"expected at most {EXTENSIONS_MAX} extension attributes, found {len(extensions)}"
        return
    for name, value in extensions.items():
        if not EXTENSION_NAME.fullmatch(name):
            yield f"extension {shown(name)}: expected a name of the characters a-z and 0-9"
        elif fault := extension_fault(value):
            yield f"{name}: expected {fault}, found {shown(value)}"


Fits = Callable[[str], object]


def attribute_fault(value: Json, bytes_max: int, form: str, fits: Fits | None) -> str | None:
    """What was expected of an attribute, when `value` is something else."""
    if not isinstance(value, str) or not value:
        return "a non-empty string"
    if fault := string_fault(value, bytes_max):
        return fault
    return None if fits is None or fits(value) else form


def extension_fault(value: Json) -> str | None:
    match value:
        case str():
            return string_fault(value, ATTRIBUTE_BYTES_MAX)
        case bool():
            return None
        case int():
            return None if -(2**31) <= value < 2**31 else "an integer of 32 bits"
        case _:
            return "a string, a boolean or an integer"


def data_problems(event: Mapping[str, Json]) -> Iterator[str]:
    if "data" in event:
        yield "data: expected either data or data_base64, found both"
    try:
        base64.b64decode(event["data_base64"], validate=True)
    except (binascii.Error, ValueError, TypeError):
        yield "data_base64: expected base64 text, found something else"


def string_fault(value: str, bytes_max: int) -> str | None:
    """CloudEvents 1.0.2, 3.1.1, String: no control characters, noncharacters or lone surrogates."""
    if 4 * len(value) > bytes_max and len(value.encode("utf-8", "surrogatepass")) > bytes_max:
        return f"at most {bytes_max} bytes"
    # Almost every attribute is printable, and that is told ten times faster.
    return "no control characters" if not value.isprintable() and FORBIDDEN.search(value) else None


FORBIDDEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(f"{chr(plane | 0xFFFE)}{chr(plane | 0xFFFF)}" for plane in range(0, 0x110000, 0x10000))
    + "]"
)
EXTENSION_NAME: Final = re.compile(rf"[a-z0-9]{{1,{EXTENSION_NAME_CHARACTERS_MAX}}}")

# RFC 3986, appendix A, with the letters of other alphabets let through, as RFC 3987 has them.
URI_CHARACTERS: Final = r"(?:[A-Za-z0-9\-._~:/?@!$&'()*+,;=\[\]\x80-\U0010ffff]++|%[0-9A-Fa-f]{2})*+"
URI: Final = re.compile(rf"[A-Za-z][A-Za-z0-9+.\-]*:{URI_CHARACTERS}(?:#{URI_CHARACTERS})?")
URI_REFERENCE: Final = re.compile(rf"{URI_CHARACTERS}(?:#{URI_CHARACTERS})?")

# RFC 2045, section 5.1; RFC 7231, section 3.1.1.1
WORD: Final = r"[A-Za-z0-9!#$%&'*+.^_`|~\-]+"
PARAMETER: Final = rf'[ \t]*;[ \t]*{WORD}=(?:{WORD}|"(?:[^"\\\x00-\x1f\x7f]|\\[\x20-\x7e])*")'
MEDIA_TYPE: Final = re.compile(rf"({WORD}/{WORD})(?:{PARAMETER})*[ \t]*;?[ \t]*")

TIMESTAMP: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt](?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]{1,18})?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)


def is_timestamp(text: str) -> bool:
    """RFC 3339, section 5.6: seconds are needed, and so are an offset's minutes. A leap second is fine."""
    parts = TIMESTAMP.fullmatch(text)
    if parts is None:
        return False
    try:
        date(int(parts[1]), int(parts[2]), int(parts[3]))
    except ValueError:
        return False
    return True


ATTRIBUTES: Final[Mapping[str, tuple[int, str, Fits | None]]] = {
    "id": (IDENTITY_BYTES_MAX, "", None),
    "source": (SOURCE_BYTES_MAX, "a URI reference", URI_REFERENCE.fullmatch),
    "type": (IDENTITY_BYTES_MAX, "", None),
    "subject": (KEY_BYTES_MAX, "", None),
    "time": (ATTRIBUTE_BYTES_MAX, "an RFC 3339 timestamp", is_timestamp),
    "datacontenttype": (ATTRIBUTE_BYTES_MAX, "a media type", MEDIA_TYPE.fullmatch),
    "dataschema": (ATTRIBUTE_BYTES_MAX, "an absolute URI", URI.fullmatch),
}
"""Of each attribute of the specification: how long it may be, what it must be, and how that is told."""


@lru_cache(maxsize=KEPT_MAX)
def media_type(content_type: str) -> str:
    """The type of a Content-Type without its parameters, in lower case; empty when it is none."""
    parts = MEDIA_TYPE.fullmatch(content_type)
    return parts[1].lower() if parts else ""


def kind_of(value: Json) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case _:
            return "an array"
