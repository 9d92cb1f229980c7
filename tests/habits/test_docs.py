"""What the documents say is so: their examples run, their commands exist, their tables are those of the code."""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Final, cast

import pytest

from orchestrator import Context
from orchestrator.cli.arguments import parser
from orchestrator.cli.output import Exit
from orchestrator.core.errors import FAULTS
from orchestrator.core.status import TERMINAL, TRANSITIONS, Status
from orchestrator.settings import Settings, names
from tests.cli.processes import ROOT, running
from tests.habits.documents import DOCUMENTS, blocks, code_in, files_in, path_with, table, text_of

PACKAGES: Final = ("contracts", "relay", "receiver", "orchestrator", "migrations", "examples")

# ---- form ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_line_has_at_most_120_characters(document: str) -> None:
    lines = enumerate(text_of(document).splitlines(), 1)
    long = [number for number, line in lines if len(line) > 120 and " " in line.removeprefix("- ")]

    assert long == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    here = PurePosixPath(document).parent
    broken: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(document)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = str(here / path) if path else document
        there = (ROOT / found).exists() or is_made(found)
        if not there or (anchor and anchor not in anchors(found)):
            broken.append(target)

    assert broken == []


def is_made(path: str) -> bool:
    """Whether a file is written by `make bench`, so that a fresh clone may not have it."""
    return path.startswith("bench/RESULTS")


