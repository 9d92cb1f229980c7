"""One process at a time uses a data folder."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from orchestrator.embedded.errors import DataFolderUnusable


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
