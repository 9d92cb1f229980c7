"""A small world for tests of the SQL protocol: executions, messages and mail, made through the real doors.

Nothing is put into a table by hand: what a test begins from is what the system itself can come to.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, LiteralString
from uuid import UUID, uuid4

import psycopg
from psycopg.types.json import Jsonb

from orchestrator.core.fact import Fact
from orchestrator.store import commits, executions, workers
from orchestrator.store.commits import ClosedWait, NewMessage, NewMutex, NewTask, NewWait, Turn
from receiver.inbox import MailItem, Posted, post
from tests.waiting import until

Connection = psycopg.AsyncConnection[Any]
Json = Any

NOON: Final = datetime(2026, 1, 15, 12, tzinfo=UTC)
HOUR: Final = timedelta(hours=1)
FLOW: Final = ("order", "1")

MessageState = Literal["due", "sending", "delivered", "expired"]


@dataclass(slots=True)
class Held:
    """An execution in the hands of a worker: what a turn's commit must name."""

    execution: UUID
    me: str
    fence: int
    position: int
    epoch: int
    mail_read: int
    mail_received: int

    def turn(
        self,
        *facts: tuple[str, str, Json],
        mail: int = 0,
        orders: int = 0,
        status: str = "open",
        release: bool = True,
        due: datetime | None = None,
        guard: int | None = None,
        asks: bool = False,
        messages: Sequence[NewMessage] = (),
        take_back: Sequence[UUID] = (),
        waits: Sequence[NewWait] = (),
        closes: Sequence[ClosedWait] = (),
        mutexes: Sequence[NewMutex] = (),
        lets_go: Sequence[str] = (),
        tasks: Sequence[NewTask] = (),
        tasks_back: Sequence[UUID] = (),
    ) -> Turn:
        """A turn that writes `facts` (kind, path, data), or one that says nothing in particular."""
        written = facts or (("ended", "step", {}),)
        made = [
            Fact(self.position + n, kind, path, data, NOON, json.dumps(data))
            for n, (kind, path, data) in enumerate(written, start=1)
        ]
        return Turn(
            tenant=1,
            execution=str(self.execution),
            fence=self.fence,
            position=self.position,
            epoch=self.epoch,
            facts=made,
            mail=mail,
            orders=orders,
            status=status,
            undoing=False,
            release=release,
            due=due,
            guard=guard,
            asks=asks,
            messages=list(messages),
            taken_back=[(self.position + len(made), message) for message in take_back],
            waits=list(waits),
            closed_waits=list(closes),
            mutexes=list(mutexes),
            let_go=list(lets_go),
            tasks=list(tasks),
            tasks_back=[(self.position + len(made), task) for task in tasks_back],
        )


def asked(path: str) -> tuple[str, str, Json]:
    return ("asked", path, {"kind": "call", "name": "pay", "args": {"do": "call", "name": "pay"}})


def asked_mutex(path: str, *, key: str = "line-7") -> tuple[str, str, Json]:
    return ("asked", path, {"kind": "mutex", "name": path.removesuffix("/mutex"), "args": {"key": key}})


def message(
    path: str, *, at_most_once: bool = False, expires_at: datetime | None = None, endpoint: str = "payments"
) -> NewMessage:
    return NewMessage(
        message_id=uuid4(),
        path=path,
        endpoint=endpoint,
        lane=path,
        body=b"{}",
        at_most_once=at_most_once,
        expires_at=expires_at,
    )


def task(
    path: str = "resize", *, queue: str = "media", attempt: int = 1, priority: int = 0, life: timedelta = HOUR
) -> NewTask:
    return NewTask(
        task_id=uuid4(),
        path=path,
        queue=queue,
        type="image.resize",
        payload='{"image": "a"}',
        key=f"key/{path}",
        attempt=attempt,
        priority=priority,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        expires_at=datetime.now(UTC) + life,
    )


def wait(path: str, *, key: str = "k", type: str = "paid") -> NewWait:  # noqa: A002  # its name
    return NewWait(path, type, key)


def closed(path: str, *, key: str = "k", was_open: bool = False) -> ClosedWait:
    return ClosedWait(path, "paid", key, was_open)


