-- compatible: no
--
-- Waypost in one schema: read this, and you know the system.
--
-- AN EXECUTION IS AN ACTOR. It has mail that came in, a journal of facts, and messages that go out.
-- Everything outside it (a service's reply, a third party's webhook, a local step's result, an operator's
-- order) reaches it as mail. Everything it does outside leaves as a message. What lies between is a pure
-- function of its journal.
--
--              event, reply, order                                     signed command
--                     │                                                      ▲
--                     ▼                                                      │
--     post_mail ─▶ inbox ─▶ mail ─▶ execution ── turn ─▶ journal ─▶ outbox ──┴─▶ delivery
--                     ▲       ▲     (one owner,  (claim, load,     (relay: claim, send, settle)
--                     └ wait ─┘      one fence)   decide, commit)
--
-- THE JOURNAL IS THE TRUTH. A fact is never changed. Nothing else remembers what a program did: the program
-- is run again over its journal, and goes on from there. The row in `execution` is the journal's projection,
-- together with the lease and the alarm clock; it is written by the statement that writes the facts, so the
-- two cannot disagree.
--
-- ONE WRITER. Only the worker that owns an execution appends to its journal. Two exceptions: a takeover
-- writes its fact under the row's lock with the next fence, and creation writes row and first fact in one
-- statement. The world does not write journals. It writes mail.
--
-- A TURN is claim, load, decide, commit. Due, timed out and mail-has-come are one condition: `wake_at` has
-- passed and nobody owns the row. A commit writes facts, messages, waits, the next `wake_at` and the release
-- in one transaction, and nothing is sent before that transaction has committed.
--
-- LEASES AND FENCES. A worker renews one row of its own, whatever the number of its executions. `fence` grows
-- with each claim and each takeover; every write of an owner names owner, fence and position, and one that is
-- stale matches nothing. A silent worker is buried first (`dead_at`); then its executions are taken over.
--
-- THE ROW LOCK OF `execution` IS THE ARBITER. Reply against timeout, cancel against complete, stale owner
-- against new one: whoever locks the row first is first, and the other looks again under the lock. Therefore
-- one LOCK ORDER holds in every transaction, each set in one sorted statement:
--
--     worker row · advisory keys (events, webhook ids) · inbox rows of outside sources · execution rows ·
--     outbox rows · everything else
--
-- A lock and the read that it protects are two statements, since each statement has its own snapshot. READ
-- COMMITTED is the only isolation these rules hold in.
--
-- MAIL IN. `post_mail` is the only door: it dedupes, stores, matches, numbers and wakes, for receiver, relay,
-- orchestrator and applications alike. Mail numbers are given under the row's lock without a gap, so "unread"
-- is a comparison of two counters (`mail_received`, `mail_read`), and a release that looks at them cannot
-- lose a wake-up.
--
-- OUTBOX OUT. The body is stored once, as it is signed and sent. A claim commits the attempt before the first
-- byte leaves, so that a relay that dies leaves a trace: what may have reached a service is known to be
-- unknown.
--
-- A CONSTRAINT IS A SENTENCE that holds for every row at every moment, whoever writes it: `claim_is_whole`,
-- `withdrawn_was_not_sent`. A bug that would break one stops at the database. Every key begins with the
-- tenant. Keys of text are compared byte by byte (`collate "C"`) and are bounded, since an index entry is.
-- There is no foreign key onto a row that is updated often: its share locks would make the updates wait.
--
-- ONE CLOCK: the database's. Due times are written and compared by it; each statement that depends on time
-- takes an optional `now`, for tests.


-- One row per tenant. 1 is whoever does not think about tenants.
create table waypost.tenant (
    tenant_id  int         primary key,
    name       text        collate "C" not null unique,
    created_at timestamptz not null default now(),

    constraint name_is_bounded check (octet_length(name) between 1 and 128)
);

insert into waypost.tenant (tenant_id, name)
values (1, 'default');


