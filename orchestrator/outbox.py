"""What people do about messages: find them, see why one is where it is, put dead letters back, or let them be.

A dead letter of an event can be put back: as the same message, which its service may know already, or as a new one. A
command cannot: its flow was told what became of it, and went on.
"""

from __future__ import annotations

import json
import re
import shlex
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, cast
from uuid import UUID, uuid4

from contracts import strict_json
from contracts.codec import open_body, place
from contracts.envelope import STRUCTURED
from contracts.errors import Conflict, NotFound
from orchestrator import endpoints
from orchestrator.registry import TENANT
from orchestrator.store import outbox as store
from orchestrator.store.commits import body_at_rest
from orchestrator.store.database import Connection
from orchestrator.store.outbox import DeliveryRow, Filter, MessageRow
from relay.delivery import REMOVED
from relay.outbox import opened

DEAD: Final = ("dead",)
PUT_BACK_MAX: Final = 1_000  # dead letters of one transaction; more are put back by the next one
REDIRECT: Final = 3  # the hundred of such a status
TRIES_SHOWN_MAX: Final = 100  # tries of one message that are shown, the newest


class UnknownMessage(NotFound):
    """There is no message of that id."""

    code = "unknown-message"

    def __init__(self, message: UUID) -> None:
        super().__init__(f"no message has the id {message}; `waypost outbox list` and `dlq list` show some")


class UnknownTry(NotFound):
    """There is no such try of the message, or none that was written down."""

    code = "unknown-try"

    def __init__(self, message: UUID, number: int | None) -> None:
        which = "no try" if number is None else f"no try {number}"
        super().__init__(
            f"{which} of message {message} is known; `waypost delivery list {message}` shows all"
        )


class NotPutBack(Conflict):
    """The message cannot be put back: it is a command, or no dead letter."""

    code = "not-put-back"


@dataclass(frozen=True, slots=True)
class Seen:
    """A message with its tries, the newest first, and how many wait behind it."""

    message: MessageRow
    tries: Sequence[DeliveryRow]
    behind: int

    @property
    def type(self) -> str:
        return str(attributes_of(self.message).get("type", "?"))


def moved(row: DeliveryRow) -> str | None:
    """Where an answer that is a redirect leads, as far as that was kept."""
    redirect = row.status is not None and row.status // 100 == REDIRECT
    return (row.headers or {}).get("location") if redirect else None


def attributes_of(message: MessageRow) -> dict[str, Any]:
    """The attributes of a message that is an event; none of any other."""
    try:
        event: Any = json.loads(message.body)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", event) if isinstance(event, dict) else {}


async def see(conn: Connection, message: UUID, *, tenant: int = TENANT) -> Seen:
    """Raises UnknownMessage; PayloadKeyMissing, where its body is sealed with a key that is not at hand."""
    found = await store.one(conn, message, tenant=tenant)
    if found is None:
        raise UnknownMessage(message)
    found = replace(found, body=opened(tenant, message, found.endpoint, found.body))
    tries = [
        replace(
            row,
            response=row.response
            and open_body(row.response, place("delivery", tenant, message, row.attempt)),
        )
        for row in await store.deliveries(conn, message, tenant=tenant, limit=TRIES_SHOWN_MAX)
    ]
    waiting = (
        await store.behind(conn, found.endpoint, found.lane, tenant=tenant)
        if found.ordered and found.lane is not None
        else 0
    )
    return Seen(found, tries, waiting)


def explained(seen: Seen) -> str:
    """Why the message is where it is, and what a person can do, in sentences."""
    it = seen.message
    waits = (
        f"; {seen.behind} wait behind it in lane {it.lane}" if seen.behind and it.state != "waiting" else ""
    )
    said = {
        "waiting": f"it waits for its turn in lane {it.lane}",
        "due": f"it is sent at {it.due_at:%Y-%m-%d %H:%M:%S} UTC, or when its endpoint may get something",
        "sending": "it is being sent",
        "stopping": "it was taken back while it is being sent",
        "delivered": "it has arrived",
        "refused": "it was refused",
        "expired": "its time was over before it arrived",
        "withdrawn": "it was taken back, and never sent",
        "stopped": "it was taken back, and may have arrived",
        "discarded": "its endpoint was removed"
        if it.fault == REMOVED
        else "a person decided that it need not arrive",
    }
    if seen.tries and (to := moved(seen.tries[0])) is not None and it.state != "delivered":
        waits += (
            f"; it was answered by a redirect to {to}, and none is followed: if that is where {it.endpoint} is now, "
            f"`waypost endpoint set {it.endpoint} --url URL` says so"
        )
    if it.state != "dead":
        return said[it.state] + waits
    why = {
        "expired": "its time was over before it was taken",
        "skipped": "its endpoint was enabled without what had waited",
        "unknown": "it is sent at most once, and may have arrived",
        REMOVED: "its endpoint was removed",
    }.get(it.fault or "unknown", f"its last try ended with {it.fault}")
    todo = "its flow was told" if it.command else f"`waypost dlq replay {it.message_id}` puts it back"
    return f"it is a dead letter: {why}{waits}; {todo}"


async def put_back(
    conn: Connection,
    messages: Sequence[UUID],
    *,
    spread: timedelta = timedelta(0),
    as_new: bool = False,
    tenant: int = TENANT,
) -> list[str]:
    """Put dead letters of events back, `spread` apart, in the order in which they were made; which ones.

    Those that are none (any more) are left alone. With `as_new` each is written as another message that names the old
    one as its cause, for a service that would take it for a repetition.
    """
    done: list[str] = []
    for begin in range(0, len(messages), PUT_BACK_MAX):
        part = messages[begin : begin + PUT_BACK_MAX]
        async with conn.transaction():
            done += (
                await _as_new(conn, part, spread, len(done), tenant)
                if as_new
                else await store.put_back(conn, part, spread=spread, tenant=tenant)
            )
        await store.advance(conn)
    return done


