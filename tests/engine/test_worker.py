"""A worker takes turns: what the database says afterwards."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from contracts import strict_json
from contracts.outcome import Outcome
from orchestrator.client import Client, NotHeld
from orchestrator.core.machine import Machine
from orchestrator.engine.ownership import Ownership
from orchestrator.engine.work import Work
from orchestrator.store.database import Connection
from receiver import inbox
from receiver.inbox import MailItem
from tests.engine.conftest import Working
from tests.engine.flows import BUG, CALLS, FLOWS
from tests.waiting import until

REMEMBERING = pytest.mark.parametrize("forgetful", [False, True], ids=["remembering", "forgetful"])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    BUG[0] = True
    yield


async def reply(
    conn: Connection, path: str, outcome: Outcome, *, execution: UUID, times: int = 1, number: int = 1
) -> None:
    """Post the reply to the message at `path`, as a receiver would, once it is in the outbox; to the `number`-th
    message there, when it is sent again.
    """

    async def sent() -> bool:
        return await message_at(conn, execution, path, number=number) is not None

    await until(sent, what=f"a message at {path}")
    data = strict_json.encode(outcome.as_json(), what="reply")
    for _ in range(times):
        await inbox.post(
            conn,
            [
                MailItem(
                    kind="reply", sender="payments", source="/payments", event_id=f"{execution}{path}{number}",
                    digest=hashlib.sha256(data.encode()).digest(), data=data,
                    causation=await message_at(conn, execution, path, number=number),
                )
            ],
        )  # fmt: skip


async def message_at(conn: Connection, execution: UUID, path: str, *, number: int = 1) -> UUID | None:
    cursor = await conn.execute(
        """
        select message_id
          from waypost.outbox
         where execution_id = %s
           and path = %s
         order by number
        offset %s
        """,
        (execution, path, number - 1),
    )
    row = await cursor.fetchone()
    return None if row is None else row[0]


def kinds(view: Any) -> list[str]:
    return [f"{fact.kind} {fact.path}".rstrip() for fact in view.facts]


@REMEMBERING
async def test_three_local_steps_run_once_each_and_the_journal_tells_it(
    working: Working, client: Client, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("three"), 1)
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.output, view.row.owner, view.row.wake_at) == ("completed", 18, None, None)
    assert CALLS == [("triple", 1), ("double", 3, True), ("triple", 6)]
    assert kinds(view) == [
        "started", "asked triple", "ended triple", "asked double", "ended double", "asked again", "ended again",
        "finished",
    ]  # fmt: skip
    assert view.row.position == len(view.facts)


@REMEMBERING
async def test_a_refused_step_undoes_what_was_done_in_reverse(
    working: Working, client: Client, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("undoes"), 1)
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.error and view.error["code"]) == ("compensated", "sold-out")
    assert [call[:2] for call in CALLS[2:]] == [
        ("declines", "sold-out"),
        ("undo_double", 2),
        ("undo_double", 1),
    ]


@REMEMBERING
async def test_a_step_that_raises_is_tried_again_and_then_fails(
    working: Working, client: Client, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("retries"), 1)
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, CALLS) == ("failed", [("breaks",), ("breaks",)])
    assert kinds(view) == ["started", "asked breaks", "attempted breaks", "ended breaks", "finished"]


@pytest.mark.parametrize("what", ["nan", "nul", "surrogate", "large", "deep", "object", "huge", "infinite"])
async def test_a_result_that_cannot_be_stored_fails_its_step_alone_and_is_undone(
    working: Working, client: Client, what: str
) -> None:
    async with working():
        bad = await client.start(FLOWS.get("unfit"), what)
        good = await client.start(FLOWS.get("three"), 1)
        view = await client.wait(bad.execution_id, seconds=30)
        other = await client.wait(good.execution_id, seconds=30)

    assert (view.row.status, other.row.status) == ("compensated", "completed")
    assert view.error is not None and view.error["code"] == (
        "too-large" if what == "large" else "not-encodable"
    )
    assert CALLS.count(("returns", what)) == 1


@REMEMBERING
async def test_a_command_leaves_with_its_turn_and_its_reply_moves_the_flow(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("pays"), "A", key="order-A")
        one = started.execution_id
        await reply(conn, "charge", Outcome("done", {"charge": "ch"}), execution=one, times=2)
        await reply(conn, "create", Outcome("done"), execution=one)
        view = await client.wait(one, seconds=30)

    assert (view.row.status, view.output) == ("completed", "ch")
    assert [(m.path, m.state, m.replied) for m in view.messages] == [
        ("charge", "delivered", True),
        ("create", "delivered", True),
    ]


@REMEMBERING
async def test_a_refused_command_is_compensated_by_one_that_names_it(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("pays"), "A")
        one = started.execution_id
        await reply(conn, "charge", Outcome("done", {"charge": "ch"}), execution=one)
        await reply(conn, "create", Outcome("refused", code="no-carrier"), execution=one)
        await reply(conn, "charge/undo", Outcome("done"), execution=one)
        view = await client.wait(one, seconds=30)
        cursor = await conn.execute(
            "select path, lane, convert_from(body, 'UTF8')::jsonb from waypost.outbox order by number"
        )
        bodies = {path: (lane, body) for path, lane, body in await cursor.fetchall()}

    assert view.row.status == "compensated"
    lane, undo = bodies["charge/undo"]
    assert (undo["undoes"], undo["known"], undo["data"]) == (
        bodies["charge"][1]["id"],
        True,
        {"order": "A", "charge": "ch"},
    )
    assert (lane, undo["idempotencykey"]) == (f"{one}/0/charge", f"{one}/0/charge/undo")


@REMEMBERING
async def test_a_command_that_its_service_gave_up_is_sent_again_as_another_message_for_the_same_action(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("persists"), "A")
        one = started.execution_id
        await reply(conn, "charge", Outcome("failed", code="busy"), execution=one)
        await reply(conn, "charge", Outcome("done", {"charge": "ch"}), execution=one, number=2)
        await reply(conn, "create", Outcome("refused", code="no-carrier"), execution=one)
        await reply(conn, "charge/undo", Outcome("done"), execution=one)
        view = await client.wait(one, seconds=30)
        cursor = await conn.execute(
            "select lane, expires_at, convert_from(body, 'UTF8')::jsonb from waypost.outbox order by number"
        )
        [first, second, _, undo] = await cursor.fetchall()

    assert (view.row.status, kinds(view)[1:5]) == (
        "compensated",
        ["asked charge", "attempted charge", "resent charge", "ended charge"],
    )
    same = ("idempotencykey", "expirytime", "type", "data", "replyto")
    assert first[:2] == second[:2]
    assert [first[2][name] for name in same] == [second[2][name] for name in same]
    assert first[2]["id"] != second[2]["id"]
    assert first[2]["traceparent"] != second[2]["traceparent"]
    assert undo[2]["undoes"] == second[2]["id"]


@REMEMBERING
async def test_a_call_without_answer_is_taken_back_and_was_never_sent(
    working: Working, client: Client, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("hurries"), "A")
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.error and view.error["type"]) == ("failed", "OutcomeUnknown")
    assert [(m.path, m.state) for m in view.messages] == [("charge", "withdrawn")]
    assert kinds(view) == ["started", "asked charge", "ended charge", "late charge", "finished"]


@REMEMBERING
async def test_a_sleep_wakes_by_itself(working: Working, client: Client, forgetful: bool) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("naps"), 1)
        view = await client.wait(started.execution_id, seconds=30)

    assert view.row.status == "completed" and UUID(view.output)


@REMEMBERING
async def test_a_step_that_overruns_its_timeout_is_stopped_settled_and_undone(
    working: Working, client: Client, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("overdue"), 7)
        view = await client.wait(started.execution_id, seconds=30)

    assert view.row.status == "compensated"
    assert kinds(view)[1:5] == ["asked waits", "ended waits", "late waits", "asked waits/undo"]


@REMEMBERING
async def test_a_bug_holds_only_its_execution_and_an_order_resumes_it_after_a_deploy(
    working: Working, client: Client, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("buggy"), 1)
        held = await client.wait(started.execution_id, seconds=30)
        assert held.held is not None
        assert (held.row.status, held.held.code) == ("held", "program-fault")
        assert held.held.reason.startswith("AttributeError: a bug at buggy (tests.engine.flows:")
        await client.resume(started.execution_id, by="ann", reason="try again")

        async def again() -> bool:
            return kinds(await client.show(started.execution_id)).count("held") == 2

        await until(again, what="a second hold")
        BUG[0] = False
        await client.resume(started.execution_id, by="ann", reason="mended")

        async def over() -> bool:
            return (await client.show(started.execution_id)).row.status == "completed"

        await until(over, what="its end")
        view = await client.show(started.execution_id)

    assert (view.row.status, view.output) == ("completed", "mended 3")
    assert CALLS == [("triple", 1)]
    resumed = [fact.actor for fact in view.facts if fact.kind == "resumed"]
    assert resumed == ["operator:ann", "operator:ann"]


async def test_only_a_held_execution_can_be_resumed(working: Working, client: Client) -> None:
    async with working():
        started = await client.start(FLOWS.get("three"), 1)
        await client.wait(started.execution_id, seconds=30)

        with pytest.raises(NotHeld, match="is completed"):
            await client.resume(started.execution_id, by="ann", reason="why not")


@REMEMBERING
async def test_a_person_is_not_asked_about_what_was_never_sent(
    working: Working, client: Client, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("asks"), "A")
        view = await client.wait(started.execution_id, seconds=30)

    assert (view.row.status, view.output) == ("completed", "never-sent")


@REMEMBERING
async def test_an_order_that_an_earlier_answer_makes_needless_stays_in_the_history(
    working: Working, client: Client, conn: Connection, forgetful: bool
) -> None:
    async with working(forgetful=forgetful):
        started = await client.start(FLOWS.get("asks-patiently"), "A")
        one = started.execution_id
        await reply(conn, "charge", Outcome("unknown", code="sent"), execution=one)
        held = await client.wait(one, seconds=30)
        assert (held.row.status, held.held and held.held.path) == ("held", "charge")

    # Nobody works: both have come when the next worker looks, the answer first.
    data = strict_json.encode(Outcome("done", {"charge": "ch"}).as_json(), what="reply")
    item = MailItem(
        kind="reply", sender="payments", source="/payments", event_id="2", data=data,
        digest=hashlib.sha256(data.encode()).digest(), causation=await message_at(conn, one, "charge"),
    )  # fmt: skip
    await inbox.post(conn, [item])
    await client.resolve(one, "charge", "not_done", by="ann", reason="the bank says no")

    async with working(forgetful=forgetful):

        async def over() -> bool:
            return (await client.show(one)).row.status == "completed"

        await until(over, what="its end")
        view = await client.show(one)

    assert view.output == "charged"
    [ordered] = [fact for fact in view.facts if fact.kind == "ordered"]
    said = json.loads(ordered.payload or "")
    assert (ordered.actor, ordered.path, said["verdict"], said["reason"]) == (
        "operator:ann", "charge", "not_done", "the bank says no",
    )  # fmt: skip


async def test_what_an_execution_was_in_memory_is_gone_when_it_ends(working: Working, client: Client) -> None:
    """Without the garbage collector: to walk over what each of them left cost a quarter of a worker's time."""
    gc.collect()
    before = len(in_memory())
    gc.disable()
    try:
        async with working():
            for number in range(3):
                started = await client.start(FLOWS.get("three"), number)
                assert (await client.wait(started.execution_id, seconds=30)).row.status == "completed"

            async def gone() -> bool:
                return len(in_memory()) <= before

            await until(gone, what="nothing of what ended to be left")
    finally:
        gc.enable()


def in_memory() -> list[object]:
    return [one for one in gc.get_objects() if isinstance(one, Machine | Ownership | Work)]
