"""The one short transaction: facts, messages, wake-up and release of many turns commit together or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, LiteralString
from uuid import UUID

from orchestrator.core.fact import Fact
from orchestrator.store import arrays
from orchestrator.store.database import Connection


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to leave with a turn, its bytes as they will be signed and sent on every try."""

    message_id: UUID
    path: str
    endpoint: str
    lane: str
    body: bytes
    at_most_once: bool
    expires_at: datetime | None


@dataclass(slots=True)
class Turn:
    """What one execution wants to commit, and what must still be true of its row for that.

    `position` is that of its last committed fact. `mail` and `orders` count what the turn has read. With
    `guard`, it commits only if no further mail has come; with `asks`, only if no further order has.
    """

    tenant: int
    execution: str
    fence: int
    position: int
    epoch: int
    facts: list[Fact]
    mail: int
    orders: int
    status: str
    undoing: bool
    release: bool
    due: datetime | None
    guard: bool
    asks: bool
    messages: list[NewMessage] = field(default_factory=list)
    taken_back: list[tuple[int, UUID]] = field(default_factory=list)


LOCK_ROWS: Final[LiteralString] = "select waypost.lock_rows(%(t_tenant)s::int[], %(t_id)s::uuid[])"

COMMIT: Final[LiteralString] = """
      with t as materialized (
             select *
               from unnest(%(t_tenant)s::int[], %(t_id)s::uuid[], %(t_fence)s::bigint[], %(t_pos)s::bigint[],
                           %(t_facts)s::int[], %(t_mail)s::int[], %(t_orders)s::int[], %(t_status)s::text[],
                           %(t_epoch)s::int[], %(t_undoing)s::bool[], %(t_release)s::bool[],
                           %(t_due)s::timestamptz[], %(t_guard)s::bool[], %(t_asks)s::bool[])
                 as t(tenant_id, execution_id, fence, pos, facts, mail, orders, status, epoch, undoing, release,
                      due, guard, asks)),
           done as (
             update waypost.execution e
                set position = e.position + t.facts,
                    mail_read = e.mail_read + t.mail,
                    orders_read = e.orders_read + t.orders,
                    status = t.status,
                    epoch = t.epoch,
                    undoing = t.undoing,
                    owner = case when t.release then null else e.owner end,
                    finished_at = case
                      when t.status in ('completed', 'compensated', 'failed', 'cancelled')
                      then coalesce(%(now)s::timestamptz, now()) end,
                    wake_at = case
                      when t.status in ('completed', 'compensated', 'failed', 'cancelled') then null
                      when not t.release then e.wake_at
                      when t.status in ('paused', 'held') then
                        case when e.orders_received > e.orders_read + t.orders
                             then coalesce(%(now)s::timestamptz, now()) end
                      when e.mail_received > e.mail_read + t.mail then coalesce(%(now)s::timestamptz, now())
                      else t.due end
               from t
              where e.tenant_id = t.tenant_id
                and e.execution_id = t.execution_id
                and e.owner = %(me)s::uuid
                and e.fence = t.fence
                and e.position = t.pos
                and (not t.guard or e.mail_received = e.mail_read + t.mail)
                and (not t.asks or e.orders_received = e.orders_read + t.orders)
          returning e.tenant_id, e.execution_id, e.fence, e.epoch,
                    e.owner is null and e.wake_at <= coalesce(%(now)s::timestamptz, now()) as due),
           facts as (
             insert into waypost.journal
                    (tenant_id, execution_id, position, fence, path, kind, payload, actor, at)
             select d.tenant_id, d.execution_id, f.position, d.fence, f.path, f.kind, f.payload, f.actor, f.at
               from unnest(%(j_tenant)s::int[], %(j_id)s::uuid[], %(j_pos)s::bigint[], %(j_path)s::text[],
                           %(j_kind)s::text[], %(j_payload)s::jsonb[], %(j_actor)s::text[],
                           %(j_at)s::timestamptz[])
                 as f(tenant_id, execution_id, position, path, kind, payload, actor, at)
               join done d using (tenant_id, execution_id)),
           messages as (
             insert into waypost.outbox
                    (tenant_id, message_id, execution_id, epoch, path, at_most_once, endpoint, lane, body,
                     expires_at, due_at)
             select d.tenant_id, f.message_id, d.execution_id, d.epoch, f.path, f.once, f.endpoint, f.lane, f.body,
                    f.expires_at, coalesce(%(now)s::timestamptz, now())
               from unnest(%(o_tenant)s::int[], %(o_id)s::uuid[], %(o_msg)s::uuid[], %(o_path)s::text[],
                           %(o_once)s::bool[], %(o_endpoint)s::text[], %(o_lane)s::text[], %(o_body)s::bytea[],
                           %(o_expires)s::timestamptz[])
                    with ordinality
                 as f(tenant_id, execution_id, message_id, path, once, endpoint, lane, body, expires_at, ord)
               join done d using (tenant_id, execution_id)
              order by f.ord)
    select execution_id::text, due
      from done
"""

TAKE_BACK: Final[LiteralString] = """
    select waypost.take_back(%(b_tenant)s::int[], %(b_id)s::uuid[], %(b_pos)s::bigint[], %(b_fence)s::bigint[],
                             %(b_msg)s::uuid[], %(now)s::timestamptz)
"""


