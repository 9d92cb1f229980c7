"""What an application asks for in its own transaction: all of it with the commit, or nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import DictRow, dict_row
from pydantic import BaseModel

from contracts.envelope import decode_structured
from contracts.errors import InputInvalid, KeyConflict, TooLarge, UnknownFlow
from contracts.limits import ERRAND_SIGNALS_MAX
from orchestrator import Context, Event, errands, workflow
from orchestrator.client import Client
from orchestrator.errands import ErrandInvalid, IdTaken
from orchestrator.store import definitions
from orchestrator.store.definitions import Definition
from tests.invariants import broken
from tests.store.world import Connection, claim, commit, is_due, mail_of, rows, wait, waiting, worker

pytestmark = pytest.mark.postgres


class Order(BaseModel):
    id: str
    amount: int = 1


class Paid(Event, type="paid", key="order"):
    order: str
    amount: int = 0


@workflow(name="order", version="1")
async def order_saga(ctx: Context, order: Order) -> None: ...


@pytest.fixture(autouse=True)
async def invariants_hold(conn: Connection) -> AsyncIterator[None]:
    await definitions.publish(conn, [Definition("order", "1")])
    await conn.execute("create table public.orders (id text primary key)")
    yield
    assert await broken(conn, scripted=True) == []


async def subscribe(conn: Connection, *endpoints: str) -> None:
    for endpoint in endpoints:
        await conn.execute(
            "insert into waypost.endpoint (tenant_id, name, url, kind) values (1, %s, 'https://x.test', 'event')",
            (endpoint,),
        )
        await conn.execute(
            "insert into waypost.subscription (tenant_id, type, endpoint) values (1, 'paid', %s)", (endpoint,)
        )


async def counts(conn: Connection) -> tuple[int, ...]:
    """Orders of the application, executions, events, messages."""
    [found] = await rows(
        conn,
        "select (select count(*) from public.orders), (select count(*) from waypost.execution),"
        " (select count(*) from waypost.inbox), (select count(*) from waypost.outbox)",
    )
    return found


# ---- all or nothing ------------------------------------------------------------------------------------------------


async def test_what_is_asked_for_happens_with_the_application_s_commit(conn: Connection) -> None:
    await subscribe(conn, "billing", "audit")

    async with conn.transaction():
        await conn.execute("insert into public.orders values ('A')")
        execution = await errands.start(conn, order_saga, Order(id="A"), key="A")
        await errands.signal(conn, Paid(order="A"))
        await errands.publish(conn, Paid(order="A"))
        assert await counts(conn) == (1, 0, 0, 0)

    assert await counts(conn) == (1, 1, 1, 2)
    view = await Client(conn).show(execution)
    assert (view.row.definition, view.row.business_key, view.row.state) == ("order", "A", "ready")
    assert json.loads(view.facts[0].payload or "")["input"] == {"id": "A", "amount": 1}


async def test_nothing_happens_when_the_application_rolls_back(conn: Connection) -> None:
    await subscribe(conn, "billing")

    async with conn.transaction(force_rollback=True):
        await conn.execute("insert into public.orders values ('A')")
        await errands.start(conn, order_saga, Order(id="A"), key="A")
        await errands.signal(conn, Paid(order="A"))
        await errands.publish(conn, Paid(order="A"))

    assert await counts(conn) == (0, 0, 0, 0)


async def test_what_was_asked_for_within_a_savepoint_goes_with_it(conn: Connection) -> None:
    async with conn.transaction():
        await errands.start(conn, order_saga, Order(id="A"), key="A")
        async with conn.transaction(force_rollback=True):
            await errands.start(conn, order_saga, Order(id="B"), key="B")

    assert await rows(conn, "select business_key from waypost.execution") == [("A",)]


async def test_a_connection_that_does_not_wait_and_makes_other_rows_does_the_same(
    conn: Connection, dsn: str
) -> None:
    with psycopg.Connection[DictRow].connect(dsn, row_factory=dict_row) as other:
        execution = errands.start(other, order_saga, Order(id="A"), key="A")
        told = errands.signal(other, Paid(order="A"), id="s1")

    assert isinstance(execution, UUID)
    assert told == "s1"
    assert await counts(conn) == (0, 1, 1, 0)


# ---- the same again ------------------------------------------------------------------------------------------------


async def test_a_key_that_was_started_tells_the_execution_that_has_it(conn: Connection) -> None:
    first = await errands.start(conn, order_saga, Order(id="A"), key="A")
    of_client = await Client(conn).start(order_saga, {"id": "B"}, key="B")

    assert await errands.start(conn, order_saga, Order(id="A"), key="A") == first
    assert await errands.start(conn, order_saga, Order(id="B"), key="B") == of_client.execution_id
    assert (await counts(conn))[1] == 2


async def test_a_client_finds_what_an_application_started_with_the_same_key_and_input(
    conn: Connection,
) -> None:
    first = await errands.start(conn, order_saga, Order(id="A"), key="A")

    again = await Client(conn).start(order_saga, {"id": "A"}, key="A")

    assert (again.execution_id, again.outcome) == (first, "exists")
    with pytest.raises(KeyConflict, match="'A' of flow 'order' is taken"):
        await Client(conn).start(order_saga, {"id": "A", "amount": 2}, key="A")


async def test_a_key_that_is_started_twice_in_a_transaction_is_one_execution(conn: Connection) -> None:
    async with conn.transaction():
        first = await errands.start(conn, order_saga, Order(id="A"), key="A")
        assert await errands.start(conn, order_saga, Order(id="A"), key="A") == first
        with pytest.raises(KeyConflict):
            async with conn.transaction():
                await errands.start(conn, order_saga, Order(id="B"), key="A")

    assert await rows(conn, "select execution_id from waypost.execution") == [(first,)]


async def test_a_key_with_another_input_is_refused_at_once(conn: Connection) -> None:
    first = await errands.start(conn, order_saga, Order(id="A"), key="A")

    with pytest.raises(KeyConflict) as refused:
        async with conn.transaction():
            await conn.execute("insert into public.orders values ('A')")
            await errands.start(conn, order_saga, Order(id="B"), key="A")

    assert refused.value.execution_id == first
    assert await counts(conn) == (0, 1, 0, 0)


async def test_who_was_told_an_id_while_another_started_the_key_is_to_repeat(
    conn: Connection, dsn: str
) -> None:
    """The id that was told would name nothing; said again, the transaction finds the other one's."""
    async with await psycopg.AsyncConnection.connect(dsn) as slower:
        await errands.start(slower, order_saga, Order(id="A"), key="A")
        faster = await errands.start(conn, order_saga, Order(id="A"), key="A")
        with pytest.raises(psycopg.errors.SerializationFailure, match="has started key A meanwhile"):
            await slower.commit()

        assert await errands.start(slower, order_saga, Order(id="A"), key="A") == faster


