"""Journals of every release: this code reads them, replays them, and would write the same."""

from __future__ import annotations

import importlib
import json
import pkgutil
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

import examples
from orchestrator.client import Client
from orchestrator.core.fact import PRODUCED, Fact
from orchestrator.core.machine import Machine
from orchestrator.core.upcast import SCHEMA, UPCASTERS, Upcaster, lifted
from orchestrator.flows import Flow, Flows
from orchestrator.store import executions, reading, workers
from orchestrator.store.executions import UNREADABLE
from orchestrator.workflow import Workflow
from tests.engine.conftest import Working
from tests.golden import record
from tests.golden.flows import FLOWS

Json = Any
Connection = psycopg.AsyncConnection[tuple[Any, ...]]

FILES: Final = sorted(record.FOLDER.glob("*.json"))
KINDS: Final = PRODUCED | {
    name.removeprefix("on_")
    for name in vars(Machine)
    if name.startswith("on_") and callable(vars(Machine)[name])
}
"""Every kind of fact that a machine knows."""

HOW_TO: Final = (
    "payloads of facts are not what this release wrote: raise SCHEMA and add upcasters (orchestrator/core/upcast.py),"
    " or, when the release is not made yet, record it again: python -m tests.golden.record"
)


def flows_of_examples() -> dict[str, Flow]:
    """The flows in modules of the examples."""
    found: dict[str, Flow] = {}
    for module in pkgutil.walk_packages(examples.__path__, "examples."):
        if module.name.endswith(".flows"):
            things = vars(importlib.import_module(module.name)).values()
            found |= {thing.name: thing for thing in things if isinstance(thing, Workflow)}
    return found


KNOWN: Final[dict[str, Flow]] = flows_of_examples() | {flow.name: flow for flow in FLOWS}


def journals_in(file: Path) -> dict[str, Json]:
    return json.loads(file.read_text(encoding="utf-8"))


def fact_of(row: dict[str, Json]) -> Fact:
    """A recorded row as it is loaded today."""
    data = lifted(row["kind"], row["schema"], row["payload"])
    return Fact(
        row["position"], row["kind"], row["path"], data, datetime.fromisoformat(row["at"]), actor=row["actor"]
    )


RECORDED: Final = [
    pytest.param(name, journal, id=f"{file.stem} {name}")
    for file in FILES
    for name, journal in journals_in(file).items()
]


# ---- what was recorded ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "journal"), RECORDED)
def test_a_recorded_journal_replays_to_its_end(name: str, journal: Json) -> None:
    facts = [fact_of(row) for row in journal["facts"]]
    status = ""
    for end in range(1, len(facts) + 1):
        machine = Machine(KNOWN[journal["flow"]].program)
        machine.replay(facts[:end], complete=end == len(facts), now=facts[end - 1].at)
        status = str(machine.status)
        machine.evict()
    assert status == journal["ended"]


@pytest.mark.parametrize(("name", "journal"), RECORDED)
def test_this_release_writes_what_was_recorded_lifted(name: str, journal: Json) -> None:
    today = record.SCENARIOS[name]().over()

    then = [{**row, "schema": SCHEMA, "payload": fact_of(row).data} for row in journal["facts"]]
    assert then == today, HOW_TO


def test_the_journals_of_this_release_are_recorded() -> None:
    assert record.CURRENT.exists(), HOW_TO
    assert record.CURRENT.read_text(encoding="utf-8") == record.text_of(record.recorded()), HOW_TO


def test_every_kind_of_fact_is_recorded() -> None:
    recorded = {row["kind"] for it in journals_in(record.CURRENT).values() for row in it["facts"]}

    assert recorded == KINDS, HOW_TO


def test_every_flow_of_the_examples_is_recorded() -> None:
    recorded = {it["flow"] for it in journals_in(record.CURRENT).values()}

    assert recorded == set(KNOWN)


def test_another_payload_or_another_kind_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: Fact, *given: Any, **named: Any) -> None:
        plain(self, *given, **named)
        if self.kind == "withdrawn" and self.text is not None:
            self.text = json.dumps(self.data | {"why": "it lost"})

    plain = Fact.__init__
    monkeypatch.setattr(Fact, "__init__", changed)

    with pytest.raises(AssertionError, match="payloads of facts are not what this release wrote"):
        test_the_journals_of_this_release_are_recorded()


