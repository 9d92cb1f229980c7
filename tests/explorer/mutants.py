"""Flaws that the protocol could have: each is put into the project's own text, and one order shows that it is one.

Most were found in drafts of the protocol. A flaw that nothing shows would mean that what it takes away is not needed,
or that nobody looks.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Final

import psycopg

from tests.explorer import of_mail, of_messages, of_waits
from tests.explorer.catalogue import RACES
from tests.explorer.races import Came, Race


@dataclass(frozen=True, slots=True)
class Edit:
    """In one place of `text`, `old` becomes `new`; how it is broken into lines does not matter.

    `text` is a function of the database (`settle`) or a statement of ours (`orchestrator.store.workers.BURY`).
    """

    text: str
    old: str
    new: str = ""

    def of(self, found: str) -> str:
        """`found`, edited. Fails unless `old` is there, once."""
        pattern = r"\s+".join(re.escape(word) for word in self.old.split())
        edited, count = re.subn(pattern, lambda _: self.new, found)
        assert count == 1, f"{self.text} has {count} places like: {self.old}"
        return edited


@dataclass(frozen=True, slots=True)
class Mutant:
    """A flaw, and the order of a race that shows it by a complaint like `shows`."""

    name: str
    race: str
    order: str
    shows: str
    edits: tuple[Edit, ...] = ()
    flawed: Race | None = None
    """The race with another program, where the flaw is one of the client's."""

    def __str__(self) -> str:
        return self.name

    def is_seen_in(self, came: Came) -> bool:
        return any(self.shows in complaint for complaint in came.complaints)


@contextmanager
def applied(edits: Sequence[Edit], conn: psycopg.Connection[Any]) -> Generator[None]:
    """What `edits` name is as they say, until the block ends."""
    with ExitStack() as stack:
        for edit in edits:
            text = edit.of(text_of(edit.text, conn))
            stack.enter_context(replaced(edit.text, text, conn))
        yield


@contextmanager
def replaced(name: str, text: str, conn: psycopg.Connection[Any]) -> Generator[None]:
    """A function of the database, or a statement of ours, is `text` until the block ends."""
    before = text_of(name, conn)
    write(name, text, conn)
    try:
        yield
    finally:
        write(name, before, conn)


def text_of(name: str, conn: psycopg.Connection[Any]) -> str:
    module, _, constant = name.rpartition(".")
    if module:
        return getattr(import_module(module), constant)
    row = conn.execute("select pg_get_functiondef(%s::regproc)", (f"waypost.{name}",)).fetchone()
    assert row is not None
    return row[0]


def write(name: str, text: str, conn: psycopg.Connection[Any]) -> None:
    module, _, constant = name.rpartition(".")
    if module:
        setattr(import_module(module), constant, text)
    else:
        conn.execute(text.encode())


def flawed(race: str, build: Any, **how: bool) -> Race:
    return replace(RACES[race], build=partial(build, **how))


ROWS_OF_TRIES: Final = """
    perform 1
       from waypost.execution e
      where (e.tenant_id, e.execution_id) in
            (select o.tenant_id, o.execution_id
               from unnest(p_tenant, p_message) as t(tenant_id, message_id)
               join waypost.outbox o on o.tenant_id = t.tenant_id and o.message_id = t.message_id)
      order by e.tenant_id, e.execution_id
        for no key update of e;"""

MESSAGES: Final = """
    perform 1
       from waypost.outbox o
      where (o.tenant_id, o.message_id) in (select * from unnest(p_tenant, p_message))
      order by o.tenant_id, o.message_id
        for no key update of o;"""

