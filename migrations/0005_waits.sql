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


-- The one door for mail, as 0002 describes it. New here: mail of an event names the wait that it fills. And new events
-- are named by what was posted, and marked as taken by their primary key (`is true` is for that): a plan that was made
-- when the shelf was empty would read all of it otherwise.
create or replace function waypost.post_mail(
    p_tenant int[], p_kind text[], p_sender text[], p_source text[], p_event text[], p_webhook text[],
    p_type text[], p_key text[], p_digest bytea[], p_data jsonb[],
    p_causation uuid[], p_execution uuid[], p_epoch int[], p_path text[],
    p_body bytea[] default null,
    p_from uuid[] default null, p_from_position bigint[] default null, p_from_fence bigint[] default null,
    p_shelf interval default interval '7 days', p_now timestamptz default null
) returns table (item int, outcome text, inbox_id bigint, answer text)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now       timestamptz := coalesce(p_now, now());
    v_events    boolean     := 'event' = any(p_kind);
    v_inbox     bigint[];
    v_outcome   text[];
    v_answer    text[];
    v_new       bigint[];
    v_to_tenant int[];
    v_to        uuid[];
    v_to_inbox  bigint[];
    v_to_epoch  int[];
    v_to_path   text[];
    v_to_wait   text[];
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'post_mail needs READ COMMITTED, not %', current_setting('transaction_isolation')
              using errcode = '25001';
    end if;
    if exists (select 1
                 from unnest(p_sender, p_source) as t(sender, source)
                where (t.sender = 'waypost') <> (t.source ^@ 'waypost:')) then
        raise exception 'sources that begin with waypost: are reserved'
              using errcode = '42501';
    end if;

    -- 1. Lock event keys and webhook ids, in one sorted list. No order of rows alone would serve both unique
    --    keys of inbox: crossed ids deadlock without this.
    if v_events or array_length(array_remove(p_webhook, null), 1) > 0 then
        perform pg_advisory_xact_lock(s.k)
           from (select waypost.event_key(t.tenant_id, t.type, t.key) as k
                   from unnest(p_tenant, p_kind, p_type, p_key) as t(tenant_id, kind, type, key)
                  where t.kind = 'event'
                  union
                 select waypost.event_key(t.tenant_id, 'waypost:webhook:' || t.sender, t.webhook_id)
                   from unnest(p_tenant, p_sender, p_webhook) as t(tenant_id, sender, webhook_id)
                  where t.webhook_id is not null
                  order by 1) s;
    end if;
    -- stop: keys locked

    -- 2. Store, sorted. Mail from an execution is stored only if that execution's journal has the fact it
    --    comes from.
    with new as (
        insert into waypost.inbox as i
               (tenant_id, kind, sender, source, event_id, webhook_id, type, key, digest, data, body, answer,
                shelf_until, received_at)
        select t.tenant_id, t.kind, t.sender, t.source, t.event_id, t.webhook_id, t.type, t.key, t.digest,
               t.data, t.body,
               case when t.kind = 'event' then 'event'
                    when o.message_id is not null or x.execution_id is not null then 'mail'
                    else 'unmatched' end,
               case when t.kind = 'event' then v_now + p_shelf end,
               coalesce(p_now, clock_timestamp())
          from unnest(p_tenant, p_kind, p_sender, p_source, p_event, p_webhook, p_type, p_key, p_digest,
                      p_data, p_body, p_causation, p_execution)
               with ordinality as t(tenant_id, kind, sender, source, event_id, webhook_id, type, key, digest,
                                    data, body, causation, execution_id, ord)
          left join waypost.outbox o
            on t.kind = 'reply' and o.tenant_id = t.tenant_id and o.message_id = t.causation
          left join waypost.execution x
            on t.kind <> 'event' and x.tenant_id = t.tenant_id and x.execution_id = t.execution_id
         where p_from is null
            or p_from[t.ord] is null
            or exists (select 1
                         from waypost.journal g
                        where g.tenant_id = t.tenant_id
                          and g.execution_id = p_from[t.ord]
                          and g.position = p_from_position[t.ord]
                          and g.fence = p_from_fence[t.ord])
         order by t.tenant_id, t.sender collate "C", t.source collate "C", t.event_id collate "C", t.ord
            on conflict do nothing
     returning i.inbox_id
    )
    select coalesce(array_agg(new.inbox_id), '{}')
      into v_new
      from new;
    -- stop: stored

    -- 3. Say what each item is. A new snapshot: the first row of a duplicate is seen, whoever committed it.
    select array_agg(a.inbox_id order by a.ord),
           array_agg(a.answer order by a.ord),
           array_agg(case when a.inbox_id is null and p_from is not null and p_from[a.ord] is not null
                               then 'stale'
                          when a.inbox_id is null then 'again'
                          when a.n = 1 and a.inbox_id = any(v_new) then 'stored'
                          when a.same then 'duplicate'
                          else 'conflict' end
                     order by a.ord)
      into v_inbox, v_answer, v_outcome
      from (select t.ord, i.inbox_id, i.answer, i.digest = t.digest as same,
                   row_number() over (partition by i.inbox_id order by t.ord) as n
              from unnest(p_tenant, p_sender, p_source, p_event, p_webhook, p_digest)
                   with ordinality as t(tenant_id, sender, source, event_id, webhook_id, digest, ord)
              left join lateral (
                   select h.*
                     from (select j.inbox_id, j.answer, j.digest, 1 as o
                             from waypost.inbox j
                            where j.tenant_id = t.tenant_id and j.sender = t.sender
                              and j.source = t.source and j.event_id = t.event_id
                            union all
                           select j.inbox_id, j.answer, j.digest, 2
                             from waypost.inbox j
                            where j.tenant_id = t.tenant_id and j.sender = t.sender
                              and j.webhook_id = t.webhook_id) h
                    order by h.o
                    limit 1) i on true) a;

    if 'again' = any(v_outcome) then
        raise exception 'a duplicate disappeared'
              using errcode = '40001';
    end if;
    if v_new = '{}' then
        return query
        select s.ord::int, s.o, s.i, s.a
          from unnest(v_outcome, v_inbox, v_answer) with ordinality as s(o, i, a, ord);
        return;
    end if;

    -- 4. Who gets what. Addresses never change, and the waits of a locked key do not. New events of a key go
    --    to each execution's open waits, oldest first, one event a wait.
    select array_agg(a.tenant_id), array_agg(a.execution_id), array_agg(a.inbox_id), array_agg(a.epoch),
           array_agg(a.path), array_agg(a.wait)
      into v_to_tenant, v_to, v_to_inbox, v_to_epoch, v_to_path, v_to_wait
      from (select t.tenant_id,
                   coalesce(o.execution_id, x.execution_id) as execution_id,
                   t.inbox_id,
                   coalesce(o.epoch, t.epoch) as epoch,
                   coalesce(o.path, t.path) as path,
                   null::text as wait
              from unnest(p_tenant, p_kind, p_causation, p_execution, p_epoch, p_path, v_inbox, v_outcome)
                   as t(tenant_id, kind, causation, execution_id, epoch, path, inbox_id, outcome)
              left join waypost.outbox o
                on t.kind = 'reply' and o.tenant_id = t.tenant_id and o.message_id = t.causation
              left join waypost.execution x
                on t.kind <> 'event' and x.tenant_id = t.tenant_id and x.execution_id = t.execution_id
             where t.outcome = 'stored'
               and t.kind <> 'event'
               and (o.message_id is not null or x.execution_id is not null)
             union all
            select q.tenant_id, w.execution_id, w.event, w.epoch, w.path, w.path
              from (select t.tenant_id, t.type, t.key, array_agg(t.inbox_id order by t.inbox_id) as events
                      from unnest(p_tenant, p_kind, p_type, p_key, v_inbox, v_outcome)
                           as t(tenant_id, kind, type, key, inbox_id, outcome)
                     where t.kind = 'event'
                       and t.outcome = 'stored'
                     group by 1, 2, 3) q
             cross join lateral (
                   select z.execution_id, z.epoch, z.path, q.events[z.n] as event
                     from (select w.execution_id, w.epoch, w.path,
                                  row_number() over (partition by w.execution_id order by w.wait_id) as n
                             from waypost.wait w
                            where w.tenant_id = q.tenant_id
                              and w.type = q.type
                              and w.key = q.key
                              and w.inbox_id is null) z
                    where z.n <= cardinality(q.events)) w) a;
    -- stop: addressed

    if v_to is not null then
        -- 5. Lock the rows of all who get something, sorted.
        perform 1
           from waypost.execution e
          where (e.tenant_id, e.execution_id) in (select * from unnest(v_to_tenant, v_to))
          order by e.tenant_id, e.execution_id
            for no key update of e;
        -- stop: rows locked

        -- 6. Number the mail, count it, wake its execution. A finished one is counted and never woken; a
        --    paused or held one is woken by orders only. A reply ends its message: no try follows it.
        with m as materialized (
            select t.*, i.kind, i.type, i.key,
                   row_number() over (partition by t.tenant_id, t.execution_id order by t.inbox_id) as n
              from unnest(v_to_tenant, v_to, v_to_inbox, v_to_epoch, v_to_path)
                   as t(tenant_id, execution_id, inbox_id, epoch, path)
              join waypost.inbox i on i.inbox_id = t.inbox_id
        ),
        c as (
            select m.tenant_id, m.execution_id, count(*)::int as n,
                   (count(*) filter (where m.kind = 'order'))::int as orders
              from m
             group by 1, 2
        ),
        u as (
            update waypost.execution e
               set mail_received   = e.mail_received + c.n,
                   orders_received = e.orders_received + c.orders,
                   wake_at         = case when e.status in ('completed', 'compensated', 'failed', 'cancelled')
                                            or (e.status in ('paused', 'held') and c.orders = 0)
                                          then e.wake_at
                                          else least(e.wake_at, v_now) end
              from c
             where e.tenant_id = c.tenant_id
               and e.execution_id = c.execution_id
         returning e.tenant_id, e.execution_id, e.mail_received - c.n as before
        ),
        f as (
            update waypost.wait w
               set inbox_id = t.inbox_id
              from unnest(v_to_tenant, v_to, v_to_wait, v_to_inbox)
                   as t(tenant_id, execution_id, path, inbox_id)
             where t.path is not null
               and w.tenant_id = t.tenant_id
               and w.execution_id = t.execution_id
               and w.path = t.path
        ),
        k as (
            update waypost.inbox i
               set taken = true
             where v_events
               and i.inbox_id = any(v_to_inbox)
               and (i.kind = 'event' and not i.taken) is true
        ),
        r as (
            update waypost.outbox o
               set replied = true,
                   state   = case when o.state in ('due', 'expired') then 'delivered' else o.state end
              from unnest(p_tenant, p_kind, p_causation, v_outcome) as t(tenant_id, kind, causation, outcome)
             where t.kind = 'reply'
               and t.outcome = 'stored'
               and o.tenant_id = t.tenant_id
               and o.message_id = t.causation
               and not o.replied
               and o.state in ('due', 'sending', 'stopping', 'expired')
        )
        insert into waypost.mail
               (tenant_id, execution_id, mail_number, inbox_id, is_order, epoch, path, type, key)
        select m.tenant_id, m.execution_id, u.before + m.n, m.inbox_id, m.kind = 'order', m.epoch, m.path,
               case when m.kind = 'event' then m.type end,
               case when m.kind = 'event' then m.key end
          from m
          join u using (tenant_id, execution_id);
    end if;

    return query
    select s.ord::int, s.o, s.i, s.a
      from unnest(v_outcome, v_inbox, v_answer) with ordinality as s(o, i, a, ord);
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
