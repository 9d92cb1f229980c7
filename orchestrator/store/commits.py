"""The one short transaction: facts, messages, wake-up and release of many turns commit together or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, LiteralString
from uuid import UUID

from contracts import arrays
from contracts.codec import Sealing, place, seal_body, seal_document, value_at_rest
from contracts.limits import SOURCE_BYTES_MAX
from contracts.mail import data_at_rest, mail_place
from orchestrator.core.fact import Fact
from orchestrator.store.database import Connection
from orchestrator.store.families import TAKEN_BACK, Family, Sender, follow, lock
from orchestrator.store.tasks import task_place

Json = Any


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


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to leave with a turn: to each endpoint that subscribes to its type when the turn is committed, and to
    the flows of this installation.
    """

    event_id: UUID
    path: str
    type: str
    key: str
    body: bytes
    data: Json
    """For flows, whole; its body may name it instead."""
    expires_at: datetime
    hops: int
    """Starts of flows by events that led to it."""


@dataclass(frozen=True, slots=True)
class NewAttribute:
    """What an execution says about itself after a turn; without a value, it is gone."""

    name: str
    value: str | int | float | bool | datetime | None


@dataclass(frozen=True, slots=True)
class NewTask:
    """Work for the workers of `queue`: one try of what a turn asks, its `payload` in JSON. `key` is the same for each
    try.
    """

    task_id: UUID
    path: str
    queue: str
    type: str
    payload: str
    key: str
    attempt: int
    priority: int
    traceparent: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class NewWait:
    """A wait for an event of `type` and `key` that a turn registers: the first such event is mail for its path."""

    path: str
    type: str
    key: str


@dataclass(frozen=True, slots=True)
class ClosedWait:
    """A wait that a turn deletes. `was_open`: by what the worker has loaded, no event has filled it."""

    path: str
    type: str
    key: str
    was_open: bool


NO_FAMILY: Final = Family()


@dataclass(frozen=True, slots=True)
class NewMutex:
    """A mutex that a turn asks for: its `key`, of one step or of the whole `flow` (`kind`)."""

    path: str
    kind: str
    key: str


@dataclass(slots=True)
class Turn:
    """What one execution wants to commit, and what must still be true of its row for that.

    `position` is that of its last committed fact. `mail` and `orders` count what the turn has read. With
    `guard`, the number of the last mail that the worker has loaded, it commits only if no other mail has come;
    with `asks`, only if no further order has. `epoch` is that of its facts, `next_epoch` the one that begins with its
    last fact. A turn that closes a wait that was open needs its guard, and one
    that ends its execution closes all of its waits. `family` is what it does in other executions, `let_go` are paths of
    mutexes that it waits for or has no more.
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
    guard: int | None
    asks: bool
    messages: Sequence[NewMessage] = ()
    events: Sequence[NewEvent] = ()
    attributes: Sequence[NewAttribute] = ()
    taken_back: Sequence[tuple[int, UUID]] = ()
    tasks: Sequence[NewTask] = ()
    tasks_back: Sequence[tuple[int, UUID]] = ()
    waits: Sequence[NewWait] = ()
    closed_waits: Sequence[ClosedWait] = ()
    mutexes: Sequence[NewMutex] = ()
    let_go: Sequence[str] = ()
    began: datetime | None = None
    next_epoch: int | None = None
    family: Family = NO_FAMILY

    @property
    def moves_mutexes(self) -> bool:
        """Whether somebody may get a mutex by it."""
        return bool(self.mutexes or self.let_go)


EventKey = tuple[int, str, str]
"""What events are locked by: tenant, type, key."""

KEYS_MAX: Final = 256
"""Event keys that one transaction locks: they are held in memory that the whole server shares."""


def keys_locked(turn: Turn) -> set[EventKey]:
    """The event keys that the commit of `turn` locks: of waits that may meet an event meanwhile."""
    if not turn.waits and not turn.closed_waits:
        return set()
    return {(turn.tenant, wait.type, wait.key) for wait in turn.waits} | {
        (turn.tenant, wait.type, wait.key) for wait in turn.closed_waits if wait.was_open
    }


OF_TURNS: Final[LiteralString] = """
    waypost.commit_turns(
             %(me)s::uuid, %(now)s::timestamptz,
             %(t_tenant)s::int[], %(t_id)s::uuid[], %(t_fence)s::bigint[], %(t_position)s::bigint[],
             %(t_facts)s::int[], %(t_mail)s::int[], %(t_orders)s::int[], %(t_status)s::text[], %(t_epoch)s::int[],
             %(t_undoing)s::bool[], %(t_release)s::bool[], %(t_due)s::timestamptz[], %(t_guard)s::int[],
             %(t_asks)s::bool[],
             %(j_tenant)s::int[], %(j_id)s::uuid[], %(j_position)s::bigint[], %(j_fence)s::bigint[],
             %(j_path)s::text[], %(j_kind)s::text[], %(j_payload)s::jsonb[], %(j_actor)s::text[],
             %(j_at)s::timestamptz[],
             %(o_tenant)s::int[], %(o_id)s::uuid[], %(o_epoch)s::int[], %(o_message)s::uuid[], %(o_path)s::text[],
             %(o_once)s::bool[], %(o_endpoint)s::text[], %(o_lane)s::text[], %(o_body)s::bytea[],
             %(o_expires)s::timestamptz[],
             %(b_tenant)s::int[], %(b_id)s::uuid[], %(b_position)s::bigint[], %(b_fence)s::bigint[],
             %(b_message)s::uuid[],
"""

OF_WAITS: Final[LiteralString] = """
             %(w_tenant)s::int[], %(w_id)s::uuid[], %(w_epoch)s::int[], %(w_path)s::text[], %(w_type)s::text[],
             %(w_key)s::text[],
             %(x_tenant)s::int[], %(x_id)s::uuid[], %(x_path)s::text[],
             %(k_tenant)s::int[], %(k_type)s::text[], %(k_key)s::text[])
