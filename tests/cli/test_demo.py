"""`waypost demo` shows four fates and leaves nothing behind; `waypost dev` keeps what it is told."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.cli.processes import ROOT, eventually_gone, running, waypost
from tests.waiting import until_true

pytestmark = pytest.mark.timeout(240)  # each test starts many processes


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that is not there yet, where an unprivileged server can reach it."""
    path = Path(tempfile.gettempdir()) / f"waypost-test-{secrets.token_hex(6)}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def family(pid: int) -> list[int]:
    """The processes that `pid` started, and theirs."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for thread in threads for child in thread.read_text().split()]
    return [member for child in children for member in (child, *family(child))]


ENDED = {
    "order-1001": "completed",
    "order-1002": "compensated",
    "order-1003": "completed",
    "order-1004": "completed",
}


def test_the_demo_meets_four_fates_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with running(waypost("demo", "--once"), environment={}, output=tmp_path / "out") as demo:
        data = demo.until_said(r"in (/\S+/waypost-[0-9a-f]+)")[1]
        demo.until_said(r"worker-2 is started")
        members = family(demo.process.pid)

        code = demo.process.wait(120)

    assert code == 0, demo.said()
    assert (
        dict(re.findall(r"^(order-\d+)  .*?  (completed|compensated)  ", demo.said(), re.MULTILINE)) == ENDED
    )
    assert re.search(r"order-1003  create \S+ try 1: 503", demo.said())
    assert re.search(r"order-1002  charge \S+ refused: declined", demo.said())
    assert re.search(
        r"SIGKILL to worker-1[^\n]*\n(.*\n)*.*worker-2 is started\n(.*\n)*.*order-1004  completed",
        demo.said(),
    )
    assert re.search(r"worker [0-9a-f-]{36} was found dead", demo.said())
    assert len(members) >= 6
    for pid in members:
        eventually_gone(pid)
    assert not Path(data).exists()


@pytest.mark.proof
def test_the_demo_on_a_configured_server_leaves_its_databases_alone(dsn: str, tmp_path: Path) -> None:
    with running(waypost("demo"), environment={"WAYPOST_DATABASE_URL": dsn}, output=tmp_path / "out") as demo:
        code = demo.process.wait(120)

    with psycopg.connect(dsn) as conn:
        [[databases]] = conn.execute(
            "select count(*) from pg_database where datname ^@ 'waypost_demo_'"
        ).fetchall()
        [[executions]] = conn.execute("select count(*) from waypost.execution").fetchall()
    assert code == 0, demo.said()
    assert (
        dict(re.findall(r"^(order-\d+)  .*?  (completed|compensated)  ", demo.said(), re.MULTILINE)) == ENDED
    )
    assert (databases, executions) == (0, 0)


@pytest.mark.proof
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_stopped_leaves_nothing_behind(tmp_path: Path, sign: signal.Signals) -> None:
    with running(waypost("demo"), environment={}, output=tmp_path / "out") as demo:
        data = demo.until_said(r"in (/\S+/waypost-[0-9a-f]+)")[1]
        demo.until_said(r"payments +http")
        members = family(demo.process.pid)

        code = demo.end(sign)

    assert code == 130, demo.said()
    for pid in members:
        eventually_gone(pid)
    assert not Path(data).exists()


@pytest.mark.proof
def test_a_demo_that_is_stopped_impatiently_leaves_nothing_behind(tmp_path: Path) -> None:
    with running(waypost("demo"), environment={}, output=tmp_path / "out") as demo:
        data = demo.until_said(r"in (/\S+/waypost-[0-9a-f]+)")[1]
        demo.until_said(r"payments +http")
        members = family(demo.process.pid)

        demo.process.send_signal(signal.SIGHUP)
        demo.until_said("stopping …")
        code = demo.end(signal.SIGINT)

    assert code == 130, demo.said()
    for pid in members:
        eventually_gone(pid)
    assert not Path(data).exists()


@pytest.mark.proof
def test_a_demo_that_is_killed_takes_its_processes_along(tmp_path: Path) -> None:
    with running(waypost("demo"), environment={}, output=tmp_path / "out") as demo:
        data = demo.until_said(r"in (/\S+/waypost-[0-9a-f]+)")[1]
        demo.until_said(r"relay +signs")
        members = family(demo.process.pid)

        demo.end(signal.SIGKILL)

    assert len(members) >= 6
    for pid in members:
        eventually_gone(pid)
    shutil.rmtree(data)


def test_dev_keeps_its_data_and_its_key(folder: Path, tmp_path: Path) -> None:
    environment = {"WAYPOST_DATA_DIR": str(folder), "WAYPOST_RECEIVER_ADDR": "127.0.0.1:0"}
    ask = f". {folder}/environment && {' '.join(waypost())}"

    def shell(words: str) -> str:
        done = subprocess.run(
            ["sh", "-c", words], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with running(
        waypost("dev", "examples.shop.flows"), environment=environment, output=tmp_path / "1"
    ) as dev:
        dev.until_said("Ctrl-C stops")
        secret = shell(f"{ask} endpoint add inventory http://127.0.0.1:8090/waypost")
        started = shell(f"""{ask} start order --input '{{"id": "a", "customer": "b", "total": 1}}'""").strip()
        first = dev.end(signal.SIGINT)
    key = (folder / "secret-key").read_text()
    with running(
        waypost("dev", "examples.shop.flows"), environment=environment, output=tmp_path / "2"
    ) as dev:
        dev.until_said("Ctrl-C stops")
        shown = shell(f"{ask} show {started}")
        second = dev.end(signal.SIGTERM)

    assert (first, second) == (0, 0)
    assert secret.startswith("whsec_")
    assert started in shown
    assert (folder / "secret-key").read_text() == key
    for name in ("secret-key", "environment"):
        assert (folder / name).stat().st_mode & 0o077 == 0


@pytest.mark.proof
def test_a_second_dev_on_a_folder_is_refused_in_the_shell_of_the_first_too(
    folder: Path, tmp_path: Path
) -> None:
    settings = {"WAYPOST_DATA_DIR": str(folder), "WAYPOST_RECEIVER_ADDR": "127.0.0.1:0"}
    command = waypost("dev", "examples.shop.flows")
    with running(command, environment=settings, output=tmp_path / "1") as first:
        first.until_said("Ctrl-C stops")
        before = (folder / "environment").read_text()
        inherited = exported(before)
        with running(command, environment={**settings, **inherited}, output=tmp_path / "2") as second:
            code = second.process.wait(60)
        first.end()
    with running(command, environment={**settings, **inherited}, output=tmp_path / "3") as third:
        third.until_said("Ctrl-C stops")
        after = (folder / "environment").read_text()
        third.end()

    assert code == 1
    assert "another process uses it" in second.said()
    assert exported(after)["WAYPOST_DATABASE_URL"] == inherited["WAYPOST_DATABASE_URL"]
    assert exported(after)["WAYPOST_SECRET_KEY"] == inherited["WAYPOST_SECRET_KEY"]


@pytest.mark.proof
def test_dev_on_a_configured_database_locks_its_folder(dsn: str, tmp_path: Path) -> None:
    settings = {
        "WAYPOST_DATABASE_URL": dsn,
        "WAYPOST_DATA_DIR": str(tmp_path / "data"),
        "WAYPOST_RECEIVER_ADDR": "127.0.0.1:0",
    }
    command = waypost("dev", "examples.shop.flows")
    with running(command, environment=settings, output=tmp_path / "1") as first:
        first.until_said("Ctrl-C stops")
        with running(command, environment=settings, output=tmp_path / "2") as second:
            code = second.process.wait(60)
        first.end()

    assert code == 1
    assert "another process uses it" in second.said()


def test_dev_says_that_a_database_is_there_only_when_it_is(tmp_path: Path) -> None:
    settings = {
        "WAYPOST_DATABASE_URL": "postgresql://a@127.0.0.1:1/x",
        "WAYPOST_DATA_DIR": str(tmp_path / "data"),
    }
    with running(waypost("dev", "examples.shop.flows"), environment=settings, output=tmp_path / "out") as dev:
        code = dev.process.wait(60)

    assert code == 1
    assert "postgres  " not in dev.said()


@pytest.mark.proof
def test_a_part_that_dies_is_started_again_by_dev(dsn: str, tmp_path: Path) -> None:
    settings = {
        "WAYPOST_DATABASE_URL": dsn,
        "WAYPOST_DATA_DIR": str(tmp_path / "data"),
        "WAYPOST_RECEIVER_ADDR": "127.0.0.1:0",
    }
    with running(waypost("dev", "examples.shop.flows"), environment=settings, output=tmp_path / "out") as dev:
        port = dev.until_said(r"receiver +http://127\.0\.0\.1:(\d+)")[1]
        dev.until_said("Ctrl-C stops")
        os.kill(part(dev.process.pid, "receiver"), signal.SIGKILL)
        dev.until_said("receiver was killed by SIGKILL; its log: .*; it is started again")
        until_true(lambda: listens(int(port)), what="the receiver where it was")
        code = dev.end()

    assert code == 0


@pytest.mark.proof
def test_a_database_of_dev_that_dies_is_started_again_where_it_was(folder: Path, tmp_path: Path) -> None:
    settings = {"WAYPOST_DATA_DIR": str(folder), "WAYPOST_RECEIVER_ADDR": "127.0.0.1:0"}
    command = [*waypost(), "list", "-o", "ids"]
    with running(waypost("dev", "examples.shop.flows"), environment=settings, output=tmp_path / "out") as dev:
        dev.until_said("Ctrl-C stops")
        postmaster = int((folder / "postgres" / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGKILL)
        dev.until_said("postgres has ended; its log: .*; it is started again")

        def answers() -> bool:
            ask = ["sh", "-c", f'. {folder}/environment && exec "$@"', "sh", *command]
            return subprocess.run(ask, cwd=ROOT, timeout=60, capture_output=True, check=False).returncode == 0

        until_true(answers, what="the database under the same address")
        code = dev.end()

    assert code == 0


def part(parent: int, role: str) -> int:
    """The process that runs one part below `parent`."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in family(parent)}
    [found] = [pid for pid, words in lines.items() if role.encode() in words]
    return found


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def exported(environment: str) -> dict[str, str]:
    """What an environment file exports, but for the path."""
    words = (shlex.split(line)[1].partition("=") for line in environment.splitlines() if line)
    return {name: value for name, _, value in words if name != "PATH"}


