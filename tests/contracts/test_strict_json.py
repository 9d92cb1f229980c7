from __future__ import annotations

import json
import math
from enum import IntEnum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import MalformedJson, NotEncodable, TooLarge
from contracts.limits import JSON_DEPTH_MAX, JSON_DIGITS_MAX
from contracts.strict_json import canonical, decode, encode

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


@given(values)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert decode(encode(value, what="value"), what="value") == value
    assert decode(encode(value, what="value").encode(), what="value") == value


@given(values)
def test_pythons_own_reader_reads_the_same(value: Any) -> None:
    assert json.loads(encode(value, what="value")) == value


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_a_text_is_read_or_refused_and_nothing_else_happens(text: bytes) -> None:
    try:
        value = decode(text, what="text")
    except MalformedJson as refused:
        assert str(refused).isprintable()
    else:
        assert decode(encode(value, what="value"), what="value") == value


@given(
    st.recursive(
        st.none() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    )
)
def test_a_value_is_written_or_refused_and_nothing_else_happens(value: Any) -> None:
    try:
        text = encode(value, what="value")
    except NotEncodable as refused:
        assert str(refused).isprintable()
    else:
        assert decode(text, what="value") == value


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        (b"NaN", "the top", "NaN"),
        (b'{"a": [1, -Infinity]}', "/a/1", "-Infinity"),
        (b"[1e5000]", "/0", "larger than any number"),
        (b'{"a": -1e400}', "/a", "larger than any number"),
        (b"[" + b"1" * (JSON_DIGITS_MAX + 1) + b"]", "/0", f"{JSON_DIGITS_MAX + 1} digits"),
        (b"[" * 100_000, f"character {JSON_DEPTH_MAX}", "levels"),
        (b'{"a":' * 1_000 + b"1" + b"}" * 1_000, "character 320", "levels"),
        (b'{"id": "a", "id": "b"}', "/id", "'id' twice"),
        (b'{"x": {"a": 1, "\\u0061": 2}}', "/x/a", "'a' twice"),
        (b'{"a/b~": [NaN]}', "/a~1b~0/0", "NaN"),
        (b'["\\u0000"]', "/0", "NUL"),
        (b'{"\\u0000": 1}', "the top", "a name with NUL"),
        (b'{"a": "\\ud800"}', "/a", "lone surrogate (U+D800)"),
        (b'{"a": "\\uDC00\\ud800"}', "/a", "lone surrogate (U+DC00)"),
        (b'"\xed\xa0\x80"', "byte 1", "no UTF-8"),
        (b'"\xc0\xaf"', "byte 1", "no UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "byte 0", "no UTF-8"),
        (b"\xef\xbb\xbf{}", "byte 0", "byte order mark"),
        (b'"\x00"', "line 1, column 2", "control character"),
        (b"{} {}", "line 1, column 4", "more after its end"),
        (b"", "line 1, column 1", "end"),
        (b"[1", "line 1, column 3", "end"),
        (b"{'a': 1}", "line 1, column 2", "no name in double quotes"),
        (b"[1] // one", "line 1, column 5", "more after its end"),
        (b"[1,]", "line 1, column 4", "no value"),
        (b"[01]", "line 1, column 3", "no comma"),
        ("[\uff11]".encode(), "line 1, column 2", "no value"),
        (b"[1e400x", "an unnamed place", "out of range"),
    ],
)
def test_hostile_text_is_refused_with_its_place(text: bytes, place: str, found: str) -> None:
    with pytest.raises(MalformedJson) as refused:
        decode(text, what="body")

    assert refused.value.place == place
    assert found in refused.value.found
    assert str(refused.value).startswith("body: expected strict JSON, found ")


def test_a_text_with_a_lone_surrogate_is_refused_as_bytes_with_one_are() -> None:
    with pytest.raises(MalformedJson, match=r"lone surrogate .* at character 2"):
        decode('["\ud800"]', what="body")


