-- compatible: yes
--
-- How an execution ends that cannot be waited for, and how long one may take.


-- Ends an execution without its program, for a person who cannot wait for it: nothing more is undone, and what stands is
-- written down. It works whatever state the execution is in, whoever owns it, and though no worker has its flow.
--
-- It is a takeover: under the row's lock, with the next fence. So an owner writes nothing any more, and learns that it
-- has lost the execution.
--
-- WHAT STANDS is each step with an undo that was done or may have been: that is not refused, not undone, and whose
-- command has left. Commands that have not left never will, while events that it emitted still do. Mail that nobody has
-- read counts as if somebody had.
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
        and o.command
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
        -- A command may have been sent more than once: each of its messages counts.
        select o.path
          from waypost.outbox o
         where o.tenant_id = p_tenant
           and o.execution_id = p_execution
           and o.epoch = v_row.epoch
         group by o.path
        having bool_and(o.state in ('due', 'expired', 'withdrawn') and not o.reached)
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
    return query
    select 'terminated', v_row.position + 1, v_stands;
end $$;


-- How long an execution of this version may take, as its code says; null: as long as it likes. For those who start
-- executions without having the code: events and applications.
alter table waypost.definition add column deadline interval,
    add constraint deadline_is_ahead check (deadline > interval '0');


drop function waypost.start_executions(
    int[], uuid[], text[], text[], text[], bytea[], jsonb[], text[], timestamptz);

-- Creates executions, as 0002 and 0011 describe it. New here: `p_deadline`, how long each may take, which the row and the
-- first fact say as a moment. Without it, their definitions say how long.
create function waypost.start_executions(
    p_tenant int[], p_execution uuid[], p_definition text[], p_version text[], p_business text[],
    p_digest bytea[], p_started jsonb[], p_traceparent text[], p_now timestamptz default null,
    p_deadline interval[] default null
) returns table (item int, outcome text, execution_id uuid)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz := coalesce(p_now, now());
    v_new uuid[];
begin
    with given as materialized (
        select t.tenant_id, t.execution_id, t.definition, t.version, t.business_key, t.digest, t.started,
               t.traceparent, t.ord,
               v_now + case when p_deadline is not null then p_deadline[t.ord]
                            else (select d.deadline
                                    from waypost.definition d
                                   where d.tenant_id = t.tenant_id
                                     and d.name = t.definition
                                     and d.version = t.version) end as deadline_at
          from unnest(p_tenant, p_execution, p_definition, p_version, p_business, p_digest, p_started, p_traceparent)
               with ordinality as t(tenant_id, execution_id, definition, version, business_key, digest, started,
                                    traceparent, ord)
    ),
    new as (
        insert into waypost.execution as e
               (tenant_id, execution_id, definition, version, business_key, input_digest, wake_at, position,
                events_after, deadline_at, traceparent, created_at)
        select t.tenant_id, t.execution_id, t.definition, t.version, t.business_key, t.digest, v_now, 1,
               waypost.inbox_mark(), t.deadline_at, t.traceparent, v_now
          from given t
         order by t.tenant_id, t.definition collate "C", t.business_key collate "C", t.execution_id, t.ord
            on conflict do nothing
     returning e.tenant_id, e.execution_id
    ),
    first as (
        insert into waypost.journal (tenant_id, execution_id, position, fence, kind, payload, at)
        select new.tenant_id, new.execution_id, 1, 0, 'started',
               case when t.deadline_at is null then t.started
                    else t.started || jsonb_build_object('deadline', t.deadline_at) end,
               v_now
          from new
          join given t
            on t.tenant_id = new.tenant_id
           and t.execution_id = new.execution_id
    )
    select coalesce(array_agg(new.execution_id), '{}')
      into v_new
      from new;
    -- stop: created

    return query
    select t.ord::int,
           case when h.execution_id is null then 'again'
                when h.execution_id = t.execution_id and h.execution_id = any(v_new) then 'started'
                when h.input_digest = t.digest then 'exists'
                when t.started -> 'input' = (select g.payload -> 'input'
                                               from waypost.journal g
                                              where g.tenant_id = t.tenant_id
                                                and g.execution_id = h.execution_id
                                                and g.position = 1) then 'exists'
                else 'conflict' end,
           h.execution_id
      from unnest(p_tenant, p_execution, p_definition, p_business, p_digest, p_started)
           with ordinality as t(tenant_id, execution_id, definition, business_key, digest, started, ord)
      -- Two looks, one index each: an `or` of both would read every execution of the tenant.
      left join lateral (
           (select e.execution_id, e.input_digest
              from waypost.execution e
             where e.tenant_id = t.tenant_id
               and e.execution_id = t.execution_id)
           union all
           (select e.execution_id, e.input_digest
              from waypost.execution e
             where e.tenant_id = t.tenant_id
               and e.definition = t.definition
               and e.business_key = t.business_key)
            limit 1) h on true
     order by t.ord;
