from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import assume, given
from hypothesis import strategies as st

from contracts.envelope import (
    ABSENT,
    RESERVED,
    Envelope,
    decode_batch,
    decode_structured,
    encode_structured,
    is_usual,
    media_type,
    problems_of,
)
from contracts.errors import LimitExceeded, MalformedEvent, MalformedJson, NotEncodable
from contracts.limits import ATTRIBUTE_BYTES_MAX, EXTENSIONS_MAX, IDENTITY_BYTES_MAX, KEY_BYTES_MAX
from tests.contracts.conformance import events

MINIMAL: dict[str, Any] = {"specversion": "1.0", "id": "1", "source": "/orders", "type": "order.placed"}

printable = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=30)
names = st.from_regex("[a-z][a-z0-9]{0,19}", fullmatch=True).filter(
    lambda name: name not in {"data", "id", "source", "type", "subject", "time", "specversion"}
)
zones = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
times = st.datetimes(timezones=zones | st.just(UTC)).map(datetime.isoformat)
json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | printable,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(printable, inner, max_size=3),
    max_leaves=8,
)
envelopes = st.builds(
    Envelope,
    id=printable,
    source=st.from_regex(r"/[a-z0-9/]{0,20}", fullmatch=True) | st.just("https://a.example/x?y=1#z"),
    type=printable,
    subject=st.none() | printable,
    time=st.none() | times,
    datacontenttype=st.sampled_from([None, "application/json", "text/plain; charset=utf-8"]),
    dataschema=st.sampled_from([None, "https://a.example/schema", "urn:x:y"]),
    data=st.just(ABSENT) | json_data | st.binary(max_size=20),
    extensions=st.dictionaries(
        names, printable | st.booleans() | st.integers(-(2**31), 2**31 - 1), max_size=4
    ),
)


def body(**changes: object) -> bytes:
    return json.dumps(MINIMAL | changes).encode()


def problems(event: bytes) -> str:
    with pytest.raises(MalformedEvent) as refused:
        decode_structured(event)
    return "; ".join(refused.value.problems)


@pytest.mark.parametrize("event", events("valid-events.json"))
def test_a_valid_event_of_the_conformance_suite_is_read(event: dict[str, Any]) -> None:
    read = decode_structured(json.dumps(event).encode())

    written = json.loads(encode_structured(read))
    assert written == {name: value for name, value in event.items() if value is not None}


@pytest.mark.parametrize("event", events("invalid-events.json"))
def test_an_invalid_event_of_the_conformance_suite_is_refused(event: dict[str, Any]) -> None:
    with pytest.raises(MalformedEvent):
        decode_structured(json.dumps(event).encode())


@given(envelopes)
def test_an_event_survives_the_wire(envelope: Envelope) -> None:
    assert decode_structured(encode_structured(envelope)) == envelope


def batch(envelopes: list[Envelope]) -> bytes:
    return b"[" + b", ".join(map(encode_structured, envelopes)) + b"]"


@given(st.lists(envelopes, max_size=4))
def test_events_survive_the_wire_as_a_batch_each_with_its_bytes(envelopes: list[Envelope]) -> None:
    """The published SDK takes no batches, so it says nothing about them."""
    read = decode_batch(batch(envelopes), events_max=4)

    assert read == envelopes
    assert batch(read) == batch(envelopes)


def test_a_batch_has_no_more_events_than_it_may() -> None:
    event = Envelope(id="1", source="/orders", type="order.placed")

    assert decode_batch(batch([event] * 4), events_max=4) == [event] * 4
    with pytest.raises(LimitExceeded, match="events of a batch"):
        decode_batch(batch([event] * 5), events_max=4)


odd = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.none(), max_size=1) | st.just("x" * 700)
attributes = st.sampled_from(
    [
        "specversion",
        "id",
        "source",
        "type",
        "subject",
        "time",
        "datacontenttype",
        "dataschema",
        "data_base64",
        "ext",
        "Ex_t",
    ]
)


@given(envelopes, st.dictionaries(attributes, odd | st.sampled_from(["%zz", "\x07", "2026-02-30T00:00:00Z"])))
def test_what_looks_usual_has_no_problem(envelope: Envelope, changes: dict[str, Any]) -> None:
    event = json.loads(encode_structured(envelope)) | changes
    extensions = {name: value for name, value in event.items() if value is not None and name not in RESERVED}

    assert not is_usual(event, extensions) or not list(problems_of(event, extensions))


@given(
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=100), st.booleans()
)
def test_what_services_send_looks_usual(text: str, flag: bool) -> None:
    event: dict[str, Any] = {**MINIMAL, "id": text, "type": text, "subject": text, "data": None}
    event |= {
        "time": "2026-11-30T08:00:00.123Z",
        "datacontenttype": "application/json",
        "dataschema": "urn:x:y",
    }

    assert is_usual(event, {"causationid": text, "known": flag})


@given(envelopes)
def test_equal_events_are_equal_bytes(envelope: Envelope) -> None:
    assert encode_structured(decode_structured(encode_structured(envelope))) == encode_structured(envelope)


@given(envelopes)
def test_the_sdk_reads_what_we_write(envelope: Envelope) -> None:
    """On what the SDK gets right: not times, which it computes with, nor text data, which it re-encodes."""
    assume(envelope.datacontenttype != "text/plain; charset=utf-8")
    assume(envelope.time is None or len(envelope.time) == len("2000-01-01T00:00:00+00:00"))

    theirs = JSONFormat().read(CloudEvent, encode_structured(envelope))

    assert theirs.get_id() == envelope.id
    assert theirs.get_source() == envelope.source
    assert theirs.get_type() == envelope.type
    assert theirs.get_subject() == envelope.subject
    assert theirs.get_dataschema() == envelope.dataschema
    for name, value in envelope.extensions.items():
        assert theirs.get_extension(name) == value
    if not isinstance(envelope.data, bytes) and envelope.data is not ABSENT:
        assert theirs.get_data() == envelope.data


