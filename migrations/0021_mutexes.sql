-- compatible: yes
--
-- Mutexes: of all that ask for a key, one has it at a time. There is no lock service: who has it is a row, and that it
-- got it is mail, and so a fact of its journal.
--
--     asked      a turn of the execution adds its row, in the commit of the fact that asks
--     granted    grant_mutexes marks the row, and mail for its path says so, in one transaction
--     let go     a turn of the execution removes its row, in the commit of the fact that ends the need
--
-- A grant is a transaction of its own, because the commit of a turn has the rows of its executions, and would have to
-- wait for one more. Any worker grants: one whose turn has added or removed a row at once, each one now and then. So what
-- dies in between loses nothing.
--
-- Keys of steps and keys of whole executions (`flow`) are different things. An execution asks for the one of the whole
-- first; a step that has one waits for nothing else that has one; and nothing that a flow with one waits for, its
-- children and theirs, asks for the one of a whole. So no two wait for each other.


-- One row is an ask for a mutex: granted, or waiting, in the order of `ticket`.
create table waypost.mutex (
    ticket       bigint      generated always as identity (cache 1) primary key,
    tenant_id    int         not null,
    kind         text        not null,
    key          text        collate "C" not null,
    execution_id uuid        not null,
    epoch        int         not null,
    path         text        collate "C" not null,
    asked_at     timestamptz not null default now(),
    granted_at   timestamptz,

    constraint mutex_once unique (tenant_id, execution_id, path),
    constraint kind_is_known check (kind in ('step', 'flow')),
    constraint keys_are_bounded check (octet_length(path) <= 512 and octet_length(key) between 1 and 1024)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000
);

-- One holder of a key, whatever a mistake of ours might do.
create unique index mutex_held on waypost.mutex (tenant_id, kind, key)
    where granted_at is not null;

-- Serves grant_mutexes: who waits for a key, in the order of asking.
create index mutex_waiting on waypost.mutex (tenant_id, kind, key, ticket)
    where granted_at is null;


-- Gives each key that nobody has to whoever has waited longest for it, for up to `p_limit` keys. Rows of executions at an
-- end count for nothing and are removed, though they remove them themselves.
--
-- `granted` says how many got theirs; `again` whether there may be more to give: then call it once more.
--
-- In the order of locks: keys, rows of executions, and rows of mutexes as the last. Whoever is granted a key that is
-- locked here is found, looked at and marked under that lock; whoever has gone meanwhile is passed over.
create function waypost.grant_mutexes(p_limit int, p_now timestamptz default null)
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
                                 join waypost.execution e
                                   on e.tenant_id = h.tenant_id
                                  and e.execution_id = h.execution_id
                                where h.granted_at is not null
                                  and h.tenant_id = k.tenant_id
                                  and h.kind = k.kind
                                  and h.key = k.key
                                  and e.finished_at is null)
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
    select array_agg(f.ticket)
      into v_first
      from unnest(v_tenant, v_kind, v_key) as t(tenant_id, kind, key)
     cross join lateral
           (select m.ticket
              from waypost.mutex m
              join waypost.execution e
                on e.tenant_id = m.tenant_id
               and e.execution_id = m.execution_id
             where m.granted_at is null
               and m.tenant_id = t.tenant_id
               and m.kind = t.kind
               and m.key = t.key
               and e.finished_at is null
             order by m.ticket
             limit 1) f;
    perform waypost.lock_rows(array_agg(m.tenant_id), array_agg(m.execution_id))
       from waypost.mutex m
      where m.ticket = any(v_first);
    -- stop: rows locked

    delete from waypost.mutex m
     using unnest(v_tenant, v_kind, v_key) as t(tenant_id, kind, key), waypost.execution e
     where m.tenant_id = t.tenant_id
       and m.kind = t.kind
       and m.key = t.key
       and e.tenant_id = m.tenant_id
       and e.execution_id = m.execution_id
       and e.finished_at is not null;

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
    select v_count, v_count < coalesce(cardinality(v_first), 0) or cardinality(v_key) = p_limit;
end $$;
