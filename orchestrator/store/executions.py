"""Taking executions, and reading what they are.

What each turn needs is read by functions whose plans are fixed: a plan that was made for an empty table reads all of it
when it has grown, until something analyses it. The rest is planned each time, at a fraction of a millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, LiteralString, cast

from contracts import arrays, strict_json
from contracts.codec import (
    SEALED,
    PayloadKeyMissing,
    PayloadUnreadable,
    is_box,
    open_document,
    open_value,
    place,
)
from contracts.errors import MalformedJson, shown
from contracts.mail import mail_place
from orchestrator.core.fact import Fact
from orchestrator.core.upcast import SCHEMA, lifted
from orchestrator.store.database import Connection

Json = Any

UNREADABLE: Final = "unreadable"
"""The kind of a fact in memory whose payload cannot be read. No journal has it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """An execution that is ours under `fence`, as its row was when we took it. Only fixed-width columns and keys,
    so that no payload can block the claim loop.
    """

    tenant: int
    execution: str
    fence: int
    position: int
    epoch: int
    mail_read: int
    mail_received: int
    status: str
    definition: str
    version: str
    at: datetime


CLAIM: Final[LiteralString] = """
    select tenant_id, execution_id::text, fence, position, epoch, mail_read, mail_received, status, definition,
           version, at
      from waypost.claim_due(%(me)s::uuid, %(definitions)s::text[], %(versions)s::text[], %(n)s::int,
                             %(now)s::timestamptz)
"""


async def claim(
    conn: Connection,
    *,
    me: str,
    definitions: Sequence[tuple[str, str]],
    limit: int,
    now: datetime | None = None,
) -> list[Claim]:
    """Take up to `limit` executions that are due and free, longest due first, of the flows that we hold.

    *Ready*, *timer due* and *mail arrived* are one condition. Rows that another claim holds are skipped, never
    waited for. Nothing is taken when worker `me` is dead or its lease is over. `now` is for tests.
    """
    cursor = await conn.execute(
        CLAIM,
        {
            "me": me,
            "definitions": arrays.texts(name for name, _ in definitions),
            "versions": arrays.texts(version for _, version in definitions),
            "n": limit,
            "now": now,
        },
        prepare=True,
    )
    return [Claim(*row) for row in await cursor.fetchall()]


OWNED: Final[LiteralString] = """
    select e.tenant_id, e.execution_id::text, e.fence, e.position, e.epoch, e.mail_read, e.mail_received,
           e.status, e.definition, e.version, clock_timestamp()
      from waypost.execution e
     where e.owner = %(me)s::uuid
     order by e.tenant_id, e.execution_id
"""


async def owned_by(conn: Connection, *, me: str) -> list[Claim]:
    """All that worker `me` owns, as it was claimed."""
    cursor = await conn.execute(OWNED, {"me": me}, prepare=False)
    return [Claim(*row) for row in await cursor.fetchall()]


JOURNAL: Final[LiteralString] = """
    select execution_id::text, position, kind, path, payload, at, schema
      from waypost.facts_of(%(tenants)s::int[], %(ids)s::uuid[])
"""


async def journals(conn: Connection, of: Sequence[tuple[int, str]]) -> dict[str, list[Fact]]:
    """The facts of each execution in `of` (tenant, execution), in order of position.

    A payload of an earlier release is lifted to this one. One that cannot be read (any client of the database may
    have written one, or a later release) is a fact of kind UNREADABLE whose data say why, so that it stops its own
    execution and no other.
    """
    parameters = {"tenants": arrays.plain(t for t, _ in of), "ids": arrays.plain(e for _, e in of)}
    cursor = await conn.execute(JOURNAL, parameters, prepare=True)
    found: dict[str, list[Fact]] = {execution: [] for _, execution in of}
    tenants = {execution: tenant for tenant, execution in of}
    for execution, position, kind, path, payload, at, schema in await cursor.fetchall():
        try:
            data = opened(tenants[execution], execution, position, payload_of(kind, payload))
            if schema != SCHEMA:
                data = lifted(kind, schema, data)
            fact = Fact(position, kind, path, data, at)
        except (ValueError, RecursionError, MalformedJson, PayloadKeyMissing, PayloadUnreadable) as error:
            fact = Fact(position, UNREADABLE, path, {"why": f"{kind}: {error}"}, at)
        found[execution].append(fact)
    return found


def opened(tenant: int, execution: str, position: int, data: dict[str, Json]) -> dict[str, Json]:
    """A fact's data, opened where it is sealed; an input is a box alone when it came as an event that is one.

    Raises PayloadKeyMissing, PayloadUnreadable.
    """
    if SEALED in data:
        data = open_document(data, place("journal", tenant, execution, position))
    if position == 1 and "event" in data and is_box(data.get("input")):
        by = data["event"]
        text = open_value(data["input"], mail_place(tenant, by["sender"], by["source"], by["id"]))
        data = {**data, "input": json.loads(text)}
    return data


