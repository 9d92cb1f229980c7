-- compatible: yes
--
-- Work for pull workers. Nobody sends it: who serves a queue comes for it, and says what became of it.
--
-- A row is one try. The execution decides whether there is another one, by its retry policy, as for a command that a
-- service gave up: the next try is a row of its own. So a token belongs to one try for good, and a worker that was
-- believed dead can overwrite nothing.
--
--     due ─▶ running ─▶ done | refused | failed      the worker said so
--      │        │  └▶ lost                           nobody said anything until the lease was over
--      │        └▶ stopping ─▶ the same              nobody waits for it any more: its worker is told when it beats
--      ├▶ expired                                    its time was over while it was due; whoever waits takes it back
--      └▶ withdrawn                                  taken back before it began: it never runs
--
-- What a try came to is mail (`result`) of the execution, written in the transaction that ends the try: at most once.

create table waypost.task (
    tenant_id    int         not null,
    task_id      uuid        not null,
    number       bigint      generated always as identity,
    execution_id uuid        not null,
    epoch        int         not null,
    path         text        collate "C" not null,
    queue        text        collate "C" not null,
    type         text        collate "C" not null,
    payload      jsonb       not null,
    key          text        collate "C" not null,      -- the same for each try
    attempt      int         not null,                  -- which try of what was asked
    priority     int         not null default 0,        -- higher goes first, within queue and tenant
    traceparent  text        collate "C",               -- of the span that the try's is under
    state        text        not null default 'due',
    token        uuid,                                  -- of the claim that took it; kept when it has ended
    owner        text        collate "C",
    lease_until  timestamptz,
    available_at timestamptz not null,
    expires_at   timestamptz not null,
    began_at     timestamptz,
    ended_at     timestamptz,
    progress     jsonb,                                 -- what its worker last said of it
    answer       jsonb,                                 -- what became of it, as its mail has it

    primary key (tenant_id, task_id),
    constraint state_is_known check (state in
        ('due', 'running', 'stopping', 'done', 'refused', 'failed', 'lost', 'expired', 'withdrawn')),
    constraint lease_is_of_what_runs check ((state in ('running', 'stopping')) = (lease_until is not null)),
    constraint claim_is_whole check
        ((token is null) = (owner is null) and (token is null) = (began_at is null)),
    constraint what_never_began_has_no_claim check
        ((state in ('due', 'expired', 'withdrawn')) = (token is null)),
    constraint what_ended_has_an_answer check
        ((state in ('done', 'refused', 'failed', 'lost')) = (answer is not null)
         and (answer is null) = (ended_at is null)),
    constraint attempt_begins_at_one check (attempt >= 1),
    constraint priority_is_bounded check (priority between -100 and 100),
    constraint times_are_finite check
        (isfinite(available_at) and isfinite(expires_at) and isfinite(lease_until)),
    constraint keys_are_bounded check
        (octet_length(path) <= 512
         and octet_length(queue) between 1 and 128
         and octet_length(type) between 1 and 512
         and octet_length(key) between 1 and 1024
         and octet_length(owner) between 1 and 256
         and octet_length(traceparent) <= 256)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 1,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 5000
);

-- Serves the claim: what is due in a queue, tenant by tenant, the most urgent first.
create index task_due on waypost.task (queue, tenant_id, priority desc, available_at, task_id)
    where state = 'due';

-- Serves the expiry of what is due and whose time is over.
create index task_expiring on waypost.task (expires_at)
    where state = 'due';

-- Serves the expiry of leases.
create index task_claimed on waypost.task (lease_until)
    where state in ('running', 'stopping');

-- Serves the view of one execution.
create index task_execution on waypost.task (tenant_id, execution_id, number);


-- Takes up to `p_limit` tasks of `p_queue` for `p_owner`, until `p_lease` from now. Each queue has a line for each tenant
-- that waits in it; the lines get equal shares, in an order that chance decides, so none starves another. A share that
-- its line does not use is left to the next claim.
--
-- Rows that another claim holds are skipped. It locks rows of tasks and nothing else, and waits for none.
create function waypost.claim_tasks(
    p_queue text[], p_limit int, p_owner text, p_token uuid, p_lease interval, p_now timestamptz default null
) returns setof waypost.task
language plpgsql volatile
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set enable_sort = on
as $$
declare
    v_now timestamptz := coalesce(p_now, clock_timestamp());
