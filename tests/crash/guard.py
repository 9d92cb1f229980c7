"""Who stands at the doors of a process: notes who passes, and kills the process where a trap says so."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import psycopg

from tests.crash.points import Door, Point, Subject, Trap, When

SomeConnection = psycopg.AsyncConnection[Any] | psycopg.Connection[Any]


class Guard:
    """The guard of the process `part`. In `folder` are `<part>.passed`, a line for each passage, `<part>.sent`, a line
    for each request, `<part>.trap`, and `<part>.fired`, which the trap becomes. `control` is the port of the proxy
    before the database.
    """

    def __init__(self, folder: Path, part: str, *, control: int) -> None:
        self.part = part
        self._control = control
        self._trap = folder / f"{part}.trap"
        self._fired = folder / f"{part}.fired"
        self._passed = opened(folder / f"{part}.passed")
        self._sent = opened(folder / f"{part}.sent")
        self._events: dict[str, Subject] = {}

    def passes(
        self,
        when: When,
        door: Door,
        name: str,
        subjects: Sequence[Subject],
        conn: SomeConnection | None = None,
    ) -> None:
        """Something passes a door, on `conn` if it is a commit. Does not return when a trap waits for it."""
        subjects = subjects or [Subject()]
        line = {"when": when, "door": door, "name": name, "about": subjects[0].about}
        os.write(self._passed, json.dumps(line).encode() + b"\n")
        trap = Trap.read(self._trap)
        if trap is None or not trap.catches(Point(self.part, door, name, "", when), subjects):
            return
        if trap.point.when == "lost":
            assert conn is not None, f"{trap.point}: there is no answer to lose"
            self._deafen(conn, rows=trap.waits_for_rows)
        else:
            self._trap.rename(self._fired)
            os.kill(os.getpid(), signal.SIGKILL)

    def _deafen(self, conn: SomeConnection, *, rows: bool) -> None:
        """Have the proxy swallow the answer to what is now sent on `conn`."""
        with socket.socket(fileno=os.dup(conn.pgconn.socket)) as ours:
            port: int = ours.getsockname()[1]
        with socket.create_connection(("127.0.0.1", self._control)) as proxy:
            proxy.sendall(json.dumps({"part": self.part, "port": port, "rows": rows}).encode() + b"\n")
            assert proxy.recv(2) == b"ok", "the proxy knows the connection"

    def note(self, body: bytes | str | None) -> Subject:
        """Remember an event, if `body` is one; it as a subject."""
        try:
            event: Any = json.loads(body or b"null")
        except ValueError:
            event = None
        if not isinstance(event, dict):
            return Subject()
        attributes = cast("dict[str, Any]", event)
        subject = Subject(str(attributes.get("type", "")), attributes.get("correlationid"))
        self._events[str(attributes.get("id"))] = subject
        return subject

    def sends(self, body: bytes) -> Subject:
        """Write down that an event leaves, and with which bytes; it as a subject."""
        line = {"id": json.loads(body)["id"], "sha256": hashlib.sha256(body).hexdigest()}
        os.write(self._sent, json.dumps(line).encode() + b"\n")
        return self.note(body)

    def known(self, event: object, suffix: str = "") -> Subject:
        """A remembered event as a subject, by its id."""
        found = self._events.get(str(event), Subject("?"))
        return Subject(found.about + suffix, found.execution)


def opened(file: Path) -> int:
    """To be appended to, whatever becomes of this process."""
    return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def hang(owner: object, name: str, door: Callable[[Any], Any]) -> None:
    """Put `door` around a function of a class or module that is not ours."""
    setattr(owner, name, door(getattr(owner, name)))
