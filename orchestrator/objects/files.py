"""Objects as files: `ab/cd/DIGEST` below a folder, written whole or not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Final

from contracts.objects import DIGEST, ObjectDamaged, ObjectMissing, StoreAway, StoreDenied, check

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
DRAFT: Final = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}")
DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
ODD: Final = frozenset({errno.ELOOP, errno.EISDIR, errno.ENOTDIR})
"""Under the name of an object there is something that is no file."""


class FileStore:
    """Below `root`, which all parts see. Nobody else can read it: files have 0600, folders 0700."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.name = root.as_uri()

    def __repr__(self) -> str:
        return f"FileStore({self.name})"

    async def put(self, digest: str, data: bytes) -> None:
        await asyncio.to_thread(self._put, digest, data)

    async def get(self, digest: str, *, size: int) -> bytes:
        return await asyncio.to_thread(self._get, digest, size)

    async def delete(self, digest: str, *, than: datetime) -> None:
        await asyncio.to_thread(self._delete, digest, than.timestamp())

    async def older(self, than: datetime, *, after: str, limit: int) -> list[str]:
        return await asyncio.to_thread(self._older, than.timestamp(), after, limit)

    # ---- in a thread ---------------------------------------------------------------------------------------

    def _path(self, digest: str) -> Path:
        assert DIGEST.fullmatch(digest), "a digest is 64 digits, and no path"
        return self._root / digest[:2] / digest[2:4] / digest

    @contextmanager
    def _told(self, digest: str) -> Generator[None]:
        """Errors of the system as ours."""
        try:
            yield
        except FileNotFoundError:
            if not self._root.is_dir():
                raise StoreAway(self.name, "no such folder") from None
            raise ObjectMissing(digest, self.name) from None
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            if error.errno in DENIED:
                raise StoreDenied(self.name, why) from None
            if error.errno == errno.ENOTDIR and not self._root.is_dir():
                raise StoreAway(self.name, "no folder") from None
            if error.errno in ODD:
                raise ObjectDamaged(digest, self.name, f"no file ({why})") from None
            raise StoreAway(self.name, why) from None

    def _put(self, digest: str, data: bytes) -> None:
        path = self._path(digest)
        with self._told(digest):
            if self._is_there(path, len(data)):
                return
            self._make_folders(path)
            draft = path.with_name(f".{digest}.{secrets.token_hex(8)}")
            try:
                write(draft, data)
                draft.replace(path)
            except BaseException:
                with suppress(OSError):
                    draft.unlink()
                raise
            sync(path.parent)

    def _is_there(self, path: Path, size: int) -> bool:
        """Whether there is such a file; then it is as if it had been written now, so that no sweep takes it for old."""
        try:
            if path.lstat().st_size != size:
                return False
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _make_folders(self, path: Path) -> None:
        for folder in (self._root, path.parent.parent, path.parent):
            try:
                folder.mkdir(mode=FOLDER_MODE)
            except FileExistsError:
                continue
            sync(folder.parent)

    def _get(self, digest: str, size: int) -> bytes:
        with self._told(digest):
            handle = os.open(self._path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(handle, "rb") as file:
                data = file.read(size + 1)
        return check(digest, size, data, self.name)

    def _delete(self, digest: str, than: float) -> None:
        """Who puts it meanwhile finds none and writes it, or has made it new before it was moved: then it returns."""
        path = self._path(digest)
        with suppress(ObjectMissing), self._told(digest):
            if changed(path) >= than:
                return
            aside = path.with_name(f".{digest}.{secrets.token_hex(8)}")
            path.rename(aside)
            if changed(aside) >= than:
                aside.rename(path)
            else:
                aside.unlink()

    def _older(self, than: float, after: str, limit: int) -> list[str]:
        found: list[str] = []
        with self._told(""):
            for first in folders(self._root, after[:2]):
                for second in folders(first, after[2:4] if first.name == after[:2] else ""):
                    for path in sorted(second.iterdir()):
                        if DRAFT.fullmatch(path.name) and changed(path) < than:
                            path.unlink(missing_ok=True)  # its writer died
                        if DIGEST.fullmatch(path.name) and path.name > after and changed(path) < than:
                            found.append(path.name)
                        if len(found) == limit:
                            return found
        return found


def folders(root: Path, least: str) -> list[Path]:
    return [path for path in sorted(root.iterdir()) if path.is_dir() and path.name >= least]


def changed(path: Path) -> float:
    """When it was written; never, when it is gone meanwhile."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return float("inf")


def write(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Make what was renamed or made in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
