-- compatible: yes
--
-- Which executions have no reason to move: the watchdog's question. It is answered by nobody, in normal life.
--
-- An execution that is not at its end moves when one of these comes to pass:
--
--     a time         `wake_at`: it is due, or will be. Deadlines of calls, sleeps and next tries are such times
--     its owner      whoever owns it takes its turns; when that worker dies, another takes it over
--     a message      `due` or `sending` and not yet replied, or `stopping`: what becomes of it is mail
--     an event       an open wait: whoever posts the event wakes it
--     a person       held or paused: an order wakes it
--
-- A message that was delivered is none by itself: the reply may never come, so its ask has a deadline, and that is a
-- time. Mail is none either: it is the writer of mail who sets `wake_at`, and what nobody wakes nobody reads.
--
-- Each kind of trouble says what is broken: `because` is
--
--     no-reason      nothing of all that is there
--     lost-wake-up   there is mail, and no time at which it would be read
--     lost-order     the same for an order to one that is held or paused
--     owner-gone     its worker is not known any more, or was buried five minutes ago and nobody took over


-- Serves the view: free, not finished, and no time. In normal life that is what settles, waits for an event without
-- a deadline, or needs a person; so the index is small, and claims and commits pass it by.
create index execution_untimed on waypost.execution (tenant_id, execution_id)
    where owner is null and wake_at is null and finished_at is null;


create view waypost.stuck as
select e.tenant_id, e.execution_id, e.definition, e.version, e.status, e.undoing, e.owner,
       case when e.status <> 'open' then 'lost-order'
            when e.mail_received > e.mail_read then 'lost-wake-up'
            else 'no-reason' end as because
  from waypost.execution e
  -- Lateral, so that each is looked up by its index: `not exists` would be answered by reading the whole outbox once.
  left join lateral
       (select true as moves
          from waypost.outbox o
         where o.tenant_id = e.tenant_id
           and o.execution_id = e.execution_id
           and o.command
           and (o.state = 'stopping' or (o.state in ('due', 'sending') and not o.replied))
         limit 1) message on true
  left join lateral
       (select true as moves
          from waypost.wait w
         where w.tenant_id = e.tenant_id
           and w.execution_id = e.execution_id
           and w.inbox_id is null
         limit 1) event on true
 where e.owner is null
   and e.wake_at is null
   and e.finished_at is null
   and case when e.status <> 'open' then e.orders_received > e.orders_read
            else e.mail_received > e.mail_read or (message.moves is null and event.moves is null) end
 union all
select e.tenant_id, e.execution_id, e.definition, e.version, e.status, e.undoing, e.owner, 'owner-gone'
  from waypost.execution e
  left join waypost.worker w on w.worker_id = e.owner
 where e.owner is not null
   and (w.worker_id is null or w.dead_at < now() - interval '5 minutes');
