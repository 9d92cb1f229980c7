-- compatible: yes
--
-- Lanes: messages of one endpoint that arrive in the order in which they were made. And what people do about dead
-- letters.
--
-- ONLY THE HEAD OF A LANE IS DUE. A message that is `ordered` and is not the first of its lane is `waiting`, so no claim
-- sees it, however many there are. When the head has ended, the next one becomes due.
--
--     insert ─▶ lane has a head? ── no ──▶ due, and it is the head
--                     └─ yes ─▶ waiting ── the head has ended (`advance_lanes`) ──▶ due
--
-- THE LANE'S ROW IS LOCKED before a message gets its number, so numbers of a lane grow in the order of commits. Whoever
-- inserts into several lanes does it sorted by endpoint and lane. A message that ends leaves a row in `lane_free`, and
-- locks no lane; whoever ended it calls `advance_lanes` after that, in a transaction of its own, and so does every sweep
-- of a relay. That transaction locks lanes, sorted, and after them messages that are waiting, which nobody else locks
-- together with a lane.
--
-- A HEAD THAT IS A DEAD LETTER stops its lane, so that nothing overtakes it, until a person puts it back or discards it;
-- or its endpoint says `skip`, and the next one goes.


alter table waypost.outbox
    add column ordered boolean not null default false,
    add constraint ordered_has_a_lane check (not ordered or lane is not null),
    drop constraint state_is_known,
    add constraint state_is_known check (state in
        ('waiting', 'due', 'sending', 'stopping', 'delivered', 'refused', 'expired', 'withdrawn', 'stopped', 'dead',
         'discarded')),
    add constraint waiting_is_ordered check (state <> 'waiting' or ordered);

-- Serves advance_lanes: the next of a lane.
create index outbox_waiting on waypost.outbox (tenant_id, endpoint, lane, number)
    where state = 'waiting';

alter table waypost.endpoint
    add column on_dead text not null default 'block',
    add constraint on_dead_is_known check (on_dead in ('block', 'skip'));


-- One row per lane that has a message: the one that may be sent.
create table waypost.lane (
    tenant_id int  not null,
    endpoint  text collate "C" not null,
    lane      text collate "C" not null,
    head      uuid not null,

    primary key (tenant_id, endpoint, lane)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 1
);


-- One row per message that has ended in a lane which was not looked at since.
create table waypost.lane_free (
    number    bigint generated always as identity primary key,
    tenant_id int  not null,
    endpoint  text collate "C" not null,
    lane      text collate "C" not null
) with (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 1
);


-- A message enters its lane, made or put back. One that is there already (an insert that will do nothing) may have
-- opened its lane again: then somebody looks.
create function waypost.enter_lane() returns trigger language plpgsql
set enable_seqscan = off
as $$
declare
    v_head uuid;
begin
    insert into waypost.lane as l (tenant_id, endpoint, lane, head)
    values (new.tenant_id, new.endpoint, new.lane, new.message_id)
        on conflict (tenant_id, endpoint, lane) do update set head = l.head
    returning l.head into v_head;
    if v_head <> new.message_id then
        new.state := 'waiting';
    end if;
    if tg_op = 'INSERT' then
        new.number := nextval('waypost.outbox_number_seq');
        insert into waypost.lane_free (tenant_id, endpoint, lane)
        select new.tenant_id, new.endpoint, new.lane
         where exists (select 1
                         from waypost.outbox o
                        where o.tenant_id = new.tenant_id
                          and o.message_id = new.message_id);
    end if;
    return new;
end $$;

create trigger enters_its_lane
    before insert on waypost.outbox
       for each row when (new.ordered and new.state = 'due')
   execute function waypost.enter_lane();

create trigger enters_its_lane_again
    before update of state on waypost.outbox
       for each row when (new.ordered and old.state = 'dead' and new.state = 'due')
   execute function waypost.enter_lane();


create function waypost.leave_lane() returns trigger language plpgsql as $$
begin
    insert into waypost.lane_free (tenant_id, endpoint, lane)
    values (new.tenant_id, new.endpoint, new.lane);
    return null;
