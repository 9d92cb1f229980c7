"""Where in a JSON text something is wrong: the slow second reading, after the fast one has become suspicious."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Final, cast

from contracts.errors import shown
from contracts.limits import JSON_DIGITS_MAX, SHOWN_CHARACTERS_MAX

LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)


def faults(text: str) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """(place, what is wrong) of each fault in a syntactically valid JSON text."""
    names: list[set[str] | None] = []  # of each open object the names so far, None for an array
    place: list[str | int] = []  # of each open one the member that is being read
    expects_name = False
    for match in TOKEN.finditer(text):
        piece = match[0]
        if piece in "[{":
            names.append(set() if piece == "{" else None)
            place.append("" if piece == "{" else 0)
            expects_name = piece == "{"
        elif piece in "]}":
            names.pop()
            place.pop()
            expects_name = False
        elif piece == ",":
            expects_name = names[-1] is not None
            last = place[-1]
            place[-1] = last + 1 if isinstance(last, int) else last
        elif piece == ":":
            expects_name = False
        elif expects_name and (seen := names[-1]) is not None:
            name = cast("str", json.loads(piece))
            if fault := text_fault(name):
                yield tuple(place[:-1]), f"a name with {fault}"
            if name in seen:
                yield (*place[:-1], name), f"the name {shown(name)} twice"
            seen.add(name)
            place[-1] = name
        elif fault := piece_fault(piece):
            yield tuple(place), fault


def piece_fault(piece: str) -> str | None:
    if piece.startswith('"'):
        return text_fault(cast("str", json.loads(piece)))
    if piece in {"NaN", "Infinity", "-Infinity"}:
        return piece
    if piece in {"true", "false", "null"}:
        return None
    if set(piece) <= set("-0123456789"):
        digits = len(piece.lstrip("-"))
        return f"an integer of {digits} digits" if digits > JSON_DIGITS_MAX else None
    return None if math.isfinite(float(piece)) else f"{shown(piece)}, which is larger than any number"


def pointer(place: Sequence[str | int]) -> str:
    """`place` as a JSON pointer (RFC 6901), safe to print: short ASCII; `the top` is the whole document."""
    if not place:
        return "the top"
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in place)
    text = "".join(f"/{step[:SHOWN_CHARACTERS_MAX]}" for step in steps)
    return escaped(text if len(text) <= 2 * SHOWN_CHARACTERS_MAX else "…" + text[-2 * SHOWN_CHARACTERS_MAX :])


def escaped(text: str) -> str:
    return ascii(text)[1:-1] if not (text.isascii() and text.isprintable()) else text


def text_fault(text: str) -> str | None:
    if "\0" in text:
        return "NUL (U+0000)"
    lone = LONE_SURROGATE.search(text)
    return f"a lone surrogate (U+{ord(lone[0]):04X})" if lone else None
