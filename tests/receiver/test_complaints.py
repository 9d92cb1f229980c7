"""What other receivers were reported for, each as a test named after what it protects; and each answer that is owed.

REPORTS and ANSWERS say which test shows what; a test looks whether those are there. What no report is about, but what
breaks parsers (NUL, surrogates, depth, digits, bombs, headers), is named there too.
"""

from __future__ import annotations

import asyncio
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import pytest

from contracts.codec import Codec, Sealing
from contracts.envelope import decode_structured
from orchestrator.registry import set_sender
from receiver.settings import ReceiverSettings
from tests.receiver.test_intake import failing
from tests.receiver.world import (
    NOW,
    Answer,
    Connection,
    Pool,
    World,
    add_command,
    add_sender,
    add_wait,
    event,
    in_headers,
    one,
    request,
    running,
)

TESTS: Final = Path(__file__).parents[1]

REPORTS: Final[dict[str, tuple[str, ...]]] = {
    "convoy 2747: two that look before they write": (
        "receiver/test_complaints.py::test_eight_clients_that_post_one_event_at_once_are_told_it_is_one",
    ),
    "convoy 2392: a signature over what was encoded again": (
        "receiver/test_providers.py::test_a_signature_is_over_the_bytes_and_not_over_what_they_mean",
        "receiver/test_schemes.py::test_a_vector_of_its_authors_is_authentic_and_nothing_that_was_changed_is",
    ),
    "convoy 2095: a body that is cut instead of refused": (
        "receiver/test_providers.py::test_one_byte_above_the_limit_is_413_and_never_cut",
    ),
    "convoy 2754, 2656: an unknown verifier that takes everything, a header that panics": (
        "receiver/test_providers.py::test_a_sender_whose_row_is_not_understood_proves_nothing",
        "receiver/test_schemes.py::test_what_is_no_signature_is_a_mismatch_and_no_error",
    ),
    "coolhand-ruby 123 (a): a timestamp ahead outlives the memory of ids": (
        "receiver/test_complaints.py::test_a_capture_from_a_clock_that_is_ahead_is_one_event_as_long_as_it_is_fresh",
    ),
    "coolhand-ruby 123 (b): an id that was claimed before it failed": (
        "receiver/test_complaints.py::test_a_request_that_failed_has_claimed_nothing_so_its_retry_is_taken",
    ),
    "coolhand-ruby 123 (c): one signature only": (
        "receiver/test_schemes.py::test_both_secrets_of_a_rotation_prove_a_sender_while_both_sign",
    ),
    "azure durable-extension 413, 573, 378, 1989, durabletask 720: events before anybody waits": (
        "engine/test_events.py::test_an_event_that_came_before_anybody_waited_is_taken_from_the_shelf",
        "engine/test_events.py::test_events_are_given_out_one_by_one_in_the_order_of_their_arrival",
    ),
    "inngest-js 1617: a wait that lost stays open": (
        "engine/test_events.py::test_the_waits_that_lost_are_gone_and_a_later_event_finds_nobody",
    ),
    "memories 396, stripe-cli 418, stripe-firebase 119, FormSG 6022: `updated` before `created`, and copies": (
        "receiver/test_order.py::test_any_order_with_any_copies_comes_to_the_same_order",
        "receiver/test_complaints.py::test_events_in_any_order_and_twice_come_to_the_same",
        "receiver/test_order.py::test_of_one_object_the_newest_counts_where_a_sender_says_so",
    ),
    "cloudevents/spec 558: a string without its quotes": (
        "receiver/test_complaints.py::test_json_that_is_no_object_is_json_in_headers_too",
    ),
    "azure-sdk-for-net 47175: an origin that is written down in the code": (
        "receiver/test_providers.py::test_an_origin_is_a_host_of_the_list_or_below_one_and_nothing_that_looks_alike",
    ),
    "webhook-skills 185: a challenge that is acknowledged instead of answered": (
        "receiver/test_answers.py::test_a_challenge_is_answered_200_whatever_events_are_answered",
    ),
    "shopify 543046: acting before acknowledging; one event for two subscriptions": (
        "receiver/test_complaints.py::test_an_event_is_acknowledged_before_anybody_acts_on_it",
        "receiver/test_providers.py::test_two_subscriptions_that_got_one_event_are_both_kept",
    ),
    "parsers: NUL, surrogates, depth, digits, bombs, names and values of headers, framing, slow bodies": (
        "receiver/test_refusals.py::test_it_is_refused",
        "receiver/test_binary.py::test_it_is_refused_in_binary_mode",
        "receiver/test_binary.py::test_what_never_ends_is_cut_before_it_fills_memory",
        "receiver/test_providers.py::test_a_bomb_of_who_may_compress_is_cut_before_it_fills_memory",
        "receiver/test_listener.py::test_what_is_framed_badly_is_refused_and_the_connection_closed",
        "receiver/test_listener.py::test_a_body_that_drips_is_cut_with_408",
        "receiver/test_listener.py::test_a_head_that_drips_is_cut",
    ),
}

