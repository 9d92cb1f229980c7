-- compatible: yes
--
-- Plans that do not depend on what PostgreSQL knows of a table. The plan of a function is made when it is first called,
-- which is when the tables are empty. Then one index is as good as another, and a message was looked for among all those
-- of its tenant: up to seven times the work, until the first analysis of the table was over.

-- Serve the views of one execution. They begin with the execution, so that nothing else is looked for in them.
drop index waypost.outbox_execution;
create index outbox_execution on waypost.outbox (execution_id, tenant_id, number);

drop index waypost.task_execution;
create index task_execution on waypost.task (execution_id, tenant_id, number);

-- An event is stored once, and a mutex is asked for once at each path. So do these.
alter table waypost.inbox
    drop constraint inbox_once,
    add constraint inbox_once unique (event_id, source, sender, tenant_id);

alter table waypost.mutex
    drop constraint mutex_once,
    add constraint mutex_once unique (execution_id, tenant_id, path);


-- The mail of executions behind what each has read, in the order of its arrival. `source` and `event_id` are those of
-- the inbox: with `sender` they say where sealed data belong.
create function waypost.unread_mail(p_tenant int[], p_execution uuid[], p_read int[])
returns table (
    tenant_id int, execution_id uuid, mail_number int, kind text, epoch int, path text, data text, sender text,
    received_at timestamptz, inbox_id bigint, type text, key text, source text, event_id text
)
language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
    return query
    select m.tenant_id, m.execution_id, m.mail_number, i.kind, m.epoch, m.path, i.data::text, i.sender, i.received_at,
           i.inbox_id, m.type, m.key, i.source, i.event_id
      from unnest(p_tenant, p_execution, p_read) as t(tenant_id, execution_id, mail_read)
      join waypost.mail m
        on m.tenant_id = t.tenant_id and m.execution_id = t.execution_id and m.mail_number > t.mail_read
      join waypost.inbox i on i.inbox_id = m.inbox_id
     order by m.execution_id, m.mail_number;
end $$;


-- As 0021 describes it. New here: of those that wait for a key, only who is first is looked for, and who stands before it
-- at an end; all that waited for any key of the tenant were read before. Executions are looked up one by one, so that no
-- plan begins with all of a tenant's.
create or replace function waypost.grant_mutexes(p_limit int, p_now timestamptz default null)
returns table (granted int, again boolean)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_now    timestamptz := coalesce(p_now, now());
    v_tenant int[];
    v_kind   text[];
    v_key    text[];
    v_first  bigint[];
    a_ticket bigint[];
    a_tenant int[];
    a_to     uuid[];
    a_epoch  int[];
    a_path   text[];
    v_count  int;
    v_none   text[];
