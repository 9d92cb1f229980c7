-- compatible: yes
--
-- Plans that do not depend on what PostgreSQL knows of a table. The plan of a function is made when it is first called,
-- which is when the tables are empty. Then one index is as good as another, and a message was looked for among all those
-- of its tenant: fifteen times the work, until the first analysis of the table was over.

-- Serve the views of one execution. They begin with the execution, so that nothing else is looked for in them.
drop index waypost.outbox_execution;
create index outbox_execution on waypost.outbox (execution_id, tenant_id, number);

drop index waypost.task_execution;
create index task_execution on waypost.task (execution_id, tenant_id, number);


-- The mail of executions behind what each has read, in the order of its arrival. `source` and `event_id` are those of
-- the inbox: with `sender` they say where sealed data belong.
create function waypost.unread_mail(p_tenant int[], p_execution uuid[], p_read int[])
returns table (
    tenant_id int, execution_id uuid, mail_number int, kind text, epoch int, path text, data text, sender text,
    received_at timestamptz, inbox_id bigint, type text, key text, source text, event_id text
)
language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
    return query
    select m.tenant_id, m.execution_id, m.mail_number, i.kind, m.epoch, m.path, i.data::text, i.sender, i.received_at,
           i.inbox_id, m.type, m.key, i.source, i.event_id
      from unnest(p_tenant, p_execution, p_read) as t(tenant_id, execution_id, mail_read)
      join waypost.mail m
        on m.tenant_id = t.tenant_id and m.execution_id = t.execution_id and m.mail_number > t.mail_read
      join waypost.inbox i on i.inbox_id = m.inbox_id
     order by m.execution_id, m.mail_number;
end $$;
