"""What is true of every database of ours at every moment. Each query names the rows of which it is not.

    assert await broken(conn) == []

`at_rest` adds what holds once everything has ended: nothing is waiting, and nothing is on its way.
"""

from __future__ import annotations

import time
from typing import Any, Final, LiteralString

import psycopg

from tests.waiting import until

PUT_OFF: Final[LiteralString] = """
    (wake_at > clock_timestamp()
     and exists (select 1 from waypost.journal j
                  where (j.tenant_id, j.execution_id, j.position) = (e.tenant_id, e.execution_id, e.position)
                    and j.kind = 'orphaned'))
"""
"""What was taken over again and again waits a while, with its mail unread."""

INVARIANTS: Final[dict[str, LiteralString]] = {
    "lost wake-up": f"""
        select execution_id from waypost.execution e
         where status = 'open' and owner is null and mail_received > mail_read
           and (wake_at is null or wake_at > clock_timestamp())
           and {PUT_OFF} is not true
    """,
    "lost order": f"""
        select execution_id from waypost.execution e
         where status in ('paused', 'held') and owner is null and orders_received > orders_read
           and (wake_at is null or wake_at > clock_timestamp())
           and {PUT_OFF} is not true
    """,
    "woken while paused": """
        select execution_id from waypost.execution
         where status in ('paused', 'held') and owner is null and wake_at is not null
           and orders_received = orders_read
    """,
    "mail count": """
        select execution_id from waypost.execution e
         where mail_received <> (select count(*) from waypost.mail m
                                  where (m.tenant_id, m.execution_id) = (e.tenant_id, e.execution_id))
    """,
    "mail numbers not dense": """
        select execution_id from waypost.execution e
         where mail_received <> (select coalesce(max(mail_number), 0) from waypost.mail m
                                  where (m.tenant_id, m.execution_id) = (e.tenant_id, e.execution_id))
    """,
    "order count": """
        select execution_id from waypost.execution e
         where orders_received <> (select count(*) from waypost.mail m
                                    where (m.tenant_id, m.execution_id) = (e.tenant_id, e.execution_id)
                                      and is_order)
    """,
    "order read count": """
        -- A stopped execution obeys orders before their turn: it has then read more of them than its mail says.
        select execution_id from waypost.execution e
          join lateral (select count(*) as passed from waypost.mail m
                         where (m.tenant_id, m.execution_id) = (e.tenant_id, e.execution_id)
                           and is_order and mail_number <= e.mail_read) m on true
         where orders_read < passed or (orders_read > passed and status <> 'held')
    """,
    "mail without inbox": """
        select execution_id from waypost.mail m
         where not exists (select 1 from waypost.inbox i where i.inbox_id = m.inbox_id)
    """,
    "mail of another tenant": """
        select execution_id from waypost.mail m
          join waypost.inbox i using (inbox_id)
         where m.tenant_id <> i.tenant_id
    """,
    "addressed but not mailed": """
        select inbox_id from waypost.inbox i
         where answer = 'mail' and not exists (select 1 from waypost.mail m where m.inbox_id = i.inbox_id)
    """,
    "taken flag": """
        select inbox_id from waypost.inbox i
         where kind = 'event'
           and taken <> (exists (select 1 from waypost.mail m
                                  where (m.tenant_id, m.inbox_id) = (i.tenant_id, i.inbox_id))
                         or exists (select 1 from waypost.journal j
                                     where j.tenant_id = i.tenant_id and j.kind = 'started'
                                       and (j.payload #>> '{event,inbox_id}')::bigint = i.inbox_id))
    """,
    "event that is input and mail": """
        select execution_id from waypost.mail m
          join waypost.journal j using (tenant_id, execution_id)
         where j.kind = 'started' and (j.payload #>> '{event,inbox_id}')::bigint = m.inbox_id
    """,
    "event that started a flow twice": """
        select min(j.execution_id::text) from waypost.journal j
         where j.kind = 'started' and j.payload ? 'event'
         group by j.tenant_id, j.payload ->> 'definition', j.payload #>> '{event,inbox_id}'
        having count(*) > 1
    """,
    "attribute that was not published last": """
        select execution_id
          from (select distinct on (j.tenant_id, j.execution_id, p.name)
                       j.tenant_id, j.execution_id, p.name, p.value
                  from waypost.journal j
                 cross join jsonb_each(j.payload -> 'args') as p(name, value)
                 where j.kind = 'noted' and j.payload ->> 'kind' = 'publish'
                 order by j.tenant_id, j.execution_id, p.name, j.position desc) l
          full join waypost.attribute a using (tenant_id, execution_id, name)
         where (l.value is null and a.name is not null)
            or (l.value <> 'null' and a.name is null)
            or (l.value = 'null' and a.name is not null)
            or (case when a.moment is null then l.value <> coalesce(to_jsonb(text), to_jsonb(number), to_jsonb(flag))
                     else (l.value ->> 'time')::timestamptz <> a.moment end)
    """,
    "journal gap": """
        select execution_id from waypost.execution e
         where (position, position) <> (select count(*), coalesce(max(j.position), 0) from waypost.journal j
                                         where (j.tenant_id, j.execution_id) = (e.tenant_id, e.execution_id))
    """,
    "fence not growing": """
        select execution_id from waypost.journal a
          join waypost.journal b using (tenant_id, execution_id)
         where a.position < b.position and a.fence > b.fence
    """,
    "fence ahead of its row": """
        select execution_id from waypost.journal j
          join waypost.execution e using (tenant_id, execution_id)
         where j.fence > e.fence
    """,
    "first fact is not started": """
        select execution_id from waypost.execution e
         where not exists (select 1 from waypost.journal j
                            where (j.tenant_id, j.execution_id) = (e.tenant_id, e.execution_id)
                              and position = 1 and kind = 'started')
    """,
    "finished without its fact": """
        select execution_id from waypost.execution e
          join waypost.journal j using (tenant_id, execution_id, position)
         where finished_at is not null and j.kind not in ('finished', 'terminated')
    """,
    "message without its fact": """
        select message_id from waypost.outbox o
         where command
           and not exists (select 1 from waypost.journal j
                            where (j.tenant_id, j.execution_id) = (o.tenant_id, o.execution_id)
                              and j.path = o.path and kind = 'asked')
    """,
    "command asked without its message": """
        select execution_id || ' ' || path from waypost.journal j
         where kind = 'asked' and payload -> 'args' ->> 'do' = 'call'
           and not exists (select 1 from waypost.outbox o
                            where (o.tenant_id, o.execution_id) = (j.tenant_id, j.execution_id)
                              and o.path = j.path)
    """,
    "two have one mutex": """
        select min(execution_id::text) from waypost.mutex
         where granted_at is not null group by tenant_id, kind, key having count(*) > 1
    """,
    "finished with a mutex, or waiting for one": """
        select execution_id from waypost.execution
          join waypost.mutex using (tenant_id, execution_id)
         where finished_at is not null
    """,
    "mutex that nobody asked for": """
        select execution_id || ' ' || path from waypost.mutex m
         where not exists (select 1 from waypost.journal j
                            where (j.tenant_id, j.execution_id, j.path) = (m.tenant_id, m.execution_id, m.path)
                              and j.kind = 'asked' and j.payload ->> 'kind' = 'mutex')
    """,
    "granted without mail": """
        select ticket from waypost.mutex m
         where granted_at is not null
           and not exists (select 1 from waypost.inbox i
                             join waypost.mail p using (tenant_id, inbox_id)
                            where i.tenant_id = m.tenant_id and i.sender = 'waypost' and i.source = 'waypost:mutex'
                              and i.event_id = m.ticket || '/granted' and p.execution_id = m.execution_id)
    """,
    "task without its fact": """
        select task_id from waypost.task t
         where not exists (select 1 from waypost.journal j
                            where (j.tenant_id, j.execution_id) = (t.tenant_id, t.execution_id)
                              and j.path = t.path and kind = 'asked')
    """,
    "task asked without its row": """
        select execution_id || ' ' || path from waypost.journal j
         where kind = 'asked' and payload -> 'args' ->> 'do' = 'task'
           and not exists (select 1 from waypost.task t
                            where (t.tenant_id, t.execution_id) = (j.tenant_id, j.execution_id)
                              and t.path = j.path)
    """,
    "mail does not fit its task": """
        select z.task_id || ' ' || z.state || ' ' || z.n
          from (select t.task_id, t.state,
                       (select count(*) from waypost.mail m
                          join waypost.inbox i using (inbox_id)
                         where i.event_id = t.task_id || '/ended' and i.source = 'waypost:task'
                           and (m.tenant_id, m.execution_id) = (t.tenant_id, t.execution_id)) as n
                  from waypost.task t) z
         where z.n <> case when z.state in ('due', 'running', 'stopping', 'expired') then 0 else 1 end
    """,
    "two tries of a task at once": """
        select min(execution_id::text) || ' ' || path from waypost.task
         where state in ('due', 'running', 'stopping')
         group by tenant_id, execution_id, epoch, path
        having count(*) > 1
    """,
    "finished with an open wait": """
        select execution_id from waypost.execution
          join waypost.wait using (tenant_id, execution_id)
         where finished_at is not null
    """,
    "open wait and eligible event": """
        select w.execution_id || ' ' || w.path from waypost.wait w
          join waypost.execution e using (tenant_id, execution_id)
          join waypost.inbox i
            on (i.tenant_id, i.type, i.key) = (w.tenant_id, w.type, w.key) and i.kind = 'event'
         where w.inbox_id is null and (not i.taken or i.inbox_id > e.events_after) and i.shelf_until > now()
           and not exists (select 1 from waypost.mail m
                            where (m.tenant_id, m.execution_id, m.inbox_id)
                                  = (e.tenant_id, e.execution_id, i.inbox_id))
    """,
    "filled wait without mail": """
        select w.execution_id || ' ' || w.path from waypost.wait w
         where w.inbox_id is not null
           and not exists (select 1 from waypost.mail m
                            where (m.tenant_id, m.execution_id, m.inbox_id)
                                  = (w.tenant_id, w.execution_id, w.inbox_id))
    """,
    "filled wait whose event was read": """
        select w.execution_id || ' ' || w.path from waypost.wait w
          join waypost.execution e using (tenant_id, execution_id)
          join waypost.mail m
            on (m.tenant_id, m.execution_id, m.inbox_id) = (w.tenant_id, w.execution_id, w.inbox_id)
         where m.mail_number <= e.mail_read
    """,
    "event that names no wait": """
        select execution_id from waypost.mail
         where (type is null) <> (key is null) or (type is not null and (epoch is null or path is null))
    """,
    "event out of order": """
        select a.execution_id from waypost.mail a
          join waypost.mail b using (tenant_id, execution_id, type, key)
         where a.mail_number < b.mail_number and a.inbox_id > b.inbox_id
    """,
    "event overtakes": """
        select a.execution_id from waypost.mail a
          join waypost.execution e using (tenant_id, execution_id)
          join waypost.inbox i
            on (i.tenant_id, i.type, i.key) = (a.tenant_id, a.type, a.key) and i.kind = 'event'
           and i.inbox_id < a.inbox_id and i.inbox_id > e.events_after and i.shelf_until > now()
         where not exists (select 1 from waypost.mail m
                            where (m.tenant_id, m.execution_id, m.inbox_id)
                                  = (e.tenant_id, e.execution_id, i.inbox_id))
    """,
    "settled mail does not fit its message": """
        select z.message_id || ' ' || z.state || ' ' || z.n
          from (select o.message_id, o.state,
                       (select count(*) from waypost.mail m
                          join waypost.inbox i using (inbox_id)
                         where i.event_id = o.message_id || '/settled' and i.source = 'waypost:outbox'
                           and (m.tenant_id, m.execution_id) = (o.tenant_id, o.execution_id)) as n
                  from waypost.outbox o
                 where command) z
         where z.n > 1
            or (z.n = 0 and z.state in ('withdrawn', 'stopped', 'refused', 'dead'))
            or (z.n = 1 and z.state in ('waiting', 'due', 'sending', 'stopping', 'expired'))
    """,
    "never-sent, and yet sent": """
        select message_id from waypost.outbox o
          join waypost.inbox i on i.event_id = o.message_id || '/settled' and i.source = 'waypost:outbox'
         where i.data ->> 'code' = 'never-sent' and (reached or state in ('due', 'sending', 'delivered'))
    """,
    "two of one lane on their way": """
        select endpoint || ' ' || lane from waypost.outbox
         where ordered and state in ('due', 'sending', 'stopping')
         group by tenant_id, command, endpoint, lane having count(*) > 1
    """,
    "waits in a lane behind nothing": """
        select message_id from waypost.outbox o
         where state = 'waiting'
           and not exists (select 1 from waypost.lane l join waypost.outbox h
                                      on (h.tenant_id, h.message_id) = (l.tenant_id, l.head)
                            where (l.tenant_id, l.command, l.endpoint, l.lane)
                                  = (o.tenant_id, o.command, o.endpoint, o.lane)
                              and h.state in ('due', 'sending', 'stopping', 'dead'))
           and not exists (select 1 from waypost.lane_free f
                            where (f.tenant_id, f.command, f.endpoint, f.lane)
                                  = (o.tenant_id, o.command, o.endpoint, o.lane))
    """,
    "at most once, claimed twice": """
        select message_id from waypost.outbox where at_most_once and attempts - spared > 1
    """,
    "stuck": """
        select execution_id || ' ' || because from waypost.stuck where because <> 'no-reason'
    """,
    "errand that was not done": "select name from waypost.errand",
    "message without a tenant's execution": """
        select message_id from waypost.outbox o
         where execution_id is not null
           and not exists (select 1 from waypost.execution e
                            where (e.tenant_id, e.execution_id) = (o.tenant_id, o.execution_id))
    """,
}

