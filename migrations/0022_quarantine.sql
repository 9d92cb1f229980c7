-- compatible: yes
--
-- Contracts of events, and what came from senders of ours and is no mail yet: authentic, durable, acknowledged, and kept
-- apart because it breaks a contract, is not as its sender's rules say, came too late for itself, or says something else
-- under a name that is taken. It changes nothing until a person lets it in, by the one door for mail.


-- One row per contract of the events of a type, or of those of a type that name a dataschema.
create table waypost.contract (
    tenant_id  int         not null references waypost.tenant,
    type       text        collate "C" not null,
    dataschema text        collate "C" not null default '',
    schema     jsonb       not null,
    created_at timestamptz not null default now(),

    primary key (tenant_id, type, dataschema),
    constraint schema_is_bounded check (octet_length(schema::text) <= 131072),
    constraint keys_are_bounded check
        (octet_length(type) between 1 and 512
         and octet_length(dataschema) <= 2048)
);


-- One row per thing that was kept apart, however often it came. `body` and `headers` are what was received of it, so
-- that it can be read again by other rules; `digest` is of both.
create table waypost.quarantine (
    quarantine_id bigint      generated always as identity primary key,
    tenant_id     int         not null references waypost.tenant,
    sender        text        collate "C" not null,
    reason        text        not null,
    detail        text        not null,
    source        text        collate "C",
    event_id      text        collate "C",
    type          text        collate "C",
    key           text        collate "C",
    webhook_id    text        collate "C",
    headers       jsonb       not null default '{}',
    body          bytea       not null,
    digest        bytea       not null,
    times         int         not null default 1,
    received_at   timestamptz not null default now(),
    released_at   timestamptz,
    released_by   text        collate "C",

    constraint quarantine_once unique (tenant_id, sender, digest),
    constraint reason_is_known check (reason in ('contract', 'mapping', 'expired', 'conflict')),
    constraint release_is_whole check ((released_at is null) = (released_by is null)),
    constraint headers_are_an_object check (jsonb_typeof(headers) = 'object'),
    constraint body_is_bounded check (octet_length(body) <= 1048576),
    constraint notes_are_bounded check
        (length(detail) <= 4096 and length(released_by) <= 128 and length(digest) <= 64),
    constraint keys_are_bounded check
        (octet_length(sender) between 1 and 128
         and octet_length(source) <= 1024
         and octet_length(event_id) <= 1024
         and octet_length(type) <= 512
         and octet_length(key) <= 1024
         and octet_length(webhook_id) <= 1024)
);

-- Serves the list of what waits for a person.
create index quarantine_waiting on waypost.quarantine (tenant_id, quarantine_id)
    where released_at is null;
