-- compatible: yes
--
-- Senders that prove themselves in other ways than Standard Webhooks. Which one is a name, and what is particular to a
-- sender is `settings`: the receiver reads both, and refuses everybody whose row it does not understand. So the names
-- are not listed here. A secret may be the public half of a key.


alter table waypost.sender
    drop constraint scheme_is_known,
    add column settings jsonb not null default '{}',
    add constraint scheme_is_bounded check (octet_length(scheme) between 1 and 64),
    add constraint settings_are_an_object check (jsonb_typeof(settings) = 'object'),
    add constraint settings_are_bounded check (octet_length(settings::text) <= 16384);

alter table waypost.secret
    add column algorithm text not null default 'hmac',
    add constraint algorithm_is_known check (algorithm in ('hmac', 'ed25519'));
