"""docs/flows.md: each primitive has an example that runs with its test, all its options, guarantees and limits."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from orchestrator import Context, Effect
from tests.cli.processes import ROOT
from tests.habits.documents import cells_of, code_in, files_in, table, text_of

PAGE: Final = "docs/flows.md"
SECTIONS: Final[dict[str, str]] = dict(
    re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", text_of(PAGE), re.MULTILINE | re.DOTALL)
)

COMPANIONS: Final = {"patched": ["deprecate_patch"], "now": ["uuid", "random"]}
"""What stands in the section of another primitive."""

PEOPLE: Final = {"approval"}
"""What docs/flows-people.md tells."""

each_section = pytest.mark.parametrize("name", SECTIONS)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for name, text in files_in(PAGE).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@each_section
def test_a_section_has_an_example_its_test_guarantees_and_limits(name: str) -> None:
    files = files_in(PAGE)

    assert {f"shop/{name}.py", f"shop/test_{name}.py"} <= set(files)
    for primitive in [name, *COMPANIONS.get(name, [])]:
        assert f"ctx.{primitive}(" in files[f"shop/{name}.py"]
    assert re.findall(r"^\*\*(Guarantees|Limits)\.\*\*$", SECTIONS[name], re.MULTILINE) == [
        "Guarantees",
        "Limits",
    ]


@each_section
def test_a_section_tells_every_option_of_its_primitive(name: str) -> None:
    rows = SECTIONS[name].partition("| option |")[2].partition("\n\n")[0].splitlines()[2:]
    signature = inspect.signature(getattr(Context, name))
    options = [it.name for it in signature.parameters.values() if it.kind is inspect.Parameter.KEYWORD_ONLY]

    assert [code_in(cells_of(row)[0])[0] for row in rows] == options


def test_every_primitive_has_a_section_and_a_need() -> None:
    primitives = {name for name, _ in inspect.getmembers(Context, callable) if not name.startswith("_")}
    told = {*SECTIONS, *(other for others in COMPANIONS.values() for other in others)}
    needed = [name for _, named in table(PAGE, "need") for name in code_in(named)]

    assert told == primitives - PEOPLE
    assert sorted(needed) == sorted(primitives)


def test_the_effects_of_a_step_are_those_of_the_code() -> None:
    rows = SECTIONS["step"].partition("| effect |")[2].partition("\n\n")[0].splitlines()[2:]
    named = {code_in(cells_of(row)[0])[0] for row in rows}

    assert named == {*(f"Effect.{effect.name}" for effect in Effect), "probe="}


def test_the_examples_pass_their_tests(shop: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(shop), "shop"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    ran = subprocess.run(
        command, cwd=shop, env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    tests = sum(text.count("\ndef test_") for text in files_in(PAGE).values())
    assert ran.returncode == 0, ran.stdout
    assert f"{tests} passed" in ran.stdout
