"""The embedded server: durable, private, careful with its data folder, and gone when its starter is."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from orchestrator.embedded import (
    Binaries,
    DataFolderUnusable,
    EmbeddedPostgres,
    ServerFailed,
    embedded_binaries,
    server,
    sweep,
    system_binaries,
)
from orchestrator.embedded.binaries import reachable
from orchestrator.embedded.server import Postmaster, free_port
from orchestrator.embedded.user import User, call, server_user
from tests.cluster import fast_folder
from tests.waiting import until_true

ROOT: Final = Path(__file__).parents[2]
AS_ROOT: Final = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as somebody else")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path where a data folder may be made; pytest's own are closed to other users."""
    spare = EmbeddedPostgres.temporary(within=fast_folder())
    yield spare.data_dir
    call(["/bin/rm", "-rf", spare.data_dir], None)


def ask(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        return conn.execute(statement.encode()).fetchall()


def test_a_kept_data_folder_keeps_its_data(folder: Path) -> None:
    with EmbeddedPostgres(folder) as first, psycopg.connect(first.dsn(), autocommit=True) as conn:
        conn.execute("create table kept as select 42 as x")

    with EmbeddedPostgres(folder) as second:
        assert ask(second.dsn(), "select x from kept") == [(42,)]
        assert second.start() == second.dsn(), "starting what runs is no error"
    second.stop()
    assert Postmaster.over(second.cluster) is None


def test_it_is_durable_and_only_this_machine_reaches_it(folder: Path) -> None:
    with EmbeddedPostgres(folder) as running:
        found = [
            ask(running.dsn(), f"show {setting}")[0][0]
            for setting in ("fsync", "full_page_writes", "synchronous_commit", "listen_addresses")
        ]
        wrong = f"postgresql://waypost:guess@127.0.0.1:{running.port}/waypost"

        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(wrong)

    assert found == ["on", "on", "on", "127.0.0.1"]


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes", "synchronous_commit"])
def test_durability_is_not_for_sale(folder: Path, setting: str) -> None:
    with pytest.raises(ValueError, match=f"stays durable: {setting}"):
        EmbeddedPostgres(folder, settings={setting: "off"})


def test_settings_and_port_are_as_they_were_asked_for(folder: Path) -> None:
    port = free_port()

    with EmbeddedPostgres(folder, port=port, settings={"max_connections": "17"}) as running:
        assert ask(running.dsn(), "show max_connections") == [("17",)]
        assert running.port == port


def test_secrets_in_the_folder_are_for_its_owner(folder: Path) -> None:
    with EmbeddedPostgres(folder) as running:
        assert stat.S_IMODE((folder / "password").stat().st_mode) == 0o600
        assert stat.S_IMODE(running.cluster.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.stat().st_mode) & 0o066 == 0
        assert not list(folder.glob("*unfinished*"))
        assert "password" not in repr(running)


def test_a_folder_it_did_not_make_keeps_its_mode(folder: Path) -> None:
    parent = folder
    parent.mkdir(mode=0o755)
    parent.chmod(0o715)
    inside = parent / "data"
    inside.mkdir()
    inside.chmod(0o731)

    with EmbeddedPostgres(inside) as running:
        assert ask(running.dsn(), "select 1") == [(1,)]
    running.remove()

    assert stat.S_IMODE(parent.stat().st_mode) == 0o715
    assert stat.S_IMODE(inside.stat().st_mode) == 0o731
    assert inside.exists(), "it removes only what it made"


def test_a_temporary_folder_is_removed() -> None:
    running = EmbeddedPostgres.temporary(within=fast_folder())
    running.start()
    assert running.data_dir.exists()

    running.remove()

    assert not running.data_dir.exists()


def test_old_temporary_folders_that_nobody_uses_are_swept(tmp_path: Path) -> None:
    left, used, young, other = (
        tmp_path / f"waypost-{name}" for name in ("0" * 16, "1" * 16, "2" * 16, "mine")
    )
    for place in (left, used, young, other):
        place.mkdir()
        (place / "lock").touch()
        if place is not young:
            os.utime(place / "lock", (0, 0))

    with (used / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep(tmp_path)

    assert sorted(tmp_path.iterdir()) == sorted([used, young, other])


def test_a_data_folder_of_another_major_version_is_refused_with_the_way_out(folder: Path) -> None:
    older = system_binaries(15)
    if older is None:
        pytest.skip("PostgreSQL 15 is not installed")
    with EmbeddedPostgres(folder, binaries=older):
        pass

    with pytest.raises(DataFolderUnusable) as refused:
        EmbeddedPostgres(folder).start()

    assert refused.value.folder == folder
    assert "made by PostgreSQL 15, the binaries are PostgreSQL 18" in str(refused.value)
    assert "dump it with pg_dump of PostgreSQL 15" in refused.value.way_out
    with EmbeddedPostgres(folder, binaries=older) as still_there:
        assert ask(still_there.dsn(), "select 1") == [(1,)]


def test_a_folder_in_use_is_refused(folder: Path) -> None:
    with EmbeddedPostgres(folder) as first:
        with pytest.raises(DataFolderUnusable, match="another process uses it"):
            EmbeddedPostgres(folder).start()

        assert ask(first.dsn(), "select 1") == [(1,)]


def test_a_setting_that_the_server_refuses_is_told_in_its_words(folder: Path) -> None:
    broken = EmbeddedPostgres(folder, settings={"max_connections": "many"})

    with pytest.raises(ServerFailed, match="max_connections"):
        broken.start()

    with EmbeddedPostgres(folder) as mended:
        assert ask(mended.dsn(), "select 1") == [(1,)]


def test_a_kept_data_folder_keeps_its_port_while_that_is_free(folder: Path) -> None:
    with EmbeddedPostgres(folder) as first:
        port = first.port
    with EmbeddedPostgres(folder) as second:
        again = second.port
    assert port is not None
    with socket.create_server(("127.0.0.1", port)), EmbeddedPostgres(folder) as third:
        moved = third.port

    assert again == port
    assert moved != port


def test_a_port_that_is_taken_is_an_error(folder: Path) -> None:
    with EmbeddedPostgres(folder) as first:
        second = EmbeddedPostgres(folder.with_name(f"{folder.name}-2"), port=first.port)
        with pytest.raises(ServerFailed, match="Address already in use"):
            second.start()
        second.remove()


STARTER: Final = """
import sys, time
from pathlib import Path
from orchestrator.embedded import EmbeddedPostgres
running = EmbeddedPostgres(Path(sys.argv[1]))
running.start()
print(running.dsn(), flush=True)
time.sleep(600)
"""


def started_elsewhere(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Another process that runs a server over `folder`, and the server's DSN."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    return starter, starter.stdout.readline().strip()


def test_the_server_ends_with_the_process_that_started_it(folder: Path) -> None:
    starter, dsn = started_elsewhere(folder)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create table kept as select 42 as x")

    starter.kill()
    starter.communicate()

    until_true(lambda: Postmaster.over(folder / "postgres") is None, what="the end of the server")
    with EmbeddedPostgres(folder) as running:
        assert ask(running.dsn(), "select x from kept") == [(42,)]


@pytest.mark.proof
def test_a_server_that_was_left_behind_is_stopped_first(folder: Path) -> None:
    """Its starter and the shell that watches over it were both killed."""
    starter, _ = started_elsewhere(folder)
    orphan = Postmaster.over(folder / "postgres")
    assert orphan is not None
    status = Path(f"/proc/{orphan.pid}/status").read_text(encoding="ascii")
    [shell] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:")]
    watcher = [
        int(pid) for pid in Path(f"/proc/{shell}/task/{shell}/children").read_text(encoding="ascii").split()
    ]
    for pid in (shell, *(pid for pid in watcher if pid != orphan.pid), starter.pid):
        os.kill(pid, signal.SIGKILL)
    starter.communicate()
    assert Postmaster.over(folder / "postgres") == orphan

    with EmbeddedPostgres(folder) as running:
        assert ask(running.dsn(), "select 1") == [(1,)]
        now = Postmaster.over(folder / "postgres")
        assert now is not None
        assert now.pid != orphan.pid


def test_a_pid_file_that_a_crash_left_names_nobody(folder: Path) -> None:
    """Its number may be that of another process by now: this one, which is not to be stopped."""
    with EmbeddedPostgres(folder) as running:
        pid_file = running.cluster / "postmaster.pid"
        left = pid_file.read_text(encoding="utf-8").splitlines()

    pid_file.write_text("\n".join([str(os.getpid()), *left[1:]]), encoding="utf-8")

    assert Postmaster.over(running.cluster) is None


@AS_ROOT
def test_as_root_the_server_is_somebody_else(folder: Path) -> None:
    with EmbeddedPostgres(folder) as running:
        found = Postmaster.over(running.cluster)
        assert found is not None
        owner = Path(f"/proc/{found.pid}").stat().st_uid

        assert owner != 0
        assert owner == running.cluster.stat().st_uid


@AS_ROOT
def test_as_root_binaries_that_the_server_cannot_reach_are_copied(folder: Path) -> None:
    """As they would be in an environment below /root."""
    original = embedded_binaries()
    closed = folder.with_name(f"{folder.name}-closed")
    hidden = closed / "site-packages"
    hidden.mkdir(parents=True)
    package = original.bin.parents[1]
    assert original.libraries is not None
    for source in (package, original.libraries):
        (hidden / source.name).mkdir()
    call(["/bin/cp", "-r", original.bin.parent, hidden / package.name], None)
    call(["/bin/cp", "-rT", original.libraries, hidden / original.libraries.name], None)
    closed.chmod(0o700)
    out_of_reach = Binaries(
        hidden / package.name / original.bin.parent.name / "bin",
        original.major,
        hidden / original.libraries.name,
    )

    try:
        with EmbeddedPostgres(folder, binaries=out_of_reach) as running:
            assert running.binaries.bin.is_relative_to(folder / "binaries")
            assert ask(running.dsn(), "select 1") == [(1,)]
        assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    finally:
        call(["/bin/rm", "-rf", closed], None)


@AS_ROOT
def test_as_root_binaries_within_reach_are_used_where_they_are(folder: Path) -> None:
    user = server_user()
    assert user is not None
    within_reach = system_binaries(15)
    if within_reach is None:
        pytest.skip("PostgreSQL 15 is not installed")

    assert reachable(within_reach, folder, user) == within_reach
    assert not folder.exists()


@AS_ROOT
def test_as_root_a_data_folder_out_of_reach_is_refused_with_the_way_out(folder: Path) -> None:
    folder.mkdir(mode=0o700)

    with pytest.raises(DataFolderUnusable) as refused:
        EmbeddedPostgres(folder / "data").start()

    assert f"runs as user nobody, who cannot enter {folder}" in str(refused.value)
    assert "run as an ordinary user" in refused.value.way_out
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@AS_ROOT
def test_an_ordinary_user_runs_it_as_himself(folder: Path) -> None:
    """The whole of it as `nobody`, from a folder of his own."""
    user = server_user()
    assert user is not None
    folder.mkdir()
    os.chown(folder, user.uid, user.gid)
    binaries = reachable(embedded_binaries(), folder.with_name(f"{folder.name}-bin"), user)

    ended = call_as(user, folder / "data", binaries)

    call(["/bin/rm", "-rf", folder.with_name(f"{folder.name}-bin")], None)
    assert ended == 0


def call_as(user: User, data_dir: Path, binaries: Binaries) -> int:
    """Start and stop a server in a forked child that became `user`; its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(user.gid)
            os.setuid(user.uid)
            with EmbeddedPostgres(data_dir, binaries=binaries) as running:
                assert running.user is None
                assert ask(running.dsn(), "select 1") == [(1,)]
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.proof
def test_a_free_port_that_is_lost_again_is_chosen_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedPostgres(folder) as first:
        offered = iter([first.port, free_port()])
        monkeypatch.setattr(server, "free_port", lambda: next(offered))
        second = EmbeddedPostgres(folder.with_name(f"{folder.name}-2"))

        second.start()

        assert second.port != first.port
        second.remove()
