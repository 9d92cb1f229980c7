"""Contracts that fit in a few lines each: outcomes, identities, traces, backoff, vault, errors."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import backoff, errors, trace
from contracts.errors import BadSecret, MalformedEvent, MalformedJson, VaultError, WaypostError, shown
from contracts.identifiers import execution_key, message_id, uuid7
from contracts.observer import Observer, Silent
from contracts.outcome import Outcome
from contracts.vault import Vault, secret_context

EXECUTION = UUID("0199a000-0000-7000-8000-000000000001")
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
EPOCH = datetime.fromtimestamp(0, UTC).replace(tzinfo=None)
PARENT = f"00-{'1' * 32}-{'2' * 16}-01"
KEY, NONCE = b"k" * 32, b"n" * 12
OWNER = secret_context(tenant=1, owner_kind="endpoint", owner_name="payments", key_id="1")


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome("done", value={"charge": "c-1"}),
        Outcome("done"),
        Outcome("refused", code="declined", detail="no money", data={"limit": 3}),
        Outcome("failed", code="broke"),
        Outcome("unknown", code="sent"),
        Outcome("timed_out"),
    ],
)
def test_an_outcome_survives_storage(outcome: Outcome) -> None:
    assert Outcome.from_json(outcome.as_json()) == outcome


def test_the_flat_form_of_the_database_is_read() -> None:
    flat = {"outcome": "refused", "code": "never-sent"}

    assert Outcome.from_json(flat) == Outcome("refused", code="never-sent")


@pytest.mark.parametrize(
    "stored", [None, [], "done", {}, {"outcome": "maybe"}, {"outcome": "failed", "error": "x"}]
)
def test_what_is_no_outcome_is_refused(stored: Any) -> None:
    with pytest.raises(MalformedJson, match="outcome"):
        Outcome.from_json(stored)


def test_the_same_ask_has_the_same_message_and_any_other_has_another() -> None:
    asked = message_id(EXECUTION, 0, "charge", at=NOON)

    assert asked == message_id(EXECUTION, 0, "charge", at=NOON)
    others = {
        message_id(EXECUTION, 1, "charge", at=NOON),
        message_id(EXECUTION, 0, "charge#2", at=NOON),
        message_id(EXECUTION, 0, "charge", at=NOON + timedelta(milliseconds=1)),
    }
    assert len({asked} | others) == 4


def test_a_key_names_execution_epoch_and_path() -> None:
    assert execution_key(EXECUTION, 2, "all.1/charge") == f"{EXECUTION}/2/all.1/charge"


@given(st.datetimes(min_value=EPOCH, timezones=st.just(UTC)), st.binary(min_size=10, max_size=40))
def test_an_id_has_the_layout_of_version_7(at: datetime, chance: bytes) -> None:
    made = uuid7(at=at, chance=chance)

    assert (made.version, made.variant) == (7, "specified in RFC 4122")
    assert made.int >> 80 == (at - EPOCH.replace(tzinfo=UTC)) // timedelta(milliseconds=1)


@given(st.lists(st.datetimes(min_value=EPOCH, timezones=st.just(UTC)), min_size=2))
def test_ids_sort_by_their_milliseconds(times: list[datetime]) -> None:
    ordered = sorted(times, key=lambda at: uuid7(at=at, chance=bytes(10)))

    milliseconds = [(at - EPOCH.replace(tzinfo=UTC)) // timedelta(milliseconds=1) for at in ordered]
    assert milliseconds == sorted(milliseconds)


@pytest.mark.parametrize("at", [NOON.replace(tzinfo=None), datetime(1969, 12, 31, tzinfo=UTC)])
def test_an_id_needs_a_time_that_fits(at: datetime) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        uuid7(at=at, chance=bytes(10))


def test_an_id_needs_enough_chance() -> None:
    with pytest.raises(ValueError, match="10 bytes"):
        uuid7(at=NOON, chance=bytes(9))


def test_a_child_span_stays_in_its_trace_and_is_named_by_its_key() -> None:
    child = trace.parse(trace.child(PARENT, "charge"))

    assert child is not None
    assert child.trace_id == "1" * 32
    assert child.span_id != "2" * 16
    assert trace.child(PARENT, "charge") == str(child)
    assert trace.child(PARENT, "ship") != str(child)


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "00",
        PARENT.upper().replace("00-", "0G-"),
        PARENT.replace("1", "0", 32),
        PARENT.replace("2", "0", 16),
        f"ff{PARENT[2:]}",
        f"{PARENT}-more",
    ],
)
def test_a_broken_parent_starts_a_trace_of_its_own(broken: str) -> None:
    started = trace.parse(trace.child(broken, "charge"))

    assert trace.parse(broken) is None
    assert started is not None
    assert started.trace_id != "1" * 32


def test_a_later_version_of_the_header_is_read_as_far_as_we_know_it() -> None:
    assert str(trace.parse(f"01{PARENT[2:]}-more")) == PARENT


def test_commands_are_tried_again_quickly_and_then_each_minute() -> None:
    waits = [backoff.COMMAND_SCHEDULE.after(attempt) for attempt in range(1, 8)]

    assert waits == [timedelta(seconds=seconds) for seconds in (1, 2, 5, 10, 30, 60, 60)]
    with pytest.raises(ValueError, match="counted from 1"):
        backoff.COMMAND_SCHEDULE.after(0)


def test_a_vault_opens_what_it_sealed() -> None:
    sealed = Vault(KEY).seal(b"whsec", nonce=NONCE, associated=OWNER)

    assert b"whsec" not in sealed
    assert Vault(KEY).open(sealed, nonce=NONCE, associated=OWNER) == b"whsec"


@pytest.mark.parametrize("change", ["key", "nonce", "owner", "ciphertext", "short"])
def test_a_vault_opens_nothing_that_was_changed_and_names_the_owner(change: str) -> None:
    sealed = Vault(KEY).seal(b"whsec", nonce=NONCE, associated=OWNER)
    vault = Vault(b"x" * 32 if change == "key" else KEY)
    other = secret_context(tenant=2, owner_kind="endpoint", owner_name="payments", key_id="1")
    found = {"ciphertext": bytes([sealed[0] ^ 1]) + sealed[1:], "short": b"x"}.get(change, sealed)

    with pytest.raises(VaultError, match="payments") as refused:
        vault.open(
            found,
            nonce=b"m" * 12 if change == "nonce" else NONCE,
            associated=other if change == "owner" else OWNER,
        )

    assert "whsec" not in str(refused.value)


def test_contexts_of_unlike_owners_are_unlike() -> None:
    one = secret_context(tenant=1, owner_kind="sender", owner_name='a","b', key_id="c")
    two = secret_context(tenant=1, owner_kind="sender", owner_name="a", key_id='b","c')

    assert one != two


@pytest.mark.parametrize("text", ["", "short", "QUJD", "!" * 44, "é" * 44])
def test_what_is_no_vault_key_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(BadSecret, match="32 bytes") as refused:
        Vault.from_text(text)

    assert not text or text not in str(refused.value)


def test_a_vault_reads_base64_with_or_without_padding_and_hides_it() -> None:
    padded = "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="
    sealed = Vault(KEY).seal(b"x", nonce=NONCE, associated=b"")

    for text in (padded, padded.rstrip("="), f" {padded}\n"):
        assert Vault.from_text(text).open(sealed, nonce=NONCE, associated=b"") == b"x"
    assert "k" not in repr(Vault(KEY))


def test_a_nonce_has_twelve_bytes() -> None:
    with pytest.raises(ValueError, match="12 bytes"):
        Vault(KEY).seal(b"x", nonce=b"n", associated=b"")


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    drawn = (errors.__doc__ or "").partition("WaypostError")[2].partition("`code`")[0]
    names = {
        name for name, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, WaypostError)
    }

    assert {word for word in drawn.split() if word in names} == names - {"WaypostError"}


def test_every_error_has_a_code_of_its_own() -> None:
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, WaypostError)]

    assert len({one.code for one in classes}) == len(classes)


def test_what_strangers_wrote_is_shown_in_one_short_line() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shown("\x1b[2J\n\u202e") == r"'\x1b[2J\n\u202e'"
    assert len(shown("x" * 10_000)) < 100
    assert len(shown(b"x" * 10_000)) < 100
    assert len(shown(["x" * 10_000])) < 100
    assert shown(Hostile()) == "<Hostile>"


def test_an_error_names_a_bounded_number_of_problems() -> None:
    assert len(str(MalformedEvent(["x" * 100] * 1000))) < 5000


def test_the_silent_observer_hears_any_moment() -> None:
    observer: Observer = Silent()

    observer.saw("event.stored", tenant=1)
