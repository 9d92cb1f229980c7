"""`waypost tasks` and `waypost task`: workers of queues as processes, one of which dies where it hurts most."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.processes import ROOT, running, waypost

MILL = """
import os, signal
from pathlib import Path
from orchestrator import Command, Context, Tasks, attempt, workflow

class Grind(Command[str], type="mill.grind"):
    corn: str

tasks = Tasks()

@tasks.does(Grind)
def grind(command: Grind) -> str:
    it = attempt()
    with Path("effects").open("a") as file:  # the effect
        file.write(f"{it.key}\\n")
    if it.number == 1 and command.corn == "hard":
        os.kill(os.getpid(), signal.SIGKILL)  # and no report
    return f"flour of {command.corn} at try {it.number}"

@workflow(name="bake", version="1")
async def bake(ctx: Context, corn: str) -> str:
    return await ctx.task(Grind(corn=corn), queue="mill")
"""


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    (tmp_path / "mill.py").write_text(MILL, encoding="utf-8")
    return environment | {
        "WAYPOST_FLOWS": "mill",
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "WAYPOST_HEALTH_ADDR": "off",
    }


def said(environment: dict[str, str], folder: Path, *arguments: str) -> Any:
    ran = subprocess.run(
        [*waypost(*arguments), "-o", "json"],
        env=environment,
        cwd=folder,
        check=True,
        timeout=60,
        capture_output=True,
    )
    return json.loads(ran.stdout)


@pytest.mark.proof
def test_a_worker_that_is_killed_after_its_effect_is_followed_by_another_try_under_the_same_key(
    environment: dict[str, str], tmp_path: Path
) -> None:
    serve = waypost("tasks", "mill", "--queue", "mill", "--concurrency", "2")
    with ExitStack() as stack:
        process = partial(running, environment=environment, cwd=tmp_path)
        stack.enter_context(process(waypost("worker"), output=tmp_path / "worker"))
        first = stack.enter_context(process(serve, output=tmp_path / "first"))
        started = said(environment, tmp_path, "start", "bake", "--input", '"hard"')
        assert first.process.wait(60) == -signal.SIGKILL
        *_, held = said(environment, tmp_path, "task", "list", "--queue", "mill")
        second = stack.enter_context(process(serve, output=tmp_path / "second"))
        second.until_said('"event": "task.tried"')
        ended = said(environment, tmp_path, "start", "bake", "--input", '"soft"', "--wait")
        shown = said(environment, tmp_path, "show", started["execution_id"])
        code = second.end()

    assert (held["attempt"], held["owner"] is not None, held["state"] in {"running", "lost"}) == (
        1,
        True,
        True,
    )
    assert (shown["status"], shown["output"]) == ("completed", "flour of hard at try 2")
    assert [(one["attempt"], one["state"]) for one in shown["tasks"]] == [(1, "lost"), (2, "done")]
    assert [fact["actor"] for fact in shown["journal"] if fact["path"] == "grind"] == [
        "program", "tasks", "worker", "tasks",
    ]  # fmt: skip
    effects = (tmp_path / "effects").read_text().splitlines()
    assert effects[:2] == [f"{started['execution_id']}/0/grind"] * 2
    assert (len(effects), ended["output"], code) == (3, "flour of soft at try 1", 0)
    assert re.search('"event": "task.worker.stopped".*"left": 0', second.said())


def test_a_worker_of_queues_says_what_is_wrong_with_its_module_or_its_queue(run: Run) -> None:
    none = run("tasks", "examples.shop.flows", "--queue", "q")
    assert (none.code, none.err) == (
        1, "waypost: module examples.shop.flows: expected a Tasks() with functions, found none\n",
    )  # fmt: skip
    assert run("tasks", "examples.shop.flows").code == 2


def test_a_task_that_is_not_there_is_not_found(run: Run) -> None:
    missing = run("task", "show", "0193f000-0000-7000-8000-000000000001")

    assert missing.code == 4
    assert "expected one of `waypost task list`, found none" in missing.err
    assert run("task", "show", "x").code == 2
    assert run("task", "list").err == "0 shown\n"
