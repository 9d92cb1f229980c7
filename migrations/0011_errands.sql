-- compatible: yes
--
-- What an application asks of Waypost in a transaction of its own: to start a flow (`start`), to give an event to flows
-- (`signal`), to send one to subscribers (`publish`). All of it happens with the application's commit, or none of it.
--
-- AN ERRAND IS DONE AT THE COMMIT. The three functions check what they are given and write it down in `errand`; a
-- deferred trigger does all errands of the transaction together, in the order of locks of 0001, when the application
-- commits. So an application holds no lock of ours while it does other things: otherwise a worker or a receiver would
-- wait with its whole batch for an application that thinks, and two errands in one transaction would take keys after
-- rows. No transaction sees another's errands, and none is left after a commit.
--
-- WHAT MAY FAIL AT THE COMMIT is only what another transaction did meanwhile: the same key was started (40001: repeat
-- the transaction, and it finds that execution), or was taken with another input (WP409). Everything else fails at once.
--
-- ERRORS have codes of their own, so that an application can tell them from those of its own tables:
--
--     WP400   a name, key, id or document cannot be what it is given as
--     WP404   no worker has made this flow, or this version of it, known
--     WP409   the key, or the id, stands for something else already
--     WP413   a document is too large, or there are too many signals in one transaction
--     25001   the transaction is not READ COMMITTED
--
-- RIGHTS. The three functions are the only ones that an application needs; it needs no rights on tables:
--
--     grant usage on schema waypost to shop;
--     grant execute on function waypost.start, waypost.signal, waypost.publish to shop;
--
-- HINTS. NOTIFY wakes workers and relay after the commit. A commit with a NOTIFY waits for a lock of the whole cluster;
-- `set waypost.hints = off` (or `alter role shop set …`) goes without, and the errand waits for the next poll.


-- A message that no execution sent: an event of an application.
alter table waypost.outbox
    alter column execution_id drop not null,
    alter column epoch drop not null,
    add constraint origin_is_whole check ((execution_id is null) = (epoch is null)),
    add constraint command_has_an_execution check (execution_id is not null or not command);


-- One row per endpoint that gets the events of a type.
create table waypost.subscription (
    tenant_id  int         not null,
    type       text        collate "C" not null,
    endpoint   text        collate "C" not null,
    created_at timestamptz not null default now(),

    primary key (tenant_id, type, endpoint),
    foreign key (tenant_id, endpoint) references waypost.endpoint (tenant_id, name),
    constraint type_is_bounded check (octet_length(type) between 1 and 512)
);


-- One row per errand of a transaction that has not committed yet.
create table waypost.errand (
    transaction  xid8   not null default pg_current_xact_id(),
    number       bigint generated always as identity,
    kind         text   not null,
    name         text   not null,                       -- of the flow, or the event's type
    version      text,                                  -- of the flow
    key          text,                                  -- the business key, or the event's
    execution_id uuid,
    source       text,
    event_id     text,
    given_id     boolean not null default false,        -- the application named the event
    data         jsonb  not null,
    traceparent  text,

    primary key (transaction, number),
    constraint kind_is_known check (kind in ('start', 'signal', 'publish')),
    constraint start_is_whole check
        ((kind = 'start') = (version is not null) and (kind = 'start') = (execution_id is not null)),
    constraint event_is_whole check
        ((kind = 'start') = (event_id is null) and (kind = 'publish') = (source is not null))
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 1
);


-- Creates executions, as 0002 describes it. New here: `exists` is said too when the input is equal, though its digest
-- was made by somebody who writes JSON in another way. And its plans are made once, as 0009 says of others.
create or replace function waypost.start_executions(
    p_tenant int[], p_execution uuid[], p_definition text[], p_version text[], p_business text[],
    p_digest bytea[], p_started jsonb[], p_traceparent text[], p_now timestamptz default null
) returns table (item int, outcome text, execution_id uuid)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
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
                when t.started -> 'input' = (select g.payload -> 'input'
                                               from waypost.journal g
                                              where g.tenant_id = t.tenant_id
                                                and g.execution_id = h.execution_id
                                                and g.position = 1) then 'exists'
                else 'conflict' end,
           h.execution_id
      from unnest(p_tenant, p_execution, p_definition, p_business, p_digest, p_started)
           with ordinality as t(tenant_id, execution_id, definition, business_key, digest, started, ord)
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


