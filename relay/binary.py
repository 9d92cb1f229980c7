"""A message in the binary content mode, for endpoints that want it: attributes in headers, data as the body.

What is stored is the structured form, and every try makes the same bytes of it: the data as they stand there. What does
not fit into headers, and what has no data, goes structured after all, which says so by its content type.

Source: HTTP protocol binding for CloudEvents 1.0.2, section 3.1; HTTP webhooks 1.0, section 2 (requests have a body).
"""

import json
import re
from base64 import b64decode
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import quote

from contracts.binary import PREFIX, is_json

FIELD_MAX: Final = 8_000  # characters of a header: many servers refuse more than 8190
FIELDS_MAX: Final = 16_000  # of all headers that an event becomes
COUNT_MAX: Final = 64  # headers that an event becomes; many servers refuse more than 100 in all
JSON: Final = "application/json"  # what data are of which the event does not say it

BODY: Final = frozenset({"data", "data_base64", "datacontenttype"})  # attributes that become no header
NAME: Final = re.compile(r"[a-z0-9]+")
SAFE: Final = "!#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # beside letters and digits: visible ASCII but " and %
PRINTABLE: Final = re.compile(r"[ -~]{1,256}")
SPACE: Final = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Binary:
    """What is sent: the body, its type, and the headers that say the rest."""

    body: bytes
    content_type: str
    headers: dict[str, str]


def in_binary(body: bytes) -> Binary | None:
    """The event in `body`, which is in structured JSON; None when it goes structured."""
    try:
        text = body.decode()
        event: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None  # not ours to judge: the body goes as it was stored
    if not isinstance(event, dict):
        return None
    attributes = cast("dict[str, Any]", event)
    content_type = attributes.get("datacontenttype", JSON)
    if not (isinstance(content_type, str) and PRINTABLE.fullmatch(content_type)):
        return None
    try:
        headers, data = headers_of(attributes), data_of(text, attributes, content_type)
    except ValueError:
        return None  # half a character, which JSON can say and UTF-8 cannot; or no base64
    return None if headers is None or data is None else Binary(data, content_type, headers)


def data_of(text: str, attributes: dict[str, Any], content_type: str) -> bytes | None:
    """The data as they stand; None when there are none."""
    found = attributes.get("data_base64")
    if isinstance(found, str):
        return b64decode(found) or None
    if "data" not in attributes:
        return None
    if isinstance(attributes["data"], str) and not is_json(content_type):
        return attributes["data"].encode() or None
    return member(text, "data").encode()


def headers_of(attributes: dict[str, Any]) -> dict[str, str] | None:
    """A header for each attribute; None when they do not fit."""
    headers: dict[str, str] = {}
    for name, value in attributes.items():
        if name in BODY:
            continue
        text = canonical(value)
        if text is None or not NAME.fullmatch(name):
            return None
        headers[PREFIX + name] = quote(text, safe=SAFE)
    sizes = [len(name) + len(value) for name, value in headers.items()]
    fits = len(sizes) <= COUNT_MAX and max(sizes, default=0) <= FIELD_MAX and sum(sizes) <= FIELDS_MAX
    return headers if fits else None


def canonical(value: object) -> str | None:
    """The one text of an attribute's value; None when it has none."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int) else None


def member(text: str, name: str) -> str:
    """How a member of a JSON object is written in `text`, which has one of that name; the last one counts."""
    decoder = json.JSONDecoder()
    found, at = "", skip(text, 0) + 1
    while True:
        key, at = decoder.raw_decode(text, skip(text, at))
        at = skip(text, skip(text, at) + 1)
        _, end = decoder.raw_decode(text, at)
        if key == name:
            found = text[at:end]
        at = skip(text, end)
        if text[at] == "}":
            return found
        at += 1


def skip(text: str, at: int) -> int:
    """The place of what is not blank."""
    found = SPACE.match(text, at)
    return at if found is None else found.end()