-- One row per version of a flow. Code is known here by name; its text is in the worker's modules.
create table waypost.definition (
    tenant_id  int         not null references waypost.tenant,
    name       text        collate "C" not null,
    version    text        collate "C" not null,
    kind       text        not null default 'code',
    document   jsonb,
    source     text,
    sha256     bytea,
    state      text        not null default 'published',
    created_at timestamptz not null default now(),

    primary key (tenant_id, name, version),
    constraint kind_is_known check (kind in ('code', 'document')),
    constraint state_is_known check (state in ('draft', 'published', 'retired')),
    constraint document_is_present check ((kind = 'document') = (document is not null)),
    constraint sha256_is_whole check (octet_length(sha256) = 32),
    constraint keys_are_bounded check
        (octet_length(name) between 1 and 256 and octet_length(version) between 1 and 128)
);

-- Executions replay under the definition they began with, so what was published stays as it was. It may be
-- retired, and come back.
create function waypost.published_is_immutable() returns trigger language plpgsql as $$
begin
    if old.state = 'draft' then
        return case tg_op when 'DELETE' then old else new end;
    end if;
    if tg_op = 'UPDATE' and new.state <> 'draft'
       and (new.tenant_id, new.name, new.version, new.kind, new.created_at)
           = (old.tenant_id, old.name, old.version, old.kind, old.created_at)
       and (new.document, new.source, new.sha256)
           is not distinct from (old.document, old.source, old.sha256) then
        return new;
    end if;
    raise exception 'definition % version % is %: it cannot be changed, only retired; publish another one',
                    old.name, old.version, old.state
          using errcode = 'restrict_violation';
end $$;

create trigger published_is_immutable
    before update or delete on waypost.definition
       for each row execute function waypost.published_is_immutable();


-- One row per living worker process, and per dead one whose executions are not all taken over yet. Heartbeats
-- touch this table and no other, so it is padded for updates in place.
create table waypost.worker (
    worker_id   uuid        primary key,
    lease_until timestamptz not null,
    dead_at     timestamptz,
    host        text        not null default '',
    started_at  timestamptz not null default clock_timestamp(),
    definitions text[]      not null default '{}',

    constraint lease_is_finite check (isfinite(lease_until))
) with (
    fillfactor = 10,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 100,
    autovacuum_vacuum_cost_delay = 0
);


-- One row per execution: who it is, what its journal comes to, who owns it and when it wants to move. The row
-- is its own lease and its own timer.
create table waypost.execution (
    tenant_id       int         not null,
    execution_id    uuid        not null,
    definition      text        collate "C" not null,
    version         text        collate "C" not null default '1',
    business_key    text        collate "C",            -- at most one execution of a definition has it
    input_digest    bytea,                              -- tells a repeated start from one that differs
    parent          uuid,                               -- who asked for this one, and where
    parent_path     text        collate "C",
    root            uuid,                               -- the first of its family; null for the first itself
    status          text        not null default 'open',
    undoing         boolean     not null default false,
    queue           text        collate "C" not null default 'default',
    priority        smallint    not null default 0,
    epoch           int         not null default 0,     -- grows when a flow continues as new
    wake_at         timestamptz,                        -- when it wants to move; null: when mail comes
    owner           uuid,                               -- the worker whose turn it is
    fence           bigint      not null default 0,     -- grows with each owner; older ones write nothing
    position        bigint      not null default 0,     -- of the last fact
    mail_received   int         not null default 0,
    mail_read       int         not null default 0,
    orders_received int         not null default 0,     -- the part of the mail that operators sent
    orders_read     int         not null default 0,
    events_after    bigint      not null,               -- events above this inbox_id came after it
    deadline_at     timestamptz,
    traceparent     text        collate "C",
    attributes      jsonb       not null default '{}',
    created_at      timestamptz not null default now(),
    started_at      timestamptz,
    finished_at     timestamptz,

    primary key (tenant_id, execution_id),
    constraint status_is_known check (status in
        ('open', 'paused', 'held', 'completed', 'compensated', 'failed', 'cancelled')),
    constraint child_is_whole check
        ((parent is null) = (parent_path is null) and (parent is null) = (root is null)),
    constraint wake_is_finite check (isfinite(wake_at)),
    constraint mail_is_whole check (mail_read between 0 and mail_received),
    constraint orders_are_whole check
        (orders_read between 0 and orders_received and orders_received <= mail_received),
    constraint finished_is_terminal check
        ((finished_at is not null) = (status in ('completed', 'compensated', 'failed', 'cancelled'))),
    constraint finished_rests check (finished_at is null or (owner is null and wake_at is null)),
    constraint attributes_are_an_object check (jsonb_typeof(attributes) = 'object'),
    constraint keys_are_bounded check
        (octet_length(definition) between 1 and 256
         and octet_length(version) between 1 and 128
         and octet_length(business_key) <= 1024
         and octet_length(parent_path) <= 512
         and octet_length(queue) between 1 and 128
         and octet_length(traceparent) <= 256)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 1,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 5000
);

