"""Events in the order of their sequence: who is ahead waits in the quarantine, and is let in when its turn comes.

All of it happens under the lock of the stream's row, which is taken before all other locks. So an event and its
predecessor that come at once do not miss each other, whichever is first; nor do an event and the end of its patience.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, LiteralString, NamedTuple

from psycopg_pool import AsyncConnectionPool

from contracts.codec import PayloadKeyMissing, open_body
from contracts.errors import WaypostError
from contracts.limits import STREAM_POLL_SECONDS
from contracts.observer import Observer
from contracts.vault import Vault
from receiver import inbox, senders
from receiver.arrivals import Arrival, mail_of
from receiver.arrivals import fault_of as wrong_of
from receiver.inbox import Connection, MailItem, Posted
from receiver.mapping import Unmapped
from receiver.quarantine import Kept, Reason, as_headers, fault_of, keep, quarantine_place, told
from receiver.requests import Refusal, event_in
from receiver.senders import CONNECTION_SECONDS, Sender
from receiver.sequence import Position

PAUSE_SECONDS: Final = 1.0
"""After an error, before streams are looked at again; and before one whose locks could not be had."""
PUT_OFF_SECONDS: Final = 60.0
"""Before a stream is looked at again whose first event could not be read."""


class Stream(NamedTuple):
    """A stream of a sender."""

    tenant: int
    sender: str
    stream: str


LOCK: Final[LiteralString] = """
    insert into waypost.stream as s (tenant_id, sender, name)
    values (%(tenant)s::int, %(sender)s::text, %(stream)s::text)
        on conflict (tenant_id, sender, name)
        do update set last = s.last
    returning last
"""


async def lock(conn: Connection, of: Stream) -> str | None:
    """Lock a stream until the transaction ends; the greatest sequence that was let through."""
    row = await (await conn.execute(LOCK, of._asdict())).fetchone()
    assert row is not None, "what is inserted or updated returns"
    return row[0]


ADVANCE: Final[LiteralString] = """
    update waypost.stream
       set last = greatest(last, %(sequence)s::text)
     where tenant_id = %(tenant)s::int
       and sender = %(sender)s::text
       and name = %(stream)s::text
"""

CALL_NEXT: Final[LiteralString] = """
    update waypost.quarantine q
       set due_at = now()
      from waypost.stream s
     where s.tenant_id = %(tenant)s::int
       and s.sender = %(sender)s::text
       and s.name = %(stream)s::text
       and q.quarantine_id = (select n.quarantine_id
                                from waypost.quarantine n
                               where n.tenant_id = s.tenant_id
                                 and n.sender = s.sender
                                 and n.stream = s.name
                                 and n.due_at is not null
                               order by n.sequence, n.quarantine_id
                               limit 1)
       and (q.after is null or q.after <= s.last)
       and q.due_at > now()
"""


async def passed(conn: Connection, of: Stream, sequence: str) -> bool:
    """Note that this sequence was let through, in a stream that is locked; whether it is now another one's turn."""
    named = {**of._asdict(), "sequence": sequence}
    await conn.execute(ADVANCE, named)
    return (await conn.execute(CALL_NEXT, named)).rowcount > 0


async def leave(conn: Connection, of: Stream, sequence: str, number: int) -> None:
    """Take a row out of the line of a stream that is locked: its turn has passed, whatever becomes of it."""
    await conn.execute(STEP_OUT, {"id": number})
    await passed(conn, of, sequence)


KNOWN: Final[LiteralString] = """
    select i.digest
      from waypost.inbox i
     where i.tenant_id = %(tenant)s::int
       and i.sender = %(sender)s::text
       and i.source = %(source)s::text
       and i.event_id = %(event_id)s::text
"""


async def digest_of(conn: Connection, item: MailItem) -> bytes | None:
    """The digest of what the inbox has under the name of `item`."""
    named = {"tenant": item.tenant, "sender": item.sender, "source": item.source, "event_id": item.event_id}
    row = await (await conn.execute(KNOWN, named)).fetchone()
    return None if row is None else row[0]


