"""Commands, from the facts that ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote
from uuid import UUID

from contracts import strict_json, trace
from contracts.dataref import Ticket, Tickets, naming, seconds_of
from contracts.envelope import Envelope, encode_structured
from contracts.identifiers import execution_key, message_id
from contracts.limits import DATA_LIFE, PAYLOAD_BYTES_MAX, PUBLISHED_LIFE
from contracts.objects import digest_of
from orchestrator.core.fact import Fact
from orchestrator.core.follows import SentAgain
from orchestrator.core.path import undo_path
from orchestrator.core.segments import anchor_of, span_key
from orchestrator.store.commits import NewEvent, NewMessage, NewTask

Json = Any


@dataclass(slots=True)
class Wire:
    """What a message says about us: our `source`, and where replies go (`routes`: by tenant and endpoint)."""

    source: str
    receiver_url: str
    routes: Mapping[tuple[int, str], str] = field(default_factory=dict[tuple[int, str], str])
    segment_gap: timedelta | None = None
    """After a longer pause an execution goes on in another trace."""
    tickets: Tickets | None = None
    """With them a message names data that are too large for it, where there is a payload store. None: it takes none."""

    def data_at(self, ticket: str) -> str:
        return f"{self.receiver_url.rstrip('/')}/data/{ticket}"

    def reply_to(self, tenant: int, endpoint: str) -> str:
        route = self.routes.get((tenant, endpoint), f"default/{quote(endpoint, safe='')}")
        return f"{self.receiver_url.rstrip('/')}/events/{route}"


@dataclass(frozen=True, slots=True)
class Identity:
    """The execution that a message is sent by; `traceparent` is of the span that the message's is under."""

    tenant: int
    execution: str
    epoch: int
    key: str | None
    traceparent: str | None
    hops: int = 0
    """Starts of flows by events that led to it."""


def message_of(fact: Fact, sender: Identity, wire: Wire) -> NewMessage:
    """The message that an `asked` fact of a command sends; `again` in its data numbers one that is made again.

    Its bytes are made here, once: the same on every try, and the same again should the turn be decided again.
    """
    action = fact.data["args"]
    about = fact.data["name"] if fact.data["kind"] in ("probe", "undo") else None
    undone = about if fact.data["kind"] == "undo" else None
    acts = fact.path if undone is None else undo_path(undone, 1)
    if fact.data["kind"] == "probe" and "again" in fact.data:
        acts = f"{acts}/{fact.data['again']}"  # it is asked anew, so what was said before may be wrong now
    key = execution_key(sender.execution, sender.epoch, acts)
    identity = message_id(sender.execution, sender.epoch, fact.path, at=fact.at)
    envelope = Envelope(
        id=str(identity),
        source=f"{wire.source}/executions/{sender.execution}",
        type=action["name"],
        subject=sender.key or sender.execution,
        time=instant(fact.at),
        datacontenttype="application/json",
        data=action["data"],
        extensions=extensions(fact, sender, key)
        | {"replyto": wire.reply_to(sender.tenant, action["endpoint"])},
    )
    due = None if "due" not in fact.data else datetime.fromisoformat(fact.data["due"])
    return NewMessage(
        message_id=identity,
        path=fact.path,
        endpoint=action["endpoint"],
        lane=key if about is None else execution_key(sender.execution, sender.epoch, about),
        body=body_of(
            envelope, sender, wire, identity, at=position_of(fact), until=due or fact.at + DATA_LIFE
        ),
        at_most_once=fact.data.get("effect") == "at_most_once",
        expires_at=due,
    )


def body_of(
    envelope: Envelope, sender: Identity, wire: Wire, message: UUID, *, at: int, until: datetime
) -> bytes:
    """The bytes of `envelope`. It names its data when they are too large to go with it: as part of the fact at position
    `at` they are in the payload store by the commit, and are given out `until` then.
    """
    body = encode_structured(envelope)
    if wire.tickets is None or len(body) <= PAYLOAD_BYTES_MAX:
        return body
    plain = strict_json.encode(envelope.data, what="data").encode()
    if len(plain) <= PAYLOAD_BYTES_MAX:  # in the journal they are whole too
        return body
    digest, size = digest_of(plain), len(plain)
    ticket = Ticket(
        sender.tenant, UUID(sender.execution), at, message, digest, size, expires=seconds_of(until)
    )
    url = wire.data_at(wire.tickets.issue(ticket))
    return encode_structured(naming(envelope, url, sha256=digest, size=size))