begin
    return query
    with recursive named as (
        select q.queue, t.tenant_id
          from (select distinct u.queue from unnest(p_queue) as u(queue)) q
         cross join lateral
               (select k.tenant_id
                  from waypost.task k
                 where k.state = 'due'
                   and k.queue = q.queue
                 order by k.tenant_id
                 limit 1) t
      union all
        select named.queue, t.tenant_id
          from named
         cross join lateral
               (select k.tenant_id
                  from waypost.task k
                 where k.state = 'due'
                   and k.queue = named.queue
                   and k.tenant_id > named.tenant_id
                 order by k.tenant_id
                 limit 1) t
    ),
    lines as materialized (
        select named.queue, named.tenant_id, (p_limit - 1) / count(*) over () + 1 as share
          from named
         order by random()
    ),
    taken as materialized (
        select due.tenant_id, due.task_id
          from lines
         cross join lateral
               (select k.tenant_id, k.task_id
                  from waypost.task k
                 where k.queue = lines.queue
                   and k.tenant_id = lines.tenant_id
                   and k.state = 'due'
                   and k.expires_at > v_now
                 order by k.priority desc, k.available_at, k.task_id
                 limit lines.share
                   for no key update skip locked) due
         limit p_limit
    )
    update waypost.task k
       set state       = 'running',
           token       = p_token,
           owner       = p_owner,
           began_at    = v_now,
           lease_until = v_now + p_lease
      from taken
     where k.tenant_id = taken.tenant_id
       and k.task_id = taken.task_id
 returning k.*;
end $$;


-- The lease of what runs lasts `p_lease` from now on, and `p_progress` (where it is not null) is what it is about. Returns
-- those that still run under their token, and in which state: `stopping`, when nobody waits for it any more. For the
-- others the try is over.
create function waypost.beat_tasks(
    p_tenant int[], p_task uuid[], p_token uuid[], p_progress jsonb[], p_lease interval, p_now timestamptz default null
) returns table (tenant_id int, task_id uuid, state text)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz := coalesce(p_now, clock_timestamp());
begin
    perform 1
       from waypost.task k
      where (k.tenant_id, k.task_id) in (select * from unnest(p_tenant, p_task))
      order by k.tenant_id, k.task_id
        for no key update of k;
    -- stop: tasks locked

    return query
    update waypost.task k
       set lease_until = v_now + p_lease,
           progress    = coalesce(t.progress, k.progress)
      from unnest(p_tenant, p_task, p_token, p_progress) as t(tenant_id, task_id, token, progress)
     where k.tenant_id = t.tenant_id
       and k.task_id = t.task_id
       and k.token = t.token
       and k.state in ('running', 'stopping')
 returning k.tenant_id, k.task_id, k.state;
end $$;


-- Who locks rows of tasks holds the rows of their executions, but for claims and beats, which hold nothing else. So they
-- come after the rows of executions, and what comes after them is waited for by nobody who holds one.


