"""What is authentic and no mail is kept apart with its reason, acknowledged, explained, and let in when mended."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from contracts.codec import Codec, Sealing
from contracts.envelope import decode_structured
from orchestrator import inbox
from orchestrator.inbox import Received, StillApart, UnknownItem
from orchestrator.registry import set_sender
from orchestrator.rekey import rekey
from orchestrator.store import inbox as store
from tests.receiver.test_batches import batch
from tests.receiver.world import (
    NOON,
    VAULT,
    Connection,
    World,
    add_command,
    add_wait,
    event,
    in_headers,
    one,
    reply,
)

PAYOUT: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "amount": {"type": "integer", "minimum": 1},
        "lines": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["amount"],
}
ROWS: Final = "select reason, detail, times from waypost.quarantine order by quarantine_id"


async def rows(world: World) -> list[Any]:
    return await (await world.conn.execute(ROWS)).fetchall()


async def expect(world: World, schema: Any, **how: Any) -> None:
    await inbox.add_contract(world.conn, "payout.made", schema, **how)
    world.receiver.senders.kept.clear()  # as time does


async def why(world: World, name: str) -> str:
    return "\n".join(await inbox.explain(world.conn, await inbox.find(world.conn, name), now=NOON))


async def listed(world: World) -> list[tuple[str, str]]:
    return [(it.id, it.reason) for it in await store.read(world.conn, tenant=1, reason=None, limit=50)]


async def test_an_event_that_breaks_its_contract_is_kept_with_the_place_and_let_in_when_that_is_mended(
    world: World,
) -> None:
    execution_id = await add_wait(world.conn, type="payout.made", key="order-1042")
    await expect(world, PAYOUT)
    sent = event(data={"amount": 0, "lines": ["a", 2]})

    answer = await world.post(sent)
    again = await world.post(sent)

    assert (answer.status, answer.json, "x-inbox" in answer.headers) == (
        202,
        {"answer": "quarantined"},
        False,
    )
    assert (again.status, again.json, again.headers["x-inbox"]) == (
        202,
        {"answer": "quarantined"},
        "duplicate",
    )
    [(reason, detail, times)] = await rows(world)
    faults = ["/amount: expected 1 or more", "/lines/1: expected string"]
    assert (reason, sorted(detail.splitlines()), times) == ("contract", faults, 2)
    assert await one(world.conn, "select count(*) from waypost.inbox") == 0
    assert "- /lines/1: expected string" in await why(world, "q1")
    with pytest.raises(StillApart, match="/amount: expected 1 or more"):
        await inbox.redrive(world.conn, VAULT, "q1", by="ada")

    await expect(world, True)
    became = [await inbox.redrive(world.conn, VAULT, "q1", by="ada") for _ in range(2)]

    assert became == ["stored", "duplicate"]
    assert await one(world.conn, "select execution_id from waypost.mail") == execution_id
    body = await one(world.conn, "select body from waypost.inbox")
    assert bytes(body) == json.dumps(sent).encode()
    assert await listed(world) == []
    assert "let in by 'ada'" in await why(world, "q1")


async def test_a_contract_of_a_dataschema_is_for_those_that_name_it(world: World) -> None:
    await expect(world, False)
    await expect(world, True, dataschema="https://schemas.test/2")

    old, new = (
        await world.post(event()),
        await world.post(event(dataschema="https://schemas.test/2")),
    )

    assert (old.json["answer"], new.json["answer"]) == ("quarantined", "event")


async def test_in_headers_and_in_a_batch_too(world: World) -> None:
    await set_sender(world.conn, "payments", binary_mode=True)
    await expect(world, PAYOUT)

    single = await world.send(in_headers(event(data={"amount": 0})))
    mixed = await world.send(batch(event(id="good"), event(id="bad", data={})))

    assert single.json == {"answer": "quarantined"}
    assert mixed.json == {"answer": "batch", "events": 1, "duplicates": 0, "quarantined": 1}
    await expect(world, True)
    assert [await inbox.redrive(world.conn, VAULT, it, by="ada") for it in ("q1", "q2")] == [
        "stored",
        "stored",
    ]
    assert await one(world.conn, "select count(*) from waypost.inbox") == 3


async def test_an_event_that_is_over_when_it_comes_is_kept_and_let_in_by_a_person_only(world: World) -> None:
    def at(minutes: int) -> str:
        return (NOON + timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%Sz")

    over = await world.post(event(id="over", expirytime=at(-2)))
    fresh = [
        await world.post(event(expirytime=said)) for said in (at(0), at(2), "9999-12-31T23:59:60Z", "soon")
    ]

    assert over.json == {"answer": "quarantined"}
    assert [answer.json["answer"] for answer in fresh] == ["event"] * 4
    assert [row[0] for row in await rows(world)] == ["expired"]
    assert await inbox.redrive(world.conn, VAULT, "q1", by="ada") == "stored"


async def test_what_says_something_else_under_a_name_that_is_taken_is_kept_beside_the_first(
    world: World,
) -> None:
    await world.post(event(id="1", data={"amount": 1}))

    answer = await world.post(event(id="1", data={"amount": 2}))

    assert (answer.status, [row[0] for row in await rows(world)]) == (409, ["conflict"])
    assert "found something else under its name" in await why(world, "q1")
    with pytest.raises(StillApart, match="conflict"):
        await inbox.redrive(world.conn, VAULT, "q1", by="ada")


async def test_nothing_is_let_in_that_is_not_kept_apart(world: World) -> None:
    await world.post(event())

    for name in ("q1", "7", "q", "", "1; drop", "q" + "9" * 30, "qq1"):
        with pytest.raises(UnknownItem):
            await inbox.redrive(world.conn, VAULT, name, by="ada")
    number = await one(world.conn, "select inbox_id::text from waypost.inbox")
    with pytest.raises(StillApart, match="found mail"):
        await inbox.redrive(world.conn, VAULT, number, by="ada")


async def test_where_payloads_are_sealed_it_lies_sealed_and_is_shown_and_let_in_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sealing, "codec", Codec([("k", bytes(32))], os.urandom))
    await expect(world, PAYOUT)
    sent = event(id="1", data={"amount": 0, "hidden": "treasure"})
    await world.post(sent)

    lying = await one(
        world.conn, "select to_jsonb(q)::text || encode(body, 'escape') from waypost.quarantine q"
    )
    apart = await inbox.find(world.conn, "q1")
    await expect(world, True)

    assert "treasure" not in lying
    assert json.loads(apart.body or b"") == sent
    assert await inbox.redrive(world.conn, VAULT, "q1", by="ada") == "stored"
    [(number, _)] = await listed(world)
    item = await inbox.find(world.conn, number)
    assert isinstance(item, Received)
    assert (item.data, json.loads(item.body or b"")) == (sent["data"], sent)


def nothing(table: str, done: int, of: int) -> None: ...


async def test_rekeying_reaches_what_is_kept_apart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ("first", bytes(32)), ("second", bytes(range(32)))
    await expect(world, PAYOUT)
    clear, sealed = event(id="1", data={"amount": 0}), event(id="2", data={"amount": 0})
    await world.post(clear)
    monkeypatch.setattr(Sealing, "codec", Codec([first], os.urandom))
    await world.post(sealed)
    both = Codec([second, first], os.urandom)
    monkeypatch.setattr(Sealing, "codec", both)

    assert await rekey(world.conn, both, progress=nothing) == 2
    assert await rekey(world.conn, both, progress=nothing) == 0

    monkeypatch.setattr(Sealing, "codec", Codec([second], os.urandom))
    assert [json.loads((await inbox.find(world.conn, it)).body or b"") for it in ("q1", "q2")] == [
        clear,
        sealed,
    ]
    await expect(world, True)
    assert await inbox.redrive(world.conn, VAULT, "q2", by="ada") == "stored"


# ---- what moved nothing ------------------------------------------------------------------------------------------


async def test_an_early_event_names_the_waits_that_it_nearly_met_and_what_differs(world: World) -> None:
    await add_wait(world.conn, type="payout.made", key="order-1043")
    await add_wait(world.conn, type="payout.failed", key="order-1042")
    await world.post(event(subject="order-1042"))
    [(number, reason)] = await listed(world)

    said = await why(world, number)

    assert reason == "early"
    assert "Nobody has waited for it yet" in said
    assert "for key 'order-1043'; this one has 'order-1042'." in said
    assert "for type 'payout.failed'; this one is 'payout.made'." in said


async def test_a_wait_that_has_another_event_of_the_key_and_one_of_another_spelling_are_named(
    world: World,
) -> None:
    await add_wait(world.conn, type="payout.made", key="order-1042")
    await add_wait(world.conn, type="Payout.Made", key="order-1042")
    for name in ("1", "2"):
        await world.post(event(id=name))
    number = await one(world.conn, "select inbox_id::text from waypost.inbox where event_id = '2'")

    said = await why(world, number)

    assert "and has another event of this key already" in said
    assert "for type 'Payout.Made'; this one is 'payout.made'" in said


WAITING: Final = 100_000


@pytest.mark.proof
@pytest.mark.parametrize("key", ["order-1042", "", "order-0050000x", "zzz"])
async def test_an_event_among_a_hundred_thousand_waits_is_explained_from_few_rows(
    conn: Connection, key: str
) -> None:
    await conn.execute(
        """
        insert into waypost.wait (tenant_id, execution_id, path, type, key)
        select 1, gen_random_uuid(), 'paid', (array['payout.made', 'Payout.Made', 'order.paid'])[1 + n %% 3],
               case when n %% 5 = 0 then '' else 'order-' || lpad(n::text, 7, '0') end
          from generate_series(1, %s) n
        """,
        (WAITING,),
    )
    await conn.execute("analyze waypost.wait")
    named = {"tenant": 1, "type": "payout.made", "key": key, "limit": 5, "types": store.TYPES_MAX}

    near = await store.read_near(conn, tenant=1, type="payout.made", key=key, limit=5)
    plan = await one(conn, b"explain (analyze, buffers, format json)" + store.NEAR.encode(), **named)

    assert len(near) == 5
    assert {it.type for it in near[:3]} == {"payout.made"}
    assert "Seq Scan" not in json.dumps(plan)
    assert plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"] < 400


async def test_an_event_that_nobody_waited_for_in_time_is_orphaned(world: World) -> None:
    await world.post(event())
    await world.conn.execute("update waypost.inbox set shelf_until = '2026-11-01'")
    [(number, reason)] = await listed(world)

    said = await why(world, number)

    assert reason == "orphaned"
    assert "it is offered no more" in said
    assert "No execution waits for events of type 'payout.made'" in said


async def test_an_orphaned_event_is_offered_again_to_who_waits_and_to_who_will(world: World) -> None:
    await world.post(event())
    await world.conn.execute("update waypost.inbox set shelf_until = '2026-11-01'")
    waits = [await add_wait(world.conn, type="payout.made", key="order-1042") for _ in range(2)]
    await add_wait(world.conn, type="payout.made", key="order-1043")
    number = await one(world.conn, "select inbox_id::text from waypost.inbox")

    became = await inbox.redrive(world.conn, VAULT, number, by="ada", now=NOON)

    assert became == "stored"
    had = await (await world.conn.execute("select execution_id from waypost.mail")).fetchall()
    assert sorted(it for (it,) in had) == sorted(waits)
    assert await one(world.conn, "select shelf_until from waypost.inbox") == NOON + timedelta(days=7)
    with pytest.raises(StillApart, match="found mail"):
        await inbox.redrive(world.conn, VAULT, number, by="ada", now=NOON)


async def test_an_orphaned_event_that_nobody_waits_for_is_on_the_shelf_again(world: World) -> None:
    await world.post(event())
    await world.conn.execute("update waypost.inbox set shelf_until = '2026-11-01'")
    [(number, _)] = await listed(world)

    await inbox.redrive(world.conn, VAULT, number, by="ada")

    assert await listed(world) == [(number, "early")]


async def test_a_reply_to_nothing_names_what_it_answers(world: World) -> None:
    await world.post(reply("0193a000-0000-7000-8000-000000000000"))
    [(number, reason)] = await listed(world)

    assert reason == "unmatched"
    assert "0193a000-0000-7000-8000-000000000000" in await why(world, number)


async def test_a_reply_that_came_after_the_end_is_late(world: World) -> None:
    execution_id, message_id = await add_command(world.conn)
    await world.conn.execute(
        "update waypost.execution set status = 'completed', finished_at = now(), wake_at = null"
    )
    await world.post(reply(message_id))
    [(number, reason)] = await listed(world)

    assert reason == "late"
    assert f"execution {execution_id} had ended" in await why(world, number)


async def test_hostile_values_are_explained_in_one_visible_line_each(world: World) -> None:
    await add_wait(world.conn, type="payout.made", key="a\x1b[2J\u202eb")
    await world.post(event(subject="\u202e\u2028key"))
    [(number, _)] = await listed(world)

    said = await inbox.explain(world.conn, await inbox.find(world.conn, number), now=datetime.now(UTC))

    assert all(line.isprintable() and line.isascii() for line in said)


async def test_what_was_received_is_shown_as_it_came(world: World) -> None:
    await world.post(event(id="1"))
    [(number, _)] = await listed(world)

    item = await inbox.find(world.conn, number)

    assert isinstance(item, Received)
    assert item.body is not None
    assert decode_structured(item.body).id == "1"