def item(
    kind: Literal["reply", "event", "order", "result", "child"], event_id: str, **fields: Any
) -> MailItem:
    """Something from the sender `payments`; orders come from ourselves."""
    ours = kind not in {"reply", "event"}
    data = fields.pop("data", '{"outcome": "done"}')
    return MailItem(
        kind=kind,
        sender="waypost" if ours else fields.pop("sender", "payments"),
        source="waypost:operator" if ours else fields.pop("source", "/payments"),
        event_id=event_id,
        digest=fields.pop("digest", hashlib.sha256(data.encode()).digest()),
        data=data,
        **fields,
    )


def reply(event_id: str, to: UUID, **fields: Any) -> MailItem:
    return item("reply", event_id, causation=to, type="pay.done", **fields)


def event(event_id: str, *, key: str = "k", type: str = "paid", **fields: Any) -> MailItem:  # noqa: A002  # its name
    return item("event", event_id, type=type, key=key, **fields)


def order(event_id: str, to: UUID) -> MailItem:
    return item("order", event_id, execution=to, epoch=0, path="", data='{"order": "cancel"}')


START: Final[LiteralString] = """
    select item, outcome, execution_id
      from waypost.start_executions(
               p_tenant      => %(tenant)s::int[],
               p_execution   => %(execution)s::uuid[],
               p_definition  => %(definition)s::text[],
               p_version     => %(version)s::text[],
               p_business    => %(business)s::text[],
               p_digest      => %(digest)s::bytea[],
               p_started     => %(started)s::jsonb[],
               p_traceparent => %(traceparent)s::text[],
               p_now         => %(now)s::timestamptz)
     order by item
"""


@dataclass(frozen=True, slots=True)
class Start:
    """One execution to be created."""

    key: str | None = None
    input: Json = None
    tenant: int = 1
    definition: str = FLOW[0]
    execution: UUID | None = None


async def start(conn: Connection, *starts: Start, now: datetime | None = None) -> list[tuple[str, UUID]]:
    """Create executions; what became of each, and the execution it stands for."""
    cursor = await conn.execute(
        START,
        {
            "tenant": [s.tenant for s in starts],
            "execution": [s.execution or uuid4() for s in starts],
            "definition": [s.definition for s in starts],
            "version": [FLOW[1] for _ in starts],
            "business": [s.key for s in starts],
            "digest": [hashlib.sha256(json.dumps(s.input).encode()).digest() for s in starts],
            "started": [Jsonb({"input": s.input}) for s in starts],
            "traceparent": [None for _ in starts],
            "now": now,
        },
    )
    return [(outcome, execution) for _, outcome, execution in await cursor.fetchall()]


async def begun(conn: Connection) -> UUID:
    [(outcome, execution)] = await start(conn, Start())
    assert outcome == "started"
    return execution


async def worker(conn: Connection, *, lease: timedelta = HOUR) -> str:
    me = str(uuid4())
    await workers.register(conn, me=me, lease=lease, host="test", definitions=[FLOW[0]])
    return me


async def claim(conn: Connection, me: str, execution: UUID) -> Held:
    """Claim what is due; `execution` is to be among it, and the others are put back."""
    [held] = [h for h in await claim_all(conn, me) if h.execution == execution]
    return held


async def claim_all(conn: Connection, me: str) -> list[Held]:
    claims = await executions.claim(conn, me=me, definitions=[FLOW], limit=100)
    return [
        Held(UUID(c.execution), me, c.fence, c.position, c.epoch, c.mail_read, c.mail_received)
        for c in claims
    ]


async def held(conn: Connection) -> Held:
    """A new execution in the hands of a new worker, its `started` still to be answered."""
    execution = await begun(conn)
    return await claim(conn, await worker(conn), execution)


async def commit(conn: Connection, holder: Held, turn: Turn) -> bool:
    """Commit one turn; whether its row matched."""
    return str(holder.execution) in await commits.commit(conn, [turn], me=holder.me)


async def waiting(conn: Connection, *waits: NewWait, holder: Held | None = None) -> UUID:
    """An execution that waits for events, in this order, and for nothing else."""
    holder = holder or await held(conn)
    assert await commit(conn, holder, holder.turn(waits=waits))
    return holder.execution


