"""`waypost simulate`: what people and programs read of it, and what it refuses."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import pytest

from contracts.signature import Secret
from orchestrator.simulators.kinds import KINDS
from tests.cli.conftest import RunIn
from tests.cli.processes import running, waypost

SECRET = Secret.of(b"a secret of the endpoint, 24 bytes and more")


def test_an_endpoint_says_where_it_is_and_what_came_until_it_is_asked_to_stop(tmp_path: Path) -> None:
    command = waypost("simulate", "endpoint", "--secret-env", "BILLING", "--behaviour", "ok")
    environment = {"BILLING": SECRET.text}
    with running(command, environment=environment, output=tmp_path / "out") as process:
        url = json.loads(process.until_said(r"\{.*\}\n")[0])["url"]
        headers = {"webhook-id": "msg_1"}
        urllib.request.urlopen(urllib.request.Request(f"{url}/hook", b"hush", headers)).close()
        seen = json.loads(process.until_said(r"\{\"at.*\}\n")[0])
        code = process.end(signal.SIGTERM)

    assert code == 0
    assert (seen["path"], seen["behaviour"], seen["id"], seen["bytes"], seen["signature"]) == (
        *("/hook", "ok", "msg_1", 4, "missing"),
    )
    assert "hush" not in process.said()
    assert SECRET.text not in process.said()


def test_the_list_names_every_behaviour(run_in: RunIn) -> None:
    as_text = run_in({}, "simulate", "endpoint", "--list")
    as_json = run_in({}, "simulate", "endpoint", "--list", "-o", "json")

    assert [line.split()[0] for line in as_text.out.splitlines()[1:]] == [
        row["behaviour"] for row in as_json.json
    ]
    assert len(as_json.json) == len(KINDS)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--behaviour", "banana"], "behaviour: expected one of ok, status, flaky"),
        (["--addr", "nowhere"], "expected HOST:PORT such as 127.0.0.1:8081, found 'nowhere'"),
        (
            ["--secret-env", "NOBODY"],
            "secret: expected one in the variable NOBODY of the environment, found none",
        ),
        (["--secret-env", "NONSENSE"], "secret: expected whsec_ and base64, found other characters"),
        (["--script", "{script}"], "script: expected a path such as /hook, or *, found 'hook'"),
        (["--script", "{script}", "--behaviour", "ok"], "not allowed with argument"),
    ],
)
def test_what_an_endpoint_cannot_be_is_refused(
    run_in: RunIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], expected: str
) -> None:
    script = tmp_path / "zoo.json"
    script.write_text('{"hook": ["ok"]}', encoding="utf-8")
    monkeypatch.setenv("NONSENSE", "n%nsense")

    said = run_in(
        {}, "simulate", "endpoint", *(option.replace("{script}", str(script)) for option in options)
    )

    assert (said.code, said.out) == (2, "")
    assert expected in said.err
    assert "n%nsense" not in said.err


def test_a_script_that_is_not_there_is_named(run_in: RunIn) -> None:
    gone = run_in({}, "simulate", "endpoint", "--script", "/nowhere/zoo.json")

    assert (gone.code, "/nowhere/zoo.json" in gone.err) == (1, True)
