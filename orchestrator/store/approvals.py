"""What flows ask of people."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, LiteralString

from psycopg.rows import class_row

from contracts.sensitive import Scrubber
from orchestrator.store.database import Connection

Json = Any


@dataclass(frozen=True, slots=True)
class ApprovalRow:
    """An approval as people see it, at `path`; `state` is that of the view `waypost.approval`."""

    execution_id: str
    definition: str
    version: str
    business_key: str | None
    path: str
    subject: str
    who: list[str]
    choices: list[str]
    show: Json
    asked_at: datetime
    expires_at: datetime | None
    reminders: int
    state: str
    choice: str | None
    decided_by: str | None
    reason: str | None
    decided_at: datetime | None


COLUMNS: Final[LiteralString] = """
    select execution_id::text, definition, version, business_key, path, subject, who, choices, show, asked_at,
           expires_at, reminders, state, choice, decided_by, reason, decided_at
      from waypost.approval
     where tenant_id = %(tenant)s
"""

WAITING: Final[LiteralString] = (
    COLUMNS
    + """
       and state = 'waiting'
       and (%(flow)s::text is null or definition = %(flow)s::text)
     order by asked_at, execution_id, path
     limit %(limit)s
"""
)


async def waiting(conn: Connection, *, tenant: int, flow: str | None, limit: int) -> list[ApprovalRow]:
    """What waits for a person, the longest first."""
    async with conn.cursor(row_factory=class_row(ApprovalRow)) as cursor:
        await cursor.execute(WAITING, {"tenant": tenant, "flow": flow, "limit": limit})
        return await cursor.fetchall()


def shown(row: ApprovalRow, text: Scrubber) -> ApprovalRow:
    """`row` as people may see it; what is to be shown was redacted by the flow, and its texts are scrubbed here."""
    reason = None if row.reason is None else text(row.reason)
    return replace(row, reason=reason, show=text.data(row.show))


OF: Final[LiteralString] = (
    COLUMNS
    + """
       and execution_id = %(execution)s::uuid
     order by asked_at, path
"""
)


async def of(conn: Connection, execution_id: str, *, tenant: int) -> list[ApprovalRow]:
    """All that an execution has asked of people, the oldest first."""
    async with conn.cursor(row_factory=class_row(ApprovalRow)) as cursor:
        await cursor.execute(OF, {"tenant": tenant, "execution": execution_id})
        return await cursor.fetchall()


DECISION: Final[LiteralString] = """
    select data ->> 'choice', data ->> 'by'
      from waypost.inbox
     where inbox_id = %(inbox)s
"""


async def decision(conn: Connection, inbox_id: int) -> tuple[str, str]:
    """What was decided by an order that was stored, and by whom."""
    row: tuple[str, str] | None = await (await conn.execute(DECISION, {"inbox": inbox_id})).fetchone()  # pyright: ignore[reportAssignmentType]  # as the select says
    assert row is not None, "who told of it has stored it"
    return row