async def sent(
    conn: Connection,
    *,
    state: MessageState = "due",
    at_most_once: bool = False,
    reached: bool = False,
    path: str = "pay",
) -> tuple[UUID, UUID]:
    """An execution that waits, and its one message in `state`: (execution, message).

    `reached`: an earlier try of it may have reached the service.
    """
    holder = await held(conn)
    new = message(path, at_most_once=at_most_once, expires_at=NOON if state == "expired" else None)
    assert await commit(conn, holder, holder.turn(asked(path), messages=[new]))
    if reached:
        token = await claim_message(conn, new.message_id)
        await settle(conn, new.message_id, token, "retry", reached=True)
    if state == "expired":
        await expire_due(conn)
    if state in ("sending", "delivered"):
        token = await claim_message(conn, new.message_id)
        if state == "delivered":
            await settle(conn, new.message_id, token, "delivered")
    return holder.execution, new.message_id


CLAIM_MESSAGE: Final[LiteralString] = """
      with c as materialized (
             select tenant_id, message_id
               from waypost.outbox
              where state = 'due'
                and message_id = %(message)s
                and due_at <= coalesce(%(now)s::timestamptz, now())
                and (expires_at is null or expires_at > coalesce(%(now)s::timestamptz, now()))
                and (not at_most_once or attempts = 0)
                for no key update skip locked)
    update waypost.outbox o
       set state = 'sending', attempts = o.attempts + 1, token = %(token)s,
           lease_until = clock_timestamp() + %(lease)s::interval
      from c
     where (o.tenant_id, o.message_id) = (c.tenant_id, c.message_id)
 returning o.token
"""


async def claim_message(conn: Connection, message_id: UUID, *, lease: timedelta = HOUR) -> UUID | None:
    """The relay's claim for one message; its token, or None when it is not to be had."""
    parameters = {"message": message_id, "token": uuid4(), "lease": lease, "now": None}
    row = await (await conn.execute(CLAIM_MESSAGE, parameters)).fetchone()
    return None if row is None else row[0]


SETTLE: Final[LiteralString] = """
    select state
      from waypost.settle(array[1], array[%(message)s::uuid], array[%(token)s::uuid],
                          array[%(outcome)s::text], array[%(reached)s::bool], array[now()],
                          array[%(answer)s::jsonb])
"""


async def settle(
    conn: Connection,
    message_id: UUID,
    token: UUID | None,
    outcome: str,
    *,
    reached: bool = True,
    code: str = "no",
) -> str | None:
    """End a try; the message's new state, or None when its claim was over."""
    answer = Jsonb({"outcome": "refused", "error": {"code": code}}) if outcome == "refused" else None
    parameters = {
        "message": message_id,
        "token": token,
        "outcome": outcome,
        "reached": reached,
        "answer": answer,
    }
    row = await (await conn.execute(SETTLE, parameters)).fetchone()
    return None if row is None else row[0]


async def take_back(conn: Connection, execution: UUID, *messages: UUID) -> None:
    """A turn of the execution that takes messages back."""
    if not await is_due(conn, execution):
        await posted(conn, order(f"wake {uuid4()}", execution))
    holder = await claim(conn, await worker(conn), execution)
    [(mail, orders)] = await rows(
        conn,
        "select mail_received - mail_read, orders_received - orders_read from waypost.execution"
        " where execution_id = %s",
        execution,
    )
    turn = holder.turn(("withdrawn", "pay", {}), mail=mail, orders=orders, take_back=messages)
    assert await commit(conn, holder, turn)


async def expire_claims(conn: Connection, *, now: datetime | None = None) -> int:
    row = await (await conn.execute("select waypost.expire_claims(100, %s)", (now,))).fetchone()
    assert row is not None
    return row[0]


async def expire_due(conn: Connection) -> None:
    await conn.execute(
        "update waypost.outbox set state = 'expired' where state = 'due' and expires_at <= now()"
    )


# -- what came of it ---------------------------------------------------------------------------------------


async def rows(conn: Connection, statement: LiteralString, *parameters: object) -> list[tuple[Any, ...]]:
    return await (await conn.execute(statement, parameters)).fetchall()


