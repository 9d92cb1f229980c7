-- compatible: yes
--
-- Whether an endpoint wants an event as one document, or its attributes in headers and its data as the body.

alter table waypost.endpoint
    add column mode text not null default 'structured',
    add constraint mode_is_known check (mode in ('structured', 'binary'));
