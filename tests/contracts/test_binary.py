from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC
from typing import Any, Final
from urllib.parse import quote

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_binary_event, to_binary_event
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from contracts.binary import decode_binary, decoded
from contracts.envelope import ABSENT, CORE, Envelope, decode_structured, encode_structured
from contracts.errors import MalformedEvent
from contracts.limits import ATTRIBUTE_BYTES_MAX, EXTENSIONS_MAX, IDENTITY_BYTES_MAX, KEY_BYTES_MAX
from tests.contracts.conformance import Scenario, events, scenarios
from tests.contracts.test_envelope import json_data, names, printable

SAFE: Final = "".join(map(chr, range(0x21, 0x7F))).replace('"', "").replace("%", "")
MINIMAL: Final = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/orders", "ce-type": "order.placed"}

strings = st.dictionaries(names, printable, max_size=4)
times = st.datetimes(timezones=st.just(UTC)).map(lambda at: at.isoformat().replace("+00:00", "Z"))
bodies = st.tuples(st.just("application/json"), json_data.map(lambda data: json.dumps(data).encode())) | (
    st.tuples(st.sampled_from(["application/octet-stream", "text/plain; charset=latin1"]), st.binary())
)
envelopes = st.builds(
    Envelope,
    id=printable,
    source=st.from_regex(r"/[a-z0-9/]{0,20}", fullmatch=True) | st.just("https://a.example/x?y=1#z"),
    type=printable,
    subject=st.none() | printable,
    time=st.none() | times,
    dataschema=st.sampled_from([None, "https://a.example/schema", "urn:x:y"]),
    extensions=strings,
)


def headers_of(envelope: Envelope) -> dict[str, str]:
    """The headers of an event, as the binding says that they are made."""
    said = {name: getattr(envelope, name) for name in CORE if name != "datacontenttype"}
    attributes = {"specversion": "1.0", **said, **envelope.extensions}
    made = {
        f"ce-{name}": quote(canonical(value), safe=SAFE)
        for name, value in attributes.items()
        if value is not None
    }
    return made | ({"content-type": envelope.datacontenttype} if envelope.datacontenttype else {})


def canonical(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(changes: Mapping[str, str] | None = None, body: bytes = b"") -> Envelope:
    return decode_binary({**MINIMAL, **(changes or {})}.items(), body)


def problems(changes: Mapping[str, str], body: bytes = b"") -> str:
    with pytest.raises(MalformedEvent) as refused:
        read(changes, body)
    return "; ".join(refused.value.problems)


@pytest.mark.parametrize("scenario", scenarios())
def test_the_conformance_suite_s_requests_are_read_in_both_modes(scenario: Scenario) -> None:
    structured = "application/cloudevents+json" in scenario.head[-1]

    event = decode_structured(scenario.body) if structured else decode_binary(scenario.headers, scenario.body)

    attributes = {name: getattr(event, name, "1.0") for name in scenario.attributes}
    assert attributes == scenario.attributes
    assert event.data == scenario.data


def as_binary(event: Mapping[str, Any]) -> tuple[dict[str, str], bytes]:
    """Headers and body that say what the members of a JSON event say."""
    said = {name: value for name, value in event.items() if value is not None}
    body, kind = said.pop("data", "").encode(), said.pop("datacontenttype", None)
    headers = {f"ce-{name}": quote(canonical(value), safe=SAFE) for name, value in said.items()}
    return headers | ({} if kind is None else {"content-type": kind}), body


@pytest.mark.parametrize("event", events("valid-events.json"))
def test_a_valid_event_of_the_conformance_suite_is_the_same_in_both_modes(event: dict[str, Any]) -> None:
    headers, body = as_binary(event)

    found, wanted = decode_binary(headers.items(), body), decode_structured(json.dumps(event).encode())

    assert [getattr(found, name) for name in CORE] == [getattr(wanted, name) for name in CORE]
    assert found.extensions == {name: canonical(value) for name, value in wanted.extensions.items()}
    assert found.data == (wanted.data.encode() if isinstance(wanted.data, str) else wanted.data)


JSON_ALONE: Final = {
    "invalidNumericId",  # headers have no numbers
    "invalidObjectId",  # nor objects
    "invalidCapitalizedExtension",  # nor capitals
    "invalidBothDataAndDataBase64",  # nor two bodies
}
"""What only JSON can say."""


@pytest.mark.parametrize("event", [it for it in events("invalid-events.json") if it.id not in JSON_ALONE])
def test_an_invalid_event_of_the_conformance_suite_is_refused_in_binary_mode_too(
    event: dict[str, Any],
) -> None:
    headers, body = as_binary(event)

    with pytest.raises(MalformedEvent):
        decode_binary(headers.items(), body)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("Euro%20%E2%82%AC%20%F0%9F%98%80", "Euro € 😀"),  # the binding's own example
        ("%e2%82%ac", "€"),
        ("%41", "A"),
        ("%2541", "%41"),
        ("a b", "a b"),
        ('"a b"', "a b"),
        (r'"a\"b\\c"', 'a"b\\c'),
        ('"%22"', '"'),
        ('""', ""),
        ("", ""),
        ("/a?b=c#d;e,(f)<g>\\", "/a?b=c#d;e,(f)<g>\\"),
    ],
)
def test_a_value_is_unquoted_and_then_percent_decoded_once(value: str, text: str) -> None:
    assert decoded(value) == text


