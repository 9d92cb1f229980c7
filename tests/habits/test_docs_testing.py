"""docs/testing.md: its example passes, and its tables name all that the kit has."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from orchestrator.testing import plugin
from orchestrator.testing.installation import Installation
from orchestrator.testing.service import Script
from tests.cli.processes import ROOT
from tests.habits.documents import blocks, code_in, files_in, table

PAGE: Final = "docs/testing.md"


def test_the_example_passes(tmp_path: Path) -> None:
    for name, text in files_in(PAGE).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    [ini] = blocks(PAGE, "ini")
    (tmp_path / "pytest.ini").write_text(ini, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "shop"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    tests = sum(text.count("def test_") for text in files_in(PAGE).values())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{tests} passed" in ran.stdout


@pytest.mark.parametrize(("heading", "of"), [("on `here`", Installation), ("word", Script)])
def test_all_that_a_test_may_say_is_told(heading: str, of: type) -> None:
    told = [code_in(row[0])[0].partition("(")[0] for row in table(PAGE, heading)]

    assert sorted(told) == sorted(
        name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_")
    )


def test_every_fixture_is_told() -> None:
    told = [code_in(row[0])[0] for row in table(PAGE, "fixture")]

    assert sorted(told) == sorted(name for name in vars(plugin) if name.startswith("waypost"))
