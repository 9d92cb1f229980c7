"""With payload keys the database holds ciphertext: of a whole execution no table has the value, and programs get it."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import pytest
from psycopg import sql
from pydantic import BaseModel

from contracts.codec import Codec, PayloadKeyMissing, PayloadUnreadable, Sealing, keys_of
from contracts.messages import Command, Event
from contracts.outcome import Outcome
from orchestrator import Context, Retry, workflow
from orchestrator.bootstrap import check_keys
from orchestrator.client import Client, ExecutionView
from orchestrator.flows import Flows
from orchestrator.rekey import rekey
from orchestrator.settings import Settings, SettingsInvalid
from orchestrator.store import inbox as stored
from orchestrator.store import tasks
from orchestrator.store.database import Connection
from receiver import inbox
from relay import outbox
from relay.outbox import Message
from tests.engine.conftest import Working
from tests.engine.test_worker import reply
from tests.store.world import event
from tests.waiting import until

CANARY: Final = "canary-4242-8181"
CLEAR: Final = "found-by-3131"
"""What is searched by stays in the clear."""
FIRST, SECOND = (base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2))


def use(text: str | None) -> Codec | None:
    Sealing.codec = None if text is None else Codec(keys_of(text), os.urandom)
    return Sealing.codec


@pytest.fixture(autouse=True)
def sealed() -> Iterator[None]:
    use(f"first:{FIRST}")
    yield
    use(None)


class Charge(Command[dict[str, Any]], endpoint="payments", type="payment.charge"):
    card: str


class Arrived(Event, type="sealed.arrived", key="order"):
    order: str
    pin: str


class Paid(BaseModel):
    token: str


def remembers(card: str) -> str:
    return f"{card}!"


@workflow(name="sealed", version="1")
async def sealed_flow(ctx: Context, card: str) -> Paid:
    await ctx.step(remembers, card)
    charged = await ctx.call(Charge(card=card), undo=lambda _: Charge(card=card))
    arrived = await ctx.event(Arrived, key="o-1")
    ctx.emit(arrived)
    decided = await ctx.approval("look", who="ann", show={"card": card})
    assert decided.choice == "approve"
    return Paid(token=charged["token"])


@workflow(name="sealed-child", version="1")
async def sealed_child(ctx: Context, card: str) -> str:
    return f"{card}!"


@workflow(name="sealed-parent", version="1")
async def sealed_parent(ctx: Context, card: str) -> str:
    return await ctx.child(sealed_child, card)


class Render(Command[Paid], type="sealed.render"):
    card: str


@workflow(name="sealed-task", version="1", mutex=lambda _: CLEAR)
async def sealed_task(ctx: Context, card: str) -> str:
    ctx.publish(found_by=CLEAR)
    once = Retry.fixed(timedelta(milliseconds=1), attempts=2)
    paid = await ctx.task(Render(card=card), queue="q", mutex=CLEAR, retry=once)
    return paid.token


FLOWS: Final = Flows([sealed_flow, sealed_child, sealed_parent, sealed_task])

HOUR: Final = timedelta(hours=1)
TABLES: Final = """
    select table_name
      from information_schema.tables
     where table_schema = 'waypost' and table_type = 'BASE TABLE'
