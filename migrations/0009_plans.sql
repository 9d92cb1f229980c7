-- compatible: yes
--
-- Plans that are made once. The functions below have plans that are fixed by their switches (no sequential scan, no hash
-- and no merge join), so another plan would be no better; and yet PostgreSQL, which estimates that it would be, planned
-- statements of post_mail anew in nearly every call: 1.2 ms for one of them, of 1.6 ms for a single reply.

alter function waypost.post_mail(
    int[], text[], text[], text[], text[], text[], text[], text[], bytea[], jsonb[], uuid[], uuid[], int[], text[],
    bytea[], uuid[], bigint[], bigint[], interval, timestamptz, text[])
    set plan_cache_mode = force_generic_plan;

alter function waypost.facts_of(int[], uuid[])
    set plan_cache_mode = force_generic_plan;
