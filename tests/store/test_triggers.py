"""Events that start flows: which version, under which key, once; and who else gets the event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import psycopg
import pytest

from contracts import trace
from orchestrator.store import definitions
from orchestrator.store.definitions import Definition
from receiver.inbox import MailItem
from tests.invariants import broken
from tests.store.world import (
    NOON,
    Connection,
    Start,
    a_few_rows_read,
    asked,
    claim,
    commit,
    event,
    fill_the_shelf,
    held,
    is_due,
    mail_of,
    message,
    posted,
    reply,
    rows,
    start,
    until_blocked,
    wait,
    waiting,
    waits_of,
    worker,
)

pytestmark = pytest.mark.postgres

ORDER = Definition("order", "1", on="paid")
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    yield
    assert await broken(conn, scripted=True) == []


async def triggers(conn: Connection) -> list[tuple[Any, ...]]:
    """What events start now."""
    return await rows(
        conn,
        "select definition, version, type, key_pointer from waypost.trigger g"
        " where version = waypost.version_drawn(tenant_id, definition, type, 0) order by 1",
    )


async def started(conn: Connection, flow: str = "order") -> list[tuple[UUID, str | None]]:
    """The executions of a flow and their business keys, in the order of the events that started them."""
    found = await rows(
        conn,
        "select execution_id, business_key from waypost.execution where definition = %s order by events_after",
        flow,
    )
    return [(execution, key) for execution, key in found]


# ---- which version -------------------------------------------------------------------------------------------------


async def test_what_starts_a_flow_is_known_with_the_flow(conn: Connection) -> None:
    await definitions.publish(
        conn, [ORDER, Definition("refund", "1"), Definition("ship", "1", "paid", "/to/id")]
    )

    assert await triggers(conn) == [("order", "1", "paid", None), ("ship", "1", "paid", "/to/id")]


async def test_the_newest_version_is_started_whoever_registers_last(conn: Connection) -> None:
    old, new = ORDER, Definition("order", "2", "paid", "/order")
    await definitions.publish(conn, [old])
    await definitions.publish(conn, [new])

    for again in ([old], [new, old], [old, new]):
        await definitions.publish(conn, again)
        assert await triggers(conn) == [("order", "2", "paid", "/order")]


async def test_of_versions_that_become_known_at_once_the_last_is_the_newest(conn: Connection) -> None:
    await definitions.publish(conn, [Definition("order", v, "paid") for v in ("9", "10", "2")])

    assert await triggers(conn) == [("order", "2", "paid", None)]


async def test_a_newest_version_that_no_event_starts_ends_it(conn: Connection) -> None:
    await definitions.publish(conn, [ORDER])
    await definitions.publish(conn, [Definition("order", "2")])
    assert await triggers(conn) == []

    await definitions.publish(conn, [ORDER])
    assert await triggers(conn) == []


async def test_a_version_that_is_retired_is_not_the_newest(conn: Connection) -> None:
    await definitions.publish(conn, [ORDER])
    await definitions.publish(conn, [Definition("order", "2", "paid")])
    await conn.execute("update waypost.definition set state = 'retired' where version = '2'")

    await definitions.publish(conn, [ORDER, Definition("order", "2", "paid")])

    assert await triggers(conn) == [("order", "1", "paid", None)]


async def test_what_starts_a_version_may_change(conn: Connection) -> None:
    for changed in (Definition("order", "1", "placed"), Definition("order", "1", "placed", "/id"), ORDER):
        await definitions.publish(conn, [changed])
        assert await triggers(conn) == [("order", "1", changed.on, changed.key)]

    [before] = await rows(conn, "select xmin from waypost.trigger")
    await definitions.publish(conn, [ORDER])
    assert await rows(conn, "select xmin from waypost.trigger") == [before], (
        "what has not changed is not written"
    )


async def test_workers_that_register_at_once_agree_on_the_newest(conn: Connection, dsn: str) -> None:
    """The second one waits before its version gets a number, though what they write is not the same row yet."""
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as observer,
    ):
        async with conn.transaction():
            await definitions.publish(conn, [Definition("order", "2")])
            blocked = asyncio.ensure_future(definitions.publish(other, [ORDER]))
            await until_blocked(observer, other, by=conn, unless=blocked)
        await blocked

    assert await triggers(conn) == [("order", "1", "paid", None)], "it became known last"
    assert await rows(conn, "select version from waypost.definition order by number") == [("2",), ("1",)]


# ---- what is started -----------------------------------------------------------------------------------------------


async def test_an_event_starts_the_flow_with_its_data(conn: Connection) -> None:
    await definitions.publish(conn, [ORDER])

    [got] = await posted(conn, event("e1", key="o1", data='{"amount": 42}'))

    assert (got.outcome, got.answer) == ("stored", "event")
    [(execution, key)] = await started(conn)
    assert (key, execution.version) == ("o1", 7)
    assert await is_due(conn, execution)
    [(position, fence, kind, payload, actor)] = await rows(
        conn, "select position, fence, kind, payload, actor from waypost.journal"
    )
    assert (position, fence, kind, actor) == (1, 0, "started", "sender:payments")
    assert len(payload.pop("seed")) == 16
    assert payload == {
        "input": {"amount": 42},
        "definition": "order",
        "version": "1",
        "key": "o1",
        "traceparent": trace.root(str(execution)),
        "event": {
            "sender": "payments",
            "source": "/payments",
            "id": "e1",
            "type": "paid",
            "inbox_id": got.inbox_id,
            "traceparent": None,
        },
    }
    assert await rows(conn, "select version, position, events_after, traceparent from waypost.execution") == [
        ("1", 1, got.inbox_id, payload["traceparent"])
    ]


async def test_the_execution_goes_on_in_the_trace_of_its_event(conn: Connection) -> None:
    await definitions.publish(conn, [ORDER])
    await posted(conn, event("e1", traceparent=TRACEPARENT))

    [(execution, _)] = await started(conn)
    expected = trace.child(TRACEPARENT, str(execution))
    assert await rows(conn, "select traceparent from waypost.execution") == [(expected,)]
    assert await rows(
        conn, "select payload ->> 'traceparent', payload #>> '{event,traceparent}' from waypost.journal"
    ) == [(expected, TRACEPARENT)]


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "hostile'",
        TRACEPARENT.upper(),
        f"{TRACEPARENT}-more",
        TRACEPARENT.replace("00-", "ff-", 1),
        TRACEPARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        TRACEPARENT.replace("00f067aa0ba902b7", "0" * 16),
    ],
)
async def test_what_is_no_traceparent_begins_a_trace(conn: Connection, traceparent: str) -> None:
    await definitions.publish(conn, [ORDER])
    await posted(conn, event("e1", traceparent=traceparent))

    [(execution, _)] = await started(conn)
    assert await rows(conn, "select traceparent from waypost.execution") == [(trace.root(str(execution)),)]


async def test_an_event_without_data_starts_the_flow_with_null(conn: Connection) -> None:
    """Which does not fit the input of any such flow: the worker holds the execution."""
    await definitions.publish(conn, [ORDER])
    await posted(conn, event("e1", data="null"))

    assert await rows(conn, "select payload -> 'input' from waypost.journal") == [(None,)]


async def test_an_event_of_another_type_or_tenant_starts_nothing(conn: Connection) -> None:
    await conn.execute("insert into waypost.tenant (tenant_id, name) values (2, 'other')")
    await definitions.publish(conn, [ORDER])

    await posted(conn, event("e1", type="Paid"), event("e2", type="paid.2"), event("e3", tenant=2))

    assert await started(conn) == []


async def test_an_event_starts_the_flows_of_its_own_tenant(conn: Connection) -> None:
    await conn.execute("insert into waypost.tenant (tenant_id, name) values (2, 'other')")
    await definitions.publish(conn, [ORDER])
    await conn.execute("insert into waypost.definition (tenant_id, name, version) values (2, 'theirs', '1')")
    await conn.execute(
        "insert into waypost.trigger (tenant_id, definition, version, type) values (2, 'theirs', '1', 'paid')"
    )

    await posted(conn, event("e1"), event("e1", tenant=2))

    assert await rows(conn, "select tenant_id, definition from waypost.execution order by 1") == [
        (1, "order"),
        (2, "theirs"),
    ]


async def test_a_reply_of_the_type_of_an_event_starts_nothing(conn: Connection) -> None:
    await definitions.publish(conn, [Definition("order", "1", "pay.done")])

    await posted(conn, reply("r1", UUID(int=1)))

    assert await started(conn) == []


async def test_an_event_starts_every_flow_that_names_it(conn: Connection) -> None:
    await definitions.publish(
        conn, [ORDER, Definition("ship", "1", "paid"), Definition("refund", "1", "refunded")]
    )

    await posted(conn, event("e1", key="o1"))

    assert [[key for _, key in await started(conn, flow)] for flow in ("order", "ship", "refund")] == [
        ["o1"],
        ["o1"],
        [],
    ]


async def test_a_test_clock_tells_when_it_began(conn: Connection) -> None:
    await definitions.publish(conn, [ORDER])

    await posted(conn, event("e1"), now=NOON)

    assert await rows(
        conn,
        "select e.created_at, e.wake_at, j.at from waypost.execution e join waypost.journal j using (execution_id)",
    ) == [(NOON, NOON, NOON)]


async def test_starting_reads_a_few_rows_however_many_there_are(conn: Connection) -> None:
    """The session's plans are from when the tables were empty."""
    await definitions.publish(conn, [Definition("order", "1", "paid", "/order")])
    for n in range(8):
        await posted(conn, paid(f"e{n}", f"o{n}"))
    await fill_the_shelf(conn)

    async with conn.transaction(force_rollback=True), a_few_rows_read(conn):
        await posted(conn, paid("e8", "o8"))
    await conn.execute("delete from waypost.inbox where key = 'k'")


