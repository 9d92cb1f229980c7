"""What an authentic event means as mail: a reply to one of our commands, or an event that somebody awaits."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from contracts import trace
from contracts.envelope import Envelope
from contracts.errors import NotAllowed
from contracts.replies import CAUSATION, Asked, as_uuid, said_by
from receiver.inbox import MailItem
from receiver.senders import Sender


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event whose sender has proved itself.

    `body` is the event in structured JSON, as it is kept. `causation` is the message that this may be the reply
    to, when it names one as we name ours. `asked_at` is when its request came, in monotonic seconds.
    """

    sender: Sender
    webhook_id: str
    envelope: Envelope
    body: bytes
    causation: UUID | None
    asked_at: float = 0.0

    @classmethod
    def of(
        cls, sender: Sender, webhook_id: str, envelope: Envelope, body: bytes, *, asked_at: float = 0.0
    ) -> Arrival:
        causation = as_uuid(envelope.extensions.get(CAUSATION))
        return cls(sender, webhook_id, envelope, body, causation, asked_at)


def mail_of(arrival: Arrival, asked: Asked | None) -> MailItem:
    """The mail that `arrival` is; `asked` is our command that it names, if it names one.

    What names a message that we never sent, and is named like a reply, is kept as one that matches nothing.

    Raises NotAllowed for a source that is ours, or for a reply to somebody else's command; MalformedEvent for
    a reply whose type or data is none.
    """
    envelope = arrival.envelope
    if asked is not None and asked.replies_from != arrival.sender.name:
        raise NotAllowed("the command that the reply names was sent to an endpoint for which others speak")
    said = said_by(envelope, asked)
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
        causation=arrival.causation if asked is not None else None,
        body=arrival.body,
        traceparent=joined(envelope.extensions.get("traceparent")),
        asked_at=arrival.asked_at,
    )


def joined(traceparent: object) -> str | None:
    """The trace that an event is in, in the form that we write; None when it names none."""
    found = trace.parse(traceparent) if isinstance(traceparent, str) else None
    return None if found is None else str(found)
