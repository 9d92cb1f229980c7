-- compatible: yes
--
-- What people decide: approvals that flows ask for.
--
-- An approval is two facts in a journal: the note `request` says what is asked and of whom, and an ask of the kind
-- `decision` waits for the answer, which is an order to that place. There is no row besides, so nothing can disagree.


-- Serves the view: what is asked of people. Facts of other kinds pay a comparison of their kind for it.
create index journal_request on waypost.journal (tenant_id, execution_id, position)
    where kind = 'noted' and payload ->> 'kind' = 'approval' and payload ->> 'name' = 'request';


-- One row per approval that a flow has asked for. `state` is
--
--     waiting      nobody has decided yet
--     decided      somebody has; the flow may not have read it yet
--     expired      nobody has in time
--     withdrawn    the flow waits for it no more: something else came first, or it was cancelled
--     over         the execution ended while it waited
--
-- A decision that is mail, and not yet a fact, counts when it came before the approval expired, as the flow will see it.
create view waypost.approval as
select r.tenant_id, r.execution_id, e.definition, e.version, e.business_key, a.path,
       r.payload #>> '{args,subject}' as subject,
       array(select jsonb_array_elements_text(r.payload #> '{args,who}')) as who,
       array(select jsonb_array_elements_text(r.payload #> '{args,choices}')) as choices,
       r.payload #> '{args,show}' as show,
       a.at as asked_at,
       a.expires_at,
       (select count(*)
          from waypost.journal n
         where n.tenant_id = r.tenant_id
           and n.execution_id = r.execution_id
           and n.position > a.position
           and n.kind = 'noted'
           and n.payload ->> 'name' = 'reminder'
           and n.payload #>> '{args,request}' = r.path
           and n.position < coalesce(d.position, n.position + 1)) as reminders,
       case when d.kind = 'ended' and d.payload ->> 'outcome' = 'done' then 'decided'
            when d.kind = 'ended' then 'expired'
            when d.kind = 'withdrawn' then 'withdrawn'
            when e.finished_at is not null then 'over'
            when m.choice is not null then 'decided'
            when a.expires_at <= now() then 'expired'
            else 'waiting' end as state,
       coalesce(d.payload #>> '{value,choice}', m.choice) as choice,
       coalesce(d.payload #>> '{value,by}', m.by) as decided_by,
       coalesce(d.payload #>> '{value,reason}', m.reason) as reason,
       case when d.kind = 'ended' and d.payload ->> 'outcome' = 'done' then d.at
            when d.position is null then m.received_at end as decided_at
  from waypost.journal r
  join waypost.execution e on e.tenant_id = r.tenant_id and e.execution_id = r.execution_id
 cross join lateral
       (select j.position, j.path, j.at, (j.payload ->> 'due')::timestamptz as expires_at
          from waypost.journal j
         where j.tenant_id = r.tenant_id
           and j.execution_id = r.execution_id
           and j.position > r.position
           and j.kind = 'asked'
           and j.payload #>> '{args,request}' = r.path
         order by j.position
         limit 1) a
  left join lateral
       (select j.position, j.kind, j.payload, j.at
          from waypost.journal j
         where j.tenant_id = r.tenant_id
           and j.execution_id = r.execution_id
           and j.position > a.position
           and j.path = a.path
           and j.kind in ('ended', 'withdrawn')
         order by j.position
         limit 1) d on true
  left join lateral
       (select i.data ->> 'choice' as choice, i.data ->> 'by' as by, i.data ->> 'reason' as reason, i.received_at
          from waypost.mail l
          join waypost.inbox i on i.inbox_id = l.inbox_id
         where d.position is null
           and e.finished_at is null
           and l.tenant_id = r.tenant_id
           and l.execution_id = r.execution_id
           and l.mail_number > e.mail_read
           and l.is_order
           and l.epoch = e.epoch
           and l.path = a.path
           and i.data ->> 'order' = 'decide'
           and (a.expires_at is null or i.received_at <= a.expires_at)
         order by l.mail_number
         limit 1) m on true
 where r.kind = 'noted'
   and r.payload ->> 'kind' = 'approval'
   and r.payload ->> 'name' = 'request';


-- What is stuck, as 0004 describes it. New here: a person, whom a flow waits for, is a reason to move.
create or replace view waypost.stuck as
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
  left join lateral
       (select true as moves
          from waypost.approval p
         where p.tenant_id = e.tenant_id
           and p.execution_id = e.execution_id
           and p.state = 'waiting'
         limit 1) person on true
 where e.owner is null
   and e.wake_at is null
   and e.finished_at is null
   and case when e.status <> 'open' then e.orders_received > e.orders_read
            else e.mail_received > e.mail_read
                 or (message.moves is null and event.moves is null and person.moves is null) end
 union all
select e.tenant_id, e.execution_id, e.definition, e.version, e.status, e.undoing, e.owner, 'owner-gone'
  from waypost.execution e
  left join waypost.worker w on w.worker_id = e.owner
 where e.owner is not null
   and (w.worker_id is null or w.dead_at < now() - interval '5 minutes');
