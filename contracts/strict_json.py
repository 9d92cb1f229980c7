"""JSON as PostgreSQL, every language and the next reader understand it alike.

Refused in both directions, where Python's own module would let them pass or fail elsewhere: NaN and
infinities (also as 1e400), NUL and lone surrogates (no text column takes them), integers of more than 4300
digits, more than 64 levels. When reading also: anything but UTF-8 (RFC 8259, 8.1; a BOM is no JSON), and a
name that comes twice in one object, of which half of all parsers take the first and half the last. When
writing also: names that are no strings, which Python would turn into some.

The normal way is the C code of the standard library with a few cheap checks. Only a text that a check
suspects is read again, slowly, to find and name the place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, TypeAlias, cast

from contracts.errors import MalformedJson, NotEncodable, TooLarge, shown
from contracts.json_places import LONE_SURROGATE, faults, pointer, text_fault
from contracts.limits import JSON_DEPTH_MAX, JSON_DIGITS_MAX

Json: TypeAlias = Any
"""None, bool, int, float, str, list of Json, dict of str to Json; `Any`: readers narrow it."""

PLAIN: Final = frozenset({str, int, bool, float, type(None)})
FAULTS: Final = {
    "Expecting value": "no value (a text stands in double quotes)",
    "Expecting property name enclosed in double quotes": "no name in double quotes",
    "Expecting ':' delimiter": "no colon",
    "Expecting ',' delimiter": "no comma",
    "Extra data": "more after its end",
}
"""What Python's reader expected, as what was found."""
ENCODER: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
)


def compact_encoder(*, sort: bool) -> Callable[[Any], str]:
    """`ENCODER.encode`, without making a new C encoder for each call, which costs as much as a small value."""
    make: Callable[..., Any] | None = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return json.JSONEncoder(
            ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"), sort_keys=sort
        ).encode
    escape = json.encoder.encode_basestring
    scan = make(None, ENCODER.default, escape, None, ":", ",", sort, False, False)
    return lambda value: "".join(scan(value, 0))


compact: Final = compact_encoder(sort=False)
sorted_compact: Final = compact_encoder(sort=True)


def encode(value: object, *, what: str, bytes_max: int | None = None) -> str:
    """`value` as compact JSON; non-ASCII characters stand for themselves. Tuples become arrays.

    `what` names the value in errors. Raises NotEncodable with the pointer of the first part that has no JSON
    form, TooLarge when the UTF-8 form has more than `bytes_max` bytes.
    """
    if type(value) not in PLAIN and not is_plain(value, JSON_DEPTH_MAX):
        check_value(value, what)
    try:
        text = compact(value)
        size = len(text) if text.isascii() else len(text.encode())
    except (ValueError, TypeError):  # NaN and infinities, too many digits, lone surrogates (a UnicodeError)
        check_value(value, what)
        raise
    if "\\u0000" in text:
        check_value(value, what)  # it may have been an escaped backslash before u0000
    if bytes_max is not None and size > bytes_max:
        raise TooLarge(what, size, bytes_max)
    return text


def canonical(value: Json) -> str:
    """`value`, which `decode` gave, as the one text of all equal ones: members sorted. For digests."""
    return sorted_compact(value)


def is_plain(value: Any, levels: int) -> bool:
    """Whether `value` nests at most `levels` exact lists and dicts, and has names that are exact strings."""
    kind: object = type(value)  # pyright: ignore[reportUnknownVariableType]  # a type of anything
    if kind is dict:
        for name in value:
            if type(name) is not str:
                return False
        items = value.values()
    elif kind is list:
        items = value
    else:
        return False
    if levels <= 0:
        return False
    for item in items:  # noqa: SIM110  # every payload passes here, and a generator costs as much again
        if type(item) not in PLAIN and not is_plain(item, levels - 1):
            return False
    return True


