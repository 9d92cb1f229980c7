"""Messages, their tries and dead letters, as the command shows them and puts them back."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Final, LiteralString
from uuid import uuid4

import psycopg
import pytest
from standardwebhooks import Webhook

from tests.cli.conftest import Run

NOBODY = "0199a3c4-0000-7000-8000-000000000001"


def dead(
    dsn: str,
    *,
    endpoint: str = "billing",
    type_: str = "shop.placed",
    fault: str = "http-503",
    age: str = "1 h",
) -> str:
    message = str(uuid4())
    body = json.dumps({"specversion": "1.0", "id": message, "source": "/s", "type": type_, "data": {"n": 1}})
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            """
            insert into waypost.outbox (tenant_id, message_id, path, command, endpoint, body, since, expires_at,
                                        attempts)
            values (1, %s, '', false, %s, %s, now() - %s::interval, now() + '1 day', 3)
            """,
            (message, endpoint, body.encode(), age),
        )
        conn.execute(
            "update waypost.outbox set state = 'dead', fault = %s where message_id = %s", (fault, message)
        )
        conn.execute(
            """
            insert into waypost.delivery
                   (tenant_id, message_id, attempt, started_at, duration, outcome, status, response,
                    headers)
            values (1, %s, 3, now(), '1 s', 'dead', 503, convert_to('closed for lunch', 'UTF8'),
                    '{"server": "nginx"}')
            """,
            (message,),
        )
    return message


def state(dsn: str, message: str) -> tuple[object, ...]:
    with psycopg.connect(dsn) as conn:
        row = conn.execute(
            "select state, spared, fault from waypost.outbox where message_id = %s", (message,)
        ).fetchone()
    assert row is not None
    return row


def test_dead_letters_are_listed_by_endpoint_type_code_and_time(run: Run, dsn: str) -> None:
    first = dead(dsn)
    second = dead(dsn, endpoint="audit", type_="shop.paid", fault="timeout")

    def found(*options: str) -> list[str]:
        return [row["message_id"] for row in run("dlq", "list", "-o", "json", *options).json]

    assert found() == [first, second]
    assert (
        found("--endpoint", "audit") == found("--type", "shop.paid") == found("--code", "timeout") == [second]
    )
    assert found("--limit", "1") == [first]
    assert found("--limit", "1", "--after", first) == [second]
    assert found("--since", "1h") == [first, second]
    assert found("--until", "1h") == []
    table = run("dlq", "list").out
    assert first in table
    assert "http-503" in table


@pytest.mark.parametrize("text", ["yesterday", "2", "99999999d"])
def test_a_moment_that_is_none_is_refused_with_what_would_be_one(run: Run, text: str) -> None:
    said = run("outbox", "list", "--since", text)

    assert said.code == 2
    assert (
        f"expected a time such as 2026-11-30T12:00Z, or a span such as 2h: that long ago; found '{text}'"
        in said.err
    )


def test_a_moment_may_be_days_ago(run: Run) -> None:
    assert run("outbox", "list", "--since", "7d").code == 0


def test_a_dead_letter_says_why_it_is_one_and_what_to_do(run: Run, dsn: str) -> None:
    message = dead(dsn)

    said = run("dlq", "show", message)

    assert "its last try ended with http-503" in said.out
    assert f"`waypost dlq replay {message}`" in said.out
    assert "closed" in said.out
    assert run("dlq", "show", message, "-o", "json").json["tries"][0]["status"] == 503
    assert "503" in run("delivery", "list", message).out
    assert run("dlq", "show", NOBODY).code == 4


def test_a_try_is_shown_with_what_was_answered(run: Run, dsn: str) -> None:
    message = dead(dsn)

    said = run("delivery", "show", message).out

    assert f"try 3 of message {message} to endpoint billing" in said
    assert "503, dead" in said
    assert "server: nginx" in said
    assert "closed for lunch" in said
    assert run("delivery", "show", message, "--try", "3", "-o", "json").json["headers"] == {"server": "nginx"}
    assert run("delivery", "show", message, "--try", "2").code == 4


def test_dead_letters_are_put_back_by_filter_after_a_dry_run_and_twice_does_no_harm(
    run: Run, dsn: str
) -> None:
    wanted, other = dead(dsn), dead(dsn, endpoint="audit")

    dry = run("dlq", "replay", "--endpoint", "billing", "--dry-run")
    assert (dry.code, dry.out.split(), state(dsn, wanted)[0]) == (0, [wanted], "dead")
    once = run("dlq", "replay", "--endpoint", "billing", "-o", "json").json
    twice = run("dlq", "replay", "--endpoint", "billing", "-o", "json").json

    assert (once["messages"], twice["messages"]) == ([wanted], [])
    assert state(dsn, wanted) == ("due", 3, None)
    assert state(dsn, other)[0] == "dead"


def test_nothing_is_put_back_unless_it_is_said_what(run: Run, dsn: str) -> None:
    message = dead(dsn)

    said = run("dlq", "replay")

    assert (said.code, state(dsn, message)[0]) == (2, "dead")
    assert "--all" in said.err
    assert run("dlq", "replay", "--all", "-o", "json").json["messages"] == [message]


def test_they_go_so_many_a_second(run: Run, dsn: str) -> None:
    for _ in range(5):
        dead(dsn)

    run("dlq", "replay", "--all", "--rate", "2")

    with psycopg.connect(dsn) as conn:
        [row] = conn.execute(
            "select extract(epoch from max(due_at) - min(due_at)) from waypost.outbox"
        ).fetchall()
    assert row[0] == 2


def test_one_that_is_put_back_as_new_names_the_old_one_as_its_cause(run: Run, dsn: str) -> None:
    message = dead(dsn)

    [new] = run("dlq", "replay", message, "--as-new", "-o", "json").json["messages"]
    again = run("dlq", "replay", message, "--as-new", "-o", "json").json["messages"]

    assert again == []
    assert state(dsn, message)[0] == "discarded"
    body = json.loads(run("outbox", "show", new, "-o", "json").json["body"])
    assert (body["id"], body["causationid"], body["type"]) == (new, message, "shop.placed")


def test_a_command_is_not_put_back_since_its_flow_was_told(run: Run, dsn: str) -> None:
    message = str(uuid4())
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            """
            insert into waypost.outbox (tenant_id, message_id, execution_id, epoch, path, endpoint, body)
            values (1, %s, gen_random_uuid(), 0, 'charge', 'payments', '{}')
            """,
            (message,),
        )
        conn.execute("update waypost.outbox set state = 'dead', reached = true")

    assert run("dlq", "replay", message, "-o", "json").json["messages"] == []
    assert "its flow was told" in run("dlq", "show", message).out
    assert state(dsn, message)[0] == "dead"


def test_what_has_arrived_is_sent_again_as_itself_or_as_another(run: Run, dsn: str) -> None:
    message, other = dead(dsn), dead(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            "update waypost.outbox set state = 'delivered', reached = true where message_id = %s", (message,)
        )

    once = run("delivery", "replay", message, other, "--as-new", "-o", "json").json["messages"]
    same = run("delivery", "replay", message, other, "-o", "json").json["messages"]
    twice = run("delivery", "replay", message, "-o", "json").json["messages"]

    body = json.loads(run("outbox", "show", once[0], "-o", "json").json["body"])
    assert (len(once), body["id"], body["causationid"]) == (1, once[0], message)
    assert (same, twice) == ([message], [])
    assert (state(dsn, message)[:2], state(dsn, other)[0]) == (("due", 3), "dead")
    assert run("delivery", "replay", NOBODY).code == 4


def test_what_is_discarded_is_a_dead_letter_no_more(run: Run, dsn: str) -> None:
    message = dead(dsn)

    assert run("dlq", "discard", message).code == 0

    assert run("dlq", "list", "-o", "json").json == []
    assert "need not arrive" in run("outbox", "show", message).out


def test_an_endpoint_is_enabled_with_a_window_of_what_is_sent(run: Run, dsn: str) -> None:
    """What is younger goes, dead letters too; what is older is a dead letter."""
    run("endpoint", "add", "billing", "http://127.0.0.1:8090/x", "--kind", "event")
    run("endpoint", "disable", "billing")
    old, young = dead(dsn, age="3 h"), dead(dsn, age="1 h")
    run("dlq", "replay", old)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("update waypost.outbox set since = now() - interval '3 h' where message_id = %s", (old,))

    said = run("endpoint", "enable", "billing", "--replay-since", "2h", "-o", "json").json

    assert (said["put_back"], said["skipped"]) == (1, 1)
    assert state(dsn, young)[0] == "due"
    assert state(dsn, old)[::2] == ("dead", "skipped")


class Hook(BaseHTTPRequestHandler):
    got: list[tuple[bytes, dict[str, str]]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        type(self).got.append((body, {name.lower(): value for name, value in self.headers.items()}))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name there
        """Nothing."""


@pytest.fixture
def hook() -> Iterator[HTTPServer]:
    Hook.got = []
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_script_that_sends_a_message_by_hand_runs_and_holds_no_secret(
    run: Run, dsn: str, hook: HTTPServer
) -> None:
    url = f"http://127.0.0.1:{hook.server_port}/it's here"
    secret = run("endpoint", "add", "billing", url.replace("'s here", ""), "--kind", "event").out.strip()
    message = dead(dsn)

    script = run("delivery", "curl", message).out
    without = subprocess.run(
        ["bash", "-c", script], capture_output=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    sent = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "WAYPOST_ENDPOINT_SECRET": secret},
    )

    assert secret.removeprefix("whsec_") not in script
    assert b"expected the secret" in without.stderr
    assert b"204" in sent.stdout, sent.stderr
    [(body, headers)] = Hook.got
    Webhook(secret).verify(body, headers)
    assert (headers["webhook-id"], json.loads(body)["id"]) == (message, message)


def test_a_secret_is_rotated_replaced_by_a_key_or_named(run: Run) -> None:
    run("endpoint", "add", "billing", "http://127.0.0.1:8090/x", "--kind", "event")

    secret = run("endpoint", "rotate", "billing").out.strip()
    public = run("endpoint", "rotate", "billing", "--key-pair").out.strip()
    named = run("endpoint", "rotate", "billing", "--reference", "env:BILLING", "-o", "json").json

    assert secret.startswith("whsec_")
    assert public.startswith("whpk_")
    assert named["secret"] is None
    assert run("endpoint", "show", "billing", "-o", "json").json["secrets"] == 4
    assert run("endpoint", "rotate", "nobody").code == 4
    assert run("endpoint", "rotate", "billing", "--reference", "x").code == 2


def test_headers_certificates_and_the_form_of_the_key_are_set_and_taken_back(run: Run) -> None:
    run("endpoint", "add", "billing", "http://127.0.0.1:8090/x")

    run(
        *("endpoint", "set", "billing", "--header", "Authorization=Bearer abc", "--tls", "ca=/etc/ca.pem"),
        *("--idempotency", "quoted", "--ordered", "key", "--mode", "binary"),
    )
    shown = run("endpoint", "show", "billing").out
    refused = run("endpoint", "set", "billing", "--header", "Host=evil.test", "--tls", "ca=x")
    run("endpoint", "set", "billing", "--header", "none", "--tls", "none")
    after = run("endpoint", "show", "billing", "-o", "json").json

    assert "Authorization" in shown
    assert "abc" not in shown
    assert "ca /etc/ca.pem" in shown
    assert "in order for each key" in shown
    assert refused.code == 2
    assert (after["headers"], after["tls"], after["idempotency"], after["mode"]) == (
        [],
        {},
        "quoted",
        "binary",
    )


HOW_IT_DOES: Final[tuple[tuple[LiteralString, str, str], ...]] = (
    ("rate = 5, window_at = now(), window_tries = 9, window_failures = 4", "5/s", "4 of 9 tries failed"),
    ("failing_since = now() - interval '2 h'", "failing for 2 h", "failing since  2 h"),
    ("open_until = now() + interval '20 s', opened = 3", "circuit open", "open: one try, in 1"),
    ("paused_until = now() + interval '90 s'", "paused in 1 m", "paused until"),
    ("state = 'disabled', fault = 'gone'", "disabled it answered 410", "disabled it answered 410"),
)


def test_an_endpoint_says_how_it_is_doing(run: Run, dsn: str) -> None:
    """The worst comes first where there is one word for it."""
    run("endpoint", "add", "billing", "http://127.0.0.1:8090/x", "--kind", "event")
    for set_, listed, shown in HOW_IT_DOES:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("update waypost.endpoint set " + set_)

        assert listed in run("endpoint", "list").out
        assert shown in run("endpoint", "show", "billing").out


def test_an_endpoint_is_removed_with_what_waits_for_it(run: Run, dsn: str) -> None:
    run("endpoint", "add", "billing", "http://127.0.0.1:8090/x", "--kind", "event")
    run("subscription", "add", "shop.*", "billing")
    message = dead(dsn)
    run("dlq", "replay", message)

    removed = run("endpoint", "remove", "billing", "-o", "json")

    assert removed.json == {"name": "billing", "state": "removed", "discarded": 1}
    assert state(dsn, message)[0] == "discarded"
    assert run("subscription", "list", "-o", "json").json == []
    assert run("endpoint", "remove", "billing").code == 4