"""

# psycopg reads a statement of more than 50 parameters anew each time.
NO_WAITS: Final[LiteralString] = "'{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')"

CALL: Final[LiteralString] = OF_TURNS + OF_WAITS
CALL_PLAIN: Final[LiteralString] = OF_TURNS + NO_WAITS

COMMIT: Final[LiteralString] = "select execution::text, is_due from " + CALL_PLAIN  # noqa: S608  # constants of this file
COMMIT_WAITS: Final[LiteralString] = "select execution::text, is_due from " + CALL  # noqa: S608  # constants of this file

DONE_PLAIN: Final[LiteralString] = (
    "done as materialized (select execution, is_due from " + CALL_PLAIN + ")"  # noqa: S608  # constants of this file
)
DONE: Final[LiteralString] = "done as materialized (select execution, is_due from " + CALL + ")"  # noqa: S608  # constants of this file

MARKS: Final[LiteralString] = """,
    marks as (
        insert into waypost.span_due (part, tenant_id, execution_id, position, facts, began_at)
        select 'worker', t.tenant_id, t.execution_id, t.position, t.facts, t.began
          from unnest(%(t_tenant)s::int[], %(t_id)s::uuid[], %(t_position)s::bigint[], %(t_facts)s::int[],
                      %(t_began)s::timestamptz[]) as t(tenant_id, execution_id, position, facts, began)
          join done on done.execution = t.execution_id
         where t.facts > 0
    )
"""

# One message for each endpoint that subscribes now. None of them is locked by anybody: they are new. Sorted, as their
# lanes are locked in this order.
SENT: Final[LiteralString] = """,
    sent as (
        insert into waypost.outbox
               (tenant_id, message_id, execution_id, epoch, path, command, endpoint, lane, ordered, body, due_at,
                expires_at)
        select t.tenant_id, waypost.id_of(t.event_id || '/' || s.endpoint), t.execution_id, t.epoch, t.path, false,
               s.endpoint,
               case s.ordered_by when 'key' then t.key when 'execution' then t.execution_id::text end,
               s.ordered_by is not null, t.body, coalesce(%(now)s::timestamptz, now()), t.expires_at
          from unnest(%(e_tenant)s::int[], %(e_id)s::uuid[], %(e_epoch)s::int[], %(e_event)s::uuid[],
                      %(e_path)s::text[], %(e_type)s::text[], %(e_key)s::text[], %(e_body)s::bytea[],
                      %(e_expires)s::timestamptz[])
               with ordinality
            as t(tenant_id, execution_id, epoch, event_id, path, type, key, body, expires_at, ord)
          join done on done.execution = t.execution_id
         cross join lateral waypost.subscribers_of(t.tenant_id, t.type, t.body) s
         order by t.tenant_id, s.endpoint collate "C",
                  case s.ordered_by when 'key' then t.key when 'execution' then t.execution_id::text end collate "C",
                  t.ord
    ),
    emitted as (
        insert into waypost.emitted
               (tenant_id, emitter, source, event_id, type, key, data, traceparent, hops)
        select t.tenant_id, t.execution_id::text, t.source, t.event_id::text, t.type, t.key, t.data, t.trace, t.hops
          from unnest(%(e_tenant)s::int[], %(e_id)s::uuid[], %(e_event)s::uuid[], %(e_type)s::text[],
                      %(e_source)s::text[], %(e_key)s::text[], %(e_data)s::jsonb[], %(e_trace)s::text[],
                      %(e_hops)s::int[])
               with ordinality as t(tenant_id, execution_id, event_id, type, source, key, data, trace, hops, ord)
          join done on done.execution = t.execution_id
         order by t.ord
    )