@pytest.mark.parametrize(
    "value",
    ["%C0%A0", "%ED%A0%80", "%FF", "%F5%80%80%80", "%E2%82", "%", "100%", "%zz", "%4", "%E2%82%A", "%+1"],
)
def test_what_is_no_percent_encoded_utf_8_is_refused(value: str) -> None:
    assert "subject: expected" in problems({"ce-subject": value})


@pytest.mark.parametrize(
    "value",
    ['"', '"a', 'a"', '"a"b', 'a"b"c', '"a" "b"', '"a\\"', "é", "\udce9", "\t", "a\tb", "a\x7f", "a\x1b"],
)
def test_what_is_neither_visible_ascii_nor_one_quoted_string_is_refused(value: str) -> None:
    assert "subject: expected" in problems({"ce-subject": value})


@pytest.mark.parametrize(
    "value", ["%00", "%0D%0Aa", "%7F", "%C2%80", "%EF%BF%BE", "%F0%9F%BF%BF", '"%1b[2J"']
)
def test_what_no_attribute_may_hold_may_not_be_encoded_either(value: str) -> None:
    for name in ("id", "source", "subject", "more"):
        assert f"{name}: expected" in problems({f"ce-{name}": value})


def test_names_have_no_case() -> None:
    event = decode_binary([(name.upper(), value) for name, value in MINIMAL.items()], b"")

    assert event == read()


@pytest.mark.parametrize("again", ["ce-id", "CE-ID", "Ce-Id"])
def test_a_header_that_comes_twice_is_refused_whether_it_says_the_same_or_not(again: str) -> None:
    for value in ("1", "2"):
        with pytest.raises(MalformedEvent, match="id: expected one header, found 2"):
            decode_binary([*MINIMAL.items(), (again, value)], b"")


