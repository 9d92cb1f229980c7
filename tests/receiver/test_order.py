"""Events reach flows in the order of their `sequence`, where a sender asks for it: whatever order they come in."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import permutations
from typing import Any, Final

import pytest
from psycopg.errors import LockNotAvailable

from contracts.codec import Codec, Sealing
from orchestrator import inbox
from orchestrator.inbox import StillApart
from orchestrator.registry import set_sender
from orchestrator.store import inbox as store
from orchestrator.store.situation import ahead
from receiver import streams
from receiver.admission import APART_MAX
from receiver.settings import ReceiverSettings
from receiver.streams import Stream, lock
from tests.receiver.test_batches import batch
from tests.receiver.test_quarantine import PAYOUT, expect
from tests.receiver.world import (
    NOON,
    VAULT,
    Answer,
    Connection,
    Pool,
    World,
    add_command,
    add_sender,
    event,
    one,
    request,
    running,
)
from tests.waiting import until

GIVEN: Final = """
    select i.source, i.event_id
      from waypost.mail m
      join waypost.inbox i using (inbox_id)
     order by i.source collate "C", i.key collate "C", m.mail_number
"""


async def ordered(conn: Connection) -> None:
    """With more patience than any test has."""
    await set_sender(conn, "payments", settings={"ordered": {"gap": 3600}})


@pytest.fixture
async def world(pool: Pool, conn: Connection) -> AsyncIterator[World]:
    """A receiver whose sender numbers its events."""
    await add_sender(conn)
    await ordered(conn)
    async with running(pool, conn) as world:
        yield world


async def waits(conn: Connection, key: str, count: int = 3) -> str:
    """An execution that waits for so many events of a key."""
    execution_id, _ = await add_command(conn)
    for number in range(count):
        await conn.execute(
            "insert into waypost.wait (tenant_id, execution_id, path, type, key) values (1, %s, %s, 'payout.made', %s)",
            (execution_id, f"paid#{number}", key),
        )
    return str(execution_id)


def numbered(number: int, *, source: str = "/payments", key: str = "7", **more: Any) -> dict[str, Any]:
    return event(id=f"e{number}", source=source, subject=key, sequence=f"{number:04}", **more)


async def given(conn: Connection) -> list[str]:
    """The ids of events in the order in which executions got them."""
    return [event_id for _, event_id in await (await conn.execute(GIVEN)).fetchall()]


async def until_given(conn: Connection, *ids: str) -> None:
    async def are() -> bool:
        return len(await given(conn)) >= len(ids)

    await until(are, what=f"{ids} given")
    assert await given(conn) == list(ids)


async def two_wait(conn: Connection) -> bool:
    """Whether two of our backends wait for a lock."""
    query = """
        select count(*)
          from pg_stat_activity
         where wait_event_type = 'Lock'
           and datname = current_database()
    """
    return await one(conn, query) == 2


async def time_passes(world: World) -> None:
    """The patience of whatever is in line is over."""
    await world.conn.execute("update waypost.quarantine set due_at = now() where due_at is not null")
    world.receiver.streams.look()


def said(answer: Answer) -> tuple[int, str, bool]:
    return answer.status, answer.json["answer"], "x-inbox" in answer.headers


async def test_any_order_with_any_copies_comes_to_the_same_order(world: World) -> None:
    # webrenew/memories 396, stripe-cli 418, FormSG 6022: `updated` came before `created`.
    orders = list(permutations((1, 2, 3)))
    for at in range(len(orders)):
        await waits(world.conn, f"key-{at}")

    for at, order in enumerate(orders):
        for number in (*order, *order[::-1]):
            answer = await world.post(numbered(number, source=f"/s{at}", key=f"key-{at}"))
            assert said(answer)[:2] == (202, "event")

    await until_given(world.conn, *["e1", "e2", "e3"] * len(orders))
    assert await one(world.conn, "select count(*) from waypost.inbox") == 3 * len(orders)
    assert await one(world.conn, "select count(*) from waypost.quarantine where due_at is not null") == 0


async def test_who_is_ahead_waits_and_is_listed_with_what_it_waits_for(world: World) -> None:
    execution_id = await waits(world.conn, "7")

    first, again = [await world.post(numbered(2)) for _ in range(2)]

    assert (said(first), said(again)) == ((202, "event", False), (202, "event", True))
    assert await given(world.conn) == []
    [item] = await store.read(world.conn, tenant=1, reason="ahead", limit=5)
    why = "\n".join(await inbox.explain(world.conn, await inbox.find(world.conn, item.id), now=NOON))
    assert "waits for the event before it" in why
    assert "0001, the one before 0002, has not come" in why
    assert "in any case" in why
    [row] = await ahead(world.conn, execution_id, tenant=1)
    assert (row.id, row.type, row.key) == (item.id, "payout.made", "7")

    await world.post(numbered(1))

    await until_given(world.conn, "e1", "e2")
    assert await ahead(world.conn, execution_id, tenant=1) == []
    assert await store.read(world.conn, tenant=1, reason="ahead", limit=5) == []


async def test_what_is_missing_is_given_up_after_the_gap_and_let_in_when_it_comes(world: World) -> None:
    await waits(world.conn, "7", 4)
    for number in (1, 5, 3):
        await world.post(numbered(number))
    await until_given(world.conn, "e1")

    await time_passes(world)

    await until_given(world.conn, "e1", "e3", "e5")
    assert said(await world.post(numbered(2))) == (202, "event", False)
    await until_given(world.conn, "e1", "e3", "e5", "e2")


async def test_a_receiver_that_nobody_asks_knows_when_patience_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STREAM_POLL_SECONDS", 3600.0)
    await waits(world.conn, "7")
    await world.post(numbered(2))
    await world.conn.execute("update waypost.quarantine set due_at = now() + interval '50 ms'")
    world.receiver.streams.look()

    await until_given(world.conn, "e2")

    why = await inbox.explain(world.conn, await inbox.find(world.conn, "q1"), now=NOON)
    assert why[0].startswith("It was let in when its turn came, at ")


async def test_what_is_in_line_before_one_whose_patience_is_over_goes_first(world: World) -> None:
    await waits(world.conn, "7")
    for number in (5, 3):
        await world.post(numbered(number))

    await world.conn.execute("update waypost.quarantine set due_at = now() where sequence = '0005'")
    world.receiver.streams.look()

    await until_given(world.conn, "e3", "e5")


async def test_an_event_and_the_one_before_it_at_two_receivers_at_once_keep_their_order(
    pool: Pool, conn: Connection
) -> None:
    await add_sender(conn)
    await ordered(conn)
    await waits(conn, "7", 2)
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(running(pool, conn)) for _ in range(2)]
        async with pool.connection() as holder, holder.transaction():
            await lock(holder, Stream(1, "payments", "/payments"))
            sent = [asyncio.create_task(it.post(numbered(number))) for it, number in ((a, 2), (b, 1))]

            await until(lambda: two_wait(conn), what="two that wait")
        answers = await asyncio.gather(*sent)

        assert [said(answer)[:2] for answer in answers] == [(202, "event")] * 2
        await until_given(conn, "e1", "e2")


async def test_many_at_once_at_two_receivers_come_in_order_and_once(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    await ordered(conn)
    for at in range(4):
        await waits(conn, f"key-{at}", 6)
    async with AsyncExitStack() as stack:
        both = [await stack.enter_async_context(running(pool, conn)) for _ in range(2)]
        everything = [
            numbered(number, source=f"/s{at}", key=f"key-{at}")
            for number in range(6, 0, -1)
            for at in range(4)
        ]

        answers = await asyncio.gather(*(it.post(each) for each in everything for it in both))

        assert {answer.status for answer in answers} == {202}
        await until_given(conn, *[f"e{number}" for number in range(1, 7)] * 4)


async def test_patience_that_ends_when_the_one_before_comes_gives_each_once(world: World) -> None:
    await waits(world.conn, "7")
    await world.post(numbered(2))
    async with world.receiver.streams.pool.connection() as holder, holder.transaction():
        await lock(holder, Stream(1, "payments", "/payments"))
        await time_passes(world)
        late = asyncio.create_task(world.post(numbered(1)))
        await until(lambda: two_wait(world.conn), what="two that wait")

    assert said(await late)[:2] == (202, "event")
    await until(lambda: two_given(world.conn), what="two that are given")
    assert sorted(await given(world.conn)) == ["e1", "e2"]


async def two_given(conn: Connection) -> bool:
    return len(await given(conn)) == 2


async def test_what_a_receiver_that_died_had_in_line_another_lets_in(
    pool: Pool, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_sender(conn)
    await ordered(conn)
    await waits(conn, "7")

    async def nothing() -> float:
        return 60.0

    async with running(pool, conn) as dies:
        monkeypatch.setattr(dies.receiver.streams, "serve", nothing)
        for number in (3, 2, 1):
            await dies.post(numbered(number))
    assert await given(conn) == ["e1"]

    async with running(pool, conn):
        await until_given(conn, "e1", "e2", "e3")


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(6))
async def test_whatever_is_cut_each_stream_is_whole_and_in_order(
    pool: Pool, conn: Connection, seed: int
) -> None:
    """Two receivers whose connections are cut again and again, and senders that come again until they hear 202."""
    chance, streams, length = random.Random(seed), 8, 12  # an order, and no secret
    await add_sender(conn)
    await ordered(conn)
    for at in range(streams):
        await waits(conn, f"key-{at}", length)
    sent = [
        numbered(number, source=f"/s{at}", key=f"key-{at}")
        for number in range(1, length + 1)
        for at in range(streams)
        for _ in range(chance.randint(1, 3))
    ]
    chance.shuffle(sent)
    cuts = 0
    async with AsyncExitStack() as stack:
        both = [await stack.enter_async_context(running(pool, conn)) for _ in range(2)]

        async def insist(each: dict[str, Any]) -> None:
            while (await chance.choice(both).post(each)).status != 202:
                pass

        for begin in range(0, len(sent), 16):
            under_way = [asyncio.create_task(insist(each)) for each in sent[begin : begin + 16]]
            for _ in range(3):
                await asyncio.sleep(0)
                cuts += await one(conn, CUT)
            await asyncio.gather(*under_way)
        for it in both:
            it.receiver.streams.look()

        await until_given(conn, *[f"e{number}" for number in range(1, length + 1)] * streams)
    assert cuts > 0


CUT: Final = """
    select count(*) filter (where pg_terminate_backend(pid))
      from pg_stat_activity
     where datname = current_database()
       and pid <> pg_backend_pid()
