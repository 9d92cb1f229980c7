-- compatible: yes
--
-- Events that reach flows in the order in which their sender numbered them (`sequence` of CloudEvents), where the settings
-- of a sender ask for it (`ordered`). All else goes the way that it went.
--
-- A STREAM is what is numbered together: all events of a source, or of a source and a key. `last` is the greatest
-- sequence that was let through.
--
-- WHO IS AHEAD WAITS IN THE QUARANTINE. An event whose predecessor has not come is kept apart (`ahead`), and is in line:
-- it has a time, `due_at`, at which whatever is missing before it is given up. When its predecessor comes, that time is
-- now. Whatever is in line before an event that is due is let in before it. What is kept apart for another reason may
-- be in line as well, so that nobody waits for it in vain; its turn then only passes.
--
-- LOCK ORDER. The row of a stream is locked before all rows of the quarantine, and before all that post_mail locks.


create table waypost.stream (
    tenant_id int  not null references waypost.tenant,
    sender    text collate "C" not null,
    name      text collate "C" not null,            -- a source; and behind a blank, the key
    last      text collate "C",                     -- null: none was let through yet

    primary key (tenant_id, sender, name),
    constraint keys_are_bounded check
        (octet_length(sender) between 1 and 128
         and octet_length(name) between 1 and 2049
         and octet_length(last) <= 256)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.05
);

alter table waypost.quarantine
    add column stream   text collate "C",
    add column sequence text collate "C",
    add column after    text collate "C",               -- the sequence before it; null where none can be told
    add column due_at   timestamptz,                    -- in line until then; null: not in line
    drop constraint reason_is_known,
    add constraint reason_is_known check
        (reason in ('contract', 'mapping', 'expired', 'conflict', 'invalid', 'ahead', 'superseded')),
    add constraint place_is_bounded check
        (octet_length(stream) <= 2049 and octet_length(sequence) <= 256 and octet_length(after) <= 256),
    add constraint line_is_whole check
        (due_at is null or (stream is not null and sequence is not null and released_at is null));

-- Serves who is next in a stream.
create index quarantine_line on waypost.quarantine (tenant_id, sender, stream, sequence, quarantine_id)
    where due_at is not null;

-- Serves the streams in which something is due.
create index quarantine_due on waypost.quarantine (due_at)
    where due_at is not null;

-- Serves what is told of who waits for an event that is in line.
create index quarantine_awaited on waypost.quarantine (tenant_id, type, key)
    where due_at is not null;
