"""Each command does what it says, prints data to stdout and the rest to stderr, and ends with a code for scripts."""

from __future__ import annotations

import errno
import json
import socket
import sys
import tomllib
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from contracts.signature import Secret
from orchestrator.cli import COMMANDS
from receiver.listener import CannotListen
from tests.cli.conftest import KEY, Run, RunIn, Said
from tests.cli.processes import ROOT
from tests.cluster import Cluster

ORDER = '{"id": "order-1", "customer": "ada", "total": 4200}'


def one_line(said: Said) -> str:
    assert said.err.endswith("\n")
    [line] = said.err.splitlines()
    assert line.isprintable()
    return line


# ---- usage and settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(run: Run, command: str) -> None:
    said = run(command, "--help")

    assert said.code == 0
    assert f"waypost {command}" in said.out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("sing",),
        ("show", "not-an-id"),
        ("list", "--status", "asleep"),
        ("list", "--limit", "-3"),
        ("list", "--limit", "99999999999999999999"),
        ("list", "--key", "\udcff"),
        ("start", "order", "--module", "examples.shop.flows", "--input", "@no-such-file"),
        ("endpoint", "add", "payments"),
        ("endpoint", "add", "payments", "https://a.example", "--timeout", "soon"),
        ("endpoint", "set"),
        ("start", "order", "--input", ORDER, "--deadline", "soon"),
        ("start", "order", "--input", ORDER, "--deadline", "0s"),
        ("resume", str(uuid4())),
        ("cancel", str(uuid4())),
        ("cancel", "order-1", "--by", "ada", "--reason", "x"),
        ("terminate", str(uuid4()), "--by", "ada"),
        ("decide", str(uuid4()), "spend", "approve"),
        ("decide", "order-1", "spend", "approve", "--by", "ada"),
        ("resolve", str(uuid4()), "charge", "maybe", "--by", "ada", "--reason", "x"),
        ("migrate", "--check", "--print-sql"),
    ],
)
def test_wrong_usage_ends_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    said = run(*arguments)

    assert (said.code, said.out) == (2, "")
    assert said.err


def test_faults_of_the_environment_are_told_at_once_in_one_line(run_in: RunIn) -> None:
    said = run_in({"WAYPOST_LEASE": "x\x1b[31m", "WAYPOST_SOURCE": "a b"}, "list")

    assert said.code == 1
    assert "WAYPOST_LEASE" in one_line(said)
    assert "WAYPOST_SOURCE" in one_line(said)


def test_a_missing_database_is_named(run_in: RunIn) -> None:
    said = run_in({}, "list")

    assert said.code == 1
    assert "WAYPOST_DATABASE_URL: expected" in one_line(said)


def test_a_database_that_is_away_is_one_line_without_the_password(run_in: RunIn) -> None:
    said = run_in({"WAYPOST_DATABASE_URL": "postgresql://ada:hunter2@127.0.0.1:1/x"}, "list")

    assert said.code == 1
    assert "database" in one_line(said)
    assert "hunter2" not in said.err


def test_a_database_of_dev_that_is_away_says_what_to_start(run_in: RunIn) -> None:
    environment = {
        "WAYPOST_DATABASE_URL": "postgresql://ada@127.0.0.1:1/x",
        "WAYPOST_DEV": "/home/ada/.waypost",
    }

    said = run_in(environment, "list")

    assert said.code == 1
    assert "`waypost dev`" in one_line(said)
    assert ". /home/ada/.waypost/environment" in one_line(said)


# ---- migrate -----------------------------------------------------------------------------------------------


def test_migrate_brings_an_empty_database_up_to_date_once(run_in: RunIn, cluster: Cluster) -> None:
    name = f"empty_{uuid4().hex}"
    cluster.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    environment = {"WAYPOST_DATABASE_URL": cluster.dsn(name)}

    before = run_in(environment, "migrate", "--check")
    first = run_in(environment, "migrate")
    second = run_in(environment, "migrate")
    after = run_in(environment, "migrate", "--check")

    cluster.drop(name)
    assert (before.code, first.code, second.code, after.code) == (1, 0, 0, 0)
    assert before.out == first.out
    assert first.out.startswith("0001_")
    assert (second.out, after.out) == ("", "")


def test_an_empty_database_is_told_from_one_that_is_away(run_in: RunIn, cluster: Cluster) -> None:
    name = f"empty_{uuid4().hex}"
    cluster.execute(sql.SQL("create database {}").format(sql.Identifier(name)))

    said = run_in({"WAYPOST_DATABASE_URL": cluster.dsn(name)}, "list")

    cluster.drop(name)
    assert said.code == 1
    assert "run `waypost migrate`" in one_line(said)


def test_the_scripts_can_be_printed_without_a_database(run_in: RunIn) -> None:
    said = run_in({}, "migrate", "--print-sql")

    assert said.code == 0
    assert "create table waypost.execution" in said.out


# ---- endpoint, sender --------------------------------------------------------------------------------------