@dataclass(slots=True)  # not frozen, as MailItem
class Became:
    """What became of an event: mail (`posted`), or it is kept apart for a `reason`, and `new` there. `calls`: it is
    another one's turn, or will be.
    """

    posted: Posted | None
    reason: Reason | None
    new: bool
    calls: bool


async def arrive(
    conn: Connection, position: Position, kept: Kept, item: MailItem | None, *, traced: bool
) -> Became:
    """Let an event in if it is its turn, else keep it apart in line. Without an `item` it is kept apart for the reason
    of `kept` in any case, and its turn passes when it comes.

    In a transaction, which is given up when the event is at fault: raises NotAllowed, MalformedEvent.
    """
    of = stream_of(position, kept)
    last = await lock(conn, of)
    if item is None or not position.is_next(last):
        return await stand(conn, position, kept, item, last)
    if position.apart and position.is_older(last) and await digest_of(conn, item) is None:
        detail = f"sequence: expected none before {last}, which was let in, found {position.sequence}"
        new = await keep(conn, replace(kept, reason="superseded", detail=detail))
        return Became(None, "superseded", new, calls=False)
    [posted] = await inbox.post(conn, [item], traced=traced)
    if wrong := wrong_of(posted.outcome):
        raise wrong
    calls = await passed(conn, of, position.sequence)
    return Became(posted, None, posted.outcome == "stored", calls)


async def stand(
    conn: Connection, position: Position, kept: Kept, item: MailItem | None, last: str | None
) -> Became:
    """Keep an event apart; in line, unless it is its turn."""
    ahead = not position.is_next(last)
    if item is not None:
        detail = f"sequence: {position.after}, the one before {position.sequence}, has not come"
        kept = replace(kept, reason="ahead", detail=detail)
    new = await keep(conn, replace(kept, position=position, wait=position.gap if ahead else None))
    calls = ahead or await passed(conn, stream_of(position, kept), position.sequence)
    return Became(None, kept.reason, new, calls)


def stream_of(position: Position, kept: Kept) -> Stream:
    return Stream(kept.sender.tenant_id, kept.sender.name, position.stream)


class NameTaken(Exception):
    """Something else has the name of an event already."""


async def stand_all(conn: Connection, some: Sequence[tuple[Position, Kept, MailItem | None]]) -> list[bool]:
    """Put events of one transaction in line, each of which is let in when its turn comes, which may be at once.

    Of each tells whether it is new. Raises NameTaken.
    """
    new_at: dict[int, bool] = {}
    lasts: dict[str, str | None] = {}
    digests: dict[tuple[str, str], bytes] = {}
    # One lock after the other, sorted; and of a stream in order, so that each knows what comes before it.
    for place in sorted(range(len(some)), key=lambda place: (some[place][0].stream, some[place][0].sequence)):
        position, kept, item = some[place]
        if position.stream not in lasts:
            lasts[position.stream] = await lock(conn, stream_of(position, kept))
        if item is not None:
            stored = await digest_of(conn, item)
            if digests.setdefault((item.source, item.event_id), stored or item.digest) != item.digest:
                raise NameTaken
            if stored is not None:
                new_at[place] = False
                continue
            detail = "sequence: it is let in when all before it are"
            kept = replace(kept, reason="ahead", detail=detail)
        last = lasts[position.stream]
        is_next = position.is_next(last)
        if is_next:
            lasts[position.stream] = max(last or "", position.sequence)
        wait = 0.0 if is_next else float(position.gap)
        new_at[place] = await keep(conn, replace(kept, position=position, wait=wait))
    return [new_at[place] for place in range(len(some))]


NEXT_DUE: Final[LiteralString] = """
    select q.tenant_id, t.name, q.sender, q.stream,
           greatest(extract(epoch from q.due_at - now()), 0)::float8 as seconds
      from waypost.quarantine q
      join waypost.tenant t using (tenant_id)
     where q.due_at is not null
     order by q.due_at
     limit 1
"""

