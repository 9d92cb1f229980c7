-- compatible: yes
--
-- What an endpoint's answer had in its headers, as far as it is kept: by name, the names in small letters.

alter table waypost.delivery
    add column headers jsonb,
    add constraint headers_are_bounded check
        (jsonb_typeof(headers) = 'object' and octet_length(headers::text) <= 16384);
