-- compatible: yes
--
-- CloudEvents in the HTTP binding's binary content mode put into headers what names an event, and a Standard Webhooks
-- signature covers the body alone. So a sender may use that mode only where its row says so.


alter table waypost.sender add column binary_mode boolean not null default false;
