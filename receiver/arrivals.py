"""What an authentic event means as mail: a reply to one of our commands, or an event that somebody awaits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from contracts import trace
from contracts.codec import is_box
from contracts.envelope import Envelope
from contracts.errors import ContractViolation, MalformedEvent, NotAllowed
from contracts.replies import CAUSATION, SUFFIXES, Said, as_uuid, said_by
from receiver.inbox import MailItem, PostOutcome
from receiver.senders import Sender


@dataclass(slots=True)  # not frozen, as MailItem
class Arrival:
    """An event whose sender has proved itself.

    `webhook_id` is what was signed as the name of the request; None when nothing was. `body` is the event in structured
    JSON, as it is kept. `causation` is the message that this may be the reply to, when it names one as we name ours.
    `asked_at` is when its request came, in monotonic seconds. `hop` is the trace context of that request, for an event
    that says none of its own.
    """

    sender: Sender
    webhook_id: str | None
    envelope: Envelope
    body: bytes
    causation: str | None
    asked_at: float = 0.0
    hop: str | None = None

    @classmethod
    def of(
        cls,
        sender: Sender,
        webhook_id: str | None,
        envelope: Envelope,
        body: bytes,
        *,
        asked_at: float = 0.0,
        hop: str | None = None,
    ) -> Arrival:
        causation = as_uuid(envelope.extensions.get(CAUSATION))
        return cls(sender, webhook_id, envelope, body, causation, asked_at, hop)


def mail_of(arrival: Arrival) -> MailItem:
    """The mail that `arrival` is.

    What names a message, and is named like a reply, is one; whether it fits the message is looked at when it is
    stored. What names a message that we never sent is kept as one that matches nothing.

    Raises NotAllowed for a source that is ours, or not its sender's; MalformedEvent for a reply whose data is none, and
    for data that looks sealed: whoever waits for it would be held for a key that nobody has.
    """
    envelope = arrival.envelope
    if (sources := arrival.sender.policy.sources) and not may_use(sources, envelope.source):
        raise NotAllowed("the sender may not use the source of the event")
    if is_box(envelope.data):
        raise MalformedEvent(["data: expected no box of sealed data, which only the database has"])
    said = said_by(envelope, None)
    return MailItem(
        tenant=arrival.sender.tenant_id,
        kind="event" if said.kind is None else "reply",
        sender=arrival.sender.name,
        source=envelope.source,
        event_id=envelope.id,
        webhook_id=arrival.webhook_id,
        type=envelope.type,
        key=envelope.subject or "",
        digest=said.digest,
        data=said.data,
        causation=arrival.causation,
        command=None if arrival.causation is None else answered(envelope, said),
        body=arrival.body,
        traceparent=trace.written(envelope.extensions.get("traceparent", arrival.hop)),
        asked_at=arrival.asked_at,
    )


def may_use(sources: Iterable[str], source: str) -> bool:
    """Whether `source` is one of `sources`, of which those with a star at their end stand for all that begin so."""
    return any(source.startswith(it[:-1]) if it.endswith("*") else source == it for it in sources)


def answered(envelope: Envelope, said: Said) -> str:
    """The type of the command that a reply means to answer; of what is no reply an empty one, which none has."""
    return "" if said.kind is None else envelope.type.removesuffix(f".{said.kind}")


def fault_of(outcome: PostOutcome) -> ContractViolation | None:
    """What is wrong with a reply that does not fit the command that it names; None when it was stored."""
    match outcome:
        case "foreign":
            return NotAllowed(
                "the command that the reply names was sent to an endpoint for which others speak"
            )
        case "misfit":
            return MalformedEvent([f"type: expected the command's type and one of {', '.join(SUFFIXES)}"])
        case _:
            return None