@pytest.mark.proof
def test_dev_tells_the_first_try_that_fails(dsn: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    settings = {
        "WAYPOST_DATABASE_URL": dsn,
        "WAYPOST_DATA_DIR": str(data),
        "WAYPOST_RECEIVER_ADDR": "127.0.0.1:0",
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    order = json.dumps({"id": "a", "customer": "b", "total": 1})
    words = (
        ("endpoint", "add", "inventory", f"http://127.0.0.1:{port}/"),
        ("start", "order", "--input", order),
    )

    with running(waypost("dev", "examples.shop.flows"), environment=settings, output=tmp_path / "out") as dev:
        dev.until_said("Ctrl-C stops")
        for command in words:
            subprocess.run(
                waypost(*command),
                env={**exported((data / "environment").read_text()), "PYTHONPATH": str(ROOT)},
                check=True,
                capture_output=True,
                timeout=60,
            )
        dev.until_said("endpoint inventory, try 1: connection-refused; it is tried again")
        code = dev.end()

    assert code == 0


@pytest.mark.proof
def test_dev_takes_another_port_when_its_own_is_taken_and_says_so(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {"WAYPOST_DATA_DIR": str(folder), "WAYPOST_RECEIVER_ADDR": f"127.0.0.1:{port}"}
        command = waypost("dev", "examples.shop.flows")
        with running(command, environment=environment, output=tmp_path / "out") as dev:
            found = dev.until_said(r"receiver +http://127\.0\.0\.1:(\d+)(.*)")
            dev.end()

    assert found[1] != str(port)
    assert f"port {port} is taken" in found[2]


def test_dev_without_flows_starts_nothing(folder: Path, tmp_path: Path) -> None:
    with running(
        waypost("dev"), environment={"WAYPOST_DATA_DIR": str(folder)}, output=tmp_path / "out"
    ) as dev:
        code = dev.process.wait(60)

    assert code == 1
    assert "WAYPOST_FLOWS" in dev.said()
    assert not folder.exists()
