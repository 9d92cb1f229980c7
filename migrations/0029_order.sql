-- compatible: yes
--
-- Lanes for commands: an endpoint may want the commands of one execution, or of one key, in the order in which they were
-- asked for. See 0024 for lanes.
--
-- A COMMAND'S LANE GOES ON when its head has ended, however it ended: its flow was told, and went on. So none is blocked.
--
-- LANES OF COMMANDS AND OF EVENTS ARE APART, also where both have one name: the commit of a turn locks those of its
-- commands, takes messages back, and locks those of its events after that. So `advance_lanes` is called for the ones and
-- for the others, in two transactions, and locks the messages that it lets go sorted, as `take_back` does.

alter table waypost.endpoint
    add column ordered_by text,                             -- the lanes of its commands
    add constraint order_is_known check (ordered_by in ('execution', 'key'));

-- Serves the commit of turns: which endpoints want their commands in order. It has no entry where none does.
create index endpoint_ordered on waypost.endpoint (tenant_id, name) include (ordered_by)
    where ordered_by is not null;

alter table waypost.lane
    add column command boolean not null default false,
    drop constraint lane_pkey,
    add primary key (tenant_id, command, endpoint, lane);

alter table waypost.lane_free
    add column command boolean not null default false;


-- The lane of an execution's commands where the endpoint wants the order of keys: its key, or without one itself.
create function waypost.lane_of(tenant_id int, execution_id uuid) returns text
language sql stable
as $$
    select coalesce(e.business_key, e.execution_id::text)
      from waypost.execution e
     where e.tenant_id = lane_of.tenant_id
       and e.execution_id = lane_of.execution_id
$$;


-- A message enters its lane, as 0024 describes it.
create or replace function waypost.enter_lane() returns trigger language plpgsql
set enable_seqscan = off
as $$
declare
    v_head uuid;
begin
    insert into waypost.lane as l (tenant_id, command, endpoint, lane, head)
    values (new.tenant_id, new.command, new.endpoint, new.lane, new.message_id)
        on conflict (tenant_id, command, endpoint, lane) do update set head = l.head
    returning l.head into v_head;
    if v_head <> new.message_id then
        new.state := 'waiting';
    end if;
    if tg_op = 'INSERT' then
        new.number := nextval('waypost.outbox_number_seq');
        insert into waypost.lane_free (tenant_id, command, endpoint, lane)
        select new.tenant_id, new.command, new.endpoint, new.lane
         where exists (select 1
                         from waypost.outbox o
                        where o.tenant_id = new.tenant_id
                          and o.message_id = new.message_id);
    end if;
    return new;
end $$;


create or replace function waypost.leave_lane() returns trigger language plpgsql as $$
begin
    insert into waypost.lane_free (tenant_id, command, endpoint, lane)
    values (new.tenant_id, new.command, new.endpoint, new.lane);
    return null;
end $$;


-- Lets the next message of each lane go whose head has ended, of events or of commands; how many lanes were looked at, at
-- most `p_limit`. Who asks without saying of which asks for those of events, as before.
drop function waypost.advance_lanes(int, timestamptz);
create function waypost.advance_lanes(
    p_limit int, p_now timestamptz default null, p_commands boolean default false
) returns int
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_now      timestamptz := coalesce(p_now, clock_timestamp());
    v_tenant   int[];
    v_endpoint text[];
    v_lane     text[];
    v_next     uuid[];
