-- compatible: yes
--
-- What has arrived may be sent once more, when a person wants it: the same message, or another one that names it.

-- Puts events back, as 0024 describes it: dead letters, or those that were delivered (`p_state`).
drop function waypost.put_back(int, uuid[], interval, timestamptz);
create function waypost.put_back(
    p_tenant int, p_message uuid[], p_spread interval default interval '0', p_now timestamptz default null,
    p_state text default 'dead'
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
           and o.state = p_state
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


drop trigger enters_its_lane_again on waypost.outbox;
create trigger enters_its_lane_again
    before update of state on waypost.outbox
       for each row when (new.ordered and old.state in ('dead', 'delivered') and new.state = 'due')
   execute function waypost.enter_lane();
