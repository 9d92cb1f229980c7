"""Webhooks that are no CloudEvents, as events: a sender's rules say where each attribute stands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, cast
from urllib.parse import parse_qsl

from contracts.binary import data_of, is_json
from contracts.envelope import ABSENT, Envelope, check, is_timestamp, media_type
from contracts.errors import MalformedEvent
from contracts.limits import KEY_BYTES_MAX
from contracts.strict_json import Json
from receiver.schemes import Challenge, Rules
from receiver.sequence import SEQUENCE, SEQUENCE_BYTES_MAX, SEQUENCE_TYPE, WIDTH, is_number

FORM: Final = "application/x-www-form-urlencoded"
FIELDS_MAX: Final = 200
"""Fields of one HTML form."""
LAST_SECOND: Final = 253_402_300_799
"""The last second that RFC 3339 can write."""
SEQUENCE_TEXT: Final = re.compile(rf"[!-~]{{1,{SEQUENCE_BYTES_MAX}}}")


class Unmapped(MalformedEvent):
    """An authentic webhook is not as its sender's rules say; each problem names an attribute and a place."""

    code = "unmapped"


def content_of(rules: Rules, content_type: str, body: bytes) -> Json | bytes:
    """What the body says: JSON, also the one inside a form; else bytes. Raises MalformedEvent."""
    kind = media_type(content_type)
    if kind == FORM:
        return form_of(rules, body)
    if is_json(content_type) or not kind:
        return data_of(content_type if kind else "application/json", body)
    return body


def form_of(rules: Rules, body: bytes) -> Json:
    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=FIELDS_MAX,
        )
    except ValueError:
        raise MalformedEvent(["data: expected the fields of a form, found something else"]) from None
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise MalformedEvent(["data: expected each field of a form once, found one that comes twice"])
    if rules.form and rules.form in fields:
        return data_of("application/json", fields[rules.form].encode())
    return fields


def event_from(
    rules: Rules, headers: Mapping[str, str], content: Json | bytes, content_type: str
) -> Envelope:
    """The event that a webhook with this content is. Raises Unmapped with every attribute that it has not."""
    case = rules.cases.get(text_at(rules.case_of, headers, content) or "") if rules.case_of else None
    source = first((case and case.source) or rules.source, headers, content)
    name = joined((case and case.type) or rules.type, headers, content)
    key = first((case and case.key) or rules.key, headers, content)
    members: dict[str, Any] = {
        "specversion": "1.0",
        "id": first(rules.id, headers, content),
        "source": None if source is None else rules.source_prefix + source,
        "type": None if name is None else rules.type_prefix + name.replace("/", "."),
        "subject": key if key and len(key.encode("utf-8", "surrogatepass")) <= KEY_BYTES_MAX else None,
        "time": time_at(rules.time, headers, content),
        "datacontenttype": content_type or None,
    }
    places = {"id": rules.id, "source": rules.source, "type": (case and case.type) or rules.type}
    if missing := [name for name in places if members[name] is None]:
        raise Unmapped(
            [f"{name}: expected text at {' or '.join(places[name])}, found none" for name in missing]
        )
    try:
        check(members, {})
    except MalformedEvent as error:
        raise Unmapped(error.problems) from None
    return Envelope(
        id=members["id"],
        source=members["source"],
        type=members["type"],
        subject=members["subject"],
        time=members["time"],
        datacontenttype=members["datacontenttype"],
        extensions=numbered(first(rules.sequence, headers, content)),
        data=ABSENT if content == b"" else content,
    )


def numbered(sequence: str | None) -> dict[str, str]:
    """What an event says of its place among others; of a whole number, that it is one. What is no text says nothing."""
    if sequence is None or not SEQUENCE_TEXT.fullmatch(sequence):
        return {}
    said = {SEQUENCE: sequence}
    return {**said, SEQUENCE_TYPE: "Integer"} if is_number(sequence) and len(sequence) <= WIDTH else said


def challenge_in(challenge: Challenge, headers: Mapping[str, str], content: Json | bytes) -> str | None:
    """What a sender that asks whether we are there wants to hear; None when it asks something else."""
    if text_at(challenge.at, headers, content) != challenge.value:
        return None
    return text_at(challenge.answer, headers, content)


def first(places: Sequence[str], headers: Mapping[str, str], content: Json | bytes) -> str | None:
    for place in places:
        if (found := text_at(place.removesuffix("?"), headers, content)) is not None:
            return found
    return None


def joined(places: Sequence[str], headers: Mapping[str, str], content: Json | bytes) -> str | None:
    parts: list[str] = []
    for place in places:
        found = text_at(place.removesuffix("?"), headers, content)
        if found is not None:
            parts.append(found)
        elif not place.endswith("?"):
            return None
    return ".".join(parts) or None


def text_at(place: str, headers: Mapping[str, str], content: Json | bytes) -> str | None:
    """The text or the whole number at a place; None when something else is there, or nothing."""
    if place.startswith("="):
        return place[1:]
    found: object = value_at(place, content) if place.startswith("/") else headers.get(place)
    match found:
        case bool():
            return None
        case str() | int():
            return str(found) or None
        case _:
            return None


def value_at(pointer: str, content: object) -> object:
    """RFC 6901; None where nothing is."""
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        match content:
            case dict():
                content = cast("dict[str, object]", content).get(name)
            case list():
                items = cast("list[object]", content)
                content = (
                    items[int(name)]
                    if name.isascii() and name.isdigit() and len(name) < 7 and int(name) < len(items)
                    else None
                )
            case _:
                return None
    return content


def time_at(places: Sequence[str], headers: Mapping[str, str], content: Json | bytes) -> str | None:
    """A moment as RFC 3339, which seconds since 1970 are made into; what is none says nothing."""
    text = first(places, headers, content)
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) <= len(str(LAST_SECOND)) and int(text) <= LAST_SECOND:
        return datetime.fromtimestamp(int(text), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return text if is_timestamp(text) else None
