"""Payloads at rest: what is public, what opens where, and which key is missing."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from contracts.codec import (
    Codec,
    PayloadKeyMissing,
    PayloadUnreadable,
    Sealing,
    keys_of,
    open_body,
    open_document,
    place,
    seal_body,
    seal_document,
)

OLD, NEW = base64.b64encode(bytes(32)).decode(), base64.b64encode(bytes(range(32))).decode()
HERE = place("journal", 1, "e", 1)
SECRET = "canary-4242"
counter = iter(range(1_000_000))


def chance(size: int) -> bytes:
    return next(counter).to_bytes(size, "big")


def codec(text: str) -> Codec:
    return Codec(keys_of(text), chance)


@pytest.fixture(autouse=True)
def keys() -> Iterator[Codec]:
    Sealing.codec = codec(f"new:{NEW},old:{OLD}")
    yield Sealing.codec
    Sealing.codec = None


SAID: dict[str, Any] = {
    "kind": "call",
    "name": "charge",
    "args": {"do": "call", "endpoint": "bank", "name": "bank.charge", "data": {"card": SECRET}},
    "undo": {"do": "step", "name": "shop:undo", "data": [SECRET]},
    "error": {"code": "odd", "detail": SECRET, "data": SECRET},
    "whatever-comes-later": SECRET,
}


def test_what_is_searched_by_stays_and_all_else_is_in_the_box(keys: Codec) -> None:
    sealed = seal_document(keys, json.dumps(SAID), HERE)

    found = json.loads(sealed)
    assert SECRET not in sealed
    assert found.pop("sealed")["key"] == "new"
    assert found == {
        "kind": "call",
        "name": "charge",
        "args": {"do": "call", "endpoint": "bank", "name": "bank.charge"},
        "undo": {"do": "step", "name": "shop:undo"},
        "error": {"code": "odd"},
    }
    assert open_document(json.loads(sealed), HERE) == SAID


def test_what_has_nothing_private_is_as_it_was(keys: Codec) -> None:
    said = {"kind": "timer", "name": "sleep", "due": "2027-01-01"}

    assert json.loads(seal_document(keys, json.dumps(said), HERE)) == said


def test_a_body_opens_as_the_very_bytes_that_were_sealed(keys: Codec) -> None:
    body = b'{"type":"x", "data": 1.0}'

    sealed = seal_body(keys, body, HERE, {"type": "x"})

    assert b"1.0" not in sealed
    assert b',"type":"x"' in sealed
    assert open_body(sealed, HERE) == body
    assert open_body(body, HERE) == body


def test_what_is_moved_to_another_place_does_not_open(keys: Codec) -> None:
    sealed = json.loads(seal_document(keys, json.dumps(SAID), HERE))

    for elsewhere in (place("journal", 2, "e", 1), place("journal", 1, "f", 1), place("outbox", 1, "e", 1)):
        with pytest.raises(PayloadUnreadable, match="sealed with key 'new', does not open there"):
            open_document(sealed, elsewhere)


def test_a_key_id_that_is_changed_does_not_open_though_the_key_is_there(keys: Codec) -> None:
    Sealing.codec = codec(f"new:{NEW},other:{NEW}")
    sealed = json.loads(seal_document(keys, json.dumps(SAID), HERE))
    sealed["sealed"]["key"] = "other"

    with pytest.raises(PayloadUnreadable):
        open_document(sealed, HERE)


def test_old_keys_open_and_a_missing_one_is_named(keys: Codec) -> None:
    sealed = json.loads(seal_document(codec(f"old:{OLD}"), json.dumps(SAID), HERE))
    assert open_document(sealed, HERE) == SAID

    for left in (codec(f"new:{NEW}"), None):
        Sealing.codec = left
        with pytest.raises(PayloadKeyMissing, match="payload key 'old': expected it in WAYPOST_PAYLOAD_KEYS"):
            open_document(sealed, HERE)


def test_no_two_boxes_of_the_same_are_alike(keys: Codec) -> None:
    assert seal_document(keys, json.dumps(SAID), HERE) != seal_document(keys, json.dumps(SAID), HERE)


@pytest.mark.parametrize(
    "text",
    ["", "a", f"a:{NEW[:-8]}", f"a b:{NEW}", f"a:{NEW},a:{OLD}", f":{NEW}", f"{'x' * 33}:{NEW}", "a:§"],
)
def test_keys_that_are_none_are_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ValueError, match="expected") as refused:
        keys_of(text)

    assert len(text) < 20 or text not in str(refused.value)
    assert NEW not in str(refused.value)


def test_keys_are_read_with_and_without_padding_and_shown_by_nobody() -> None:
    assert keys_of(f" new:{NEW.rstrip('=')} , old:{OLD}") == [("new", bytes(range(32))), ("old", bytes(32))]
    assert NEW not in repr(codec(f"new:{NEW}"))
