"""The statements alone, on the oldest and the newest PostgreSQL."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from relay import outbox
from relay.delivery import Delivered, unsent
from relay.outbox import EndpointKey, Message, Result
from tests.relay import given
from tests.relay.given import NOON, Connection

pytestmark = pytest.mark.postgres


async def claim(
    conn: Connection, *, limit: int = 100, room: int = 100, busy: dict[EndpointKey, int] | None = None
) -> list[Message]:
    return await outbox.claim(
        conn,
        token=uuid4(),
        limit=limit,
        room=room,
        busy=busy or {},
        timeout_max=timedelta(minutes=5),
        margin=timedelta(seconds=10),
        now=NOON,
    )


async def fill(conn: Connection, endpoint: str, count: int) -> None:
    """Messages that are due one second after the other, the last at noon."""
    await conn.execute(
        """
        insert into waypost.outbox (tenant_id, message_id, execution_id, epoch, path, endpoint, body, due_at)
        select 1, gen_random_uuid(), gen_random_uuid(), 0, 'p', %(endpoint)s, '', %(now)s - interval '1 s' * g
          from generate_series(0, %(count)s - 1) g
        """,
        {"endpoint": endpoint, "count": count, "now": NOON},
    )


async def test_the_longest_due_of_an_endpoint_goes_first(conn: Connection) -> None:
    execution = await given.execution(conn)
    late = await given.message(conn, execution, at=NOON)
    early = await given.message(conn, execution, at=NOON - timedelta(hours=1))
    await given.message(conn, execution, at=NOON + timedelta(microseconds=1))

    first = await claim(conn, limit=1)
    rest = await claim(conn)

    assert [message.message_id for message in first] == [early]
    assert [message.message_id for message in rest] == [late]


async def test_no_endpoint_gets_more_than_its_room(conn: Connection) -> None:
    for endpoint in ("a", "b", "c"):
        await fill(conn, endpoint, 10)

    taken = await claim(conn, room=4, busy={(1, "b"): 3, (1, "c"): 9})

    counts = {name: sum(message.endpoint == name for message in taken) for name in "abc"}
    assert counts == {"a": 4, "b": 1, "c": 0}


async def test_no_endpoint_is_served_last_for_ever(conn: Connection) -> None:
    for endpoint in ("a", "z"):
        await fill(conn, endpoint, 200)

    served = {message.endpoint for _ in range(64) for message in await claim(conn, limit=1)}

    assert served == {"a", "z"}  # by chance alone it would fail once in 2^63 runs


async def test_the_claim_lasts_as_long_as_its_endpoint_may_take(conn: Connection) -> None:
    await given.endpoint(conn, "https://example.com/", within=timedelta(seconds=40))
    message = await given.message(conn, await given.execution(conn))

    [claimed] = await claim(conn)

    assert claimed.timeout == timedelta(seconds=40)
    assert (await given.row(conn, message))["lease_until"] == NOON + timedelta(seconds=50)


async def test_two_claims_at_the_same_moment_share_the_messages(conn: Connection, dsn: str) -> None:
    await fill(conn, "a", 10)
    async with await Connection.connect(dsn, autocommit=True) as other, conn.transaction():
        mine = await claim(conn, limit=4)

        theirs = await claim(other)

    ids = {message.message_id for message in (*mine, *theirs)}
    assert (len(mine), len(theirs), len(ids)) == (4, 6, 10)


async def test_a_claim_reads_about_as_many_rows_as_it_takes(conn: Connection) -> None:
    """Also where the statement has often run while the table was empty, and known to be."""
    await conn.execute("alter table waypost.outbox set (autovacuum_enabled = off)")
    await conn.execute("vacuum analyze waypost.outbox")
    for _ in range(12):
        await claim(conn)
    await given.endpoint(conn, "https://example.com/", name="closed")
    await conn.execute("update waypost.endpoint set paused_until = %s", (NOON + timedelta(seconds=1),))
    await fill(conn, "closed", 5000)
    await fill(conn, "open", 5000)

    async with conn.transaction():
        taken = await claim(conn, limit=10)
        await outbox.expire_due(conn, limit=10, now=NOON)
        cursor = await conn.execute(
            "select seq_tup_read, idx_tup_fetch from pg_stat_xact_user_tables where relname = 'outbox'"
        )
        read = await cursor.fetchone()

    assert [message.endpoint for message in taken] == ["open"] * 10
    assert read is not None
    assert read[0] == 0
    assert read[1] < 100


async def test_a_settlement_under_another_token_changes_nothing(conn: Connection) -> None:
    message = await given.message(conn, await given.execution(conn))
    [claimed] = await claim(conn)
    stranger = Message(
        tenant_id=1,
        message_id=message,
        token=uuid4(),
        attempt=1,
        endpoint="payments",
        content_type="",
        body=b"",
        timeout=timedelta(0),
        command=True,
        replies_from="payments",
    )

    ours = Result(claimed, unsent("x"), Delivered(), None)
    theirs = Result(stranger, unsent("x"), Delivered(), None)

    assert await outbox.settle(conn, [theirs], now=NOON) == {}
    assert (await given.row(conn, message))["state"] == "sending"
    assert await outbox.settle(conn, [ours], now=NOON) == {(1, message): "delivered"}
    assert await outbox.settle(conn, [ours], now=NOON) == {}


async def test_what_is_over_is_not_sent_but_kept(conn: Connection) -> None:
    execution = await given.execution(conn)
    over = await given.message(conn, execution, at=NOON - timedelta(hours=1), expires_at=NOON)

    taken = await claim(conn)
    expired = await outbox.expire_due(conn, limit=10, now=NOON)

    assert (taken, expired) == ([], 1)
    assert (await given.row(conn, over))["state"] == "expired"
    assert await given.mail(conn, execution) == []


async def test_a_message_of_another_tenant_goes_to_that_tenants_endpoint(conn: Connection) -> None:
    await conn.execute("insert into waypost.tenant (tenant_id, name) values (2, 'other')")
    await given.endpoint(conn, "https://example.com/", within=timedelta(seconds=7))
    await conn.execute("update waypost.endpoint set tenant_id = 2")
    await given.message(conn, await given.execution(conn))

    [claimed] = await claim(conn)

    assert claimed.endpoint_key == (1, "payments")
    assert claimed.timeout == timedelta(
        seconds=15
    )  # nobody's: the default of an endpoint that is not registered
