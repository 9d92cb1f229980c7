"""`waypost simulate`: what people and programs read of it, and what it refuses."""

from __future__ import annotations

import json
import signal
import socket
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


def test_a_provider_posts_and_says_what_became_of_it(
    run_in: RunIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUSH", SECRET.text)
    post = ("simulate", "provider", "svix", "--secret-env", "HUSH", "--count", "3", "--seed", "7")
    with running(waypost("simulate", "endpoint"), environment={}, output=tmp_path / "out") as process:
        url = json.loads(process.until_said(r"\{.*\}\n")[0])["url"]
        well = run_in(
            {}, *post, "--to", f"{url}/flaky?fail=1&status=500", "--speed", "1000", "--duplicates", "1"
        )
        badly = run_in({}, *post, "--to", f"{url}/status/410?retry_after=hush", "-o", "json")
        endpoint = process.end(signal.SIGTERM)

    assert (well.code, well.out.splitlines()) == (
        0,
        [
            f"svix to {url}/flaky, seed 7",
            "3 events and 3 copies: 6 accepted",
            "9 requests, 3 of them retries",
            "answers: 6 \N{MULTIPLICATION SIGN} 200, 3 \N{MULTIPLICATION SIGN} 500",
        ],
    )
    assert (badly.code, badly.json["answers"], len(badly.json["ids"])) == (8, {"410": 3}, 3)
    assert [it["last"] for it in badly.json["not_accepted"]] == ["410"] * 3
    said = well.out + well.err + badly.out + badly.err
    assert not [hidden for hidden in (SECRET.text, "invoice.paid", "hush") if hidden in said]
    assert endpoint == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["banana"], "argument NAME: invalid choice: 'banana'"),
        (
            ["svix", "--to", "http://8.8.8.8/"],
            "found '8.8.8.8'; who may post there says --allow-host 8.8.8.8",
        ),
        (["svix", "--count", "many"], "argument --count: expected a whole number, found 'many'"),
        (["svix", "--speed", "fast"], "argument --speed: expected a number, found 'fast'"),
        (["svix", "--count", "10001"], "count: expected 1 to 10000, found 10001"),
        (
            ["svix", "--rotate", "NOBODY"],
            "expected one in the variable NOBODY of the environment, found none",
        ),
        (["svix", "--settings", "[]"], "settings: expected a JSON object"),
        (
            ["svix", "--body", "{body}"],
            "body: expected ${id}, ${number}, ${type}, ${time}, ${timestamp}, found",
        ),
        (["github", "--skew", "-400"], "skew: expected none, as github signs no time, found -400"),
    ],
)
def test_what_a_provider_cannot_do_is_refused_before_anything_is_posted(
    run_in: RunIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], expected: str
) -> None:
    (tmp_path / "body").write_text("${no}", encoding="utf-8")
    monkeypatch.setenv("HUSH", SECRET.text)
    said = run_in(
        {},
        *("simulate", "provider", "--to", "http://127.0.0.1:8080/", "--secret-env", "HUSH"),
        *(option.replace("{body}", str(tmp_path / "body")) for option in options),
    )

    assert (said.code, said.out) == (2, "")
    assert expected in said.err
    assert SECRET.text not in said.err


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


def test_an_address_that_is_taken_is_named(run_in: RunIn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = run_in({}, "simulate", "endpoint", "--addr", address)

    assert (said.code, said.out) == (1, "")
    assert (
        f"--addr: expected an address to listen on, found {address}, where something listens already"
        in said.err
    )


def test_a_script_that_is_not_there_is_named(run_in: RunIn) -> None:
    gone = run_in({}, "simulate", "endpoint", "--script", "/nowhere/zoo.json")

    assert (gone.code, "/nowhere/zoo.json" in gone.err) == (1, True)
