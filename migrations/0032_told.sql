-- compatible: yes
--
-- Who wants to know that an endpoint was disabled or enabled subscribes to that, as to any event.

-- Writes an event `waypost.endpoint.disabled` or `.enabled`, a message for each endpoint that subscribes to it. Whoever
-- calls it has the endpoint's row locked; nobody who holds a lane waits for such a row.
create function waypost.tell_of_endpoint(
    p_tenant int, p_name text, p_change text, p_reason text, p_now timestamptz default null
) returns boolean
language plpgsql volatile
set enable_seqscan = off
as $$
declare
    v_now    timestamptz   := coalesce(p_now, clock_timestamp());
    v_source constant text := 'waypost:endpoint';
    v_type   text          := 'waypost.endpoint.' || p_change;
    v_event  uuid          := waypost.new_id();
    v_body   bytea         := convert_to(jsonb_build_object(
                                  'specversion', '1.0',
                                  'id', v_event,
                                  'source', v_source,
                                  'type', v_type,
                                  'subject', p_name,
                                  'time', to_char(v_now at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
                                  'datacontenttype', 'application/json',
                                  'data', jsonb_strip_nulls(jsonb_build_object('endpoint', p_name, 'reason', p_reason))
                              )::text, 'UTF8');
begin
    insert into waypost.outbox
           (tenant_id, message_id, path, command, endpoint, lane, ordered, body, due_at, expires_at)
    select p_tenant, waypost.id_of(v_event || '/' || s.endpoint), '', false, s.endpoint,
           case s.ordered_by when 'key' then p_name when 'execution' then v_source end, s.ordered_by is not null,
           v_body, v_now, v_now + interval '4 days'
      from waypost.subscribers_of(p_tenant, v_type, v_body) s
     order by s.endpoint collate "C";
    if found and current_setting('waypost.hints', true) is distinct from 'off' then
        perform pg_notify('waypost', 'outbox');
    end if;
    return found;
end $$;