MUTANTS: Final = [
    # -- the order of locks ----------------------------------------------------------------------------------
    Mutant(
        "a commit locks its rows while it writes them",
        "three_ways_a_commit_replies_and_an_order",
        "222211110002200",
        "40P01",
        (Edit("commit_turns", "perform waypost.lock_rows(t_tenant, t_execution);"),),
    ),
    Mutant(
        "rows are locked in the order of the turns",
        "replies_to_two_and_a_commit_of_both_cross",
        "100011111",
        "40P01",
        (
            Edit(
                "lock_rows",
                """
                perform 1
                   from waypost.execution e
                  where (e.tenant_id, e.execution_id) in (select * from unnest(p_tenant, p_execution))
                  order by e.tenant_id, e.execution_id
                    for no key update of e;
                """,
                """
                for n in 1 .. cardinality(p_execution) loop
                    perform 1 from waypost.execution where execution_id = p_execution[n] for no key update;
                    perform explorer.stop('row locked');
                end loop;
                """,
            ),
        ),
    ),
    Mutant(
        "rows are locked in the order of the mail",
        "settlements_and_replies_cross",
        "00010000",
        "40P01",
        (
            Edit(
                "post_mail",
                """
                perform 1
                   from waypost.execution e
                  where (e.tenant_id, e.execution_id) in (select * from unnest(v_to_tenant, v_to))
                  order by e.tenant_id, e.execution_id
                    for no key update of e;
                """,
                """
                for n in 1 .. cardinality(v_to) loop
                    perform 1 from waypost.execution e where e.execution_id = v_to[n] for no key update;
                    perform explorer.stop('row locked');
                end loop;
                """,
            ),
        ),
    ),
    Mutant(
        "keys are locked in the order of the events",
        "batches_that_cross_do_not_deadlock",
        "0110000000",
        "40P01",
        (
            Edit(
                "post_mail",
                "if v_events or array_length(array_remove(p_webhook, null), 1) > 0 then",
                """
                for n in 1 .. cardinality(p_kind) loop
                    if p_kind[n] = 'event' then
                        perform pg_advisory_xact_lock(waypost.event_key(p_tenant[n], p_type[n], p_key[n]));
                        perform explorer.stop('key locked');
                    end if;
                end loop;
                if false then
                """,
            ),
        ),
    ),
    Mutant(
        "keys are locked in the order of the waits",
        "events_and_registrations_of_two_keys_that_cross_do_not_deadlock",
        "101111111",
        "40P01",
        (
            Edit(
                "lock_keys",
                """
                perform pg_advisory_xact_lock(s.k)
                   from (select distinct waypost.event_key(t.tenant_id, t.type, t.key) as k
                           from unnest(p_tenant, p_type, p_key) as t(tenant_id, type, key)
                          order by 1) s;
                """,
                """
                for n in 1 .. cardinality(p_key) loop
                    perform pg_advisory_xact_lock(waypost.event_key(p_tenant[n], p_type[n], p_key[n]));
                    perform explorer.stop('key locked');
                end loop;
                """,
            ),
        ),
    ),
    Mutant(
        "webhook ids are not locked",
        "three_batches_whose_webhook_ids_cross_do_not_deadlock",
        "220011222000",
        "40P01",
        (Edit("post_mail", "where t.webhook_id is not null", "where false"),),
    ),
    Mutant(
        "items are stored in the order in which they come",
        "three_batches_of_the_same_items_do_not_deadlock",
        "220011222000",
        "40P01",
        (
            Edit(
                "post_mail",
                """order by t.tenant_id, t.sender collate "C", t.source collate "C", t.event_id collate "C", t.ord""",
                "order by t.ord",
            ),
        ),
    ),
    Mutant(
        "executions are created in the order in which they come",
        "three_batches_of_starts_do_not_deadlock",
        "2012200",
        "40P01",
        (
            Edit(
                "start_executions",
                """order by t.tenant_id, t.definition collate "C", t.business_key collate "C", t.execution_id, t.ord""",
                "order by t.ord",
            ),
        ),
    ),
    Mutant(
        "a settlement locks messages before executions",
        "a_reply_and_a_refusal_of_its_message_agree",
        "0001100",
        "40P01",
        (
            Edit(
                "settle",
                f"{ROWS_OF_TRIES} perform explorer.stop('settle: rows locked'); {MESSAGES}",
                f"{MESSAGES} perform explorer.stop('messages locked first'); {ROWS_OF_TRIES}",
            ),
        ),
    ),
    Mutant(
        "a relay settles a try and stores its reply in one transaction",
        "a_reply_in_an_answer_and_the_same_reply_posted_agree",
        "00111110000",
        "40P01",
        flawed=flawed(
            "a_reply_in_an_answer_and_the_same_reply_posted_agree", of_messages.answered, at_once=True
        ),
    ),
    Mutant(
        "who tells another execution locks only its own row first",
        "two_that_end_and_tell_each_other_do_not_deadlock",
        "000111110000",
        "40P01",
        flawed=flawed(
            "two_that_end_and_tell_each_other_do_not_deadlock", of_mail.two_that_end, locks_all=False
        ),
    ),
    Mutant(
        "a claim waits for what another claims",
        "two_workers_claim_nothing_twice",
        "0101",
        "it waited for a lock",
        (Edit("claim_due", "for no key update skip locked", "for no key update"),),
    ),
    Mutant(
        "a relay's claim waits for what another claims",
        "two_relays_claim_nothing_twice",
        "0101",
        "it waited for a lock",
        (Edit("relay.outbox.CLAIM", "for no key update skip locked", "for no key update"),),
    ),
    # -- mail ------------------------------------------------------------------------------------------------
    Mutant(
        "a duplicate is looked for by the snapshot that stored",
        "the_same_replies_twice_at_once_are_stored_once",
        "0100001",
        "40001: a duplicate disappeared",
        (
            Edit("post_mail", "v_new bigint[];", "v_new bigint[]; v_seen bigint[];"),
            Edit(
                "post_mail",
                "with new as (",
                "select array_agg(b.inbox_id) into v_seen from waypost.inbox b; with new as (",
            ),
            Edit(
                "post_mail",
                "where j.tenant_id = t.tenant_id and j.sender = t.sender and j.source = t.source",
                """where j.inbox_id = any(v_seen || v_new)
                     and j.tenant_id = t.tenant_id and j.sender = t.sender and j.source = t.source""",
            ),
        ),
    ),
    Mutant(
        "two pieces of mail count as one",
        "a_turn_that_read_mail_and_released_is_woken_by_the_next",
        "000001111",
        "23505",
        (
            Edit(
                "post_mail", "mail_received = e.mail_received + c.n,", "mail_received = e.mail_received + 1,"
            ),
        ),
    ),
    Mutant(
        "mail of an execution needs no fact",
        "the_end_of_a_child_told_by_a_stale_worker_and_a_takeover",
        "1100000000",
        "outcome: not matched, taken 1, mail 1",
        (Edit("post_mail", "or p_from[t.ord] is null", "or true"),),
    ),
    Mutant(
        "an order is mail though its sender was told that nobody gets it",
        "an_order_and_the_start_of_its_execution",
        "01110000",
        "outcome: started, order unmatched, mail 1",
        (
            Edit(
                "post_mail",
                "and t.answer = 'mail'",
                "and t.kind <> 'event' and (o.message_id is not null or x.execution_id is not null)",
            ),
        ),
    ),
    Mutant(
        "executions are created in the order of their events",
        "three_batches_whose_business_keys_cross_do_not_deadlock",
        "2222200000111112200",
        "40P01",
        (
            Edit(
                "start_by_events",
                """order by s.tenant_id, s.definition collate "C", s.key collate "C", s.inbox_id""",
                "order by s.inbox_id",
            ),
        ),
    ),
    Mutant(
        "an execution may wait for the event that started it",
        "an_execution_that_an_event_has_started_and_the_next_of_its_key",
        "00000000000000011111111",
        "event that is input and mail",
        (
            Edit("start_by_events", "p_now, 1, s.inbox_id,", "p_now, 1, 0,"),
            Edit("start_by_events", "where i.inbox_id in (select new.events_after from new)", "where false"),
        ),
    ),
    # -- turns -----------------------------------------------------------------------------------------------
    Mutant(
        "a release does not look for unread mail",
        "a_reply_and_a_release_lose_no_wake_up",
        "0000001111",
        "lost wake-up",
        (Edit("commit_turns", "when e.mail_received > e.mail_read + t.mail then v_now"),),
    ),
    Mutant(
        "a release to paused does not look for orders",
        "a_release_to_paused_and_an_order_lose_no_order",
        "0000001111",
        "lost order",
        (
            Edit(
                "commit_turns",
                "case when e.orders_received > e.orders_read + t.orders then v_now end",
                "null",
            ),
        ),
    ),
    Mutant(
        "an ask does not look for orders",
        "nothing_is_asked_after_an_order_that_was_acknowledged",
        "0000001111",
        "outcome: order first: matched, messages 1",
        (Edit("commit_turns", "and (not t.asks or e.orders_received = e.orders_read + t.orders)"),),
    ),
    Mutant(
        "a timeout does not look for mail",
        "a_reply_and_a_timeout_are_decided_by_the_row",
        "11100000011111",
        "outcome: timed out, with a reply unread",
        flawed=flawed(
            "a_reply_and_a_timeout_are_decided_by_the_row", of_mail.reply_and_timeout, guarded=False
        ),
    ),
    Mutant(
        "a turn has read whatever was received",
        "a_turn_that_read_mail_and_released_is_woken_by_the_next",
        "0000001111",
        "outcome: due 1, read 3 of 3",
        (Edit("commit_turns", "mail_read = e.mail_read + t.mail,", "mail_read = e.mail_received,"),),
    ),
    Mutant(
        "a commit does not compare owner, fence and position",
        "a_stale_commit_and_a_takeover",
        "1100",
        "23505",
        (
            Edit(
                "commit_turns",
                "and (e.owner = p_me) is true and e.fence = t.fence and e.position = t.position",
            ),
        ),
    ),
    Mutant(
        "messages of a turn that did not match are stored",
        "a_stale_turn_that_asks_waits_and_takes_back_and_a_takeover_with_a_claim",
        "1111000000",
        "message without its fact",
        (
            Edit(
                "commit_turns",
                "where ((m.tenant_id, m.execution_id) in (select d.tenant_id, d.execution_id from done d)) is true",
            ),
        ),
    ),
    Mutant(
        "a turn that did not match takes back",
        "a_stale_turn_that_asks_waits_and_takes_back_and_a_takeover_with_a_claim",
        "11110000000000",
        "outcome: not matched, withdrawn",
        (
            Edit(
                "take_back",
                """join waypost.journal g
                     on g.tenant_id = t.tenant_id
                    and g.execution_id = t.execution_id
                    and g.position = t.position
                    and g.fence = t.fence""",
                "cross join (select 1) g",
            ),
        ),
    ),
    Mutant(
        "who lets its lease end is taken over without being buried",
        "a_renewal_and_the_end_of_the_lease_agree",
        "011110",
        "outcome: renewed, taken 1",
        (
            Edit("orchestrator.store.workers.BURY", "where dead_at is null", "where false"),
            Edit(
                "orchestrator.store.workers.TAKE_OVER",
                "and w.dead_at is not null",
                "and w.lease_until < now()",
            ),
        ),
    ),
    # -- messages --------------------------------------------------------------------------------------------
    Mutant(
        "what is being sent is taken back as never sent",
        "taking_back_and_a_claim_agree",
        "001111",
        "23514",
        (Edit("take_back", "case when o.state = 'sending' then 'stopping' when", "case when"),),
    ),
    Mutant(
        "a try is settled without its token",
        "a_settlement_and_another_relay_that_expires_and_claims_agree",
        "11111111000000000",
        "outcome: the try of another was settled",
        (Edit("settle", "and o.token = t.token"),),
    ),
    Mutant(
        "a settlement forgets that the reply came",
        "a_reply_and_a_refusal_of_its_message_agree",
        "000000111111111",
        "outcome: refused: reply r1, refused no",
        (Edit("settle", "or (old.replied and old.state = 'sending')"),),
    ),
    Mutant(
        "an expiry does not look again under the locks",
        "a_settlement_and_the_expiry_of_its_claim_agree",
        "100000000011111",
        "outcome: due: refused no",
        (
            Edit(
                "expire_claims",
                "join waypost.outbox o using (tenant_id, message_id)"
                " where o.state in ('sending', 'stopping') and o.lease_until < v_now",
                "join waypost.outbox o using (tenant_id, message_id)",
            ),
        ),
    ),
    Mutant(
        "an expiry does not ask whose claim it is that it ends",
        "an_expiry_and_a_relay_that_settles_too_late_and_claims_anew_agree",
        "0111111100000",
        "outcome: claimed 1: due",
        (
            Edit(
                "expire_claims",
                "where o.state in ('sending', 'stopping') and o.lease_until < v_now ),",
                "where o.state in ('sending', 'stopping') ),",
            ),
        ),
    ),
    Mutant(
        "an expiry sends again what is sent at most once",
        "a_settlement_and_the_expiry_of_its_claim_at_most_once_agree",
        "11111100000",
        "outcome: due: -",
        (Edit("expire_claims", "when old.at_most_once then 'dead'"),),
    ),
    Mutant(
        "an expiry forgets that the reply came",
        "a_reply_and_a_claim_that_expires_agree",
        "0000001111111111",
        "outcome: dead: reply r1, unknown sent",
        (Edit("expire_claims", "when old.replied then 'delivered'"),),
    ),
    Mutant(
        "a delivery is settled without its token",
        "a_delivery_and_another_relay_that_expires_and_claims_agree",
        "1111111100",
        "outcome: the try of another was settled",
        (
            Edit(
                "relay.outbox.DELIVER",
                "(o.token = t.token and o.state = 'sending') is true",
                "o.state = 'sending'",
            ),
        ),
    ),
    Mutant(
        "a delivery forgets that its message was taken back",
        "taking_back_and_a_delivery_agree",
        "111111100",
        "outcome: delivered: -",
        (Edit("relay.outbox.DELIVER", "and o.state = 'sending'"),),
    ),
    # -- waits -----------------------------------------------------------------------------------------------
    Mutant(
        "an event does not lock its key",
        "an_event_and_a_registration_meet",
        "00001111110",
        "open wait and eligible event",
        (Edit("post_mail", "where t.kind = 'event' union", "where false union"),),
    ),
    Mutant(
        "a registration does not lock its key",
        "an_event_and_a_registration_meet",
        "00001111110",
        "open wait and eligible event",
        (Edit("commit_turns", "perform waypost.lock_keys(k_tenant, k_type, k_key);", "null;"),),
    ),
    Mutant(
        "a registration locks its key in the statement that looks at the shelf",
        "an_event_and_a_registration_meet",
        "00001111110",
        "open wait and eligible event",
        (
            Edit("commit_turns", "perform waypost.lock_keys(k_tenant, k_type, k_key);", "null;"),
            Edit(
                "match_waits",
                "join waypost.wait w using (tenant_id, execution_id, path) where",
                """join waypost.wait w using (tenant_id, execution_id, path)
                  cross join lateral
                        (select pg_advisory_xact_lock(waypost.event_key(w.tenant_id, w.type, w.key))) locked
                  where""",
            ),
        ),
    ),
    Mutant(
        "a commit locks rows before keys",
        "an_event_and_a_wait_that_times_out_agree",
        "00011000",
        "40P01",
        (
            Edit(
                "commit_turns",
                """if k_tenant <> '{}' then
                       perform waypost.lock_keys(k_tenant, k_type, k_key);
                       perform explorer.stop('commit_turns: keys locked');
                   end if;
                   perform waypost.lock_rows(t_tenant, t_execution);
                   perform explorer.stop('commit_turns: rows locked');""",
                """perform waypost.lock_rows(t_tenant, t_execution);
                   perform explorer.stop('commit_turns: rows locked');
                   perform waypost.lock_keys(k_tenant, k_type, k_key);
                   perform explorer.stop('commit_turns: keys locked');""",
            ),
        ),
    ),
    Mutant(
        "a turn that gives up a wait does not lock its key",
        "an_event_and_a_wait_that_times_out_agree",
        "00011111000",
        "event for a wait that is gone",
        flawed=flawed("an_event_and_a_wait_that_times_out_agree", of_waits.timeout, locks=False),
    ),
    Mutant(
        "a turn that gives up a wait does not look for mail",
        "an_event_and_a_wait_that_times_out_agree",
        "00000011111",
        "event for a wait that is gone",
        flawed=flawed("an_event_and_a_wait_that_times_out_agree", of_waits.timeout, guards=False),
    ),
    Mutant(
        "a turn that gives up a wait neither locks nor looks",
        "an_event_and_a_wait_that_times_out_agree",
        "00000011111",
        "event for a wait that is gone",
        flawed=flawed(
            "an_event_and_a_wait_that_times_out_agree", of_waits.timeout, locks=False, guards=False
        ),
    ),
    Mutant(
        "an event is mail for every wait, filled or not",
        "an_event_and_a_turn_that_goes_from_a_filled_wait_to_the_next",
        "0000001111111",
        "event for a wait that is gone",
        (Edit("post_mail", "and w.inbox_id is null"),),
    ),
    Mutant(
        "a wait may get what its execution has had",
        "a_turn_that_has_not_read_an_event_waits_for_the_next_of_its_key",
        "00000111111",
        "23505",
        (
            Edit(
                "match_waits",
                "and i.inbox_id > greatest(x.had, x.events_after)",
                "and i.inbox_id > x.events_after",
            ),
        ),
    ),
    Mutant(
        "a wait may get what others had before its execution was there",
        "an_event_and_the_start_of_an_execution_that_waits_for_it",
        "000000111111111111",
        "outcome: the event came before X: e1",
        (Edit("match_waits", "and i.inbox_id > greatest(x.had, x.events_after)", "and i.inbox_id > x.had"),),
    ),
    Mutant(
        "what a wait gets from the shelf is not marked as taken",
        "two_that_take_from_the_shelf_what_nobody_has",
        "00000001111111",
        "outcome: A e1, B e1",
        (Edit("match_waits", "set taken = true", "set taken = false"),),
    ),
    Mutant(
        "an event from the shelf wakes who is paused",
        "a_release_to_paused_that_registers_and_an_event",
        "000001111111",
        "woken while paused",
        (
            Edit(
                "match_waits",
                "case when e.status = 'open' then least(e.wake_at, v_now) else e.wake_at end",
                "least(e.wake_at, v_now)",
            ),
        ),
    ),
    Mutant(
        "an event that arrives wakes who is paused",
        "a_release_to_paused_and_an_event_for_its_wait",
        "11111000000",
        "woken while paused",
        (Edit("post_mail", "or (e.status in ('paused', 'held') and c.orders = 0)"),),
    ),
    Mutant(
        "a turn that did not match registers its waits",
        "a_stale_turn_that_asks_waits_and_takes_back_and_a_takeover_with_a_claim",
        "111100000000",
        "outcome: not matched, due, waits 1",
        (
            Edit(
                "commit_turns",
                """where ((w.tenant_id, w.execution_id) in (select * from unnest(v_tenant, v_execution))) is true
                   order by""",
                "order by",
            ),
        ),
    ),
    # -- errands of applications -------------------------------------------------------------------------------
    Mutant(
        "an application that was told an id is not told that another one has the key",
        "two_applications_that_start_one_key",
        "0011",
        "outcome: 1: ",
        (Edit("do_errands", "exit when not found;", "exit when not found or v_found.outcome = 'exists';"),),
    ),
    Mutant(
        "an input is equal only when the same program wrote it",
        "an_application_and_a_client_that_start_one_key",
        "00000",
        "outcome: 1: told, conflict",
        (
            Edit(
                "start_executions", "and g.position = 1) then 'exists'", "and g.position = 1) then 'conflict'"
            ),
        ),
    ),
    # -- mutexes ---------------------------------------------------------------------------------------------
    Mutant(
        "a mutex is marked before the row of who gets it is locked",
        "who_is_next_withdraws_while_it_is_given",
        "01111111000",
        "40P01",
        (
            Edit(
                "grant_mutexes",
                """
                perform waypost.lock_rows(array_agg(m.tenant_id), array_agg(m.execution_id))
                   from waypost.mutex m
                  where m.ticket = any(v_first);
                """,
            ),
        ),
    ),
    Mutant(
        "whether somebody has a mutex is asked before its key is locked, and not after",
        "two_workers_give_one_key",
        "0111111111000",
        "23505",
        (
            Edit(
                "grant_mutexes",
                """
                and not exists (select 1
                                  from waypost.mutex h
                                 where h.granted_at is not null
                                   and h.tenant_id = m.tenant_id
                                   and h.kind = m.kind
                                   and h.key = m.key)
                """,
            ),
        ),
    ),
    # -- lanes -----------------------------------------------------------------------------------------------
    Mutant(
        "the next of a lane is looked for before the lane is locked",
        "an_event_that_enters_a_lane_and_the_end_of_the_only_one_in_it",
        "11100000100",
        "waits in a lane behind nothing",
        (
            Edit(
                "advance_lanes",
                """
                perform 1
                   from waypost.lane l
                  where l.command = p_commands
                    and (l.tenant_id, l.endpoint, l.lane) in (select * from unnest(v_tenant, v_endpoint, v_lane))
                  order by l.tenant_id, l.endpoint, l.lane
                    for no key update of l;
                """,
            ),
        ),
    ),
    Mutant(
        "the next of a lane goes without a look at its head",
        "two_looks_at_a_lane_in_which_one_has_ended",
        "111110000000",
        "two of one lane on their way",
        (
            Edit(
                "advance_lanes",
                """
                where (h.state in ('waiting', 'due', 'sending', 'stopping')
                       or (h.state = 'dead' and not h.command and h.fault <> 'skipped'
                           and coalesce(e.on_dead, 'block') = 'block')) is not true
                  and
                """,
                "where",
            ),
        ),
    ),
    Mutant(
        "lanes are locked in another order than that in which events enter them",
        "an_event_for_two_lanes_and_two_looks_at_them_do_not_deadlock",
        "002211100001",
        "40P01",
        (
            Edit(
                "advance_lanes",
                "order by l.tenant_id, l.endpoint, l.lane for no key update",
                "order by l.tenant_id, l.endpoint, l.lane desc for no key update",
            ),
        ),
    ),
    Mutant(
        "what ends leaves no note of its lane",
        "the_next_command_of_a_lane_that_is_taken_back_as_it_is_let_go",
        "000000001111",
        "waits in a lane behind nothing",
        (
            Edit(
                "leave_lane",
                """
                insert into waypost.lane_free (tenant_id, command, endpoint, lane)
                values (new.tenant_id, new.command, new.endpoint, new.lane);
                """,
            ),
        ),
    ),
    Mutant(
        "whether something still is a dead letter is not asked under its lock",
        "two_people_who_put_one_dead_letter_back",
        "001101",
        "outcome: 1 and 1",
        (
            Edit(
                "put_back",
                """
                perform 1
                   from waypost.outbox o
                  where o.tenant_id = p_tenant
                    and o.message_id = any(p_message)
                  order by o.tenant_id, o.message_id
                    for no key update of o;
                """,
            ),
        ),
    ),
    Mutant(
        "a commit of a family locks rows before keys",
        "an_event_and_a_wait_that_times_out_as_a_child_begins",
        "001100000",
        "40P01",
        (
            Edit(
                "lock_families",
                """if k_tenant <> '{}' then
                       perform waypost.lock_keys(k_tenant, k_type, k_key);
                       perform explorer.stop('lock_families: keys locked');
                   end if;
                   perform waypost.lock_rows(r_tenant, r_execution);
                   perform explorer.stop('lock_families: rows locked');""",
                """perform waypost.lock_rows(r_tenant, r_execution);
                   perform explorer.stop('lock_families: rows locked');
                   perform waypost.lock_keys(k_tenant, k_type, k_key);
                   perform explorer.stop('lock_families: keys locked');""",
            ),
        ),
    ),
]
