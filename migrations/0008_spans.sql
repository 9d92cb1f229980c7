-- compatible: yes
--
-- What has happened and is not yet in a trace: a row for each turn, each try to send and each event taken in, written in
-- the transaction that says what happened. So a span is exported at least once, whoever dies between a commit and an
-- export; its ids are made of what it is about, so that the second time says nothing new.
--
-- Nothing is written here unless a collector is configured where the turn, the try or the event was committed. A row is
-- claimed for a while (`free_at`), exported, and deleted; what nobody exports within an hour is dropped.

create table waypost.span_due (
    part         text        not null,                  -- who made it, and exports it
    number       bigint      generated always as identity,
    tenant_id    int         not null,
    execution_id uuid,                                  -- worker: facts after `position`, so many
    position     bigint,
    facts        int,
    message_id   uuid,                                  -- relay: a try to send it
    attempt      int,
    inbox_id     bigint,                                -- receiver: what was taken in
    traceparent  text        collate "C",               -- of the message, or what the event said
    began_at     timestamptz,                           -- of the turn
    took         interval,                              -- of the request, until it was durable
    made_at      timestamptz not null default clock_timestamp(),
    free_at      timestamptz not null default clock_timestamp(),

    primary key (part, number),
    constraint part_is_known check (part in ('worker', 'relay', 'receiver')),
    constraint worker_names_facts check
        ((part = 'worker') = (execution_id is not null and position is not null and facts is not null)),
    constraint relay_names_a_try check ((part = 'relay') = (message_id is not null and attempt is not null)),
    constraint receiver_names_an_event check ((part = 'receiver') = (inbox_id is not null)),
    constraint keys_are_bounded check (octet_length(traceparent) <= 256)
) with (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 1
);
