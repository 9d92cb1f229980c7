-- compatible: no
--
-- Versions of flows: which code each one is, and how new executions are shared among them.
--
-- A FINGERPRINT says which code a version is: of the source of the flow and of what it calls in its module. The first
-- worker that holds a version writes it down; a worker that holds other code under the same version does not start,
-- unless it is told to. What runs was begun by that code, and would be replayed by another.
--
-- SHARES. Without any, a new execution begins with the newest version that is published. A version with a row in
-- `share` gets that much of a hundred new executions, and the newest one without a row gets the rest. A row may be there
-- before its version is known: so a new version can begin with a small share. Running executions stay with theirs.
--
-- WHAT AN EVENT STARTS is drawn in the same way, among those versions that name its type. So each version has its own
-- row in `trigger` now.


alter table waypost.definition
    add column fingerprint bytea,                       -- of its code; null: not known
    add constraint fingerprint_is_whole check (octet_length(fingerprint) = 32);


-- One row per version of a flow that gets a share of the new executions.
create table waypost.share (
    tenant_id  int         not null,
    definition text        collate "C" not null,
    version    text        collate "C" not null,
    percent    smallint    not null,
    changed_at timestamptz not null default now(),

    primary key (tenant_id, definition, version),
    constraint percent_is_a_part check (percent between 0 and 100),
    constraint keys_are_bounded check
        (octet_length(definition) between 1 and 256 and octet_length(version) between 1 and 128)
);


-- One row per version of a flow that an event starts.
alter table waypost.trigger
    drop constraint trigger_pkey,
    add primary key (tenant_id, definition, version);


-- A number of 0 to 99 that depends on `word` alone.
create function waypost.draw_of(word text) returns int
language sql immutable parallel safe
return ((hashtextextended(word, 0) & 2147483647) % 100)::int;


-- The version that a new execution of a flow begins with, `p_draw` (0 to 99) deciding between shares. With a type,
-- among the versions that such an event starts. Null: none.
create function waypost.version_drawn(p_tenant int, p_flow text, p_type text, p_draw int) returns text
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return (
        with k as (
            select d.version, d.number, s.percent
              from waypost.definition d
              left join waypost.share s
                on s.tenant_id = d.tenant_id
               and s.definition = d.name
               and s.version = d.version
             where d.tenant_id = p_tenant
               and d.name = p_flow
               and d.state = 'published'
        ),
        c as (
            (select k.version, k.number, k.percent::int as weight
               from k
              where k.percent is not null)
            union all
            (select k.version, k.number, greatest(100 - (select coalesce(sum(o.percent), 0) from k o), 0)::int
               from k
              where k.percent is null
              order by k.number desc
              limit 1)
        ),
        t as (
            select c.version,
                   sum(c.weight) over (order by c.number) as up_to,
                   sum(c.weight) over () as whole
              from c
             where c.weight > 0
               and (p_type is null
                    or exists (select 1
                                 from waypost.trigger g
                                where g.tenant_id = p_tenant
                                  and g.definition = p_flow
                                  and g.version = c.version
                                  and g.type = p_type))
        )
        select t.version
          from t
         where t.up_to * 100 > p_draw * t.whole
         order by t.up_to
         limit 1);
end $$;


drop function waypost.version_to_start(text, text);

-- The version that a new execution of a flow gets: the one that is asked for, else one that is drawn.
create function waypost.version_to_start(p_flow text, p_version text, p_draw int) returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_found text;
    v_known text;
begin
    if p_version is null then
        v_found := waypost.version_drawn(1, p_flow, null, p_draw);
    else
        select d.version
          into v_found
          from waypost.definition d
         where d.tenant_id = 1
           and d.name = p_flow
           and d.version = p_version
           and d.state = 'published';
    end if;
    if v_found is not null then
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
                hint = 'A worker that holds a flow makes it known; one of its versions must take starts.';
end $$;


-- Starts a flow with the caller's commit, as 0011 describes it. New here: the version is drawn, by the key if there is
-- one, so that a transaction that is repeated draws the same.
create or replace function waypost.start(
    flow text, input jsonb, key text default null, version text default null, traceparent text default null
) returns uuid
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_new     uuid := waypost.new_id();
    v_version text;
    v_id      uuid;
    v_same    boolean;
begin
    perform waypost.check_errand(concat('start of ', quote_nullable(left(start.flow, 80))), start.key, start.input);
    v_version := waypost.version_to_start(start.flow, start.version,
                                          waypost.draw_of(coalesce(start.key, v_new::text)));
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
    values ('start', start.flow, v_version, start.key, v_new, start.input, start.traceparent);
    return v_new;
end $$;


-- Creates the executions that new events start, as 0007 describes it. New here: the version is drawn.
create or replace function waypost.start_by_events(p_inbox bigint[], p_trace text[], p_now timestamptz) returns void
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
    with s as materialized (
        select i.tenant_id, i.inbox_id, i.sender, i.source, i.event_id, i.type, i.digest, t.trace,
               coalesce(i.data, 'null') as input, g.definition, g.version, k.key, waypost.new_id() as execution_id
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


drop function waypost.facts_of(int[], uuid[]);

-- The facts of executions, as 0003 describes it. New here: `schema`, the version of the payload, which a reader lifts.
create function waypost.facts_of(p_tenant int[], p_execution uuid[])
returns table (
    execution_id uuid, "position" bigint, kind text, path text, payload text, at timestamptz, schema smallint
)
language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
    return query
    select j.execution_id, j.position, j.kind, j.path, j.payload::text, j.at, j.schema
      from unnest(p_tenant, p_execution) as t(tenant_id, execution_id)
      join waypost.journal j on j.tenant_id = t.tenant_id and j.execution_id = t.execution_id
     order by j.execution_id, j.position;
end $$;
