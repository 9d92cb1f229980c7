"""What a service says became of a command: one reading, whether it comes to the receiver or in the answer to
the command itself. Two readings would make two replies of one.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

from contracts import strict_json
from contracts.envelope import ABSENT, Envelope
from contracts.errors import MalformedEvent, NotAllowed
from contracts.outcome import Kind, Outcome
from contracts.strict_json import Json

CAUSATION: Final = "causationid"
SUFFIXES: Final[Mapping[str, Kind]] = {".done": "done", ".refused": "refused", ".failed": "failed"}
OURS: Final = "waypost:"


@dataclass(frozen=True, slots=True)
class Asked:
    """The command that a reply names: its type, and the one sender that may answer it."""

    type: str
    replies_from: str


class Said(NamedTuple):
    """What an event says, as mail carries it.

    `kind` is None for one that is no reply. `data` is JSON text, of a reply to a command of ours an Outcome;
    None when there is none. `digest` covers type, subject, causation, content type and data, and not `time`
    or trace, which may differ when a service sends its reply again.
    """

    kind: Kind | None
    data: str | None
    digest: bytes


def said_by(envelope: Envelope, asked: Asked | None) -> Said:
    """What `envelope` says; `asked` is our command that it names, if it names one.

    What names a message that we never sent, and is named like a reply, is a reply. Data that is not JSON is
    kept as base64 text.

    Raises NotAllowed for a source that is ours; MalformedEvent for a reply whose type or data is none.
    """
    if envelope.source.startswith(OURS):
        raise NotAllowed(f"sources that begin with {OURS} are reserved")
    kind = reply_kind(envelope, asked)
    value: Json = None if envelope.data is ABSENT else envelope.data
    text = strict_json.canonical(
        base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
    )
    data = text if envelope.data is not ABSENT else None
    return Said(
        kind,
        data if kind is None else outcome_text(kind, envelope.data, text),
        digest_of(envelope, text),
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


UUID_FORM: Final = re.compile("-".join(f"[0-9a-fA-F]{{{size}}}" for size in (8, 4, 4, 4, 12)))


def as_uuid(value: object) -> str | None:
    """`value` when it is a UUID in its canonical form (RFC 9562, section 4); Python reads braces and blanks too."""
    return value if isinstance(value, str) and UUID_FORM.fullmatch(value) else None