async def test_who_started_a_key_while_another_took_it_for_something_else_fails_at_the_commit(
    conn: Connection, dsn: str
) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as slower:
        await slower.execute("insert into public.orders values ('A')")
        await errands.start(slower, order_saga, Order(id="A"), key="A")
        await errands.start(conn, order_saga, Order(id="B"), key="A")
        with pytest.raises(
            psycopg.Error, match="the key A belongs to an execution with another input"
        ) as failed:
            await slower.commit()

    assert failed.value.diag.sqlstate == "WP409"
    assert await counts(conn) == (0, 1, 0, 0)


async def test_an_event_that_is_given_again_under_its_id_is_one(conn: Connection) -> None:
    await subscribe(conn, "billing")

    for _ in range(2):
        async with conn.transaction():
            for _ in range(2):
                assert await errands.signal(conn, Paid(order="A"), id="s1") == "s1"
                assert await errands.publish(conn, Paid(order="A"), id="p1") == "p1"

    assert await counts(conn) == (0, 0, 1, 1)


async def test_an_id_that_stands_for_another_event_fails_the_commit(conn: Connection) -> None:
    await subscribe(conn, "billing")
    await errands.signal(conn, Paid(order="A"), id="s1")
    await errands.publish(conn, Paid(order="A"), id="p1")

    for give, name in ((errands.signal, "s1"), (errands.publish, "p1")):
        with pytest.raises(psycopg.Error, match=f"the id {name} stands for another event") as failed:
            async with conn.transaction():
                await give(conn, Paid(order="A", amount=2), id=name)
        assert failed.value.diag.sqlstate == "WP409"
        with pytest.raises(IdTaken, match=f"the id {name} stands for another event"):
            await give(conn, Paid(order="A", amount=2), id=name)

    assert await counts(conn) == (0, 0, 1, 1)


async def test_an_id_of_another_source_is_another_event(conn: Connection) -> None:
    await subscribe(conn, "billing")

    for source in ("/shop", "/warehouse"):
        await errands.publish(conn, Paid(order="A"), id="p1", source=source)

    assert (await counts(conn))[3] == 2


