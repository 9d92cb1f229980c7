-- compatible: yes
--
-- What knows everything that an execution may have under way (messages, waits, children, mutexes, tasks): its end
-- without a program, and whether anything would move it.


-- Ends an execution without its program, for a person who cannot wait for it: nothing more is undone, and what stands is
-- written down. It works whatever state the execution is in, whoever owns it, and though no worker has its flow.
--
-- It is a takeover: under the row's lock, with the next fence. So an owner writes nothing any more, and learns that it
-- has lost the execution.
--
-- WHAT STANDS is each step with an undo that was done or may have been: that is not refused, not undone, and whose
-- command has left. Commands that have not left never will, nor will tasks that nobody has begun, while events that it
-- emitted still do. Mail that nobody has read counts as if somebody had. Its parent is told, and its children are asked
-- to end.
--
-- `outcome` is 'terminated', 'over' when it has ended before, and null when there is no such execution.
create function waypost.terminate(
    p_tenant int, p_execution uuid, p_by text, p_reason text, p_now timestamptz default null
) returns table (outcome text, "position" bigint, stands text[])
language plpgsql volatile
as $$
#variable_conflict use_column
declare
    v_now      timestamptz := coalesce(p_now, now());
    v_keys     bigint[];
    v_row      waypost.execution;
    v_began    bigint;
    v_messages uuid[];
    v_tasks    uuid[];
    v_stands   text[];
    v_kin      uuid[];
    v_parent   jsonb;
    v_error    jsonb;
