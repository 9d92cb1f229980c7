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