create unique index execution_business on waypost.execution (tenant_id, definition, business_key)
    where business_key is not null;

-- Serves the claim: due executions, longest due first. Owned and sleeping ones cost nothing.
create index execution_due on waypost.execution (wake_at, execution_id)
    where owner is null and wake_at is not null;

-- Serves the takeover. There is no index on what a claim counts.
create index execution_owner on waypost.execution (owner)
    where owner is not null;


-- One row per fact. `at` is what the program was told the time was; `fence` says which owner wrote it.
create table waypost.journal (
    tenant_id    int         not null,
    execution_id uuid        not null,
    position     bigint      not null,
    fence        bigint      not null,
    path         text        collate "C" not null default '',
    kind         text        collate "C" not null,
    schema       smallint    not null default 1,        -- of the payload; older ones are lifted when read
    payload      jsonb,
    actor        text        collate "C" not null default 'program',
    at           timestamptz not null,
    recorded_at  timestamptz not null default clock_timestamp(),

    primary key (tenant_id, execution_id, position),
    constraint position_begins_at_one check (position >= 1),
    constraint at_is_finite check (isfinite(at)),
    constraint keys_are_bounded check
        (octet_length(path) <= 512
         and octet_length(kind) between 1 and 64
         and octet_length(actor) between 1 and 256)
) with (
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);


-- One row per message that leaves. The body is what is signed and sent, byte for byte, on every attempt.
--
--     due ─▶ sending ─▶ delivered | refused | dead | due        expired: its time was over while it was due
--      │        └▶ stopping ─▶ delivered | refused | stopped | withdrawn      (taken back while it was sent)
--      └▶ withdrawn | stopped                                                 (taken back while it was not)
create table waypost.outbox (
    tenant_id    int         not null,
    message_id   uuid        not null,
    number       bigint      generated always as identity,
    execution_id uuid        not null,
    epoch        int         not null,
    path         text        collate "C" not null,
    command      boolean     not null default true,     -- it wants an answer
    at_most_once boolean     not null default false,
    endpoint     text        collate "C" not null default '',
    lane         text        collate "C",
    content_type text        collate "C" not null default 'application/cloudevents+json',
    body         bytea       not null,
    state        text        not null default 'due',
    attempts     int         not null default 0,
    reached      boolean     not null default false,    -- some try may have reached the service
    replied      boolean     not null default false,
    token        uuid,                                  -- of the claim that sends it
    lease_until  timestamptz,
    due_at       timestamptz not null default now(),
    expires_at   timestamptz,

    primary key (tenant_id, message_id),
    constraint state_is_known check (state in
        ('due', 'sending', 'stopping', 'delivered', 'refused', 'expired', 'withdrawn', 'stopped', 'dead')),
    constraint claim_is_whole check
        ((state in ('sending', 'stopping')) = (token is not null)
         and (token is null) = (lease_until is null)),
    constraint withdrawn_was_not_sent check (state <> 'withdrawn' or not reached),
    constraint at_most_once_is_tried_once check (not at_most_once or attempts <= 1),
    constraint times_are_finite check (isfinite(due_at) and isfinite(expires_at) and isfinite(lease_until)),
    constraint body_is_bounded check (octet_length(body) <= 1048576),
    constraint keys_are_bounded check
        (octet_length(path) <= 512
         and octet_length(endpoint) <= 128
         and octet_length(lane) <= 1024
         and octet_length(content_type) between 1 and 256)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 1,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 5000
);