@pytest.mark.parametrize(
    ("value", "place", "found"),
    [
        (math.nan, "the top", "nan"),
        ({"a": [1, math.inf]}, "/a/1", "inf"),
        ({"a": "x\0y"}, "/a", "NUL"),
        ({"a": ["x", "\ud800"]}, "/a/1", "lone surrogate"),
        ({"a": {"\udfff": 1}}, "/a", "a name with a lone surrogate"),
        ({1: 2}, "the top", "the name 1, which is no string"),
        ({"a": {None: 2}}, "/a", "the name None"),
        ({"a": b"x"}, "/a", "type bytes"),
        ([{1, 2}], "/0", "type set"),
        ({"a": 10**JSON_DIGITS_MAX}, "/a", f"more than {JSON_DIGITS_MAX} digits"),
    ],
)
def test_what_has_no_json_form_is_refused_with_its_place(value: object, place: str, found: str) -> None:
    with pytest.raises(NotEncodable) as refused:
        encode(value, what="result")

    assert refused.value.place == place
    assert found in refused.value.found


def test_nesting_ends_at_the_same_level_for_writer_and_reader() -> None:
    deepest = nested(JSON_DEPTH_MAX)
    assert decode(encode(deepest, what="value"), what="value") == deepest

    with pytest.raises(NotEncodable, match="levels"):
        encode([deepest], what="value")
    with pytest.raises(MalformedJson, match="levels"):
        decode(json.dumps([deepest]), what="value")


def test_a_wide_text_may_have_any_number_of_brackets() -> None:
    wide = [{"a": [index]} for index in range(1000)]

    assert decode(encode(wide, what="value"), what="value") == wide


def test_brackets_in_strings_are_no_levels() -> None:
    text = encode(["[{" * 100, '"[', "\\"], what="value")

    assert decode(text, what="value") == ["[{" * 100, '"[', "\\"]


def test_a_value_within_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)

    with pytest.raises(NotEncodable, match="levels"):
        encode(ring, what="value")


def test_the_largest_integer_is_kept_exactly_with_either_sign() -> None:
    for value in (10**JSON_DIGITS_MAX - 1, 1 - 10**JSON_DIGITS_MAX, 2**53 + 1):
        assert decode(encode(value, what="value"), what="value") == value


def test_escapes_that_only_look_hostile_are_read() -> None:
    assert decode(r'["\\u0000", "\\ud800", "\ud83d\ude00"]', what="value") == ["\\u0000", "\\ud800", "😀"]
    assert encode("\\u0000", what="value") == r'"\\u0000"'


def test_names_that_mean_something_elsewhere_are_data() -> None:
    hostile = {"__proto__": 1, "constructor": 2, "$ref": "#", "@type": "x"}

    assert decode(encode(hostile, what="value"), what="value") == hostile


def test_tuples_are_arrays_and_enumerations_are_their_values() -> None:
    assert encode({"a": (1, Colour.RED, Level.HIGH)}, what="value") == '{"a":[1,"red",3]}'


def test_non_ascii_characters_stand_for_themselves() -> None:
    assert encode({"ü": "€"}, what="value") == '{"ü":"€"}'


def test_sizes_are_counted_in_bytes() -> None:
    assert encode("€€", what="value", bytes_max=8) == '"€€"'

    with pytest.raises(TooLarge) as refused:
        encode("€€", what="value", bytes_max=7)
    assert (refused.value.size, refused.value.limit) == (8, 7)
    with pytest.raises(TooLarge):
        decode('"€€"', what="value", bytes_max=7)
    with pytest.raises(TooLarge):
        decode('"€€"'.encode(), what="value", bytes_max=7)


def test_a_hostile_name_cannot_break_out_of_an_error_text() -> None:
    name = "\x1b[2J\n" + "x" * 5000

    with pytest.raises(NotEncodable) as refused:
        encode({name: {name: math.nan}}, what="value")

    assert str(refused.value).isascii()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


@given(values)
def test_equal_values_have_one_canonical_text(value: Any) -> None:
    turned = json.loads(json.dumps(value), object_pairs_hook=lambda pairs: dict(reversed(pairs)))

    assert canonical(turned) == canonical(value)