async def _as_new(
    conn: Connection, messages: Sequence[UUID], spread: timedelta, before: int, tenant: int
) -> list[str]:
    """Who asks twice finds the old ones discarded, and makes none again."""
    found = [row for one in messages if not (row := (await see(conn, one, tenant=tenant)).message).command]
    gone = set(await store.discard(conn, [UUID(row.message_id) for row in found], tenant=tenant))
    return await _copied(conn, [row for row in found if row.message_id in gone], spread, before, tenant)


async def _copied(
    conn: Connection, rows: Sequence[MessageRow], spread: timedelta, before: int, tenant: int
) -> list[str]:
    """Write these events as other ones that name them as their cause."""
    made: list[str] = []
    # Sorted as lanes are locked, each lane in its order.
    for row in sorted(rows, key=lambda row: (row.endpoint, row.lane or "")):
        new = uuid4()
        event = attributes_of(row) | {"id": str(new), "causationid": row.message_id}
        body = body_at_rest(tenant, new, strict_json.encode(event, what="event").encode())
        await store.copy(
            conn,
            UUID(row.message_id),
            new=new,
            body=body,
            delay=spread * (before + len(made)),
            tenant=tenant,
        )
        made.append(str(new))
    return made


async def send_again(
    conn: Connection, messages: Sequence[UUID], *, as_new: bool = False, tenant: int = TENANT
) -> list[str]:
    """Send events once more that have arrived; which ones. The same messages, or as others with `as_new`. Those that
    have not arrived are left alone, and so are commands. Raises UnknownMessage.
    """
    found = [(await see(conn, one, tenant=tenant)).message for one in messages]
    arrived = [row for row in found if row.state == "delivered" and not row.command]
    ids = [UUID(row.message_id) for row in arrived]
    async with conn.transaction():
        done = (
            await _copied(conn, arrived, timedelta(0), 0, tenant)
            if as_new
            else await store.put_back(conn, ids, spread=timedelta(0), tenant=tenant, state="delivered")
        )
    await store.advance(conn)
    return done


async def all_of(conn: Connection, which: Filter, *, limit: int, tenant: int = TENANT) -> list[MessageRow]:
    """What fits, the oldest first, page by page, at most `limit`."""
    found: list[MessageRow] = []
    while len(found) < limit:
        page = await store.listed(conn, which, tenant=tenant, limit=min(PUT_BACK_MAX, limit - len(found)))
        found += page
        if len(page) < PUT_BACK_MAX:
            break
        which = replace(which, after=UUID(page[-1].message_id))
    return found


async def discard(conn: Connection, messages: Sequence[UUID], *, tenant: int = TENANT) -> list[str]:
    """Decide that dead letters need not arrive; what waits behind them goes on. Which ones."""
    done = await store.discard(conn, messages, tenant=tenant)
    await store.advance(conn)
    return done


async def enable_since(
    conn: Connection, name: str, since: datetime, *, tenant: int = TENANT
) -> tuple[int, int]:
    """Enable an endpoint, and send it events from `since` on: what waits and is older is a dead letter, and dead
    letters that are not go back. How many of each. Raises UnknownEndpoint.
    """
    await endpoints.read(conn, name, tenant=tenant)
    skipped = await store.skip(conn, name, before=since, tenant=tenant)
    dead = await all_of(conn, Filter(DEAD, endpoint=name, since=since), limit=1_000_000, tenant=tenant)
    events = [UUID(row.message_id) for row in dead if not row.command and row.since >= since]
    back = await put_back(conn, events, tenant=tenant)
    await endpoints.enable(conn, name, tenant=tenant)
    return skipped, len(back)


SCRIPT: Final = """\
: "${WAYPOST_ENDPOINT_SECRET:?expected the secret of the endpoint, whsec_…}"
id=@ID@ at=$(date +%s)
body() { printf %s @BODY@ | openssl base64 -d -A; }
key=$(printf %s "${WAYPOST_ENDPOINT_SECRET#whsec_}" | openssl base64 -d -A | od -An -v -tx1 | tr -d ' \\n')
signed() { printf %s "$id.$at."; body; }
signature=$(signed | openssl dgst -sha256 -mac HMAC -macopt "hexkey:$key" -binary | openssl base64 -A)
body | curl --silent --show-error --include --data-binary @- -H @TYPE@ -H "webhook-id: $id" @KEY@\\
  -H "webhook-timestamp: $at" -H "webhook-signature: v1,$signature" @URL@"""


def curl(seen: Seen, url: str) -> str:
    """A shell script that sends the message once more, by hand. The secret is not in it: it asks for it."""
    key = attributes_of(seen.message).get("idempotencykey")
    words = {
        "@ID@": seen.message.message_id,
        "@BODY@": shlex.quote(b64encode(seen.message.body).decode()),
        "@TYPE@": shlex.quote(f"content-type: {STRUCTURED}"),
        "@KEY@": f"-H {shlex.quote(f'Idempotency-Key: {key}')} " if isinstance(key, str) else "",
        "@URL@": shlex.quote(url),
    }
    return re.sub("|".join(words), lambda found: words[found[0]], SCRIPT)
