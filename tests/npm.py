"""Packages of npm that tests use, installed once on this machine, with exactly these versions."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest

PACKAGES: Final = ("cloudevents@10.0.0", "standardwebhooks@1.0.0", "svix@2.5.0")
INSTALL_SECONDS: Final = 90


def node_modules() -> Path:
    """The folder `node_modules` with all of PACKAGES. Skips where npm is absent or cannot reach its registry."""
    if not (shutil.which("npm") and shutil.which("node")):
        pytest.skip("npm or node is not installed")
    home = Path(tempfile.gettempdir()) / f"waypost-npm-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    found = home.lstat()
    assert found.st_uid == os.getuid(), f"{home} belongs to somebody else"
    assert found.st_mode & 0o77 == 0, f"{home} can be used by others"
    folder = home / hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:16]
    if not folder.exists():
        keep(installed(home), folder)
    return folder / "node_modules"


def installed(home: Path) -> Path:
    """A new folder in which the packages are installed."""
    folder = Path(tempfile.mkdtemp(dir=home))
    command = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES]
    environment = os.environ | {"npm_config_update_notifier": "false", "npm_config_fetch_retries": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=INSTALL_SECONDS,
            check=False,
            text=True,
        )
    except subprocess.TimeoutExpired:
        shutil.rmtree(folder)
        pytest.skip(f"npm did not install {' '.join(PACKAGES)} within {INSTALL_SECONDS} s")
    if done.returncode:
        shutil.rmtree(folder)
        pytest.skip(f"npm cannot install {' '.join(PACKAGES)}: {done.stderr.strip().splitlines()[:1]}")
    return folder


def keep(made: Path, folder: Path) -> None:
    """Give what was made its name, unless another process was first; both have the same."""
    try:
        made.rename(folder)
    except OSError:
        shutil.rmtree(made)
        if not folder.exists():
            raise