"""

# The row of the execution is locked by now, and only its owner's turns write these.
PUBLISHED: Final[LiteralString] = """,
    published as (
        select t.*
          from unnest(%(a_tenant)s::int[], %(a_id)s::uuid[], %(a_name)s::text[], %(a_text)s::text[],
                      %(a_number)s::numeric[], %(a_flag)s::bool[], %(a_moment)s::timestamptz[])
            as t(tenant_id, execution_id, name, text, number, flag, moment)
          join done on done.execution = t.execution_id
    ),
    kept as (
        insert into waypost.attribute as a (tenant_id, execution_id, name, text, number, flag, moment)
        select p.tenant_id, p.execution_id, p.name, p.text, p.number, p.flag, p.moment
          from published p
         where num_nonnulls(p.text, p.number, p.flag, p.moment) > 0
         order by 1, 2, 3
            on conflict (tenant_id, execution_id, name) do update
           set text = excluded.text, number = excluded.number, flag = excluded.flag, moment = excluded.moment
    ),
    gone as (
        delete from waypost.attribute a
         using published p
         where num_nonnulls(p.text, p.number, p.flag, p.moment) = 0
           and (a.tenant_id, a.execution_id, a.name) = (p.tenant_id, p.execution_id, p.name)
    )
"""

# Rows of this execution only, which it holds the row of; grant_mutexes marks them under the same row.
MUTEXES: Final[LiteralString] = """,
    turns as (
        insert into waypost.mutex (tenant_id, kind, key, execution_id, epoch, path, asked_at)
        select t.tenant_id, t.kind, t.key, t.execution_id, t.epoch, t.path, coalesce(%(now)s::timestamptz, now())
          from unnest(%(m_tenant)s::int[], %(m_id)s::uuid[], %(m_epoch)s::int[], %(m_path)s::text[],
                      %(m_kind)s::text[], %(m_key)s::text[]) with ordinality
            as t(tenant_id, execution_id, epoch, path, kind, key, ord)
          join done on done.execution = t.execution_id
         order by t.ord
    ),
    let_go as (
        delete from waypost.mutex m
         using unnest(%(l_tenant)s::int[], %(l_id)s::uuid[], %(l_path)s::text[]) as t(tenant_id, execution_id, path)
          join done on done.execution = t.execution_id
         where m.tenant_id = t.tenant_id
           and m.execution_id = t.execution_id
           and m.path = t.path
    )
"""

# By a function that is called when the turns are written, so that its snapshots have them.
TASKED: Final[LiteralString] = """,
    tasked as materialized (
        select waypost.commit_tasks(
                   array(select execution from done), %(now)s::timestamptz,
                   %(p_tenant)s::int[], %(p_id)s::uuid[], %(p_epoch)s::int[], %(p_task)s::uuid[], %(p_path)s::text[],
                   %(p_queue)s::text[], %(p_type)s::text[], %(p_payload)s::jsonb[], %(p_key)s::text[],
                   %(p_attempt)s::int[], %(p_priority)s::int[], %(p_trace)s::text[], %(p_expires)s::timestamptz[],
                   %(q_tenant)s::int[], %(q_id)s::uuid[], %(q_position)s::bigint[], %(q_fence)s::bigint[],
                   %(q_task)s::uuid[]) as due
    )