-- Serves the relay's claim: due messages of each endpoint, longest due first. The endpoint comes before the
-- time, so that one which is paused, disabled or busy costs a claim one step, however much waits for it.
create index outbox_due on waypost.outbox (tenant_id, endpoint, due_at, message_id)
    where state = 'due';

-- Serves the expiry of due messages whose time is over.
create index outbox_expiring on waypost.outbox (expires_at)
    where state = 'due' and expires_at is not null;

-- Serves the expiry of claims.
create index outbox_claimed on waypost.outbox (lease_until)
    where state in ('sending', 'stopping');

-- Serves the view of one execution.
create index outbox_execution on waypost.outbox (tenant_id, execution_id, number);


-- One row per try to send a message. What the service said is kept in part, for people to read.
create table waypost.delivery (
    tenant_id  int         not null,
    message_id uuid        not null,
    attempt    int         not null,
    started_at timestamptz not null,
    duration   interval    not null,
    outcome    text        collate "C" not null,
    status     int,
    error_code text        collate "C",
    response   bytea,

    primary key (tenant_id, message_id, attempt),
    constraint attempt_begins_at_one check (attempt >= 1),
    constraint response_is_bounded check (octet_length(response) <= 16384),
    constraint keys_are_bounded check
        (octet_length(outcome) between 1 and 64 and octet_length(error_code) <= 128)
) with (
    autovacuum_vacuum_insert_scale_factor = 0.05
);


-- One row per thing that reached us, once: (sender, source, event_id) is its identity, and so is a signed
-- webhook id. `answer` is what its first sender was told, and each repetition is told again. The identity
-- must keep `cache 1`: under a key's lock its numbers grow in the order of commits, which is the order in
-- which events are given out.
create table waypost.inbox (
    inbox_id    bigint      generated always as identity (cache 1) primary key,
    tenant_id   int         not null,
    kind        text        not null,
    sender      text        collate "C" not null,
    source      text        collate "C" not null,
    event_id    text        collate "C" not null,
    webhook_id  text        collate "C",
    type        text        collate "C",
    key         text        collate "C",
    digest      bytea       not null,                   -- tells a repetition from a forgery
    data        jsonb,
    body        bytea,                                  -- as it came; null for mail from inside
    answer      text        not null,
    taken       boolean     not null default false,     -- an event that somebody has
    shelf_until timestamptz,                            -- an event that nobody has is offered until then
    received_at timestamptz not null,

    constraint inbox_once unique (tenant_id, sender, source, event_id),
    constraint kind_is_known check (kind in ('reply', 'event', 'order', 'result', 'child')),
    constraint answer_is_known check (answer in ('mail', 'event', 'unmatched')),
    constraint event_is_whole check
        (kind <> 'event' or (type is not null and key is not null and shelf_until is not null)),
    constraint inside_is_reserved check ((sender = 'waypost') = (source ^@ 'waypost:')),
    constraint body_is_bounded check (octet_length(body) <= 1048576),
    constraint keys_are_bounded check
        (octet_length(sender) between 1 and 128
         and octet_length(source) between 1 and 1024
         and octet_length(event_id) between 1 and 1024
         and octet_length(webhook_id) between 1 and 1024
         and octet_length(type) <= 512
         and octet_length(key) <= 1024
         and octet_length(digest) <= 64)
) with (
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_scale_factor = 0.05
);

create unique index inbox_webhook on waypost.inbox (tenant_id, sender, webhook_id)
    where webhook_id is not null;

-- Serves match_waits: an event that came after an execution was created may fill its wait though others have
-- it too.
create index inbox_event on waypost.inbox (tenant_id, type, key, inbox_id)
    where kind = 'event';

-- Serves match_waits: an event that nobody has may fill a wait of an execution that is younger than it.
create index inbox_untaken on waypost.inbox (tenant_id, type, key, inbox_id)
    where kind = 'event' and not taken;