# ---- under which key -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"to": {"id": "a1"}}, "a1"),
        ({"to": {"id": 42}}, "42"),
        ({"to": {"id": "Ü b"}}, "Ü b"),
        ({"to": {"id": ""}}, None),
        ({"to": {"id": True}}, None),
        ({"to": {"id": None}}, None),
        ({"to": {"id": {"a": 1}}}, None),
        ({"to": {"id": "a\nb"}}, None),
        ({"to": {"id": "a\u009bb"}}, None),
        ({"to": {"id": "x" * 1024}}, "x" * 1024),
        ({"to": {"id": "ü" * 513}}, None),
        ({"to": {}}, None),
        ({"to": "id"}, None),
        (["to"], None),
        (None, None),
    ],
    ids=lambda it: str(it)[:30],
)
async def test_a_pointer_names_the_key_in_the_data(conn: Connection, data: Any, key: str | None) -> None:
    """What makes no key is none; the execution is started all the same, and its input tells what is missing."""
    await definitions.publish(conn, [Definition("order", "1", "paid", "/to/id")])

    await posted(conn, event("e1", data=json.dumps(data)))

    assert [found for _, found in await started(conn)] == [key]


@pytest.mark.parametrize(
    ("pointer", "key"), [("/a~1b", "1"), ("/m~0n", "2"), ("/list/1", "4"), ("/x~01", "5"), ("/ ", "6")]
)
async def test_a_pointer_is_read_as_json_pointers_are(conn: Connection, pointer: str, key: str) -> None:
    data = {"a/b": 1, "m~n": 2, "list": [3, 4], "x~1": 5, " ": 6}
    await definitions.publish(conn, [Definition("order", "1", "paid", pointer)])

    await posted(conn, event("e1", data=json.dumps(data)))

    assert [found for _, found in await started(conn)] == [key]