begin
    with freed as (
        delete from waypost.lane_free f
         where f.number in (select g.number
                              from waypost.lane_free g
                             where g.command = p_commands
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
      where l.command = p_commands
        and (l.tenant_id, l.endpoint, l.lane) in (select * from unnest(v_tenant, v_endpoint, v_lane))
      order by l.tenant_id, l.endpoint, l.lane
        for no key update of l;
    -- stop: lanes locked

    -- What is next may be taken back meanwhile: then that leaves a note of its own, and its lane is looked at again.
    v_next := array(select q.message_id
                      from (select o.message_id
                              from waypost.outbox o
                             where o.state = 'waiting'
                               and (o.tenant_id, o.message_id) in
                                   (select t.tenant_id, n.message_id
                                      from unnest(v_tenant, v_endpoint, v_lane) as t(tenant_id, endpoint, lane)
                                     cross join lateral
                                           (select w.message_id
                                              from waypost.outbox w
                                             where w.tenant_id = t.tenant_id
                                               and w.endpoint = t.endpoint
                                               and w.lane = t.lane
                                               and w.command = p_commands
                                               and w.state = 'waiting'
                                             order by w.number
                                             limit 1) n)
                             order by o.tenant_id, o.message_id
                               for no key update of o) q);
    -- stop: next ones locked

    with moved as materialized (
        select l.tenant_id, l.endpoint, l.lane, n.message_id as next
          from unnest(v_tenant, v_endpoint, v_lane) as t(tenant_id, endpoint, lane)
          join waypost.lane l
            on l.tenant_id = t.tenant_id
           and l.command = p_commands
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
                   and o.command = p_commands
                   and o.state = 'waiting'
                 order by o.number
                 limit 1) n
            on true
         where (h.state in ('waiting', 'due', 'sending', 'stopping')
                or (h.state = 'dead' and not h.command and h.fault <> 'skipped'
                    and coalesce(e.on_dead, 'block') = 'block')) is not true
           and (n.message_id is null or n.message_id = any(v_next))
    ),
    gone as (
        delete from waypost.lane l
         using moved
         where moved.next is null
           and l.tenant_id = moved.tenant_id
           and l.command = p_commands
           and l.endpoint = moved.endpoint
           and l.lane = moved.lane
    ),
    led as (
        update waypost.lane l
           set head = moved.next
          from moved
         where moved.next is not null
           and l.tenant_id = moved.tenant_id
           and l.command = p_commands
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

-- The commit of turns, as 0005 describes it. New here: commands to an endpoint that wants an order get their lanes. They
-- are inserted sorted by endpoint and lane, after those that are in none. Where no endpoint wants one this is a look into
-- an index without entries.
create or replace function waypost.commit_turns(
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
               (tenant_id, execution_id, epoch, message_id, path, at_most_once, endpoint, lane, ordered, body,
                expires_at, due_at)
        select m.tenant_id, m.execution_id, m.epoch, m.message_id, m.path, m.once, m.endpoint,
               case e.ordered_by
                   when 'execution' then m.execution_id::text
                   when 'key' then waypost.lane_of(m.tenant_id, m.execution_id)
                   else m.lane end,
               e.ordered_by is not null, m.body, m.expires_at, v_now
          from unnest(o_tenant, o_execution, o_epoch, o_message, o_path, o_once, o_endpoint, o_lane, o_body, o_expires)
               with ordinality
            as m(tenant_id, execution_id, epoch, message_id, path, once, endpoint, lane, body, expires_at, ord)
          left join waypost.endpoint e
            on e.tenant_id = m.tenant_id
           and e.name = m.endpoint
           and e.ordered_by is not null
         where ((m.tenant_id, m.execution_id) in (select d.tenant_id, d.execution_id from done d)) is true
         order by e.tenant_id nulls first, e.name nulls first,
                  case e.ordered_by
                      when 'execution' then m.execution_id::text
                      when 'key' then waypost.lane_of(m.tenant_id, m.execution_id) end collate "C" nulls first,
                  m.ord
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


-- Takes back what nobody waits for any more, as 0002 describes it. New here:
--
--     waiting in a lane, never sent   withdrawn   mail: refused, never-sent
create or replace function waypost.take_back(
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
           and o.state in ('waiting', 'due', 'expired', 'sending', 'delivered')
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


-- The end without a program, as 0028 describes it. New here: commands that wait in a lane never leave.
create or replace function waypost.terminate(
    p_tenant int, p_execution uuid, p_by text, p_reason text, p_now timestamptz default null
) returns table (outcome text, "position" bigint, stands text[])
language plpgsql volatile
as $$
#variable_conflict use_column
declare
    v_now      timestamptz := coalesce(p_now, now());
    v_keys     bigint[];
    v_row      waypost.execution;
    v_began    bigint;
    v_messages uuid[];
    v_tasks    uuid[];
    v_stands   text[];
    v_kin      uuid[];
    v_parent   jsonb;
    v_error    jsonb;
begin
    -- Keys come before rows. Which waits there are is known for sure only under the row's lock.
    v_keys := array(select distinct waypost.event_key(w.tenant_id, w.type, w.key)
                      from waypost.wait w
                     where w.tenant_id = p_tenant
                       and w.execution_id = p_execution
                     order by 1);
    perform pg_advisory_xact_lock(k) from unnest(v_keys) as k;
    -- stop: keys locked

    -- Who gets mail of this end: its children that have not ended, and its parent.
    v_kin := array(select c.execution_id
                     from waypost.execution c
                    where c.tenant_id = p_tenant
                      and c.parent = p_execution
                      and c.finished_at is null
                    union all
                   select p.parent
                     from waypost.execution p
                    where p.tenant_id = p_tenant
                      and p.execution_id = p_execution
                      and p.parent is not null);
    perform waypost.lock_rows(array_fill(p_tenant, array[1 + cardinality(v_kin)]), p_execution || v_kin);
    -- stop: rows locked

    select e.*
      into v_row
      from waypost.execution e
     where e.tenant_id = p_tenant
       and e.execution_id = p_execution;
    if not found or v_row.finished_at is not null then
        return query
        select case when v_row.execution_id is not null then 'over' end, v_row.position, '{}'::text[];
        return;
    end if;
    if exists (select 1
                 from waypost.wait w
                where w.tenant_id = p_tenant
                  and w.execution_id = p_execution
                  and waypost.event_key(w.tenant_id, w.type, w.key) <> all(v_keys)) then
        raise exception 'execution % has registered a wait meanwhile', p_execution
              using errcode = '40001';
    end if;
    if exists (select 1
                 from waypost.execution c
                where c.tenant_id = p_tenant
                  and c.parent = p_execution
                  and c.finished_at is null
                  and c.execution_id <> all(v_kin)) then
        raise exception 'execution % has got a child meanwhile', p_execution
              using errcode = '40001';
    end if;

    perform 1
       from waypost.outbox o
      where o.tenant_id = p_tenant
        and o.execution_id = p_execution
        and o.command
        and o.state in ('waiting', 'due', 'expired', 'sending')
      order by o.tenant_id, o.message_id
        for no key update of o;
    -- stop: messages locked

    perform 1
       from waypost.task k
      where k.tenant_id = p_tenant
        and k.execution_id = p_execution
        and k.state in ('due', 'expired', 'running')
      order by k.tenant_id, k.task_id
        for no key update of k;

    v_began := (select max(j.position)
                  from waypost.journal j
                 where j.tenant_id = p_tenant
                   and j.execution_id = p_execution
                   and j.kind in ('started', 'continued'));
    with said as materialized (
        select j.position, j.kind, j.path, j.payload ->> 'outcome' as outcome, j.payload ->> 'verdict' as verdict
          from waypost.journal j
         where j.tenant_id = p_tenant
           and j.execution_id = p_execution
           and j.position > v_began
           and j.kind in ('ended', 'late', 'resolved')
         union all
        select null, 'late', m.path, i.data ->> 'outcome', null
          from waypost.mail m
          join waypost.inbox i on i.inbox_id = m.inbox_id
         where m.tenant_id = p_tenant
           and m.execution_id = p_execution
           and m.mail_number > v_row.mail_read
           and m.epoch = v_row.epoch
           and m.path is not null
           and i.kind in ('reply', 'result', 'child')
    ),
    asked as materialized (
        select j.position, j.path, j.payload
          from waypost.journal j
         where j.tenant_id = p_tenant
           and j.execution_id = p_execution
           and j.position > v_began
           and j.kind = 'asked'
    ),
    gone as materialized (
        select s.path
          from said s
         where (s.kind = 'ended' and s.outcome in ('refused', 'child_failed')) or (s.kind = 'resolved' and s.verdict = 'not_done')
         union all
        select s.path
          from said s
         where s.kind = 'late'
           and s.outcome in ('refused', 'child_failed')
           and s.path not in (select d.path from said d where d.outcome = 'done' or d.verdict = 'done')
         union all
        select a.payload ->> 'name'
          from asked a
         where a.payload ->> 'kind' = 'undo'
           and a.path in (select d.path from said d where d.outcome = 'done' or d.verdict = 'done')
         union all
        -- A command may have been sent more than once: each of its messages counts.
        select o.path
          from waypost.outbox o
         where o.tenant_id = p_tenant
           and o.execution_id = p_execution
           and o.epoch = v_row.epoch
         group by o.path
        having bool_and(o.state in ('waiting', 'due', 'expired', 'withdrawn') and not o.reached)
         union all
        select k.path
          from waypost.task k
         where k.tenant_id = p_tenant
           and k.execution_id = p_execution
           and k.epoch = v_row.epoch
         group by k.path
        having bool_and(k.state in ('due', 'expired', 'withdrawn'))
    )
    select coalesce(array_agg(a.path order by a.position), '{}')
      into v_stands
      from asked a
     where a.payload ? 'undo'
       and not a.payload ? 'unfit'
       and a.payload ->> 'kind' <> 'undo'
       and a.path not in (select g.path from gone g);

    v_error := jsonb_build_object('class', 'permanent', 'type', 'Terminated', 'code', 'terminated',
                                  'detail', 'by ' || p_by || ': ' || p_reason);
    update waypost.execution e
       set position = e.position + 1,
           fence = e.fence + 1,
           status = 'failed',
           undoing = false,
           owner = null,
           wake_at = null,
           finished_at = v_now
     where e.tenant_id = p_tenant
       and e.execution_id = p_execution;
    insert into waypost.journal (tenant_id, execution_id, position, fence, kind, payload, actor, at)
    select p_tenant, p_execution, v_row.position + 1, v_row.fence + 1, 'terminated',
           jsonb_build_object(
               'kind', 'failed', 'by', p_by, 'reason', p_reason, 'stands', v_stands, 'error', v_error),
           'operator:' || p_by,
           greatest(v_now, (select j.at
                              from waypost.journal j
                             where j.tenant_id = p_tenant
                               and j.execution_id = p_execution
                               and j.position = v_row.position));
    delete from waypost.wait w
     where w.tenant_id = p_tenant
       and w.execution_id = p_execution;
    -- stop: terminated

    v_messages := array(select o.message_id
                          from waypost.outbox o
                         where o.tenant_id = p_tenant
                           and o.execution_id = p_execution
                           and o.command
                           and o.state in ('waiting', 'due', 'expired', 'sending'));
    if v_messages <> '{}' then
        perform waypost.take_back(
                    array_fill(p_tenant, array[cardinality(v_messages)]),
                    array_fill(p_execution, array[cardinality(v_messages)]),
                    array_fill(v_row.position + 1, array[cardinality(v_messages)]),
                    array_fill(v_row.fence + 1, array[cardinality(v_messages)]),
                    v_messages, p_now);
    end if;
    v_tasks := array(select k.task_id
                       from waypost.task k
                      where k.tenant_id = p_tenant
                        and k.execution_id = p_execution
                        and k.state in ('due', 'expired', 'running'));
    if v_tasks <> '{}' then
        perform waypost.take_back_tasks(
                    array_fill(p_tenant, array[cardinality(v_tasks)]),
                    array_fill(p_execution, array[cardinality(v_tasks)]),
                    array_fill(v_row.position + 1, array[cardinality(v_tasks)]),
                    array_fill(v_row.fence + 1, array[cardinality(v_tasks)]),
                    v_tasks, p_now);
    end if;

    -- Its parent is told, and its children are asked to end, as when nobody waits for them any more.
    v_parent := (select j.payload -> 'parent'
                   from waypost.journal j
                  where j.tenant_id = p_tenant
                    and j.execution_id = p_execution
                    and j.position = 1);
    if v_kin <> '{}' then
        perform waypost.post_family(
                    array_agg(p_tenant), array_agg(k.kind), array_agg(k.event), array_agg(k.data), array_agg(k.id),
                    array_agg(k.epoch), array_agg(k.path),
                    array_agg(p_execution), array_agg(v_row.position + 1), array_agg(v_row.fence + 1), p_now)
           from (select v.id,
                        case when v.id = v_row.parent then 'child' else 'order' end as kind,
                        case when v.id = v_row.parent then p_execution || '/ended' else v.id || '/cancel' end as event,
                        case when v.id = v_row.parent
                             then jsonb_build_object(
                                      'outcome', 'child_failed', 'execution', p_execution,
                                      'error', jsonb_build_object('status', 'terminated', 'code', 'terminated',
                                                                  'detail', v_error ->> 'detail', 'error', v_error))
                             else jsonb_build_object('order', 'cancel', 'undo', true,
                                                     'by', 'execution ' || p_execution,
                                                     'reason', 'its parent was terminated') end as data,
                        case when v.id = v_row.parent then (v_parent ->> 'epoch')::int end as epoch,
                        case when v.id = v_row.parent then v_row.parent_path end as path
                   from unnest(v_kin) as v(id)) k;
    end if;
    return query
    select 'terminated', v_row.position + 1, v_stands;
end $$;


-- Executions that nothing would move, as 0028 describes it. New here: a command that waits in a lane moves one.
create or replace view waypost.stuck as
select e.tenant_id, e.execution_id, e.definition, e.version, e.status, e.undoing, e.owner,
       case when e.status <> 'open' then 'lost-order'
            when e.mail_received > e.mail_read then 'lost-wake-up'
            when turn.moves is not null then 'mutex-stranded'
            else 'no-reason' end as because
  from waypost.execution e
  -- Lateral, so that each is looked up by its index: `not exists` would be answered by reading the whole outbox once.
  left join lateral
       (select true as moves
          from waypost.outbox o
         where o.tenant_id = e.tenant_id
           and o.execution_id = e.execution_id
           and o.command
           and (o.state = 'stopping' or (o.state in ('waiting', 'due', 'sending') and not o.replied))
         limit 1) message on true
  left join lateral
       (select true as moves
          from waypost.wait w
         where w.tenant_id = e.tenant_id
           and w.execution_id = e.execution_id
           and w.inbox_id is null
         limit 1) event on true
  left join lateral
       (select true as moves
          from waypost.approval p
         where p.tenant_id = e.tenant_id
           and p.execution_id = e.execution_id
           and p.state = 'waiting'
         limit 1) person on true
  left join lateral
       (select true as moves
          from waypost.execution c
         where c.tenant_id = e.tenant_id
           and c.parent = e.execution_id
           and c.finished_at is null
         limit 1) child on true
  left join lateral
       (select bool_or(h.ticket is null or x.finished_at is null) as moves
          from waypost.mutex m
          left join waypost.mutex h
            on h.tenant_id = m.tenant_id
           and h.kind = m.kind
           and h.key = m.key
           and h.granted_at is not null
          left join waypost.execution x
            on x.tenant_id = h.tenant_id
           and x.execution_id = h.execution_id
         where m.tenant_id = e.tenant_id
           and m.execution_id = e.execution_id
           and m.granted_at is null) turn on true
  left join lateral
       (select true as moves
          from waypost.task k
         where k.tenant_id = e.tenant_id
           and k.execution_id = e.execution_id
           and k.state in ('due', 'running', 'stopping')
         limit 1) task on true
 where e.owner is null
   and e.wake_at is null
   and e.finished_at is null
   and case when e.status <> 'open' then e.orders_received > e.orders_read
            else e.mail_received > e.mail_read
                 or (message.moves is null and event.moves is null and person.moves is null
                     and child.moves is null and turn.moves is not true and task.moves is null) end
 union all
select e.tenant_id, e.execution_id, e.definition, e.version, e.status, e.undoing, e.owner, 'owner-gone'
  from waypost.execution e
  left join waypost.worker w on w.worker_id = e.owner
 where e.owner is not null
   and (w.worker_id is null or w.dead_at < now() - interval '5 minutes');
