-- compatible: yes
--
-- Flows that continue as new. The journal of an execution grows for years, and what is replayed of it begins at the last
-- `continued`. Facts of before stay for people to read.


-- Serves facts_of: where the epoch that runs began.
create index journal_continued on waypost.journal (tenant_id, execution_id, position)
    where kind = 'continued';


-- The facts of executions that a replay needs, in order of position.
create or replace function waypost.facts_of(p_tenant int[], p_execution uuid[])
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
      join waypost.execution e on e.tenant_id = t.tenant_id and e.execution_id = t.execution_id
      join waypost.journal j
        on j.tenant_id = t.tenant_id
       and j.execution_id = t.execution_id
       and j.position >= case when e.epoch = 0 then 1
                              else (select max(c.position)
                                      from waypost.journal c
                                     where c.tenant_id = t.tenant_id
                                       and c.execution_id = t.execution_id
                                       and c.kind = 'continued') end
     order by j.execution_id, j.position;
end $$;
