"""What is authentic and is no mail yet: kept apart with its reason, until a person lets it in.

It was acknowledged, since sending it again would not help. Its sender is told the same when it sends it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, LiteralString

from multidict import CIMultiDict

from contracts import strict_json
from contracts.codec import place
from contracts.envelope import ABSENT, Envelope, is_timestamp
from contracts.json_schema import Violated
from contracts.limits import PROBLEMS_MAX
from contracts.mail import body_at_rest
from contracts.strict_json import Json
from receiver.inbox import Connection
from receiver.senders import Sender
from receiver.sequence import Position

Reason = Literal["contract", "mapping", "expired", "conflict", "invalid", "ahead", "superseded"]
DETAIL_CHARACTERS_MAX: Final = 2000
"""Of what is kept about why."""
SKEW_SECONDS: Final = 60
"""That the clock of whoever says `expirytime` may be ahead of ours."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Something to keep apart. `headers` and `body` are what was received; `event` is what could be read of it.

    With `wait` it is in line at `position`, and its turn comes in so many seconds at the latest.
    """

    sender: Sender
    headers: Mapping[str, str]
    body: bytes
    webhook_id: str | None
    event: Envelope | None
    reason: Reason
    detail: str
    position: Position | None = None
    wait: float | None = None

    @property
    def digest(self) -> bytes:
        head = json.dumps(sorted(self.headers.items())).encode()
        return hashlib.sha256(len(head).to_bytes(4, "big") + head + self.body).digest()


def headers_for(sender: Sender, headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that say what was sent, and none of those that prove who did."""
    mapped = sender.policy.event.headers() if sender.policy.event else ()
    proof = sender.policy.signature.header
    found = {name.lower(): value for name, value in headers.items()}
    return {
        name: value.encode("utf-8", "backslashreplace").decode()
        for name, value in found.items()
        if (name == "content-type" or name.startswith("ce-") or name in mapped) and name not in proof
    }


def fault_of(
    sender: Sender, envelope: Envelope, *, now: float, late_too: bool = False
) -> tuple[Reason, str] | None:
    """Why an event is to be kept apart, and what about it; None when it is mail. `late_too` lets in what is too old.

    `now` is in seconds since 1970.
    """
    said = envelope.extensions.get("expirytime")
    if not late_too and isinstance(said, str) and is_over(said, now):
        return "expired", f"expirytime: expected a moment that has not passed, found {said}"
    if not sender.contracts:
        return None
    contract = sender.contracts.get((envelope.type, envelope.dataschema or "")) or sender.contracts.get(
        (envelope.type, "")
    )
    if contract is None:
        return None
    try:
        contract.check(value_of(envelope))
    except Violated as error:
        return "contract", "\n".join(error.problems)[:DETAIL_CHARACTERS_MAX]
    return None


def value_of(envelope: Envelope) -> Json:
    if isinstance(envelope.data, bytes):
        return None
    return None if envelope.data is ABSENT else envelope.data


def is_over(said: str, now: float) -> bool:
    """What is no moment that Python can hold is none that has passed."""
    if not is_timestamp(said):
        return False
    try:
        return datetime.fromisoformat(said.upper()).astimezone(UTC).timestamp() + SKEW_SECONDS < now
    except (ValueError, OverflowError):
        return False


def told(problems: Sequence[str]) -> str:
    return "\n".join(problems[:PROBLEMS_MAX])[:DETAIL_CHARACTERS_MAX]


def quarantine_place(tenant: int, sender: str, digest: bytes) -> str:
    """Where something stands that is kept apart, for who seals and opens it."""
    return place("quarantine", tenant, sender, digest.hex())


KEEP: Final[LiteralString] = """
    insert into waypost.quarantine as q
           (tenant_id, sender, reason, detail, source, event_id, type, key, webhook_id, headers, body, digest,
            stream, sequence, after, due_at)
    values (%(tenant)s::int, %(sender)s::text, %(reason)s::text, %(detail)s::text, %(source)s::text,
            %(event_id)s::text, %(type)s::text, %(key)s::text, %(webhook_id)s::text, %(headers)s::jsonb,
            %(body)s::bytea, %(digest)s::bytea, %(stream)s::text, %(sequence)s::text, %(after)s::text,
            now() + %(wait)s::float8 * interval '1 s')
        on conflict (tenant_id, sender, digest)
        do update set times = q.times + 1
    returning times, due_at is null and released_at is null
"""

ENTER: Final[LiteralString] = """
    update waypost.quarantine
       set reason = %(reason)s::text, detail = %(detail)s::text, stream = %(stream)s::text,
           sequence = %(sequence)s::text, after = %(after)s::text,
           due_at = now() + %(wait)s::float8 * interval '1 s'
     where tenant_id = %(tenant)s::int
       and sender = %(sender)s::text
       and digest = %(digest)s::bytea
"""


async def keep(conn: Connection, kept: Kept) -> bool:
    """Keep it durably, in autocommit; whether it is new. What was kept for another reason may get in line now."""
    event, position = kept.event, kept.position
    parameters = {
        "tenant": kept.sender.tenant_id,
        "sender": kept.sender.name,
        "reason": kept.reason,
        "detail": kept.detail.replace("\0", "\\0"),
        "source": event and event.source,
        "event_id": event and event.id,
        "type": event and event.type,
        "key": event and event.subject,
        "webhook_id": kept.webhook_id,
        "headers": strict_json.encode(dict(kept.headers), what="headers"),
        "body": body_at_rest(
            kept.body, quarantine_place(kept.sender.tenant_id, kept.sender.name, kept.digest)
        ),
        "digest": kept.digest,
        "stream": position and position.stream,
        "sequence": position and position.sequence,
        "after": position and position.after,
        "wait": kept.wait,
    }
    row = await (await conn.execute(KEEP, parameters)).fetchone()
    assert row is not None, "what is inserted or updated returns"
    times, beside = row
    if times > 1 and beside and kept.wait is not None:
        await conn.execute(ENTER, parameters)
    return times == 1


KEPT: Final[LiteralString] = """
    select q.reason
      from waypost.quarantine q
     where q.tenant_id = %(tenant)s::int
       and q.sender = %(sender)s::text
       and q.digest = %(digest)s::bytea
"""


async def reason_of(conn: Connection, kept: Kept) -> Reason | None:
    """Why it is kept apart already, or was until it was let in; None when it never was."""
    parameters = {"tenant": kept.sender.tenant_id, "sender": kept.sender.name, "digest": kept.digest}
    row = await (await conn.execute(KEPT, parameters)).fetchone()
    return None if row is None else row[0]


def as_headers(stored: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers as they were kept, to be read as those of a request are."""
    return CIMultiDict(stored)
