-- compatible: no
--
-- Waits for events. A turn registers a wait for an event by type and key, and what the wait gets is mail.
--
-- A WAIT HOLDS AT MOST ONE EVENT. `wait.inbox_id` is empty while it is open, and names the event that fills it. An
-- event that arrives fills the oldest open wait of each execution (post_mail); a wait that is registered is filled from
-- the shelf (match_waits). Both happen under the lock of the key (lock_keys), which is taken before any row: so an
-- event and a wait never miss each other, whoever is first.
--
-- WHAT A WAIT MAY GET. The oldest event of its type and key that its execution has not had, that is still on the shelf
-- (`shelf_until`), and that either came after the execution was created (`inbox_id > events_after`; others may have
-- it too) or that nobody has (`not taken`). "Has not had" is one comparison with the greatest inbox_id of the key in
-- its mail: events of a key are got in order, and what may not be got never may later.
--
-- MAIL OF AN EVENT NAMES ITS WAIT. `mail.epoch` and `mail.path` are those of the wait that the event fills, as they
-- are those of the ask for mail of other kinds; what 0001 says beside these columns ("null for events") is so no more.
-- (post_mail writes them from 0007 on.)
--
-- WHICH KEYS A COMMIT LOCKS. Those of the waits that it registers, and those of the waits that it deletes and that were
-- open when they were loaded; for the second the turn also carries its guard, since an event may have filled one
-- meanwhile. A wait that was filled stays so: deleting it needs no key. At most 256 keys are locked by one transaction.
--
-- A turn that ends its execution deletes all of its waits.


-- Gives waits what is on the shelf for them, oldest wait first. Called by a commit, after its own statements, for the
-- waits that it registered: their keys and their executions' rows are locked. Returns how many got an event.
create function waypost.match_waits(
    p_tenant int[], p_execution uuid[], p_path text[], p_now timestamptz default null
) returns int
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_now   timestamptz := coalesce(p_now, now());
    v_wait  record;
    v_event bigint;
    v_count int         := 0;
begin
    for v_wait in
        -- Written so that each wait is found by its primary key, and then one event of it: as `exists`, the second would
        -- be answered by reading the events of all keys once, and the first by the index of open waits.
        select w.tenant_id, w.execution_id, w.path, w.epoch, w.type, w.key
          from unnest(p_tenant, p_execution, p_path) as t(tenant_id, execution_id, path)
          join waypost.wait w using (tenant_id, execution_id, path)
         where (w.inbox_id is null) is true
           and (select true
                  from waypost.inbox i
                 where i.tenant_id = w.tenant_id
                   and i.type = w.type
                   and i.key = w.key
                   and i.kind = 'event'
                 limit 1)
         order by w.wait_id
    loop
        -- stop: wait looked at

        -- Two looks, each of which reads one row of its index, however long the shelf is.
        select min(c.inbox_id)
          into v_event
          from (select e.events_after,
                       coalesce((select max(m.inbox_id)
                                   from waypost.mail m
                                  where m.tenant_id = v_wait.tenant_id
                                    and m.execution_id = v_wait.execution_id
                                    and m.type = v_wait.type
                                    and m.key = v_wait.key), 0) as had
                  from waypost.execution e
                 where e.tenant_id = v_wait.tenant_id
                   and e.execution_id = v_wait.execution_id) x
         cross join lateral (
               (select i.inbox_id
                  from waypost.inbox i
                 where i.tenant_id = v_wait.tenant_id
                   and i.type = v_wait.type
                   and i.key = v_wait.key
                   and i.kind = 'event'
                   and not i.taken
                   and i.inbox_id > x.had
                   and i.shelf_until > v_now
                 order by i.inbox_id
                 limit 1)
               union all
               (select i.inbox_id
                  from waypost.inbox i
                 where i.tenant_id = v_wait.tenant_id
                   and i.type = v_wait.type
                   and i.key = v_wait.key
                   and i.kind = 'event'
                   and i.inbox_id > greatest(x.had, x.events_after)
                   and i.shelf_until > v_now
                 order by i.inbox_id
                 limit 1)) c;
        continue when v_event is null;

        -- As post_mail counts and wakes. A finished execution has no wait.
        with u as (
            update waypost.execution e
               set mail_received = e.mail_received + 1,
                   wake_at       = case when e.status = 'open' then least(e.wake_at, v_now) else e.wake_at end
             where e.tenant_id = v_wait.tenant_id
               and e.execution_id = v_wait.execution_id
         returning e.mail_received
        ),
        f as (
            update waypost.wait w
               set inbox_id = v_event
             where w.tenant_id = v_wait.tenant_id
               and w.execution_id = v_wait.execution_id
               and w.path = v_wait.path
        ),
        k as (
            update waypost.inbox i
               set taken = true
             where i.inbox_id = v_event
               and not i.taken
        )
        insert into waypost.mail
               (tenant_id, execution_id, mail_number, inbox_id, is_order, epoch, path, type, key)
        select v_wait.tenant_id, v_wait.execution_id, u.mail_received, v_event, false, v_wait.epoch, v_wait.path,
               v_wait.type, v_wait.key
          from u;
        v_count := v_count + 1;
    end loop;
    return v_count;
