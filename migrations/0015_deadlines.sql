-- compatible: yes
--
-- How long an execution may take.


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