# ---- what the engine writes beside the machine ---------------------------------------------------------------------


def keys_of(kind: str) -> set[frozenset[str]]:
    """The names that recorded payloads of a kind have."""
    return {
        frozenset(row["payload"])
        for it in journals_in(record.CURRENT).values()
        for row in it["facts"]
        if row["kind"] == kind
    }


async def test_the_engine_writes_what_was_recorded_for_it(
    working: Working, client: Client, conn: Connection
) -> None:
    """`started`, `held`, `resumed` and `orphaned` are written beside the machine: they have the names recorded."""
    waits = KNOWN["golden.waits"]
    started = await client.start(waits, "Rome", key="k")
    await conn.execute(
        "update waypost.journal set payload = payload || '{\"input\": 7}' where kind = 'started'"
    )
    async with working(flows=Flows([waits])) as moments:
        await moments.until("execution held")
        await conn.execute(
            'update waypost.journal set payload = payload || \'{"input": "Rome"}\' where position = 1'
        )
        await client.resume(started.execution_id, by="ann", reason="mended")
        await moments.until("turn.committed", times=2)
    await conn.execute("update waypost.worker set dead_at = now(), lease_until = now()")
    await conn.execute(
        "update waypost.execution set owner = (select worker_id from waypost.worker limit 1), wake_at = null"
    )
    await workers.take_over(conn, limit=1)

    facts = await reading.facts(conn, str(started.execution_id), tenant=1)
    by_kind = {fact.kind: frozenset(json.loads(fact.payload or "{}")) for fact in facts}
    for kind in ("started", "held", "resumed", "orphaned"):
        assert by_kind[kind] in keys_of(kind), (kind, HOW_TO)
    assert {fact.schema for fact in facts} == {SCHEMA}, "what is written carries the version of its payload"


# ---- lifting -------------------------------------------------------------------------------------------------------

TWO_AGO: Final[dict[tuple[str, int], Upcaster]] = {
    ("ended", 1): lambda data: {**data, "by": "service"},
    ("ended", 2): lambda data: {**data, "by": data["by"].upper()},
    ("asked", 2): lambda data: {"name": data["name"]},
}


@pytest.mark.parametrize(
    ("kind", "schema", "expected"),
    [
        ("ended", 1, {"name": "x", "by": "SERVICE"}),
        ("ended", 3, {"name": "x"}),
        ("asked", 1, {"name": "x"}),
        ("received", 1, {"name": "x"}),
    ],
)
def test_a_payload_is_lifted_step_by_step(kind: str, schema: int, expected: dict[str, Json]) -> None:
    assert lifted(kind, schema, {"name": "x"}, to=3, upcasters=TWO_AGO) == expected


@pytest.mark.parametrize("schema", [0, SCHEMA + 1])
def test_a_payload_of_a_later_release_is_not_guessed_at(schema: int) -> None:
    with pytest.raises(
        ValueError, match=f"expected a payload of version 1 to {SCHEMA}, found one of version {schema}"
    ):
        lifted("ended", schema, {})


def test_an_upcaster_is_from_a_version_that_was_and_of_a_kind_that_is() -> None:
    assert all(kind in KINDS and 1 <= schema < SCHEMA for kind, schema in UPCASTERS)


async def test_a_journal_of_a_later_release_stops_its_own_execution(client: Client, conn: Connection) -> None:
    later = await client.start(KNOWN["golden.waits"], "Rome")
    ours = await client.start(KNOWN["golden.waits"], "Oslo")
    await conn.execute(
        "update waypost.journal set schema = %s where execution_id = %s", (SCHEMA + 1, later.execution_id)
    )

    found = await executions.journals(conn, [(1, str(later.execution_id)), (1, str(ours.execution_id))])

    assert [fact.kind for fact in found[str(later.execution_id)]] == [UNREADABLE]
    assert [fact.kind for fact in found[str(ours.execution_id)]] == ["started"]
    [shown] = await reading.facts(conn, str(later.execution_id), tenant=1)
    assert (shown.schema, json.loads(shown.payload or "")["input"]) == (SCHEMA + 1, "Rome")
