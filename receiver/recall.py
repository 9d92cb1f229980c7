"""What was signed too long ago: acknowledged again when it is durable since, and changes nothing.

A provider that repeats its first signature with each try would hear 401 from us after five minutes, and might switch us
off, though we have the event.
"""

from __future__ import annotations

from aiohttp import web
from multidict import CIMultiDictProxy

from contracts.envelope import decode_batch, encode_structured
from contracts.limits import RECEIVE_EVENTS_MAX
from receiver.acceptance import accepted, accepted_all, set_apart
from receiver.arrivals import Arrival, mail_of
from receiver.inbox import Answer, Connection, Posted, known
from receiver.mapping import Unmapped
from receiver.quarantine import Kept, headers_for, is_kept
from receiver.requests import event_in, is_batch
from receiver.senders import Sender


async def recalled(
    conn: Connection, headers: CIMultiDictProxy[str], sender: Sender, name: str | None, body: bytes
) -> web.Response | None:
    """The answer that it got when it was new; None when it is not stored, or not as it is.

    Raises what reading it raises.
    """
    if is_batch(headers):
        envelopes = decode_batch(body, events_max=RECEIVE_EVENTS_MAX)
        items = [mail_of(Arrival.of(sender, name, it, encode_structured(it))) for it in envelopes]
        answers = await known(conn, items)
        return accepted_all([posted(answer) for answer in answers], 0) if answers else None
    try:
        envelope, kept = event_in(headers, body, sender)
    except Unmapped:
        pass
    else:
        answers = await known(conn, [mail_of(Arrival.of(sender, name, envelope, kept))])
        if answers is not None:
            return accepted(posted(answers[0]))
    # What is kept apart is named by all that was received of it, whatever could be read of that.
    apart = Kept(sender, headers_for(sender, headers), body, name, None, "mapping", "")
    return set_apart(new=False) if await is_kept(conn, apart) else None


def posted(answer: Answer) -> Posted:
    return Posted("duplicate", None, answer)
