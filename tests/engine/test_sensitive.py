"""A secret value goes through whole executions, and nobody is shown it: a canary, looked for in all that is said."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, cast
from uuid import uuid4

import pytest
from pydantic import BaseModel

from contracts.log import JsonLines
from contracts.messages import Command, Event, Refused
from contracts.outcome import Outcome
from contracts.sensitive import Sensitive
from orchestrator import Context, Retry, StepError, workflow
from orchestrator.cli import main
from orchestrator.cli.arguments import parser
from orchestrator.client import Client
from orchestrator.core.redaction import Line, Redaction
from orchestrator.flows import Flows
from orchestrator.store import tasks
from orchestrator.store.database import Connection
from receiver import inbox
from tests.engine.conftest import Working
from tests.engine.test_worker import reply
from tests.store.world import event
from tests.waiting import until

CANARY: Final = "canary-4242-8181"
TOKEN: Final = "canary-token-77"


class Charged(BaseModel):
    token: Annotated[str, Sensitive]


class Charge(Command[Charged], endpoint="bank", type="bank.charge"):
    card: Annotated[str, Sensitive]


class Arrived(Event, type="canary.arrived", key="order"):
    order: str
    pin: Annotated[str, Sensitive]


class Order(BaseModel):
    order: str
    card: Annotated[str, Sensitive]
    fail: str = ""


class Receipt(BaseModel):
    token: Annotated[str, Sensitive]


def breaks(card: Annotated[str, Sensitive]) -> None:
    raise ValueError(f"cannot read {card!r}")


def refuses(card: Annotated[str, Sensitive]) -> None:
    raise Refused("declined", f"{card} is stolen", detail={"seen": card, "in": [card]})


async def copies(card: Annotated[str, Sensitive]) -> Annotated[str, Sensitive]:
    return f"{card}!"


class Closed(BaseModel):
    until: int


@workflow(name="canary", version="1")
async def canary(ctx: Context, order: Order) -> Receipt:
    for fn in (breaks, refuses):
        with suppress(StepError):
            await ctx.step(fn, order.card, retry=Retry.fixed(timedelta(milliseconds=1), attempts=2))
    copied = await ctx.step(copies, order.card)
    charged = await ctx.call(Charge(card=order.card), undo=lambda _: Charge(card=order.card))
    with suppress(StepError):
        await ctx.call(Charge(card=order.card), name="again")
    arrived = await ctx.event(Arrived, key=order.order)
    ctx.emit(arrived)
    if order.fail == "bug":
        raise TypeError(f"{order.card} and {copied} and {arrived.pin}")
    if order.fail == "model":
        Closed.model_validate({"until": order.card})
    if order.fail == "raise":
        raise RuntimeError(f"{order.card} and {charged.token}")
    await ctx.approval("look", who="ann", show={"order": order, "why": f"{order.card}?"})
    return Receipt(token=charged.token)


class Render(Command[Charged], type="canary.render"):
    card: Annotated[str, Sensitive]


@workflow(name="canary-seen", version="1")
async def seen(ctx: Context, order: Order) -> None:
    """Waits for a service, a worker of queues and an event at once."""
    await ctx.all(
        ctx.call(Charge(card=order.card)),
        ctx.task(Render(card=order.card), queue="q"),
        ctx.event(Arrived, key=order.order),
    )


CANARIES: Final = Flows([canary, seen])
SHOW: Final = {
    "check-replay": "",
    "list": "",
    "approvals": "",
    "show": "execution",
    "why": "execution",
    "trace": "execution",
    "task list": "",
    "task show": "task",
    "outbox list": "",
    "outbox show": "message",
    "delivery list": "message",
    "delivery show": "message",
    "dlq list": "",
    "dlq show": "message",
    "inbox list": "",
    "inbox show": "event",
    "inbox explain": "event",
    "mutex list": "",
    "endpoint list": "",
}
"""Commands that show what executions, messages and mail are about, and of which one."""
OTHERS: Final = frozenset(
    """migrate;worker;tasks;relay;receiver;demo;dev;start;resume;cancel;decide;terminate;resolve;contracts
    endpoint add;endpoint show;endpoint set;endpoint enable;endpoint disable;endpoint rotate;endpoint remove
    sender add;sender set;sender rotate;sender list;subscription add;subscription remove;subscription list
    mutex show;inbox redrive;contract add;contract remove;contract list;delivery curl;delivery replay
    dlq replay;dlq discard;flow list;flow share;flow unshare;payloads rekey;payloads sweep
    simulate endpoint;simulate provider""".replace("\n    ", ";").split(";")
)
"""Commands that show no data; and `delivery curl`, which is there to send it once more."""
VERBS: Final = (
    ("show",),
    ("show", "-o", "json"),
    ("why",),
    ("why", "-o", "json"),
    ("trace",),
    ("trace", "-o", "json"),
)


def environment(dsn: str) -> dict[str, str]:
    return {"WAYPOST_DATABASE_URL": dsn, "WAYPOST_FLOWS": "tests.engine.test_sensitive"}


async def said(capfd: pytest.CaptureFixture[str], dsn: str, *arguments: str) -> str:
    capfd.readouterr()
    await asyncio.to_thread(main, arguments, environment(dsn))
    out, err = capfd.readouterr()
    return out + err


@pytest.mark.parametrize(
    ("fail", "state"), [("", "waiting"), ("bug", "held"), ("model", "failed"), ("raise", "failed")]
)
async def test_a_secret_is_in_no_output_no_log_no_span_and_no_error(  # noqa: PLR0917  # fixtures
    fail: str,
    state: str,
    working: Working,
    client: Client,
    conn: Connection,
    dsn: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = {"order": "o-1", "card": CANARY, "fail": fail}
    started = (await client.start(CANARIES.get("canary"), given, key="o-1")).execution_id
    log: list[str] = []
    lines = JsonLines(log.append, part="worker", now=lambda: datetime.now(UTC))

    async with working(flows=CANARIES) as moments:
        await reply(conn, "charge", Outcome("done", {"token": TOKEN}), execution=started)
        bad = Outcome("failed", code="odd", detail=f"what is {CANARY}", data={"card": CANARY, "x": [TOKEN]})
        await reply(conn, "again", bad, execution=started)
        await inbox.post(
            conn,
            [event("e1", type=Arrived.type_, key="o-1", data=json.dumps({"order": "o-1", "pin": TOKEN}))],
        )
        if fail in ("model", "raise"):
            await reply(conn, "charge/undo", Outcome("refused", code="no"), execution=started)

        async def there() -> bool:
            view = await client.show(started)
            if state == "waiting":
                return bool(await client.approvals())
            return view.row.status in (state, "held")

        await until(there, what=f"{fail or 'an approval'}: {state}")
        for moment, fields in moments.all:
            lines.saw(moment, **{name: value for name, value in fields.items() if name != "began"})

    told = [await said(capfd, dsn, *verb[:1], str(started), *verb[1:]) for verb in VERBS]
    told += [
        await said(capfd, dsn, "list", "-o", "json"),
        await said(capfd, dsn, "approvals"),
        await said(capfd, dsn, "approvals", "-o", "json"),
        await said(capfd, dsn, "check-replay"),
        await said(capfd, dsn, "check-replay", "-o", "json"),
    ]

    everything = "\n".join([*told, *log])
    assert str(started) in everything
    assert "[redacted]" in told[1]
    for secret in (CANARY, TOKEN):
        where = everything.find(secret)
        assert where < 0, everything[max(0, where - 300) : where + 50]
    journal = await (
        await conn.execute("select string_agg(payload::text, '') from waypost.journal")
    ).fetchone()
    assert journal is not None
    assert CANARY in journal[0], "programs get it"


def verbs(of: argparse.ArgumentParser, *before: str) -> Iterator[str]:
    """Each command with its verb."""
    tree = cast("Any", of)
    below: list[dict[str, argparse.ArgumentParser]] = [
        action.choices for action in tree._actions if type(action).__name__ == "_SubParsersAction"
    ]
    if not below:
        yield " ".join(before)
    for choices in below:
        for name, one in choices.items():
            yield from verbs(one, *before, name)


def test_each_command_is_known_to_show_data_or_not_to() -> None:
    """A new command belongs into SHOW, unless it can show nothing that an author may declare as Sensitive."""
    assert set(verbs(parser())) == {*SHOW, *OTHERS}


async def test_a_secret_is_in_nothing_that_is_shown_of_messages_tasks_and_mail(
    working: Working, client: Client, conn: Connection, dsn: str, capfd: pytest.CaptureFixture[str]
) -> None:
    started = (await client.start(CANARIES.get("canary-seen"), {"order": "o-1", "card": CANARY})).execution_id
    found: list[tasks.Task] = []

    async def taken() -> bool:
        found.extend(
            await tasks.claim(conn, queues=["q"], limit=1, owner="w", token=uuid4(), lease=timedelta(hours=1))
        )
        return bool(found)

    async with working(flows=CANARIES):
        await until(taken, what="a task")
        await tasks.beat(conn, [(found[0], json.dumps({"at": CANARY}))], lease=timedelta(hours=1))
        pin = json.dumps({"order": "o-9", "pin": TOKEN})
        await inbox.post(
            conn, [event("e9", type=Arrived.type_, key="o-9", data=pin, body=f'{{"data":{pin}}}'.encode())]
        )
    [(message,)] = await (await conn.execute("select message_id::text from waypost.outbox")).fetchall()
    [(came,)] = await (await conn.execute("select inbox_id::text from waypost.inbox")).fetchall()
    await conn.execute(
        "insert into waypost.delivery (tenant_id, message_id, attempt, started_at, duration, outcome, response)"
        " values (1, %s, 1, now(), interval '1 s', 'transient', %s)",
        (message, f"no {CANARY}".encode()),
    )
    await conn.execute(
        "insert into waypost.quarantine (tenant_id, sender, reason, detail, type, headers, body, digest)"
        " values (1, 's', 'contract', %s, %s, '{}', %s, sha256('x'))",
        (f"at /pin: {TOKEN}", Arrived.type_, f'{{"data":{pin}}}'.encode()),
    )
    [(apart,)] = await (await conn.execute("select 'q' || quarantine_id from waypost.quarantine")).fetchall()
    names = {"execution": str(started), "task": str(found[0].task_id), "message": message, "": None}

    told: dict[tuple[str, ...], str] = {}
    for command, what in SHOW.items():
        for name in [came, apart] if what == "event" else [names[what]]:
            words = (*command.split(), *([] if name is None else [name]))
            for form in ((), ("-o", "json")):
                told[*words, *form] = await said(capfd, dsn, *words, *form)

    assert {line for line, text in told.items() if CANARY in text or TOKEN in text} == set()
    for line in (("task", "show"), ("outbox", "show"), ("delivery", "list"), ("inbox", "show")):
        assert all("[redacted]" in text for at, text in told.items() if at[:2] == line), line


async def test_an_execution_that_an_event_started_hides_what_its_version_declares(
    working: Working, client: Client, conn: Connection
) -> None:
    """Whoever started it had none of the code."""

    async def known() -> bool:
        return await (await conn.execute("select from waypost.definition")).fetchone() is not None

    async with working(flows=CANARIES):
        await until(known, what="a worker that makes its flow known")
        await conn.execute(
            "select waypost.start('canary', %s, key => 'o-2')",
            (json.dumps({"order": "o-2", "card": CANARY}),),
        )
        row = await (await conn.execute("select execution_id from waypost.execution")).fetchone()
        assert row is not None
        shown = await client.shown(row[0])

    assert "sensitive" not in json.loads((await client.show(row[0])).facts[0].payload or "")
    assert json.loads(shown.facts[0].payload or "")["input"] == {"order": "o-2", "card": "[redacted]"}


@pytest.mark.parametrize("garbage", [3, [], {"data": "x"}, {"data": [1]}, {"value": {"a": "b"}}])
def test_marks_that_nobody_can_read_hide_everything(garbage: Any) -> None:
    asked: Mapping[str, Any] = {
        "kind": "call",
        "args": {"name": "x", "data": {"a": "b"}, "sensitive": garbage},
    }
    facts = [
        Line("started", "", {"input": {"a": "b"}, "sensitive": garbage}),
        Line("asked", "x", dict(asked)),
        Line("ended", "x", {"outcome": "done", "value": {"c": "d"}}),
    ]

    first, second, third = Redaction(facts).lines

    assert first.data["input"] == "[redacted]"
    assert second.data["args"]["data"] == "[redacted]"
    assert third.data["value"] == "[redacted]"


async def test_a_start_that_does_not_fit_is_refused_without_its_values(
    dsn: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = json.dumps({"order": [CANARY], "card": [CANARY]})

    refusal = await said(capfd, dsn, "start", "canary", "--input", given)

    assert "/card" in refusal
    assert CANARY not in refusal