end $$;

create trigger leaves_its_lane
    after update of state on waypost.outbox
       for each row when (new.ordered and old.state <> new.state
                          and new.state not in ('waiting', 'due', 'sending', 'stopping'))
   execute function waypost.leave_lane();


-- Lets the next message of each lane go whose head has ended; how many lanes were looked at, at most `p_limit`.
create function waypost.advance_lanes(p_limit int, p_now timestamptz default null) returns int
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_now      timestamptz := coalesce(p_now, clock_timestamp());
    v_tenant   int[];
    v_endpoint text[];
    v_lane     text[];
begin
    with freed as (
        delete from waypost.lane_free f
         where f.number in (select g.number
                              from waypost.lane_free g
                             order by g.number
                             limit p_limit
                               for update skip locked)
     returning f.tenant_id, f.endpoint, f.lane
    )
    select array_agg(s.tenant_id), array_agg(s.endpoint), array_agg(s.lane)
      into v_tenant, v_endpoint, v_lane
      from (select distinct freed.tenant_id, freed.endpoint, freed.lane from freed) s;
    if v_tenant is null then
        return 0;
    end if;
    -- stop: freed lanes seen

    perform 1
       from waypost.lane l
      where (l.tenant_id, l.endpoint, l.lane) in (select * from unnest(v_tenant, v_endpoint, v_lane))
      order by l.tenant_id, l.endpoint, l.lane
        for no key update of l;
    -- stop: lanes locked

    with moved as materialized (
        select l.tenant_id, l.endpoint, l.lane, n.message_id as next
          from unnest(v_tenant, v_endpoint, v_lane) as t(tenant_id, endpoint, lane)
          join waypost.lane l
            on l.tenant_id = t.tenant_id
           and l.endpoint = t.endpoint
           and l.lane = t.lane
          left join waypost.outbox h
            on h.tenant_id = l.tenant_id
           and h.message_id = l.head
          left join waypost.endpoint e
            on e.tenant_id = l.tenant_id
           and e.name = l.endpoint
          left join lateral
               (select o.message_id
                  from waypost.outbox o
                 where o.tenant_id = l.tenant_id
                   and o.endpoint = l.endpoint
                   and o.lane = l.lane
                   and o.state = 'waiting'
                 order by o.number
                 limit 1) n
            on true
         where (h.state in ('waiting', 'due', 'sending', 'stopping')
                or (h.state = 'dead' and h.fault <> 'skipped' and coalesce(e.on_dead, 'block') = 'block')) is not true
    ),
    gone as (
        delete from waypost.lane l
         using moved
         where moved.next is null
           and l.tenant_id = moved.tenant_id
           and l.endpoint = moved.endpoint
           and l.lane = moved.lane
    ),
    led as (
        update waypost.lane l
           set head = moved.next
          from moved
         where moved.next is not null
           and l.tenant_id = moved.tenant_id
           and l.endpoint = moved.endpoint
           and l.lane = moved.lane
    )
    update waypost.outbox o
       set state = 'due',
           due_at = greatest(o.due_at, v_now)
      from moved
     where o.tenant_id = moved.tenant_id
       and o.message_id = moved.next
       and o.state = 'waiting';
    -- stop: lanes advanced
    return cardinality(v_tenant);
end $$;


-- Puts dead letters of events back, in the order in which they were made, `p_spread` apart; which ones. Each has all its
-- tries again, and as long as it had. One that is no dead letter any more is left alone, so doing it twice is harmless.
create function waypost.put_back(
    p_tenant int, p_message uuid[], p_spread interval default interval '0', p_now timestamptz default null
) returns setof uuid
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_now   timestamptz := coalesce(p_now, clock_timestamp());
    v_count int         := 0;
    v_one   record;