"""

TOLD_TASKED: Final[LiteralString] = """
-- and what matched, with what the tasks that were taken back have woken
 select d.execution::text, d.is_due or d.execution = any(k.due)
   from done d
  cross join tasked k
"""

TOLD: Final[LiteralString] = "\n-- and what matched\n select execution::text, is_due from done"

COMMIT_TRACED: Final[LiteralString] = "with " + DONE_PLAIN + MARKS + TOLD
COMMIT_WAITS_TRACED: Final[LiteralString] = "with " + DONE + MARKS + TOLD
COMMIT_EMITTING: Final[LiteralString] = "with " + DONE + SENT + TOLD
COMMIT_EMITTING_TRACED: Final[LiteralString] = "with " + DONE + MARKS + SENT + TOLD
COMMIT_PUBLISHING: Final[LiteralString] = "with " + DONE + SENT + PUBLISHED + TOLD
COMMIT_PUBLISHING_TRACED: Final[LiteralString] = "with " + DONE + MARKS + SENT + PUBLISHED + TOLD
COMMIT_TASKED: Final[LiteralString] = "with " + DONE + SENT + PUBLISHED + MUTEXES + TASKED + TOLD_TASKED
COMMIT_TASKED_TRACED: Final[LiteralString] = (
    "with " + DONE + MARKS + SENT + PUBLISHED + MUTEXES + TASKED + TOLD_TASKED
)

COMMIT_MUTEXES: Final[LiteralString] = "with " + DONE + SENT + PUBLISHED + MUTEXES + TOLD
COMMIT_MUTEXES_TRACED: Final[LiteralString] = "with " + DONE + MARKS + SENT + PUBLISHED + MUTEXES + TOLD

STATEMENTS: Final[Mapping[tuple[bool, bool, bool, bool, bool], LiteralString]] = {
    (False, False, False, False, False): COMMIT,
    (True, False, False, False, False): COMMIT_TRACED,
    (False, True, False, False, False): COMMIT_WAITS,
    (True, True, False, False, False): COMMIT_WAITS_TRACED,
    (False, True, True, False, False): COMMIT_EMITTING,
    (True, True, True, False, False): COMMIT_EMITTING_TRACED,
    (False, True, True, True, False): COMMIT_PUBLISHING,
    (True, True, True, True, False): COMMIT_PUBLISHING_TRACED,
    (False, True, True, True, True): COMMIT_MUTEXES,
    (True, True, True, True, True): COMMIT_MUTEXES_TRACED,
}
"""By whether it is traced, whether a turn may wait for events, emit them, publish attributes, and whether one asks for
a mutex or lets one go.
"""

TASKED_STATEMENTS: Final[Mapping[bool, LiteralString]] = {False: COMMIT_TASKED, True: COMMIT_TASKED_TRACED}
"""The same where a turn leaves or takes back tasks: it may emit, publish and move mutexes too. By whether it is
traced.
"""


async def commit(
    conn: Connection, turns: Sequence[Turn], *, me: str, traced: bool = False, now: datetime | None = None
) -> dict[str, bool]:
    """Commit `turns` (one per execution) as worker `me`: one statement, one transaction (in autocommit).

    Together they lock at most KEYS_MAX event keys, or one of them alone does. Returns the executions whose row
    matched owner, fence, position and guards, each with whether it wants to move again at once. Nothing at all was
    written for the others. With `traced`, it marks the turns as to be exported. `now` is for tests. The function
    `waypost.commit_turns` says how. Turns that do something in other executions make it three statements.
    """
    parameters = columns(turns) | {"me": me, "now": now}
    if traced:
        parameters["t_began"] = arrays.times([turn.began for turn in turns])
    tasked = any(turn.tasks or turn.tasks_back for turn in turns)
    moves = tasked or any(turn.moves_mutexes for turn in turns)
    publishes = moves or any(turn.attributes for turn in turns)
    emits = publishes or any(turn.events for turn in turns)
    kin = any(turn.family for turn in turns)
    waits = emits or kin or any(turn.waits or turn.closed_waits for turn in turns)
    if waits:
        parameters |= columns_of_waits(turns)
    if emits:
        parameters |= columns_of_events(turns)
    if publishes:
        parameters |= columns_of_attributes(turns)
    if moves:
        parameters |= columns_of_mutexes(turns)
    if tasked:
        parameters |= columns_of_tasks(turns)
    statement = TASKED_STATEMENTS[traced] if tasked else STATEMENTS[traced, waits, emits, publishes, moves]
    if kin:
        return await commit_family(conn, turns, statement, parameters)
    cursor = await conn.execute(statement, parameters, prepare=True)
    rows: list[tuple[str, bool]] = await cursor.fetchall()  # pyright: ignore[reportAssignmentType]  # as the select says
    return dict(rows)


async def commit_family(
    conn: Connection, turns: Sequence[Turn], statement: LiteralString, parameters: dict[str, object]
) -> dict[str, bool]:
    """`statement` with what `turns` do in other executions: those are locked with their own rows, and messages are
    taken back last. Mail that they get of it makes them due.
    """
    families = [(Sender(t.tenant, t.execution, t.epoch, t.fence), t.family) for t in turns if t.family]
    kin = {(sender.tenant, one.to) for sender, family in families for one in family.mail}
    rows = sorted(kin | {(turn.tenant, turn.execution) for turn in turns})
    async with conn.transaction():
        await lock(conn, parameters, rows)
        none = dict.fromkeys(TAKEN_BACK, arrays.plain([]))
        cursor = await conn.execute(statement, parameters | none, prepare=True)
        matched: list[tuple[str, bool]] = await cursor.fetchall()  # pyright: ignore[reportAssignmentType]  # as the select says
        await follow(conn, parameters, families)
    return dict.fromkeys((execution for execution, _ in matched), True)


def columns(turns: Sequence[Turn]) -> dict[str, object]:
    """`turns`, their facts and messages, and what they take back, column by column."""
    assert len({turn.execution for turn in turns}) == len(turns), "one turn per execution and batch"
    facts = [(turn, fact) for turn in turns for fact in turn.facts]
    messages = [(turn, message) for turn in turns for message in turn.messages]
    back = [(turn, position, message) for turn in turns for position, message in turn.taken_back]
    return {
        "t_tenant": arrays.numbers([t.tenant for t in turns]),
        "t_id": arrays.words([t.execution for t in turns]),
        "t_fence": arrays.numbers([t.fence for t in turns]),
        "t_position": arrays.numbers([t.position for t in turns]),
        "t_facts": arrays.numbers([len(t.facts) for t in turns]),
        "t_mail": arrays.numbers([t.mail for t in turns]),
        "t_orders": arrays.numbers([t.orders for t in turns]),
        "t_status": arrays.words([t.status for t in turns]),
        "t_epoch": arrays.numbers([t.epoch if t.next_epoch is None else t.next_epoch for t in turns]),
        "t_undoing": arrays.flags([t.undoing for t in turns]),
        "t_release": arrays.flags([t.release for t in turns]),
        "t_due": arrays.times([t.due for t in turns]),
        "t_guard": arrays.plain([t.guard for t in turns]),
        "t_asks": arrays.flags([t.asks for t in turns]),
        "j_tenant": arrays.numbers([t.tenant for t, _ in facts]),
        "j_id": arrays.words([t.execution for t, _ in facts]),
        "j_position": arrays.numbers([f.position for _, f in facts]),
        "j_fence": arrays.numbers([t.fence for t, _ in facts]),
        "j_path": arrays.texts([f.path for _, f in facts]),
        "j_kind": arrays.words([f.kind for _, f in facts]),
        "j_payload": arrays.texts(payloads(facts)),
        "j_actor": arrays.texts([f.actor for _, f in facts]),
        "j_at": arrays.times([f.at for _, f in facts]),
        "o_tenant": arrays.numbers([t.tenant for t, _ in messages]),
        "o_id": arrays.words([t.execution for t, _ in messages]),
        "o_epoch": arrays.numbers([t.epoch for t, _ in messages]),
        "o_message": arrays.plain([m.message_id for _, m in messages]),
        "o_path": arrays.texts([m.path for _, m in messages]),
        "o_once": arrays.flags([m.at_most_once for _, m in messages]),
        "o_endpoint": arrays.texts([m.endpoint for _, m in messages]),
        "o_lane": arrays.texts([m.lane for _, m in messages]),
        "o_body": arrays.blobs([body_at_rest(t.tenant, m.message_id, m.body) for t, m in messages]),
        "o_expires": arrays.times([m.expires_at for _, m in messages]),
        "b_tenant": arrays.numbers([t.tenant for t, _, _ in back]),
        "b_id": arrays.words([t.execution for t, _, _ in back]),
        "b_position": arrays.numbers([position for _, position, _ in back]),
        "b_fence": arrays.numbers([t.fence for t, _, _ in back]),
        "b_message": arrays.plain([message for _, _, message in back]),
    }


def columns_of_waits(turns: Sequence[Turn]) -> dict[str, object]:
    """The waits for events that `turns` register and close, and the keys that they lock, column by column."""
    waits = [(turn, wait) for turn in turns for wait in turn.waits]
    closed = [(turn, wait) for turn in turns for wait in turn.closed_waits]
    keys = sorted({key for turn in turns for key in keys_locked(turn)})
    return {
        "w_tenant": arrays.numbers([t.tenant for t, _ in waits]),
        "w_id": arrays.words([t.execution for t, _ in waits]),
        "w_epoch": arrays.numbers([t.epoch for t, _ in waits]),
        "w_path": arrays.texts([w.path for _, w in waits]),
        "w_type": arrays.texts([w.type for _, w in waits]),
        "w_key": arrays.texts([w.key for _, w in waits]),
        "x_tenant": arrays.numbers([t.tenant for t, _ in closed]),
        "x_id": arrays.words([t.execution for t, _ in closed]),
        "x_path": arrays.texts([w.path for _, w in closed]),
        "k_tenant": arrays.numbers([tenant for tenant, _, _ in keys]),
        "k_type": arrays.texts([kind for _, kind, _ in keys]),
        "k_key": arrays.texts([key for _, _, key in keys]),
    }


def columns_of_attributes(turns: Sequence[Turn]) -> dict[str, object]:
    """What `turns` publish, column by column; each value is in the column of its type."""
    published = [(turn, attribute) for turn in turns for attribute in turn.attributes]
    values = [attribute.value for _, attribute in published]
    return {
        "a_tenant": arrays.plain([t.tenant for t, _ in published]),
        "a_id": arrays.plain([t.execution for t, _ in published]),
        "a_name": arrays.plain([a.name for _, a in published]),
        "a_text": arrays.texts([v if isinstance(v, str) else None for v in values]),
        "a_number": arrays.plain([v if is_number(v) else None for v in values]),
        "a_flag": arrays.plain([v if isinstance(v, bool) else None for v in values]),
        "a_moment": arrays.times([v if isinstance(v, datetime) else None for v in values]),
    }


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def payloads(facts: Sequence[tuple[Turn, Fact]]) -> list[str | None]:
    """The payloads of `facts` as the journal keeps them."""
    codec = Sealing.codec
    if codec is None:
        return [fact.text for _, fact in facts]
    return [
        None
        if fact.text is None
        else seal_document(
            codec,
            fact.text,
            journal_place(turn.tenant, turn.execution, fact.position),
            decides=fact.kind in ("ended", "late") and fact.actor.startswith("operator:"),
        )
        for turn, fact in facts
    ]


def journal_place(tenant: int, execution: str, position: int) -> str:
    return place("journal", tenant, execution, position)


BODY_PUBLIC: Final = ("type", "id", "traceparent", "source")
"""Attributes of a message that the database's functions read."""


