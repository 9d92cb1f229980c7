"""docs/flows-people.md: each section has an example that runs with its test, all options, guarantees and limits."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from orchestrator import Context
from tests.cli.processes import ROOT
from tests.habits.documents import blocks, cells_of, code_in, files_in, text_of

PAGE: Final = "docs/flows-people.md"
SECTIONS: Final[dict[str, str]] = dict(
    re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", text_of(PAGE), re.MULTILINE | re.DOTALL)
)

each_section = pytest.mark.parametrize("name", SECTIONS)


@each_section
def test_a_section_has_an_example_its_test_guarantees_and_limits(name: str) -> None:
    assert {f"shop/{name}.py", f"shop/test_{name}.py"} <= set(files_in(PAGE))
    assert re.findall(r"^\*\*(Guarantees|Limits)\.\*\*$", SECTIONS[name], re.MULTILINE) == [
        "Guarantees",
        "Limits",
    ]


@pytest.mark.parametrize("name", [name for name in SECTIONS if hasattr(Context, name)])
def test_a_section_tells_every_option_of_its_primitive(name: str) -> None:
    rows = SECTIONS[name].partition("| option |")[2].partition("\n\n")[0].splitlines()[2:]
    signature = inspect.signature(getattr(Context, name))
    options = [it.name for it in signature.parameters.values() if it.kind is inspect.Parameter.KEYWORD_ONLY]

    assert f"ctx.{name}(" in files_in(PAGE)[f"shop/{name}.py"]
    assert [code_in(cells_of(row)[0])[0] for row in rows] == options


def test_the_examples_pass_their_tests(tmp_path: Path) -> None:
    for name, text in files_in(PAGE).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "shop",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    tests = sum(text.count("\ndef test_") for text in files_in(PAGE).values())
    assert ran.returncode == 0, ran.stdout
    assert f"{tests} passed" in ran.stdout


@pytest.mark.postgres
@pytest.mark.parametrize("query", blocks(PAGE, "sql"))
async def test_a_query_is_answered(conn: psycopg.AsyncConnection[Any], query: str) -> None:
    cursor = await conn.execute(query.encode())

    assert await cursor.fetchall() == []
