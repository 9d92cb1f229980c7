"""Reading the documents as data: their code blocks, tables, links and names."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.cli.processes import ROOT, waypost

DOCUMENTS: Final = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
)


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(document), re.MULTILINE | re.DOTALL)


def files_in(document: str) -> dict[str, str]:
    """The Python blocks by the file that their first line names."""
    return {
        block.partition("\n")[0].removeprefix("# ").strip(): block for block in blocks(document, "python")
    }


def table(document: str, heading: str) -> list[list[str]]:
    """The cells of the rows of the table that begins with the column `heading`, without its two first lines."""
    lines = iter(text_of(document).splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            return [cells_of(row) for row in rows_until_end(lines)]
    raise AssertionError(f"{document}: no table whose first column is {heading!r}")


def rows_until_end(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield line


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split(" | ")]


def code_in(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def path_with(folder: Path) -> str:
    """A PATH on which `waypost` and `python` are those of this run; they lie in `folder`."""
    binaries = folder / "bin"
    binaries.mkdir()
    for program, command in (("waypost", waypost()), ("python", [sys.executable])):
        (binaries / program).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
        (binaries / program).chmod(0o755)
    return f"{binaries}:{os.environ['PATH']}"