TAKEN_BY_FLOWS: Final[dict[str, LiteralString]] = {
    "stuck": "select execution_id || ' ' || because from waypost.stuck where because = 'no-reason'",
}

OF_SCRIPTS: Final[dict[str, LiteralString]] = {
    # A flow may close a wait whose event it has and has not looked at yet; a script reads it in the turn that closes.
    "event for a wait that is gone": """
        select m.execution_id || ' ' || m.path from waypost.mail m
          join waypost.execution e using (tenant_id, execution_id)
         where m.type is not null and m.mail_number > e.mail_read and e.finished_at is null
           and not exists (select 1 from waypost.wait w
                            where (w.tenant_id, w.execution_id, w.path, w.inbox_id)
                                  = (m.tenant_id, m.execution_id, m.path, m.inbox_id))
    """,
}

AT_REST: Final[dict[str, LiteralString]] = {
    "not finished": "select execution_id || ' ' || status from waypost.execution where finished_at is null",
    "owned": "select execution_id from waypost.execution where owner is not null",
    "on its way": """
        select message_id || ' ' || state from waypost.outbox where state in ('waiting', 'due', 'sending', 'stopping')
    """,
    "task on its way": """
        select task_id || ' ' || state from waypost.task where state in ('due', 'running', 'stopping')
    """,
    "waiting": "select execution_id || ' ' || path from waypost.wait",
    "waiting for its turn": "select execution_id || ' ' || path from waypost.mutex",
    "emitted and not given": "select number || ' ' || type from waypost.emitted",
}


