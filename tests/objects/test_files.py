"""Objects as files: whole or not at all, for nobody else, found by their hash alone."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from contracts.objects import ObjectDamaged, ObjectMissing, StoreAway, StoreDenied, digest_of
from orchestrator.objects import files
from orchestrator.objects.files import FileStore
from orchestrator.objects.kept import Kept

DATA: Final = b"some bytes"
DIGEST: Final = digest_of(DATA)
SIZE: Final = len(DATA)
NOW: Final = datetime.now(UTC)
HOUR: Final = timedelta(hours=1)
LATER: Final = NOW + 24 * HOUR


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def store(root: Path) -> FileStore:
    return FileStore(root)


def path_of(root: Path) -> Path:
    return root / DIGEST[:2] / DIGEST[2:4] / DIGEST


def files_in(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def become_file(folder: Path) -> None:
    folder.rmdir()
    folder.touch()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


async def test_what_was_put_is_got_and_nobody_else_may_read_it(store: FileStore, root: Path) -> None:
    before = os.umask(0)
    try:
        await store.put(DIGEST, DATA)
    finally:
        os.umask(before)
    path = path_of(root)

    assert await store.get(DIGEST, size=SIZE) == DATA
    assert mode(path) == 0o600
    assert {mode(folder) for folder in (root, path.parent.parent, path.parent)} == {0o700}
    assert list(path.parent.iterdir()) == [path]


async def test_what_is_there_is_not_written_again_and_is_as_new(store: FileStore, root: Path) -> None:
    await store.put(DIGEST, DATA)
    path = path_of(root)
    os.utime(path, (0, 0))
    number = path.stat().st_ino

    await store.put(DIGEST, DATA)

    assert path.stat().st_ino == number
    assert path.stat().st_mtime > 0


async def test_a_file_that_was_cut_is_written_anew(store: FileStore, root: Path) -> None:
    await store.put(DIGEST, DATA)
    path_of(root).write_bytes(b"some")

    await store.put(DIGEST, DATA)

    assert await store.get(DIGEST, size=SIZE) == DATA


async def test_many_that_put_the_same_at_once_leave_one_file(store: FileStore, root: Path) -> None:
    await asyncio.gather(*(store.put(DIGEST, DATA) for _ in range(8)))
    assert [path.name for path in files_in(root)] == [DIGEST]


async def test_what_could_not_be_written_whole_leaves_nothing(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(StoreAway, match="No space left"):
        await store.put(DIGEST, DATA)
    make(path_of(root).parent)
    with pytest.raises(StoreAway, match="No space left"):
        await store.put(DIGEST, DATA)
    assert files_in(root) == []


def other(path: Path) -> None:
    path.write_bytes(b"SOME BYTES")


def longer(path: Path) -> None:
    path.write_bytes(DATA + b"!")


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [other, longer, linked, folder, pipe])
async def test_what_is_not_the_object_is_never_given_out(
    store: FileStore, root: Path, change: Callable[[Path], None]
) -> None:
    await store.put(DIGEST, DATA)
    change(path_of(root))
    with pytest.raises(ObjectDamaged, match=DIGEST[:12]):
        await store.get(DIGEST, size=SIZE)


async def test_a_store_that_lacks_an_object_is_told_from_one_that_is_not_there(
    store: FileStore, root: Path
) -> None:
    with pytest.raises(StoreAway, match="no such folder"):
        await store.get(DIGEST, size=SIZE)
    make(root)
    with pytest.raises(ObjectMissing, match="missing"):
        await store.get(DIGEST, size=SIZE)
    become_file(root)
    with pytest.raises(StoreAway, match="no folder"):
        await store.get(DIGEST, size=SIZE)


async def test_a_store_that_does_not_let_us_says_so(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.os, "open", denied)
    with pytest.raises(StoreDenied, match="Permission denied"):
        await store.put(DIGEST, DATA)
    with pytest.raises(StoreDenied, match="Permission denied"):
        await store.get(DIGEST, size=SIZE)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", DIGEST.upper(), DIGEST + "\n", DIGEST[:-1] + "/"])
async def test_a_path_is_no_digest(store: FileStore, name: str) -> None:
    with pytest.raises(AssertionError, match="no path"):
        await store.get(name, size=SIZE)


async def test_what_is_deleted_is_gone_and_may_be_deleted_again(store: FileStore, root: Path) -> None:
    await store.put(DIGEST, DATA)
    await store.delete(DIGEST, than=LATER)
    await store.delete(DIGEST, than=LATER)
    with pytest.raises(ObjectMissing):
        await store.get(DIGEST, size=SIZE)


async def test_what_was_put_again_since_is_not_deleted(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put(DIGEST, DATA)
    await store.delete(DIGEST, than=NOW - HOUR)
    looks, real = iter([0.0]), files.changed

    def old_at_first(path: Path) -> float:
        return next(looks, real(path))

    monkeypatch.setattr(files, "changed", old_at_first)
    await store.delete(DIGEST, than=NOW - HOUR)

    assert await store.get(DIGEST, size=SIZE) == DATA
    assert files_in(root) == [path_of(root)]


async def test_what_a_writer_left_that_died_is_removed_when_it_is_old(store: FileStore, root: Path) -> None:
    await store.put(DIGEST, DATA)
    draft = path_of(root).with_name(f".{DIGEST}.{'0' * 16}")
    draft.write_bytes(b"some")
    await store.older(NOW - HOUR, after="", limit=7)
    before = files_in(root)
    await store.older(LATER, after="", limit=7)

    assert draft in before
    assert files_in(root) == [path_of(root)]


async def test_older_ones_are_listed_in_pages_each_once(store: FileStore, root: Path) -> None:
    datas = [str(number).encode() for number in range(40)]
    for data in datas:
        await store.put(digest_of(data), data)
    await store.put(DIGEST, DATA)
    for path in files_in(root):
        if path.name != DIGEST:
            os.utime(path, (0, (NOW - 2 * HOUR).timestamp()))

    found: list[str] = []
    while page := await store.older(NOW - HOUR, after=found[-1] if found else "", limit=7):
        found += page

    assert found == sorted(map(digest_of, datas))


async def test_what_is_kept_in_memory_is_bounded_and_the_oldest_leaves_first(
    store: FileStore, root: Path
) -> None:
    kept = Kept(store, bytes_max=25)
    first, second, third = [await kept.put(1, data * 10) for data in (b"a", b"b", b"c")]
    for path in files_in(root):
        path.unlink()

    assert kept.weight == 20
    assert await kept.get(1, second) == b"b" * 10
    assert await kept.get(1, third) == b"c" * 10
    with pytest.raises(ObjectMissing):
        await kept.get(1, first)
