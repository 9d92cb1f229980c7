"""A secret value goes through whole executions, and nobody is shown it: a canary, looked for in all that is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import pytest
from pydantic import BaseModel

from contracts.log import JsonLines
from contracts.messages import Command, Event, Refused
from contracts.outcome import Outcome
from contracts.sensitive import Sensitive
from orchestrator import Context, Retry, StepError, workflow
from orchestrator.cli import main
from orchestrator.client import Client
from orchestrator.core.redaction import Line, Redaction
from orchestrator.flows import Flows
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


CANARIES: Final = Flows([canary])
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
