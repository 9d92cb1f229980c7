"""What is asked of a memory while it writes goes together into its next transaction."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from receiver.memory import RUN, Begin, Busy, Errand, Known, SqliteMemory
from receiver.remembering import Remembering

CHARGES = [Errand("/waypost", f"e{n}/0/charge", f"m{n}") for n in range(4)]


class Slow(SqliteMemory):
    """Writes when it is let, and counts its transactions. It may `fail` to write, or fail to say that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.let = threading.Event()
        self.transactions = 0
        self.fail: Literal["before", "after", ""] = ""

    @contextmanager
    def together(self) -> Generator[None]:
        self.let.wait(timeout=30)
        with super().together():
            yield

    @contextmanager
    def _whole(self) -> Generator[None]:
        with super()._whole():
            yield
            self.transactions += 1
            self._fail("before")
        self._fail("after")

    def _fail(self, when: str) -> None:
        if self.fail == when:
            raise sqlite3.OperationalError("disk I/O error")

    def begin_and_raise(self, errand: Errand) -> None:
        with self._transaction():
            self._db.execute(RUN, {**self._named(errand), "owner": "somebody"})
            raise ZeroDivisionError


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Slow]:
    made = Slow(tmp_path / "memory.sqlite")
    yield made
    made.close()


@pytest.fixture
def remembering(memory: Slow) -> Iterator[Remembering]:
    made = Remembering(memory, name="test")
    yield made
    memory.let.set()
    made.close()


async def test_what_is_asked_meanwhile_goes_together(memory: Slow, remembering: Remembering) -> None:
    asking = [asyncio.create_task(remembering.ask(partial(memory.begin, charge))) for charge in CHARGES]
    await asyncio.sleep(0)  # each has asked: the first one's transaction waits, the others wait for it
    memory.let.set()

    assert await asyncio.gather(*asking) == [Begin(again=False)] * 4
    assert memory.transactions == 2


async def test_the_same_command_twice_in_one_transaction_begins_once(
    memory: Slow, remembering: Remembering
) -> None:
    twice = [CHARGES[0], CHARGES[1], CHARGES[1]]
    asking = [asyncio.create_task(remembering.ask(partial(memory.begin, charge))) for charge in twice]
    await asyncio.sleep(0)
    memory.let.set()

    assert await asyncio.gather(*asking) == [Begin(again=False), Begin(again=False), Busy()]


async def test_one_that_raises_keeps_nothing_and_concerns_no_other(
    memory: Slow, remembering: Remembering
) -> None:
    questions = [
        partial(memory.begin, CHARGES[0]),
        partial(memory.begin, CHARGES[1]),
        partial(memory.begin_and_raise, CHARGES[2]),
        partial(memory.settle, CHARGES[1], end="done", reply=b"r"),
    ]
    asking = [asyncio.create_task(remembering.ask(question)) for question in questions]
    await asyncio.sleep(0)
    memory.let.set()

    first, second, third, fourth = await asyncio.gather(*asking, return_exceptions=True)

    assert (first, second, fourth) == (Begin(again=False), Begin(again=False), b"r")
    assert isinstance(third, ZeroDivisionError)
    assert memory.begin(CHARGES[1]) == Known(b"r", same=True)
    assert memory.begin(CHARGES[2]) == Begin(again=False)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_transaction_that_fails_is_told_to_all_and_leaves_nothing_busy(
    memory: Slow, remembering: Remembering, when: Literal["before", "after"]
) -> None:
    """It may have been kept all the same; then what began counts as broken off."""
    memory.fail = when
    memory.let.set()
    asking = [remembering.ask(partial(memory.begin, charge)) for charge in CHARGES]

    told = await asyncio.gather(*asking, return_exceptions=True)
    memory.fail = ""

    assert [type(error) for error in told] == [sqlite3.OperationalError] * 4
    assert await remembering.ask(partial(memory.begin, CHARGES[0])) == Begin(again=when == "after")


async def test_what_has_ended_is_over_although_its_end_could_not_be_kept(
    memory: Slow, remembering: Remembering
) -> None:
    """Then it runs again, as something that may have acted."""
    memory.let.set()
    await remembering.ask(partial(memory.begin, CHARGES[0]))
    memory.fail = "before"
    with pytest.raises(sqlite3.OperationalError):
        await remembering.ask(partial(memory.settle, CHARGES[0], end="done", reply=b"r"))
    memory.fail = ""

    assert await remembering.ask(partial(memory.begin, CHARGES[0])) == Begin(again=True)


async def test_who_no_longer_waits_is_not_asked_for(memory: Slow, remembering: Remembering) -> None:
    first = asyncio.create_task(remembering.ask(partial(memory.begin, CHARGES[0])))
    second = asyncio.create_task(remembering.ask(partial(memory.begin, CHARGES[1])))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    memory.let.set()

    assert await first == Begin(again=False)
    assert await remembering.ask(partial(memory.begin, CHARGES[1])) == Begin(again=False)
