"""The embedded server: made once, started, and never outliving the process that started it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final, LiteralString, Self

import psycopg

from orchestrator.embedded.binaries import Binaries, embedded_binaries, reachable
from orchestrator.embedded.errors import DataFolderUnusable, ServerFailed
from orchestrator.embedded.lock import take_lock
from orchestrator.embedded.user import blocked_at, call, server_user, spawn

USER: Final = "waypost"
DATABASE: Final = "waypost"
START_MAX_SECONDS: Final = 60.0  # recovery after a crash takes its time
STOP_MAX_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.02
LAST_WORDS_BYTES: Final = 2000

SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # a socket's path in a deep folder would be too long
    "timezone": "UTC",
    "log_timezone": "UTC",
    "autovacuum_naptime": "10s",  # queues leave dead rows all the time
    "jit": "off",  # compiling costs more than our statements take
}
"""What the server runs with, unless it is told otherwise. Durability is not among what it may be told."""

DURABILITY: Final = frozenset({"fsync", "full_page_writes", "synchronous_commit"})

RUN: Final = """
exec 3<&0
"$@" </dev/null 3<&- &
server=$!
{ read -r _ <&3; kill -INT "$server"; } 2>/dev/null &
watch=$!
wait "$server"
code=$?
kill "$watch" 2>/dev/null
exit "$code"
"""
"""A shell that runs the server until it ends or our end of the pipe is closed, be it by SIGKILL."""


class EmbeddedPostgres:
    """A PostgreSQL server over `data_dir`, which is made when it is not there.

    In it lie `postgres/` (the server's own), `password`, `port`, `server.log` and `lock`. The DSN that `start`
    returns goes to 127.0.0.1 with a password and may be given to other processes. Without `port` the one of
    the last time is taken if it is free, so that such a DSN stays true, else any free one. One process at a
    time uses a folder; a server that a killed one left behind is stopped first.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        binaries: Binaries | None = None,
    ) -> None:
        unsafe = DURABILITY & set(settings or {})
        if unsafe:
            raise ValueError(f"an embedded server stays durable: {', '.join(sorted(unsafe))} cannot be set")
        self.data_dir = data_dir.resolve()
        self.port = port
        self.settings = {**SETTINGS, **(settings or {})}
        self.binaries = embedded_binaries() if binaries is None else binaries
        self.user = server_user()
        self._wanted_port = port
        self._server: subprocess.Popen[bytes] | None = None
        self._lock: IO[bytes] | None = None
        self._made_folder = False

    @classmethod
    def temporary(
        cls,
        *,
        within: Path | None = None,
        settings: Mapping[str, str] | None = None,
        binaries: Binaries | None = None,
    ) -> EmbeddedPostgres:
        """A server over a new folder in `within`, else the system's temporary one. End it with `remove()`."""
        parent = Path(tempfile.gettempdir()) if within is None else within
        return cls(parent / f"waypost-{secrets.token_hex(8)}", settings=settings, binaries=binaries)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def cluster(self) -> Path:
        """The folder that PostgreSQL calls PGDATA."""
        return self.data_dir / "postgres"

    @property
    def log(self) -> Path:
        return self.data_dir / "server.log"

    def dsn(self, database: str = DATABASE) -> str:
        """Where `database` of this server is, password included: for other processes, never for a log."""
        password = (self.data_dir / "password").read_text(encoding="ascii")
        return f"postgresql://{USER}:{password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> str:
        """Start and return the DSN, when connections are taken. Blocks; does nothing when it runs already.

        Raises BinariesMissing, DataFolderUnusable and ServerFailed; then nothing of it is left running.
        """
        if self._server is not None:
            return self.dsn()
        self._make_folder()
        self._lock = take_lock(self.data_dir)
        try:
            self.binaries = reachable(self.binaries, self.data_dir / "binaries", self.user)
            self._check_version()
            if not self.cluster.exists():
                self._make_cluster()
            self._stop_orphan()
            self._run()
            self._make_database()
        except BaseException:
            self.stop()
            raise
        return self.dsn()

    @property
    def is_over(self) -> bool:
        """Whether it was started and has ended by itself."""
        return self._server is not None and self._server.poll() is not None

    def start_again(self) -> None:
        """Start it where it was, after it has ended by itself. Blocks. Raises ServerFailed when it does not start.

        For a moment what is left of the old one may be in the way.
        """
        assert self.is_over, "it has ended by itself"
        assert self._server is not None, "it was started"
        end(self._server)
        self._wanted_port = self.port
        deadline = time.monotonic() + STOP_MAX_SECONDS
        while True:
            try:
                self._run()
            except ServerFailed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_SECONDS)
            else:
                return

    def stop(self) -> None:
        """Stop, and wait until it has: open transactions are rolled back. Nothing to do is no error."""
        server, self._server = self._server, None
        if server is not None:
            end(server)
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def remove(self) -> None:
        """Stop, and remove the data folder if this object made it."""
        self.stop()
        if self._made_folder:
            shutil.rmtree(self.data_dir)

    def _make_folder(self) -> None:
        if not self.data_dir.exists():
            self.data_dir.mkdir(parents=True)
            # The server's user must get through to its part; it can neither list nor read ours.
            self.data_dir.chmod(0o700 if self.user is None else 0o711)
            self._made_folder = True
        blocked = blocked_at(self.data_dir, self.user)
        if blocked is not None and self.user is not None:
            raise DataFolderUnusable(
                self.data_dir,
                f"as root the server runs as user {self.user.name}, who cannot enter {blocked}",
                "Name a folder that this user can reach, such as WAYPOST_DATA_DIR=/var/lib/waypost,"
                " or run as an ordinary user",
            )

    def _check_version(self) -> None:
        version = self.cluster / "PG_VERSION"
        found = version.read_text(encoding="ascii").strip() if version.exists() else str(self.binaries.major)
        if found != str(self.binaries.major):
            raise DataFolderUnusable(
                self.data_dir,
                f"it was made by PostgreSQL {found}, the binaries are PostgreSQL {self.binaries.major}",
                "Move it away to begin anew; or carry its data over: dump it with pg_dump of PostgreSQL"
                f" {found} and restore it into a new folder",
            )

    def _make_cluster(self) -> None:
        """Make it beside its place and move it there when it is whole: no half of one is ever used."""
        unfinished = self.data_dir / "postgres.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        password, handed = self.data_dir / "password", self.data_dir / "password.unfinished"
        for path in (password, handed):
            path.touch(mode=0o600)
        password.write_text(secrets.token_urlsafe(24), encoding="ascii")
        handed.write_bytes(password.read_bytes())
        if self.user is not None:
            for path in (unfinished, handed):
                os.chown(path, self.user.uid, self.user.gid)
        self._call(
            "initdb",
            f"--pgdata={unfinished}",
            f"--username={USER}",
            f"--pwfile={handed}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
        )
        handed.unlink()
        unfinished.rename(self.cluster)

    def _stop_orphan(self) -> None:
        """Stop a server whose starter is dead. We hold the folder's lock, so it is nobody's."""
        deadline = time.monotonic() + STOP_MAX_SECONDS
        while (left := Postmaster.over(self.cluster)) is not None:
            if time.monotonic() > deadline:
                raise DataFolderUnusable(
                    self.data_dir, f"process {left.pid} still serves it", f"End it: kill -INT {left.pid}"
                )
            os.kill(left.pid, signal.SIGINT)
            time.sleep(POLL_SECONDS)

    def _call(self, program: str, *arguments: str) -> None:
        ended = call([self.binaries.bin / program, *arguments], self.user)
        if ended.returncode != 0:
            raise ServerFailed(program, ended.stdout.decode(errors="replace"))

    def _run(self) -> None:
        for tries_left in (2, 1, 0):
            self.port = self._usual_port() or free_port() if self._wanted_port is None else self._wanted_port
            try:
                self._run_once()
            except ServerFailed as failed:
                # Between our choice of a free port and the server's bind somebody may have taken it.
                taken = self._wanted_port is None and "Address already in use" in failed.last_words
                if not taken or tries_left == 0:
                    raise
            else:
                (self.data_dir / "port").write_text(str(self.port), encoding="ascii")
                return

    def _usual_port(self) -> int | None:
        """The port of the last time, if it is free."""
        try:
            port = int((self.data_dir / "port").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return port if is_free(port) else None

    def _run_once(self) -> None:
        settings = {**self.settings, "port": str(self.port)}
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        postgres = [self.binaries.bin / "postgres", "-D", self.cluster, *flags]
        with self.log.open("ab") as log:
            begin = log.tell()
            server = spawn(["/bin/sh", "-c", RUN, "waypost-postgres", *postgres], self.user, log=log)
        try:
            self._await_ready(server, begin)
        except BaseException:
            end(server)
            raise
        self._server = server

    def _await_ready(self, server: subprocess.Popen[bytes], log_begin: int) -> None:
        deadline = time.monotonic() + START_MAX_SECONDS
        while (running := Postmaster.over(self.cluster)) is None or not running.ready:
            if server.poll() is not None or time.monotonic() > deadline:
                with self.log.open("rb") as log:
                    log.seek(log_begin)
                    words = log.read()[-LAST_WORDS_BYTES:]
                raise ServerFailed("postgres", words.decode(errors="replace"))
            time.sleep(POLL_SECONDS)

    def _make_database(self) -> None:
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as conn:
            if conn.execute(DATABASE_EXISTS, {"name": DATABASE}).fetchone() is None:
                conn.execute(CREATE_DATABASE)


DATABASE_EXISTS: Final[LiteralString] = "select 1 from pg_database where datname = %(name)s"
CREATE_DATABASE: Final[LiteralString] = f"create database {DATABASE}"


@dataclass(frozen=True, slots=True)
class Postmaster:
    """A living server, as its `postmaster.pid` describes it. `pg_ctl --wait` reads the same."""

    pid: int
    ready: bool

    @classmethod
    def over(cls, cluster: Path) -> Postmaster | None:
        """The server over `cluster`, or None: what a crash left behind names nobody, or somebody else."""
        try:
            lines = (cluster / "postmaster.pid").read_text(encoding="utf-8").splitlines()
            pid = int(lines[0])
        except (FileNotFoundError, IndexError, ValueError):
            return None
        if not works_in(pid, cluster):
            return None
        return cls(pid, ready=lines[-1].strip() == "ready")


def works_in(pid: int, cluster: Path) -> bool:
    """Whether process `pid` is a server over `cluster`: a server's working directory is its cluster."""
    proc = Path("/proc")
    try:
        if proc.joinpath("self").exists():
            return proc.joinpath(str(pid), "cwd").readlink() == cluster
        return str(cluster) in call(["/bin/ps", "-o", "command=", "-p", str(pid)], None).stdout.decode()
    except OSError:
        return False


def end(server: subprocess.Popen[bytes]) -> None:
    """Close the pipe that the server lives by, and wait. What does not stop in time is killed."""
    assert server.stdin is not None, "the server was started with a pipe"
    server.stdin.close()
    try:
        server.wait(STOP_MAX_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