begin
    perform 1
       from waypost.outbox o
      where o.tenant_id = p_tenant
        and o.message_id = any(p_message)
      order by o.tenant_id, o.message_id
        for no key update of o;
    -- stop: messages locked

    for v_one in
        select o.message_id
          from waypost.outbox o
         where o.tenant_id = p_tenant
           and o.message_id = any(p_message)
           and o.state = 'dead'
           and not o.command
         order by o.endpoint, o.lane, o.number
    loop
        update waypost.outbox o
           set state      = 'due',
               due_at     = v_now + p_spread * v_count,
               since      = v_now,
               spared     = o.attempts,
               fault      = null,
               ended_at   = null,
               expires_at = v_now + (o.expires_at - o.since)
         where o.tenant_id = p_tenant
           and o.message_id = v_one.message_id;
        v_count := v_count + 1;
        return next v_one.message_id;
    end loop;
end $$;

-- The type of the event in `body`; null of what is no event.
create function waypost.type_in(body bytea) returns text
language plpgsql immutable parallel safe
as $$
begin
    return convert_from(body, 'UTF8')::jsonb ->> 'type';
exception
    when data_exception then
        return null;
end $$;


-- WHO GETS AN EVENT: besides its exact type, a subscription may name a part of it up to a dot (`shop.order.*`), or all
-- (`*`), and attributes that the event must have. Of several of one endpoint the longest counts, once. `ordered_by`
-- says which lane its events go in: that of the event's key (its subject), or that of who sent it.
alter table waypost.subscription
    add column ordered_by text,
    add column attributes jsonb,
    add constraint order_is_known check (ordered_by in ('key', 'execution')),
    add constraint attributes_are_an_object check (jsonb_typeof(attributes) = 'object');


-- The types that subscriptions to events of `type` may name.
create function waypost.patterns_of(type text) returns text[]
language sql immutable parallel safe
return array[type, '*']
       || array(select array_to_string((string_to_array(type, '.'))[1:n], '.') || '.*'
                  from generate_series(1, cardinality(string_to_array(type, '.')) - 1) as n);


-- The endpoints that get an event; `p_body` is the event.
create function waypost.subscribers_of(p_tenant int, p_type text, p_body bytea)
returns table (endpoint text, ordered_by text)
language sql stable
set enable_seqscan = off
as $$
    select distinct on (s.endpoint) s.endpoint, s.ordered_by
      from waypost.subscription s
     where s.tenant_id = p_tenant
       and s.type = any(waypost.patterns_of(p_type))
       and (s.attributes is null or convert_from(p_body, 'UTF8')::jsonb @> s.attributes)
     order by s.endpoint, length(s.type) desc
$$;


-- Does the errands of the transaction that commits, as 0011 describes it: gives events to flows, creates executions,
-- writes messages. Fires once for each errand; the first time does them all, and the others find nothing.
create or replace function waypost.do_errands() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
declare
    v_now       timestamptz := clock_timestamp();
    v_mark      bigint      := waypost.inbox_mark();
    v_all       waypost.errand[];
    v_signals   waypost.errand[];
    v_some      waypost.errand[];
    v_rounds    int;
    v_none      text[];
    v_count     int;
    v_found     record;
    v_execute   boolean     := false;
    v_messages  uuid[];
    v_endpoints text[];
    v_lanes     text[];
    v_bodies    jsonb[];