-- One row per thing that one execution got. Numbers begin at 1 and have no gap.
create table waypost.mail (
    tenant_id    int     not null,
    execution_id uuid    not null,
    mail_number  int     not null,
    inbox_id     bigint  not null,
    is_order     boolean not null,
    epoch        int,                                   -- with path: the ask that it answers; null for events
    path         text    collate "C",
    type         text    collate "C",                   -- with key: of events only
    key          text    collate "C",

    primary key (tenant_id, execution_id, mail_number),
    constraint mail_once unique (tenant_id, execution_id, inbox_id),
    constraint number_begins_at_one check (mail_number >= 1)
) with (
    autovacuum_vacuum_insert_scale_factor = 0.05
);

-- Serves match_waits: the newest event of a key that an execution had.
create index mail_event on waypost.mail (tenant_id, execution_id, type, key, inbox_id)
    where type is not null;

-- Serves retention: an event that mail names is kept.
create index mail_inbox on waypost.mail (inbox_id);


-- One row per wait of an execution for an event of a key. It is open until an event fills it; a turn that
-- read the event deletes it.
create table waypost.wait (
    tenant_id    int    not null,
    execution_id uuid   not null,
    path         text   collate "C" not null,
    epoch        int    not null default 0,
    wait_id      bigint generated always as identity,
    type         text   collate "C" not null,
    key          text   collate "C" not null default '',
    inbox_id     bigint,

    primary key (tenant_id, execution_id, path),
    constraint keys_are_bounded check
        (octet_length(path) <= 512 and octet_length(type) between 1 and 512 and octet_length(key) <= 1024)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000
);

-- Serves post_mail: the open waits of a key, oldest first.
create index wait_open on waypost.wait (tenant_id, type, key, execution_id, wait_id)
    where inbox_id is null;


-- One row per place where messages are posted.
create table waypost.endpoint (
    tenant_id    int         not null references waypost.tenant,
    name         text        collate "C" not null,
    url          text        collate "C" not null,
    kind         text        not null default 'command',
    timeout      interval    not null default interval '15 s',   -- of one try, its answer included
    replies_from text        collate "C",                        -- the sender that answers; null: the namesake
    state        text        not null default 'enabled',
    paused_until timestamptz,                                    -- the service asked for patience
    created_at   timestamptz not null default now(),

    primary key (tenant_id, name),
    constraint kind_is_known check (kind in ('command', 'event')),
    constraint state_is_known check (state in ('enabled', 'disabled')),
    constraint timeout_is_bounded check (timeout between interval '1 ms' and interval '5 min'),
    constraint pause_is_finite check (isfinite(paused_until)),
    constraint keys_are_bounded check
        (octet_length(name) between 1 and 128
         and octet_length(url) between 1 and 2048
         and octet_length(replies_from) between 1 and 128)
);


-- One row per somebody who may post to us. `waypost` is ourselves.
create table waypost.sender (
    tenant_id  int         not null references waypost.tenant,
    name       text        collate "C" not null,
    scheme     text        not null default 'standard-webhooks',
    state      text        not null default 'enabled',
    created_at timestamptz not null default now(),

    primary key (tenant_id, name),
    constraint name_is_not_ours check (name <> 'waypost'),
    constraint scheme_is_known check (scheme in ('standard-webhooks')),
    constraint state_is_known check (state in ('enabled', 'disabled', 'retired')),
    constraint keys_are_bounded check (octet_length(name) between 1 and 128)
);


-- One row per secret that is shared with an endpoint or a sender, sealed; several live side by side while one
-- is being replaced. The key's columns are sealed in with it, so that a row moved to another owner does not
-- open.
create table waypost.secret (
    tenant_id  int         not null references waypost.tenant,
    owner_kind text        not null,
    owner_name text        collate "C" not null,
    key_id     text        collate "C" not null,
    nonce      bytea       not null,
    ciphertext bytea       not null,
    created_at timestamptz not null default now(),
    expires_at timestamptz,

    primary key (tenant_id, owner_kind, owner_name, key_id),
    constraint owner_is_known check (owner_kind in ('endpoint', 'sender')),
    constraint nonce_is_whole check (octet_length(nonce) = 12),
    constraint ciphertext_is_bounded check (octet_length(ciphertext) between 17 and 1024),
    constraint keys_are_bounded check
        (octet_length(owner_name) between 1 and 128 and octet_length(key_id) between 1 and 128)
);
