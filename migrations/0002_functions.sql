-- compatible: no
--
-- The functions that write for more than one caller. Each keeps the lock order of 0001, takes arrays, and
-- works on the whole set at once. Two things are true of all of them:
--
-- Each fixes its plans by switching off sequential scans, hash and merge joins. plpgsql keeps a generic plan
-- that it made while the tables were empty; without this, a hundred replies at a time went in at 459/s until
-- something analysed the tables, and with it at 13,592/s.
--
-- A comment `stop: <name>` marks a place between two statements where another transaction may cut in. Tests
-- that try every order of two transactions stop there.


-- What the advisory lock of an event key, or of a webhook id, is taken on. Lengths keep ('a:b', 'c') and
-- ('a', 'b:c') apart; a collision of the hash costs a wait, never an error.
create function waypost.event_key(tenant_id int, type text, key text) returns bigint
language sql immutable parallel safe
return hashtextextended(
           tenant_id || ':' || length(type) || ':' || type || ':' || length(key) || ':' || key, 0);


-- Every event that is stored from now on has a greater inbox_id.
create function waypost.inbox_mark() returns bigint
language sql volatile
return (select case when is_called then last_value else 0 end from waypost.inbox_inbox_id_seq);


-- Locks event keys, sorted, until the transaction ends. A statement of its own: what it protects is read
-- after it.
create function waypost.lock_keys(p_tenant int[], p_type text[], p_key text[]) returns void
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
    perform pg_advisory_xact_lock(s.k)
       from (select distinct waypost.event_key(t.tenant_id, t.type, t.key) as k
               from unnest(p_tenant, p_type, p_key) as t(tenant_id, type, key)
              order by 1) s;
end $$;


-- Locks execution rows, sorted, until the transaction ends. All that the transaction will touch, in one call.
create function waypost.lock_rows(p_tenant int[], p_execution uuid[]) returns void
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
    perform 1
       from waypost.execution e
      where (e.tenant_id, e.execution_id) in (select * from unnest(p_tenant, p_execution))
      order by e.tenant_id, e.execution_id
        for no key update of e;
end $$;


