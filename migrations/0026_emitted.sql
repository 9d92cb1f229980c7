-- compatible: yes
--
-- Events that flows emit (`ctx.emit`) and applications publish (`waypost.publish`) reach flows of the same installation
-- too: those that wait for their type and key, and those that they start.
--
-- WRITTEN DOWN FIRST, GIVEN AFTERWARDS. The commit of a turn locks rows of executions, and whoever stores an event locks
-- its key before any of them. So a turn that emits leaves a row in `emitted`, in its own commit, and a worker gives the
-- event away in a transaction of its own, `hand_events`: right after that commit, or whenever it looks. The row goes
-- with what it has given, so a crash between the two loses nothing and gives nothing twice.
--
-- ORDER. The events of one execution are given in the order in which it emitted them, those of one transaction of an
-- application in the order in which it published them, and those of one type and key in the order in which they were
-- written down. One transaction gives at most one of each of these, since it stores what it gives in the order of keys.
--
-- LOOPS. A flow that an event starts may emit one that starts a flow, and so on. `hops` counts how many such starts led
-- to an event: one with more than 16 starts nothing any more. Who waits for it gets it all the same.


-- One row per event that was emitted and not yet given to flows.
create table waypost.emitted (
    number      bigint      generated always as identity primary key,
    tenant_id   int         not null,
    emitter     text        collate "C" not null,       -- whose events keep their order
    source      text        collate "C" not null,       -- as the inbox has it
    event_id    text        collate "C" not null,
    type        text        collate "C" not null,
    key         text        collate "C" not null,
    data        jsonb       not null,
    traceparent text,
    hops        int         not null,                   -- starts by events that led to it
    emitted_at  timestamptz not null default now(),

    constraint source_is_ours check (source ^@ 'waypost:')
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 1
);

-- Serves start_by_events: how many starts led to an event.
create index emitted_event on waypost.emitted (tenant_id, source, event_id);


-- The source under which the inbox has what `source` emits.
create function waypost.inner_source(source text) returns text
language sql immutable parallel safe
return 'waypost:' || case when octet_length(source) <= 1000 then source else waypost.id_of(source)::text end;


-- Gives events that were emitted to flows, up to `p_most` of them, and tells of each what became of it: as post_mail
-- says, and `looped` when it would have started a flow but for the limit of hops. Nothing is returned when nothing is
-- left. What was committed before the call counts.
--
-- LOCK ORDER. First an advisory key that is held for nothing else, so that one transaction at a time gives; then those
-- of post_mail, in its order.
create function waypost.hand_events(p_most int)
returns table (type text, key text, source text, event_id text, hops int, outcome text, looped boolean)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_some  waypost.emitted[];
    v_count int;
    v_none  text[];
begin
    if not exists (select 1 from waypost.emitted) then
        return;
    end if;
    perform pg_advisory_xact_lock(waypost.event_key(0, 'waypost:emitted', ''));
    -- stop: alone

    select array_agg(h.e order by (h.e).number)
      into v_some
      from (select e,
                   row_number() over (partition by e.tenant_id, e.emitter order by e.number) as of_emitter,
                   row_number() over (partition by e.tenant_id, e.type, e.key order by e.number) as of_key
              from (select * from waypost.emitted order by number limit p_most) e) h
     where h.of_emitter = 1
       and h.of_key = 1;
    v_count := coalesce(cardinality(v_some), 0);
    if v_count = 0 then
        return;
    end if;
    v_none := array_fill(null::text, array[v_count]);

    return query
    select s.type, s.key, s.source, s.event_id, s.hops, p.outcome,
           s.hops > 16
           and p.outcome = 'stored'
           and exists (select 1 from waypost.trigger g where g.tenant_id = s.tenant_id and g.type = s.type)
      from waypost.post_mail(
               p_tenant    => array(select e.tenant_id from unnest(v_some) as e order by e.number),
               p_kind      => array_fill('event'::text, array[v_count]),
               p_sender    => array_fill('waypost'::text, array[v_count]),
               p_source    => array(select e.source from unnest(v_some) as e order by e.number),
               p_event     => array(select e.event_id from unnest(v_some) as e order by e.number),
               p_webhook   => v_none,
               p_type      => array(select e.type from unnest(v_some) as e order by e.number),
               p_key       => array(select e.key from unnest(v_some) as e order by e.number),
               p_digest    => array(select sha256(convert_to(jsonb_build_array(e.type, e.key, e.data)::text, 'UTF8'))
                                      from unnest(v_some) as e
                                     order by e.number),
               p_data      => array(select e.data from unnest(v_some) as e order by e.number),
               p_causation => array_fill(null::uuid, array[v_count]),
               p_execution => array_fill(null::uuid, array[v_count]),
               p_epoch     => array_fill(null::int, array[v_count]),
               p_path      => v_none,
               p_trace     => array(select e.traceparent from unnest(v_some) as e order by e.number)) p
      join (select e.*, row_number() over (order by e.number) as item from unnest(v_some) as e) s
        on s.item = p.item
     order by s.number;
    -- stop: given

    delete from waypost.emitted e
     where e.number in (select (unnest(v_some)).number);
