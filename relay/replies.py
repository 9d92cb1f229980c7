"""Replies that come in the answer to a command, and go into the inbox by the one door, like those that are
posted to the receiver.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, LiteralString, cast
from uuid import UUID

from psycopg import AsyncConnection

from contracts.envelope import decode_structured
from contracts.errors import MalformedEvent, NotAllowed
from contracts.mail import mail_at_rest
from contracts.replies import CAUSATION, Asked, as_uuid, said_by

Connection = AsyncConnection[Any]

POST_BYTES_MAX: Final = 4 * 1024 * 1024  # bodies of one transaction, so that it ends well within its time
OURSELVES: Final = "waypost"  # the sender of mail that is made here


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the service says became of the command `causation`, as mail from `sender`.

    The name and the digest are those that the receiver gives to the same event, so the two are one.
    """

    tenant_id: int
    causation: UUID
    sender: str
    source: str
    event_id: str
    type: str
    key: str
    digest: bytes
    data: str | None
    body: bytes


def read(body: bytes, *, tenant_id: int, message_id: UUID, command: bytes, replies_from: str) -> Reply:
    """The reply to the message `message_id` in `body`; `command` is what was sent.

    It need not name the command, since it stands in its answer; when it does, it must be this one. Raises
    MalformedJson, MalformedEvent or NotAllowed.
    """
    envelope = decode_structured(body)
    named = envelope.extensions.get(CAUSATION)
    if named is None:
        envelope = replace(envelope, extensions={**envelope.extensions, CAUSATION: str(message_id)})
    elif (as_uuid(named) or "").lower() != str(message_id):
        raise MalformedEvent([f"{CAUSATION}: expected the id of the command that was answered"])
    if replies_from == OURSELVES:
        raise NotAllowed(f"nobody but us is the sender {OURSELVES}")
    said = said_by(envelope, Asked(type_of(command), replies_from))
    return Reply(
        tenant_id=tenant_id,
        causation=message_id,
        sender=replies_from,
        source=envelope.source,
        event_id=envelope.id,
        type=envelope.type,
        key=envelope.subject or "",
        digest=said.digest,
        data=said.data,
        body=body,
    )


def type_of(command: bytes) -> str:
    """The type of an event that we made; empty, which no reply fits, when it is none."""
    try:
        event: Any = json.loads(command)
    except (ValueError, RecursionError):
        return ""
    found = cast("dict[str, Any]", event).get("type") if isinstance(event, dict) else None
    return found if isinstance(found, str) else ""


def in_parts(replies: Sequence[Reply]) -> Iterator[Sequence[Reply]]:
    """`replies` in their order, in parts whose bodies are no more than POST_BYTES_MAX together."""
    begin = size = 0
    for index, reply in enumerate(replies):
        size += len(reply.body)
        if size > POST_BYTES_MAX and index > begin:
            yield replies[begin:index]
            begin, size = index, len(reply.body)
    if begin < len(replies):
        yield replies[begin:]


# No webhook ids: an answer has none, and its name is enough to be known by.
POST: Final[LiteralString] = """
    select p.outcome
      from waypost.post_mail(
               %(tenant)s::int[], array_fill('reply'::text, array[%(count)s::int]), %(sender)s::text[],
               %(source)s::text[], %(event)s::text[], null, %(type)s::text[], %(key)s::text[],
               %(digest)s::bytea[], %(data)s::text[]::jsonb[], %(causation)s::uuid[], null, null, null,
               %(body)s::bytea[], p_now => %(now)s::timestamptz) p
     order by p.item
"""


async def post(conn: Connection, replies: Sequence[Reply], *, now: datetime | None = None) -> list[str]:
    """Store `replies`, and wake who waits for them; what became of each: stored, duplicate or conflict.

    A transaction of its own, never that of a settlement: that holds rows of executions, and a receiver that
    stores the same reply would wait for them while we wait for its row of the inbox. `now` is for tests.
    """
    kept = [
        mail_at_rest("reply", it.data, it.body, (it.tenant_id, it.sender, it.source, it.event_id))
        for it in replies
    ]
    cursor = await conn.execute(
        POST,
        {
            "count": len(replies),
            "tenant": [reply.tenant_id for reply in replies],
            "sender": [reply.sender for reply in replies],
            "source": [reply.source for reply in replies],
            "event": [reply.event_id for reply in replies],
            "type": [reply.type for reply in replies],
            "key": [reply.key for reply in replies],
            "digest": [reply.digest for reply in replies],
            "data": [data for data, _ in kept],
            "causation": [reply.causation for reply in replies],
            "body": [body for _, body in kept],
            "now": now,
        },
    )
    return [outcome for (outcome,) in await cursor.fetchall()]
