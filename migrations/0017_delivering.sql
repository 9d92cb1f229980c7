-- compatible: yes
--
-- How messages are delivered: what is tried when, what does not count as a try, what is a dead letter, and what an
-- endpoint's answers of the last minute, or days, mean for it.
--
-- A MESSAGE WITHOUT ANOTHER TRY IS A DEAD LETTER (`dead`): kept whole, with its reason in `fault`. An event becomes one
-- when its schedule or its time is over; a command when it may be sent no more and may have arrived.
--
-- A TRY THAT WE SPOILT DOES NOT COUNT (no secret, no such endpoint, no file descriptor): it is numbered like any other,
-- and `spared` says how many there were. So one that is sent at most once is still sent once.
--
-- AN ENDPOINT'S HEALTH stands in its row, and is written only while something is wrong: after a failure, and after a
-- success while the row still tells of a failure. Endpoints that work cost nothing.
--
--     failing_since       the first failure after the last success; after `disable_after` of failures alone: disabled
--     window_…            tries of this minute and how many of them failed; too many: the circuit opens
--     open_until          the circuit is open until then; after that one try at a time is let through, to see
--     emptied_at          with a `rate`: the bucket of tokens was empty then, and has filled since


alter table waypost.outbox
    add column since  timestamptz not null default now(),  -- its time began: it was made, or put back
    add column spared int         not null default 0,      -- tries that do not count
    add column fault  text        collate "C",             -- of a dead letter: why
    add column ended_at timestamptz,                       -- of a dead letter
    drop constraint at_most_once_is_tried_once,
    add constraint at_most_once_is_tried_once check (not at_most_once or attempts - spared <= 1),
    add constraint spared_are_tries check (spared between 0 and attempts),
    add constraint fault_is_bounded check (octet_length(fault) <= 128);

-- Serves the list of dead letters, the newest first.
create index outbox_dead on waypost.outbox (tenant_id, ended_at desc, message_id)
    where state = 'dead';


-- Whoever ends a message says why, or it is not known; when, it need not say.
create function waypost.dead_is_dated() returns trigger language plpgsql as $$
begin
    new.ended_at := clock_timestamp();
    new.fault := coalesce(new.fault, 'unknown');
    return new;
end $$;

create trigger dead_is_dated
    before update of state on waypost.outbox
       for each row when (new.state = 'dead' and old.state <> 'dead')
   execute function waypost.dead_is_dated();


alter table waypost.endpoint
    add column schedule        jsonb,                      -- when to try again; null: that of its kind
    add column concurrency     int,                        -- tries in flight, in each relay; null: the relay's own
    add column rate            double precision,           -- messages a second, of all relays together
    add column burst           int,                        -- so many at once after a pause; null: those of a second
    add column emptied_at        timestamptz,
    add column disable_after   interval default interval '5 days',
    add column fault           text,                       -- why it is disabled: gone, failing, operator
    add column failing_since   timestamptz,
    add column window_at       timestamptz,
    add column window_tries    int not null default 0,
    add column window_failures int not null default 0,
    add column opened          int not null default 0,     -- times in a row that the circuit opened
    add column open_until      timestamptz,
    add constraint schedule_is_an_object check (jsonb_typeof(schedule) = 'object'),
    add constraint concurrency_is_bounded check (concurrency between 1 and 1000),
    add constraint rate_is_bounded check (rate > 0 and rate <= 100000),
    add constraint burst_is_bounded check (burst between 1 and 100000),
    add constraint disable_after_is_bounded check (disable_after > interval '0'),
    add constraint fault_is_known check (fault in ('gone', 'failing', 'operator')),
    add constraint times_are_finite check
        (isfinite(failing_since) and isfinite(open_until) and isfinite(emptied_at) and isfinite(window_at));


-- Ends tries of a relay, as 0002 describes it. New here are two outcomes and what becomes of events:
--
--     sending    spared (we are to blame)        due         the try does not count
--                dead, or unknown, an event      dead
--     stopping   spared                          as retry
--
-- `p_answer` of a dead one says why: {"code": …}.
create or replace function waypost.settle(
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
                    when old.outcome = 'spared' then 'due'
                    when old.any_reached or not old.command then 'dead'
                    else 'refused' end as next
          from old
    ),
    s as (
        update waypost.outbox o
           set state       = d.next,
               reached     = d.any_reached,
               spared      = o.spared + (d.outcome = 'spared')::int,
               fault       = case when d.next = 'dead' then d.answer ->> 'code' else o.fault end,
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
