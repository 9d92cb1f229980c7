-- compatible: yes
--
-- Which objects of the payload store rows name, so that those that none names can be removed (`waypost payloads sweep`).
--
-- Rows that name none, nearly all, are in neither index.

create index journal_objects on waypost.journal using gin (jsonb_path_query_array(payload, '$.objects.*.sha256'))
    where payload ? 'objects';

create index inbox_objects on waypost.inbox using gin (jsonb_path_query_array(data, '$.objects.*.sha256'))
    where data ? 'objects';
