"""Whom the server runs as, and how a program is run as somebody else, knowing nothing of ours."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from orchestrator.embedded.errors import EmbeddedError

CALL_MAX_SECONDS: Final = 60.0
ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
"""All that a child is told: secrets of our environment stay ours, and messages come in English."""


@dataclass(frozen=True, slots=True)
class User:
    """An existing user of the system who is not us."""

    name: str
    uid: int
    gid: int


def server_user() -> User | None:
    """Whom the server runs as: ourselves (None), or for root somebody who is nobody in particular.

    Raises EmbeddedError when there is no such user: none is ever added.
    """
    if os.geteuid() != 0:
        return None
    for name in ("nobody", "daemon"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return User(name, found.pw_uid, found.pw_gid)
    raise EmbeddedError(
        "PostgreSQL does not run as root and there is no user `nobody`: run as an ordinary user"
    )


def call(command: Sequence[str | Path], user: User | None) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end as `user`; `stdout` is all it said. Raises OSError when it cannot be run."""
    return subprocess.run(  # noqa: S603  # programs of PostgreSQL and /bin/sh, with arguments of ours
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=CALL_MAX_SECONDS,
        start_new_session=True,  # Ctrl-C is for us
        cwd="/",
        env=ENVIRONMENT,
        user=None if user is None else user.uid,
        group=None if user is None else user.gid,
        extra_groups=None if user is None else [],
    )


def spawn(command: Sequence[str | Path], user: User | None, *, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Begin a program as `user`, in a session of its own (Ctrl-C is for us), its stdin a pipe of ours."""
    return subprocess.Popen(  # noqa: S603  # programs of PostgreSQL and /bin/sh, with arguments of ours
        command,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd="/",
        env=ENVIRONMENT,
        user=None if user is None else user.uid,
        group=None if user is None else user.gid,
        extra_groups=None if user is None else [],
    )


def blocked_at(folder: Path, user: User | None) -> Path | None:
    """The outermost of `folder` and its parents that `user` may not enter, or None. Asked by trying."""
    if user is None:
        return None
    for place in (*reversed(folder.parents), folder):
        if call(["/bin/sh", "-c", 'cd "$1"', "sh", place], user).returncode != 0:
            return place
    return None