HEAD: Final[LiteralString] = """
    select q.quarantine_id, q.reason, q.sequence, q.webhook_id, q.headers, q.body, q.digest
      from waypost.quarantine q
     where q.tenant_id = %(tenant)s::int
       and q.sender = %(sender)s::text
       and q.stream = %(stream)s::text
       and q.due_at is not null
       and exists (select 1
                     from waypost.quarantine d
                    where d.tenant_id = q.tenant_id
                      and d.sender = q.sender
                      and d.stream = q.stream
                      and d.due_at <= now())
     order by q.sequence, q.quarantine_id
     limit 1
       for no key update of q
"""

ITS_TURN: Final = "its turn"
"""Who let it in, where nobody did."""

LET_IN: Final[LiteralString] = """
    update waypost.quarantine
       set due_at = null, released_at = now(), released_by = %(by)s::text
     where quarantine_id = %(id)s::bigint
"""

LEAVE_OUT: Final[LiteralString] = """
    update waypost.quarantine
       set due_at = null, reason = %(reason)s::text, detail = %(detail)s::text
     where quarantine_id = %(id)s::bigint
"""

PUT_OFF: Final[LiteralString] = """
    update waypost.quarantine
       set due_at = now() + %(seconds)s::float8 * interval '1 s'
     where quarantine_id in (select q.quarantine_id
                               from waypost.quarantine q
                              where q.tenant_id = %(tenant)s::int
                                and q.sender = %(sender)s::text
                                and q.stream = %(stream)s::text
                                and q.due_at <= now()
                              order by q.quarantine_id
                                for no key update skip locked)
"""
"""Nothing else is locked then, and nobody is waited for."""

STEP_OUT: Final[LiteralString] = """
    update waypost.quarantine
       set due_at = null
     where quarantine_id = %(id)s::bigint
"""


@dataclass(frozen=True, slots=True)
class Due:
    """A stream in which something is due, and in how many seconds."""

    tenant_id: int
    tenant: str
    sender: str
    stream: str
    seconds: float

    @property
    def of(self) -> Stream:
        return Stream(self.tenant_id, self.sender, self.stream)


@dataclass(frozen=True, slots=True)
class Head:
    """The first in line of a stream."""

    quarantine_id: int
    reason: Reason
    sequence: str
    webhook_id: str | None
    headers: dict[str, str]
    body: bytes
    digest: bytes


Fault = tuple[Reason, str]
UNSTORABLE: Final[Fault] = ("invalid", "the database refuses its data")