-- Tells executions what became of tries of their tasks. At most once per try: the id says so. The callers hold the rows
-- of all who get it.
create function waypost.post_results(
    p_tenant int[], p_task uuid[], p_execution uuid[], p_epoch int[], p_path text[], p_answer jsonb[],
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
                p_source    => array_fill('waypost:task'::text, array[v_count]),
                p_event     => array(select t || '/ended'
                                       from unnest(p_task) with ordinality as s(t, o)
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


-- Ends tries: `p_state` is done, refused, failed or lost, `p_answer` the outcome as mail has it. Locks executions, then
-- tasks. For each the verdict, and the state that the try is in:
--
--     taken       it ended so
--     repeated    it had ended before, under this token: the first report counts
--     late        the token is not that of the try, or its lease was over: an old attempt cannot overwrite a new one
create function waypost.settle_tasks(
    p_tenant int[], p_task uuid[], p_token uuid[], p_state text[], p_answer jsonb[], p_now timestamptz default null
) returns table (tenant_id int, task_id uuid, verdict text, state text)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now       timestamptz := coalesce(p_now, clock_timestamp());
    a_tenant    int[];
    a_task      uuid[];
    a_execution uuid[];
    a_epoch     int[];
    a_path      text[];
    a_answer    jsonb[];
begin
    perform 1
       from waypost.execution e
      where (e.tenant_id, e.execution_id) in
            (select k.tenant_id, k.execution_id
               from unnest(p_tenant, p_task) as t(tenant_id, task_id)
               join waypost.task k on k.tenant_id = t.tenant_id and k.task_id = t.task_id)
      order by e.tenant_id, e.execution_id
        for no key update of e;
    -- stop: rows locked

    perform 1
       from waypost.task k
      where (k.tenant_id, k.task_id) in (select * from unnest(p_tenant, p_task))
      order by k.tenant_id, k.task_id
        for no key update of k;
    -- stop: tasks locked

    with ended as (
        update waypost.task k
           set state       = t.state,
               answer      = t.answer,
               ended_at    = v_now,
               lease_until = null
          from unnest(p_tenant, p_task, p_token, p_state, p_answer) as t(tenant_id, task_id, token, state, answer)
         where k.tenant_id = t.tenant_id
           and k.task_id = t.task_id
           and k.token = t.token
           and k.state in ('running', 'stopping')
     returning k.tenant_id, k.task_id, k.execution_id, k.epoch, k.path, k.answer
    )
    select array_agg(e.tenant_id), array_agg(e.task_id), array_agg(e.execution_id), array_agg(e.epoch),
           array_agg(e.path), array_agg(e.answer)
      into a_tenant, a_task, a_execution, a_epoch, a_path, a_answer
      from ended e;
    -- stop: settled

    perform waypost.post_results(a_tenant, a_task, a_execution, a_epoch, a_path, a_answer, p_now);
    return query
    select k.tenant_id, k.task_id,
           case when (k.tenant_id, k.task_id) in (select * from unnest(a_tenant, a_task)) then 'taken'
                when k.token = t.token and (k.state in ('done', 'refused', 'failed') or k.state = t.state) then 'repeated'
                else 'late' end,
           k.state
      from unnest(p_tenant, p_task, p_token, p_state) as t(tenant_id, task_id, token, state)
      join waypost.task k on k.tenant_id = t.tenant_id and k.task_id = t.task_id;
end $$;


-- Ends what has no time left, at most `p_limit` of each: tries whose lease is over are lost (mail: unknown, worker-lost),
-- and what is due and whose time is over expires, without mail, since who waits for it has the same deadline. Returns how
-- many were lost. Locks executions, then tasks.
create function waypost.expire_tasks(p_limit int, p_now timestamptz default null) returns int
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_now       timestamptz := coalesce(p_now, clock_timestamp());
    c_tenant    int[];
    c_task      uuid[];
    c_execution uuid[];
    a_tenant    int[];
    a_task      uuid[];
    a_execution uuid[];
    a_epoch     int[];
    a_path      text[];
    a_answer    jsonb[];
begin
    with over as materialized (
        select o.tenant_id, o.task_id
          from waypost.task o
         where o.state = 'due'
           and o.expires_at <= v_now
         order by o.expires_at
         limit p_limit
           for no key update skip locked
    )
    update waypost.task k
       set state = 'expired'
      from over
     where k.tenant_id = over.tenant_id
       and k.task_id = over.task_id;

    select array_agg(c.tenant_id), array_agg(c.task_id), array_agg(c.execution_id)
      into c_tenant, c_task, c_execution
      from (select o.tenant_id, o.task_id, o.execution_id
              from waypost.task o
             where o.state in ('running', 'stopping')
               and o.lease_until < v_now
             order by o.lease_until
             limit p_limit) c;
    if c_tenant is null then
        return 0;
    end if;
    -- stop: expired leases seen

    perform waypost.lock_rows(c_tenant, c_execution);
    -- stop: rows locked

    perform 1
       from waypost.task k
      where (k.tenant_id, k.task_id) in (select * from unnest(c_tenant, c_task))
      order by k.tenant_id, k.task_id
        for no key update of k;
    -- stop: tasks locked

    -- Looks again under the locks: a try may have ended, or its worker may have spoken, while we waited for them.
    with lost as (
        update waypost.task k
           set state       = 'lost',
               ended_at    = v_now,
               lease_until = null,
               answer      = jsonb_build_object(
                                 'outcome', 'unknown',
                                 'error', jsonb_build_object(
                                     'code', 'worker-lost',
                                     'detail', format('%s was silent until its lease was over, at try %s',
                                                      k.owner, k.attempt)))
          from unnest(c_tenant, c_task) as t(tenant_id, task_id)
         where k.tenant_id = t.tenant_id
           and k.task_id = t.task_id
           and k.state in ('running', 'stopping')
           and k.lease_until < v_now
     returning k.tenant_id, k.task_id, k.execution_id, k.epoch, k.path, k.answer
    )
    select array_agg(l.tenant_id), array_agg(l.task_id), array_agg(l.execution_id), array_agg(l.epoch),
           array_agg(l.path), array_agg(l.answer)
      into a_tenant, a_task, a_execution, a_epoch, a_path, a_answer
      from lost l;
    -- stop: leases expired

    perform waypost.post_results(a_tenant, a_task, a_execution, a_epoch, a_path, a_answer, p_now);
    return coalesce(cardinality(a_tenant), 0);
end $$;


-- Takes tasks back that a program does not want any more. Called by a commit, after its turns are written: the execution
-- rows are locked, and an item counts only if the commit's fact (position, fence) is there.
--
--     due or expired    withdrawn   mail: refused, never-sent
--     running           stopping    mail comes when the try ends
--
-- Of what has ended there is mail already. Returns how many got mail.
create function waypost.take_back_tasks(
    p_tenant int[], p_execution uuid[], p_position bigint[], p_fence bigint[], p_task uuid[],
    p_now timestamptz default null
) returns int
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    a_tenant    int[];
    a_task      uuid[];
    a_execution uuid[];
    a_epoch     int[];
    a_path      text[];
begin
    perform 1
       from waypost.task k
      where (k.tenant_id, k.task_id) in (select * from unnest(p_tenant, p_task))
      order by k.tenant_id, k.task_id
        for no key update of k;
    -- stop: tasks locked

    with back as (
        update waypost.task k
           set state = case when k.state = 'running' then 'stopping' else 'withdrawn' end
          from unnest(p_tenant, p_execution, p_position, p_fence, p_task)
               as t(tenant_id, execution_id, position, fence, task_id)
          join waypost.journal g
            on g.tenant_id = t.tenant_id
           and g.execution_id = t.execution_id
           and g.position = t.position
           and g.fence = t.fence
         where k.tenant_id = t.tenant_id
           and k.task_id = t.task_id
           and k.execution_id = t.execution_id
           and k.state in ('due', 'expired', 'running')
     returning k.*
    )
    select array_agg(b.tenant_id), array_agg(b.task_id), array_agg(b.execution_id), array_agg(b.epoch),
           array_agg(b.path)
      into a_tenant, a_task, a_execution, a_epoch, a_path
      from back b
     where b.state = 'withdrawn';
    -- stop: tasks taken back

    perform waypost.post_results(
                a_tenant, a_task, a_execution, a_epoch, a_path,
                array_fill('{"outcome": "refused", "code": "never-sent"}'::jsonb,
                           array[coalesce(cardinality(a_tenant), 0)]),
                p_now);
    return coalesce(cardinality(a_tenant), 0);
end $$;


-- What the turns of a commit ask of pull workers: k_ are new tasks, b_ those that nobody waits for any more. Called in the
-- statement of the commit, and only where there are any: `p_done` are the executions whose turn matched. Returns those that
-- are due by the mail that this brought.
create function waypost.commit_tasks(
    p_done uuid[], p_now timestamptz,
    k_tenant int[], k_execution uuid[], k_epoch int[], k_task uuid[], k_path text[], k_queue text[], k_type text[],
    k_payload jsonb[], k_key text[], k_attempt int[], k_priority int[], k_trace text[], k_expires timestamptz[],
    b_tenant int[], b_execution uuid[], b_position bigint[], b_fence bigint[], b_task uuid[]
) returns uuid[]
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_now timestamptz := coalesce(p_now, now());
begin
    insert into waypost.task
           (tenant_id, task_id, execution_id, epoch, path, queue, type, payload, key, attempt, priority, traceparent,
            available_at, expires_at)
    select k.tenant_id, k.task_id, k.execution_id, k.epoch, k.path, k.queue, k.type, k.payload, k.key, k.attempt,
           k.priority, k.trace, v_now, k.expires
      from unnest(k_tenant, k_execution, k_epoch, k_task, k_path, k_queue, k_type, k_payload, k_key, k_attempt,
                  k_priority, k_trace, k_expires) with ordinality
        as k(tenant_id, execution_id, epoch, task_id, path, queue, type, payload, key, attempt, priority, trace,
             expires, ord)
     where k.execution_id = any(p_done)
     order by k.ord;
    -- stop: tasks written

    if b_task = '{}' or waypost.take_back_tasks(b_tenant, b_execution, b_position, b_fence, b_task, p_now) = 0 then
        return '{}';
    end if;
    return array(select e.execution_id
                   from unnest(b_tenant, b_execution) as b(tenant_id, execution_id)
                   join waypost.execution e on e.tenant_id = b.tenant_id and e.execution_id = b.execution_id
                  where e.owner is null
                    and e.wake_at <= v_now);
end $$;


-- Ends an execution without its program, as 0015 and 0018 describe it. New here: tasks that have not begun never will, and
-- what they would have done does not stand.
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
        and o.state in ('due', 'expired', 'sending')
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
        having bool_and(o.state in ('due', 'expired', 'withdrawn') and not o.reached)
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
                           and o.state in ('due', 'expired', 'sending'));
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


-- What is stuck, as 0004 and 0018 describe it. New here: a task on its way is a reason to move.
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
           and (o.state = 'stopping' or (o.state in ('due', 'sending') and not o.replied))
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
