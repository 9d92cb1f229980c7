"""What an authentic event means as mail: a reply to one of our commands, or an event that somebody awaits."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast
from uuid import UUID

from contracts import strict_json
from contracts.envelope import ABSENT, Envelope
from contracts.errors import MalformedEvent, NotAllowed
from contracts.outcome import Kind, Outcome
from contracts.strict_json import Json
from receiver.inbox import Asked, MailItem
from receiver.senders import Sender

CAUSATION: Final = "causationid"
SUFFIXES: Final[Mapping[str, Kind]] = {".done": "done", ".refused": "refused", ".failed": "failed"}
OURS: Final = "waypost:"


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event whose sender has proved itself.

    `body` is what was signed. `causation` is the message that this may be the reply to, when it names one as
    we name ours.
    """

    sender: Sender
    webhook_id: str
    envelope: Envelope
    body: bytes
    causation: UUID | None

    @classmethod
    def of(cls, sender: Sender, webhook_id: str, envelope: Envelope, body: bytes) -> Arrival:
        return cls(sender, webhook_id, envelope, body, as_uuid(envelope.extensions.get(CAUSATION)))


def mail_of(arrival: Arrival, asked: Asked | None) -> MailItem:
    """The mail that `arrival` is; `asked` is our command that it names, if it names one.

    What names a message that we never sent, and is named like a reply, is kept as one that matches nothing.
    The digest covers type, subject, causation, content type and data, and not `time` or trace, which may
    differ when a service sends its reply again. Data that is not JSON is kept as base64 text.

    Raises NotAllowed for a source that is ours, or for a reply to somebody else's command; MalformedEvent for
    a reply whose type or data is none.
    """
    envelope = arrival.envelope
    if envelope.source.startswith(OURS):
        raise NotAllowed(f"sources that begin with {OURS} are reserved")
    if asked is not None and asked.replies_from != arrival.sender.name:
        raise NotAllowed("the command that the reply names was sent to an endpoint for which others speak")
    kind = reply_kind(envelope, asked)
    value: Json = None if envelope.data is ABSENT else envelope.data
    text = strict_json.canonical(
        base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
    )
    data = text if envelope.data is not ABSENT else None
    return MailItem(
        tenant=arrival.sender.tenant_id,
        kind="event" if kind is None else "reply",
        sender=arrival.sender.name,
        source=envelope.source,
        event_id=envelope.id,
        webhook_id=arrival.webhook_id,
        type=envelope.type,
        key=envelope.subject or "",
        digest=digest_of(envelope, text),
        data=data if kind is None else outcome_text(kind, envelope.data, text),
        causation=arrival.causation if asked is not None else None,
        body=arrival.body,
    )


def reply_kind(envelope: Envelope, asked: Asked | None) -> Kind | None:
    """What the type says became of the command; None for an event that is no reply."""
    command, dot, suffix = envelope.type.rpartition(".")
    kind = SUFFIXES.get(dot + suffix)
    if asked is None:
        return kind if CAUSATION in envelope.extensions else None
    if kind is None or command != asked.type:
        raise MalformedEvent([f"type: expected the command's type and one of {', '.join(SUFFIXES)}"])
    return kind


def outcome_text(kind: Kind, data: object, text: str) -> str:
    """The Outcome in a reply's data, as JSON; `text` is the data's own JSON."""
    if isinstance(data, bytes):
        raise MalformedEvent(["data: expected JSON in a reply, found data_base64"])
    if kind == "done":
        return f'{{"outcome":"done","value":{text}}}'
    if not isinstance(data, dict):
        raise MalformedEvent(['data: expected {"code", "message", "detail"} in a reply that is not done'])
    error = cast("dict[str, Json]", data)
    code, message = error.get("code"), error.get("message", "")
    if not isinstance(code, str) or not code:
        raise MalformedEvent(["data: expected a non-empty string as its code"])
    if not isinstance(message, str):
        raise MalformedEvent(["data: expected a string as its message"])
    outcome = Outcome(kind, code=code, detail=message, data=error.get("detail"))
    return strict_json.canonical(outcome.as_json())


def digest_of(envelope: Envelope, text: str) -> bytes:
    """Attributes have no control characters and are not empty, so line feeds tell them and their absence apart."""
    causation = envelope.extensions.get(CAUSATION, "")
    form = "absent" if envelope.data is ABSENT else "bytes" if isinstance(envelope.data, bytes) else "json"
    head = f"{envelope.type}\n{envelope.subject or ''}\n{causation}\n{envelope.datacontenttype or ''}\n{form}"
    return hashlib.sha256(f"{head}\n{text}".encode()).digest()


def as_uuid(value: object) -> UUID | None:
    """`value` as a UUID in its canonical form; Python would read braces and blanks too."""
    if not isinstance(value, str) or len(value) != 36:
        return None
    try:
        return UUID(value)
    except ValueError:
        return None
