-- compatible: no
--
-- The commit of turns: the one short transaction in which a worker writes what its executions decided.
--
-- One call carries many turns, of one execution each, as parallel arrays: t_ are the turns, j_ their facts, o_ their
-- messages, b_ the messages that nobody waits for any more. A turn whose row does not match owner, fence, position and
-- guards writes nothing at all; the others commit.
--
-- It is a function for two reasons. Every statement of a volatile function has a snapshot of its own, so the locks of
-- the first protect what the second reads, in one round trip: that halves what a commit costs the worker. And its
-- plans are fixed: the planner expects one updated row, and would compare each fact with each turn.
--
-- Two expressions are written so that no index serves them, on purpose: `(owner = me) is true`, because going by the
-- index of owners would read everything that the worker owns; and `(… in (select … from done)) is true`, which is a
-- hashed look-up and not a join.

create function waypost.commit_turns(
    p_me uuid, p_now timestamptz,
    t_tenant int[], t_execution uuid[], t_fence bigint[], t_position bigint[], t_facts int[], t_mail int[],
    t_orders int[], t_status text[], t_epoch int[], t_undoing boolean[], t_release boolean[], t_due timestamptz[],
    t_guard boolean[], t_asks boolean[],
    j_tenant int[], j_execution uuid[], j_position bigint[], j_fence bigint[], j_path text[], j_kind text[],
    j_payload jsonb[], j_actor text[], j_at timestamptz[],
    o_tenant int[], o_execution uuid[], o_epoch int[], o_message uuid[], o_path text[], o_once boolean[],
    o_endpoint text[], o_lane text[], o_body bytea[], o_expires timestamptz[],
    b_tenant int[], b_execution uuid[], b_position bigint[], b_fence bigint[], b_message uuid[]
) returns table (execution uuid, is_due boolean)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz := coalesce(p_now, now());
begin
    perform waypost.lock_rows(t_tenant, t_execution);
    -- stop: rows locked

    return query
    with t as materialized (
        select *
          from unnest(t_tenant, t_execution, t_fence, t_position, t_facts, t_mail, t_orders, t_status, t_epoch,
                      t_undoing, t_release, t_due, t_guard, t_asks)
            as t(tenant_id, execution_id, fence, position, facts, mail, orders, status, epoch, undoing, release, due,
                 guard, asks)
    ),
    done as (
        update waypost.execution e
           set position = e.position + t.facts,
               mail_read = e.mail_read + t.mail,
               orders_read = e.orders_read + t.orders,
               status = t.status,
               epoch = t.epoch,
               undoing = t.undoing,
               owner = case when t.release then null else e.owner end,
               finished_at = case when t.status in ('completed', 'compensated', 'failed', 'cancelled') then v_now end,
               wake_at = case
                   when t.status in ('completed', 'compensated', 'failed', 'cancelled') then null
                   when not t.release then e.wake_at
                   when t.status in ('paused', 'held') then
                       case when e.orders_received > e.orders_read + t.orders then v_now end
                   when e.mail_received > e.mail_read + t.mail then v_now
                   else t.due end
          from t
         where e.tenant_id = t.tenant_id
           and e.execution_id = t.execution_id
           and (e.owner = p_me) is true
           and e.fence = t.fence
           and e.position = t.position
           and (not t.guard or e.mail_received = e.mail_read + t.mail)
           and (not t.asks or e.orders_received = e.orders_read + t.orders)
     returning e.tenant_id, e.execution_id, e.owner is null and e.wake_at <= v_now as is_due
    ),
    facts as (
        insert into waypost.journal (tenant_id, execution_id, position, fence, path, kind, payload, actor, at)
        select f.*
          from unnest(j_tenant, j_execution, j_position, j_fence, j_path, j_kind, j_payload, j_actor, j_at)
            as f(tenant_id, execution_id, position, fence, path, kind, payload, actor, at)
         where ((f.tenant_id, f.execution_id) in (select d.tenant_id, d.execution_id from done d)) is true
    ),
    messages as (
        insert into waypost.outbox
               (tenant_id, execution_id, epoch, message_id, path, at_most_once, endpoint, lane, body, expires_at,
                due_at)
        select m.tenant_id, m.execution_id, m.epoch, m.message_id, m.path, m.once, m.endpoint, m.lane, m.body,
               m.expires_at, v_now
          from unnest(o_tenant, o_execution, o_epoch, o_message, o_path, o_once, o_endpoint, o_lane, o_body, o_expires)
               with ordinality
            as m(tenant_id, execution_id, epoch, message_id, path, once, endpoint, lane, body, expires_at, ord)
         where ((m.tenant_id, m.execution_id) in (select d.tenant_id, d.execution_id from done d)) is true
         order by m.ord
    )
    select d.execution_id, coalesce(d.is_due, false)
      from done d;
    -- stop: turns written

    -- Joined to the journal by position and fence, so it is harmless for a turn that did not match.
    if b_message <> '{}' then
        perform waypost.take_back(b_tenant, b_execution, b_position, b_fence, b_message, p_now);
    end if;
end $$;


-- Takes up to `p_limit` executions that are due and free, longest due first, of the flows that the worker holds. Nothing
-- is taken when the worker is dead or its lease is over.
--
-- A function, so that its plan is fixed: by the index of what is due, in its order. On tables that nothing has analysed
-- yet, a plan of its own would be a bitmap scan, which reads every dead entry of that index and, unlike a plain scan,
-- never marks one as dead: each claim would be slower than the one before, until a vacuum.
create function waypost.claim_due(
    p_me uuid, p_definition text[], p_version text[], p_limit int, p_now timestamptz default null
) returns table (
    tenant_id int, execution_id uuid, fence bigint, "position" bigint, epoch int, mail_read int, mail_received int,
    status text, definition text, version text, at timestamptz)
language plpgsql volatile
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz := coalesce(p_now, now());
begin
    return query
    with due as materialized (
        select e.tenant_id, e.execution_id
          from waypost.execution e
         where e.owner is null
           and e.wake_at <= v_now
           and (e.definition, e.version) in (select * from unnest(p_definition, p_version))
         order by e.wake_at, e.execution_id
         limit p_limit
           for no key update skip locked
    )
    update waypost.execution e
       set owner = p_me,
           fence = e.fence + 1,
           started_at = coalesce(e.started_at, v_now)
      from due
     where e.tenant_id = due.tenant_id
       and e.execution_id = due.execution_id
       and e.owner is null
       and exists (select 1
                     from waypost.worker w
                    where w.worker_id = p_me and w.dead_at is null and w.lease_until > now())
 returning e.tenant_id, e.execution_id, e.fence, e.position, e.epoch, e.mail_read, e.mail_received, e.status,
           e.definition, e.version, coalesce(p_now, clock_timestamp());
end $$;


-- The facts of executions, in order of position.
create function waypost.facts_of(p_tenant int[], p_execution uuid[])
returns table (execution_id uuid, "position" bigint, kind text, path text, payload text, at timestamptz)
language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
begin
    return query
    select j.execution_id, j.position, j.kind, j.path, j.payload::text, j.at
      from unnest(p_tenant, p_execution) as t(tenant_id, execution_id)
      join waypost.journal j on j.tenant_id = t.tenant_id and j.execution_id = t.execution_id
     order by j.execution_id, j.position;
end $$;
