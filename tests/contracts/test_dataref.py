"""Tickets for data: only who has the key can make one. And data are compared with what their event says."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

import pytest

from contracts.dataref import DataWrong, Named, Ticket, Tickets, checked, is_named, named, naming
from contracts.envelope import ABSENT, Envelope, decode_structured, encode_structured
from contracts.limits import PAYLOAD_STORED_BYTES_MAX
from contracts.objects import digest_of
from contracts.vault import Vault

TICKETS: Final = Tickets(Vault(bytes(range(32))))
DATA: Final = b'{"text":"much"}'
ONE: Final = Ticket(
    tenant=1,
    execution=UUID(int=7),
    position=2**40,
    message=UUID(int=8),
    sha256=digest_of(DATA),
    size=len(DATA),
    expires=1_800_000_000,
)
EVENT: Final = Envelope(
    id="1", source="/waypost", type="t", datacontenttype="application/json", data={"a": 1}
)


def test_a_ticket_is_read_as_it_was_issued_and_is_the_same_each_time() -> None:
    text = TICKETS.issue(ONE)

    assert TICKETS.read(text) == ONE
    assert TICKETS.issue(ONE) == text
    assert text.isascii()
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


def test_no_bit_of_a_ticket_can_be_changed() -> None:
    whole = base64.urlsafe_b64decode(TICKETS.issue(ONE))
    for bit in range(len(whole) * 8):
        other = bytearray(whole)
        other[bit // 8] ^= 1 << bit % 8
        assert TICKETS.read(base64.urlsafe_b64encode(other).decode()) is None, bit


def test_what_has_another_form_is_no_ticket() -> None:
    text = TICKETS.issue(ONE)

    assert [TICKETS.read(it) for it in (text[:-1], text + "A", text + "\n", text[:-1] + "=", "")] == [
        None
    ] * 5


def test_a_ticket_of_another_key_is_none() -> None:
    assert TICKETS.read(Tickets(Vault(bytes(32))).issue(ONE)) is None


def test_an_event_names_its_data_and_says_which_they_are() -> None:
    event = naming(EVENT, "https://w.example/data/x", sha256=digest_of(DATA), size=len(DATA))

    event = decode_structured(encode_structured(event))

    assert event.data is ABSENT
    assert (is_named(event), is_named(EVENT)) == (True, False)
    assert checked(named(event), DATA) == DATA
    assert event.extensions == {
        "dataref": "https://w.example/data/x",
        "datahash": f"sha-256:{digest_of(DATA)}",
        "datasize": len(DATA),
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"datahash": "sha-256:" + "A" * 64}, "datahash: expected sha-256:"),
        ({"datahash": "md5:abc"}, "datahash: expected sha-256:"),
        ({"datahash": 7}, "datahash: expected sha-256:"),
        ({"dataref": True}, "datahash: expected sha-256: and 64 digits beside dataref"),
        ({"datasize": "15"}, "datasize: expected 1 to"),
        ({"datasize": True}, "datasize: expected 1 to"),
        ({"datasize": 0}, "datasize: expected 1 to"),
        ({"datasize": PAYLOAD_STORED_BYTES_MAX + 1}, "datasize: expected 1 to"),
    ],
)
def test_an_event_that_does_not_say_which_data_is_refused(changes: dict[str, Any], said: str) -> None:
    event = naming(EVENT, "https://w.example/data/x", sha256=digest_of(DATA), size=len(DATA))
    with pytest.raises(DataWrong, match=said):
        named(replace(event, extensions={**event.extensions, **changes}))


@pytest.mark.parametrize(
    ("data", "said"),
    [(DATA[:-1], "found 14"), (DATA + b"!", "found more"), (DATA.upper(), "found others"), (b"", "found 0")],
)
def test_data_that_are_others_are_found_out(data: bytes, said: str) -> None:
    with pytest.raises(DataWrong, match=said):
        checked(Named("https://w.example/data/x", digest_of(DATA), len(DATA)), data)
