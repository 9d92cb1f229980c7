"""CloudEvents 1.0.2 over HTTP in the binary content mode: attributes in headers, data as the body.

    ce-NAME         the attribute NAME: unquoted, then percent-decoded once
    content-type    the attribute datacontenttype, as it stands
    body            the data: JSON of a JSON media type; bytes of any other, or of none; an empty body is no data

The events are those of the structured form, and as strict. But this mode has strings only, so an extension is
a string here, whatever it was. The published SDK is not used: of two headers of one name it takes the last, it
mends bytes that are no UTF-8, leaves quoted strings quoted, and makes a string of what should be JSON.

Source: HTTP protocol binding for CloudEvents 1.0.2, section 3.1; RFC 7230, section 3.2.6 (quoted strings).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Final, Literal
from urllib.parse import unquote_to_bytes

from contracts import strict_json
from contracts.envelope import (
    ABSENT,
    RESERVED,
    WORD,
    Absent,
    Envelope,
    media_type,
    problems_of,
)
from contracts.errors import MalformedEvent, MalformedJson, shown
from contracts.strict_json import Json

PREFIX: Final = "ce-"
REQUIRED: Final = tuple(f"{PREFIX}{name}" for name in ("specversion", "id", "source", "type"))
"""The headers of every event in this mode: whoever sends one of them means an event."""


def decode_binary(headers: Iterable[tuple[str, str]], body: bytes) -> Envelope:
    """The event in `headers`, as they were received, and `body`. Headers of other names say nothing about it.

    Raises MalformedEvent with every problem that it has.
    """
    attributes, faults = attributes_in(headers)
    extensions = {name: value for name, value in attributes.items() if name not in RESERVED}
    problems = [f"{name}: {fault}" for name, fault in faults.items()]
    problems += [line for line in problems_of(attributes, extensions) if line.partition(":")[0] not in faults]
    data: Json | bytes | Literal[Absent.ABSENT] = ABSENT
    try:
        data = data_of(attributes.get("datacontenttype", ""), body)
    except MalformedEvent as error:
        problems += error.problems
    if problems:
        raise MalformedEvent(problems)
    return Envelope(
        id=attributes["id"],
        source=attributes["source"],
        type=attributes["type"],
        subject=attributes.get("subject"),
        time=attributes.get("time"),
        datacontenttype=attributes.get("datacontenttype"),
        dataschema=attributes.get("dataschema"),
        data=data,
        extensions=MappingProxyType(extensions),
    )


def attributes_in(headers: Iterable[tuple[str, str]]) -> tuple[dict[str, str], dict[str, str]]:
    """The attributes by name; and of those whose header is none, what was expected and found."""
    said: defaultdict[str, list[str]] = defaultdict(list)
    for header, value in headers:
        if (name := header.lower()) == "content-type" or name.startswith(PREFIX):
            said[name].append(value)
    attributes: dict[str, str] = {}
    faults: dict[str, str] = {}
    for header, values in said.items():
        name = "datacontenttype" if header == "content-type" else header.removeprefix(PREFIX)
        try:
            attributes[name] = value_of(header, values)
        except ValueError as error:
            faults[shown(name)[1:-1]] = str(error)
    return attributes, faults


ELSEWHERE: Final = {
    "ce-datacontenttype": "in the header content-type",
    "ce-data": "in the body",
    "ce-data_base64": "in the body",
}
"""Where that stands which has no header of its own."""


def value_of(header: str, values: Sequence[str]) -> str:
    """What a header says. Raises ValueError with what was expected and found."""
    if len(values) > 1:
        raise ValueError(f"expected one header, found {len(values)}")
    if place := ELSEWHERE.get(header):
        raise ValueError(f"expected it {place}, found a header of its own")
    return values[0] if header == "content-type" else decoded(values[0])


VISIBLE: Final = re.compile(r"[ !#-~]*")
QUOTED: Final = re.compile(r'"(?:[ !#-\[\]-~]|\\[ -~])*"')
ESCAPED: Final = re.compile(r"\\(.)")
STRAY: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


def decoded(value: str) -> str:
    """The text that a header's value stands for. Raises ValueError with what was expected and found.

    Blanks may stand for themselves and the whole may be quoted, as older releases of the binding had it.
    """
    if QUOTED.fullmatch(value):
        value = ESCAPED.sub(r"\1", value[1:-1])
    elif not VISIBLE.fullmatch(value):
        raise ValueError(f"expected visible ASCII, all else percent-encoded, found {shown(value)}")
    if STRAY.search(value):
        raise ValueError(f"expected two hexadecimal digits after each %, found {shown(value)}")
    try:
        return unquote_to_bytes(value).decode("utf-8", "strict")
    except UnicodeDecodeError:
        raise ValueError(f"expected UTF-8 when percent-decoded, found {shown(value)}") from None


CHARSETS: Final = frozenset({"utf-8", "us-ascii"})
"""Of JSON: UTF-8 (RFC 8259, section 8.1), or what is also that."""


def data_of(content_type: str, body: bytes) -> Json | bytes | Literal[Absent.ABSENT]:
    """What a body of that type is as data. HTTP does not tell an empty body from none. Raises MalformedEvent."""
    if not body:
        return ABSENT
    if not is_json(content_type):
        return body
    if foreign := [charset for charset in charsets_of(content_type) if charset not in CHARSETS]:
        raise MalformedEvent([f"datacontenttype: expected JSON in UTF-8, found {shown(foreign[0])}"])
    try:
        return strict_json.decode(body, what="data")
    except MalformedJson as error:
        raise MalformedEvent([f"data: expected strict JSON, found {error.found} at {error.place}"]) from None


def is_json(content_type: str) -> bool:
    """JSON event format 1.0.2, section 3.1: `*/json` or `*/*+json`."""
    _, _, subtype = media_type(content_type).partition("/")
    return subtype == "json" or subtype.endswith("+json")


PARAMETER: Final = re.compile(rf';[ \t]*({WORD})=({WORD}|"(?:[^"\\]|\\.)*")')


def charsets_of(content_type: str) -> Iterator[str]:
    """What the parameter `charset` says, each time that it is there."""
    for name, value in PARAMETER.findall(content_type):
        if name.lower() == "charset":
            yield ESCAPED.sub(r"\1", value.strip('"')).lower()
