"""What a participant remembers, so that a command that comes twice acts once.

A row per message, under the key of the business action. What a row may say:

    running   its run goes on, in the process that `owner` names
    done      acted; the reply is kept, and every later message of this key gets the same outcome
    refused   definitely not done          of this message only: the next try of an undo has an
    failed    gave up, may have acted      identity of its own, and runs
    null      no run goes on and none has answered: one raised, or only an undo has spoken of this message

`acted` says that some run may have acted; only a refusal by the handler takes that back.
`barred` says that an undo of the message has begun. From then on it is never run.

A run belongs to a process. Each process holds an exclusive `flock` on a file of its own beside the
database. The kernel lets go of it when the process dies, however it dies, so a run whose process is gone
is known at once, without a clock, a heartbeat or a lease that could be judged wrongly. The price: all
processes of one memory share one machine, which SQLite asks for anyway.
"""

from __future__ import annotations

import fcntl
import glob
import os
import sqlite3
import threading
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, LiteralString, Protocol, Self, TypeAlias
from uuid import uuid4

UNDO: Final = "/undo"
"""How the idempotency key of an undo ends; what is before it is the key of what it undoes."""

End: TypeAlias = Literal["done", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Errand:
    """One command as memory knows it: who asks, which business action, which message, what it undoes."""

    sender: str
    key: str
    message: str
    undoes: str | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """Run it. `again`: an earlier run of this action had no answer, so it may have acted."""

    again: bool


@dataclass(frozen=True, slots=True)
class Busy:
    """A run of this action, or of what is to be undone, goes on. Ask later."""


@dataclass(frozen=True, slots=True)
class Known:
    """It is over. `same`: `reply` answered this very message; else another message of the same action."""

    reply: bytes
    same: bool


@dataclass(frozen=True, slots=True)
class NothingToUndo:
    """What is to be undone was never done, and from now on never will be: answer `done`."""


@dataclass(frozen=True, slots=True)
class Undone:
    """An undo of this message has begun: refuse it."""


Verdict: TypeAlias = Begin | Busy | Known | NothingToUndo | Undone


class Memory(Protocol):
    """Calls may come from any thread. `begin` decides and records in one step, for all processes."""

    def begin(self, errand: Errand, /) -> Verdict: ...

    def settle(self, errand: Errand, /, *, end: End, reply: bytes) -> bytes:
        """Keep the outcome before anybody hears of it. The first reply of a message wins and is returned."""
        ...

    def release(self, errand: Errand, /, *, acted: bool) -> None:
        """End a run that has no answer. `acted` is true when it may have done something."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Calls within, all of them from one thread, may become durable together when it ends.

        What one of them raises concerns no other. When the end raises, nothing is known to be kept.
        """
        ...

    def close(self) -> None: ...


TABLE: Final[LiteralString] = """
    create table if not exists message (
        sender    text    not null,
        message   text    not null,
        key       text,
        state     text    check (state in ('running', 'done', 'refused', 'failed')),
        acted     integer not null default 0,
        barred    integer not null default 0,
        owner     text,
        reply     blob,
        begun_at  text    not null default (datetime('now')),
        primary key (sender, message),
        check ((state = 'running') = (owner is not null)),
        check ((state in ('done', 'refused', 'failed')) = (reply is not null))
    )
"""
BY_KEY: Final[LiteralString] = "create index if not exists message_by_key on message (sender, key)"

OF_MESSAGE: Final[LiteralString] = """
    select message, key, state, acted, barred, owner, reply
      from message
     where sender = :sender
       and message = :message
"""
OF_KEY: Final[LiteralString] = """
    select message, key, state, acted, barred, owner, reply
      from message
     where sender = :sender
       and key = :key
     order by begun_at, message
"""
RUN: Final[LiteralString] = """
    insert into message (sender, message, key, state, owner)
    values (:sender, :message, :key, 'running', :owner)
        on conflict (sender, message) do update
       set key = excluded.key,
           acted = acted or state is 'running',
           state = 'running',
           owner = excluded.owner
"""
BAR: Final[LiteralString] = """
    insert into message (sender, message, barred)
    values (:sender, :undoes, 1)
        on conflict (sender, message) do update
       set barred = 1
"""
SETTLE: Final[LiteralString] = """
    insert into message (sender, message, key, acted, state, reply)
    values (:sender, :message, :key, :end <> 'refused', :end, :reply)
        on conflict (sender, message) do update
       set key = excluded.key,
           acted = case when barred then acted or state is 'running' else excluded.acted end,
           state = excluded.state,
           owner = null,
           reply = excluded.reply
     where reply is null
"""
RELEASE: Final[LiteralString] = """
    update message
       set state = null,
           acted = acted or :acted,
           owner = null
     where sender = :sender
       and message = :message
       and owner = :owner
"""
FORGET: Final[LiteralString] = """
    delete from message
     where begun_at < datetime(:before)
       and state is not 'running'
"""


@dataclass(frozen=True, slots=True)
class Row:
    message: str
    key: str | None
    state: str | None
    acted: int
    barred: int
    owner: str | None
    reply: bytes | None

    @property
    def may_have_acted(self) -> bool:
        return bool(self.acted) or self.state == "running"


class SqliteMemory:
    """The memory of every process that opens this file. It outlives them all.

    Nothing is forgotten by itself, since only the service knows for how long a saga may still undo something.
    Raises sqlite3.Error when the file cannot be read or written; then nothing was decided.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)
        self._owner = uuid4().hex
        self._mine: set[tuple[str, str]] = set()
        self._lock = threading.RLock()
        self._together = False
        self._sign_of_life = self._show_life()
        self._db = sqlite3.connect(self._path, timeout=5, isolation_level=None, check_same_thread=False)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = full")
        self._db.execute(TABLE)
        self._db.execute(BY_KEY)

    def begin(self, errand: Errand, /) -> Verdict:
        with self._transaction():
            verdict = self._judge(errand)
            if isinstance(verdict, Begin):
                self._db.execute(RUN, self._named(errand))
                self._mine.add((errand.sender, errand.message))
            return verdict

    def settle(self, errand: Errand, /, *, end: End, reply: bytes) -> bytes:
        try:
            with self._transaction():
                self._db.execute(SETTLE, {**self._named(errand), "end": end, "reply": reply})
                [row] = self._rows(OF_MESSAGE, sender=errand.sender, message=errand.message)
        finally:
            self._mine.discard((errand.sender, errand.message))
        assert row.reply is not None, "a settled message has a reply"
        return row.reply

    def release(self, errand: Errand, /, *, acted: bool) -> None:
        try:
            with self._transaction():
                self._db.execute(RELEASE, {**self._named(errand), "acted": acted})
        finally:
            self._mine.discard((errand.sender, errand.message))

    def forget(self, *, before: datetime) -> int:
        """Drop what came before `before` (aware) and is over; the number of messages dropped.

        A command whose message is forgotten counts as never done, so `before` must lie earlier than
        anything that a saga may still undo or send again.
        """
        with self._transaction():
            return self._db.execute(FORGET, {"before": before.isoformat()}).rowcount

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. Runs that still go on count as broken off from here on."""
        with self._lock:
            self._db.close()
            self._hide_life()

    def _judge(self, errand: Errand) -> Verdict:
        mine = self._rows(OF_MESSAGE, sender=errand.sender, message=errand.message)
        for row in mine:
            if row.reply is not None:
                return Known(row.reply, same=True)
        action = self._rows(OF_KEY, sender=errand.sender, key=errand.key)
        for row in action:
            if row.state == "done" and row.reply is not None:
                return Known(row.reply, same=False)
        if any(self._goes_on(errand.sender, row) for row in action):
            return Busy()
        if any(row.barred for row in (*mine, *action)):
            return Undone()
        again = any(row.may_have_acted for row in action)
        return Begin(again) if errand.undoes is None else self._judge_undo(errand, again=again)

    def _judge_undo(self, errand: Errand, *, again: bool) -> Verdict:
        original = self._rows(OF_MESSAGE, sender=errand.sender, message=errand.undoes)
        for key in keys_of(original, errand):
            original += self._rows(OF_KEY, sender=errand.sender, key=key)
        if any(self._goes_on(errand.sender, row) for row in original):
            return Busy()
        self._db.execute(BAR, self._named(errand))
        acted = any(row.may_have_acted for row in original)
        return Begin(again) if acted else NothingToUndo()

    def _goes_on(self, sender: str, row: Row) -> bool:
        if row.owner is None:
            return False
        if row.owner == self._owner:
            return (sender, row.message) in self._mine
        return is_held(Path(f"{self._path}.{row.owner}"))

    def _rows(self, statement: LiteralString, **named: object) -> list[Row]:
        return [Row(*columns) for columns in self._db.execute(statement, named)]

    def _named(self, errand: Errand) -> dict[str, Any]:
        return {
            "sender": errand.sender,
            "message": errand.message,
            "key": errand.key,
            "undoes": errand.undoes,
            "owner": self._owner,
        }

    @contextmanager
    def together(self) -> Generator[None]:
        """One transaction for all calls within: one write to the disk."""
        with self._lock:
            before = set(self._mine)
            try:
                with self._whole():
                    self._together = True
                    yield
            except BaseException:
                self._mine &= before  # what began within did not; what ended within is over all the same
                raise
            finally:
                self._together = False

    @contextmanager
    def _transaction(self) -> Generator[None]:
        with self._lock, self._part() if self._together else self._whole():
            yield

    @contextmanager
    def _whole(self) -> Generator[None]:
        self._db.execute("begin immediate")
        try:
            yield
            self._db.execute("commit")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("rollback")
            raise

    @contextmanager
    def _part(self) -> Generator[None]:
        """A part of a transaction, undone alone when it fails. Some errors end the whole: then nothing follows."""
        if not self._db.in_transaction:
            raise sqlite3.OperationalError("the transaction that this call belongs to has failed")
        self._db.execute("savepoint part")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("rollback to part")
            raise
        finally:
            if self._db.in_transaction:
                self._db.execute("release part")

    def _show_life(self) -> int | None:
        """Hold a file of our own for as long as we live, and clear away those of the dead."""
        ours = Path(f"{self._path}.{self._owner}")
        for other in ours.parent.glob(f"{glob.escape(Path(self._path).name)}.{'[0-9a-f]' * 32}"):
            is_held(other)
        while True:
            sign = os.open(ours, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(sign, fcntl.LOCK_EX)
            if ours.exists():
                return sign
            os.close(sign)  # somebody cleared it away before we held it

    def _hide_life(self) -> None:
        if self._sign_of_life is not None:
            with suppress(FileNotFoundError):
                Path(f"{self._path}.{self._owner}").unlink()
            os.close(self._sign_of_life)
            self._sign_of_life = None


def keys_of(original: Iterable[Row], undo: Errand) -> set[str]:
    """The keys of what `undo` undoes: also of messages for the same action that came before the one it names."""
    keys = {row.key for row in original if row.key is not None}
    return keys | ({undo.key.removesuffix(UNDO)} if undo.key.endswith(UNDO) else set())


def is_held(sign: Path) -> bool:
    """Whether a living process holds this sign of life. What a dead one left behind is removed."""
    try:
        found = os.open(sign, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        sign.unlink(missing_ok=True)
        return False
    finally:
        os.close(found)


class LocalMemory(SqliteMemory):
    """The same in this process only: gone when it ends. For tests, and for actions that may safely repeat."""

    def __init__(self) -> None:
        super().__init__(":memory:")

    def _show_life(self) -> int | None:
        return None
