"""The page about receiving webhooks: its example runs, with every part, as it says."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.cli.processes import ROOT, running
from tests.habits.documents import blocks, files_in, path_with
from tests.waiting import until_true

PAGE: Final = "docs/receiving.md"


@pytest.mark.proof
def test_webhooks_of_github_start_the_page_s_flow(tmp_path: Path, dsn: str) -> None:
    source = tmp_path / "hooks/flows.py"
    source.parent.mkdir()
    source.write_text(files_in(PAGE)["hooks/flows.py"], encoding="utf-8")
    [develop] = [block for block in blocks(PAGE, "sh") if block.startswith("waypost dev")]
    [use] = [block for block in blocks(PAGE, "sh") if "simulate provider" in block]
    environment = {
        "WAYPOST_DATABASE_URL": dsn,
        "WAYPOST_RECEIVER_ADDR": "127.0.0.1:0",
        "PATH": path_with(tmp_path),
        "PYTHONPATH": str(ROOT),
    }

    def shell(words: str) -> str:
        command = ["sh", "-c", words]
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=True
        )
        return ran.stdout

    def both_are_completed() -> bool:
        return len(re.findall(r"triage@1 .*completed", shell("waypost list"))) == 2

    with running(
        shlex.split(develop), environment=environment, output=tmp_path / "dev.out", cwd=tmp_path
    ) as dev:
        dev.until_said(r"Ctrl-C stops")
        assert "2 events and 0 copies: 2 accepted" in shell(use)
        until_true(both_are_completed, what="two executions that issues began")
        assert dev.end() == 0
