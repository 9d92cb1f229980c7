"""The parts as processes: they say when they work, drain when asked to stop, and do a saga together."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.acceptance.stand import free_port
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


HEALTH = r'"event": "health.started".*"port": (\d+)'


def asked(port: str, path: str) -> tuple[int, str]:
    """Status and body of a health listener's answer."""
    with socket.create_connection(("127.0.0.1", int(port)), timeout=30) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize("part", sorted(STARTED))
def test_a_part_says_on_its_own_port_that_it_lives_and_is_ready(
    environment: dict[str, str], tmp_path: Path, part: str
) -> None:
    environment["WAYPOST_HEALTH_ADDR"] = "127.0.0.1:0"
    with running(waypost(part), environment=environment, output=tmp_path / "out") as process:
        port = process.until_said(HEALTH)[1]
        process.until_said(STARTED[part])

        until_true(lambda: asked(port, "/readyz")[0] == 200, what="readiness")
        assert asked(port, "/livez") == (200, "ok\n")
        assert asked(port, "/metrics")[0] == 200


def test_a_health_address_that_is_taken_ends_the_part_and_says_what_to_do(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        environment["WAYPOST_HEALTH_ADDR"] = address = f"127.0.0.1:{busy.getsockname()[1]}"
        with running(waypost("relay"), environment=environment, output=tmp_path / "out") as process:
            code = process.process.wait(30)

    assert code == 1
    assert f"WAYPOST_HEALTH_ADDR: expected an address to listen on, found {address}, where something" in (
        process.said()
    )


def test_a_part_that_drains_is_not_ready_and_still_lives(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio\n"
        "from pathlib import Path\n"
        "from orchestrator import Context, workflow\n"
        "async def wait() -> None:\n"
        "    Path('begun').touch()\n"
        "    while not Path('go').exists():\n"
        "        await asyncio.sleep(0.02)\n"
        "@workflow(name='slow', version='1')\n"
        "async def slow(ctx: Context, given: int) -> None:\n"
        "    await ctx.step(wait)\n"
    )
    environment |= {
        "WAYPOST_FLOWS": "slow",
        "WAYPOST_HEALTH_ADDR": "127.0.0.1:0",
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
    }
    with running(
        waypost("worker"), environment=environment, output=tmp_path / "out", cwd=tmp_path
    ) as process:
        port = process.until_said(HEALTH)[1]
        command = [*waypost("start", "slow"), "--input", "1"]
        subprocess.run(
            command, env={**environment}, cwd=tmp_path, check=True, timeout=60, capture_output=True
        )
        until_true((tmp_path / "begun").exists, what="the step")
        process.process.send_signal(signal.SIGTERM)
        process.until_said("worker draining")

        until_true(lambda: asked(port, "/readyz")[0] == 503, what="unreadiness")
        ready, lives = asked(port, "/readyz"), asked(port, "/livez")
        (tmp_path / "go").touch()
        code = process.process.wait(30)

    assert "draining: asked to stop\n" in ready[1]
    assert lives == (200, "ok\n")
    assert code == 0


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

        receiver = start("receiver", waypost("receiver"))
        port = receiver.until_said(STARTED["receiver"])[1]
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
        parts = {part: start(part, waypost(part)) for part in ("relay", "worker")}
        for part, process in parts.items():
            process.until_said(STARTED[part])
        order = {"id": "order-1", "customer": "ada", "total": 4200}

        good = ask("start", "order", "--input", json.dumps(order), "--wait", "-o", "json")
        bad = ask("start", "order", "--input", json.dumps({**order, "card": "4000000000000002"}), "--wait")
        counted = {
            part: asked(process.until_said(HEALTH)[1], "/metrics")[1]
            for part, process in {**parts, "receiver": receiver}.items()
        }

    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["output"]["tracking"] == "parcel-order-1"
    assert bad.returncode == 8, bad.stderr
    assert "compensated: declined" in bad.stdout
    assert traced_in(environment) == (0, 0, 0, False)
    flow = 'workflow_name="order",workflow_version="1"'
    for line in (
        f'workflow_started_total{{trigger="start",{flow}}} 2.0',
        f'workflow_completed_total{{outcome="success",{flow}}} 1.0',
        f'workflow_completed_total{{outcome="compensated",{flow}}} 1.0',
        f'node_attempt_total{{node="reserve",outcome="done",{flow}}} 2.0',
        f'node_attempt_total{{node="charge",outcome="refused",{flow}}} 1.0',
        f'saga_compensation_total{{node="reserve",outcome="done",{flow}}} 1.0',
    ):
        assert line in counted["worker"]
    assert (
        'delivery_attempt_total{endpoint="payments",outcome="delivered",status_class="2xx"} 2.0'
        in counted["relay"]
    )
    assert 'inbox_received_total{outcome="accepted",reason="",source="shipping"} 1.0' in counted["receiver"]


def traced_in(environment: dict[str, str]) -> tuple[int, int, int, bool]:
    """What was ever written or looked for on the way into a trace: inserts, scans by table and index, numbers."""
    with psycopg.connect(environment["WAYPOST_DATABASE_URL"]) as conn:
        touched = conn.execute(
            "select n_tup_ins, seq_scan, idx_scan from pg_stat_user_tables where relname = 'span_due'"
        ).fetchone()
        numbered = conn.execute("select is_called from waypost.span_due_number_seq").fetchone()
    assert touched is not None
    assert numbered is not None
    return (*touched, *numbered)


@pytest.mark.proof
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
    agrees = ask("check-replay")
    environment["WAYPOST_CHANGED_FLOWS"] = "accept"
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
    assert (agrees.returncode, agrees.stdout) == (0, f"{execution}  buggy@1  would go on\n")
    assert [(actor, said["by"], said["reason"]) for actor, said in kept] == [
        ("operator:ada", "ada", "it is written now")
    ]


# ---- processes that were started without a file ------------------------------------------------------------------


def without(files: str, *arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """A command that a shell starts without these of its standard files."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {files}', "sh", *waypost(*arguments)],
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_a_command_whose_stdout_is_closed_does_nothing_and_says_so(environment: dict[str, str]) -> None:
    """A secret that was made would be lost."""
    done = without("<&- >&-", "sender", "add", "bank", environment=environment)

    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"waypost: stdout: expected an open file, for what this command says\n"
    assert without("", "sender", "list", environment=environment).stdout.count(b"bank") == 0


def test_a_command_whose_stderr_is_closed_says_nothing_but_data(environment: dict[str, str]) -> None:
    done = without("<&- 2>&-", "list", environment=environment)

    assert (done.returncode, done.stdout.split()) == (0, b"EXECUTION FLOW KEY STATE AGE NEXT PARENT".split())


@pytest.mark.parametrize("part", sorted(STARTED))
def test_a_part_works_without_any_standard_file(
    environment: dict[str, str], tmp_path: Path, part: str
) -> None:
    """Its sockets do not become them, for which libuv would end it when they are closed."""
    environment["WAYPOST_HEALTH_ADDR"] = f"127.0.0.1:{free_port()}"
    port = environment["WAYPOST_HEALTH_ADDR"].split(":")[1]
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *waypost(part)]
    with running(command, environment=environment, output=tmp_path / "out") as process:

        def ready() -> bool:
            assert process.process.poll() is None, "it goes on"
            try:
                return asked(port, "/readyz")[0] == 200
            except ConnectionError:
                return False

        until_true(ready, what="readiness")
        assert process.end() == 0
