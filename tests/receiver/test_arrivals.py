from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from contracts.envelope import Envelope
from contracts.errors import MalformedEvent, NotAllowed
from receiver.arrivals import Arrival, mail_of
from receiver.senders import Sender
from tests.receiver.world import SECRET

PAYMENTS = Sender(1, "payments", "enabled", (SECRET,))
MESSAGE = UUID("0199a000-0000-7000-8000-000000000001")
DONE = Envelope(
    id="r-1",
    source="/payments",
    type="payment.charge.done",
    subject="order-1042",
    time="2026-11-30T12:00:00Z",
    data={"charge": "ch-1", "amount": 4200},
    extensions={"causationid": str(MESSAGE), "traceparent": "00-a"},
)


def arrival(envelope: Envelope) -> Arrival:
    return Arrival.of(PAYMENTS, "msg_1", envelope, b"")


def digest(**changes: object) -> bytes:
    return mail_of(arrival(replace(DONE, **changes))).digest  # pyright: ignore[reportArgumentType]  # a test's own changes


def test_a_reply_is_addressed_by_the_message_that_it_answers() -> None:
    mail = mail_of(arrival(DONE))

    assert (mail.kind, mail.causation, mail.execution) == ("reply", str(MESSAGE), None)
    assert mail.data == '{"outcome":"done","value":{"amount":4200,"charge":"ch-1"}}'


@pytest.mark.parametrize(
    ("named", "kind", "command"),
    [
        ("payment.charge.done", "reply", "payment.charge"),
        ("payment.charge.refused", "reply", "payment.charge"),
        ("payment.charge.failed", "reply", "payment.charge"),
        ("done", "event", ""),
        ("payment.charge", "event", ""),
    ],
)
def test_what_names_a_message_says_which_command_it_means_to_answer(
    named: str, kind: str, command: str
) -> None:
    mail = mail_of(arrival(replace(DONE, type=named, data={"code": "a-code"})))

    assert (mail.kind, mail.causation, mail.command) == (kind, str(MESSAGE), command)


def test_what_names_no_message_as_ours_are_named_answers_none() -> None:
    mail = mail_of(arrival(replace(DONE, extensions={"causationid": "theirs-7"})))

    assert (mail.kind, mail.causation, mail.command) == ("reply", None, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"time": None},
        {"dataschema": "https://a.example/"},
        {"extensions": {"causationid": str(MESSAGE), "traceparent": "00-b", "more": 1}},
        {"data": {"amount": 4200, "charge": "ch-1"}},
    ],
)
def test_what_may_change_from_try_to_try_does_not_change_the_digest(changes: dict[str, object]) -> None:
    assert digest(**changes) == digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"subject": None},
        {"subject": "None"},
        {"datacontenttype": "application/json"},
        {"data": {"charge": "ch-1", "amount": 4200.5}},
        {"data": None},
        {"data": {"charge": "ch-1", "amount": "4200"}},
    ],
)
def test_what_makes_it_another_reply_changes_the_digest(changes: dict[str, object]) -> None:
    assert digest(**changes) != digest()


def test_null_data_is_not_absent_data() -> None:
    absent = Envelope(id="1", source="/x", type="t")

    assert mail_of(arrival(absent)).digest != mail_of(arrival(replace(absent, data=None))).digest
    assert mail_of(arrival(absent)).data is None
    assert mail_of(arrival(replace(absent, data=None))).data == "null"


def test_nobody_speaks_for_us() -> None:
    with pytest.raises(NotAllowed):
        mail_of(arrival(replace(DONE, source="waypost:outbox")))


@pytest.mark.parametrize(
    "data", [None, [], "declined", {}, {"code": ""}, {"code": 7}, {"code": "x", "message": 7}, b"x"]
)
def test_a_refusal_says_a_code(data: object) -> None:
    refused = replace(DONE, type="payment.charge.refused", data=data)

    with pytest.raises(MalformedEvent, match="data: expected"):
        mail_of(arrival(refused))
