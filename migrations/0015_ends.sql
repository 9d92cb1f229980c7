-- compatible: yes
--
-- How an execution ends that cannot be waited for.


-- Ends an execution without its program, for a person who cannot wait for it: nothing more is undone, and what stands is
-- written down. It works whatever state the execution is in, whoever owns it, and though no worker has its flow.
--
-- It is a takeover: under the row's lock, with the next fence. So an owner writes nothing any more, and learns that it
-- has lost the execution.
--
-- WHAT STANDS is each step with an undo that was done or may have been: that is not refused, not undone, and whose
-- command has left. Messages that have not left never will. Mail that nobody has read counts as if somebody had.
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
    v_stands   text[];
begin
    -- Keys come before rows. Which waits there are is known for sure only under the row's lock.
    v_keys := array(select distinct waypost.event_key(w.tenant_id, w.type, w.key)
                      from waypost.wait w
                     where w.tenant_id = p_tenant
                       and w.execution_id = p_execution
                     order by 1);
    perform pg_advisory_xact_lock(k) from unnest(v_keys) as k;
    -- stop: keys locked

    perform waypost.lock_rows(array[p_tenant], array[p_execution]);
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

    perform 1
       from waypost.outbox o
      where o.tenant_id = p_tenant
        and o.execution_id = p_execution
        and o.state in ('due', 'expired', 'sending')
      order by o.tenant_id, o.message_id
        for no key update of o;
    -- stop: messages locked

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
         where (s.kind = 'ended' and s.outcome = 'refused') or (s.kind = 'resolved' and s.verdict = 'not_done')
         union all
        select s.path
          from said s
         where s.kind = 'late'
           and s.outcome = 'refused'
           and s.path not in (select d.path from said d where d.outcome = 'done' or d.verdict = 'done')
         union all
        select a.payload ->> 'name'
          from asked a
         where a.payload ->> 'kind' = 'undo'
           and a.path in (select d.path from said d where d.outcome = 'done' or d.verdict = 'done')
         union all
        select o.path
          from waypost.outbox o
         where o.tenant_id = p_tenant
           and o.execution_id = p_execution
           and o.state in ('due', 'expired')
           and not o.reached
    )
    select coalesce(array_agg(a.path order by a.position), '{}')
      into v_stands
      from asked a
     where a.payload ? 'undo'
       and not a.payload ? 'unfit'
       and a.payload ->> 'kind' <> 'undo'
       and a.path not in (select g.path from gone g);

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
               'kind', 'failed', 'by', p_by, 'reason', p_reason, 'stands', v_stands,
               'error', jsonb_build_object('class', 'permanent', 'type', 'Terminated', 'code', 'terminated',
                                           'detail', 'by ' || p_by || ': ' || p_reason)),
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
                           and o.state in ('due', 'expired', 'sending'));
    if v_messages <> '{}' then
        perform waypost.take_back(
                    array_fill(p_tenant, array[cardinality(v_messages)]),
                    array_fill(p_execution, array[cardinality(v_messages)]),
                    array_fill(v_row.position + 1, array[cardinality(v_messages)]),
                    array_fill(v_row.fence + 1, array[cardinality(v_messages)]),
                    v_messages, p_now);
    end if;
    return query
    select 'terminated', v_row.position + 1, v_stands;
end $$;
