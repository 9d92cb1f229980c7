"""Where other projects' conformance data lies: beside the repository, or as WAYPOST_CONFORMANCE says."""

from __future__ import annotations

import json
import os
from pathlib import Path
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