-- Does the errands of the transaction that commits: gives events to flows, creates executions, writes messages. Fires
-- once for each errand; the first time does them all, and the others find nothing.
create function waypost.do_errands() returns trigger
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
        select array_agg(m.message_id order by m.message_id, m.number),
               array_agg(m.endpoint order by m.message_id, m.number),
               array_agg(m.body order by m.message_id, m.number)
          into v_messages, v_endpoints, v_bodies
          from (select case when e.given_id
                            then waypost.id_of(jsonb_build_array(e.source, e.event_id, s.endpoint)::text)
                            else waypost.new_id() end as message_id,
                       s.endpoint, e.number,
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
                  from unnest(v_some) as e
                  join waypost.subscription s
                    on s.tenant_id = 1
                   and s.type = e.name) m;
    end if;
    if v_messages is not null then
        insert into waypost.outbox
               (tenant_id, message_id, execution_id, epoch, path, command, endpoint, body, due_at, expires_at)
        select 1, m.message_id, null, null, '', false, m.endpoint, convert_to(m.body::text, 'UTF8'), v_now,
               v_now + interval '3 days'
          from unnest(v_messages, v_endpoints, v_bodies) with ordinality as m(message_id, endpoint, body, ord)
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

create constraint trigger errands_are_done
    after insert on waypost.errand
    deferrable initially deferred
       for each row execute function waypost.do_errands();


-- The id of what has this name, the same each time (RFC 9562, version 8).
create function waypost.id_of(name text) returns uuid
language sql immutable parallel safe
return (select (left(s.h, 12) || '8' || substr(s.h, 14, 3) || '8' || substr(s.h, 18, 15))::uuid
          from encode(sha256(convert_to(name, 'UTF8')), 'hex') as s(h));


