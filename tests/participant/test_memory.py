"""What a participant remembers decides whether a command acts: never twice, and never after its undo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from receiver.memory import (
    Begin,
    Busy,
    End,
    Errand,
    Known,
    LocalMemory,
    NothingToUndo,
    SqliteMemory,
    Undone,
)

CHARGE = Errand("/waypost", "e/0/charge", "m1")
REFUND = Errand("/waypost", "e/0/charge/undo", "u1", undoes="m1")
REFUND_AGAIN = Errand("/waypost", "e/0/charge/undo", "u2", undoes="m1")


@pytest.fixture(params=["sqlite", "local"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqliteMemory]:
    made = SqliteMemory(tmp_path / "memory.sqlite") if request.param == "sqlite" else LocalMemory()
    yield made
    made.close()


def test_a_new_command_may_begin(memory: SqliteMemory) -> None:
    assert memory.begin(CHARGE) == Begin(again=False)


def test_a_command_under_way_is_busy(memory: SqliteMemory) -> None:
    memory.begin(CHARGE)

    assert memory.begin(CHARGE) == Busy()


@pytest.mark.parametrize("end", ["done", "refused", "failed"])
def test_what_is_over_keeps_its_reply(memory: SqliteMemory, end: End) -> None:
    memory.begin(CHARGE)
    memory.settle(CHARGE, end=end, reply=b"r")

    assert memory.begin(CHARGE) == Known(b"r", same=True)


def test_the_first_reply_wins(memory: SqliteMemory) -> None:
    first = memory.settle(CHARGE, end="done", reply=b"first")
    second = memory.settle(CHARGE, end="refused", reply=b"second")

    assert (first, second) == (b"first", b"first")


def test_a_run_that_raised_may_run_again_and_says_that_it_may_have_acted(memory: SqliteMemory) -> None:
    memory.begin(CHARGE)
    memory.release(CHARGE, acted=True)

    assert memory.begin(CHARGE) == Begin(again=True)


def test_a_run_that_did_nothing_leaves_no_suspicion(memory: SqliteMemory) -> None:
    memory.begin(CHARGE)
    memory.release(CHARGE, acted=False)

    assert memory.begin(CHARGE) == Begin(again=False)


def test_another_sender_with_the_same_key_is_another_action(memory: SqliteMemory) -> None:
    memory.begin(CHARGE)
    memory.settle(CHARGE, end="done", reply=b"r")

    assert memory.begin(Errand("/other", CHARGE.key, CHARGE.message)) == Begin(again=False)


def test_another_message_of_an_action_that_is_done_gets_its_outcome(memory: SqliteMemory) -> None:
    memory.begin(CHARGE)
    memory.settle(CHARGE, end="done", reply=b"r")

    assert memory.begin(Errand(CHARGE.sender, CHARGE.key, "m2")) == Known(b"r", same=False)


@pytest.mark.parametrize("end", ["refused", "failed"])
def test_the_next_try_of_an_undo_that_went_wrong_runs(memory: SqliteMemory, end: End) -> None:
    memory.begin(CHARGE)
    memory.settle(CHARGE, end="done", reply=b"r")
    memory.begin(REFUND)
    memory.settle(REFUND, end=end, reply=b"no")

    assert memory.begin(REFUND_AGAIN) == Begin(again=end == "failed")


def test_an_undo_of_something_never_seen_has_nothing_to_do_and_bars_the_original(
    memory: SqliteMemory,
) -> None:
    undo = memory.begin(REFUND)
    original = memory.begin(CHARGE)

    assert (undo, original) == (NothingToUndo(), Undone())


def test_an_undo_of_something_refused_has_nothing_to_do(memory: SqliteMemory) -> None:
    memory.begin(CHARGE)
    memory.settle(CHARGE, end="refused", reply=b"no")

    assert memory.begin(REFUND) == NothingToUndo()


@pytest.mark.parametrize("end", ["done", "failed"])
def test_an_undo_of_something_that_may_have_acted_runs(memory: SqliteMemory, end: End) -> None:
    memory.begin(CHARGE)
    memory.settle(CHARGE, end=end, reply=b"r")

    assert memory.begin(REFUND) == Begin(again=False)


@pytest.mark.parametrize(
    ("end", "verdict"),
    [("failed", Begin(again=False)), ("refused", NothingToUndo())],
    ids=["gave-up", "refused"],
)
def test_an_undo_of_a_message_that_never_came_concerns_what_an_earlier_one_of_its_action_did(
    memory: SqliteMemory, end: End, verdict: object
) -> None:
    again, undo = replace(CHARGE, message="m2"), replace(REFUND, undoes="m2")
    memory.begin(CHARGE)
    memory.settle(CHARGE, end=end, reply=b"r")

    assert memory.begin(undo) == verdict
    assert memory.begin(again) == Undone()


def test_another_message_of_an_action_that_was_given_up_runs_and_is_told_so(memory: SqliteMemory) -> None:
    memory.begin(CHARGE)
    memory.settle(CHARGE, end="failed", reply=b"r")

    assert memory.begin(replace(CHARGE, message="m2")) == Begin(again=True)


def test_an_undo_waits_for_the_run_that_it_undoes(memory: SqliteMemory) -> None:
    memory.begin(CHARGE)
    while_it_runs = memory.begin(REFUND)
    memory.release(CHARGE, acted=True)
    after = memory.begin(REFUND)

    assert (while_it_runs, after) == (Busy(), Begin(again=False))


def test_once_an_undo_has_begun_the_original_never_runs_again(memory: SqliteMemory) -> None:
    memory.begin(CHARGE)
    memory.release(CHARGE, acted=True)
    memory.begin(REFUND)

    assert memory.begin(CHARGE) == Undone()


def test_refusing_the_original_does_not_make_its_next_undo_forget_that_it_may_have_acted(
    memory: SqliteMemory,
) -> None:
    memory.begin(CHARGE)
    memory.release(CHARGE, acted=True)
    memory.begin(REFUND)
    memory.settle(REFUND, end="failed", reply=b"no")
    memory.begin(CHARGE)
    memory.settle(CHARGE, end="refused", reply=b"undone")

    assert memory.begin(REFUND_AGAIN) == Begin(again=True)


def test_memory_outlives_its_process(tmp_path: Path) -> None:
    before = SqliteMemory(tmp_path / "memory.sqlite")
    before.begin(CHARGE)
    before.settle(CHARGE, end="done", reply=b"r")
    before.close()
    after = SqliteMemory(tmp_path / "memory.sqlite")

    found = after.begin(CHARGE)

    after.close()
    assert found == Known(b"r", same=True)


def test_a_run_of_another_living_process_is_busy_and_of_a_killed_one_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "memory.sqlite"
    program = (
        "import sys; from receiver.memory import *\n"
        "print(SqliteMemory(sys.argv[1]).begin(Errand('/waypost', 'e/0/charge', 'm1')), flush=True)\n"
        "sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert other.stdin is not None
    assert other.stdout is not None
    with other, SqliteMemory(path) as memory:
        assert other.stdout.readline() == b"Begin(again=False)\n"

        while_it_lives = memory.begin(CHARGE)
        other.kill()
        other.wait()
        after = memory.begin(CHARGE)

    assert (while_it_lives, after) == (Busy(), Begin(again=True))


def test_a_killed_process_leaves_no_file_behind_once_another_opens(tmp_path: Path) -> None:
    (tmp_path / f"memory.sqlite.{'0' * 32}").touch()

    with SqliteMemory(tmp_path / "memory.sqlite"):
        found = sorted(path.name for path in tmp_path.glob(f"memory.sqlite.{'?' * 32}"))

    assert len(found) == 1
    assert found != [f"memory.sqlite.{'0' * 32}"]


def test_what_is_forgotten_counts_as_never_done(memory: SqliteMemory) -> None:
    memory.begin(CHARGE)
    memory.settle(CHARGE, end="done", reply=b"r")

    dropped = memory.forget(before=datetime.now(UTC) + timedelta(days=1))

    assert dropped == 1
    assert memory.begin(CHARGE) == Begin(again=False)
