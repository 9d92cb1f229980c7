"""One process at a time uses a data folder; a temporary one that nobody uses any more is removed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from pathlib import Path
from typing import IO, Final

from orchestrator.embedded.errors import DataFolderUnusable

TEMPORARY: Final = re.compile(r"waypost-[0-9a-f]{16}")
LEFT_SECONDS: Final = 3600.0  # since it was begun: a younger one may be about to be locked, or looked at


def take_lock(folder: Path) -> IO[bytes]:
    """The lock of `folder`, ours until it is closed or we die. Raises DataFolderUnusable when somebody has it."""
    lock = (folder / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise DataFolderUnusable(
            folder, "another process uses it", "Stop that one, or give another folder with WAYPOST_DATA_DIR"
        ) from None
    return lock


def sweep(parent: Path) -> None:
    """Remove temporary data folders in `parent` that a killed process left behind."""
    for folder in parent.glob("waypost-*"):
        try:
            begun = (folder / "lock").stat()
            left = begun.st_uid == os.geteuid() and time.time() - begun.st_mtime > LEFT_SECONDS
            if left and TEMPORARY.fullmatch(folder.name) and not folder.is_symlink():
                with take_lock(folder):
                    shutil.rmtree(folder)
        except (OSError, DataFolderUnusable):  # in use, or not ours to remove
            continue