begin
    -- From key to key in the index, so that it matters how many keys are waited for, and not how many wait.
    with recursive k as (
        (select m.tenant_id, m.kind, m.key
           from waypost.mutex m
          where m.granted_at is null
          order by m.tenant_id, m.kind, m.key
          limit 1)
         union all
        select n.tenant_id, n.kind, n.key
          from k
         cross join lateral
               (select m.tenant_id, m.kind, m.key
                  from waypost.mutex m
                 where m.granted_at is null
                   and (m.tenant_id, m.kind, m.key) > (k.tenant_id, k.kind, k.key)
                 order by m.tenant_id, m.kind, m.key
                 limit 1) n
    )
    select array_agg(f.tenant_id), array_agg(f.kind), array_agg(f.key)
      into v_tenant, v_kind, v_key
      from (select k.*
              from k
             where not exists (select 1
                                 from waypost.mutex h
                                where h.granted_at is not null
                                  and h.tenant_id = k.tenant_id
                                  and h.kind = k.kind
                                  and h.key = k.key
                                  and (select e.finished_at is null
                                         from waypost.execution e
                                        where e.tenant_id = h.tenant_id
                                          and e.execution_id = h.execution_id))
             limit p_limit) f;
    -- stop: keys found
    if v_key is null then
        return query select 0, false;
        return;
    end if;

    perform pg_advisory_xact_lock(s.k)
       from (select distinct waypost.event_key(t.tenant_id, 'waypost:mutex:' || t.kind, t.key) as k
               from unnest(v_tenant, v_kind, v_key) as t(tenant_id, kind, key)
              order by 1) s;
    -- stop: keys locked

    -- A new snapshot: another grant may have been under way.
    select array_agg(f.ticket order by t.ord)
      into v_first
      from unnest(v_tenant, v_kind, v_key) with ordinality as t(tenant_id, kind, key, ord)
      left join lateral
           (select m.ticket
              from waypost.mutex m
             where m.granted_at is null
               and m.tenant_id = t.tenant_id
               and m.kind = t.kind
               and m.key = t.key
               and (select e.finished_at is null
                      from waypost.execution e
                     where e.tenant_id = m.tenant_id
                       and e.execution_id = m.execution_id)
             order by m.ticket
             limit 1) f on true;
    perform waypost.lock_rows(array_agg(m.tenant_id), array_agg(m.execution_id))
       from waypost.mutex m
      where m.ticket = any(v_first);
    -- stop: rows locked

    -- Of executions at an end: whoever had a key, and who has waited for it longer than the first that is not.
    delete from waypost.mutex m
     using unnest(v_tenant, v_kind, v_key) as t(tenant_id, kind, key)
     where m.granted_at is not null
       and m.tenant_id = t.tenant_id
       and m.kind = t.kind
       and m.key = t.key
       and (select e.finished_at is not null
              from waypost.execution e
             where e.tenant_id = m.tenant_id
               and e.execution_id = m.execution_id);
    delete from waypost.mutex m
     using unnest(v_tenant, v_kind, v_key, v_first) as t(tenant_id, kind, key, first)
     where m.granted_at is null
       and m.tenant_id = t.tenant_id
       and m.kind = t.kind
       and m.key = t.key
       and m.ticket < coalesce(t.first, 9223372036854775807)
       and (select e.finished_at is not null
              from waypost.execution e
             where e.tenant_id = m.tenant_id
               and e.execution_id = m.execution_id);

    -- Whose row is still there waits still, since its own turn would remove it. Only under the key's lock does anybody
    -- become a holder.
    with g as (
        update waypost.mutex m
           set granted_at = v_now
         where m.ticket = any(v_first)
           and m.granted_at is null
           and not exists (select 1
                             from waypost.mutex h
                            where h.granted_at is not null
                              and h.tenant_id = m.tenant_id
                              and h.kind = m.kind
                              and h.key = m.key)
     returning m.ticket, m.tenant_id, m.execution_id, m.epoch, m.path
    )
    select array_agg(g.ticket), array_agg(g.tenant_id), array_agg(g.execution_id), array_agg(g.epoch),
           array_agg(g.path)
      into a_ticket, a_tenant, a_to, a_epoch, a_path
      from g;
    -- stop: granted

    v_count := coalesce(cardinality(a_ticket), 0);
    if v_count > 0 then
        v_none := array_fill(null::text, array[v_count]);
        perform 1
           from waypost.post_mail(
                    p_tenant    => a_tenant,
                    p_kind      => array_fill('result'::text, array[v_count]),
                    p_sender    => array_fill('waypost'::text, array[v_count]),
                    p_source    => array_fill('waypost:mutex'::text, array[v_count]),
                    p_event     => array(select t || '/granted'
                                           from unnest(a_ticket) with ordinality as s(t, o)
                                          order by o),
                    p_webhook   => v_none,
                    p_type      => v_none,
                    p_key       => v_none,
                    p_digest    => array_fill(sha256('granted'), array[v_count]),
                    p_data      => array_fill('{"outcome": "done", "value": null}'::jsonb, array[v_count]),
                    p_causation => array_fill(null::uuid, array[v_count]),
                    p_execution => a_to,
                    p_epoch     => a_epoch,
                    p_path      => a_path,
                    p_now       => p_now);
    end if;
    return query
    select v_count, v_count < cardinality(array_remove(v_first, null)) or cardinality(v_key) = p_limit;
end $$;