-- The one door for mail. Item n of the answer speaks of item n of the arrays:
--
--     stored      it is new; `answer` says what became of it: mail to an execution, event, or unmatched
--     duplicate   it was here before, with the same digest; `answer` is what the first one got
--     conflict    it was here before under this id or webhook id, with another digest; nothing is written
--     stale       it comes from an execution whose journal has no such fact (its writer lost its lease)
--
-- `p_causation` addresses a reply by the message it answers; `p_execution`, with epoch and path, addresses
-- all other mail; an event is addressed by type and key. `p_from`, its position and its fence name the fact
-- of the execution that the mail comes from, if it comes from one. Raises 25001 outside READ COMMITTED, 42501
-- for a reserved source that is not ours, and 40001 (to be repeated) when the first of a duplicate was
-- deleted meanwhile.
create function waypost.post_mail(
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
            select q.tenant_id, w.execution_id, w.event, null, null, w.path
              from (select i.tenant_id, i.type, i.key, array_agg(i.inbox_id order by i.inbox_id) as events
                      from waypost.inbox i
                     where v_events
                       and i.inbox_id = any(v_new)
                       and i.kind = 'event'
                     group by 1, 2, 3) q
             cross join lateral (
                   select z.execution_id, z.path, q.events[z.n] as event
                     from (select w.execution_id, w.path,
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
               and i.kind = 'event'
               and not i.taken
               and i.inbox_id = any(v_to_inbox)
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


-- Tells executions what became of their messages, where no reply did. At most once per message: the id says
-- so. The callers hold the rows of all who get it.
create function waypost.post_settled(
    p_tenant int[], p_message uuid[], p_execution uuid[], p_epoch int[], p_path text[], p_answer jsonb[],
    p_now timestamptz
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
                p_tenant    => p_tenant,
                p_kind      => array_fill('result'::text, array[v_count]),
                p_sender    => array_fill('waypost'::text, array[v_count]),
                p_source    => array_fill('waypost:outbox'::text, array[v_count]),
                p_event     => array(select m || '/settled'
                                       from unnest(p_message) with ordinality as s(m, o)
                                      order by o),
                p_webhook   => v_none,
                p_type      => v_none,
                p_key       => v_none,
                p_digest    => array(select sha256(convert_to(a::text, 'UTF8'))
                                       from unnest(p_answer) with ordinality as s(a, o)
                                      order by o),
                p_data      => p_answer,
                p_causation => array_fill(null::uuid, array[v_count]),
                p_execution => p_execution,
                p_epoch     => p_epoch,
                p_path      => p_path,
                p_now       => p_now);
end $$;


-- Takes messages back that a program does not want sent any more. Called by a commit, after its own
-- statement: the execution rows are locked, and an item counts only if the commit's fact (position, fence) is
-- there.
--
--     due or expired, never reached   withdrawn   mail: refused, never-sent
--     due or expired, maybe reached   stopped     mail: unknown, sent
--     sending                         stopping    mail comes when the try ends
--     delivered                       delivered   mail: unknown, sent
--
-- Returns how many got their mail.
create function waypost.take_back(
    p_tenant int[], p_execution uuid[], p_position bigint[], p_fence bigint[], p_message uuid[],
    p_now timestamptz default null
) returns int
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    a_tenant    int[];
    a_message   uuid[];
    a_execution uuid[];
    a_epoch     int[];
    a_path      text[];
    a_answer    jsonb[];
begin
    perform 1
       from waypost.outbox o
      where (o.tenant_id, o.message_id) in (select * from unnest(p_tenant, p_message))
      order by o.tenant_id, o.message_id
        for no key update of o;
    -- stop: messages locked

    with s as (
        update waypost.outbox o
           set state = case when o.state = 'sending' then 'stopping'
                            when o.state = 'delivered' then 'delivered'
                            when o.reached then 'stopped'
                            else 'withdrawn' end
          from unnest(p_tenant, p_execution, p_position, p_fence, p_message)
               as t(tenant_id, execution_id, position, fence, message_id)
          join waypost.journal g
            on g.tenant_id = t.tenant_id
           and g.execution_id = t.execution_id
           and g.position = t.position
           and g.fence = t.fence
         where o.tenant_id = t.tenant_id
           and o.message_id = t.message_id
           and o.execution_id = t.execution_id
           and o.state in ('due', 'expired', 'sending', 'delivered')
     returning o.*
    )
    select array_agg(s.tenant_id), array_agg(s.message_id), array_agg(s.execution_id), array_agg(s.epoch),
           array_agg(s.path),
           array_agg(case when s.state = 'withdrawn'
                               then '{"outcome": "refused", "code": "never-sent"}'::jsonb
                          else '{"outcome": "unknown", "code": "sent"}' end)
      into a_tenant, a_message, a_execution, a_epoch, a_path, a_answer
      from s
     where s.state <> 'stopping'
       and s.command;
    -- stop: taken back

    perform waypost.post_settled(a_tenant, a_message, a_execution, a_epoch, a_path, a_answer, p_now);
    return coalesce(cardinality(a_tenant), 0);
end $$;


-- Ends tries of a relay. `p_outcome` is delivered, retry (to be due at `p_due`), refused (with `p_answer`),
-- or unknown (tries are at an end); `p_reached` says whether this try may have reached the service. Returns
-- the messages whose claim still had `p_token`; for the others somebody else has ended the try meanwhile, and
-- nothing is written.
--
--     sending    a reply came                    delivered
--                delivered                       delivered
--                refused                         refused     mail: refused if not reached before, else unknown
--                retry, not at most once         due
--                retry or unknown, maybe there   dead        mail: unknown, sent
--                retry or unknown, never there   refused     mail: refused, never-sent
--     stopping   delivered                       delivered   mail: unknown, sent
--                refused                         refused     mail: refused if not reached before, else unknown
--                retry or unknown, maybe there   stopped     mail: unknown, sent
--                retry or unknown, never there   withdrawn   mail: refused, never-sent
create function waypost.settle(
    p_tenant int[], p_message uuid[], p_token uuid[], p_outcome text[], p_reached boolean[],
    p_due timestamptz[], p_answer jsonb[], p_now timestamptz default null
) returns table (tenant_id int, message_id uuid, state text)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    a_tenant    int[];
    a_message   uuid[];
    a_execution uuid[];
    a_epoch     int[];
    a_path      text[];
    a_answer    jsonb[];
    b_tenant    int[];
    b_message   uuid[];
    b_state     text[];
begin
    perform 1
       from waypost.execution e
      where (e.tenant_id, e.execution_id) in
            (select o.tenant_id, o.execution_id
               from unnest(p_tenant, p_message) as t(tenant_id, message_id)
               join waypost.outbox o on o.tenant_id = t.tenant_id and o.message_id = t.message_id)
      order by e.tenant_id, e.execution_id
        for no key update of e;
    -- stop: rows locked

    perform 1
       from waypost.outbox o
      where (o.tenant_id, o.message_id) in (select * from unnest(p_tenant, p_message))
      order by o.tenant_id, o.message_id
        for no key update of o;
    -- stop: messages locked

    with old as materialized (
        select o.*, t.outcome, t.due, t.answer,
               o.reached or t.reached or t.outcome = 'delivered' as any_reached
          from unnest(p_tenant, p_message, p_token, p_outcome, p_reached, p_due, p_answer)
               as t(tenant_id, message_id, token, outcome, reached, due, answer)
          join waypost.outbox o
            on o.tenant_id = t.tenant_id
           and o.message_id = t.message_id
           and o.token = t.token
           and o.state in ('sending', 'stopping')
    ),
    d as materialized (
        select old.*,
               case when old.outcome = 'delivered' or (old.replied and old.state = 'sending') then 'delivered'
                    when old.outcome = 'refused' then 'refused'
                    when old.state = 'stopping' then
                         case when old.any_reached then 'stopped' else 'withdrawn' end
                    when old.outcome = 'retry' and not old.at_most_once then 'due'
                    when old.any_reached then 'dead'
                    else 'refused' end as next
          from old
    ),
    s as (
        update waypost.outbox o
           set state       = d.next,
               reached     = d.any_reached,
               token       = null,
               lease_until = null,
               due_at      = case when d.next = 'due' then d.due else o.due_at end
          from d
         where o.tenant_id = d.tenant_id
           and o.message_id = d.message_id
     returning o.tenant_id, o.message_id, o.execution_id, o.epoch, o.path, o.state,
               case when not o.command or (d.state = 'sending' and o.state in ('due', 'delivered')) then null
                    when d.outcome = 'refused' and not d.reached then
                         coalesce(d.answer, '{}') || '{"outcome": "refused"}'
                    when not d.any_reached then '{"outcome": "refused", "code": "never-sent"}'::jsonb
                    else '{"outcome": "unknown", "code": "sent"}' end as answer
    )
    select array_agg(s.tenant_id) filter (where s.answer is not null),
           array_agg(s.message_id) filter (where s.answer is not null),
           array_agg(s.execution_id) filter (where s.answer is not null),
           array_agg(s.epoch) filter (where s.answer is not null),
           array_agg(s.path) filter (where s.answer is not null),
           array_agg(s.answer) filter (where s.answer is not null),
           array_agg(s.tenant_id), array_agg(s.message_id), array_agg(s.state)
      into a_tenant, a_message, a_execution, a_epoch, a_path, a_answer, b_tenant, b_message, b_state
      from s;
    -- stop: settled

    perform waypost.post_settled(a_tenant, a_message, a_execution, a_epoch, a_path, a_answer, p_now);
    return query
    select * from unnest(b_tenant, b_message, b_state);
end $$;


-- Ends tries whose relay is silent. The message may have reached the service: a keyed one is due again, one
-- that is sent at most once is dead (its execution learns that the outcome is unknown), one that was being
-- taken back is stopped. Returns how many claims ended, at most `p_limit`.
create function waypost.expire_claims(p_limit int, p_now timestamptz default null) returns int
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_now       timestamptz := coalesce(p_now, clock_timestamp());
    c_tenant    int[];
    c_message   uuid[];
    c_execution uuid[];
    a_tenant    int[];
    a_message   uuid[];
    a_execution uuid[];
    a_epoch     int[];
    a_path      text[];
    a_answer    jsonb[];
    v_count     int;
begin
    select array_agg(c.tenant_id), array_agg(c.message_id), array_agg(c.execution_id)
      into c_tenant, c_message, c_execution
      from (select o.tenant_id, o.message_id, o.execution_id
              from waypost.outbox o
             where o.state in ('sending', 'stopping')
               and o.lease_until < v_now
             order by o.lease_until
             limit p_limit) c;
    if c_tenant is null then
        return 0;
    end if;
    -- stop: expired claims seen

    perform waypost.lock_rows(c_tenant, c_execution);
    -- stop: rows locked

    perform 1
       from waypost.outbox o
      where (o.tenant_id, o.message_id) in (select * from unnest(c_tenant, c_message))
      order by o.tenant_id, o.message_id
        for no key update of o;
    -- stop: messages locked

    -- Looks again under the locks: a try may have been settled while we waited for them.
    with old as materialized (
        select o.*
          from unnest(c_tenant, c_message) as t(tenant_id, message_id)
          join waypost.outbox o using (tenant_id, message_id)
         where o.state in ('sending', 'stopping')
           and o.lease_until < v_now
    ),
    s as (
        update waypost.outbox o
           set reached     = true,
               token       = null,
               lease_until = null,
               state       = case when old.state = 'stopping' then 'stopped'
                                  when old.replied then 'delivered'
                                  when old.at_most_once then 'dead'
                                  else 'due' end,
               due_at      = case when old.state = 'sending' and not old.at_most_once then v_now
                                  else o.due_at end
          from old
         where o.tenant_id = old.tenant_id
           and o.message_id = old.message_id
     returning o.tenant_id, o.message_id, o.execution_id, o.epoch, o.path,
               o.command and o.state in ('stopped', 'dead') as tells
    )
    select array_agg(s.tenant_id) filter (where s.tells),
           array_agg(s.message_id) filter (where s.tells),
           array_agg(s.execution_id) filter (where s.tells),
           array_agg(s.epoch) filter (where s.tells),
           array_agg(s.path) filter (where s.tells),
           array_agg('{"outcome": "unknown", "code": "sent"}'::jsonb) filter (where s.tells),
           count(*)
      into a_tenant, a_message, a_execution, a_epoch, a_path, a_answer, v_count
      from s;
    -- stop: claims expired

    perform waypost.post_settled(a_tenant, a_message, a_execution, a_epoch, a_path, a_answer, p_now);
    return v_count;
end $$;


-- Creates executions, each with its row and its first fact in one statement. Item n of the answer speaks of
-- item n:
--
--     started    it is new
--     exists     its business key is taken by an execution with the same input (the answer names it)
--     conflict   its business key, or its id, is taken by an execution with another input
--     again      whoever had the key was deleted meanwhile: to be repeated
--
-- `p_started` is the payload of the fact `started`. Ids within one call differ.
create function waypost.start_executions(
    p_tenant int[], p_execution uuid[], p_definition text[], p_version text[], p_business text[],
    p_digest bytea[], p_started jsonb[], p_traceparent text[], p_now timestamptz default null
) returns table (item int, outcome text, execution_id uuid)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz := coalesce(p_now, now());
    v_new uuid[];
begin
    with new as (
        insert into waypost.execution as e
               (tenant_id, execution_id, definition, version, business_key, input_digest, wake_at, position,
                events_after, traceparent, created_at)
        select t.tenant_id, t.execution_id, t.definition, t.version, t.business_key, t.digest, v_now, 1,
               waypost.inbox_mark(), t.traceparent, v_now
          from unnest(p_tenant, p_execution, p_definition, p_version, p_business, p_digest, p_traceparent)
               with ordinality as t(tenant_id, execution_id, definition, version, business_key, digest,
                                    traceparent, ord)
         order by t.tenant_id, t.definition collate "C", t.business_key collate "C", t.execution_id, t.ord
            on conflict do nothing
     returning e.tenant_id, e.execution_id
    ),
    first as (
        insert into waypost.journal (tenant_id, execution_id, position, fence, kind, payload, at)
        select new.tenant_id, new.execution_id, 1, 0, 'started', t.started, v_now
          from new
          join unnest(p_tenant, p_execution, p_started) as t(tenant_id, execution_id, started)
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
                else 'conflict' end,
           h.execution_id
      from unnest(p_tenant, p_execution, p_definition, p_business, p_digest)
           with ordinality as t(tenant_id, execution_id, definition, business_key, digest, ord)
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
