-- compatible: yes
--
-- What executions say about themselves, so that they can be found by it (`ctx.publish`, `waypost list --where`). A turn
-- that publishes writes the fact and the row in one commit; the journal decides, and the row is what it comes to.


-- Never written; the table below took its place.
alter table waypost.execution drop column attributes;


-- One row per attribute of an execution. One of the four values is set: their type is that of the value.
create table waypost.attribute (
    tenant_id    int  not null,
    execution_id uuid not null,
    name         text collate "C" not null,
    text         text collate "C",
    number       numeric,
    flag         boolean,
    moment       timestamptz,

    primary key (tenant_id, execution_id, name),
    constraint value_is_one check (num_nonnulls(text, number, flag, moment) = 1),
    constraint attribute_is_bounded check (octet_length(name) between 1 and 64 and octet_length(text) <= 256)
) with (
    fillfactor = 90,
    autovacuum_vacuum_scale_factor = 0.05
);

-- Serve `list --where`: who has this value, or one beyond it.
create index attribute_text on waypost.attribute (tenant_id, name, text) where text is not null;
create index attribute_number on waypost.attribute (tenant_id, name, number) where number is not null;
create index attribute_flag on waypost.attribute (tenant_id, name, flag) where flag is not null;
create index attribute_moment on waypost.attribute (tenant_id, name, moment) where moment is not null;


-- The attributes of an execution as JSON; moments as text, in UTC.
create function waypost.attributes_of(p_tenant int, p_execution uuid) returns jsonb
language sql stable
return (select coalesce(jsonb_object_agg(a.name, coalesce(
                   to_jsonb(a.text), to_jsonb(a.number), to_jsonb(a.flag),
                   to_jsonb(to_char(a.moment at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')))), '{}')
          from waypost.attribute a
         where a.tenant_id = p_tenant
           and a.execution_id = p_execution);