def test_how_messages_are_delivered_is_set_shown_and_taken_back(run: Run) -> None:
    run("endpoint", "add", "payments", "http://127.0.0.1:8090/waypost")

    said = run(
        *(
            "endpoint",
            "set",
            "payments",
            "--schedule",
            "1s, 5s",
            "--factor",
            "2",
            "--cap",
            "1m",
            "--attempts",
            "9",
        ),
        *(
            "--rate",
            "2.5",
            "--burst",
            "10",
            "--concurrency",
            "3",
            "--disable-after",
            "never",
            "--timeout",
            "3s",
        ),
    )
    shown = run("endpoint", "show", "payments")
    found = run("endpoint", "show", "payments", "-o", "json").json
    run(
        "endpoint", "set", "payments", "--schedule", "default", "--rate", "none", "--disable-after", "default"
    )
    after = run("endpoint", "show", "payments", "-o", "json").json
    told = run("endpoint", "show", "payments").out

    assert (said.code, shown.code) == (0, 0)
    assert "1s 5s, then 2 times as long, at most 1m, 9 attempts" in shown.out
    assert "2.5 a second, 10 at once" in shown.out
    assert found["schedule"] == {"delays": [1, 5], "factor": 2, "cap": 60, "attempts": 9}
    assert (found["rate"], found["burst"], found["concurrency"]) == (2.5, 10, 3)
    assert (found["disable_after"], found["timeout"]) == (None, 3)
    assert (after["schedule"], after["rate"], after["concurrency"]) == (None, None, 3)
    assert after["disable_after"] == 5 * 86_400
    assert "5 d of failures alone" in told


def test_all_that_is_wrong_with_what_is_set_is_told_at_once_and_nothing_is_set(run: Run) -> None:
    run("endpoint", "add", "payments", "http://127.0.0.1:8090/waypost")

    said = run(
        *("endpoint", "set", "payments", "--rate", "0", "--concurrency", "x", "--timeout", "1h"),
        *("--schedule", "1s", "--jitter", "7", "--url", "ftp://x"),
    )
    neither = run("endpoint", "set", "payments", "--attempts", "3")
    nothing = run("endpoint", "set", "payments")

    assert (said.code, neither.code, nothing.code) == (2, 2, 2)
    for word in ("concurrency", "schedule: jitter"):
        assert word in said.err
    assert "expected --schedule" in neither.err
    assert run("endpoint", "show", "payments", "-o", "json").json["rate"] is None


def test_an_endpoint_is_disabled_and_enabled_by_a_person(run: Run) -> None:
    run("endpoint", "add", "payments", "http://127.0.0.1:8090/waypost")

    run("endpoint", "disable", "payments")
    disabled = run("endpoint", "show", "payments")
    run("endpoint", "enable", "payments")
    enabled = run("endpoint", "show", "payments", "-o", "json").json

    assert "disabled by an operator" in disabled.out
    assert (enabled["state"], enabled["fault"]) == ("enabled", None)


@pytest.mark.parametrize("verb", ["show", "enable", "disable"])
def test_what_nobody_registered_is_not_found(run: Run, verb: str) -> None:
    assert run("endpoint", verb, "nobody").code == 4
    assert run("endpoint", "set", "nobody", "--rate", "1").code == 4


def test_registering_prints_the_secret_alone_on_stdout(run: Run) -> None:
    endpoint = run("endpoint", "add", "payments", "http://127.0.0.1:8090/waypost")
    sender = run("sender", "add", "payments")

    assert (endpoint.code, sender.code) == (0, 0)
    first, second = Secret.parse(endpoint.out), Secret.parse(sender.out)
    assert first != second
    assert first.text not in endpoint.err


def test_registering_speaks_json(run: Run) -> None:
    said = run("sender", "add", "payments", "-o", "json")

    assert said.json["name"] == "payments"
    assert Secret.parse(said.json["secret"])


def test_a_secret_of_the_other_side_is_read_from_a_file(run: Run, tmp_path: Path) -> None:
    theirs = Secret.of(b"t" * 32)
    (tmp_path / "secret").write_text(theirs.text + "\n")

    said = run("sender", "add", "stripe", "--secret-file", str(tmp_path / "secret"))

    assert said.out == theirs.text + "\n"