# ---- events for flows ----------------------------------------------------------------------------------------------


async def test_a_signal_fills_the_wait_of_its_type_and_key_and_wakes_its_execution(conn: Connection) -> None:
    waits = await waiting(conn, wait("pay", key="A"))
    other = await waiting(conn, wait("pay", key="B"))
    assert not await is_due(conn, waits)

    await errands.signal(conn, Paid(order="A"), id="s1")

    assert await mail_of(conn, waits) == ["event s1"]
    assert await is_due(conn, waits)
    assert await mail_of(conn, other) == []


async def test_signals_of_a_transaction_fill_waits_in_their_order(conn: Connection) -> None:
    waits = await waiting(conn, wait("pay", key="A"), wait("more", key="A"))

    async with conn.transaction():
        await errands.signal(conn, Paid(order="A"), id="z")
        await errands.signal(conn, Paid(order="A"), id="a")

    assert await mail_of(conn, waits) == ["event z", "event a"]


async def test_what_is_started_and_given_in_one_transaction_meets_though_others_have_it_too(
    conn: Connection,
) -> None:
    first = await waiting(conn, wait("pay", key="A"))
    async with conn.transaction():
        started = await errands.start(conn, order_saga, Order(id="A"))
        await errands.signal(conn, Paid(order="A"), id="s1")

    holder = await claim(conn, await worker(conn), started)
    await commit(conn, holder, holder.turn(waits=[wait("pay", key="A")]))

    assert await mail_of(conn, first) == await mail_of(conn, started) == ["event s1"]


async def test_a_signal_starts_the_flow_that_it_starts(conn: Connection) -> None:
    await definitions.publish(conn, [Definition("invoice", "1", on="paid")])

    await errands.signal(conn, Paid(order="A"))

    assert await rows(conn, "select definition, business_key from waypost.execution") == [("invoice", "A")]


async def test_a_transaction_may_give_so_many_signals_and_no_more(conn: Connection) -> None:
    async def give(count: int) -> None:
        async with conn.transaction():
            for n in range(count):
                await errands.signal(conn, Paid(order=str(n)))

    with pytest.raises(
        psycopg.Error,
        match=f"expected at most {ERRAND_SIGNALS_MAX} signals in one transaction, found {ERRAND_SIGNALS_MAX + 1}",
    ):
        await give(ERRAND_SIGNALS_MAX + 1)
    await give(ERRAND_SIGNALS_MAX)

    assert (await counts(conn))[2] == ERRAND_SIGNALS_MAX


# ---- events for subscribers ----------------------------------------------------------------------------------------


async def test_an_event_is_a_message_to_each_endpoint_that_subscribes_to_its_type(conn: Connection) -> None:
    await subscribe(conn, "billing", "audit")
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    told = await errands.publish(conn, Paid(order="A", amount=7), source="/shop", traceparent=traceparent)

    found = await rows(
        conn,
        "select endpoint, body, command, state, execution_id, expires_at - due_at = make_interval(days => 4)"
        "  from waypost.outbox order by endpoint",
    )
    assert [(endpoint, *rest) for endpoint, _, *rest in found] == [
        ("audit", False, "due", None, True),
        ("billing", False, "due", None, True),
    ]
    for _, body, *_ in found:
        event = decode_structured(body)
        assert (event.id, event.source, event.type, event.subject) == (told, "/shop", "paid", "A")
        assert event.data == {"order": "A", "amount": 7}
        assert event.extensions == {"traceparent": traceparent}


async def test_an_event_that_nobody_subscribes_to_is_no_message(conn: Connection) -> None:
    await errands.publish(conn, Paid(order="A"))

    assert (await counts(conn))[3] == 0


# ---- rights --------------------------------------------------------------------------------------------------------


