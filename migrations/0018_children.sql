-- compatible: no
--
-- Flows that run other flows. A worker of before would end a child without a word to its parent.
--
-- A CHILD is an execution that another one, its parent, waits for: `parent` and `parent_path` say who asked and where,
-- `root` is the first of the family. It is created in the commit of the fact that asks for it, and the commit that ends
-- it tells its parent, which is mail of the kind `child`. A parent that needs it no more sends it an order to cancel.
-- What a flow only starts has no parent, and nobody is told of its end.
--
-- LOCKS. All that a commit touches of a family is locked with its own rows, sorted, before anything is written
-- (lock_families). New executions come then, and before messages that are taken back (commit_families): whoever waits
-- for a business key holds no message.


-- Serves the end of a parent, the view `stuck`, and the list of somebody's children.
create index execution_parent on waypost.execution (tenant_id, parent)
    where parent is not null;


-- Locks what a commit of families touches: event keys, then all executions that it writes or that get mail of it.
create function waypost.lock_families(
    k_tenant int[], k_type text[], k_key text[], r_tenant int[], r_execution uuid[]
) returns void
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
    if k_tenant <> '{}' then
        perform waypost.lock_keys(k_tenant, k_type, k_key);
    end if;
    -- stop: keys locked

    perform waypost.lock_rows(r_tenant, r_execution);
    -- stop: rows locked
end $$;


-- Mail from one execution to another of its family. The rows of all who get it are locked. What comes from a fact that
-- is not in the journal is not stored.
create function waypost.post_family(
    p_tenant int[], p_kind text[], p_event text[], p_data jsonb[], p_to uuid[], p_epoch int[], p_path text[],
    p_from uuid[], p_position bigint[], p_fence bigint[], p_now timestamptz
) returns void
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_count int    := coalesce(cardinality(p_tenant), 0);
    v_none  text[] := array_fill(null::text, array[v_count]);
begin
    if v_count = 0 then
        return;
    end if;
    perform 1
       from waypost.post_mail(
                p_tenant        => p_tenant,
                p_kind          => p_kind,
                p_sender        => array_fill('waypost'::text, array[v_count]),
                p_source        => array_fill('waypost:execution'::text, array[v_count]),
                p_event         => p_event,
                p_webhook       => v_none,
                p_type          => v_none,
                p_key           => v_none,
                p_digest        => array(select sha256(convert_to(d::text, 'UTF8'))
                                           from unnest(p_data) with ordinality as s(d, o)
                                          order by o),
                p_data          => p_data,
                p_causation     => array_fill(null::uuid, array[v_count]),
                p_execution     => p_to,
                p_epoch         => p_epoch,
                p_path          => p_path,
                p_from          => p_from,
                p_from_position => p_position,
                p_from_fence    => p_fence,
                p_now           => p_now);
end $$;


-- What follows from turns of families, after commit_turns in the same transaction, which takes no message back then:
--
--     n_   executions that they begin, each named by the fact that asks for it; `n_root` is null for one that is only
--          started. The version is drawn, by the key if there is one
--     b_   messages that nobody waits for any more, as commit_turns says
--     m_   mail for parents and children
--
-- All of it is joined to the journal by position and fence, so it is harmless for a turn that did not match. A child that
-- is not created ends its ask: `refused`, with the code `key-taken` or `unknown-flow`. What is only started has nobody to
-- tell: where somebody has its key nothing is begun, and an unknown flow raises 22023.
create function waypost.commit_families(
    n_tenant int[], n_from uuid[], n_position bigint[], n_fence bigint[], n_epoch int[], n_path text[],
    n_execution uuid[], n_flow text[], n_key text[], n_digest bytea[], n_started jsonb[], n_traceparent text[],
    n_root uuid[],
    b_tenant int[], b_execution uuid[], b_position bigint[], b_fence bigint[], b_message uuid[],
    m_tenant int[], m_kind text[], m_event text[], m_data jsonb[], m_to uuid[], m_epoch int[], m_path text[],
    m_from uuid[], m_position bigint[], m_fence bigint[],
    p_now timestamptz default null
) returns void
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_ord     int[];
    v_version text[];
    v_created int[];
    v_unknown text;