def test_two_content_types_are_refused() -> None:
    with pytest.raises(MalformedEvent, match="datacontenttype: expected one header"):
        decode_binary([*MINIMAL.items(), ("content-type", "a/b"), ("Content-Type", "a/b")], b"")


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({"ce-datacontenttype": "text/plain"}, "datacontenttype: expected it in the header content-type"),
        ({"ce-data": "x"}, "data: expected it in the body"),
        ({"ce-data_base64": "AA=="}, "data_base64: expected it in the body"),
        ({"ce-": "x"}, "extension ''"),
        ({"ce-a-b": "x"}, "extension 'a-b'"),
        ({"ce-a-b": "%"}, "a-b: expected two hexadecimal digits"),
        ({f"ce-{'x' * 65}": "x"}, "extension 'xxx"),
        ({"ce-specversion": "0.3"}, "specversion: expected '1.0', found '0.3'"),
        ({"ce-id": ""}, "id: expected a non-empty string"),
        ({"ce-id": "x" * (IDENTITY_BYTES_MAX + 1)}, f"id: expected at most {IDENTITY_BYTES_MAX} bytes"),
        (
            {"ce-subject": "%E2%82%AC" * (KEY_BYTES_MAX // 3 + 1)},
            f"subject: expected at most {KEY_BYTES_MAX}",
        ),
        ({"ce-more": "x" * (ATTRIBUTE_BYTES_MAX + 1)}, f"more: expected at most {ATTRIBUTE_BYTES_MAX} bytes"),
        ({"ce-source": "a b"}, "source: expected a URI reference"),
        ({"ce-time": "lunchtime"}, "time: expected an RFC 3339 timestamp"),
        ({"content-type": "xyz"}, "datacontenttype: expected a media type"),
        ({"content-type": ""}, "datacontenttype: expected a non-empty string"),
        ({"content-type": "text/plain; a=\udcff"}, "datacontenttype: expected"),
        (
            {f"ce-e{n}": "x" for n in range(EXTENSIONS_MAX + 1)},
            f"at most {EXTENSIONS_MAX} extension attributes",
        ),
    ],
)
def test_hostile_headers_are_refused_by_name(headers: dict[str, str], problem: str) -> None:
    assert problem in problems(headers)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(MalformedEvent) as refused:
        decode_binary([("ce-id", "%"), ("ce-time", "never"), ("content-type", "application/json")], b"{")

    told = [problem.partition(":")[0] for problem in refused.value.problems]
    assert told == ["id", "specversion", "source", "type", "time", "data"]


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON",
        "application/json ; charset=UTF-8",
        'text/json; charset="utf-8"',
        "application/vnd.a+json; charset=us-ascii",
        "model/gltf+JSON",
    ],
)
def test_the_body_of_a_json_type_is_json(kind: str) -> None:
    event = read({"content-type": kind}, b' "just a string"\n')

    assert (event.data, event.datacontenttype) == ("just a string", kind)
    assert read({"content-type": kind}, b"null").data is None


@pytest.mark.parametrize(
    "body",
    [
        b"just a string",
        b"{",
        b"NaN",
        b'{"a": 1, "a": 2}',
        b'"\\u0000"',
        b"[" * 200_000,
        b"1" * 5000,
        b"\xff",
        b" ",
    ],
)
def test_json_that_is_none_is_refused(body: bytes) -> None:
    assert "data: expected strict JSON" in problems({"content-type": "application/json"}, body)


@pytest.mark.parametrize(
    "kind",
    [
        "application/json; charset=utf-16",
        'application/json; charset="UTF-7"',
        "application/json; a=b; Charset=latin1",
        "application/json; charset=utf-8; charset=utf-16",
    ],
)
def test_json_in_another_charset_is_refused(kind: str) -> None:
    assert "datacontenttype: expected JSON in UTF-8" in problems({"content-type": kind}, b"{}")


@pytest.mark.parametrize(
    "kind",
    ["text/plain; charset=utf-16", "application/xml", "application/jsonp", 'a/b; x="application/json"'],
)
def test_the_body_of_another_type_is_bytes_and_stays_as_it_is(kind: str) -> None:
    assert read({"content-type": kind}, b'\xff"{}').data == b'\xff"{}'


def test_a_body_without_a_type_is_bytes() -> None:
    event = read({}, b'{"a": 1}')

    assert (event.data, event.datacontenttype) == (b'{"a": 1}', None)


@pytest.mark.parametrize(
    ("body", "data"),
    [(b'"x"', "x"), (b'"hello \\"you\\""', 'hello "you"'), (b"true", True), (b"null", None), (b"7", 7)],
)
def test_json_that_is_a_string_stays_in_its_quotes(body: bytes, data: Any) -> None:
    # cloudevents/spec 558: some senders leave the quotes away; then it is no JSON.
    kind = {"content-type": "application/json"}

    assert read(kind, body).data == data
    assert encode_structured(read(kind, body)).endswith(b'"data":%s}' % body)
    with pytest.raises(MalformedEvent, match="data: expected strict JSON"):
        read(kind, b"x")


