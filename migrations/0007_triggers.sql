-- compatible: yes
--
-- Events that start flows. A flow that names an event (`on=`) has a row in `trigger`, written by the workers that hold
-- it; and the transaction that stores a new event creates the executions that its type starts. So nothing else has to
-- look at events, and an event that was acknowledged has started what it starts.
--
-- ONCE FOR EACH KEY. The business key of the execution is the event's subject, or a part of its data. Of two events
-- with one key the first starts the execution, and the second is an event like any other. An event without a key starts
-- an execution without one; each event comes once anyway.
--
-- THE EVENT THAT STARTED AN EXECUTION IS ITS INPUT, and not its mail. It counts as taken, and `events_after` is its own
-- inbox_id: so no wait of that execution gets it, and every event that came after it may be got.
--
-- THE NEWEST VERSION IS STARTED: the one whose row in `definition` has the greatest number, among those that are
-- published. A worker that holds an older one, and registers later, changes nothing.
--
-- LOCK ORDER. Executions are created after the rows of existing ones are locked and before those of the outbox, in one
-- statement sorted by (tenant, definition, business key), as start_executions does: a transaction that waits for
-- another one's key holds no message. (Whoever creates an execution while it holds another one's row keeps the same
-- order.)


-- Grows with each version as it becomes known: the newest has the greatest.
alter table waypost.definition add column number bigint generated always as identity;


-- One row per flow that an event starts.
create table waypost.trigger (
    tenant_id   int         not null,
    definition  text        collate "C" not null,
    version     text        collate "C" not null,       -- that new executions begin with
    type        text        collate "C" not null,       -- of the events that start it
    key_pointer text        collate "C",                -- where in their data the business key is; null: their subject
    changed_at  timestamptz not null default now(),

    primary key (tenant_id, definition),
    foreign key (tenant_id, definition, version) references waypost.definition (tenant_id, name, version),
    constraint key_is_a_pointer check (key_pointer ^@ '/'),
    constraint keys_are_bounded check
        (octet_length(type) between 1 and 512 and octet_length(key_pointer) between 2 and 1024)
);

-- Serves post_mail: what an event of a type starts.
create index trigger_type on waypost.trigger (tenant_id, type);


-- The steps of a JSON pointer (RFC 6901), as the operator `#>` takes them.
create function waypost.steps_of(pointer text) returns text[]
language sql immutable parallel safe
return (select array_agg(replace(replace(s.step, '~1', '/'), '~0', '~') order by s.n)
          from unnest(string_to_array(substr(pointer, 2), '/')) with ordinality as s(step, n));


-- A new id that grows with time (RFC 9562, version 7): milliseconds, then chance.
create function waypost.new_id() returns uuid
language sql volatile
return encode(
    set_bit(set_bit(
        overlay(uuid_send(gen_random_uuid())
                placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                from 1 for 6),
        52, 1), 53, 1),
    'hex')::uuid;


-- The traceparent of an execution, as contracts/trace.py makes it: a span in the trace of `parent`, or, when that is no
-- traceparent, the root of a trace of its own.
create function waypost.trace_of(execution_id uuid, parent text) returns text
language sql immutable parallel safe
return case when parent ~ '^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[01]$'
            then left(parent, 36)
                 || left(encode(sha256(convert_to(substr(parent, 4, 32) || '/' || execution_id, 'UTF8')), 'hex'), 16)
                 || right(parent, 3)
            else (select '00-' || left(s.h, 32) || '-' || substr(s.h, 33, 16) || '-01'
                    from encode(sha256(convert_to(execution_id::text, 'UTF8')), 'hex') as s(h)) end;


-- Creates the executions that new events start: row and first fact, as start_executions does. `p_trace` has the
-- traceparent of each event. What makes no key (no text and no number, empty, longer than 1024 bytes, with control
-- characters) is none.
create function waypost.start_by_events(p_inbox bigint[], p_trace text[], p_now timestamptz) returns void
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
    with s as materialized (
        select i.tenant_id, i.inbox_id, i.sender, i.source, i.event_id, i.type, i.digest, t.trace,
               coalesce(i.data, 'null') as input, g.definition, g.version, k.key, waypost.new_id() as execution_id
          from unnest(p_inbox, p_trace) as t(inbox_id, trace)
          join waypost.inbox i on i.inbox_id = t.inbox_id
          join waypost.trigger g on g.tenant_id = i.tenant_id and g.type = i.type
          left join lateral
               (select c.key
                  from (select case when g.key_pointer is null then i.key
                                    when jsonb_typeof(i.data #> waypost.steps_of(g.key_pointer)) in ('string', 'number')
                                    then i.data #>> waypost.steps_of(g.key_pointer) end as key) c
                 where octet_length(c.key) between 1 and 1024
                   and c.key !~ '[\u0001-\u001f\u007f-\u009f]') k on true
    ),
    new as (
        insert into waypost.execution as e
               (tenant_id, execution_id, definition, version, business_key, input_digest, wake_at, position,
                events_after, traceparent, created_at)
        select s.tenant_id, s.execution_id, s.definition, s.version, s.key, s.digest, p_now, 1, s.inbox_id,
               waypost.trace_of(s.execution_id, s.trace), p_now
          from s
         order by s.tenant_id, s.definition collate "C", s.key collate "C", s.inbox_id
            on conflict do nothing
     returning e.tenant_id, e.execution_id, e.events_after, e.traceparent
    ),
    first as (
        insert into waypost.journal (tenant_id, execution_id, position, fence, kind, payload, actor, at)
        select new.tenant_id, new.execution_id, 1, 0, 'started',
               jsonb_build_object(
                   'input', s.input,
                   'definition', s.definition,
                   'version', s.version,
                   'seed', encode(substr(sha256(uuid_send(gen_random_uuid())), 1, 8), 'hex'),
                   'key', s.key,
                   'traceparent', new.traceparent,
                   'event', jsonb_build_object('sender', s.sender, 'source', s.source, 'id', s.event_id,
                                               'type', s.type, 'inbox_id', s.inbox_id, 'traceparent', s.trace)),
               'sender:' || s.sender, p_now
          from new
          join s on s.execution_id = new.execution_id
    )
    update waypost.inbox i
       set taken = true
     where i.inbox_id in (select new.events_after from new);
end $$;


drop function waypost.post_mail(
    int[], text[], text[], text[], text[], text[], text[], text[], bytea[], jsonb[], uuid[], uuid[], int[], text[],
    bytea[], uuid[], bigint[], bigint[], interval, timestamptz);

-- The one door for mail, as 0002 describes it. New here: mail of an event names the wait that it fills, as 0005 says;
-- a new event creates the executions that it starts; `p_trace` has the traceparents of events. And what is answered holds: an execution that is created while mail for it
-- is being stored as unmatched does not get it.
create function waypost.post_mail(
    p_tenant int[], p_kind text[], p_sender text[], p_source text[], p_event text[], p_webhook text[],
    p_type text[], p_key text[], p_digest bytea[], p_data jsonb[],
    p_causation uuid[], p_execution uuid[], p_epoch int[], p_path text[],
    p_body bytea[] default null,
    p_from uuid[] default null, p_from_position bigint[] default null, p_from_fence bigint[] default null,
    p_shelf interval default interval '7 days', p_now timestamptz default null,
    p_trace text[] default null
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
                on t.kind = 'reply' and o.tenant_id = t.tenant_id and o.message_id = t.causation
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
