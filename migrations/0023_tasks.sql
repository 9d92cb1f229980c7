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
