"""compose.yaml says only what the command understands, and what it says works when it is run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from orchestrator.cli import COMMANDS
from orchestrator.cli.arguments import parser
from orchestrator.settings import Settings, names
from tests.cli.processes import ROOT, running, waypost

COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: Final[dict[str, dict[str, Any]]] = COMPOSE["services"]
KEY: Final = "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="

ROLES: Final = sorted(n for n, it in SERVICES.items() if it["image"] == "waypost" and "entrypoint" not in it)
MODULES: Final = sorted(n for n, it in SERVICES.items() if it.get("entrypoint", [])[:2] == ["python", "-m"])


def environment_of(name: str, dsn: str) -> dict[str, str]:
    """What compose gives a service, with this machine in the place of compose's network."""
    given = {key: str(value) for key, value in SERVICES[name].get("environment", {}).items()}
    here = {
        "WAYPOST_DATABASE_URL": dsn,
        "WAYPOST_SECRET_KEY": KEY,
        "WAYPOST_RECEIVER_ADDR": "127.0.0.1:0",
        "WAYPOST_HEALTH_ADDR": "127.0.0.1:0",
    }
    return {key: here.get(key, value) for key, value in given.items()}


def test_there_is_a_service_for_every_role() -> None:
    assert ROLES == ["migrate", "receiver", "relay", "worker"]
    assert MODULES == ["inventory", "payments", "shipping"]
    assert {"postgres", "register"} == set(SERVICES) - set(ROLES) - set(MODULES)


@pytest.mark.parametrize("name", ROLES)
def test_each_command_is_one_of_ours(name: str) -> None:
    command = SERVICES[name]["command"]

    assert command[0] in COMMANDS
    assert parser().parse_args(command)


@pytest.mark.parametrize("name", MODULES)
def test_each_module_is_there(name: str) -> None:
    assert importlib.util.find_spec(SERVICES[name]["entrypoint"][2]) is not None


@pytest.mark.parametrize("name", ROLES)
def test_each_setting_is_known_and_sound(name: str) -> None:
    given = environment_of(name, "postgresql://waypost:waypost@postgres/waypost")

    assert set(given) <= set(names())
    assert Settings.from_environment(given).receiver_url == "http://receiver:8081"


def test_services_start_when_what_they_need_is_there() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES, f"{name} waits for {other}"
            ends = SERVICES[other].get("restart") == "no"
            expected = "service_completed_successfully" if ends else "service_healthy"
            assert how["condition"] == expected, f"{name} waits for {other}"


@pytest.mark.parametrize("name", ROLES)
def test_each_command_runs(name: str, dsn: str, tmp_path: Path) -> None:
    command = waypost(*SERVICES[name]["command"])
    with running(command, environment=environment_of(name, dsn), output=tmp_path / "out") as process:
        process.until_said(rf"{name}.started|up to date")

        ends = SERVICES[name].get("restart") == "no"
        code = process.process.wait(30) if ends else process.end()

    assert code == 0, process.said()


def test_the_services_are_registered_once_and_run_with_what_they_were_given(dsn: str, tmp_path: Path) -> None:
    shop, binaries = tmp_path / "shop", tmp_path / "bin"
    shop.mkdir()
    binaries.mkdir()
    for program, does in (("waypost", f'exec {" ".join(waypost())} "$@"'), ("chown", "true")):
        (binaries / program).write_text(f"#!/bin/sh\n{does}\n")
        (binaries / program).chmod(0o755)
    environment = {
        **environment_of("register", dsn),
        "SHOP": str(shop),
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    [script] = SERVICES["register"]["command"]
    command = [*SERVICES["register"]["entrypoint"], script.replace("$$", "$")]

    def register() -> dict[str, str]:
        subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True)
        return {path.name: path.read_text() for path in shop.iterdir()}

    first, second = register(), register()

    assert first == second
    assert set(first) == {f"{name}.{kind}" for name in MODULES for kind in ("command", "reply")}
    for name in MODULES:
        given = {
            key: re.sub(r"^/shop", str(shop), value).replace("0.0.0.0:8090", "127.0.0.1:0")
            for key, value in SERVICES[name]["environment"].items()
        }
        module = [sys.executable, *SERVICES[name]["entrypoint"][1:]]
        with running(module, environment=given, output=tmp_path / name) as process:
            process.until_said(rf"{name} listens on http://127\.0\.0\.1:\d+/waypost")

            assert process.end() == 0
