-- compatible: yes
--
-- What is particular to an endpoint: headers of its own, how it wants the idempotency key, its certificates; and secrets
-- that are kept elsewhere. Relays of before send without these, and do not find such a secret.

alter table waypost.endpoint
    add column headers     jsonb not null default '{}',     -- sent with each message, by name
    add column idempotency text  not null default 'bare',   -- how the header Idempotency-Key is written
    add column tls         jsonb not null default '{}',     -- files of the relay: ca, certificate, key
    add constraint headers_are_an_object check (jsonb_typeof(headers) = 'object' and octet_length(headers::text) <= 16384),
    add constraint idempotency_is_known check (idempotency in ('bare', 'quoted', 'off')),
    add constraint tls_is_an_object check (jsonb_typeof(tls) = 'object' and octet_length(tls::text) <= 8192);

-- A secret is here, sealed, or it is named: `env:NAME`, `file:PATH`, or what a manager of secrets knows.
alter table waypost.secret
    add column reference text,
    alter column nonce drop not null,
    alter column ciphertext drop not null,
    add constraint secret_is_here_or_named check
        ((nonce is null) = (ciphertext is null) and (reference is null) <> (ciphertext is null)),
    add constraint reference_is_bounded check (octet_length(reference) between 3 and 1024);