def test_a_file_that_holds_no_secret_is_not_repeated(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2!")

    said = run("sender", "add", "stripe", "--secret-file", str(tmp_path / "secret"))

    assert said.code == 2
    assert "hunter2" not in one_line(said)


def test_a_name_that_is_taken_is_refused_with_5(run: Run) -> None:
    run("sender", "add", "payments")

    said = run("sender", "add", "payments")

    assert (said.code, said.out) == (5, "")
    assert "'payments'" in one_line(said)


def test_a_name_that_is_taken_says_how_to_go_on(run: Run) -> None:
    run("endpoint", "add", "payments", "http://127.0.0.1:8090/waypost")

    said = run("endpoint", "add", "payments", "http://127.0.0.1:8090/waypost")

    assert "--replace" in one_line(said)


def test_plain_http_to_the_public_is_refused_as_the_relay_would(run: Run) -> None:
    public = run("endpoint", "add", "a", "http://1.1.1.1/x")
    private = run("endpoint", "add", "b", "http://10.0.0.1/x")

    assert (public.code, private.code) == (2, 2)
    assert "plain http reaches only what WAYPOST_ALLOW_ADDRESSES lists" in one_line(public)
    assert "WAYPOST_ALLOW_ADDRESSES may list its network" in one_line(private)


def test_a_path_for_a_module_gets_the_module_s_name(run: Run) -> None:
    said = run("worker", "examples/shop/flows.py")

    assert said.code == 1
    assert "such as examples.shop.flows, found a path" in one_line(said)


def test_replacing_gives_a_new_secret_and_says_the_new_address(run: Run) -> None:
    first = run("endpoint", "add", "payments", "http://127.0.0.1:8090/old")
    second = run("endpoint", "add", "payments", "http://127.0.0.1:8090/new", "--timeout", "3s", "--replace")
    sender = run("sender", "add", "payments", "--replace")

    [listed] = run("endpoint", "list", "-o", "json").json
    assert (second.code, sender.code) == (0, 0)
    assert Secret.parse(second.out) != Secret.parse(first.out)
    assert (listed["url"], listed["timeout"], listed["secrets"]) == ("http://127.0.0.1:8090/new", 3.0, 1)


def test_what_is_registered_is_listed_without_its_secrets(run: Run) -> None:
    endpoint = run("endpoint", "add", "payments", "http://127.0.0.1:8090/waypost", "--replies-from", "bank")
    sender = run("sender", "add", "bank")

    endpoints, senders = run("endpoint", "list"), run("sender", "list")

    assert endpoints.out.splitlines()[1].split()[:2] == ["payments", "http://127.0.0.1:8090/waypost"]
    assert "bank" in endpoints.out
    assert senders.out.splitlines()[1].split()[:3] == ["bank", "enabled", "1"]
    assert run("sender", "list", "-o", "json").json[0]["name"] == "bank"
    for secret in (endpoint.out.strip(), sender.out.strip()):
        assert secret not in endpoints.out + senders.out


def test_a_sender_uses_binary_mode_only_where_that_was_said(run: Run) -> None:
    for name, *options in (("bank",), ("stripe", "--binary")):
        run("sender", "add", name, *options)

    [_, *lines] = run("sender", "list").out.splitlines()
    rows = run("sender", "list", "-o", "json").json

    assert [line.split()[4:-1] for line in lines] == [["structured"], ["structured,", "binary"]]
    assert [row["binary_mode"] for row in rows] == [False, True]


def test_what_a_sender_may_do_is_changed_and_said(run: Run) -> None:
    run("sender", "add", "bank")

    on, off = (
        run("sender", "set", "bank", "--binary"),
        run("sender", "set", "bank", "--no-binary", "-o", "json"),
    )

    assert (on.code, on.out) == (0, "")
    assert "sender bank may send events in these content modes: structured, binary." in one_line(on)
    assert off.json == {"kind": "sender", "name": "bank", "binary_mode": False}
    assert run("sender", "list", "-o", "json").json[0]["binary_mode"] is False


def test_a_provider_s_sender_keeps_its_secret_as_it_is_written_and_gets_another(
    run: Run, tmp_path: Path
) -> None:
    issued = tmp_path / "secret"
    issued.write_text("whsec_of_stripe")

    none = run("sender", "add", "stripe", "--scheme", "stripe")
    given = run("sender", "add", "stripe", "--scheme", "stripe", "--secret-file", str(issued))
    ours = run("sender", "add", "github", "--scheme", "github")
    rotated = run("sender", "rotate", "github", "--grace", "2h")
    long = run("sender", "rotate", "github", "--grace", "169h")

    assert (none.code, "expected the one that stripe shows" in one_line(none)) == (2, True)
    assert given.out == "whsec_of_stripe\n"
    assert len({ours.out, rotated.out}) == 2
    assert (long.code, "grace: expected 0s to 168h" in one_line(long)) == (2, True)
    assert [(row["scheme"], row["secrets"]) for row in run("sender", "list", "-o", "json").json] == [
        ("github", 2),
        ("stripe", 1),
    ]


def test_settings_of_a_sender_are_understood_or_refused(run: Run) -> None:
    wrong = run("sender", "add", "acme", "--scheme", "hmac", "--settings", '{"signature": {"digest": "md5"}}')
    no_object = run("sender", "add", "acme", "--scheme", "hmac", "--settings", "[]")
    run("sender", "add", "acme", "--scheme", "hmac", "--settings", '{"sources": ["/acme"]}')
    changed = run("sender", "set", "acme", "--settings", '{"gzip": true}', "--state", "disabled")
    nothing = run("sender", "set", "acme")

    [row] = run("sender", "list", "-o", "json").json
    assert (wrong.code, "signature.digest" in one_line(wrong)) == (2, True)
    assert (no_object.code, nothing.code, changed.code) == (2, 2, 0)
    assert (row["settings"], row["state"], row["scheme"]) == ({"gzip": True}, "disabled", "hmac")


def test_replacing_a_sender_takes_binary_mode_away_unless_it_is_said_again(run: Run) -> None:
    run("sender", "add", "bank", "--binary")

    for options, expected in (((), False), (("--binary",), True)):
        run("sender", "add", "bank", "--replace", *options)

        assert run("sender", "list", "-o", "json").json[0]["binary_mode"] is expected


def test_a_sender_that_nobody_knows_cannot_be_changed(run: Run) -> None:
    said = run("sender", "set", "nobody", "--binary")

    assert said.code == 4
    assert "no sender is named 'nobody'" in one_line(said)


@pytest.mark.parametrize("options", [(), ("--binary", "--no-binary")])
def test_changing_a_sender_says_one_thing(run: Run, options: tuple[str, ...]) -> None:
    assert run("sender", "set", "bank", *options).code == 2


def test_who_gets_published_events_is_said_listed_and_ended(run: Run) -> None:
    run("endpoint", "add", "billing", "https://billing.example/events", "--kind", "event")

    assert run("subscription", "add", "order.placed", "billing").err == (
        "endpoint billing gets events of type order.placed.\n"
    )
    assert "got already" in run("subscription", "add", "order.placed", "billing").err
    [head, line] = run("subscription", "list").out.splitlines()
    assert head.split() == ["TYPE", "ENDPOINT", "ORDERED", "BY", "WHERE", "URL", "STATE", "AGE"]
    assert line.split()[:2] == ["order.placed", "billing"]
    assert line.split()[-3:-1] == ["https://billing.example/events", "enabled"]
    assert run("subscription", "list", "-o", "json").json[0]["type"] == "order.placed"
    removed = run("subscription", "remove", "order.placed", "billing", "-o", "json")
    assert removed.json == {"type": "order.placed", "endpoint": "billing", "subscribed": False}
    assert run("subscription", "remove", "order.placed", "billing").code == 4


def test_who_has_a_mutex_and_who_waits_for_it_is_listed(run: Run, dsn: str) -> None:
    first, second = (run("start", "order", "--input", ORDER).out.strip() for _ in range(2))
    with psycopg.connect(dsn, autocommit=True) as conn:
        for execution in (first, second):
            conn.execute(
                "insert into waypost.mutex (tenant_id, kind, key, execution_id, epoch, path)"
                " values (1, 'step', 'line-7', %s, 0, 'weld/mutex')",
                (execution,),
            )
        conn.execute("update waypost.mutex set granted_at = now() where execution_id = %s", (first,))

    [head, line] = run("mutex", "list").out.splitlines()
    assert head.split() == ["KEY", "OF", "STATE", "AGE", "EXECUTION", "FLOW", "STATUS", "PATH", "WAITING"]
    assert line.split()[:4] == ["line-7", "step", "has", "it"]
    assert first in line
    [_, _, waits] = run("mutex", "show", "line-7").out.splitlines()
    assert "waits, 0 before" in waits
    assert second in waits
    assert run("mutex", "show", "line-7", "-o", "json").json[1]["execution_id"] == second
    assert (
        run("mutex", "show", "no-such-key").out.splitlines()
        == run("mutex", "show", "no-such-key").out.splitlines()[:1]
    )


def test_an_endpoint_for_commands_does_not_subscribe(run: Run) -> None:
    run("endpoint", "add", "bank", "https://bank.example/")

    refused = run("subscription", "add", "order.placed", "bank")

    assert refused.code == 5
    assert "expected one of the kind event, found one of the kind command" in refused.err
    assert run("subscription", "add", "order.placed", "nobody").code == 4


@pytest.mark.parametrize("url", ["ftp://a.example", "http://10.0.0.1/", "https://u:p@a.example/", "https://"])
def test_an_address_that_may_not_be_called_is_refused_with_2(run: Run, url: str) -> None:
    said = run("endpoint", "add", "payments", url)

    assert (said.code, said.out) == (2, "")
    assert "endpoint 'payments': url: " in one_line(said)


def test_secrets_need_the_key(run_in: RunIn, environment: dict[str, str]) -> None:
    del environment["WAYPOST_SECRET_KEY"]

    said = run_in(environment, "sender", "add", "payments")

    assert said.code == 1
    assert "WAYPOST_SECRET_KEY" in one_line(said)


OTHER_KEY = "b3RoZXJvdGhlcm90aGVyb3RoZXJvdGhlcm90aGVyMTI="


@pytest.mark.parametrize("kind", [("endpoint", "add", "b", "http://127.0.0.1:8090/"), ("sender", "add", "b")])
def test_another_key_than_that_of_the_database_seals_nothing(
    run: Run, run_in: RunIn, environment: dict[str, str], kind: tuple[str, ...]
) -> None:
    run("sender", "add", "a")

    said = run_in({**environment, "WAYPOST_SECRET_KEY": OTHER_KEY}, *kind)

    assert (said.code, said.out) == (1, "")
    assert "WAYPOST_SECRET_KEY: expected the key that sealed the secret of sender 'a'" in one_line(said)


@pytest.mark.parametrize("part", ["relay", "receiver"])
def test_a_part_with_another_key_than_that_of_the_database_does_not_start(
    run: Run, run_in: RunIn, environment: dict[str, str], part: str
) -> None:
    run("sender", "add", "a")

    said = run_in({**environment, "WAYPOST_SECRET_KEY": OTHER_KEY}, part)

    assert said.code == 1
    assert "WAYPOST_SECRET_KEY: expected the key" in said.err


def test_after_the_key_is_lost_a_replaced_secret_opens_the_way(
    run: Run, run_in: RunIn, environment: dict[str, str]
) -> None:
    run("sender", "add", "a")
    with_new_key = {**environment, "WAYPOST_SECRET_KEY": OTHER_KEY}

    replaced = run_in(with_new_key, "sender", "add", "a", "--replace")
    added = run_in(with_new_key, "sender", "add", "b")

    assert (replaced.code, added.code) == (0, 0)


def test_the_key_may_lie_in_a_file(run_in: RunIn, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    del environment["WAYPOST_SECRET_KEY"]

    said = run_in(
        {**environment, "WAYPOST_SECRET_KEY_FILE": str(tmp_path / "key")}, "sender", "add", "payments"
    )

    assert said.code == 0


# ---- start, show, list -------------------------------------------------------------------------------------


def test_start_prints_the_id_and_show_shows_it(run: Run) -> None:
    started = run("start", "order", "--input", ORDER, "--key", "order-1")
    shown = run("show", started.out.strip())

    assert (started.code, shown.code) == (0, 0)
    assert str(UUID(started.out.strip())) in shown.out
    assert "order@1  key order-1" in shown.out
    assert "started" in shown.out


def test_why_says_what_is_waited_for_and_what_can_be_done(run: Run) -> None:
    execution = run("start", "order", "--input", ORDER).out.strip()

    said, data = run("why", execution), run("why", execution, "-o", "json").json

    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("no-worker: It has been ready since ")
    assert "  do: run `waypost worker MODULE` with the module of order@1" in said.out
    assert (data["execution_id"], data["code"]) == (execution, "no-worker")
    assert data["sentence"].endswith("no worker that lives has order@1.")


def test_the_input_may_come_from_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "order.json").write_text(ORDER)

    said = run("start", "order@1", "--input", f"@{tmp_path / 'order.json'}")

    assert said.code == 0


def test_a_key_that_is_started_again_is_the_same_execution(run: Run) -> None:
    first = run("start", "order", "--input", ORDER, "--key", "order-1", "-o", "json")
    second = run("start", "order", "--input", ORDER, "--key", "order-1", "-o", "json")
    other = run("start", "order", "--input", ORDER.replace("4200", "1"), "--key", "order-1")

    assert (first.json["outcome"], second.json["outcome"]) == ("started", "exists")
    assert first.json["execution_id"] == second.json["execution_id"]
    assert other.code == 5
    assert "order-1" in one_line(other)


@pytest.mark.parametrize(
    ("flow", "given", "code", "named"),
    [
        ("orders", ORDER, 4, "'orders'"),
        ("order@9", ORDER, 4, "order@9"),
        ("order", '{"id": "a"}', 2, "/customer"),
        ("order", '{"id": "a", "customer": "b", "total": "many"}', 2, "/total"),
        ("order", "{", 2, "--input"),
        ("order", '{"id": NaN}', 2, "--input"),
        ("order", '{"id": 1, "id": 2}', 2, "--input"),
        ("order", '{"id": "\\u0000"}', 2, "--input"),
        ("order", '{"id": "\\ud800"}', 2, "--input"),
        ("order", '{"id": 1e5000}', 2, "--input"),
        ("order", "[" * 1000 + "]" * 1000, 2, "--input"),
        ("order", json.dumps({"id": "x" * 300_000, "customer": "", "total": 1}), 2, "--input"),
        ("order", "@/nowhere", 2, "/nowhere"),
        ("order", "in.json", 2, "say @ before"),
    ],
)
def test_what_cannot_be_started_is_named_and_nothing_is_written(
    run: Run, flow: str, given: str, code: int, named: str
) -> None:
    said = run("start", flow, "--input", given)

    assert (said.code, said.out) == (code, "")
    assert named in one_line(said)
    assert len(said.err) < 500
    assert run("list", "-o", "json").json == []


def test_waiting_for_an_execution_that_nobody_runs_times_out_with_7(run: Run) -> None:
    said = run("start", "order", "--input", ORDER, "--wait", "--timeout", "100ms")

    assert (said.code, said.out) == (7, "")
    assert "still ready" in said.err


def test_an_execution_whose_flow_no_worker_runs_says_so(run: Run) -> None:
    started = run("start", "order", "--input", ORDER)

    shown = run("show", started.out.strip())

    assert "ready: no worker runs order@1" in shown.out


def test_an_unknown_execution_is_not_found(run: Run) -> None:
    unknown = str(uuid4())

    for said in (
        run("show", unknown),
        run("why", unknown),
        run("resume", unknown, "--by", "ada", "--reason", "x"),
        run("cancel", unknown, "--by", "ada", "--reason", "x"),
        run("resolve", unknown, "charge", "done", "--by", "ada", "--reason", "x"),
    ):
        assert (said.code, said.out) == (4, "")
        assert unknown in one_line(said)


def test_what_does_not_need_a_decision_is_refused_with_5(run: Run) -> None:
    execution = run("start", "order", "--input", ORDER).out.strip()

    for said in (
        run("resume", execution, "--by", "ada", "--reason", "x"),
        run("resolve", execution, "charge", "done", "--by", "ada", "--reason", "x"),
    ):
        assert (said.code, said.out) == (5, "")
        assert "held" in one_line(said) or "waits" in one_line(said)


def test_an_order_to_cancel_is_mail_with_a_name_and_a_reason(run: Run, dsn: str) -> None:
    execution = run("start", "order", "--input", ORDER).out.strip()

    said = run("cancel", execution, "--by", "ada", "--reason", "wrong address")
    data = run("cancel", execution, "--no-undo", "--by", "ada", "--reason", "keep it", "-o", "json").json

    assert (said.code, said.out) == (0, "")
    assert f"{execution} is asked to end; `waypost show {execution}` shows what becomes of it." in said.err
    assert data == {
        "execution_id": execution, "order": "cancel", "undo": False, "by": "ada", "reason": "keep it",
    }  # fmt: skip
    with psycopg.connect(dsn) as conn:
        orders = conn.execute(
            "select data from waypost.inbox where kind = 'order' order by inbox_id"
        ).fetchall()
    assert [order for (order,) in orders] == [
        {"order": "cancel", "undo": True, "by": "ada", "reason": "wrong address"},
        {"order": "cancel", "undo": False, "by": "ada", "reason": "keep it"},
    ]


def test_an_execution_may_be_given_a_deadline_and_shows_it(run: Run) -> None:
    execution = run("start", "order", "--input", ORDER, "--deadline", "2h").out.strip()

    shown, data = run("show", execution).out, run("show", execution, "-o", "json").json

    assert ", deadline in 1 h" in shown
    assert data["deadline_at"] is not None
    assert "Its deadline is at" in run("why", execution).out


def test_what_is_terminated_says_what_stands_and_shows_who_ended_it(run: Run) -> None:
    execution = run("start", "order", "--input", ORDER).out.strip()

    said = run("terminate", execution, "--by", "ada", "--reason", "it hangs")
    again = run("terminate", execution, "--by", "ada", "--reason", "it hangs", "-o", "json")
    other = run("terminate", execution, "--by", "bob", "--reason", "me too")

    assert (said.code, one_line(said)) == (0, f"{execution} is terminated; nothing of it stands.")
    assert again.json == {
        "execution_id": execution, "order": "terminate", "by": "ada", "reason": "it hangs", "stands": [],
    }  # fmt: skip
    assert (other.code, "there is nothing to terminate" in one_line(other)) == (5, True)
    shown = run("show", execution)
    assert "failed: terminated: by ada: it hangs" in shown.out
    assert run("why", execution).out.startswith("failed: It was terminated at ")


@pytest.fixture
def asked(run: Run, dsn: str) -> str:
    """An order that waits for a decision about `spend`, as its journal says."""
    execution = run("start", "order", "--input", ORDER).out.strip()
    said = {"subject": "spend", "who": ["group:finance"], "choices": ["approve", "reject"]}
    facts = [
        (2, "noted", "spend/request", {"kind": "approval", "name": "request", "args": {**said, "show": 7}}),
        (3, "asked", "spend/decision", {
            "kind": "decision", "name": "decision", "args": {**said, "request": "spend/request"},
        }),
    ]  # fmt: skip
    with psycopg.connect(dsn) as conn:
        for position, kind, path, data in facts:
            conn.execute(
                "insert into waypost.journal (tenant_id, execution_id, position, fence, kind, path, payload, at)"
                " values (1, %s, %s, 0, %s, %s, %s, now())",
                (execution, position, kind, path, json.dumps(data)),
            )
        conn.execute("update waypost.execution set position = 3, wake_at = null")
    return execution


def test_what_waits_for_a_person_is_a_table_or_json(run: Run, asked: str) -> None:
    table, as_json = run("approvals"), run("approvals", "-o", "json").json

    heading, row = table.out.splitlines()
    assert heading.split() == ["EXECUTION", "FLOW", "SUBJECT", "WHO", "CHOICES", "SINCE", "UNTIL"]
    assert row.split() == [asked, "order@1", "spend", "group:finance", "approve|reject", "now", "-"]
    assert (as_json[0]["execution_id"], as_json[0]["path"], as_json[0]["show"]) == (
        asked,
        "spend/decision",
        7,
    )
    assert run("approvals", "--flow", "other", "-o", "json").json == []


def test_a_decision_is_mail_with_a_name_and_the_second_one_is_told_who_was_first(
    run: Run, dsn: str, asked: str
) -> None:
    said = run("decide", asked, "spend", "approve", "--by", "ada")
    again = run("decide", asked, "spend", "approve", "--by", "ada", "--reason", "fine", "-o", "json")
    other = run("decide", asked, "spend", "reject", "--by", "bob")

    assert (said.code, said.out) == (0, "")
    assert one_line(said) == f"spend of {asked} is decided: approve by ada."
    assert again.json == {
        "execution_id": asked, "order": "decide", "subject": "spend", "choice": "approve", "by": "ada",
        "reason": "fine",
    }  # fmt: skip
    assert (other.code, one_line(other)) == (5, "waypost: approval 'spend' is decided: 'approve' by 'ada'")
    with psycopg.connect(dsn) as conn:
        orders = conn.execute("select data from waypost.inbox").fetchall()
    assert orders == [({"order": "decide", "choice": "approve", "by": "ada", "reason": ""},)]


@pytest.mark.parametrize(
    ("decision", "code", "told"),
    [
        ("spent approve", 4, "has no approval 'spent'; it waits for: spend"),
        ("spend maybe", 2, "approval 'spend': expected one of approve, reject, found 'maybe'"),
    ],
)
def test_a_decision_that_cannot_be_is_refused_in_one_line(
    run: Run, asked: str, decision: str, code: int, told: str
) -> None:
    said = run("decide", asked, *decision.split(), "--by", "ada")

    assert said.code == code
    assert told in one_line(said)


def test_the_list_is_a_table_or_json_or_ids_the_newest_first(run: Run) -> None:
    ids = [run("start", "order", "--input", ORDER, "--key", key).out.strip() for key in ("a", "b")]

    table, as_json, only_ids = run("list"), run("list", "-o", "json"), run("list", "-o", "ids")

    assert only_ids.out.split() == ids[::-1]
    assert [row["execution_id"] for row in as_json.json] == ids[::-1]
    lines = table.out.splitlines()
    assert lines[0].split() == ["EXECUTION", "FLOW", "KEY", "STATE", "AGE", "NEXT", "PARENT"]
    assert [line.split()[:4] for line in lines[1:]] == [
        [ids[1], "order@1", "b", "ready"],
        [ids[0], "order@1", "a", "ready"],
    ]


def test_the_list_can_be_narrowed(run: Run) -> None:
    run("start", "order", "--input", ORDER, "--key", "a")
    run("start", "order", "--input", ORDER, "--key", "b")

    assert len(run("list", "--limit", "1", "-o", "json").json) == 1
    assert [row["business_key"] for row in run("list", "--key", "a", "-o", "json").json] == ["a"]
    assert run("list", "--flow", "other", "-o", "json").json == []
    assert run("list", "--status", "held", "-o", "json").json == []
    assert len(run("list", "--status", "ready", "-o", "json").json) == 2


def test_hostile_data_reaches_no_terminal(run: Run) -> None:
    hostile = json.dumps({"id": "\u001b[31m\u202e\u009b", "customer": "\n", "total": 1}, ensure_ascii=False)
    execution = run("start", "order", "--input", hostile.replace("\u001b", "\\u001b")).out.strip()

    for said in (run("show", execution), run("show", execution, "-o", "json"), run("list")):
        assert said.code == 0
        assert all(line.isprintable() for line in said.out.splitlines())


def test_a_timeout_without_waiting_is_wrong_usage_and_starts_nothing(run: Run) -> None:
    said = run("start", "order", "--input", ORDER, "--timeout", "3s")

    assert (said.code, said.out) == (2, "")
    assert "--timeout: expected beside --wait" in one_line(said)
    assert run("list", "-o", "json").json == []


def test_show_as_json_is_whole(run: Run) -> None:
    execution = run("start", "order", "--input", ORDER).out.strip()

    shown = run("show", execution, "-o", "json").json

    assert shown["execution_id"] == execution
    assert [fact["kind"] for fact in shown["journal"]] == ["started"]
    assert shown["journal"][0]["payload"]["input"]["total"] == 4200
    assert (shown["messages"], shown["tries"], shown["held"]) == ([], [], None)


# ---- version, addresses ------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_project(run_in: RunIn) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    said = run_in({}, "--version")

    assert (said.code, said.out) == (0, f"waypost {project['version']}\n")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_address_that_is_taken_is_said_with_its_setting_and_what_to_do(
    run_in: RunIn, environment: dict[str, str], host: str
) -> None:
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
    with socket.create_server((host.strip("[]"), 0), family=family) as taken:
        address = f"{host}:{taken.getsockname()[1]}"

        said = run_in({**environment, "WAYPOST_RECEIVER_ADDR": address}, "receiver")

    assert said.code == 1
    assert said.err.splitlines()[-1] == (
        f"waypost: WAYPOST_RECEIVER_ADDR: expected an address to listen on, found {address}, where something listens"
        " already; stop that, or name another port, or 0 for any free one"
    )


@pytest.mark.parametrize(
    ("address", "fault"),
    [("192.0.2.1:0", "which is not of this machine"), ("nowhere.invalid:0", "whose host has no address")],
)
def test_an_address_of_another_machine_or_of_none_is_said(
    run_in: RunIn, environment: dict[str, str], address: str, fault: str
) -> None:
    said = run_in({**environment, "WAYPOST_RECEIVER_ADDR": address}, "receiver")

    assert said.code == 1
    assert f"found {address}, {fault}; name one of this machine" in said.err.splitlines()[-1]


def test_a_port_that_only_others_may_use_is_said() -> None:
    error = CannotListen("WAYPOST_RECEIVER_ADDR", "127.0.0.1", 80, PermissionError(errno.EACCES, "denied"))

    assert str(error).endswith("found 127.0.0.1:80, which this user may not use; name a port above 1023")


# ---- flows and databases that cannot be used ---------------------------------------------------------------


def test_a_worker_without_flows_says_where_to_name_them(run_in: RunIn, environment: dict[str, str]) -> None:
    del environment["WAYPOST_FLOWS"]

    said = run_in(environment, "worker")

    assert said.code == 1
    assert "WAYPOST_FLOWS" in one_line(said)


@pytest.mark.parametrize("module", ["no.such.module", "json"])
def test_a_module_without_flows_is_named(run: Run, module: str) -> None:
    said = run("worker", module)

    assert said.code == 1
    assert f"module {module}" in one_line(said)


@pytest.mark.parametrize("part", ["worker", "relay", "receiver"])
def test_no_part_starts_on_a_database_that_may_lose_commits(run: Run, dsn: str, part: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        name = sql.Identifier(conn.info.dbname)
        conn.execute(sql.SQL("alter database {} set synchronous_commit = off").format(name))

    said = run(part)

    assert said.code == 1
    assert "synchronous_commit" in one_line(said)


def test_a_column_of_a_newer_release_is_told_from_a_fault_also_where_a_function_has_its_name(
    run: Run, dsn: str
) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("alter table waypost.endpoint drop column mode")

    said = run("endpoint", "show", "billing")

    assert said.code == 1
    assert "run `waypost migrate`" in one_line(said)


@pytest.mark.parametrize("part", ["worker", "relay", "receiver"])
def test_no_part_starts_on_tables_of_another_release(run: Run, dsn: str, part: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("delete from waypost.migration where number = 2")

    said = run(part)

    assert said.code == 1
    assert "run `waypost migrate`" in one_line(said)


# ---- versions ------------------------------------------------------------------------------------------------------


def test_versions_are_listed_with_what_they_get_of_what_is_started(run: Run, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            "insert into waypost.definition (tenant_id, name, version, state)"
            " values (1, 'order', '1', 'published'), (1, 'refund', '1', 'published')"
        )
    run("start", "order", "--input", ORDER).out.strip()

    shared = run("flow", "share", "order@2", "10", "-o", "json")
    assert shared.json == {"name": "order", "version": "2", "percent": 10}
    [head, *lines] = run("flow", "list").out.splitlines()
    assert head.split() == ["VERSION", "STATE", "STARTS", "OPEN", "HELD", "WORKERS", "EVENT", "CODE", "AGE"]
    assert [line.split()[:6] for line in lines] == [
        ["order@1", "published", "100", "%", "1", "0"],
        ["order@2", "awaited", "0", "%", "0", "0"],
        ["refund@1", "published", "100", "%", "0", "0"],
    ]
    assert [row["name"] for row in run("flow", "list", "--flow", "refund", "-o", "json").json] == ["refund"]
    assert "has no share of its own any more" in run("flow", "unshare", "order@2").err
    assert run("flow", "unshare", "order@2").code == 4


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("flow", "share", "order", "10"), 2, "expected FLOW@VERSION such as order@2"),
        (("flow", "share", "order@2", "101"), 2, "expected 0 to 100, found '101'"),
        (
            ("flow", "share", "order@2", "91"),
            5,
            "expected at most 90, since other versions of order have 10, found 91",
        ),
        (("check-replay", "examples.shop.flows", "--under", "order@9"), 4, "no flow is named 'order@9'"),
        (("check-replay", "no.such"), 1, "module no.such cannot be imported"),
    ],
)
def test_a_share_or_a_check_that_cannot_be_is_named(
    run: Run, words: tuple[str, ...], code: int, says: str
) -> None:
    run("flow", "share", "order@1", "10")

    said = run(*words)

    assert said.code == code
    assert says in said.err


