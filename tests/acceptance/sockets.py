"""Which process is connected whereto, as the kernel says it (Linux)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

NO_INODE: Final = "0"
"""Of a socket that no process has any more: the kernel keeps it for a while."""


def sockets_to(port: int) -> dict[str, int]:
    """Of the sockets of this machine that go to `port`: by their inode the port that they come from."""
    found: dict[str, int] = {}
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == port and fields[9] != NO_INODE:
            found[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return found


def ports_of(pid: int, table: Mapping[str, int]) -> set[int]:
    """From which ports process `pid` is connected."""
    return {table[inode] for inode in inodes_of(pid) if inode in table}


def inodes_of(pid: int) -> set[str]:
    """Of the sockets that process `pid` has open; none when it is dead."""
    found: set[str] = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found