def position_of(fact: Fact) -> int:
    """Where in the journal the data of a message are; of one that is made again, where it was first asked for."""
    return fact.data.get("position", fact.position)


def task_of(fact: Fact, sender: Identity) -> NewTask:
    """The try of a task that an `asked` fact leaves; `again` in its data numbers one that comes after another.

    When its data are too large for a row, it has the position of the fact instead, in an array: data are an object.
    """
    action = fact.data["args"]
    payload = strict_json.encode(action["data"], what=f"task {fact.path}")
    if len(payload) * 4 > PAYLOAD_BYTES_MAX and len(payload.encode()) > PAYLOAD_BYTES_MAX:
        payload = f"[{position_of(fact)}]"
    key = execution_key(sender.execution, sender.epoch, fact.path)
    return NewTask(
        task_id=message_id(sender.execution, sender.epoch, fact.path, at=fact.at),
        path=fact.path,
        queue=action["queue"],
        type=action["name"],
        payload=payload,
        key=key,
        attempt=fact.data.get("again", 1),
        priority=action.get("priority", 0),
        traceparent=trace.child(
            anchor_of(sender.traceparent, sender.execution), span_key(key, fact.data.get("again"))
        ),
        expires_at=datetime.fromisoformat(fact.data["due"]),
    )


def event_of(fact: Fact, sender: Identity, wire: Wire) -> NewEvent:
    """The event that a `noted` fact emits: one for all who subscribe, its bytes made here, once."""
    said = fact.data["args"]
    identity = message_id(sender.execution, sender.epoch, fact.path, at=fact.at)
    at = execution_key(sender.execution, sender.epoch, fact.path)
    envelope = Envelope(
        id=str(identity),
        source=f"{wire.source}/executions/{sender.execution}",
        type=said["type"],
        subject=said["key"],
        time=instant(fact.at),
        datacontenttype="application/json",
        data=said["data"],
        extensions={
            "correlationid": sender.execution,
            "traceparent": trace.child(anchor_of(sender.traceparent, sender.execution), at),
            "sequence": sequence(fact),
        },
    )
    return NewEvent(
        event_id=identity,
        path=fact.path,
        type=said["type"],
        key=said["key"] or "",
        body=body_of(envelope, sender, wire, identity, at=fact.position, until=fact.at + DATA_LIFE),
        data=said["data"],
        expires_at=fact.at + PUBLISHED_LIFE,
        hops=sender.hops + 1,
    )


def asked_again(one: SentAgain) -> Fact:
    """The `asked` fact of a command as if it had been asked for when its message is made again."""
    ask = one.ask
    due = {} if ask.due is None else {"due": ask.due.isoformat()}
    data = {"kind": ask.kind, "name": ask.name, "args": ask.args, "again": one.attempt, **due, **ask.undoes}
    data["position"] = ask.position
    return Fact(one.position, "asked", ask.path, data, one.at)


def extensions(fact: Fact, sender: Identity, key: str) -> dict[str, str | bool | int]:
    """The attributes of docs/participants.md beyond CloudEvents' own."""
    found: dict[str, str | bool | int] = {
        "correlationid": sender.execution,
        "idempotencykey": key,
        "traceparent": trace.child(
            anchor_of(sender.traceparent, sender.execution),
            span_key(execution_key(sender.execution, sender.epoch, fact.path), fact.data.get("again")),
        ),
        "sequence": sequence(fact),
    }
    if "due" in fact.data:
        found["expirytime"] = instant(datetime.fromisoformat(fact.data["due"]))
    if fact.data["kind"] == "probe":
        found["probes"] = execution_key(sender.execution, sender.epoch, fact.data["name"])
    if "undoes_at" in fact.data:
        asked_at = datetime.fromisoformat(fact.data["undoes_at"])
        found["undoes"] = str(message_id(sender.execution, sender.epoch, fact.data["name"], at=asked_at))
        found["known"] = bool(fact.data["known"])
    return found


def sequence(fact: Fact) -> str:
    """Where a message stands among all that its execution, which is its source, sends: as text, it sorts.

    Source: CloudEvents, extension "Sequence".
    """
    return f"{fact.position:019d}"


def instant(at: datetime) -> str:
    """`at` as CloudEvents write it: RFC 3339, in UTC."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