async def broken(
    conn: psycopg.AsyncConnection[Any], *, at_rest: bool = False, scripted: bool = False
) -> list[str]:
    """What does not hold, as sentences; empty when all is well. Reads one snapshot.

    `scripted` turns were written by a test and not by a flow, so an execution may wait for nothing.
    """
    asked = INVARIANTS | (AT_REST if at_rest else {})
    found: list[str] = []
    async with conn.transaction():
        await conn.execute("set transaction isolation level repeatable read, read only")
        for name, query in [*asked.items(), *(OF_SCRIPTS if scripted else TAKEN_BY_FLOWS).items()]:
            rows = await (await conn.execute(query)).fetchall()
            found += [f"{name}: {row[0]}" for row in rows]
    return found


REST_SECONDS: Final = 60.0
"""For a claim of a relay that was killed to end, and for another one to send again."""


async def at_rest(conn: psycopg.AsyncConnection[Any]) -> list[str]:
    """What does not hold once all has had the time to come to rest; what must hold always, holds meanwhile.

    A reply may come before the relay has written down that its command arrived, and an execution has ended then. Where
    relays run, they are waited for.
    """
    deadline = time.monotonic() + REST_SECONDS
    found: list[str] = []

    async def rests() -> bool:
        assert await broken(conn) == []
        found[:] = await broken(conn, at_rest=True)
        return not found or time.monotonic() > deadline

    await until(rests, what="rest", seconds=2 * REST_SECONDS)
    return found