def test_we_read_what_the_sdk_writes() -> None:
    theirs = CloudEvent(
        {
            "id": "1",
            "source": "/orders",
            "type": "order.placed",
            "time": datetime(2026, 11, 30, 10, 15, tzinfo=UTC),
            "datacontenttype": "application/json",
            "causationid": "7",
        },
        {"order": "order-1042"},
    )

    ours = decode_structured(JSONFormat().write(theirs))

    assert (ours.id, ours.source, ours.type) == ("1", "/orders", "order.placed")
    assert ours.time == "2026-11-30T10:15:00Z"
    assert dict(ours.extensions) == {"causationid": "7"}
    assert ours.data == {"order": "order-1042"}


def test_time_stays_the_text_that_was_sent() -> None:
    text = "2026-11-30T10:15:00.123456789+01:00"

    assert decode_structured(body(time=text)).time == text


@pytest.mark.parametrize(
    "time", ["2016-12-31T23:59:60Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00"]
)
def test_times_that_no_datetime_can_hold_are_texts_like_others(time: str) -> None:
    assert decode_structured(body(time=time)).time == time


@pytest.mark.parametrize(
    "time",
    [
        "2026-11-30T24:00:00Z",
        "2026-02-30T00:00:00Z",
        "infinity",
        "2026-11-30 10:15:00Z",
        "2026-11-30T10:15:00",
    ],
)
def test_what_is_no_rfc_3339_time_is_refused(time: str) -> None:
    assert problems(body(time=time)).startswith("time: expected an RFC 3339 timestamp")


def test_data_that_is_null_is_not_data_that_is_absent() -> None:
    assert decode_structured(body(data=None)).data is None
    assert decode_structured(body()).data is ABSENT


def test_data_in_base64_is_bytes() -> None:
    assert decode_structured(body(data_base64="AP8=")).data == b"\x00\xff"
    assert "data_base64" in problems(body(data_base64="A P8="))
    assert "data_base64" in problems(body(data_base64=7))


def test_all_problems_are_told_at_once() -> None:
    found = problems(b'{"specversion": "0.3", "id": "", "type": 7, "ID": 1}')

    for name in ("specversion", "id: ", "source: ", "type: ", "'ID'"):
        assert name in found


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"source": "a b"}, "source: expected a URI reference"),
        ({"source": "/%zz"}, "source: expected a URI reference"),
        ({"dataschema": "/relative"}, "dataschema: expected an absolute URI"),
        ({"type": "x" * (IDENTITY_BYTES_MAX + 1)}, f"type: expected at most {IDENTITY_BYTES_MAX} bytes"),
        ({"subject": "€" * (KEY_BYTES_MAX // 3 + 1)}, f"subject: expected at most {KEY_BYTES_MAX} bytes"),
        ({"id": "a\nb"}, "id: expected no control characters"),
        ({"id": "\ufffe"}, "id: expected no control characters"),
        ({"ext": "x" * (ATTRIBUTE_BYTES_MAX + 1)}, f"ext: expected at most {ATTRIBUTE_BYTES_MAX} bytes"),
        ({"ext": 2**31}, "ext: expected an integer of 32 bits"),
        ({"ext": 1.5}, "ext: expected a string, a boolean or an integer"),
        ({"ext": {}}, "ext: expected a string, a boolean or an integer"),
        ({"ext\n": "x"}, "extension 'ext\\n'"),
        ({"x" * 65: "x"}, "extension 'xxx"),
        ({"datacontenttype": "text/plain\r\nx: y"}, "datacontenttype: expected no control characters"),
        ({f"e{n}": "x" for n in range(EXTENSIONS_MAX + 1)}, f"at most {EXTENSIONS_MAX} extension attributes"),
    ],
)
def test_hostile_attributes_are_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    assert problem in problems(body(**changes))


def test_an_object_is_expected() -> None:
    for text in (b"[]", b'"x"', b"7", b"null", b"true"):
        assert "expected an object" in problems(text)


def test_what_is_no_json_is_refused_as_json() -> None:
    with pytest.raises(MalformedJson):
        decode_structured(b'{"id": "a", "id": "b"}')


def test_writing_is_as_strict_as_reading() -> None:
    with pytest.raises(MalformedEvent, match="id"):
        encode_structured(Envelope(id="", source="/x", type="t"))
    with pytest.raises(MalformedEvent, match="of the specification's"):
        encode_structured(Envelope(id="1", source="/x", type="t", extensions={"data": "x"}))
    with pytest.raises(NotEncodable, match="/data/a"):
        encode_structured(Envelope(id="1", source="/x", type="t", data={"a": float("nan")}))


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("application/cloudevents+json", "application/cloudevents+json"),
        ("Application/CloudEvents+JSON ; charset=UTF-8", "application/cloudevents+json"),
        ('text/plain; a="b; c"', "text/plain"),
        ("application", ""),
        ("", ""),
        ("a/b c", ""),
        ("a/b; c", ""),
    ],
)
def test_a_media_type_is_compared_without_case_and_parameters(header: str, kind: str) -> None:
    assert media_type(header) == kind