def anchors(document: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- README: the example ---------------------------------------------------------------------------------------


@pytest.fixture
def trip(tmp_path: Path) -> Path:
    """A folder with the files of the README's example."""
    for name, text in files_in("README.md").items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_the_readme_s_test_passes(trip: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(trip), "trip"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    ran = subprocess.run(
        command, cwd=trip, env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert ran.returncode == 0, ran.stdout
    assert "2 passed" in ran.stdout


def test_the_readme_s_trips_end_as_it_says(trip: Path, dsn: str) -> None:
    develop, use = (block for block in blocks("README.md", "sh") if re.search(r"waypost (dev|start) ", block))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    agency = trip / "trip/agency.py"
    agency.write_text(agency.read_text(encoding="utf-8").replace("8091", port), encoding="utf-8")
    environment = {
        "WAYPOST_DATABASE_URL": dsn,
        "WAYPOST_RECEIVER_ADDR": "127.0.0.1:0",
        "PATH": path_with(trip),
        "PYTHONPATH": str(ROOT),
    }
    server, client = re.search(r"python -m trip\.agency &", use), use.replace("8091", port)
    assert server is not None, use
    # What the shell leaves in the background it must also end; a person has the terminal for that.
    script = client.replace(server[0], f"{server[0]} trap 'kill $!' EXIT")
    register, trip_again = script.partition("waypost start")[0], '{"id": "t3", "city": "Rome"}'

    def shell(words: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", "-c", words]
        return subprocess.run(
            command, cwd=trip, env=environment, capture_output=True, text=True, timeout=90, check=False
        )

    with running(shlex.split(develop), environment=environment, output=trip / "dev.out", cwd=trip) as dev:
        dev.until_said(r"Ctrl-C stops")
        said = shell(script)
        again = shell(f"{register} waypost start trip --input '{trip_again}' --wait")
        ended = dev.end()

    outcomes = re.findall(r"^[0-9a-f-]{36}  (\w+)", said.stdout, re.MULTILINE)
    assert outcomes[:2] == ["completed", "compensated"], said.stdout + said.stderr
    assert len(re.findall(r"trip@1", said.stdout)) == 2, said.stdout
    assert again.returncode == 0, again.stdout + again.stderr
    assert ended == 0


# ---- README: commands, settings, the context -------------------------------------------------------------------


def synopses() -> list[str]:
    """The lines of the list of commands that begin a command, each with those that go on with options."""
    listed = "".join(block for block in blocks("docs/commands.md", "text") if block.startswith("waypost"))
    whole = re.sub(r"\n {6,}\[", " [", listed)
    return [line for line in whole.splitlines() if line.startswith("waypost")]


def verbs(
    of: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Each command with its parser, by its words."""
    subs = [action for action in of._actions if action.nargs == argparse.PARSER]
    if not subs:
        yield words, of
    for action in subs:
        choices = cast("dict[str, argparse.ArgumentParser]", action.choices)
        for name, sub in choices.items():
            yield from verbs(sub, (*words, name))


def words_of(line: str) -> tuple[str, ...]:
    """The words of a command before its arguments and options."""
    found = re.match(r"waypost((?: [a-z][a-z-]*)+)", line)
    assert found is not None, line
    return tuple(found[1].split())


def test_every_command_is_listed_with_every_option() -> None:
    listed = {words_of(line): line for line in synopses()}
    found = dict(verbs(parser()))

    assert sorted(listed) == sorted(found)
    for words, line in listed.items():
        given = set(re.findall(r"(?<!\w)(--[a-z-]+|-o)", line))
        offered = {
            "-o" if "-o" in action.option_strings else action.option_strings[-1]
            for action in found[words]._actions
            if action.option_strings and "--help" not in action.option_strings
        }
        assert given == offered, line
        required = [
            action.metavar or action.dest for action in found[words]._actions if not action.option_strings
        ]
        for positional in required:
            assert str(positional).upper() in line, line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_in_a_shell_block_is_understood(document: str) -> None:
    for block in blocks(document, "sh"):
        for line in re.findall(r"(?:^|\$\(|\|\| )(waypost [^)>\n]+)", block, re.MULTILINE):
            try:
                parser().parse_args(shlex.split(line)[1:])
            except SystemExit:
                pytest.fail(f"{document}: {line!r} is not understood")


def test_every_exit_code_is_told() -> None:
    said = text_of("docs/commands.md").partition("Exit codes:")[2].partition("\n\n")[0]

    assert {int(code) for code in re.findall(r"\d+", said)} == {int(code) for code in Exit}


def shown(value: object) -> str:
    """A default as the README's table has it."""
    match value:
        case None | ():
            return "\N{EN DASH}"
        case timedelta():
            return f"`{int(value.total_seconds())}s`"
        case _:
            return f"`{value}`"


def test_the_readme_s_settings_are_those_of_the_code() -> None:
    listed = {code_in(cells[0])[0]: cells[1] for cells in table("README.md", "name")}
    defaults = {field.alias: shown(field.default) for field in Settings.model_fields.values()}

    assert listed == defaults


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_environment_name_in_a_document_exists(document: str) -> None:
    known = {*names(), "WAYPOST_DEBUG"}
    found = {name.removesuffix("_FILE") for name in re.findall(r"WAYPOST_[A-Z_]*[A-Z]", text_of(document))}

    assert found - known == set()


def test_the_readme_names_all_that_a_flow_may_ask() -> None:
    [listed] = [block for block in blocks("README.md", "text") if "ctx." in block]
    asked = {name for name, what in vars(Context).items() if callable(what) and not name.startswith("_")}

    assert set(re.findall(r"ctx\.(\w+)", listed)) == asked


# ---- ARCHITECTURE ----------------------------------------------------------------------------------------------


def test_the_table_of_states_is_that_of_the_code() -> None:
    listed = {code_in(cells[0])[0]: code_in(cells[1]) for cells in table("ARCHITECTURE.md", "stored status")}
    moves = {
        str(status): [str(to) for to in Status if to in TRANSITIONS[status] and to is not status]
        for status in Status
    }

    assert listed == moves
    assert all(not TRANSITIONS[status] for status in TERMINAL)


def test_the_states_of_a_message_are_those_of_the_table() -> None:
    schema = text_of("migrations/0024_lanes.sql").partition("alter table waypost.outbox")[2]
    check = re.search(r"constraint state_is_known check \(state in\s*\(([^)]+)\)", schema)
    assert check is not None
    listed = [code_in(cells[0])[0] for cells in table("ARCHITECTURE.md", "state of a message")]

    assert listed == re.findall(r"'(\w+)'", check[1])


def test_the_tables_are_those_of_the_migrations() -> None:
    scripts = sorted(path.name for path in (ROOT / "migrations").glob("*.sql"))
    made = [
        name
        for script in scripts
        for name in re.findall(r"create table waypost\.(\w+)", text_of(f"migrations/{script}"))
    ]
    listed = [name for cells in table("ARCHITECTURE.md", "table") for name in code_in(cells[0])]

    assert sorted(listed) == sorted([*made, "migration"])


def test_the_codemap_names_every_file() -> None:
    there = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".sql", ".mjs"} and path.name != "__init__.py"
    }

    assert mapped() == there


def mapped() -> set[str]:
    """The files of the code map: a line `folder/` or `file  words`, indented below its folder."""
    [tree] = [block for block in blocks("ARCHITECTURE.md", "text") if block.startswith("contracts/")]
    files: set[str] = set()
    folders: list[str] = []
    for line in tree.splitlines():
        found = re.match(r"( *)(\S+)", line)
        if found is None:
            continue
        depth = len(found[1]) // 2
        folders = folders[:depth]
        if found[2].endswith("/"):
            folders.append(found[2])
        else:
            files.add("".join(folders) + found[2])
    return files


def test_the_readme_names_every_exception_that_is_a_bug() -> None:
    said = text_of("README.md").partition("A bug\n(")[2].partition(")")[0]

    assert set(code_in(said)) == {fault.__name__ for fault in FAULTS}


# ---- CHANGELOG -------------------------------------------------------------------------------------------------


def test_the_changelog_names_every_migration() -> None:
    there = {path.stem for path in (ROOT / "migrations").glob("*.sql")}

    assert set(re.findall(r"`(\d{4}_\w+)`", text_of("CHANGELOG.md"))) == there


# ---- guarantees ------------------------------------------------------------------------------------------------


def named_in(document: str) -> list[tuple[str, str]]:
    """File and function of each `path::test` in a document."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text_of(document))


def test_every_test_that_a_guarantee_names_exists() -> None:
    named = named_in("docs/guarantees.md")
    missing = [f"{path}::{name}" for path, name in named if name not in functions_of(path)]

    assert missing == []


def functions_of(path: str) -> set[str]:
    if not (ROOT / path).exists():
        return set()
    return {
        node.name
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_guarantee_names_a_test() -> None:
    guarantees = re.split(r"^### ", text_of("docs/guarantees.md"), flags=re.MULTILINE)[1:]

    assert len(guarantees) > 10
    for guarantee in guarantees:
        assert re.search(r"`tests/[\w/]+\.py::\w+`", guarantee), guarantee.partition("\n")[0]