begin
    if n_execution <> '{}' then
        -- Each id once: a turn may start the same key more than once.
        select array_agg(f.ord order by f.ord), array_agg(f.version order by f.ord)
          into v_ord, v_version
          from (select distinct on (t.tenant_id, t.execution_id) t.ord::int as ord,
                       waypost.version_drawn(t.tenant_id, t.flow, null,
                                             waypost.draw_of(coalesce(t.key, t.execution_id::text))) as version
                  from unnest(n_tenant, n_from, n_position, n_fence, n_execution, n_flow, n_key) with ordinality
                       as t(tenant_id, sender, position, fence, execution_id, flow, key, ord)
                  join waypost.journal g
                    on g.tenant_id = t.tenant_id
                   and g.execution_id = t.sender
                   and g.position = t.position
                   and g.fence = t.fence
                 order by t.tenant_id, t.execution_id, t.ord) f;
        v_unknown := (select n_flow[s.ord]
                        from unnest(v_ord, v_version) as s(ord, version)
                       where s.version is null
                         and n_root[s.ord] is null
                       limit 1);
        if v_unknown is not null then
            raise exception 'no flow is called %: no worker has made it known, or none of its versions takes starts',
                            quote_literal(left(v_unknown, 80))
                  using errcode = '22023';
        end if;
        -- stop: versions drawn

        with begun as materialized (
            select s.ord, s.version, row_number() over (order by s.ord)::int as item
              from unnest(v_ord, v_version) as s(ord, version)
             where s.version is not null
        ),
        outcomes as materialized (
            select o.*
              from (select array_agg(n_tenant[b.ord] order by b.item) as tenants,
                           array_agg(n_execution[b.ord] order by b.item) as ids,
                           array_agg(n_flow[b.ord] order by b.item) as flows,
                           array_agg(b.version order by b.item) as versions,
                           array_agg(n_key[b.ord] order by b.item) as keys,
                           array_agg(n_digest[b.ord] order by b.item) as digests,
                           array_agg(n_started[b.ord] || jsonb_build_object('version', b.version)
                                     order by b.item) as started,
                           array_agg(n_traceparent[b.ord] order by b.item) as traceparents
                      from begun b
                    having count(*) > 0) a
             cross join lateral waypost.start_executions(a.tenants, a.ids, a.flows, a.versions, a.keys, a.digests,
                                                         a.started, a.traceparents, p_now) o
        )
        select array_agg(case when o.outcome = 'again' then -1 else b.ord end)
          into v_created
          from outcomes o
          join begun b on b.item = o.item
         where o.outcome in ('started', 'again');
        if -1 = any(v_created) then
            raise exception 'whoever had a business key was deleted'
                  using errcode = '40001';
        end if;
        -- stop: created

        update waypost.execution e
           set parent      = n_from[c.ord],
               parent_path = n_path[c.ord],
               root        = n_root[c.ord]
          from unnest(v_created) as c(ord)
         where n_root[c.ord] is not null
           and e.tenant_id = n_tenant[c.ord]
           and e.execution_id = n_execution[c.ord];
    end if;

    if b_message <> '{}' then
        perform waypost.take_back(b_tenant, b_execution, b_position, b_fence, b_message, p_now);
    end if;

    if n_execution <> '{}' then
        perform waypost.post_family(
                    array_agg(n_tenant[r.ord]), array_agg('child'::text), array_agg(n_execution[r.ord] || '/refused'),
                    array_agg(jsonb_build_object(
                        'outcome', 'refused', 'execution', n_execution[r.ord],
                        'error', case when r.version is null
                                      then jsonb_build_object(
                                               'code', 'unknown-flow',
                                               'detail', 'no version of flow ' || n_flow[r.ord] || ' takes starts')
                                      else jsonb_build_object(
                                               'code', 'key-taken',
                                               'detail', 'an execution of flow ' || n_flow[r.ord] || ' has the key '
                                                         || n_key[r.ord]) end)),
                    array_agg(n_from[r.ord]), array_agg(n_epoch[r.ord]), array_agg(n_path[r.ord]),
                    array_agg(n_from[r.ord]), array_agg(n_position[r.ord]), array_agg(n_fence[r.ord]), p_now)
           from unnest(v_ord, v_version) as r(ord, version)
          where n_root[r.ord] is not null
            and (v_created is null or r.ord <> all(v_created));
    end if;
    perform waypost.post_family(m_tenant, m_kind, m_event, m_data, m_to, m_epoch, m_path, m_from, m_position, m_fence,
                                p_now);
end $$;


-- Ends an execution without its program, as 0015 describes it. New here: its parent is told, and its children are asked
-- to end.
create or replace function waypost.terminate(
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


-- Executions that nothing would move, as 0012 describes it. New here: an execution that has a child waits for it.
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
  left join lateral
       (select true as moves
          from waypost.execution c
         where c.tenant_id = e.tenant_id
           and c.parent = e.execution_id
           and c.finished_at is null
         limit 1) child on true
 where e.owner is null
   and e.wake_at is null
   and e.finished_at is null
   and case when e.status <> 'open' then e.orders_received > e.orders_read
            else e.mail_received > e.mail_read
                 or (message.moves is null and event.moves is null and person.moves is null
                     and child.moves is null) end
 union all
select e.tenant_id, e.execution_id, e.definition, e.version, e.status, e.undoing, e.owner, 'owner-gone'
  from waypost.execution e
  left join waypost.worker w on w.worker_id = e.owner
 where e.owner is not null
   and (w.worker_id is null or w.dead_at < now() - interval '5 minutes');
