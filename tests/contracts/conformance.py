"""Where other projects' conformance data lies: beside the repository, or as WAYPOST_CONFORMANCE says."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]


def folder() -> Path:
    return Path(os.environ.get("WAYPOST_CONFORMANCE") or ROOT.parent / "shared" / "conformance")


def events(name: str) -> list[Any]:
    """The tests of a file of events, as pytest parameters; one that is skipped when the file is not here."""
    path = folder() / "cloudevents" / name
    if not path.is_file():
        return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=f"{path} is not here"))]
    tests = json.loads(path.read_text("utf-8-sig"))["tests"]
    return [pytest.param(test["event"], id=test["id"]) for test in tests]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A request of the HTTP binding's suite, and the event that it is."""

    head: list[str]
    """The lines of the request before the empty one, without Content-Length: the suite's own is off by its blanks."""
    body: bytes
    attributes: dict[str, str]
    data: Any

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [(name, value.strip()) for name, _, value in (line.partition(":") for line in self.head[1:])]


def scenarios() -> list[Any]:
    """The scenarios of the HTTP binding, one for each example, as pytest parameters; else one that is skipped."""
    path = folder() / "cloudevents" / "http-protocol-binding.feature"
    if not path.is_file():
        return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=f"{path} is not here"))]
    outlines = re.split(r"^ *Scenario Outline: ", path.read_text("utf-8-sig"), flags=re.MULTILINE)[1:]
    return [
        pytest.param(scenario_of(text.replace("<contentType>", example)), id=f"{text.split()[0]} {example}")
        for text in outlines
        for example in cells_below(text, "Examples:")[1:]
    ]


def scenario_of(text: str) -> Scenario:
    request, data = (dedent(block) for block in re.findall(r'"""\n(.*?)\n *"""', text, re.DOTALL))
    head, _, body = request.partition("\n\n")
    lines = [line for line in head.splitlines() if not line.lower().startswith("content-length:")]
    pairs = (cell.split("|") for cell in cells_below(text, "Then the attributes are:")[1:])
    attributes = {name.strip(): value.strip() for name, value in pairs}
    return Scenario(lines, body.encode(), attributes, json.loads(data))


def cells_below(text: str, line: str) -> list[str]:
    """The rows of the table below `line`, without its outer bars."""
    rows = text.partition(line)[2].lstrip("\n").splitlines()
    found = takewhile(lambda row: row.startswith("|"), (row.strip() for row in rows))
    return [row.strip("|").strip() for row in found]
