"""The parts as processes: they say when they work, drain when asked to stop, and do a saga together."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.cli.processes import ROOT, Running, running, waypost
from tests.waiting import until_true

STARTED = {
    "worker": r'"event": "worker.started"',
    "relay": r'"event": "relay.started"',
    "receiver": r'"event": "receiver.started".*"port": (\d+)',
}


@pytest.mark.parametrize("part", sorted(STARTED))
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_part_works_until_it_is_asked_to_stop(
    environment: dict[str, str], tmp_path: Path, part: str, sign: signal.Signals
) -> None:
    with running(waypost(part), environment=environment, output=tmp_path / "out") as process:
        process.until_said(STARTED[part])

        code = process.end(sign)

    assert code == 0
    for line in process.said().splitlines():
        assert json.loads(line)["part"] == part


def test_the_parts_and_three_services_complete_an_order_and_compensate_another(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:

        def start(name: str, command: list[str], **more: str) -> Running:
            output = tmp_path / f"{name}.out"
            return stack.enter_context(
                running(command, environment={**environment, **more}, output=output, cwd=tmp_path)
            )

        def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
            more = {**environment, "PYTHONPATH": str(ROOT)}
            return subprocess.run(
                waypost(*arguments),
                env=more,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )

        port = start("receiver", waypost("receiver")).until_said(STARTED["receiver"])[1]
        environment["WAYPOST_RECEIVER_URL"] = f"http://127.0.0.1:{port}"
        for name in ("inventory", "payments", "shipping"):
            (tmp_path / f"{name}.reply").write_text(ask("sender", "add", name).stdout)
            command_secret = f"whsec_{'c' * 43}="
            (tmp_path / f"{name}.command").write_text(command_secret)
            service = start(
                name,
                [*waypost()[:2], f"examples.shop.{name}"],
                **{
                    f"{name.upper()}_REPLY_SECRET_FILE": f"{name}.reply",
                    f"{name.upper()}_COMMAND_SECRET_FILE": f"{name}.command",
                },
            )
            url = service.until_said(r"listens on (\S+)")[1]
            added = ask("endpoint", "add", name, url, "--secret-file", f"{name}.command")
            assert added.returncode == 0, added.stderr
        for part in ("relay", "worker"):
            start(part, waypost(part)).until_said(STARTED[part])
        order = {"id": "order-1", "customer": "ada", "total": 4200}

        good = ask("start", "order", "--input", json.dumps(order), "--wait", "-o", "json")
        bad = ask("start", "order", "--input", json.dumps({**order, "card": "4000000000000002"}), "--wait")

    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["output"]["tracking"] == "parcel-order-1"
    assert bad.returncode == 8, bad.stderr
    assert "compensated: declined" in bad.stdout


def test_an_operator_can_let_a_held_execution_go_on(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "buggy.py").write_text(
        "from orchestrator import Context, workflow\n"
        "@workflow(name='buggy', version='1')\n"
        "async def buggy(ctx: Context, given: int) -> int:\n"
        "    raise NotImplementedError('to be written')\n"
    )
    environment["WAYPOST_FLOWS"] = "buggy"
    environment["PYTHONPATH"] = str(ROOT)

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            waypost(*arguments),
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    with running(waypost("worker"), environment=environment, output=tmp_path / "1", cwd=tmp_path):
        held = ask("start", "buggy", "--input", "1", "--wait", "-o", "json")
    execution = json.loads(held.stdout)["execution_id"]
    shown = ask("show", execution)
    source = (tmp_path / "buggy.py").read_text()
    (tmp_path / "buggy.py").write_text(
        source.replace("raise NotImplementedError('to be written')", "return given")
    )
    resumed = ask("resume", execution, "--by", "ada", "--reason", "it is written now")
    with running(waypost("worker"), environment=environment, output=tmp_path / "2", cwd=tmp_path):
        until_true(
            lambda: "completed" in ask("list", "--status", "completed").stdout,
            what="the end of the execution",
        )
    with psycopg.connect(environment["WAYPOST_DATABASE_URL"]) as conn:
        kept = conn.execute("select actor, payload from waypost.journal where kind = 'resumed'").fetchall()

    assert held.returncode == 8
    assert "held: program-fault" in shown.stdout
    assert f"decide: waypost resume {execution} --by NAME --reason TEXT" in shown.stdout
    assert resumed.returncode == 0, resumed.stderr
    assert [(actor, said["by"], said["reason"]) for actor, said in kept] == [
        ("operator:ada", "ada", "it is written now")
    ]
