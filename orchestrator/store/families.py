"""What a commit does in other executions: it begins some, tells parents of the end of children, and children to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, LiteralString

from contracts import arrays
from contracts.mail import data_at_rest, mail_place
from orchestrator.store.database import Connection
from orchestrator.store.starts import started_at_rest


@dataclass(frozen=True, slots=True)
class NewChild:
    """An execution that the fact at `position` and `path` of a turn begins. `root` is the first of its family; None for
    one that is only started. `started` is the payload of its first fact, as JSON, but for its version.
    """

    position: int
    path: str
    execution: str
    flow: str
    business_key: str | None
    digest: bytes
    started: str
    traceparent: str
    root: str | None


@dataclass(frozen=True, slots=True)
class KinMail:
    """Mail from the fact at `position` of a turn: to a parent, for its ask at `epoch` and `path`, or to a child.

    `event` is its identity, `data` what it says, as JSON.
    """

    position: int
    kind: str
    event: str
    to: str
    data: str
    epoch: int | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """What a turn does in other executions; nothing, mostly."""

    children: list[NewChild] = field(default_factory=list[NewChild])
    mail: list[KinMail] = field(default_factory=list[KinMail])

    def __bool__(self) -> bool:
        return bool(self.children or self.mail)


LOCK: Final[LiteralString] = """
    select waypost.lock_families(
             %(k_tenant)s::int[], %(k_type)s::text[], %(k_key)s::text[],
             %(r_tenant)s::int[], %(r_id)s::uuid[])
"""


async def lock(conn: Connection, parameters: dict[str, object], rows: Sequence[tuple[int, str]]) -> None:
    """Lock `rows` (tenant, execution), after the event keys of `parameters`: the first statement of its transaction."""
    wanted = {
        "r_tenant": arrays.plain([tenant for tenant, _ in rows]),
        "r_id": arrays.plain([execution for _, execution in rows]),
    }
    await conn.execute(LOCK, parameters | wanted, prepare=True)


AFTER: Final[LiteralString] = """
    select waypost.commit_families(
             %(n_tenant)s::int[], %(n_from)s::uuid[], %(n_position)s::bigint[], %(n_fence)s::bigint[],
             %(n_epoch)s::int[], %(n_path)s::text[], %(n_id)s::uuid[], %(n_flow)s::text[], %(n_key)s::text[],
             %(n_digest)s::bytea[], %(n_started)s::jsonb[], %(n_traceparent)s::text[], %(n_root)s::uuid[],
             %(b_tenant)s::int[], %(b_id)s::uuid[], %(b_position)s::bigint[], %(b_fence)s::bigint[],
             %(b_message)s::uuid[],
             %(m_tenant)s::int[], %(m_kind)s::text[], %(m_event)s::text[], %(m_data)s::jsonb[], %(m_to)s::uuid[],
             %(m_epoch)s::int[], %(m_path)s::text[], %(m_from)s::uuid[], %(m_position)s::bigint[],
             %(m_fence)s::bigint[],
             %(now)s::timestamptz)
"""

TAKEN_BACK: Final = ("b_tenant", "b_id", "b_position", "b_fence", "b_message")
"""Columns of messages that are taken back: after executions are begun, where some are."""


def kin_mail_at_rest(tenant: int, mail: KinMail) -> str | None:
    """What mail says, as the inbox keeps it under the name that `waypost.commit_families` gives it."""
    return data_at_rest(mail.kind, mail.data, mail_place(tenant, "waypost", "waypost:execution", mail.event))


@dataclass(frozen=True, slots=True)
class Sender:
    """The turn that a family's mail and children come from."""

    tenant: int
    execution: str
    epoch: int
    fence: int


async def follow(
    conn: Connection, parameters: dict[str, object], families: Sequence[tuple[Sender, Family]]
) -> None:
    """What follows from turns that were written in this transaction; the function `waypost.commit_families` says how.

    `parameters` has the messages that they take back, and `now`.
    """
    children = [(sender, child) for sender, family in families for child in family.children]
    mail = [(sender, one) for sender, family in families for one in family.mail]
    columns: dict[str, object] = {
        "n_tenant": arrays.plain([s.tenant for s, _ in children]),
        "n_from": arrays.plain([s.execution for s, _ in children]),
        "n_position": arrays.plain([c.position for _, c in children]),
        "n_fence": arrays.plain([s.fence for s, _ in children]),
        "n_epoch": arrays.plain([s.epoch for s, _ in children]),
        "n_path": arrays.texts([c.path for _, c in children]),
        "n_id": arrays.plain([c.execution for _, c in children]),
        "n_flow": arrays.texts([c.flow for _, c in children]),
        "n_key": arrays.texts([c.business_key for _, c in children]),
        "n_digest": arrays.blobs([c.digest for _, c in children]),
        "n_started": arrays.texts([started_at_rest(s.tenant, c.execution, c.started) for s, c in children]),
        "n_traceparent": arrays.texts([c.traceparent for _, c in children]),
        "n_root": arrays.plain([c.root for _, c in children]),
        "m_tenant": arrays.plain([s.tenant for s, _ in mail]),
        "m_kind": arrays.plain([m.kind for _, m in mail]),
        "m_event": arrays.texts([m.event for _, m in mail]),
        "m_data": arrays.texts([kin_mail_at_rest(s.tenant, m) for s, m in mail]),
        "m_to": arrays.plain([m.to for _, m in mail]),
        "m_epoch": arrays.plain([m.epoch for _, m in mail]),
        "m_path": arrays.texts([m.path for _, m in mail]),
        "m_from": arrays.plain([s.execution for s, _ in mail]),
        "m_position": arrays.plain([m.position for _, m in mail]),
        "m_fence": arrays.plain([s.fence for s, _ in mail]),
    }
    kept = {name: parameters[name] for name in (*TAKEN_BACK, "now")}
    await conn.execute(AFTER, columns | kept, prepare=True)