def check_value(value: object, what: str) -> None:
    """Raise NotEncodable for the first part of `value` without a JSON form. Slow and exact."""
    pending: list[tuple[object, tuple[str | int, ...]]] = [(value, ())]
    while pending:
        part, place = pending.pop()
        if len(place) > JSON_DEPTH_MAX or (
            len(place) == JSON_DEPTH_MAX and isinstance(part, dict | list | tuple)
        ):
            raise NotEncodable(what, pointer(place), f"more than {JSON_DEPTH_MAX} levels")
        if isinstance(part, dict):
            for name, item in cast("dict[object, object]", part).items():
                if not isinstance(name, str):
                    raise NotEncodable(what, pointer(place), f"the name {shown(name)}, which is no string")
                if fault := text_fault(name):
                    raise NotEncodable(what, pointer(place), f"a name with {fault}")
                pending.append((item, (*place, name)))
        elif isinstance(part, list | tuple):
            items = cast("Sequence[object]", part)
            pending.extend((item, (*place, index)) for index, item in enumerate(items))
        elif fault := scalar_fault(part):
            raise NotEncodable(what, pointer(place), fault)


def scalar_fault(value: object) -> str | None:
    match value:
        case None | bool():
            return None
        case str():
            return text_fault(value)
        case int():
            return (
                None
                if abs(value) < 10**JSON_DIGITS_MAX
                else f"an integer of more than {JSON_DIGITS_MAX} digits"
            )
        case float():
            return None if math.isfinite(value) else str(value)
        case _:
            return f"a value of type {type(value).__name__}"


def decode(text: bytes | str, *, what: str, bytes_max: int | None = None) -> Json:
    """The value that the strict JSON `text` stands for.

    `what` names the text in errors. Raises MalformedJson with the place, TooLarge above `bytes_max` bytes of
    UTF-8.
    """
    if (
        bytes_max is not None
        and (size := len(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))) > bytes_max
    ):
        raise TooLarge(what, size, bytes_max)
    read = as_text(text, what)
    if read.count("[") + read.count("{") > JSON_DEPTH_MAX:
        check_depth(read, what)
    try:
        value = READER.decode(read)
    except json.JSONDecodeError as error:
        found = FAULTS.get(error.msg, error.msg) if error.pos < len(read) else "its end"
        raise MalformedJson(what, f"line {error.lineno}, column {error.colno}", found) from None
    except Suspect:
        raise_fault(read, what)
    if "\\u" in read and SUSPECT_ESCAPE.search(read):
        check_text(read, what)
    return value


class Suspect(Exception):
    """The reader met something that is valid for Python and not for us."""


def as_text(text: bytes | str, what: str) -> str:
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8", "strict")
        except UnicodeDecodeError as error:
            raise MalformedJson(
                what, f"byte {error.start}", f"bytes that are no UTF-8 ({error.reason})"
            ) from None
    elif lone := LONE_SURROGATE.search(text):
        raise MalformedJson(what, f"character {lone.start()}", f"a lone surrogate (U+{ord(lone[0]):04X})")
    if text.startswith("\ufeff"):
        raise MalformedJson(what, "byte 0", "a byte order mark")
    return text


def read_object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise Suspect
    return members


def read_integer(digits: str) -> int:
    if len(digits) > JSON_DIGITS_MAX and len(digits.lstrip("-")) > JSON_DIGITS_MAX:
        raise Suspect
    return int(digits)


def read_number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise Suspect
    return number


def refuse_constant(_: str) -> NoReturn:
    raise Suspect


READER: Final = json.JSONDecoder(
    object_pairs_hook=read_object,
    parse_int=read_integer,
    parse_float=read_number,
    parse_constant=refuse_constant,
)
SUSPECT_ESCAPE: Final = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
NESTING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


def check_depth(text: str, what: str) -> None:
    """Raise MalformedJson where `text` goes too deep; the parser below would end in a RecursionError."""
    depth = 0
    for token in NESTING.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth > JSON_DEPTH_MAX:
                raise MalformedJson(what, f"character {token.start()}", f"more than {JSON_DEPTH_MAX} levels")
        elif token[0] in "]}":
            depth -= 1


def check_text(text: str, what: str) -> None:
    """Raise MalformedJson for the first fault of a `text` that Python's parser took or would take."""
    for place, fault in faults(text):
        raise MalformedJson(what, pointer(place), fault)


def raise_fault(text: str, what: str) -> NoReturn:
    """Name what the reader suspected. Behind that place the text may be no JSON at all, as in `[1e400x`."""
    try:
        check_text(text, what)
    except (ValueError, IndexError):
        raise MalformedJson(what, "an unnamed place", "a number out of range before a syntax error") from None
    raise MalformedJson(what, "an unnamed place", "a number out of range or a name that comes twice")
