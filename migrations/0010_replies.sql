-- compatible: yes
--
-- Replies that are checked where they are stored. The receiver asked the database first which commands the replies of a
-- batch name, of which type they are and who may answer them: a second statement for each batch, which read every
-- command as JSON. The one door for mail looks that up anyway.
--
-- And mail is numbered without a join of the batch with itself: with hash joins switched off, that took as many steps as
-- the batch has items, squared.


-- Whether the event in `body`, which we made, is of this type. Our encoding has no blanks, and the attributes in one
-- order, data behind them; a quote inside a text is escaped. So the first `,"type":` is the attribute.
create function waypost.is_of_type(body bytea, type text) returns boolean
language sql immutable parallel safe
return position(convert_to(',"type":' || to_json(type), 'UTF8') in body)
       = nullif(position('\x2c2274797065223a'::bytea in body), 0);


drop function waypost.post_mail(
    int[], text[], text[], text[], text[], text[], text[], text[], bytea[], jsonb[], uuid[], uuid[], int[], text[],
    bytea[], uuid[], bigint[], bigint[], interval, timestamptz, text[]);

-- The one door for mail, as 0002, 0005 and 0007 describe it. New here: `p_command`, of a reply the type of the command
-- that it means to answer. With it, a reply to a message of ours is stored only when its sender may answer that message
-- (else its outcome is 'foreign') and when the message is of that type (else 'misfit', as is what names a message and is
-- no reply). Without it, whoever calls has looked.
create function waypost.post_mail(
    p_tenant int[], p_kind text[], p_sender text[], p_source text[], p_event text[], p_webhook text[],
    p_type text[], p_key text[], p_digest bytea[], p_data jsonb[],
    p_causation uuid[], p_execution uuid[], p_epoch int[], p_path text[],
    p_body bytea[] default null,
    p_from uuid[] default null, p_from_position bigint[] default null, p_from_fence bigint[] default null,
    p_shelf interval default interval '7 days', p_now timestamptz default null,
    p_trace text[] default null, p_command text[] default null
) returns table (item int, outcome text, inbox_id bigint, answer text)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
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
    --    comes from, and a reply only if it fits the message that it names.
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
                      p_data, p_body, p_causation, p_execution, p_command)
               with ordinality as t(tenant_id, kind, sender, source, event_id, webhook_id, type, key, digest,
                                    data, body, causation, execution_id, command, ord)
          left join waypost.outbox o
            on o.tenant_id = t.tenant_id and o.message_id = t.causation and o.command
          left join waypost.endpoint e
            on p_command is not null and e.tenant_id = o.tenant_id and e.name = o.endpoint
          left join waypost.execution x
            on t.kind <> 'event' and x.tenant_id = t.tenant_id and x.execution_id = t.execution_id
         where (p_from is null
                or p_from[t.ord] is null
                or exists (select 1
                             from waypost.journal g
                            where g.tenant_id = t.tenant_id
                              and g.execution_id = p_from[t.ord]
                              and g.position = p_from_position[t.ord]
                              and g.fence = p_from_fence[t.ord]))
           and (p_command is null
                or o.message_id is null
                or (t.kind = 'reply'
                    and t.sender = coalesce(e.replies_from, o.endpoint)
                    and waypost.is_of_type(o.body, t.command)))
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
                          when a.inbox_id is null
                               then coalesce((select case when a.sender = coalesce(e.replies_from, o.endpoint)
                                                          then 'misfit' else 'foreign' end
                                                from waypost.outbox o
                                                left join waypost.endpoint e
                                                  on e.tenant_id = o.tenant_id and e.name = o.endpoint
                                               where p_command is not null
                                                 and o.tenant_id = a.tenant_id
                                                 and o.message_id = p_causation[a.ord]
                                                 and o.command), 'again')
                          when a.n = 1 and a.inbox_id = any(v_new) then 'stored'
                          when a.same then 'duplicate'
                          else 'conflict' end
                     order by a.ord)
      into v_inbox, v_answer, v_outcome
      from (select t.ord, t.tenant_id, t.sender, i.inbox_id, i.answer, i.digest = t.digest as same,
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

    -- 4. Who gets what: as it was answered, though an execution may have been created meanwhile. Addresses never
    --    change, and the waits of a locked key do not. New events of a key go to each execution's open waits,
    --    oldest first, one event a wait.
    select array_agg(a.tenant_id), array_agg(a.execution_id), array_agg(a.inbox_id), array_agg(a.epoch),
           array_agg(a.path), array_agg(a.wait)
      into v_to_tenant, v_to, v_to_inbox, v_to_epoch, v_to_path, v_to_wait
      from (select t.tenant_id,
                   coalesce(o.execution_id, x.execution_id) as execution_id,
                   t.inbox_id,
                   coalesce(o.epoch, t.epoch) as epoch,
                   coalesce(o.path, t.path) as path,
                   null::text as wait
              from unnest(p_tenant, p_kind, p_causation, p_execution, p_epoch, p_path, v_inbox, v_outcome, v_answer)
                   as t(tenant_id, kind, causation, execution_id, epoch, path, inbox_id, outcome, answer)
              left join waypost.outbox o
                on t.kind = 'reply' and o.tenant_id = t.tenant_id and o.message_id = t.causation and o.command
              left join waypost.execution x
                on t.kind <> 'event' and x.tenant_id = t.tenant_id and x.execution_id = t.execution_id
             where t.outcome = 'stored'
               and t.answer = 'mail'
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

    -- 5. Lock the rows of all who get something, sorted.
    if v_to is not null then
        perform 1
           from waypost.execution e
          where (e.tenant_id, e.execution_id) in (select * from unnest(v_to_tenant, v_to))
          order by e.tenant_id, e.execution_id
            for no key update of e;
    end if;
    -- stop: rows locked

    -- 6. Create the executions that new events start.
    if v_events then
        perform waypost.start_by_events(array_agg(t.inbox_id), array_agg(t.trace), v_now)
           from unnest(p_tenant, p_kind, p_type, p_trace, v_inbox, v_outcome)
                as t(tenant_id, kind, type, trace, inbox_id, outcome)
          where t.kind = 'event'
            and t.outcome = 'stored'
            and (select true
                   from waypost.trigger g
                  where g.tenant_id = t.tenant_id
                    and g.type = t.type
                  limit 1)
         having count(*) > 0;
    end if;
    -- stop: created

    if v_to is not null then
        -- 7. Number the mail, count it, wake its execution. A finished one is counted and never woken; a
        --    paused or held one is woken by orders only. A reply ends its message: no try follows it.
        with c as (
            select m.tenant_id, m.execution_id, count(*)::int as n,
                   (count(*) filter (where m.kind = 'order'))::int as orders,
                   array_agg(m.inbox_id) as inboxes, array_agg(m.kind) as kinds, array_agg(m.epoch) as epochs,
                   array_agg(m.path) as paths, array_agg(m.type) as types, array_agg(m.key) as keys
              from (select t.*, i.kind, i.type, i.key
                      from unnest(v_to_tenant, v_to, v_to_inbox, v_to_epoch, v_to_path)
                           as t(tenant_id, execution_id, inbox_id, epoch, path)
                      join waypost.inbox i on i.inbox_id = t.inbox_id
                     order by t.inbox_id) m
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
         returning e.tenant_id, e.execution_id, e.mail_received - c.n as before, c.inboxes, c.kinds,
                   c.epochs, c.paths, c.types, c.keys
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
               and o.command
               and not o.replied
               and o.state in ('due', 'sending', 'stopping', 'expired')
        )
        insert into waypost.mail
               (tenant_id, execution_id, mail_number, inbox_id, is_order, epoch, path, type, key)
        select u.tenant_id, u.execution_id, u.before + m.n, m.inbox_id, m.kind = 'order', m.epoch, m.path,
               case when m.kind = 'event' then m.type end,
               case when m.kind = 'event' then m.key end
          from u
         cross join unnest(u.inboxes, u.kinds, u.epochs, u.paths, u.types, u.keys)
               with ordinality as m(inbox_id, kind, epoch, path, type, key, n);
    end if;

    return query
    select s.ord::int, s.o, s.i, s.a
      from unnest(v_outcome, v_inbox, v_answer) with ordinality as s(o, i, a, ord);
end $$;
