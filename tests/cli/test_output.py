"""What is printed for people cannot do anything to their terminal."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from orchestrator.cli.output import ago, as_json, plain, table

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
HOSTILE = "a\x1b[31m\r\nb\x9b\u202e\u2028\x00\x7f\ud800"


def test_a_hostile_value_is_one_line_of_visible_characters() -> None:
    assert plain(HOSTILE).isprintable()
    assert plain(HOSTILE).startswith("a\\x1b[31m\\r\\nb")


def test_letters_of_every_alphabet_stay() -> None:
    assert plain("заказ 注文 ✔") == "заказ 注文 ✔"


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


def test_no_time_is_nothing() -> None:
    assert ago(None, now=NOON) == ""
