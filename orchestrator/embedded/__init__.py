"""A PostgreSQL of our own, for `demo`, `dev` and tests: the binaries of a wheel, a data folder, nothing else.

It is no toy: fsync stays on, passwords are checked, and only this machine can reach it. Nothing is changed
that we did not make: no user is added, no folder's mode is touched. As root, whom PostgreSQL refuses to run
as, the server runs as `nobody`, from a copy of its binaries where that user cannot reach the originals.
"""

from orchestrator.embedded.binaries import Binaries, embedded_binaries, system_binaries
from orchestrator.embedded.errors import BinariesMissing, DataFolderUnusable, EmbeddedError, ServerFailed
from orchestrator.embedded.lock import sweep, take_lock
from orchestrator.embedded.server import EmbeddedPostgres

__all__ = [
    "Binaries",
    "BinariesMissing",
    "DataFolderUnusable",
    "EmbeddedError",
    "EmbeddedPostgres",
    "ServerFailed",
    "embedded_binaries",
    "sweep",
    "system_binaries",
    "take_lock",
]