end $$;


-- Creates the executions that new events start, as 0007 and 0013 describe it. New here: their deadline, if their
-- definition has one (0015); an event of our own that too many starts have led to starts nothing, and what an event
-- starts knows how many did.
create or replace function waypost.start_by_events(p_inbox bigint[], p_trace text[], p_now timestamptz) returns void
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
    with s as materialized (
        select i.tenant_id, i.inbox_id, i.sender, i.source, i.event_id, i.type, i.digest, t.trace,
               coalesce(i.data, 'null') as input, coalesce(h.hops, 0) as hops, g.definition, g.version,
               k.key, waypost.new_id() as execution_id,
               p_now + (select d.deadline
                          from waypost.definition d
                         where d.tenant_id = g.tenant_id
                           and d.name = g.definition
                           and d.version = g.version) as deadline_at
          from unnest(p_inbox, p_trace) as t(inbox_id, trace)
          join waypost.inbox i on i.inbox_id = t.inbox_id
         cross join lateral
               (select d.definition,
                       waypost.version_drawn(i.tenant_id, d.definition, i.type,
                                             waypost.draw_of(i.source || ' ' || i.event_id)) as version
                  from (select distinct o.definition
                          from waypost.trigger o
                         where o.tenant_id = i.tenant_id
                           and o.type = i.type) d) v
          join waypost.trigger g
            on g.tenant_id = i.tenant_id
           and g.definition = v.definition
           and g.version = v.version
          left join lateral
               (select c.key
                  from (select case when g.key_pointer is null then i.key
                                    when jsonb_typeof(i.data #> waypost.steps_of(g.key_pointer)) in ('string', 'number')
                                    then i.data #>> waypost.steps_of(g.key_pointer) end as key) c
                 where octet_length(c.key) between 1 and 1024
                   and c.key !~ '[\u0001-\u001f\u007f-\u009f]') k on true
          left join lateral
               (select m.hops
                  from waypost.emitted m
                 where i.sender = 'waypost'
                   and m.tenant_id = i.tenant_id
                   and m.source = i.source
                   and m.event_id = i.event_id
                 order by m.hops desc
                 limit 1) h on true
         where coalesce(h.hops, 0) <= 16
    ),
    new as (
        insert into waypost.execution as e
               (tenant_id, execution_id, definition, version, business_key, input_digest, wake_at, position,
                events_after, deadline_at, traceparent, created_at)
        select s.tenant_id, s.execution_id, s.definition, s.version, s.key, s.digest, p_now, 1, s.inbox_id,
               s.deadline_at, waypost.trace_of(s.execution_id, s.trace), p_now
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
                                               'type', s.type, 'inbox_id', s.inbox_id, 'traceparent', s.trace))
               || case when s.deadline_at is null then '{}'
                       else jsonb_build_object('deadline', s.deadline_at) end
               || case when s.hops = 0 then '{}'
                       else jsonb_build_object('hops', s.hops) end,
               'sender:' || s.sender, p_now
          from new
          join s on s.execution_id = new.execution_id
    )
    update waypost.inbox i
       set taken = true
     where i.inbox_id in (select new.events_after from new);
end $$;


-- Sends an event to the endpoints that subscribe to its type, with the caller's commit; tells its id. `key` is its
-- subject. Of events of a source with one id the first counts, if they are equal. New here: flows get it as well.
create or replace function waypost.publish(
    type text, key text, data jsonb, source text default '/application', id text default null,
    traceparent text default null
) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_id text := coalesce(publish.id, waypost.new_id()::text);
begin
    perform waypost.check_errand('publish', publish.key, publish.data);
    perform waypost.check_event('publish', publish.type, v_id);
    if (octet_length(publish.source) between 1 and 1024
        and publish.source ~ '^[A-Za-z0-9._~:/?#@!$&''()*+,;=%-]+$') is not true then
        raise exception 'publish: expected a source that is a URI reference of 1 to 1024 bytes, found %',
                        quote_nullable(left(publish.source, 80))
              using errcode = 'WP400';
    end if;
    insert into waypost.errand (kind, name, key, source, event_id, given_id, data, traceparent)
    values ('publish', publish.type, publish.key, publish.source, v_id, publish.id is not null, publish.data,
            case when publish.traceparent ~ '^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[01]$'
                 then publish.traceparent end);
    insert into waypost.emitted (tenant_id, emitter, source, event_id, type, key, data, traceparent, hops)
    values (1, 'transaction ' || pg_current_xact_id(), waypost.inner_source(publish.source), v_id, publish.type,
            coalesce(publish.key, ''), publish.data, publish.traceparent, 0);
    if current_setting('waypost.hints', true) is distinct from 'off' then
        perform pg_notify('waypost', 'event');
    end if;
    return v_id;
end $$;