ANSWERS: Final[dict[str, tuple[str, ...]]] = {
    "202": ("receiver/test_accepting.py::test_an_event_wakes_who_waits_for_its_key",),
    "200 or 204 instead": (
        "receiver/test_answers.py::test_what_is_taken_is_acknowledged_as_its_sender_wants",
    ),
    "X-Inbox: duplicate": (
        "receiver/test_accepting.py::test_a_duplicate_gets_the_first_answer_and_changes_nothing",
    ),
    "400 with attributes": (
        "receiver/test_refusals.py::test_a_malformed_event_is_told_which_attributes_are_at_fault",
    ),
    "401, one body": ("receiver/test_refusals.py::test_all_that_is_not_authentic_gets_one_body",),
    "403": (
        "receiver/test_providers.py::test_a_sender_uses_its_own_sources",
        "receiver/test_answers.py::test_a_sender_whose_origin_must_be_allowed_names_one",
    ),
    "404, as much work": ("receiver/test_refusals.py::test_nobody_s_request_is_verified_like_anybody_s",),
    "405 with Allow": ("receiver/test_refusals.py::test_another_method_is_told_the_right_one",),
    "408": ("receiver/test_listener.py::test_a_body_that_drips_is_cut_with_408",),
    "409, or not": (
        "receiver/test_refusals.py::test_the_same_id_with_another_body_is_a_conflict",
        "receiver/test_answers.py::test_what_is_kept_apart_may_be_told_with_its_status",
        "receiver/test_answers.py::test_a_webhook_whose_name_is_taken_may_be_told_409",
    ),
    "410": ("receiver/test_refusals.py::test_a_retired_sender_is_told_so_if_it_proves_itself",),
    "413": ("receiver/test_providers.py::test_one_byte_above_the_limit_is_413_and_never_cut",),
    "414, 431": (
        "receiver/test_listener.py::test_what_is_framed_badly_is_refused_and_the_connection_closed",
    ),
    "415": ("receiver/test_binary.py::test_who_may_not_use_the_mode_is_told_what_is_expected",),
    "422, or not": ("receiver/test_answers.py::test_what_is_kept_apart_may_be_told_with_its_status",),
    "429 with Retry-After": (
        "receiver/test_providers.py::test_a_sender_above_its_rate_is_told_when_to_come_again_and_others_are_not",
        "receiver/test_providers.py::test_a_sender_has_so_many_requests_at_work_and_no_more",
    ),
    "500 without a word": ("receiver/test_listener.py::test_a_bug_is_answered_without_a_word_about_it",),
    "503 with Retry-After: no database, a lock, too many, an end, a sender that is off": (
        "receiver/test_outage.py::test_without_its_database_the_receiver_says_come_later_and_recovers_by_itself",
        "receiver/test_answers.py::test_who_waits_too_long_for_a_lock_is_told_when_to_come_again",
        "receiver/test_listener.py::test_requests_beyond_the_limit_are_asked_to_come_later",
        "receiver/test_listener.py::test_a_receiver_that_stops_finishes_what_is_at_work_and_takes_no_more",
        "receiver/test_refusals.py::test_a_sender_that_is_switched_off_is_asked_to_come_later",
    ),
}


@pytest.mark.parametrize("told", [*REPORTS.items(), *ANSWERS.items()], ids=lambda it: it[0].partition(":")[0])
def test_what_was_reported_and_what_is_owed_has_its_test(told: tuple[str, tuple[str, ...]]) -> None:
    for named in told[1]:
        path, _, name = named.partition("::")
        assert f"def {name}(" in (TESTS / path).read_text(encoding="utf-8"), named


async def test_eight_clients_that_post_one_event_at_once_are_told_it_is_one(world: World) -> None:
    # frain-dev/convoy 2747: each looks first, and then all write.
    made = request(event())
    barrier = asyncio.Barrier(8)

    async def client() -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(made[:-1])
        await writer.drain()
        await barrier.wait()
        writer.write(made[-1:])
        answer = Answer(await reader.read())
        writer.close()
        return answer

    answers = await asyncio.gather(*(client() for _ in range(8)))

    assert [answer.status for answer in answers] == [202] * 8
    assert sum("x-inbox" in answer.headers for answer in answers) == 7
    assert await one(world.conn, "select count(*) from waypost.inbox") == 1


