"""What people may see of messages, of tasks and of what came: the same as of the journals that they belong to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from contracts.dataref import DATAHASH, DATAREF
from contracts.sensitive import REDACTED, Places, Scrubber, redacted, values_at
from orchestrator.core.redaction import Redaction
from orchestrator.outbox import Seen
from orchestrator.store import reading, tasks
from orchestrator.store import sensitive as store
from orchestrator.store.database import Connection
from orchestrator.store.inbox import Apart, Item, Received
from orchestrator.store.tasks import TaskRow

Json = Any

TICKET_SAID: Final = re.compile(rb'("dataref":"[^"]*/data/)[A-Za-z0-9_-]{164}(?=")')
"""Where a message says with what its data are got: `delivery curl` has that, and nobody is shown it."""


async def of_execution(conn: Connection, execution: str, *, tenant: int) -> Redaction:
    facts = await reading.facts(conn, execution, tenant=tenant)
    return await reading.redaction(conn, execution, facts, tenant=tenant)


async def task(conn: Connection, row: TaskRow, *, tenant: int) -> TaskRow:
    """`row` as people may see it."""
    if row.progress is None:
        return row
    return tasks.shown(row, await of_execution(conn, row.execution_id, tenant=tenant))


async def tasks_of(conn: Connection, execution: str, *, tenant: int) -> list[TaskRow]:
    """The tries of an execution's tasks, as people may see them."""
    rows = await tasks.of_execution(conn, execution, tenant=tenant)
    if all(row.progress is None for row in rows):
        return rows
    by = await of_execution(conn, execution, tenant=tenant)
    return [tasks.shown(row, by) for row in rows]


async def items(conn: Connection, rows: Sequence[Item], *, tenant: int) -> list[Item]:
    """What came, in a list: why it was kept apart may repeat what was in it."""
    types = {row.type for row in rows if row.detail and row.reason != "late"}
    hidden = {one for one in types if await store.declared(conn, one, tenant=tenant)}
    return [replace(row, detail=REDACTED) if row.type in hidden and row.detail else row for row in rows]


async def message(conn: Connection, seen: Seen, *, tenant: int) -> Seen:
    """`seen` as people may see it: its data by the classes of its flow, and what was answered by none."""
    it = replace(seen.message, body=TICKET_SAID.sub(b"\\1\xe2\x80\xa6", seen.message.body))
    by = (
        Redaction([]) if it.execution_id is None else await of_execution(conn, it.execution_id, tenant=tenant)
    )
    marks = by.marks(it.path)
    places: Places = (*marks.get("data", ()), *await store.declared(conn, seen.type, tenant=tenant))
    if not by.finds and not places:
        return replace(seen, message=it)
    body = shown_body(it.body, places, [by.text])
    answers = bool(marks)
    tries = [
        replace(
            row,
            response=shown_text(row.response, by.text, whole=answers),
            headers=row.headers and {name: by.text(value) for name, value in row.headers.items()},
        )
        for row in seen.tries
    ]
    return replace(seen, message=replace(it, body=body), tries=tries)


async def item(conn: Connection, found: Apart | Received, *, tenant: int) -> Apart | Received:
    """What came, as people may see it: by what flows that it starts, or that wait for it, declare of its type; a reply
    by the flow that has it.
    """
    places = await store.declared(conn, found.type or "", tenant=tenant)
    if isinstance(found, Apart):
        if not places:
            return found
        text = Scrubber(values_at(data_in(found.body), places))
        shown = shown_body(found.body, places, [text])
        return replace(found, body=shown, detail=text(found.detail))
    known = [await of_execution(conn, str(one), tenant=tenant) for one in found.had]
    if not places and not any(by.finds for by in known):
        return found
    texts = [by.text for by in known if by.finds]
    whole = found.kind != "event" and bool(texts)  # a reply: where in it something is depends on its step
    if whole:
        return replace(found, data=found.data and REDACTED, body=found.body and REDACTED.encode())
    data = scrubbed(redacted(found.data, places), texts)
    body = None if found.body is None else shown_body(found.body, places, texts)
    return replace(found, data=data, body=body)


def data_in(body: bytes) -> Json:
    """The data of an event; nothing, where none can be read."""
    try:
        event: Json = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return cast("Mapping[str, Json]", event).get("data") if isinstance(event, dict) else None


def shown_body(body: bytes, places: Places, texts: Sequence[Scrubber]) -> bytes:
    """An event without what stands at `places` of its data, and without what `texts` know; what is no event, not at all
    where its type has such places.
    """
    try:
        event: Json = json.loads(body)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict) or (places and "data" not in event and DATAREF not in event):
        return REDACTED.encode()
    said = cast("dict[str, Json]", event)
    if places and "data" in said:
        said = said | {"data": redacted(said["data"], places)}
    if places and DATAREF in said:
        said = said | {DATAREF: REDACTED, DATAHASH: REDACTED}
    return json.dumps(scrubbed(said, texts), ensure_ascii=False, separators=(",", ":")).encode()


def shown_text(text: bytes | None, by: Scrubber, *, whole: bool) -> bytes | None:
    if not text:
        return text
    return REDACTED.encode() if whole else by(text.decode("utf-8", "backslashreplace")).encode()


def scrubbed(value: Json, texts: Sequence[Scrubber]) -> Json:
    for text in texts:
        value = text.data(value)
    return value