"""


async def dump(conn: Connection) -> str:
    """All that the tables say; bytes as text too."""
    found: list[str] = []
    for (table,) in await (await conn.execute(TABLES)).fetchall():
        text = sql.SQL("select t::text from waypost.{} t").format(sql.Identifier(table))
        found += [row for (row,) in await (await conn.execute(text)).fetchall()]
    return "\n".join(found)


def says(text: str, value: str) -> bool:
    return value in text or value.encode().hex() in text


async def until_status(client: Client, started: UUID, status: str) -> ExecutionView:
    async def there() -> bool:
        return (await client.show(started)).row.status == status

    await until(there, what=status)
    return await client.show(started)


async def to_the_approval(conn: Connection, client: Client, started: UUID) -> None:
    await reply(conn, "charge", Outcome("done", {"token": CANARY}), execution=started)
    data = f'{{"order": "o-1", "pin": "{CANARY}"}}'
    body = f'{{"specversion": "1.0", "data": {data}}}'.encode()
    await inbox.post(conn, [event("e1", type=Arrived.type_, key="o-1", data=data, body=body)])

    async def asked() -> bool:
        return bool(await client.approvals())

    await until(asked, what="an approval")


async def started_and_asked(working: Working, client: Client, conn: Connection) -> UUID:
    started = (await client.start(FLOWS.get("sealed"), CANARY, key="o-1")).execution_id
    async with working(flows=FLOWS):
        await to_the_approval(conn, client, started)
    return started


async def test_no_table_has_the_value_and_every_program_gets_it(
    working: Working, client: Client, conn: Connection
) -> None:
    await conn.execute(
        "insert into waypost.endpoint (tenant_id, name, url, kind) values (1, 'hears', 'http://x', 'event')"
    )
    await conn.execute(
        "insert into waypost.subscription (tenant_id, type, endpoint) values (1, %s, 'hears')",
        (Arrived.type_,),
    )
    started = (await client.start(FLOWS.get("sealed"), CANARY, key="o-1")).execution_id
    again = await client.start(FLOWS.get("sealed"), CANARY, key="o-1")
    async with working(flows=FLOWS, forgetful=True):
        await to_the_approval(conn, client, started)
        (approval,) = await client.approvals()
        await client.decide(started, "look", "approve", by="ann", reason="fine")
        view = await until_status(client, started, "completed")

    text = await dump(conn)
    assert again.execution_id == started, "a repeated start is known by its digest"
    assert not says(text, CANARY)
    assert '"sealed"' in text
    assert approval.show == {"card": CANARY}
    assert view.output == {"token": CANARY}
    assert [fact.kind for fact in view.facts if CANARY in (fact.payload or "")] != []
    decided = await (await conn.execute("select choice, decided_by, reason from waypost.approval")).fetchone()
    assert decided == ("approve", "ann", "fine")


async def test_what_a_child_gets_and_gives_is_sealed_too(
    working: Working, client: Client, conn: Connection
) -> None:
    started = (await client.start(FLOWS.get("sealed-parent"), CANARY)).execution_id
    async with working(flows=FLOWS):
        view = await until_status(client, started, "completed")

    assert view.output == f"{CANARY}!"
    assert not says(await dump(conn), CANARY)


async def taken(conn: Connection) -> tasks.Task:
    found: list[tasks.Task] = []

    async def there() -> bool:
        found.extend(
            await tasks.claim(conn, queues=["q"], limit=1, owner="w", token=uuid4(), lease=timedelta(hours=1))
        )
        return bool(found)

    await until(there, what="a task")
    return found[0]


def answer(task: tasks.Task, outcome: Outcome) -> tasks.Report:
    state = "done" if outcome.kind == "done" else "failed"
    return tasks.Report(task, state, json.dumps(outcome.as_json()))


async def tried_in_vain(conn: Connection) -> None:
    """A worker takes a task, says how far it is, and fails."""
    first = await taken(conn)
    assert json.loads(first.opened().payload) == {"card": CANARY}
    await tasks.beat(conn, [(first, json.dumps({"at": CANARY}))], lease=timedelta(hours=1))
    await tasks.settle(conn, [answer(first, Outcome("failed", code="odd", detail=CANARY))])


async def test_what_a_task_is_given_says_and_comes_to_is_sealed_and_what_is_searched_by_is_not(
    working: Working, client: Client, conn: Connection
) -> None:
    started = (await client.start(FLOWS.get("sealed-task"), CANARY)).execution_id
    async with working(flows=FLOWS):
        await tried_in_vain(conn)
        second = await taken(conn)
        [row] = [
            row for row in await tasks.of_execution(conn, str(started), tenant=1) if row.progress is not None
        ]
        use(f"second:{SECOND}")
        with pytest.raises(PayloadKeyMissing):
            second.opened()
        [unread] = [
            row for row in await tasks.of_execution(conn, str(started), tenant=1) if row.progress is not None
        ]
        use(f"first:{FIRST}")
        text = await dump(conn)
        await tasks.settle(conn, [answer(second, Outcome("done", {"token": CANARY}))])
        view = await until_status(client, started, "completed")

    assert second.opened().left == {"at": CANARY} == row.progress
    assert unread.progress == "[sealed]"
    assert view.output == CANARY
    assert not says(text + await dump(conn), CANARY)
    assert text.count(CLEAR) > 2, "an attribute, and the keys of two mutexes"


async def test_rekeying_seals_tasks_and_what_is_kept_apart_too(
    working: Working, client: Client, conn: Connection
) -> None:
    use(None)
    started = (await client.start(FLOWS.get("sealed-task"), CANARY)).execution_id
    async with working(flows=FLOWS):
        await tried_in_vain(conn)
        second = await taken(conn)
        row = await conn.execute(
            "insert into waypost.quarantine (tenant_id, sender, reason, detail, headers, body, digest)"
            " values (1, 's', 'contract', 'x', '{}', %s, sha256('x')) returning quarantine_id",
            (CANARY.encode(),),
        )
        [(number,)] = await row.fetchall()
        assert says(await dump(conn), CANARY)
        for text in (f"first:{FIRST}", f"second:{SECOND},first:{FIRST}"):
            codec = use(text)
            assert codec is not None
            assert await rekey(conn, codec, progress=lambda _table, _done, _of: None) > 0
            assert not says(await dump(conn), CANARY)
            assert await rekey(conn, codec, progress=lambda _table, _done, _of: None) == 0
        use(f"second:{SECOND}")
        [claim] = await tasks.claimed_under(conn, token=second.token)
        assert json.loads(claim.opened().payload) == {"card": CANARY}
        kept = await stored.read_apart(conn, number, tenant=1)
        assert kept is not None
        assert kept.body == CANARY.encode()
        await tasks.settle(conn, [answer(claim, Outcome("done", {"token": CANARY}))])
        assert (await until_status(client, started, "completed")).output == CANARY


async def claimed(conn: Connection) -> list[Message]:
    return await outbox.claim(conn, token=uuid4(), limit=10, room=10, busy={}, timeout_max=HOUR, margin=HOUR)


async def test_the_relay_sends_the_same_bytes_as_without_keys_and_none_that_were_moved(
    working: Working, client: Client, conn: Connection
) -> None:
    started = (await client.start(FLOWS.get("sealed"), CANARY, key="o-1")).execution_id
    async with working(flows=FLOWS):

        async def sent() -> bool:
            found = await conn.execute("select from waypost.outbox where execution_id = %s", (started,))
            return await found.fetchone() is not None

        await until(sent, what="a command")
    (message,) = await claimed(conn)

    body = outbox.body_to_send(message)

    assert not says(message.body.decode(), CANARY)
    assert body.startswith(b'{"specversion":"1.0","id":"')
    assert b'"data":{"card":"canary-4242-8181"}' in body
    assert outbox.body_to_send(message) == body
    assert outbox.traceparent_in(message.body) == outbox.traceparent_in(body)
    with pytest.raises(PayloadUnreadable):
        outbox.body_to_send(replace(message, message_id=uuid4()))
    with pytest.raises(PayloadUnreadable):
        outbox.body_to_send(replace(message, tenant_id=2))


async def test_a_missing_key_holds_an_execution_and_its_return_lets_it_go_on(
    working: Working, client: Client, conn: Connection
) -> None:
    started = await started_and_asked(working, client, conn)
    use(f"second:{SECOND}")
    async with working(flows=FLOWS):
        await client.decide(started, "look", "approve", by="ann")
        view = await until_status(client, started, "held")

    assert view.held is not None
    assert "payload key 'first': expected it in WAYPOST_PAYLOAD_KEYS" in view.held.reason
    use(f"second:{SECOND},first:{FIRST}")
    async with working(flows=FLOWS):
        await client.resume(started, by="ann", reason="the key is back")
        assert (await until_status(client, started, "completed")).output == {"token": CANARY}


async def test_mail_that_no_key_opens_holds_and_is_read_when_it_can_be(
    working: Working, client: Client, conn: Connection
) -> None:
    started = (await client.start(FLOWS.get("sealed"), CANARY)).execution_id
    async with working(flows=FLOWS):
        use(f"second:{SECOND},first:{FIRST}")
        third = use(f"third:{base64.b64encode(bytes([3]) * 32).decode()},first:{FIRST}")
        assert third is not None

        async def sent() -> bool:
            found = await conn.execute("select from waypost.outbox where execution_id = %s", (started,))
            return await found.fetchone() is not None

        await until(sent, what="a command")
    await reply(conn, "charge", Outcome("done", {"token": CANARY}), execution=started)
    use(f"first:{FIRST}")
    async with working(flows=FLOWS):
        view = await until_status(client, started, "held")
        assert view.held is not None
        assert "cannot be read: payload key 'third'" in view.held.reason
        Sealing.codec = third
        await client.resume(started, by="ann", reason="the key is there")

        async def waits() -> bool:
            return any(
                fact.kind == "asked" and Arrived.type_ in (fact.payload or "")
                for fact in (await client.show(started)).facts
            )

        await until(waits, what="the wait that follows the reply")


async def test_rekeying_seals_everything_with_the_newest_key_and_what_was_in_the_clear(
    working: Working, client: Client, conn: Connection
) -> None:
    use(None)
    await client.start(FLOWS.get("sealed"), CANARY, key="clear")
    use(f"first:{FIRST}")
    started = await started_and_asked(working, client, conn)
    assert says(await dump(conn), CANARY)
    codec = use(f"second:{SECOND},first:{FIRST}")
    assert codec is not None
    seen: list[tuple[str, int, int]] = []

    done = await rekey(conn, codec, progress=lambda table, done, of: seen.append((table, done, of)))

    text = await dump(conn)
    assert done > 0
    assert {table for table, _, _ in seen} >= {"journal", "outbox", "inbox"}
    assert all(so_far <= of for _, so_far, of in seen)
    assert not says(text, CANARY)
    assert '"key": "first"' not in text
    assert b'"key":"first"'.hex() not in text
    assert await rekey(conn, codec, progress=lambda _table, _done, _of: None) == 0
    use(f"second:{SECOND}")
    async with working(flows=FLOWS):
        await client.decide(started, "look", "approve", by="ann")
        assert (await until_status(client, started, "completed")).output == {"token": CANARY}


def test_a_business_key_inside_an_event_is_refused_where_events_are_sealed() -> None:
    @workflow(name="keyed", version="1", on=Arrived, key="order")
    async def keyed(ctx: Context, arrived: Arrived) -> None:
        """Nothing."""

    settings = Settings.from_environment({"WAYPOST_PAYLOAD_KEYS": f"first:{FIRST}"})
    with pytest.raises(SettingsInvalid, match="found keyed@1 with key= in the data"):
        check_keys(Flows([keyed]), settings)
    check_keys(Flows([keyed]), Settings.from_environment({}))