end $$;


-- Creates the executions that new events start, as 0013 describes it. New here: their deadline, if their definition has
-- one.
create or replace function waypost.start_by_events(p_inbox bigint[], p_trace text[], p_now timestamptz) returns void
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
    with s as materialized (
        select i.tenant_id, i.inbox_id, i.sender, i.source, i.event_id, i.type, i.digest, t.trace,
               coalesce(i.data, 'null') as input, g.definition, g.version, k.key, waypost.new_id() as execution_id,
               p_now + (select d.deadline
                          from waypost.definition d
                         where d.tenant_id = g.tenant_id
                           and d.name = g.definition
                           and d.version = g.version) as deadline_at
          from unnest(p_inbox, p_trace) as t(inbox_id, trace)
          join waypost.inbox i on i.inbox_id = t.inbox_id
         cross join lateral
               (select d.definition,
                       waypost.version_drawn(i.tenant_id, d.definition, i.type,
                                             waypost.draw_of(i.source || ' ' || i.event_id)) as version
                  from (select distinct o.definition
                          from waypost.trigger o
                         where o.tenant_id = i.tenant_id
                           and o.type = i.type) d) v
          join waypost.trigger g
            on g.tenant_id = i.tenant_id
           and g.definition = v.definition
           and g.version = v.version
          left join lateral
               (select c.key
                  from (select case when g.key_pointer is null then i.key
                                    when jsonb_typeof(i.data #> waypost.steps_of(g.key_pointer)) in ('string', 'number')
                                    then i.data #>> waypost.steps_of(g.key_pointer) end as key) c
                 where octet_length(c.key) between 1 and 1024
                   and c.key !~ '[\u0001-\u001f\u007f-\u009f]') k on true
    ),
    new as (
        insert into waypost.execution as e
               (tenant_id, execution_id, definition, version, business_key, input_digest, wake_at, position,
                events_after, deadline_at, traceparent, created_at)
        select s.tenant_id, s.execution_id, s.definition, s.version, s.key, s.digest, p_now, 1, s.inbox_id,
               s.deadline_at, waypost.trace_of(s.execution_id, s.trace), p_now
          from s
         order by s.tenant_id, s.definition collate "C", s.key collate "C", s.inbox_id
            on conflict do nothing
     returning e.tenant_id, e.execution_id, e.events_after, e.traceparent
    ),
    first as (
        insert into waypost.journal (tenant_id, execution_id, position, fence, kind, payload, actor, at)
        select new.tenant_id, new.execution_id, 1, 0, 'started',
               jsonb_build_object(
                   'input', s.input,
                   'definition', s.definition,
                   'version', s.version,
                   'seed', encode(substr(sha256(uuid_send(gen_random_uuid())), 1, 8), 'hex'),
                   'key', s.key,
                   'traceparent', new.traceparent,
                   'event', jsonb_build_object('sender', s.sender, 'source', s.source, 'id', s.event_id,
                                               'type', s.type, 'inbox_id', s.inbox_id, 'traceparent', s.trace))
               || case when s.deadline_at is null then '{}'
                       else jsonb_build_object('deadline', s.deadline_at) end,
               'sender:' || s.sender, p_now
          from new
          join s on s.execution_id = new.execution_id
    )
    update waypost.inbox i
       set taken = true
     where i.inbox_id in (select new.events_after from new);
end $$;