TWO_VERSIONS = """
from orchestrator import Context, workflow

@workflow(name="trip", version="1")
async def one(ctx: Context, city: str) -> None: ...

@workflow(name="trip", version="2")
async def two(ctx: Context, city: str) -> None: ...
"""


def test_a_start_gets_the_version_that_is_drawn_if_it_is_here(
    run: Run, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_versions.py").write_text(TWO_VERSIONS, encoding="utf-8")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])

    def version_of(flow: str) -> str:
        started = run("start", flow, "--input", '"Rome"', "--module", "two_versions").out.strip()
        return run("show", started, "-o", "json").json["version"]

    assert version_of("trip") == "2"
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            "insert into waypost.definition (tenant_id, name, version, state)"
            " select 1, 'trip', v, 'published' from unnest('{1, 2}'::text[]) v"
        )
    run("flow", "share", "trip@2", "0")
    assert version_of("trip") == "1"
    assert version_of("trip@2") == "2"

    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("insert into waypost.definition (tenant_id, name, version) values (1, 'trip', '3')")
    assert version_of("trip") == "2"


def test_what_would_go_on_is_counted_and_what_nobody_has_is_named(run: Run, dsn: str) -> None:
    started = run("start", "order", "--input", ORDER).out.strip()
    well = run("check-replay")
    assert (well.code, well.out) == (0, "")
    assert well.err.splitlines() == [
        "1 of 1 open executions looked at",
        "1 open executions of these flows: 1 go on.",
    ]

    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("update waypost.execution set version = '0'")
    bad = run("check-replay", "-o", "json")

    assert bad.code == 1
    assert bad.json["counts"] == {"go_on": 0, "recover": 0, "stay_held": 0, "be_held": 0, "wait": 1}
    [finding] = bad.json["findings"]
    assert (finding["execution_id"], finding["would"], finding["code"]) == (started, "wait", "no-version")