begin
    -- Keys come before rows. Which waits there are is known for sure only under the row's lock.
    v_keys := array(select distinct waypost.event_key(w.tenant_id, w.type, w.key)
                      from waypost.wait w
                     where w.tenant_id = p_tenant
                       and w.execution_id = p_execution
                     order by 1);
    perform pg_advisory_xact_lock(k) from unnest(v_keys) as k;
    -- stop: keys locked

    -- Who gets mail of this end: its children that have not ended, and its parent.
    v_kin := array(select c.execution_id
                     from waypost.execution c
                    where c.tenant_id = p_tenant
                      and c.parent = p_execution
                      and c.finished_at is null
                    union all
                   select p.parent
                     from waypost.execution p
                    where p.tenant_id = p_tenant
                      and p.execution_id = p_execution
                      and p.parent is not null);
    perform waypost.lock_rows(array_fill(p_tenant, array[1 + cardinality(v_kin)]), p_execution || v_kin);
    -- stop: rows locked

    select e.*
      into v_row
      from waypost.execution e
     where e.tenant_id = p_tenant
       and e.execution_id = p_execution;
    if not found or v_row.finished_at is not null then
        return query
        select case when v_row.execution_id is not null then 'over' end, v_row.position, '{}'::text[];
        return;
    end if;
    if exists (select 1
                 from waypost.wait w
                where w.tenant_id = p_tenant
                  and w.execution_id = p_execution
                  and waypost.event_key(w.tenant_id, w.type, w.key) <> all(v_keys)) then
        raise exception 'execution % has registered a wait meanwhile', p_execution
              using errcode = '40001';
    end if;
    if exists (select 1
                 from waypost.execution c
                where c.tenant_id = p_tenant
                  and c.parent = p_execution
                  and c.finished_at is null
                  and c.execution_id <> all(v_kin)) then
        raise exception 'execution % has got a child meanwhile', p_execution
              using errcode = '40001';
    end if;

    perform 1
       from waypost.outbox o
      where o.tenant_id = p_tenant
        and o.execution_id = p_execution
        and o.command
        and o.state in ('due', 'expired', 'sending')
      order by o.tenant_id, o.message_id
        for no key update of o;
    -- stop: messages locked

    perform 1
       from waypost.task k
      where k.tenant_id = p_tenant
        and k.execution_id = p_execution
        and k.state in ('due', 'expired', 'running')
      order by k.tenant_id, k.task_id
        for no key update of k;

    v_began := (select max(j.position)
                  from waypost.journal j
                 where j.tenant_id = p_tenant
                   and j.execution_id = p_execution
                   and j.kind in ('started', 'continued'));
    with said as materialized (
        select j.position, j.kind, j.path, j.payload ->> 'outcome' as outcome, j.payload ->> 'verdict' as verdict
          from waypost.journal j
         where j.tenant_id = p_tenant
           and j.execution_id = p_execution
           and j.position > v_began
           and j.kind in ('ended', 'late', 'resolved')
         union all
        select null, 'late', m.path, i.data ->> 'outcome', null
          from waypost.mail m
          join waypost.inbox i on i.inbox_id = m.inbox_id
         where m.tenant_id = p_tenant
           and m.execution_id = p_execution
           and m.mail_number > v_row.mail_read
           and m.epoch = v_row.epoch
           and m.path is not null
           and i.kind in ('reply', 'result', 'child')
    ),
    asked as materialized (
        select j.position, j.path, j.payload
          from waypost.journal j
         where j.tenant_id = p_tenant
           and j.execution_id = p_execution
           and j.position > v_began
           and j.kind = 'asked'
    ),
    gone as materialized (
        select s.path
          from said s
         where (s.kind = 'ended' and s.outcome in ('refused', 'child_failed')) or (s.kind = 'resolved' and s.verdict = 'not_done')
         union all
        select s.path
          from said s
         where s.kind = 'late'
           and s.outcome in ('refused', 'child_failed')
           and s.path not in (select d.path from said d where d.outcome = 'done' or d.verdict = 'done')
         union all
        select a.payload ->> 'name'
          from asked a
         where a.payload ->> 'kind' = 'undo'
           and a.path in (select d.path from said d where d.outcome = 'done' or d.verdict = 'done')
         union all
        -- A command may have been sent more than once: each of its messages counts.
        select o.path
          from waypost.outbox o
         where o.tenant_id = p_tenant
           and o.execution_id = p_execution
           and o.epoch = v_row.epoch
         group by o.path
        having bool_and(o.state in ('due', 'expired', 'withdrawn') and not o.reached)
         union all
        select k.path
          from waypost.task k
         where k.tenant_id = p_tenant
           and k.execution_id = p_execution
           and k.epoch = v_row.epoch
         group by k.path
        having bool_and(k.state in ('due', 'expired', 'withdrawn'))
    )
    select coalesce(array_agg(a.path order by a.position), '{}')
      into v_stands
      from asked a
     where a.payload ? 'undo'
       and not a.payload ? 'unfit'
       and a.payload ->> 'kind' <> 'undo'
       and a.path not in (select g.path from gone g);

    v_error := jsonb_build_object('class', 'permanent', 'type', 'Terminated', 'code', 'terminated',
                                  'detail', 'by ' || p_by || ': ' || p_reason);
    update waypost.execution e
       set position = e.position + 1,
           fence = e.fence + 1,
           status = 'failed',
           undoing = false,
           owner = null,
           wake_at = null,
           finished_at = v_now
     where e.tenant_id = p_tenant
       and e.execution_id = p_execution;
    insert into waypost.journal (tenant_id, execution_id, position, fence, kind, payload, actor, at)
    select p_tenant, p_execution, v_row.position + 1, v_row.fence + 1, 'terminated',
           jsonb_build_object(
               'kind', 'failed', 'by', p_by, 'reason', p_reason, 'stands', v_stands, 'error', v_error),
           'operator:' || p_by,
           greatest(v_now, (select j.at
                              from waypost.journal j
                             where j.tenant_id = p_tenant
                               and j.execution_id = p_execution
                               and j.position = v_row.position));
    delete from waypost.wait w
     where w.tenant_id = p_tenant
       and w.execution_id = p_execution;
    -- stop: terminated

    v_messages := array(select o.message_id
                          from waypost.outbox o
                         where o.tenant_id = p_tenant
                           and o.execution_id = p_execution
                           and o.command
                           and o.state in ('due', 'expired', 'sending'));
    if v_messages <> '{}' then
        perform waypost.take_back(
                    array_fill(p_tenant, array[cardinality(v_messages)]),
                    array_fill(p_execution, array[cardinality(v_messages)]),
                    array_fill(v_row.position + 1, array[cardinality(v_messages)]),
                    array_fill(v_row.fence + 1, array[cardinality(v_messages)]),
                    v_messages, p_now);
    end if;
    v_tasks := array(select k.task_id
                       from waypost.task k
                      where k.tenant_id = p_tenant
                        and k.execution_id = p_execution
                        and k.state in ('due', 'expired', 'running'));
    if v_tasks <> '{}' then
        perform waypost.take_back_tasks(
                    array_fill(p_tenant, array[cardinality(v_tasks)]),
                    array_fill(p_execution, array[cardinality(v_tasks)]),
                    array_fill(v_row.position + 1, array[cardinality(v_tasks)]),
                    array_fill(v_row.fence + 1, array[cardinality(v_tasks)]),
                    v_tasks, p_now);
    end if;

    -- Its parent is told, and its children are asked to end, as when nobody waits for them any more.
    v_parent := (select j.payload -> 'parent'
                   from waypost.journal j
                  where j.tenant_id = p_tenant
                    and j.execution_id = p_execution
                    and j.position = 1);
    if v_kin <> '{}' then
        perform waypost.post_family(
                    array_agg(p_tenant), array_agg(k.kind), array_agg(k.event), array_agg(k.data), array_agg(k.id),
                    array_agg(k.epoch), array_agg(k.path),
                    array_agg(p_execution), array_agg(v_row.position + 1), array_agg(v_row.fence + 1), p_now)
           from (select v.id,
                        case when v.id = v_row.parent then 'child' else 'order' end as kind,
                        case when v.id = v_row.parent then p_execution || '/ended' else v.id || '/cancel' end as event,
                        case when v.id = v_row.parent
                             then jsonb_build_object(
                                      'outcome', 'child_failed', 'execution', p_execution,
                                      'error', jsonb_build_object('status', 'terminated', 'code', 'terminated',
                                                                  'detail', v_error ->> 'detail', 'error', v_error))
                             else jsonb_build_object('order', 'cancel', 'undo', true,
                                                     'by', 'execution ' || p_execution,
                                                     'reason', 'its parent was terminated') end as data,
                        case when v.id = v_row.parent then (v_parent ->> 'epoch')::int end as epoch,
                        case when v.id = v_row.parent then v_row.parent_path end as path
                   from unnest(v_kin) as v(id)) k;
    end if;
    return query
    select 'terminated', v_row.position + 1, v_stands;
