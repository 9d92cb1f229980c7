"""What is printed for people cannot do anything to their terminal."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from orchestrator.cli.advice import answers, due
from orchestrator.cli.arguments import parser
from orchestrator.cli.local import Progress
from orchestrator.cli.output import ago, as_json, plain, say, table
from orchestrator.store.reading import MessageRow
from orchestrator.store.tries import TryRow

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
HOSTILE = "a\x1b[31m\r\nb\x9b\u202e\u2028\x00\x7f\ud800"


def test_a_hostile_value_is_one_line_of_visible_characters() -> None:
    assert plain(HOSTILE).isprintable()
    assert plain(HOSTILE).startswith("a\\x1b[31m\\r\\nb")


def test_a_folder_with_a_hostile_name_reaches_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Progress().line(f"The data stays in {HOSTILE}.")

    assert capsys.readouterr().err.removesuffix("\n").isprintable()


def test_letters_of_every_alphabet_stay() -> None:
    assert plain("заказ 注文 ✔") == "заказ 注文 ✔"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(("endpoint", "enable", "\udcff"), "NAME: expected printable UTF-8 text", id="name"),
        pytest.param(
            ("outbox", "list", "--endpoint", "\udcff"), "--endpoint: expected printable", id="filter"
        ),
        pytest.param(("inbox", "redrive", "q1", "--by", "\x1b"), "--by: expected printable", id="person"),
        pytest.param(("delivery", "replay", "7"), "MESSAGE: expected a message's id", id="messages"),
        pytest.param(("dlq", "show", "7"), "MESSAGE: expected a message's id, found '7'", id="message"),
    ],
)
def test_an_argument_that_is_no_text_is_named(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(arguments)

    assert expected in capsys.readouterr().err


def test_an_output_that_takes_no_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.stdout, "write", full)

    with pytest.raises(OSError, match="No space left on device: 'stdout'"):
        say("data")


def test_json_is_ascii_and_reads_back() -> None:
    text = as_json({"key": HOSTILE, "id": UUID(int=1), "at": NOON, "took": timedelta(seconds=1.5)})

    assert text.replace("\n", "").isprintable()
    assert text.isascii()
    assert json.loads(text) == {
        "key": HOSTILE,
        "id": str(UUID(int=1)),
        "at": NOON.isoformat(),
        "took": 1.5,
    }


def test_a_table_has_one_line_for_each_row_whatever_is_in_it() -> None:
    lines = table(("KEY", "STATE"), [(HOSTILE, "ready"), ("", "waiting")]).split("\n")

    assert [line.split()[-1] for line in lines] == ["STATE", "ready", "waiting"]
    assert lines[2].startswith("- ")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "now"), (5, "5 s"), (90, "1 m"), (7300, "2 h"), (200_000, "2 d"), (-10, "in 10 s")],
)
def test_time_is_said_as_people_say_it(seconds: float, said: str) -> None:
    assert ago(NOON - timedelta(seconds=seconds), now=NOON) == said


def test_a_moment_that_has_passed_is_due() -> None:
    assert due(NOON - timedelta(seconds=20), now=NOON) == "due 20 s ago"
    assert due(NOON + timedelta(seconds=20), now=NOON) == "in 20 s"
    assert due(NOON, now=NOON) == "now"


def test_a_table_is_cut_to_the_terminal() -> None:
    assert table(("A", "B"), [("a", "b" * 100)], width=10).split("\n")[1] == "a  bbbbbb…"


def test_equal_tries_are_counted_and_the_next_one_is_said() -> None:
    one = TryRow("m", "charge", 1, NOON, timedelta(0), "retry", None, "connection-refused")
    message = MessageRow(
        message_id="m",
        path="charge",
        endpoint="bank",
        state="due",
        attempts=3,
        reached=False,
        replied=False,
        due_at=NOON + timedelta(seconds=9),
        expires_at=None,
        lease_until=None,
        tried=None,
        outcome=None,
        http_status=None,
        error_code=None,
        tried_at=None,
        took=None,
    )

    said = answers(message, [one, one, replace(one, status=503, error_code=None)], now=NOON)

    assert said == "connection-refused \N{MULTIPLICATION SIGN}2, 503, next in 9 s"


def test_no_time_is_nothing() -> None:
    assert ago(None, now=NOON) == ""
