"""Looks at a deployment all the time, from outside: who holds which connections, and what has no reason to move.

Connections are counted on both sides. The server's `pg_stat_activity` says under which name each came, and the
kernel's table of sockets whose process it is: so a connection that a killed process left behind, for the moment
until the server notices, is told from one that a living process holds. The table shows a process's sockets also
while the server is away.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString

import psycopg

from orchestrator.bootstrap import RECEIVER_CONNECTIONS, RELAY_CONNECTIONS, WORKER_CONNECTIONS
from tests.acceptance.sockets import ports_of, sockets_to

PAUSE_SECONDS: Final = 0.05
"""Between two looks."""

HINTS: Final = {"waypost-hints": 2}
MAY_HOLD: Final[Mapping[str, Mapping[str, int]]] = {
    "worker": {"waypost-worker": WORKER_CONNECTIONS, "waypost-lease": 1, **HINTS},
    "relay": {"waypost-relay": RELAY_CONNECTIONS, **HINTS},
    "receiver": {"waypost-receiver": RECEIVER_CONNECTIONS, **HINTS},
    "desk": {},
}
"""As docs/limits.md has it: how many connections a process of each role may hold at once, by their name."""

ACTIVITY: Final[LiteralString] = """
    select client_port, application_name
      from pg_stat_activity
     where backend_type = 'client backend'
       and pid <> pg_backend_pid()
"""
STUCK: Final[LiteralString] = "select execution_id || ' ' || because from waypost.stuck"


@dataclass(slots=True)
class Watch:
    """What was seen: `excess` and `stuck` say what must never be, in sentences."""

    looks: int = 0
    away: int = 0
    """Looks while the server answered nothing."""
    most: Counter[str] = field(default_factory=Counter[str])
    """By role: the most connections that one process of it was seen to hold."""
    most_of_all: int = 0
    """Of all processes together."""
    left_behind: int = 0
    """The most that killed processes had left behind at one look."""
    excess: list[str] = field(default_factory=list[str])
    stuck: list[str] = field(default_factory=list[str])

    def count(self, held: Mapping[str, Counter[str]], roles: Mapping[str, str]) -> None:
        """One look: `held` has the connections of each process by their name, `roles` the role of each."""
        for process, names in held.items():
            role = roles[process]
            self.most[role] = max(self.most[role], names.total())
            allowed = MAY_HOLD[role]
            self.excess += [
                f"{process}: {number} connections named {name!r}, expected at most {allowed.get(name, 0)}"
                for name, number in names.items()
                if name and number > allowed.get(name, 0)
            ]
            self.hold(process, role, names.total())
        self.most_of_all = max(self.most_of_all, sum(names.total() for names in held.values()))

    def hold(self, process: str, role: str, number: int) -> None:
        bound = sum(MAY_HOLD[role].values())
        if number > bound:
            self.excess.append(f"{process}: {number} connections, expected at most {bound}")


@contextmanager
def watching(dsn: str, port: int, processes: Callable[[], Mapping[int, tuple[str, str]]]) -> Generator[Watch]:
    """Look while inside, in a thread. `processes` says which live now: by pid their name and role."""
    watch, over = Watch(), threading.Event()
    thread = threading.Thread(target=look, args=(watch, dsn, port, processes, over), name="watch")
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


def look(
    watch: Watch,
    dsn: str,
    port: int,
    processes: Callable[[], Mapping[int, tuple[str, str]]],
    over: threading.Event,
) -> None:
    conn: psycopg.Connection[Any] | None = None
    while not over.wait(PAUSE_SECONDS):
        watch.looks += 1
        activity: list[tuple[int, str]] = []
        try:
            conn = conn or psycopg.connect(dsn, autocommit=True, connect_timeout=2)
            activity = conn.execute(ACTIVITY).fetchall()
            watch.stuck += [row[0] for row in conn.execute(STUCK).fetchall()]
        except psycopg.OperationalError:
            watch.away += 1
            conn = closed(conn)
        look_at_sockets(watch, activity, port, processes())
    closed(conn)


def closed(conn: psycopg.Connection[Any] | None) -> None:
    if conn is not None:
        conn.close()


def look_at_sockets(
    watch: Watch, activity: list[tuple[int, str]], port: int, living: Mapping[int, tuple[str, str]]
) -> None:
    table = sockets_to(port)
    owner = dict.fromkeys(ports_of(os.getpid(), table), "")
    roles: dict[str, str] = {}
    for pid, (name, role) in living.items():
        process = f"{name} ({pid})"
        ours = ports_of(pid, table)
        owner |= dict.fromkeys(ours, process)
        roles[process] = role
        watch.hold(process, role, len(ours))
    held: dict[str, Counter[str]] = {process: Counter() for process in roles}
    left = 0
    for client_port, name in activity:
        process = owner.get(client_port)
        if process is None:
            left += 1
        elif process:  # else it is the test's own
            held[process][name] += 1
    watch.left_behind = max(watch.left_behind, left)
    watch.count(held, roles)