end $$;


-- Executions that nothing would move, as 0012 describes it. A child that has not ended, a task on its way, and the turn
-- for a mutex are reasons to move too; the last as long as whoever has the mutex is not at its end. `mutex-stranded` says
-- that it is: then a worker takes it from it.
create or replace view waypost.stuck as
select e.tenant_id, e.execution_id, e.definition, e.version, e.status, e.undoing, e.owner,
       case when e.status <> 'open' then 'lost-order'
            when e.mail_received > e.mail_read then 'lost-wake-up'
            when turn.moves is not null then 'mutex-stranded'
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
  left join lateral
       (select true as moves
          from waypost.execution c
         where c.tenant_id = e.tenant_id
           and c.parent = e.execution_id
           and c.finished_at is null
         limit 1) child on true
  left join lateral
       (select bool_or(h.ticket is null or x.finished_at is null) as moves
          from waypost.mutex m
          left join waypost.mutex h
            on h.tenant_id = m.tenant_id
           and h.kind = m.kind
           and h.key = m.key
           and h.granted_at is not null
          left join waypost.execution x
            on x.tenant_id = h.tenant_id
           and x.execution_id = h.execution_id
         where m.tenant_id = e.tenant_id
           and m.execution_id = e.execution_id
           and m.granted_at is null) turn on true
  left join lateral
       (select true as moves
          from waypost.task k
         where k.tenant_id = e.tenant_id
           and k.execution_id = e.execution_id
           and k.state in ('due', 'running', 'stopping')
         limit 1) task on true
 where e.owner is null
   and e.wake_at is null
   and e.finished_at is null
   and case when e.status <> 'open' then e.orders_received > e.orders_read
            else e.mail_received > e.mail_read
                 or (message.moves is null and event.moves is null and person.moves is null
                     and child.moves is null and turn.moves is not true and task.moves is null) end
 union all
select e.tenant_id, e.execution_id, e.definition, e.version, e.status, e.undoing, e.owner, 'owner-gone'
  from waypost.execution e
  left join waypost.worker w on w.worker_id = e.owner
 where e.owner is not null
   and (w.worker_id is null or w.dead_at < now() - interval '5 minutes');