def body_at_rest(tenant: int, message: UUID, body: bytes) -> bytes:
    """The body of a message as the outbox keeps it; what is signed and sent is made of it by the relay."""
    codec = Sealing.codec
    if codec is None:
        return body
    event = json.loads(body)
    public = {name: event[name] for name in BODY_PUBLIC if name in event}
    return seal_body(codec, body, place("outbox", tenant, message), public)


def inner_source(turn: Turn, source: str) -> str:
    """The source under which the inbox has what `turn` emits."""
    inner = f"waypost:{source}"
    return inner if len(inner.encode()) <= SOURCE_BYTES_MAX else f"waypost:/executions/{turn.execution}"


def columns_of_events(turns: Sequence[Turn]) -> dict[str, object]:
    """The events that `turns` emit, column by column."""
    events = [(turn, event) for turn in turns for event in turn.events]
    said = [json.loads(event.body) for _, event in events]
    sources = [inner_source(turn, one["source"]) for (turn, _), one in zip(events, said, strict=True)]
    places = [
        mail_place(turn.tenant, "waypost", source, str(event.event_id))
        for (turn, event), source in zip(events, sources, strict=True)
    ]
    return {
        "e_source": arrays.texts(sources),
        "e_data": arrays.texts(
            [
                data_at_rest("event", json.dumps(event.data), where)
                for (_, event), where in zip(events, places, strict=True)
            ]
        ),
        "e_trace": arrays.texts([one.get("traceparent") for one in said]),
        "e_tenant": arrays.plain([t.tenant for t, _ in events]),
        "e_id": arrays.plain([t.execution for t, _ in events]),
        "e_epoch": arrays.plain([t.epoch for t, _ in events]),
        "e_event": arrays.plain([e.event_id for _, e in events]),
        "e_path": arrays.texts([e.path for _, e in events]),
        "e_type": arrays.texts([e.type for _, e in events]),
        "e_key": arrays.texts([e.key for _, e in events]),
        "e_body": arrays.blobs([body_at_rest(t.tenant, e.event_id, e.body) for t, e in events]),
        "e_expires": arrays.times([e.expires_at for _, e in events]),
        "e_hops": arrays.plain([e.hops for _, e in events]),
    }


