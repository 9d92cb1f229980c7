"""The page about versions: its flow is changed as it says, and the commands say what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Final

import pytest

from orchestrator.replays import Would
from tests.cli.conftest import environment_of
from tests.cli.processes import ROOT, running, waypost
from tests.habits.documents import blocks, code_in, files_in, path_with, table
from tests.waiting import until_true

PAGE: Final = "docs/versions.md"
OLD, CHANGED, BOTH, PATCHED = (f"trip/flows.py{how}" for how in ("", ", changed", ", both", ", patched"))


class Team:
    """Somebody who reads the page, in a folder of their own."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        self.environment = {
            **environment_of(dsn),
            "PATH": path_with(folder),
            "HOME": os.environ.get("HOME", ""),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "WAYPOST_FLOWS": "trip.flows",
            "WAYPOST_HEALTH_ADDR": "off",
        }
        (folder / "trip").mkdir()

    def writes(self, name: str) -> None:
        (self.folder / "trip/flows.py").write_text(files_in(PAGE)[name], encoding="utf-8")

    def says(self, words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", words], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip

    def works(self, output: str) -> None:
        """A worker runs until it has taken a turn of what is there, and ends."""
        with running(
            waypost("worker"), environment=self.environment, output=self.folder / output, cwd=self.folder
        ) as worker:
            worker.until_said(r'"event": "worker.started"')
            until_true(self.has_asked, what="a wait for an event")
            assert worker.end() == 0

    def has_asked(self) -> bool:
        """Whether the trip was claimed, and waits for what it asked."""
        return "waiting" in self.says("waypost list").stdout


@pytest.fixture
def team(tmp_path: Path, dsn: str) -> Team:
    return Team(tmp_path, dsn)


def plain(text: str) -> str:
    """Without what differs each time: ids, fingerprints, ages, and spaces that follow from them."""
    text = re.sub(r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b", "ID", text)
    text = re.sub(r"\b[0-9a-f]{8}\b", "CODE", text)
    return re.sub(r" +", " ", re.sub(r"(now|\d+ [smhd])$", "AGE", text, flags=re.MULTILINE)).strip()


@pytest.mark.proof
def test_a_flow_is_changed_as_the_page_says(team: Team) -> None:
    refused, check, share, listing, whole = blocks(PAGE, "sh")
    told, found, listed = blocks(PAGE, "text")

    team.writes(OLD)
    assert team.says("""waypost start trip --input '"Rome"' --key Rome""").returncode == 0
    team.works("first.out")

    team.writes(CHANGED)
    no = team.says(refused)
    assert no.returncode == 1
    assert no.stderr.startswith(told.strip().removesuffix("…")), no.stderr
    differs = team.says(check)
    assert differs.returncode == 1
    assert sorted(plain(differs.stdout + differs.stderr).splitlines()) == sorted(plain(found).splitlines())

    team.writes(PATCHED)
    agrees = team.says(check)
    assert (agrees.returncode, agrees.stdout) == (0, ""), agrees.stdout

    team.writes(BOTH)
    shared = team.says(share)
    assert shared.returncode == 0, shared.stdout + shared.stderr
    with running(
        waypost("worker"), environment=team.environment, output=team.folder / "both.out", cwd=team.folder
    ) as worker:
        worker.until_said(r'"event": "worker.started"')
        assert plain(team.says(listing).stdout) == plain(listed)
        assert worker.end() == 0
    assert team.says(f"set -e; {whole}").returncode == 0


def test_the_answers_of_check_replay_are_those_of_the_page() -> None:
    listed = [code_in(cells[0]) for cells in table(PAGE, "it says")]

    assert {name for names in listed for name in names} == {
        str(would) for would in Would if would is not Would.GO_ON
    }


def test_the_commands_of_the_page_name_the_module_of_its_flow() -> None:
    for line in (
        line for block in blocks(PAGE, "sh") for line in block.splitlines() if "check-replay" in line
    ):
        assert "trip.flows" in shlex.split(line)