async def mail_of(conn: Connection, execution: UUID) -> list[str]:
    """What an execution got, in order: a reply by its kind, what the outbox says by its code."""
    found = await rows(
        conn,
        """
        select case when i.source in ('waypost:outbox', 'waypost:task')
                    then (i.data ->> 'outcome') || ' '
                         || coalesce(i.data ->> 'code', i.data #>> '{error,code}')
                    else i.kind || ' ' || i.event_id end
          from waypost.mail m join waypost.inbox i using (inbox_id)
         where m.execution_id = %s
         order by m.mail_number
        """,
        execution,
    )
    return [text for (text,) in found]


async def outbox_mail(conn: Connection, execution: UUID) -> list[str]:
    """What an execution got, without what `take_back` woke it with."""
    return [text for text in await mail_of(conn, execution) if not text.startswith("order wake")]


async def waits_of(conn: Connection, execution: UUID) -> list[tuple[str, str | None]]:
    """Each wait, oldest first, with the event that fills it."""
    found = await rows(
        conn,
        "select w.path, i.event_id from waypost.wait w left join waypost.inbox i using (inbox_id)"
        " where w.execution_id = %s order by w.wait_id",
        execution,
    )
    return [(path, event_id) for path, event_id in found]


async def state_of(conn: Connection, message_id: UUID) -> str:
    [(state,)] = await rows(conn, "select state from waypost.outbox where message_id = %s", message_id)
    return state


async def is_due(conn: Connection, execution: UUID) -> bool:
    [(due,)] = await rows(
        conn,
        "select owner is null and coalesce(wake_at <= clock_timestamp(), false)"
        "  from waypost.execution where execution_id = %s",
        execution,
    )
    return due


async def journal_of(conn: Connection, execution: UUID) -> list[str]:
    found = await rows(
        conn, "select kind from waypost.journal where execution_id = %s order by position", execution
    )
    return [kind for (kind,) in found]


async def posted(conn: Connection, *items: MailItem, now: datetime | None = None) -> list[Posted]:
    return await post(conn, items, now=now)


FILL_THE_SHELF: Final[LiteralString] = """
    insert into waypost.inbox
           (tenant_id, kind, sender, source, event_id, type, key, digest, answer, taken, shelf_until, received_at)
    select 1, 'event', 'payments', '/payments', 'old ' || n, 'paid', 'k', '\\x00', 'event', true, now(), now()
      from generate_series(1, 5000) as n
"""


async def fill_the_shelf(conn: Connection) -> None:
    """5,000 events of one key that somebody has, `old 1` to `old 5000`: the one thing that is written by hand."""
    await conn.execute(FILL_THE_SHELF)


READ: Final[LiteralString] = """
    select relname, seq_scan, coalesce(idx_tup_fetch, 0) + coalesce(seq_tup_read, 0)
      from pg_stat_xact_user_tables
     where schemaname = 'waypost'
       and relname = any(array['inbox', 'wait', 'mail', 'execution', 'outbox', 'journal', 'mutex'])
"""


@asynccontextmanager
async def a_few_rows_read(conn: Connection) -> AsyncGenerator[None]:
    """What is done inside, within one transaction, reads no table as a whole, and a dozen rows of each at most."""
    before = {table: (scans, read) for table, scans, read in await rows(conn, READ)}
    yield
    for table, scans, read in await rows(conn, READ):
        assert scans == before[table][0], f"{table} was read as a whole"
        assert read - before[table][1] <= 12, f"{read - before[table][1]} rows of {table}"


# -- two at once -------------------------------------------------------------------------------------------

Program = Callable[[Connection], Awaitable[Any]]


async def until_blocked(
    observer: Connection, conn: Connection, *, by: Connection, unless: asyncio.Future[Any]
) -> None:
    """Return when the backend of `conn` waits for a lock of that of `by`; fail when it ended instead."""

    async def blocked() -> bool:
        assert not unless.done(), f"it never waited, and came to {unless}"
        [(pids,)] = await rows(observer, "select pg_blocking_pids(%s)", conn.info.backend_pid)
        return by.info.backend_pid in pids

    await until(blocked, what="a lock wait")