async def test_an_application_needs_no_rights_but_those_to_the_three_functions(
    conn: Connection, dsn: str
) -> None:
    role = sql.Identifier(f"shop_{conn.info.dbname}")
    await subscribe(conn, "billing")
    for grant in (
        "create role {}",
        "grant usage on schema waypost to {}",
        "grant execute on function waypost.start, waypost.signal, waypost.publish to {}",
        "grant insert on public.orders to {}",
    ):
        await conn.execute(sql.SQL(grant).format(role))
    try:
        async with await psycopg.AsyncConnection.connect(dsn) as shop:
            await shop.execute(sql.SQL("set role {}").format(role))
            await shop.execute("insert into public.orders values ('A')")
            await errands.start(shop, order_saga, Order(id="A"), key="A")
            await errands.signal(shop, Paid(order="A"))
            await errands.publish(shop, Paid(order="A"))
            await shop.commit()
            for forbidden in ("select * from waypost.execution", "select * from waypost.errand"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    await shop.execute(forbidden)
                await shop.rollback()
        assert await counts(conn) == (1, 1, 1, 1)
    finally:
        await conn.execute(sql.SQL("drop owned by {}").format(role))
        await conn.execute(sql.SQL("drop role {}").format(role))


async def test_without_a_grant_nobody_may_ask_for_anything(conn: Connection, dsn: str) -> None:
    role = sql.Identifier(f"stranger_{conn.info.dbname}")
    await conn.execute(sql.SQL("create role {}").format(role))
    await conn.execute(sql.SQL("grant usage on schema waypost to {}").format(role))
    try:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as stranger:
            await stranger.execute(sql.SQL("set role {}").format(role))
            for call in ("start('order', '{}')", "signal('paid', 'A', '{}')", "publish('paid', 'A', '{}')"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    await stranger.execute(f"select waypost.{call}".encode())
    finally:
        await conn.execute(sql.SQL("drop owned by {}").format(role))
        await conn.execute(sql.SQL("drop role {}").format(role))


async def test_what_an_application_puts_on_its_search_path_is_not_called(conn: Connection) -> None:
    """A function that acts with another's rights must not find those of its caller."""
    await conn.execute("create schema trap")
    for stolen in ("coalesce_text(text)", "sha256(bytea)", "clock_timestamp()", "convert_to(text, name)"):
        await conn.execute(
            f"create function trap.{stolen} returns text language plpgsql as"
            " $$ begin raise exception 'caught'; end $$".encode()
        )
    async with conn.transaction():
        await conn.execute("set local search_path = trap, pg_catalog")
        await errands.start(conn, order_saga, Order(id="A"), key="A")
        await errands.signal(conn, Paid(order="A"))
        await conn.execute("set constraints all immediate")

    assert await counts(conn) == (0, 1, 1, 0)


# ---- bad input -----------------------------------------------------------------------------------------------------

DEEP = "[" * 65 + "]" * 65


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        ("start('oder', '{}')", "WP404", "no flow is called 'oder'; known here: order@1"),
        ("start('order', '{}', version => '7')", "WP404", "no flow is called 'order@7'; known here: order@1"),
        ("start(null, '{}')", "WP404", "no flow is called ''; known here: order@1"),
        ("start('order', null)", "WP400", "start of 'order': expected a JSON document, found null"),
        (
            "start('order', '{}', key => '')",
            "WP400",
            "expected a key of 1 to 1024 bytes of printable text, found ''",
        ),
        ("start('order', '{}', key => repeat('k', 1025))", "WP400", "expected a key of 1 to 1024 bytes"),
        ("start('order', '{}', key => E'a\\x01')", "WP400", "expected a key of 1 to 1024 bytes"),
        (
            "start('order', to_jsonb(repeat('x', 262144)))",
            "WP413",
            "at most 262144 bytes of JSON, found 262146",
        ),
        (f"start('order', '{DEEP}')", "WP400", "expected at most 64 arrays and objects inside each other"),
        ("start('order', '1e400')", "WP400", "expected numbers that a double can hold"),
        ("start('order', '{\"a\": [-1e400]}')", "WP400", "expected numbers that a double can hold"),
        (
            "signal(null, 'A', '{}')",
            "WP400",
            "signal: expected a type of 1 to 512 bytes of printable text, found NULL",
        ),
        ("signal('paid', '', '{}')", "WP400", "signal: expected a key of 1 to 1024 bytes"),
        ("signal('paid', 'A', '{}', id => '')", "WP400", "signal: expected an id of 1 to 512 bytes"),
        (
            "publish('', 'A', '{}')",
            "WP400",
            "publish: expected a type of 1 to 512 bytes of printable text, found ''",
        ),
        (
            "publish('paid', 'A', '{}', source => 'a b')",
            "WP400",
            "publish: expected a source that is a URI reference",
        ),
        (
            "publish('paid', 'A', '{}', source => null)",
            "WP400",
            "publish: expected a source that is a URI reference",
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_the_function(
    conn: Connection, call: str, code: str, says: str
) -> None:
    with pytest.raises(psycopg.Error) as refused:
        await conn.execute(f"select waypost.{call}".encode())

    assert refused.value.diag.sqlstate == code
    assert says in (refused.value.diag.message_primary or "")
    assert await counts(conn) == (0, 0, 0, 0)


@pytest.mark.parametrize("document", ["[" * 64 + "]" * 64, "1e308", '"' + "x" * 262142 + '"', "null"])
async def test_a_document_at_the_limit_is_taken(conn: Connection, document: str) -> None:
    await conn.execute("select waypost.start('order', %s::jsonb)", (document,))

    assert (await counts(conn))[1] == 1


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
@pytest.mark.parametrize(
    "call", ["start('order', '{}')", "signal('paid', 'A', '{}')", "publish('paid', 'A', '{}')"]
)
async def test_another_isolation_is_refused(conn: Connection, call: str, isolation: str) -> None:
    with pytest.raises(
        psycopg.errors.ActiveSqlTransaction, match=f"READ COMMITTED, found {isolation.upper()}"
    ):
        async with conn.transaction():
            await conn.execute(f"set transaction isolation level {isolation}".encode())
            await conn.execute(f"select waypost.{call}".encode())


async def test_a_retired_version_is_not_started(conn: Connection) -> None:
    await definitions.publish(conn, [Definition("order", "2")])
    await conn.execute("update waypost.definition set state = 'retired' where version = '2'")

    await conn.execute("select waypost.start('order', '{}')")

    assert await rows(conn, "select version from waypost.execution") == [("1",)]


class Anything(BaseModel):
    it: Any


@workflow(name="anything", version="1")
async def anything(ctx: Context, given: Anything) -> None: ...


@workflow(name="nowhere", version="1")
async def nowhere(ctx: Context, given: Anything) -> None: ...


class Nameless(Event):
    it: str = ""


Give = Callable[[Any], Any]
HELPERS: Any = errands
NO_ORDER: Any = {"id": 7}
BAD: list[tuple[Give, type[Exception], str]] = [
    (lambda c: HELPERS.start(c, order_saga, NO_ORDER), InputInvalid, "at /id: "),
    (
        lambda c: HELPERS.start(c, order_saga, Order(id="A"), key=""),
        ErrandInvalid,
        "key '': expected 1 to 1024",
    ),
    (lambda c: HELPERS.start(c, anything, Anything(it="x" * 262144)), TooLarge, "input of flow anything"),
    (lambda c: HELPERS.start(c, nowhere, Anything(it=1)), UnknownFlow, "'nowhere@1'; known: order@1"),
    (
        lambda c: HELPERS.signal(c, Nameless()),
        ErrandInvalid,
        "event Nameless: expected a class with type=",
    ),
    (lambda c: HELPERS.signal(c, Paid(order="\x01")), ErrandInvalid, "key "),
    (lambda c: HELPERS.publish(c, Paid(order="A"), id=""), ErrandInvalid, "id '': expected 1 to 512"),
    (
        lambda c: HELPERS.publish(c, Paid(order="A"), source=""),
        ErrandInvalid,
        "expected a source that is a URI",
    ),
]


@pytest.mark.parametrize(("give", "error", "says"), BAD)
async def test_a_helper_says_what_is_wrong(dsn: str, give: Give, error: type[Exception], says: str) -> None:
    with psycopg.connect(dsn) as waits, pytest.raises(error) as refused:
        give(waits)
    assert says in str(refused.value)

    async with await psycopg.AsyncConnection.connect(dsn) as later:
        with pytest.raises(error) as refused:
            await give(later)
    assert says in str(refused.value)


# ---- hints ---------------------------------------------------------------------------------------------------------


async def test_workers_and_the_relay_are_told_after_the_commit(conn: Connection, dsn: str) -> None:
    await subscribe(conn, "billing")
    await conn.execute("listen waypost")

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as shop:
        await errands.start(shop, order_saga, Order(id="A"))
        await errands.publish(shop, Paid(order="A"))
    heard = [one.payload async for one in conn.notifies(stop_after=3, timeout=10)]

    assert heard == ["execution", "event", "outbox"]


async def test_an_application_may_do_without_hints(conn: Connection, dsn: str) -> None:
    await conn.execute("listen waypost")

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as shop:
        await shop.execute("set waypost.hints = off")
        await errands.start(shop, order_saga, Order(id="A"))
        await shop.execute("select pg_notify('waypost', 'the end')")
    heard = [one.payload async for one in conn.notifies(stop_after=1, timeout=10)]

    assert heard == ["the end"]
