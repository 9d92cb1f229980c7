"""What was signed too long ago: acknowledged again when it is durable since, and changes nothing.

A provider that repeats its first signature with each try would hear 401 from us after five minutes, and might switch us
off, though we have the event.
"""

from __future__ import annotations

from aiohttp import web
from multidict import CIMultiDictProxy

from contracts.envelope import element_of, elements_in
from contracts.errors import ContractViolation
from contracts.limits import RECEIVE_EVENTS_MAX
from receiver.acceptance import accepted, accepted_all, set_apart
from receiver.admission import Piece, invalid
from receiver.arrivals import Arrival, mail_of
from receiver.inbox import Answer, Connection, Posted, known
from receiver.mapping import Unmapped
from receiver.quarantine import Kept, headers_for, reason_of
from receiver.requests import event_in, is_batch
from receiver.senders import Sender


async def recalled(
    conn: Connection, headers: CIMultiDictProxy[str], sender: Sender, name: str | None, body: bytes
) -> web.Response | None:
    """The answer that it got when it was new; None when it is not stored, or not as it is.

    Raises what reading it raises.
    """
    status = sender.policy.answers.ack
    if is_batch(headers):
        return await recalled_batch(conn, sender, name, body)
    try:
        event, kept = event_in(headers, body, sender)
    except Unmapped:
        event = None
    else:
        if answer := (await known(conn, [mail_of(Arrival.of(sender, name, event, kept))]))[0]:
            return accepted(posted(answer), status=status)
    # What is kept apart is named by all that was received of it, whatever could be read of that.
    apart = Kept(sender, headers_for(sender, headers), body, name, None, "mapping", "")
    match await reason_of(conn, apart):
        case None:
            return None
        case "ahead":
            return accepted(posted("event"), status=status)
        case _:
            return set_apart(new=False, status=status)


async def recalled_batch(
    conn: Connection, sender: Sender, name: str | None, body: bytes
) -> web.Response | None:
    """The same of a batch, when each of its elements is stored or kept apart."""
    policy = sender.policy
    told: list[str] = []
    for place, element in enumerate(elements_in(body, events_max=RECEIVE_EVENTS_MAX)):
        try:
            event = element_of(element, place)
            piece = Piece.element(sender, name, event, place, asked_at=0.0)
            if (await known(conn, [mail_of(piece.arrival)]))[0]:
                told.append("duplicate")
                continue
            apart = piece.apart("invalid", "")
        except ContractViolation as error:
            if policy.batch == "atomic":
                raise
            apart = invalid(sender, name, element, place, str(error))
        reason = await reason_of(conn, apart)
        if reason is None:
            return None
        told.append("duplicate" if reason == "ahead" else reason)
    if not told:
        return None
    events = [True for each in told if each == "duplicate"]
    each = told if policy.batch == "partial" else None
    apart = len(told) - len(events)
    return accepted_all(events, apart, new=False, told=each, status=policy.answers.ack)


def posted(answer: Answer) -> Posted:
    return Posted("duplicate", None, answer)
