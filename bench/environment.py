"""An environment for the systems that Waypost is compared with: their needs are not ours."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
LOCK: Final = ROOT / "bench" / "peers.lock"
HOME: Final = ROOT / ".waypost" / "bench"


def peers_python() -> Path:
    """The interpreter of the environment, which is made first when it is not there or the lock has changed.

    It has the version of the one that runs us. Only what peers.lock names with a hash is installed.
    """
    digest = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()
    home = HOME / "peers"
    python = home / "bin" / "python"
    made_from = home / "made-from"
    if not (made_from.is_file() and made_from.read_text(encoding="ascii") == digest):
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True, symlinks=True)
        install = [
            *(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"),
            *("--only-binary", ":all:", "--require-hashes", "-r", LOCK),
        ]
        subprocess.run(install, check=True)
        made_from.write_text(digest, encoding="ascii")
    return python
