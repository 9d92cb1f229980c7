"""What tests of the command share: an environment on a fresh database, and a way to run commands in it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from orchestrator.cli import main

KEY = "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="


@dataclass(frozen=True, slots=True)
class Said:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Said]
RunIn = Callable[..., Said]


def environment_of(dsn: str) -> dict[str, str]:
    return {
        "WAYPOST_DATABASE_URL": dsn,
        "WAYPOST_SECRET_KEY": KEY,
        "WAYPOST_FLOWS": "examples.shop.flows",
        "WAYPOST_ALLOW_ADDRESSES": "127.0.0.0/8",
        "WAYPOST_LEASE": "2s",
        "WAYPOST_RECEIVER_ADDR": "127.0.0.1:0",
    }


@pytest.fixture
def environment(dsn: str) -> dict[str, str]:
    return environment_of(dsn)


@pytest.fixture
def run_in(capfd: pytest.CaptureFixture[str]) -> RunIn:
    """Run a command in a given environment."""

    def run(environment: Mapping[str, str], *arguments: str) -> Said:
        capfd.readouterr()
        try:
            code = main(arguments, environment)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        if code:  # a part that fails may be half way into a connection: with it a database is dropped after a minute
            gc.collect()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Said(code, out, err)

    return run


@pytest.fixture
def run(run_in: RunIn, environment: Mapping[str, str]) -> Run:
    """Run a command on the test's own database."""
    return lambda *arguments: run_in(environment, *arguments)