async def test_a_capture_from_a_clock_that_is_ahead_is_one_event_as_long_as_it_is_fresh(world: World) -> None:
    # Coolhand-Labs/coolhand-ruby 123 (a): a memory of ids that ends with the tolerance, counted from the first request.
    sent = request(event(), at=NOW + 300)

    answers = [await world.send(sent)]
    for later in (301, 599, 600, 601, 86_400):
        world.receiver.clock = lambda later=later: NOW + later
        answers.append(await world.send(sent))

    assert [answer.status for answer in answers] == [202] * 6
    assert [answer.headers.get("x-inbox") for answer in answers] == [None, *["duplicate"] * 5]
    assert await one(world.conn, "select count(*) from waypost.inbox") == 1


async def test_a_request_that_failed_has_claimed_nothing_so_its_retry_is_taken(world: World) -> None:
    # Coolhand-Labs/coolhand-ruby 123 (b): an id that was claimed before the work failed made each retry a replay.
    await failing(world.conn, times=1, errcode="P0001")
    sent = request(event())

    answers = [await world.send(sent) for _ in range(3)]

    assert [answer.status for answer in answers] == [500, 202, 202]
    assert [answer.headers.get("x-inbox") for answer in answers[1:]] == [None, "duplicate"]


TYPES: Final = ("order.created", "order.updated", "order.closed")


async def test_events_in_any_order_and_twice_come_to_the_same(world: World) -> None:
    # webrenew/memories 396, stripe-cli 418, stripe-firebase-extensions 119, FormSG 6022: `updated` before `created`.
    orders = list(permutations(range(3)))
    for key in map(str, range(len(orders))):
        execution_id, _ = await add_command(world.conn)
        for type_ in TYPES:
            await world.conn.execute(
                "insert into waypost.wait (tenant_id, execution_id, path, type, key) values (1, %s, %s, %s, %s)",
                (execution_id, type_, type_, key),
            )
        events = [event(id=f"{type_}-{key}", type=type_, subject=key, data=type_) for type_ in TYPES]
        order = orders[int(key)]

        answers = [await world.post(events[index]) for index in (*order, *reversed(order))]

        assert {answer.status for answer in answers} == {202}
        mail = await (
            await world.conn.execute(
                """
                select m.path, i.event_id, i.data
                  from waypost.mail m
                  join waypost.inbox i using (inbox_id)
                 where m.execution_id = %s
                 order by m.path
                """,
                (execution_id,),
            )
        ).fetchall()
        assert mail == [(type_, f"{type_}-{key}", type_) for type_ in sorted(TYPES)]
        received = "select mail_received from waypost.execution where execution_id = %s"
        assert await one(world.conn, received, execution_id) == 3


@pytest.mark.parametrize(("body", "data"), [(b'"x"', "x"), (b"true", True), (b"7", 7), (b"null", None)])
async def test_json_that_is_no_object_is_json_in_headers_too(world: World, body: bytes, data: Any) -> None:
    # cloudevents/spec 558: a string without its quotes.
    await set_sender(world.conn, "payments", binary_mode=True)

    answer = await world.send(in_headers(event(), body=body))
    bare = await world.refused(in_headers(event(id="hostile"), body=b"x"))

    assert (answer.status, bare.status, bare.json["attributes"]) == (202, 400, ["data"])
    stored, kept = await one(world.conn, "select data, body from waypost.inbox")
    assert (stored, decode_structured(kept).data) == (data, body)


@pytest.mark.parametrize("payload_keys", [False, True])
async def test_a_stranger_cannot_send_what_looks_sealed(
    world: World, payload_keys: bool
) -> None:  # a parameter
    """Whoever waits for it would be held for a key that nobody has."""
    Sealing.codec = Codec([("k", bytes(32))], bytes) if payload_keys else None
    try:
        answer = await world.refused(request(event(data={"sealed": {"key": "x", "box": "y"}})))
        beside = await world.post(event(id="e2", data={"sealed": {"key": "x", "box": "y"}, "order": 1}))
    finally:
        Sealing.codec = None

    assert (answer.status, answer.json["attributes"], beside.status) == (400, ["data"], 202)


async def test_an_event_is_acknowledged_before_anybody_acts_on_it(pool: Pool, conn: Connection) -> None:
    # Shopify 543046: whoever acts first and acknowledges then is sent the event again after five seconds.
    await add_sender(conn)
    execution_id = await add_wait(conn, type="payout.made", key="order-1042")
    async with running(pool, conn, settings=ReceiverSettings(wait_seconds=5)) as world:
        answer = await world.post(event())

    assert answer.status == 202
    got = await one(
        conn,
        "select mail_received, mail_read, owner from waypost.execution where execution_id = %s",
        execution_id,
    )
    assert got == (1, 0, None)
