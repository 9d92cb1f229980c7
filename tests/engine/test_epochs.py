"""Executions that continue as new: what the row, the journal and the mail say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from contracts import strict_json
from orchestrator.client import Client
from orchestrator.store import executions
from orchestrator.store.database import Connection
from receiver import inbox
from receiver.inbox import MailItem
from tests.engine.conftest import Working
from tests.engine.flows import CALLS, FLOWS
from tests.engine.test_events import came
from tests.engine.test_worker import REMEMBERING
from tests.invariants import broken
from tests.waiting import until


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    yield


async def rows(conn: Connection, query: str, *parameters: object) -> list[tuple[Any, ...]]:
    cursor = await conn.execute(query.encode(), parameters)
    return await cursor.fetchall()


async def command_of(conn: Connection, epoch: int) -> UUID:
    """The command of that epoch, once it is written."""

    async def so() -> bool:
        return bool(await rows(conn, "select from waypost.outbox where epoch = %s", epoch))

    await until(so, what=f"the command of epoch {epoch}")
    [(message,)] = await rows(conn, "select message_id from waypost.outbox where epoch = %s", epoch)
    return message


async def answered(conn: Connection, message: UUID, outcome: str = "done") -> None:
    said = {"outcome": outcome, "value": {"charge": "c"}} if outcome == "done" else {
        "outcome": outcome, "error": {"code": "no"},
    }  # fmt: skip
    text = strict_json.encode(said, what="reply")
    await inbox.post(
        conn,
        [
            MailItem(
                kind="reply", sender="payments", source="/payments", event_id=str(uuid4()), type="charged", key="",
                digest=hashlib.sha256(text.encode()).digest(), data=text, causation=message,
            )
        ],
    )  # fmt: skip


@REMEMBERING
async def test_a_flow_that_continues_as_new_is_one_execution_whose_mail_goes_to_its_epoch(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("monthly"), {"number": 1}, key="sub-1")
        for n in (1, 2, 3):  # all before anybody waits: what is not taken goes along
            await came(conn, "told", "all", {"n": n})
        first = await command_of(conn, 0)
        await answered(conn, await command_of(conn, 1))  # the first one is never answered in time
        await answered(conn, first, "refused")
        await answered(conn, await command_of(conn, 2))
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.row.epoch, view.row.business_key) == ("completed", 2, "sub-1")
    assert view.output == [3, 6, 9]
    assert [call[:2] for call in CALLS if call[0] == "double"] == [("double", n) for n in (1, 2, 3)]
    facts = await rows(conn, "select kind, path, payload::text from waypost.journal order by position")
    kinds = [kind for kind, _, _ in facts]
    assert (kinds.count("continued"), kinds.count("finished"), kinds[-1]) == (2, 3, "finished")
    assert [json.loads(text)["epoch"] for kind, _, text in facts if kind == "continued"] == [1, 2]
    after = facts[kinds.index("continued") :]
    assert {path for kind, path, _ in after if kind == "late"} == {"epoch:0/charge"}
    assert await broken(conn) == []


async def test_a_replay_reads_the_epoch_that_runs(working: Working, client: Client, conn: Connection) -> None:
    async with working():
        started = await client.start(FLOWS.get("monthly"), {"number": 2})
        await came(conn, "told", "all", {"n": 1})
        await answered(conn, await command_of(conn, 0))
        await command_of(conn, 1)

    [(last,)] = await rows(conn, "select max(position) from waypost.journal where kind = 'continued'")
    found = await executions.journals(conn, [(1, str(started.execution_id))])
    [journal] = found.values()
    assert (journal[0].kind, journal[0].position) == ("continued", last)
    assert journal[0].data["input"] == {"number": 3, "told": [5]}


async def test_an_operator_may_cancel_it_in_any_epoch(
    working: Working, client: Client, conn: Connection
) -> None:
    async with working():
        started = await client.start(FLOWS.get("monthly"), {"number": 2})
        await came(conn, "told", "all", {"n": 1})
        await answered(conn, await command_of(conn, 0))
        await command_of(conn, 1)
        await client.cancel(started.execution_id, by="ann", reason="enough")
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.row.epoch) == ("cancelled", 1)
    assert await broken(conn) == []
