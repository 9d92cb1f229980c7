"""Sealing what lies in the database with the newest key, whether it was sealed with another one or in the clear."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, cast, get_args

from contracts.codec import (
    PREFIX,
    Codec,
    open_body,
    place,
    seal_body,
    seal_document,
    seal_value,
    value_opened,
)
from contracts.mail import body_at_rest, data_at_rest, mail_place
from contracts.objects import OBJECTS, references
from orchestrator.objects.large import NAMED, Large
from orchestrator.store import executions, payloads
from orchestrator.store.commits import BODY_PUBLIC, journal_place
from orchestrator.store.database import Connection
from orchestrator.store.payloads import Row, Table
from orchestrator.store.tasks import answer_place, task_place
from receiver.quarantine import quarantine_place

BOX: Final = PREFIX.decode().removeprefix("{")
DOCUMENTS: Final[dict[Table, int]] = {"journal": 5, "inbox": 6}
"""The column of the document that may name objects, of those tables that have one."""


async def rekey(conn: Connection, codec: Codec, *, progress: Callable[[Table, int, int], None]) -> int:
    """Seal all payloads with the newest key of `codec`, a page in a transaction; how many were.

    What was done stays done when it is interrupted; begun again, it goes on with what is left. Raises
    PayloadKeyMissing, PayloadUnreadable, ObjectGone and StoreAway, and then the page at fault is as it was.
    """
    begins = PREFIX + codec.newest.encode() + b'"'
    total = 0
    for table in get_args(Table):
        todo = await payloads.count(conn, table, newest=codec.newest, begins=begins)
        done, after = 0, None
        while True:
            async with conn.transaction():
                rows = await payloads.page(conn, table, newest=codec.newest, begins=begins, after=after)
                if not rows:
                    break
                moved = [await with_objects_anew(codec, table, row) for row in rows]
                anew = [
                    one
                    for row, now in zip(rows, moved, strict=True)
                    if is_sealed(one := SEAL[table](codec, now)) or now is not row
                ]
                await payloads.write(conn, table, anew)
            after = key_of(table, rows[-1])
            done, total = done + len(rows), total + len(anew)
            progress(table, done, max(todo, done))
    return total


async def with_objects_anew(codec: Codec, table: Table, row: Row) -> Row:
    """`row`, naming objects that are sealed with the newest key; itself, when it does or names none."""
    column = DOCUMENTS.get(table)
    text = None if column is None else row[column]
    if column is None or text is None or NAMED not in text:
        return row
    said: Any = json.loads(text)
    if not isinstance(said, dict) or OBJECTS not in said:
        return row
    found: dict[str, Any] = dict(cast("dict[str, Any]", said))
    anew = {
        ".".join(at): await Large.anew(int(row[0]), one)
        for at, one in references(found)
        if one.key != codec.newest
    }
    if not anew:
        return row
    found[OBJECTS] = {**found[OBJECTS], **{part: one.as_json() for part, one in anew.items()}}
    return (*row[:column], json.dumps(found), *row[column + 1 :])


def is_sealed(row: dict[str, Any]) -> bool:
    """Whether anything of a row is sealed; facts may have nothing that is private."""
    return BOX in (row.get("data") or "") or (row.get("body") or b"").startswith(PREFIX)


def key_of(table: Table, row: Row) -> str:
    """The key of a row as text, to go on behind it."""
    match table:
        case "inbox" | "quarantine":
            return str(row[1])
        case "outbox" | "task":
            return f"{row[0]} {row[1]}"
        case "journal" | "delivery":
            return f"{row[0]} {row[1]} {row[2]}"


def fact(codec: Codec, row: Row) -> dict[str, Any]:
    tenant, execution, position, kind, actor, text = row
    data: Any = json.loads(text)
    if isinstance(data, dict):
        opened = executions.opened(tenant, execution, position, cast("dict[str, Any]", data))
        text = seal_document(
            codec,
            json.dumps(opened),
            journal_place(tenant, execution, position),
            decides=kind in ("ended", "late") and actor.startswith("operator:"),
        )
    return {"tenant": tenant, "one": execution, "number": position, "data": text}


def message(codec: Codec, row: Row) -> dict[str, Any]:
    tenant, identity, body = row
    named = str(json.loads(body)["id"]) if body.startswith(PREFIX) else identity
    plain = open_body(body, place("outbox", tenant, named))
    event = json.loads(plain)
    public = {name: event[name] for name in BODY_PUBLIC if name in event} | {"id": named}
    sealed = seal_body(codec, plain, place("outbox", tenant, named), public)
    return {"tenant": tenant, "one": identity, "body": sealed}


def mail(_: Codec, row: Row) -> dict[str, Any]:
    tenant, number, kind, sender, source, event_id, data, body = row
    where = mail_place(tenant, sender, source, event_id)
    if data is not None and (kind == "event" or isinstance(json.loads(data), dict)):
        data = data_at_rest(kind, executions.mail_data(kind, data, where), where)
    return {
        "number": number,
        "data": data,
        "body": None if body is None else body_at_rest(open_body(body, where), where),
    }


def response(_: Codec, row: Row) -> dict[str, Any]:
    tenant, identity, attempt, body = row
    where = place("delivery", tenant, identity, attempt)
    sealed = body_at_rest(open_body(body, where), where)
    return {"tenant": tenant, "one": identity, "number": attempt, "body": sealed}


def task(codec: Codec, row: Row) -> dict[str, Any]:
    tenant, identity, payload, progress, answer = row
    at, said, ended = (
        task_place(tenant, identity, "payload"),
        task_place(tenant, identity, "progress"),
        answer_place(tenant, identity),
    )
    return {
        "tenant": tenant,
        "one": identity,
        "data": seal_value(codec, value_opened(payload, at), at),
        "progress": None if progress is None else seal_value(codec, value_opened(progress, said), said),
        "answer": None
        if answer is None
        else seal_document(codec, executions.mail_data("result", answer, ended), ended),
    }


def apart(_: Codec, row: Row) -> dict[str, Any]:
    tenant, number, sender, digest, body = row
    where = quarantine_place(tenant, sender, bytes(digest))
    return {"number": number, "body": body_at_rest(open_body(body, where), where)}


SEAL: Final[dict[Table, Callable[[Codec, Row], dict[str, Any]]]] = {
    "journal": fact,
    "outbox": message,
    "inbox": mail,
    "delivery": response,
    "task": task,
    "quarantine": apart,
}