async def test_events_without_a_key_start_an_execution_each(conn: Connection) -> None:
    await definitions.publish(conn, [ORDER])

    await posted(conn, event("e1", key=""), event("e2", key=""))
    await posted(conn, event("e1", key=""), event("e3", key=""), event("e3", key=""))

    assert [key for _, key in await started(conn)] == [None, None, None]


# ---- once ----------------------------------------------------------------------------------------------------------


async def test_an_event_that_comes_again_starts_nothing_more(conn: Connection) -> None:
    await definitions.publish(conn, [ORDER])
    await posted(conn, event("e1"), event("e1"))

    got = await posted(conn, event("e1"), event("e1", data='{"other": 1}'))

    assert [one.outcome for one in got] == ["duplicate", "conflict"]
    assert len(await started(conn)) == 1


@pytest.mark.parametrize("together", [True, False])
async def test_the_second_event_of_a_key_starts_nothing_and_is_an_event_for_the_first(
    conn: Connection, *, together: bool
) -> None:
    await definitions.publish(conn, [ORDER])
    events = [event("e1", data='{"n": 1}'), event("e2", data='{"n": 2}')]
    for batch in [events] if together else [[one] for one in events]:
        await posted(conn, *batch)

    [(execution, _)] = await started(conn)
    assert await rows(conn, "select payload #>> '{input,n}' from waypost.journal") == [("1",)]
    assert await rows(conn, "select event_id, taken from waypost.inbox order by inbox_id") == [
        ("e1", True),
        ("e2", False),
    ]

    await waiting(conn, wait("a"), holder=await claim(conn, await worker(conn), execution))
    assert await waits_of(conn, execution) == [("a", "e2")]