class Streams:
    """Lets in what is in line, when its turn comes or its patience ends. Any number of receivers may do so at once.

    `clock` gives seconds since 1970. `hint` is called with "execution" when something was let in.
    """

    def __init__(
        self,
        pool: AsyncConnectionPool[Any],
        *,
        vault: Vault,
        observer: Observer,
        hint: Callable[[str], None],
        clock: Callable[[], float],
        traced: bool = False,
    ) -> None:
        self.pool = pool
        self.vault = vault
        self.observer = observer
        self.hint = hint
        self.clock = clock
        self.traced = traced
        self.woken = asyncio.Event()

    def look(self) -> None:
        """It may be somebody's turn, or will be at a time that is not known yet."""
        self.woken.set()

    async def run(self) -> None:
        """Let in what is due, again and again, until it is cancelled."""
        while True:
            self.woken.clear()
            try:
                seconds = await self.serve()
            except Exception as error:  # noqa: BLE001  # the database may be away; what is in line stays there
                self.observer.saw("streams.failed", error=error)
                seconds = PAUSE_SECONDS
            try:
                async with asyncio.timeout(min(seconds, STREAM_POLL_SECONDS)):
                    await self.woken.wait()
            except TimeoutError:
                continue

    async def serve(self) -> float:
        """Let in all that is due; in how many seconds the next one will be."""
        while True:
            async with self.pool.connection(CONNECTION_SECONDS) as conn:
                row = await (await conn.execute(NEXT_DUE)).fetchone()
                if row is None:
                    return STREAM_POLL_SECONDS
                due = Due(*row)
                if due.seconds > 0:
                    return due.seconds
                await self._let_in(conn, due)

    async def _let_in(self, conn: Connection, due: Due) -> None:
        """Let in the first in line of a stream. One that cannot be read now is put off, so that the others go on."""
        try:
            await self._take_turn(conn, due, None)
        except Exception as error:  # noqa: BLE001  # whatever it is, other streams have no part in it
            if inbox.is_bad_data(error):
                await self._take_turn(conn, due, UNSTORABLE)
                return
            passing = inbox.is_transient(error)
            named = {**due.of._asdict(), "seconds": PAUSE_SECONDS if passing else PUT_OFF_SECONDS}
            await conn.execute(PUT_OFF, named)
            why = str(error) if isinstance(error, WaypostError) else error
            self.observer.saw("streams.failed", sender=due.sender, error=why)

    async def _take_turn(self, conn: Connection, due: Due, fault: Fault | None) -> None:
        """Let in the first in line of a stream, in a transaction. With a `fault` it stays apart for that."""
        async with conn.transaction():
            await lock(conn, due.of)
            row = await (await conn.execute(HEAD, due.of._asdict())).fetchone()
            if row is None:
                return  # another receiver was here
            head, posted = Head(*row), None
            if head.reason == "ahead" and fault is None:
                posted, fault = await self._post(conn, due, head)
            if fault is not None:
                said = {"id": head.quarantine_id, "reason": fault[0], "detail": fault[1]}
                await conn.execute(LEAVE_OUT, said)
            else:
                await conn.execute(
                    STEP_OUT if posted is None else LET_IN, {"id": head.quarantine_id, "by": ITS_TURN}
                )
            await passed(conn, due.of, head.sequence)
        became = posted.outcome if posted is not None else head.reason if fault is None else fault[0]
        self.observer.saw("event.turn", sender=due.sender, sequence=head.sequence, became=became)
        if posted is not None and posted.outcome == "stored":
            self.hint("execution")

    async def _post(self, conn: Connection, due: Due, head: Head) -> tuple[Posted | None, Fault | None]:
        """What became of an event whose turn it is, read by the settings and contracts of now. Raises
        SenderUnreadable and PayloadKeyMissing when those, or it, cannot be read here, which is no fault of the event.
        """
        sender = await senders.read(conn, (due.tenant, due.sender), vault=self.vault, observer=self.observer)
        assert sender is not None, "a sender with rows in the quarantine stays"
        senders.check_settings(sender)
        try:
            item, fault = self._read(sender, head)
        except PayloadKeyMissing:
            raise
        except Unmapped as error:
            return None, ("mapping", told(error.problems))
        except (Refusal, WaypostError) as error:
            return None, ("invalid", str(error))
        if fault is not None:
            return None, fault
        [posted] = await inbox.post(conn, [item], traced=self.traced)
        if wrong := wrong_of(posted.outcome):
            return None, ("invalid", str(wrong))
        if posted.outcome == "conflict":
            return None, ("conflict", conflict_with(posted))
        return posted, None

    def _read(self, sender: Sender, head: Head) -> tuple[MailItem, Fault | None]:
        body = open_body(head.body, quarantine_place(sender.tenant_id, sender.name, head.digest))
        envelope, kept = event_in(as_headers(head.headers), body, sender)
        fault = fault_of(sender, envelope, now=self.clock(), late_too=True)
        arrival = Arrival.of(sender, head.webhook_id, envelope, kept, asked_at=time.monotonic())
        return mail_of(arrival), fault


def conflict_with(posted: Posted) -> str:
    return f"id: expected what inbox row {posted.inbox_id} says, found something else under its name"
