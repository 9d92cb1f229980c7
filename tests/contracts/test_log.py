"""A line of the log is one JSON object in ASCII, whatever a stranger put into its fields."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from uuid import UUID

from contracts.log import FIELD_CHARACTERS_MAX, JsonLines
from contracts.signature import Secret

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


def line_of(**fields: object) -> str:
    lines: list[str] = []
    JsonLines(lines.append, part="relay", now=lambda: NOON).saw("something.happened", **fields)
    [line] = lines
    return line


def test_a_line_says_when_who_and_what() -> None:
    assert json.loads(line_of(count=3)) == {
        "time": "2026-11-30T12:00:00+00:00",
        "part": "relay",
        "event": "something.happened",
        "count": 3,
    }


def test_hostile_text_cannot_forge_a_line_or_paint_a_terminal() -> None:
    line = line_of(name='a\n{"event": "forged"}\x1b[31m\x9b\u202e\ud800')

    assert line.isascii()
    assert line.count("\n") == 1
    assert not any(ord(character) < 32 for character in line[:-1])


def test_a_field_cannot_take_the_place_of_another() -> None:
    line = json.loads(line_of(event="x", time="y"))

    assert (line["event"], line["event_"], line["time_"]) == ("something.happened", "x", "y")


def test_a_secret_shows_itself_nowhere() -> None:
    secret = Secret.of(b"k" * 32)

    assert secret.text not in line_of(secret=secret, several=[secret])


def test_a_long_field_is_cut_and_an_error_keeps_its_end() -> None:
    line = json.loads(line_of(text="x" * 9999, error=ValueError("y" * 9999 + "the end"), odd=float("nan")))

    assert len(line["text"]) == len(line["error"]) == FIELD_CHARACTERS_MAX + 1
    assert line["error"].endswith("the end\n")
    assert line["odd"] == "nan"


def test_a_log_that_cannot_be_written_disturbs_nobody() -> None:
    def closed(_: str) -> None:
        raise BrokenPipeError

    JsonLines(closed, part="relay", now=lambda: NOON).saw("something.happened")


def test_an_identifier_is_written_as_itself() -> None:
    message = UUID("019b2c4f-3f00-7d54-8f12-9b3a50c1d2e3")

    assert json.loads(line_of(message=message))["message"] == str(message)