async def test_a_key_that_a_caller_has_started_is_not_started_by_an_event(conn: Connection) -> None:
    await definitions.publish(conn, [ORDER])
    [(_, execution)] = await start(conn, Start(key="k", input=1))

    await posted(conn, event("e1"))
    await posted(conn, event("e2", key="other"))

    assert {key for _, key in await started(conn)} == {"k", "other"}
    [(outcome, found)] = await start(conn, Start(key="other", input=1))
    assert outcome == "conflict"
    assert found != execution


# ---- who else gets it ----------------------------------------------------------------------------------------------


async def test_the_event_that_started_an_execution_is_not_given_to_its_wait(conn: Connection) -> None:
    """A later one is."""
    await definitions.publish(conn, [ORDER])
    await posted(conn, event("e1"))
    [(execution, _)] = await started(conn)

    await waiting(conn, wait("a"), holder=await claim(conn, await worker(conn), execution))
    assert await waits_of(conn, execution) == [("a", None)]

    await posted(conn, event("e2"))
    assert await mail_of(conn, execution) == ["event e2"]


async def test_who_waited_for_the_event_gets_it_though_it_starts_a_flow(conn: Connection) -> None:
    await definitions.publish(conn, [ORDER])
    other, late = await waiting(conn, wait("a")), await held(conn)

    await posted(conn, event("e1"))

    assert len(await started(conn)) == 3
    assert await mail_of(conn, other) == ["event e1"]
    await waiting(conn, wait("a"), holder=late)
    assert await mail_of(conn, late.execution) == ["event e1"], "it was there when the event came"


async def test_an_event_that_started_a_flow_is_offered_to_nobody_who_comes_later(conn: Connection) -> None:
    await definitions.publish(conn, [ORDER])
    await posted(conn, event("e1"))

    late = await waiting(conn, wait("a"))

    assert await waits_of(conn, late) == [("a", None)]


async def test_an_event_of_before_that_nobody_has_is_given_to_who_was_started_by_another(
    conn: Connection,
) -> None:
    await posted(conn, event("e0", type="noted"))
    await definitions.publish(conn, [ORDER])
    await posted(conn, event("e1"))
    [(execution, _)] = await started(conn)

    holder = await claim(conn, await worker(conn), execution)
    await waiting(conn, wait("a", type="noted"), holder=holder)

    assert await mail_of(conn, execution) == ["event e0"]


# ---- at once -------------------------------------------------------------------------------------------------------

BY_ORDER = Definition("order", "1", on="paid", key="/order")


def paid(event_id: str, order_id: str) -> MailItem:
    """Its subject is its own, so that only the business key is shared."""
    return event(event_id, key=event_id, data=json.dumps({"order": order_id}))


async def test_who_waits_for_a_business_key_holds_no_message(conn: Connection, dsn: str) -> None:
    """One batch starts an execution and ends a message by its reply: rows, then new executions, then messages."""
    await definitions.publish(conn, [BY_ORDER])
    holder = await held(conn)
    pay = message("pay")
    assert await commit(conn, holder, holder.turn(asked("pay"), messages=[pay]))

    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as observer,
    ):
        async with conn.transaction():
            await start(conn, Start(key="o1"))
            blocked = asyncio.ensure_future(posted(other, paid("a1", "o1"), reply("r1", pay.message_id)))
            await until_blocked(observer, other, by=conn, unless=blocked)

            await observer.execute("select 1 from waypost.outbox for no key update nowait")
        await blocked
    assert await mail_of(conn, holder.execution) == ["reply r1"]


async def test_who_waits_for_a_row_has_created_nothing(conn: Connection, dsn: str) -> None:
    await definitions.publish(conn, [BY_ORDER])
    execution = await waiting(conn, wait("a", key="a1"))

    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as observer,
    ):
        async with conn.transaction():
            await conn.execute("select waypost.lock_rows(array[1], array[%s])", (execution,))
            blocked = asyncio.ensure_future(posted(other, paid("a1", "o1")))
            await until_blocked(observer, other, by=conn, unless=blocked)

            [(outcome, _)] = await start(observer, Start(key="o1"))
            assert outcome == "started", "nobody else holds the key"
        await blocked
    assert await mail_of(conn, execution) == ["event a1"]