begin
    if not exists (select 1
                     from waypost.errand e
                    where e.transaction = new.transaction
                      and e.number = new.number) then
        return null;
    end if;
    with mine as (
        delete from waypost.errand as e
         where e.transaction = pg_current_xact_id()
     returning e as errand
    )
    select array_agg(mine.errand order by (mine.errand).number)
      into v_all
      from mine;
    -- stop: errands taken

    -- 1. Events for flows. They come from inside, so their rows of the inbox may follow rows of executions. Events of
    --    one key are given in the order in which they were asked for, so the second of a key is posted after all firsts:
    --    these lock all keys, and the rows of whoever gets it.
    v_signals := array(select e from unnest(v_all) as e where e.kind = 'signal' order by e.number);
    if cardinality(v_signals) > 256 then
        raise exception 'expected at most 256 signals in one transaction, found %', cardinality(v_signals)
              using errcode = 'WP413';
    end if;
    v_rounds := (select max(q.n)
                   from (select count(*) as n from unnest(v_signals) as e group by e.name, e.key) q);
    for v_round in 1 .. coalesce(v_rounds, 0) loop
        v_some := array(select q.e
                          from (select e, row_number() over (partition by e.name, e.key order by e.number) as n
                                  from unnest(v_signals) as e) q
                         where q.n = v_round
                         order by (q.e).number);
        v_count := cardinality(v_some);
        v_none := array_fill(null::text, array[v_count]);
        select s.name, s.event_id
          into v_found
          from waypost.post_mail(
                   p_tenant    => array_fill(1, array[v_count]),
                   p_kind      => array_fill('event'::text, array[v_count]),
                   p_sender    => array_fill('waypost'::text, array[v_count]),
                   p_source    => array_fill('waypost:application'::text, array[v_count]),
                   p_event     => array(select e.event_id from unnest(v_some) as e order by e.number),
                   p_webhook   => v_none,
                   p_type      => array(select e.name from unnest(v_some) as e order by e.number),
                   p_key       => array(select coalesce(e.key, '') from unnest(v_some) as e order by e.number),
                   p_digest    => array(select sha256(convert_to(
                                                   jsonb_build_array(e.name, e.key, e.data)::text, 'UTF8'))
                                          from unnest(v_some) as e
                                         order by e.number),
                   p_data      => array(select e.data from unnest(v_some) as e order by e.number),
                   p_causation => array_fill(null::uuid, array[v_count]),
                   p_execution => array_fill(null::uuid, array[v_count]),
                   p_epoch     => array_fill(null::int, array[v_count]),
                   p_path      => v_none,
                   p_now       => v_now,
                   p_trace     => array(select e.traceparent from unnest(v_some) as e order by e.number)) p
          join (select e.name, e.event_id, row_number() over (order by e.number) as item
                  from unnest(v_some) as e) s
            on s.item = p.item
         where p.outcome = 'conflict'
         limit 1;
        if found then
            raise exception 'signal %: the id % stands for another event already', v_found.name, v_found.event_id
                  using errcode = 'WP409';
        end if;
        v_execute := true;
    end loop;
    -- stop: signals given

    -- 2. Executions. Those whose key somebody else has taken since `start` looked are this transaction's failure: it
    --    was told another id.
    v_some := array(select e from unnest(v_all) as e where e.kind = 'start' order by e.number);
    v_count := cardinality(v_some);
    if v_count > 0 then
        loop
            select r.outcome, r.execution_id, s.name, s.key
              into v_found
              from waypost.start_executions(
                       p_tenant      => array_fill(1, array[v_count]),
                       p_execution   => array(select e.execution_id from unnest(v_some) as e order by e.number),
                       p_definition  => array(select e.name from unnest(v_some) as e order by e.number),
                       p_version     => array(select e.version from unnest(v_some) as e order by e.number),
                       p_business    => array(select e.key from unnest(v_some) as e order by e.number),
                       p_digest      => array(select sha256(convert_to(e.data::text, 'UTF8'))
                                                from unnest(v_some) as e
                                               order by e.number),
                       p_started     => array(select jsonb_build_object(
                                                         'input', e.data,
                                                         'definition', e.name,
                                                         'version', e.version,
                                                         'seed', encode(substr(sha256(uuid_send(
                                                                     gen_random_uuid())), 1, 8), 'hex'),
                                                         'key', e.key,
                                                         'traceparent',
                                                         waypost.trace_of(e.execution_id, e.traceparent))
                                                from unnest(v_some) as e
                                               order by e.number),
                       p_traceparent => array(select waypost.trace_of(e.execution_id, e.traceparent)
                                                from unnest(v_some) as e
                                               order by e.number),
                       p_now         => v_now) r
              join (select e.name, e.key, e.execution_id, row_number() over (order by e.number) as item
                      from unnest(v_some) as e) s
                on s.item = r.item
             where r.outcome <> 'started'
               and r.execution_id is distinct from s.execution_id
             order by r.item
             limit 1;
            exit when not found;
            if v_found.outcome = 'exists' then
                raise exception 'flow %: another transaction has started key % meanwhile', v_found.name, v_found.key
                      using errcode = '40001', hint = 'Repeat the transaction: it will find that execution.';
            elsif v_found.outcome = 'conflict' then
                raise exception 'flow %: the key % belongs to an execution with another input', v_found.name,
                                v_found.key
                      using errcode = 'WP409', detail = v_found.execution_id::text;
            end if;
        end loop;
        v_execute := true;

        -- What was given in the same transaction came after what was started in it.
        if cardinality(v_signals) > 0 then
            update waypost.execution x
               set events_after = v_mark
             where (x.tenant_id, x.execution_id) in (select 1, e.execution_id from unnest(v_some) as e);
        end if;
    end if;
    -- stop: executions created

    -- 3. Events for subscribers, as messages: one for each endpoint, signed and sent by the relay.
    v_some := array(select e from unnest(v_all) as e where e.kind = 'publish' order by e.number);
    if cardinality(v_some) > 0 then
        select array_agg(m.message_id order by m.endpoint collate "C", m.lane collate "C", m.number),
               array_agg(m.endpoint order by m.endpoint collate "C", m.lane collate "C", m.number),
               array_agg(m.lane order by m.endpoint collate "C", m.lane collate "C", m.number),
               array_agg(m.body order by m.endpoint collate "C", m.lane collate "C", m.number)
          into v_messages, v_endpoints, v_lanes, v_bodies
          from (select case when q.given_id
                            then waypost.id_of(jsonb_build_array(q.source, q.event_id, s.endpoint)::text)
                            else waypost.new_id() end as message_id,
                       s.endpoint, q.number, q.body,
                       case s.ordered_by when 'key' then coalesce(q.key, q.source)
                                         when 'execution' then q.source end as lane
                  from (select e.*,
                               jsonb_strip_nulls(jsonb_build_object(
                                   'specversion', '1.0',
                                   'id', e.event_id,
                                   'source', e.source,
                                   'type', e.name,
                                   'subject', e.key,
                                   'time', to_char(v_now at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
                                   'datacontenttype', 'application/json',
                                   'traceparent', e.traceparent))
                               || jsonb_build_object('data', e.data) as body
                          from unnest(v_some) as e) q
                 cross join lateral waypost.subscribers_of(1, q.name, convert_to(q.body::text, 'UTF8')) s) m;
    end if;
    if v_messages is not null then
        insert into waypost.outbox
               (tenant_id, message_id, execution_id, epoch, path, command, endpoint, lane, ordered, body, due_at,
                expires_at)
        select 1, m.message_id, null, null, '', false, m.endpoint, m.lane, m.lane is not null,
               convert_to(m.body::text, 'UTF8'), v_now, v_now + interval '4 days'
          from unnest(v_messages, v_endpoints, v_lanes, v_bodies) with ordinality
               as m(message_id, endpoint, lane, body, ord)
         order by m.ord
            on conflict do nothing;

        -- Of two under one id the first was written, here or by somebody else: is the other one the same?
        select m.body ->> 'type' as type, m.body ->> 'id' as id
          into v_found
          from unnest(v_messages, v_bodies) as m(message_id, body)
          join waypost.outbox o
            on o.tenant_id = 1
           and o.message_id = m.message_id
         where (convert_from(o.body, 'UTF8')::jsonb - 'time' - 'traceparent' <> m.body - 'time' - 'traceparent') is true
         limit 1;
        if found then
            raise exception 'event %: the id % stands for another event already', v_found.type, v_found.id
                  using errcode = 'WP409';
        end if;
    end if;
    -- stop: messages written

    if current_setting('waypost.hints', true) is distinct from 'off' then
        perform pg_notify('waypost', 'execution') where v_execute;
        perform pg_notify('waypost', 'outbox') where v_messages is not null;
    end if;
    return null;
end $$;