def payload_of(kind: str, text: str | None) -> dict[str, Json]:
    """A fact's data. `started` may come from any client of the database, so it alone is read strictly."""
    if text is None:
        return {}
    found: Json = strict_json.decode(text, what="payload") if kind == "started" else json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, found {shown(found)}")  # noqa: TRY004  # as any other unreadable one
    return cast("dict[str, Json]", found)


@dataclass(frozen=True, slots=True)
class Mail:
    """Something that an execution got, at `number` of its mail, for the ask at `path`.

    `sealed` says why its data could not be opened, `gone` why a part of them cannot be had. `data` is text: it may be
    anything. Of an event it is the JSON of the CloudEvent's data: any value, not only an object; base64 in a JSON
    string when they were bytes; None when there were none. `type`, `key` (the event's subject), `source` and `event_id`
    are those of the event, and None of other mail; a result has a source.
    """

    number: int
    kind: str
    epoch: int | None
    path: str | None
    data: str | None
    sender: str
    received_at: datetime
    inbox_id: int = 0
    type: str | None = None
    key: str | None = None
    source: str | None = None
    event_id: str | None = None
    sealed: str = ""
    gone: str = ""

    def read(self) -> dict[str, Json]:
        """Its data. Raises MalformedJson when that is not strict JSON, or not an object."""
        found: Json = strict_json.decode(self.data or "null", what=f"mail {self.number}")
        return cast("dict[str, Json]", found) if isinstance(found, dict) else {}


MAIL: Final[LiteralString] = """
    select execution_id::text, mail_number, kind, epoch, path, data, sender, received_at, inbox_id, type, key,
           case when kind in ('event', 'result') then source end,
           case when kind = 'event' then event_id end, source, event_id, tenant_id
      from waypost.unread_mail(%(tenants)s::int[], %(ids)s::uuid[], %(read)s::int[])
"""


async def unread(conn: Connection, of: Sequence[tuple[int, str, int]]) -> dict[str, list[Mail]]:
    """The mail of each execution in `of` (tenant, execution, mail read so far), in order of arrival."""
    parameters = {
        "tenants": arrays.plain(t for t, _, _ in of),
        "ids": arrays.plain(e for _, e, _ in of),
        "read": arrays.plain(r for _, _, r in of),
    }
    cursor = await conn.execute(MAIL, parameters, prepare=True)
    found: dict[str, list[Mail]] = {execution: [] for _, execution, _ in of}
    for execution, *mail, source, event_id, tenant in await cursor.fetchall():
        found[execution].append(mail_of(mail, tenant, source, event_id))
    for _, execution, read in of:
        numbers = [mail.number for mail in found[execution]]
        assert numbers == list(range(read + 1, read + 1 + len(numbers))), (
            f"{execution}: mail {numbers} after {read}"
        )
    return found


def mail_of(columns: Sequence[Any], tenant: int, source: str, event_id: str) -> Mail:
    """A row as mail; what does not open says so in `sealed`, and has no data."""
    mail = Mail(*columns)
    if mail.data is None or SEALED not in mail.data:
        return mail
    try:
        return replace(
            mail, data=mail_data(mail.kind, mail.data, mail_place(tenant, mail.sender, source, event_id))
        )
    except (PayloadKeyMissing, PayloadUnreadable) as error:
        return replace(mail, data=None, sealed=str(error))


def mail_data(kind: str, text: str, where: str) -> str:
    """What mail says, opened where it is sealed. Raises PayloadKeyMissing, PayloadUnreadable."""
    said: Json = json.loads(text)
    if kind == "event":
        return open_value(said, where) if is_box(said) else text
    if isinstance(said, dict) and SEALED in said:
        return strict_json.encode(open_document(cast("dict[str, Json]", said), where), what="mail")
    return text


STANDING: Final[LiteralString] = """
    select e.execution_id::text, e.owner::text, e.fence, e.position, e.mail_read, e.mail_received, e.status
      from unnest(%(tenants)s::int[], %(ids)s::uuid[]) as t(tenant_id, execution_id)
      join waypost.execution e on e.tenant_id = t.tenant_id and e.execution_id = t.execution_id
"""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a row says now, after a commit of ours did not match it."""

    owner: str | None
    fence: int
    position: int
    mail_read: int
    mail_received: int
    status: str


async def standing(conn: Connection, of: Sequence[tuple[int, str]]) -> dict[str, Standing]:
    """The rows of the executions in `of` (tenant, execution), as they are now."""
    parameters = {"tenants": arrays.plain(t for t, _ in of), "ids": arrays.plain(e for _, e in of)}
    cursor = await conn.execute(STANDING, parameters, prepare=False)
    return {execution: Standing(*row) for execution, *row in await cursor.fetchall()}