-- Raises unless an errand may be given: here, under this key, with this document.
create function waypost.check_errand(p_what text, p_key text, p_data jsonb) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception '%: expected a transaction that is READ COMMITTED, found %', p_what,
                        upper(current_setting('transaction_isolation'))
              using errcode = '25001';
    end if;
    if waypost.is_name(p_key, 1024) is false then
        raise exception '%: expected a key of 1 to 1024 bytes of printable text, found %', p_what,
                        quote_literal(left(p_key, 80))
              using errcode = 'WP400';
    end if;
    if p_data is null then
        raise exception '%: expected a JSON document, found null; JSON''s own null is ''null''::jsonb', p_what
              using errcode = 'WP400';
    end if;
    if octet_length(p_data::text) > 262144 then
        raise exception '%: expected at most 262144 bytes of JSON, found %', p_what, octet_length(p_data::text)
              using errcode = 'WP413';
    end if;
    -- What JSON of ours may hold everywhere: each reader understands it alike. A short document can break no limit.
    if octet_length(p_data::text) > 64
       and jsonb_path_exists(p_data, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")') then
        raise exception '%: expected at most 64 arrays and objects inside each other, found more', p_what
              using errcode = 'WP400';
    end if;
    if octet_length(p_data::text) > 300
       and jsonb_path_exists(p_data, 'strict $.** ? (@.type() == "number"
                                                     && (@ > 1.7976931348623157e308 || @ < -1.7976931348623157e308))')
    then
        raise exception '%: expected numbers that a double can hold, found one that is larger', p_what
              using errcode = 'WP400';
    end if;
end $$;


-- Whether `word` is printable text of 1 to `bytes_max` bytes; null for null.
create function waypost.is_name(word text, bytes_max int) returns boolean
language sql immutable parallel safe
return octet_length(word) between 1 and bytes_max
       and word !~ '[\u0001-\u001f\u007f-\u009f\ufdd0-\ufdef\ufffe\uffff]';


-- The version that a new execution of a flow gets: the one that is asked for, else the newest that is published.
create function waypost.version_to_start(p_flow text, p_version text) returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_found text;
    v_known text;
begin
    select d.version
      into v_found
      from waypost.definition d
     where d.tenant_id = 1
       and d.name = p_flow
       and d.state = 'published'
       and (p_version is null or d.version = p_version)
     order by d.number desc
     limit 1;
    if found then
        return v_found;
    end if;
    select string_agg(k.known, ', ')
      into v_known
      from (select d.name || '@' || d.version as known
              from waypost.definition d
             where d.tenant_id = 1
               and d.state = 'published'
             order by d.name <> p_flow, d.name, d.number
             limit 20) k;
    raise exception 'no flow is called %; known here: %', quote_literal(left(concat_ws('@', p_flow, p_version), 80)),
                    coalesce(v_known, 'none')
          using errcode = 'WP404', detail = coalesce(v_known, ''),
                hint = 'A worker that holds a flow makes it known when it starts.';
end $$;


-- Starts a flow with the caller's commit, and tells the execution's id. Of a business key there is one execution: with
-- an equal input it is that one's id, with another one WP409. The version is the newest that is published, unless one
-- is asked for. With the `traceparent` of what the caller does, the execution goes on in its trace.
create function waypost.start(
    flow text, input jsonb, key text default null, version text default null, traceparent text default null
) returns uuid
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_version text;
    v_id      uuid;
    v_same    boolean;
begin
    perform waypost.check_errand(concat('start of ', quote_nullable(left(start.flow, 80))), start.key, start.input);
    v_version := waypost.version_to_start(start.flow, start.version);
    if start.key is not null then
        select f.execution_id, f.same
          into v_id, v_same
          from ((select r.execution_id, r.data = start.input as same
                   from waypost.errand r
                  where r.transaction = pg_current_xact_id()
                    and r.kind = 'start'
                    and r.name = start.flow
                    and r.key = start.key)
                union all
                (select e.execution_id,
                        e.input_digest = sha256(convert_to(start.input::text, 'UTF8'))
                        or (select g.payload -> 'input'
                              from waypost.journal g
                             where g.tenant_id = 1
                               and g.execution_id = e.execution_id
                               and g.position = 1) = start.input
                   from waypost.execution e
                  where e.tenant_id = 1
                    and e.definition = start.flow
                    and e.business_key = start.key)
                 limit 1) f;
        if v_same then
            return v_id;
        elsif found then
            raise exception 'flow %: the key % belongs to an execution with another input', start.flow, start.key
                  using errcode = 'WP409', detail = v_id::text;
        end if;
    end if;
    insert into waypost.errand (kind, name, version, key, execution_id, data, traceparent)
    values ('start', start.flow, v_version, start.key, waypost.new_id(), start.input, start.traceparent)
 returning errand.execution_id
      into v_id;
    return v_id;
end $$;


-- Gives an event to the flows that wait for its type and key, and starts those that it starts, with the caller's
-- commit; a flow that waits later may get it too, for a week. Tells the event's id. Of events with one id the first
-- counts, if they are equal.
create function waypost.signal(
    type text, key text, data jsonb, id text default null, traceparent text default null
) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_id text := coalesce(signal.id, waypost.new_id()::text);
begin
    perform waypost.check_errand('signal', signal.key, signal.data);
    perform waypost.check_event('signal', signal.type, v_id);
    insert into waypost.errand (kind, name, key, event_id, given_id, data, traceparent)
    values ('signal', signal.type, signal.key, v_id, signal.id is not null, signal.data, signal.traceparent);
    return v_id;
end $$;


-- Sends an event to the endpoints that subscribe to its type, with the caller's commit; tells its id. `key` is its
-- subject. Of events of a source with one id the first counts, if they are equal.
create function waypost.publish(
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
    return v_id;
end $$;


-- Raises unless an event may have this type and this id.
create function waypost.check_event(p_what text, p_type text, p_id text) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if waypost.is_name(p_type, 512) is not true then
        raise exception '%: expected a type of 1 to 512 bytes of printable text, found %', p_what,
                        quote_nullable(left(p_type, 80))
              using errcode = 'WP400';
    end if;
    if waypost.is_name(p_id, 512) is not true then
        raise exception '%: expected an id of 1 to 512 bytes of printable text, found %', p_what,
                        quote_nullable(left(p_id, 80))
              using errcode = 'WP400';
    end if;
end $$;


-- Who may call them is said by a grant, since they act with the rights of Waypost.
revoke execute on function
    waypost.start(text, jsonb, text, text, text),
    waypost.signal(text, text, jsonb, text, text),
    waypost.publish(text, text, jsonb, text, text, text)
from public;
