"""What becomes of an authentic event: mail, or in line behind others of its stream, or kept apart with its reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

from psycopg_pool import AsyncConnectionPool

from contracts import strict_json
from contracts.envelope import STRUCTURED, Envelope, element_of, encode_structured
from contracts.errors import ContractViolation
from contracts.observer import Observer
from contracts.replies import CAUSATION
from contracts.strict_json import Json
from receiver.arrivals import Arrival, mail_of
from receiver.inbox import Connection, MailItem, Posted
from receiver.intake import Conflicting, Intake, unavailable
from receiver.quarantine import Kept, Reason, fault_of, headers_for, keep, told
from receiver.senders import CONNECTION_SECONDS, Sender
from receiver.sequence import Position, position_of
from receiver.streams import (
    Became,
    NameTaken,
    Stream,
    Streams,
    arrive,
    conflict_with,
    stand_all,
    stream_of,
)

APART_MAX: Final = 2
"""Transactions at once of one receiver that keep something apart, or are those of streams; one of each stream."""
ELEMENT: Final = {"content-type": STRUCTURED}
"""What is kept of the headers of an element of a batch: it is an event."""


@dataclass(slots=True)  # not frozen, as MailItem
class Piece:
    """An event, as it came: alone, or as an element of a batch. `name` is what was signed as its name, `kept` what is
    kept of it as mail, `headers` and `body` are what was received.
    """

    sender: Sender
    name: str | None
    event: Envelope
    kept: bytes
    headers: Mapping[str, str]
    body: bytes
    asked_at: float

    @classmethod
    def element(
        cls, sender: Sender, name: str | None, event: Envelope, place: int, *, asked_at: float
    ) -> Piece:
        """One of a batch: what was signed as one name names each by its place."""
        body = encode_structured(event)
        return cls(sender, part_of(name, place), event, body, ELEMENT, body, asked_at)

    @property
    def arrival(self) -> Arrival:
        hop = self.headers.get("traceparent")
        return Arrival.of(self.sender, self.name, self.event, self.kept, asked_at=self.asked_at, hop=hop)

    @property
    def position(self) -> Position | None:
        """Its place in a stream; replies have none. Raises MalformedEvent."""
        ordered = self.sender.policy.ordered
        if ordered is None or CAUSATION in self.event.extensions:
            return None
        return position_of(ordered, self.event)

    def apart(self, reason: Reason, detail: str) -> Kept:
        headers = headers_for(self.sender, self.headers)
        return Kept(self.sender, headers, self.body, self.name, self.event, reason, detail)


def part_of(name: str | None, place: int) -> str | None:
    return name and f"{name}.{place}"


class Admission:
    """Lets events in. `clock` gives seconds since 1970."""

    def __init__(
        self,
        pool: AsyncConnectionPool[Any],
        *,
        intake: Intake,
        streams: Streams,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.intake = intake
        self.streams = streams
        self.observer = observer
        self.clock = clock
        self.apart = asyncio.Semaphore(APART_MAX)
        self.at_work: WeakValueDictionary[Stream, asyncio.Lock] = WeakValueDictionary()

    async def admit(self, piece: Piece) -> Became:
        """What became of an event, when that is durable. Raises NotAllowed, MalformedEvent, Unstorable, Unavailable."""
        fault = fault_of(piece.sender, piece.event, now=self.clock())
        position = piece.position
        if position is not None:
            return await self._in_order(piece, position, fault)
        if fault is not None:
            return await self.keep(piece.apart(*fault))
        posted = await self.intake.take(piece.arrival)
        self._saw(piece.sender, posted)
        if posted.outcome == "conflict":
            return await self.keep(piece.apart("conflict", conflict_with(posted)))
        return Became(posted, None, posted.outcome == "stored", calls=False)

    async def _in_order(self, piece: Piece, position: Position, fault: tuple[Reason, str] | None) -> Became:
        item = None if fault is not None else mail_of(piece.arrival)
        kept = piece.apart(*(fault or ("ahead", "")))

        async def work(conn: Connection) -> Became:
            return await arrive(conn, position, kept, item, traced=self.intake.traced)

        async with self._slot(stream_of(position, kept)):
            became = await self.intake.together(work)
        if became.calls:
            self.streams.look()
        if became.posted is None:
            reason = became.reason
            self.observer.saw("event.quarantined", sender=piece.sender.name, reason=reason)
            return became
        self.intake.announce([became.posted])
        self._saw(piece.sender, became.posted)
        if became.posted.outcome == "conflict":
            return await self.keep(piece.apart("conflict", conflict_with(became.posted)))
        return became

    @asynccontextmanager
    async def _slot(self, stream: Stream | None = None) -> AsyncGenerator[None]:
        """Room for one transaction. Those of a stream wait for each other in any case: here they do so before they take
        the room of others. Raises Unavailable when there is none in time.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self.intake.settings.wait_seconds):
                    if stream is not None:
                        await stack.enter_async_context(self.at_work.setdefault(stream, asyncio.Lock()))
                    await stack.enter_async_context(self.apart)
            except TimeoutError as error:
                raise unavailable(error) from None
            yield

    async def keep(self, kept: Kept) -> Became:
        """Keep apart what is no mail, durably."""
        async with self._slot(), self.pool.connection(CONNECTION_SECONDS) as conn, conn.transaction():
            new = await keep(conn, kept)
        self.observer.saw("event.quarantined", sender=kept.sender.name, reason=kept.reason)
        return Became(None, kept.reason, new, calls=False)

    async def admit_all(self, pieces: Sequence[Piece]) -> list[Became]:
        """Take all events of a batch, or none. What is kept apart for a fault of its own is kept after the others.

        Raises what `admit` raises, and Conflicting.
        """
        faults = [fault_of(piece.sender, piece.event, now=self.clock()) for piece in pieces]
        positions = [piece.position for piece in pieces]
        lined = [place for place, position in enumerate(positions) if position is not None]
        posted_at = [place for place in range(len(pieces)) if positions[place] is None and not faults[place]]
        became: dict[int, Became] = {}

        async def stand_first(conn: Connection) -> None:
            some: list[tuple[Position, Kept, MailItem | None]] = []
            for place in lined:
                fault, position, piece = faults[place], positions[place], pieces[place]
                assert position is not None, "it is in line"
                item = mail_of(piece.arrival) if fault is None else None
                some.append((position, piece.apart(*(fault or ("ahead", ""))), item))
            try:
                new = await stand_all(conn, some)
            except NameTaken:
                raise Conflicting("another event has the name of one in the batch") from None
            became.update(
                {
                    place: Became(None, kept.reason, new_one, calls=True)
                    for place, (_, kept, _), new_one in zip(lined, some, new, strict=True)
                }
            )

        arrivals = [pieces[place].arrival for place in posted_at]
        posted = await self.intake.take_all(arrivals, stand_first if lined else None)
        for place, one in zip(posted_at, posted, strict=True):
            self._saw(pieces[place].sender, one)
            became[place] = Became(one, None, one.outcome == "stored", calls=False)
        if lined:
            self.streams.look()
        for place, fault in enumerate(faults):
            if place not in became and fault is not None:
                became[place] = await self.keep(pieces[place].apart(*fault))
        return [became[place] for place in range(len(pieces))]

    async def admit_each(
        self, sender: Sender, name: str | None, elements: Sequence[Json], *, asked_at: float
    ) -> list[Became]:
        """Take each element of a batch as if it had come alone; what is no event, or may not be said, is kept apart."""

        async def one(place: int) -> Became:
            try:
                event = element_of(elements[place], place)
                return await self.admit(Piece.element(sender, name, event, place, asked_at=asked_at))
            except ContractViolation as error:
                return await self.keep(invalid(sender, name, elements[place], place, str(error)))

        return await asyncio.gather(*(one(place) for place in range(len(elements))))

    def _saw(self, sender: Sender, posted: Posted) -> None:
        if posted.outcome == "stored":
            self.observer.saw("event.stored", sender=sender.name, answer=posted.answer)
        else:
            self.observer.saw(f"event.{posted.outcome}", tenant=sender.tenant_id, sender=sender.name)


def invalid(sender: Sender, name: str | None, element: Json, place: int, why: str) -> Kept:
    """An element of a batch that is no event, or none that its sender may say."""
    body = strict_json.encode(element, what="element").encode()
    return Kept(sender, ELEMENT, body, part_of(name, place), None, "invalid", told([why]))