@pytest.mark.parametrize("kind", [{}, {"content-type": "application/json"}, {"content-type": "a/b"}])
def test_an_empty_body_is_no_data(kind: dict[str, str]) -> None:
    assert read(kind).data is ABSENT


@given(envelopes, bodies)
def test_an_event_survives_the_wire_in_binary_mode(envelope: Envelope, said: tuple[str, bytes]) -> None:
    kind, body = said
    headers = {**headers_of(envelope), "content-type": kind, "x-request-id": "7"}

    read = decode_binary(headers.items(), body)

    assert [getattr(read, name) for name in CORE if name != "datacontenttype"] == [
        getattr(envelope, name) for name in CORE if name != "datacontenttype"
    ]
    assert read.extensions == envelope.extensions
    assert read.data == (json.loads(body) if kind == "application/json" else body or ABSENT)


@given(envelopes, bodies)
def test_an_event_in_headers_is_the_one_in_a_body(envelope: Envelope, said: tuple[str, bytes]) -> None:
    """What is kept of one in headers is its structured form, and that has the bytes of its data."""
    headers = {**headers_of(envelope), "content-type": said[0]}

    read = decode_binary(headers.items(), said[1])

    kept = encode_structured(replace(read, data=said[1] or ABSENT))
    assert decode_structured(encode_structured(read)) == read
    assert decode_structured(kept) == replace(read, data=said[1] or ABSENT)
    assert headers_of(decode_structured(kept)) == headers


@given(envelopes, st.dictionaries(printable, json_data, max_size=3))
def test_the_sdk_reads_the_same_where_it_is_right(envelope: Envelope, data: dict[str, Any]) -> None:
    """It computes with times, and mends or leaves alone what it should refuse or unquote."""
    headers, body = {**headers_of(envelope), "content-type": "application/json"}, json.dumps(data).encode()

    theirs, ours = from_binary_event(HTTPMessage(headers, body)), decode_binary(headers.items(), body)

    assert theirs.get_data() == ours.data == data
    for name, value in theirs.get_attributes().items():
        if name not in {"specversion", "time"}:
            assert value == getattr(ours, name, ours.extensions.get(name))


@given(envelopes, st.dictionaries(printable, json_data, max_size=3))
def test_we_read_what_the_sdk_writes(envelope: Envelope, data: dict[str, Any]) -> None:
    """Of objects: other JSON it writes as Python has it, a string without its quotes."""
    attributes = {name: getattr(envelope, name) for name in CORE if name != "time"} | dict(
        envelope.extensions
    )
    said = {name: value for name, value in attributes.items() if value is not None}
    message = to_binary_event(CloudEvent({**said, "datacontenttype": "application/json"}, data))

    event = decode_binary(message.headers.items(), message.body)

    assert event.data == data
    assert {name: getattr(event, name, event.extensions.get(name)) for name in said} == said


wild = st.text(st.characters(), max_size=20) | st.sampled_from(
    ["%41", "%", '"', '"a"', "\udce9", "%C0%A0", "1.0"]
)
wild_names = (
    st.sampled_from(["content-type", "ce-", "CE-ID", "ce-data", "ce-x", "ce-X", "ce-a-b", *MINIMAL]) | wild
)


@given(
    st.lists(st.tuples(wild_names, wild), max_size=6),
    st.sampled_from(["application/json", "text/plain", "application/json; charset=x"]) | wild,
    st.binary(max_size=20) | json_data.map(lambda data: json.dumps(data).encode()),
)
def test_whatever_is_sent_is_an_event_that_can_be_kept_or_malformed(
    headers: list[tuple[str, str]], kind: str, body: bytes
) -> None:
    sent = [("content-type", kind), *MINIMAL.items(), *headers]
    try:
        event = decode_binary(sent, body)
    except MalformedEvent as error:
        assert all(problem.isprintable() for problem in error.problems)
        return
    kept = decode_structured(encode_structured(replace(event, data=body or ABSENT)))
    assert kept == replace(event, data=body or ABSENT)
