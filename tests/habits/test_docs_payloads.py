"""The page about sensitive data: its flow runs, and is shown as the page says."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Final

import pytest

from contracts.dataref import Tickets
from contracts.limits import PAYLOAD_BYTES_MAX
from contracts.vault import Vault
from orchestrator.client import Client
from orchestrator.flows import Flows, load
from orchestrator.objects.large import Large
from orchestrator.store import database
from orchestrator.store.hints import Hints, running
from orchestrator.worker import Worker
from tests.cli.conftest import RunIn, environment_of, run_in
from tests.cli.processes import ROOT
from tests.commands import command
from tests.engine.conftest import LIMITS
from tests.habits.documents import blocks, files_in

PAGE: Final = "docs/payloads.md"
CARD: Final = "4242424242424242"

__all__ = ["run_in"]


def test_the_flow_of_the_page_is_shown_without_its_card(
    run_in: RunIn, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "safe").mkdir()
    (tmp_path / "safe/flows.py").write_text(files_in(PAGE)["safe/flows.py"], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    environment = environment_of(dsn) | {"WAYPOST_FLOWS": "safe.flows"}
    given = json.dumps({"id": "1", "card": CARD})

    execution = run_in(environment, "start", "safe", "--input", given, "--key", "1").out.strip()
    shown = run_in(environment, "show", execution, "-o", "json")

    told = next(iter(blocks(PAGE, "console"))).partition("-o json\n")[2]
    assert words(told) in words(re.sub(r'"seed": "\w+"', '"seed": "5eed5eed5eed5eed"', shown.out))
    assert CARD not in shown.out


def test_the_large_flow_of_the_page_runs_and_is_shown_by_reference(
    run_in: RunIn, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large/flows.py").write_text(files_in(PAGE)["large/flows.py"], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(Large, "kept", None)
    store = {"WAYPOST_PAYLOAD_STORE": (tmp_path / "objects").as_uri()}
    environment = environment_of(dsn) | {"WAYPOST_FLOWS": "large.flows"} | store
    execution = run_in(environment, "start", "large", "--input", "20000", "--key", "1").out.strip()

    asyncio.run(worked(dsn, load(["large.flows"]), execution))
    shown = run_in(environment, "show", execution, "-o", "json")

    told = list(blocks(PAGE, "console"))[1].partition("-o json\n")[2]
    assert words(told) in words(re.sub(r'"sha256": "(\w{8})\w+"', r'"sha256": "\1"', shown.out))
    assert len(shown.out) < 10_000


async def worked(dsn: str, flows: Flows, execution: str) -> None:
    """Until a worker has brought the execution to its end."""
    stop = asyncio.Event()
    async with running(Hints(dsn)) as hints, database.pool(dsn, size=8, name="worker") as pool:
        worker = Worker(pool, flows, dsn=dsn, hints=hints, limits=LIMITS)
        task = asyncio.create_task(worker.run(stop))
        async with pool.connection() as conn:
            view = await Client(conn).wait(execution, seconds=30)
        stop.set()
        await task
    assert len(view.output) == 20_000 * 21


def words(text: str) -> str:
    return " ".join(text.split())


def test_every_command_reads_executions_as_people_may_see_them() -> None:
    """`Client.show` is for programs; `shown`, `situation` and `approvals_shown` are for people."""
    for_programs = re.compile(r"\.show\(|\.approvals\(|reading\.facts|executions\.journals")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "orchestrator/cli").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if for_programs.search(line)
    ]
    assert found == []


def test_a_large_command_names_its_data_as_the_page_shows() -> None:
    shown = json.loads("{" + next(iter(blocks(PAGE, "text"))) + "}")
    tickets = Tickets(Vault(bytes(32)))

    made = json.loads(command("a", {"a": "x" * PAYLOAD_BYTES_MAX}, path="a", tickets=tickets))

    assert "data" not in made
    assert list(shown) == [name for name in made if name in shown]
    assert made["datacontenttype"] == shown["datacontenttype"]
    assert made["datahash"].partition(":")[0] == shown["datahash"].partition(":")[0]
    assert made["dataref"].split("/")[:4] == shown["dataref"].split("/")[:4]
    assert made["dataref"].rpartition("/")[2][:4] == shown["dataref"].rpartition("/")[2][:4]