def columns_of_mutexes(turns: Sequence[Turn]) -> dict[str, object]:
    """The mutexes that `turns` ask for and let go, column by column."""
    asked = [(turn, mutex) for turn in turns for mutex in turn.mutexes]
    left = [(turn, path) for turn in turns for path in turn.let_go]
    return {
        "m_tenant": arrays.plain([t.tenant for t, _ in asked]),
        "m_id": arrays.plain([t.execution for t, _ in asked]),
        "m_epoch": arrays.plain([t.epoch for t, _ in asked]),
        "m_path": arrays.texts([m.path for _, m in asked]),
        "m_kind": arrays.plain([m.kind for _, m in asked]),
        "m_key": arrays.texts([m.key for _, m in asked]),
        "l_tenant": arrays.plain([t.tenant for t, _ in left]),
        "l_id": arrays.plain([t.execution for t, _ in left]),
        "l_path": arrays.texts([path for _, path in left]),
    }


def columns_of_tasks(turns: Sequence[Turn]) -> dict[str, object]:
    """The tasks that `turns` leave, and those that they take back, column by column."""
    tasks = [(turn, task) for turn in turns for task in turn.tasks]
    back = [(turn, position, task) for turn in turns for position, task in turn.tasks_back]
    return {
        "p_tenant": arrays.plain([t.tenant for t, _ in tasks]),
        "p_id": arrays.plain([t.execution for t, _ in tasks]),
        "p_epoch": arrays.plain([t.epoch for t, _ in tasks]),
        "p_task": arrays.plain([k.task_id for _, k in tasks]),
        "p_path": arrays.texts([k.path for _, k in tasks]),
        "p_queue": arrays.texts([k.queue for _, k in tasks]),
        "p_type": arrays.texts([k.type for _, k in tasks]),
        "p_payload": arrays.texts(
            [value_at_rest(k.payload, task_place(t.tenant, k.task_id, "payload")) for t, k in tasks]
        ),
        "p_key": arrays.texts([k.key for _, k in tasks]),
        "p_attempt": arrays.plain([k.attempt for _, k in tasks]),
        "p_priority": arrays.plain([k.priority for _, k in tasks]),
        "p_trace": arrays.texts([k.traceparent for _, k in tasks]),
        "p_expires": arrays.times([k.expires_at for _, k in tasks]),
        "q_tenant": arrays.plain([t.tenant for t, _, _ in back]),
        "q_id": arrays.plain([t.execution for t, _, _ in back]),
        "q_position": arrays.plain([position for _, position, _ in back]),
        "q_fence": arrays.plain([t.fence for t, _, _ in back]),
        "q_task": arrays.plain([task for _, _, task in back]),
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
    """Which of `turns` (that have facts) took effect, after the answer to their COMMIT was lost: the journal knows.

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
        prepare=False,
    )
    rows: list[tuple[str, bool]] = await cursor.fetchall()  # pyright: ignore[reportAssignmentType]  # as the select says
    return dict(rows)