end $$;


drop function waypost.commit_turns(
    uuid, timestamptz, int[], uuid[], bigint[], bigint[], int[], int[], int[], text[], int[], boolean[],
    boolean[], timestamptz[], boolean[], boolean[], int[], uuid[], bigint[], bigint[], text[], text[], jsonb[],
    text[], timestamptz[], int[], uuid[], int[], uuid[], text[], boolean[], text[], text[], bytea[],
    timestamptz[], int[], uuid[], bigint[], bigint[], uuid[]);

-- The commit of turns, as 0003 describes it. New here:
--
--     w_        waits that turns register, in this order; what is on the shelf for them is mail at once
--     x_        waits that turns delete
--     k_        the event keys to lock, before any row: of the waits registered, and of those deleted that were open
--     t_guard   the number of the last mail that the worker has loaded: the turn matches only if no other has come
--
-- Waits are statements of their own, after that of the rows and only where there are any: turns without waits pay
-- nothing for them. What is due is told last, since mail that the commit itself brings makes its execution due.
create function waypost.commit_turns(
    p_me uuid, p_now timestamptz,
    t_tenant int[], t_execution uuid[], t_fence bigint[], t_position bigint[], t_facts int[], t_mail int[],
    t_orders int[], t_status text[], t_epoch int[], t_undoing boolean[], t_release boolean[], t_due timestamptz[],
    t_guard int[], t_asks boolean[],
    j_tenant int[], j_execution uuid[], j_position bigint[], j_fence bigint[], j_path text[], j_kind text[],
    j_payload jsonb[], j_actor text[], j_at timestamptz[],
    o_tenant int[], o_execution uuid[], o_epoch int[], o_message uuid[], o_path text[], o_once boolean[],
    o_endpoint text[], o_lane text[], o_body bytea[], o_expires timestamptz[],
    b_tenant int[], b_execution uuid[], b_position bigint[], b_fence bigint[], b_message uuid[],
    w_tenant int[], w_execution uuid[], w_epoch int[], w_path text[], w_type text[], w_key text[],
    x_tenant int[], x_execution uuid[], x_path text[],
    k_tenant int[], k_type text[], k_key text[]
) returns table (execution uuid, is_due boolean)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now       timestamptz := coalesce(p_now, now());
    v_tenant    int[];
    v_execution uuid[];
    v_due       boolean[];
    v_mailed    int         := 0;
begin
    if k_tenant <> '{}' then
        perform waypost.lock_keys(k_tenant, k_type, k_key);
    end if;
    -- stop: keys locked

    perform waypost.lock_rows(t_tenant, t_execution);
    -- stop: rows locked

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
           and (t.guard is null or e.mail_received = t.guard)
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
    select coalesce(array_agg(d.tenant_id), '{}'), coalesce(array_agg(d.execution_id), '{}'),
           coalesce(array_agg(coalesce(d.is_due, false)), '{}')
      into v_tenant, v_execution, v_due
      from done d;
    -- stop: turns written

    -- Joined to the journal by position and fence, so it is harmless for a turn that did not match.
    if b_message <> '{}' then
        v_mailed := waypost.take_back(b_tenant, b_execution, b_position, b_fence, b_message, p_now);
    end if;

    if x_execution <> '{}' then
        delete from waypost.wait w
         where (w.tenant_id, w.execution_id, w.path) in
               (select x.tenant_id, x.execution_id, x.path
                  from unnest(x_tenant, x_execution, x_path) as x(tenant_id, execution_id, path)
                 where ((x.tenant_id, x.execution_id) in (select * from unnest(v_tenant, v_execution))) is true);
    end if;
    if w_execution <> '{}' then
        insert into waypost.wait (tenant_id, execution_id, epoch, path, type, key)
        select w.tenant_id, w.execution_id, w.epoch, w.path, w.type, w.key
          from unnest(w_tenant, w_execution, w_epoch, w_path, w_type, w_key) with ordinality
            as w(tenant_id, execution_id, epoch, path, type, key, ord)
         where ((w.tenant_id, w.execution_id) in (select * from unnest(v_tenant, v_execution))) is true
         order by w.ord;
        -- stop: waits registered

        -- For a turn that did not match, these are waits that others registered, under a key that may not be locked.
        v_mailed := v_mailed + (
            select waypost.match_waits(array_agg(w.tenant_id), array_agg(w.execution_id), array_agg(w.path), p_now)
              from unnest(w_tenant, w_execution, w_path) as w(tenant_id, execution_id, path)
             where ((w.tenant_id, w.execution_id) in (select * from unnest(v_tenant, v_execution))) is true);
    end if;

    if v_mailed = 0 then
        return query
        select * from unnest(v_execution, v_due);
    else
        return query
        select e.execution_id, coalesce(e.owner is null and e.wake_at <= v_now, false)
          from unnest(v_tenant, v_execution) as d(tenant_id, execution_id)
          join waypost.execution e on e.tenant_id = d.tenant_id and e.execution_id = d.execution_id;
    end if;
end $$;