async def commit(
    conn: Connection, turns: Sequence[Turn], *, me: str, now: datetime | None = None
) -> dict[str, bool]:
    """Commit `turns` (one per execution) as worker `me`; in one pipeline, one transaction.

    Returns the executions whose row matched owner, fence, position and guards, each with whether it wants to
    move again at once. Nothing at all was written for the others. `now` is for tests.

    Rows are locked first, sorted, in a statement of their own: a lock and what it protects are never one
    statement, since a statement's snapshot is older than any lock that it waits for.
    """
    parameters = columns(turns) | {"me": me, "now": now}
    async with conn.pipeline(), conn.transaction():
        await conn.execute(LOCK_ROWS, parameters, prepare=True)
        cursor = await conn.execute(COMMIT, parameters, prepare=True)
        back = [turn for turn in turns if turn.taken_back]
        if back:
            await conn.execute(TAKE_BACK, taken_back(back) | {"now": now}, prepare=True)
    rows: list[tuple[str, bool]] = await cursor.fetchall()  # pyright: ignore[reportAssignmentType]  # as the select says
    return {execution: bool(due) for execution, due in rows}


def columns(turns: Sequence[Turn]) -> dict[str, object]:
    """`turns`, their facts and their messages, column by column."""
    assert len({turn.execution for turn in turns}) == len(turns), "one turn per execution and batch"
    facts = [(turn, fact) for turn in turns for fact in turn.facts]
    messages = [(turn, message) for turn in turns for message in turn.messages]
    return {
        "t_tenant": arrays.plain([t.tenant for t in turns]),
        "t_id": arrays.plain([t.execution for t in turns]),
        "t_fence": arrays.plain([t.fence for t in turns]),
        "t_pos": arrays.plain([t.position for t in turns]),
        "t_facts": arrays.plain([len(t.facts) for t in turns]),
        "t_mail": arrays.plain([t.mail for t in turns]),
        "t_orders": arrays.plain([t.orders for t in turns]),
        "t_status": arrays.plain([t.status for t in turns]),
        "t_epoch": arrays.plain([t.epoch for t in turns]),
        "t_undoing": arrays.flags([t.undoing for t in turns]),
        "t_release": arrays.flags([t.release for t in turns]),
        "t_due": arrays.times([t.due for t in turns]),
        "t_guard": arrays.flags([t.guard for t in turns]),
        "t_asks": arrays.flags([t.asks for t in turns]),
        "j_tenant": arrays.plain([t.tenant for t, _ in facts]),
        "j_id": arrays.plain([t.execution for t, _ in facts]),
        "j_pos": arrays.plain([f.position for _, f in facts]),
        "j_path": arrays.texts([f.path for _, f in facts]),
        "j_kind": arrays.plain([f.kind for _, f in facts]),
        "j_payload": arrays.texts([f.text for _, f in facts]),
        "j_actor": arrays.texts([f.actor for _, f in facts]),
        "j_at": arrays.times([f.at for _, f in facts]),
        "o_tenant": arrays.plain([t.tenant for t, _ in messages]),
        "o_id": arrays.plain([t.execution for t, _ in messages]),
        "o_msg": arrays.plain([m.message_id for _, m in messages]),
        "o_path": arrays.texts([m.path for _, m in messages]),
        "o_once": arrays.flags([m.at_most_once for _, m in messages]),
        "o_endpoint": arrays.texts([m.endpoint for _, m in messages]),
        "o_lane": arrays.texts([m.lane for _, m in messages]),
        "o_body": arrays.blobs([m.body for _, m in messages]),
        "o_expires": arrays.times([m.expires_at for _, m in messages]),
    }


def taken_back(turns: Sequence[Turn]) -> dict[str, object]:
    rows = [(turn, position, message) for turn in turns for position, message in turn.taken_back]
    return {
        "b_tenant": arrays.plain([t.tenant for t, _, _ in rows]),
        "b_id": arrays.plain([t.execution for t, _, _ in rows]),
        "b_pos": arrays.plain([position for _, position, _ in rows]),
        "b_fence": arrays.plain([t.fence for t, _, _ in rows]),
        "b_msg": arrays.plain([message for _, _, message in rows]),
    }


COMMITTED: Final[LiteralString] = """
    select t.execution_id::text, t.release
      from unnest(%(tenants)s::int[], %(ids)s::uuid[], %(positions)s::bigint[], %(fences)s::bigint[],
                  %(releases)s::bool[])
        as t(tenant_id, execution_id, position, fence, release)
      join waypost.journal j
        on j.tenant_id = t.tenant_id and j.execution_id = t.execution_id
       and j.position = t.position and j.fence = t.fence
"""


async def committed(conn: Connection, turns: Sequence[Turn]) -> dict[str, bool]:
    """Which of `turns` took effect, after the answer to their COMMIT was lost: the journal knows.

    Facts carry the fence of their writer, so the last fact of a turn can only be its own. Each comes with
    whether it should be looked at again at once, which is so when it was released.
    """
    cursor = await conn.execute(
        COMMITTED,
        {
            "tenants": arrays.plain(t.tenant for t in turns),
            "ids": arrays.plain(t.execution for t in turns),
            "positions": arrays.plain(t.position + len(t.facts) for t in turns),
            "fences": arrays.plain(t.fence for t in turns),
            "releases": arrays.flags(t.release for t in turns),
        },
        prepare=True,
    )
    rows: list[tuple[str, bool]] = await cursor.fetchall()  # pyright: ignore[reportAssignmentType]  # as the select says
    return dict(rows)