"""


async def test_what_is_kept_apart_for_its_contract_keeps_nobody_waiting(world: World) -> None:
    await waits(world.conn, "7", 4)
    await expect(world, PAYOUT)
    good, bad = {"amount": 1}, {"amount": 0}
    for number, data in ((1, bad), (2, good), (5, good), (4, bad)):
        await world.post(numbered(number, data=data))
    await until_given(world.conn, "e2")
    await expect(world, True)  # whoever mends it lets it in; its turn does not

    await world.post(numbered(3, data=good))

    await until_given(world.conn, "e2", "e3", "e5")
    listed = await store.read(world.conn, tenant=1, reason=None, limit=5)
    assert sorted((it.reason, it.event_id) for it in listed) == [("contract", "e1"), ("contract", "e4")]


async def test_what_may_not_be_said_any_more_when_its_turn_comes_is_kept_and_the_others_go_on(
    world: World,
) -> None:
    await waits(world.conn, "7")
    await expect(world, True)
    for number in (3, 2):
        await world.post(numbered(number, data={"amount": number - 2}))
    await expect(world, PAYOUT)

    await world.post(numbered(1, data={"amount": 1}))

    await until_given(world.conn, "e1", "e3")
    [item] = await store.read(world.conn, tenant=1, reason=None, limit=5)
    assert (item.reason, item.event_id) == ("contract", "e2")


async def test_a_stream_that_cannot_be_read_now_waits_and_keeps_no_other_waiting(world: World) -> None:
    """An older receiver does not understand settings that are new."""
    await waits(world.conn, "7")
    await add_sender(world.conn, "others")
    await set_sender(world.conn, "others", settings={"ordered": {"gap": 3600}})
    await world.post(numbered(2), path="/events/default/others")
    await world.conn.execute("""update waypost.sender set settings = '{"new": 1}' where name = 'others'""")
    await world.post(numbered(2, source="/mine"))

    await time_passes(world)

    await until_given(world.conn, "e2")
    await world.moments.until("streams.failed", sender="others")
    assert await one(world.conn, "select reason from waypost.quarantine where due_at > now()") == "ahead"


async def test_what_the_database_refuses_when_its_turn_comes_stays_apart_and_the_others_go_on(
    world: World,
) -> None:
    await waits(world.conn, "7")
    await world.post(numbered(3))
    await world.post(numbered(2, type="refused"))
    await world.conn.execute("alter table waypost.inbox add constraint no_such check (type <> 'refused')")

    await world.post(numbered(1))

    await until_given(world.conn, "e1", "e3")
    [item] = await store.read(world.conn, tenant=1, reason="invalid", limit=5)
    assert (item.event_id, item.detail) == ("e2", "the database refuses its data")


async def test_what_has_the_name_of_something_else_is_found_when_its_turn_comes(world: World) -> None:
    await waits(world.conn, "7")
    await world.post(numbered(2))
    other = await world.post({**numbered(2), "data": {"other": True}})

    await world.post(numbered(1))

    assert other.status == 202
    await until_given(world.conn, "e1", "e2")
    await until(lambda: conflicting(world), what="a conflict")


async def conflicting(world: World) -> bool:
    return [it.reason for it in await store.read(world.conn, tenant=1, reason=None, limit=5)] == ["conflict"]


async def test_a_person_may_let_in_who_is_ahead_and_who_follows_it_goes_on(world: World) -> None:
    await waits(world.conn, "7")
    for number in (3, 2):
        await world.post(numbered(number))
    [second] = [
        it.id for it in await store.read(world.conn, tenant=1, reason="ahead", limit=5) if it.event_id == "e2"
    ]

    assert await inbox.redrive(world.conn, VAULT, second, by="ada") == "stored"
    world.receiver.streams.look()

    await until_given(world.conn, "e2", "e3")


async def test_all_of_a_batch_comes_in_order_or_nothing_of_it(world: World) -> None:
    await waits(world.conn, "7", 4)
    await world.post(numbered(1))
    some = [numbered(number) for number in (4, 2, 3)]

    refused = await world.refused(batch(*some, {**numbered(1), "data": {"hostile": True}}))
    answer = await world.send(batch(*some))
    again = await world.send(batch(*some))

    assert refused.status == 409
    assert (answer.json["events"], answer.json["duplicates"]) == (3, 0)
    assert (again.json["duplicates"], again.headers["x-inbox"]) == (3, "duplicate")
    await until_given(world.conn, "e1", "e2", "e3", "e4")


async def test_of_one_object_the_newest_counts_where_a_sender_says_so(pool: Pool, conn: Connection) -> None:
    # As Stripe's `created`: no gap can be seen in it, but what is older than what was let in is seen.
    rules = {"source": "=/acme", "id": "/id", "type": "=payout.made", "key": "/order", "sequence": "/created"}
    await add_sender(conn)
    await set_sender(
        conn,
        "payments",
        settings={"event": rules, "ordered": {"gap": 0, "of": "key", "older": "apart"}},
    )
    for key in ("7", "8"):
        await waits(conn, key)
    async with running(pool, conn) as world:
        answers = [
            await world.send(webhook(id=name, order=key, created=created))
            for name, key, created in (("a", 7, 99), ("b", 7, 100), ("c", 7, 98), ("d", 8, 50), ("e", 7, 100))
        ]
        again = await world.send(webhook(id="a", order=7, created=99))

    assert [said(answer)[1] for answer in answers] == ["event", "event", "quarantined", "event", "event"]
    assert (said(again), await given(conn)) == ((202, "event", True), ["a", "b", "e", "d"])
    [item] = await store.read(conn, tenant=1, reason="superseded", limit=5)
    assert await inbox.redrive(conn, VAULT, item.id, by="ada") == "stored"


def webhook(**body: Any) -> bytes:
    return request(json.dumps(body).encode(), replace={"content-type": "application/json"})


async def test_who_does_not_ask_for_order_pays_nothing_for_it(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    await waits(conn, "7")
    async with running(pool, conn) as world:
        for number in (3, 1):
            await world.post(numbered(number))

    assert await given(conn) == ["e3", "e1"]
    assert await one(conn, "select count(*) from waypost.stream") == 0


async def test_an_event_without_a_sequence_waits_for_nobody_and_a_malformed_one_is_refused(
    world: World,
) -> None:
    await waits(world.conn, "7")
    await world.post(event(id="plain", subject="7"))

    answer = await world.refused(request(event(id="hostile", sequence=True)))

    assert (answer.status, await given(world.conn)) == (400, ["plain"])
    assert answer.json["attributes"] == ["sequence"]
    assert answer.json["detail"] == "sequence: expected text"


async def test_what_is_sealed_with_a_key_that_is_not_here_keeps_its_place_and_other_streams_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await waits(world.conn, "7")
    monkeypatch.setattr(Sealing, "codec", codec := Codec([("first", bytes(32))], os.urandom))
    await world.post(numbered(3, source="/sealed"))
    monkeypatch.setattr(Sealing, "codec", None)
    await world.post(numbered(5, source="/open"))

    await time_passes(world)
    await until_given(world.conn, "e5")
    await world.moments.until("streams.failed")
    monkeypatch.setattr(Sealing, "codec", codec)
    await time_passes(world)

    await until_given(world.conn, "e5", "e3")


async def test_while_the_settings_of_its_sender_are_not_understood_nothing_of_it_is_let_in(
    world: World,
) -> None:
    await waits(world.conn, "7")
    await set_sender(world.conn, "payments", settings={"ordered": {"gap": 3600}, "sources": ["/mine"]})
    await world.post(numbered(3, source="/mine"))
    understood = await one(world.conn, "select settings::text from waypost.sender")
    await world.conn.execute("update waypost.sender set settings = '{\"newer\": 1}'")

    await time_passes(world)
    await world.moments.until("streams.failed")
    with pytest.raises(
        StillApart, match="'payments': expected settings and contracts that are understood here"
    ):
        await inbox.redrive(world.conn, VAULT, "q1", by="ada")
    assert await given(world.conn) == []

    await world.conn.execute("update waypost.sender set settings = %s::jsonb", (understood,))
    await time_passes(world)
    await until_given(world.conn, "e3")


async def test_a_stream_whose_lock_is_not_to_be_had_keeps_no_other_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await waits(world.conn, "7")
    for number, source in ((3, "/locked"), (5, "/free")):
        await world.post(numbered(number, source=source))

    async def locked(conn: Connection, of: Stream) -> str | None:
        if of.stream == "/locked":
            raise LockNotAvailable
        return await lock(conn, of)

    monkeypatch.setattr(streams, "lock", locked)
    await time_passes(world)

    await until_given(world.conn, "e5")


async def test_a_sender_with_a_secret_that_cannot_be_read_is_let_in_by_its_others(world: World) -> None:
    await waits(world.conn, "7")
    await add_sender(world.conn, key_id="2")
    await world.conn.execute(
        "update waypost.secret set ciphertext = ciphertext || '\\x00' where key_id = '2'"
    )
    for number in (2, 1):
        assert (await world.post(numbered(number))).status == 202

    await until_given(world.conn, "e1", "e2")


async def test_a_stream_that_is_held_takes_no_room_of_others(world: World) -> None:
    async with world.receiver.streams.pool.connection() as holder, holder.transaction():
        await lock(holder, Stream(1, "payments", "/held"))
        held = [asyncio.create_task(world.post(numbered(it, source="/held"))) for it in range(1, 7)]
        await until(lambda: one_waits(world.conn), what="one that waits")

        assert (await world.post(numbered(1, source="/free"))).status == 202
        assert not any(it.done() for it in held)

    assert {(await it).status for it in held} == {202}


async def one_waits(conn: Connection) -> bool:
    query = """
        select count(*)
          from pg_stat_activity
         where wait_event_type = 'Lock'
           and datname = current_database()
    """
    return await one(conn, query) > 0


async def test_who_gets_no_room_in_time_is_told_to_come_again(pool: Pool, conn: Connection) -> None:
    await add_sender(conn)
    await ordered(conn)
    async with running(pool, conn, settings=ReceiverSettings(wait_seconds=0.1)) as world:
        for _ in range(APART_MAX):
            await world.receiver.admission.apart.acquire()

        answer = await world.post(numbered(1))

    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
