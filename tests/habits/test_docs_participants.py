"""The page for those who write services: its examples run against what the engine really sends."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, Final

import psycopg
import pytest

from contracts.dataref import Tickets
from contracts.envelope import STRUCTURED, decode_structured
from contracts.errors import BadSignature, MalformedEvent, NotAllowed, TooLarge, Unavailable
from contracts.limits import PAYLOAD_BYTES_MAX
from contracts.schemas import document
from contracts.signature import Secret, verify
from contracts.vault import Vault
from examples.shop.contracts import Charge
from receiver.arrivals import Arrival, mail_of
from receiver.senders import Sender
from tests.cli.conftest import environment_of
from tests.cli.processes import ROOT, running, waypost
from tests.commands import command, signed, undo_of
from tests.habits.documents import blocks, code_in, files_in, path_with, table, text_of

PAGE: Final = "docs/participants.md"
NODE: Final = "examples/node/participant.mjs"
COMMANDS: Final = Secret.of(b"c" * 32)
REPLIES: Final = Secret.of(b"r" * 32)
TICKETS: Final = Tickets(Vault(bytes(32)))


@pytest.fixture
def bank(tmp_path: Path) -> ModuleType:
    """The module that the page has by hand."""
    return loaded(tmp_path, "bank.py")


def loaded(folder: Path, name: str) -> ModuleType:
    path = folder / name
    path.write_text(files_in(PAGE)[name], encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Post:
    """Takes replies as the receiver does, as far as that needs no database."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.said: list[Any] = []

    def __call__(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        verify(
            [REPLIES],
            message_id=headers["webhook-id"],
            timestamp=headers["webhook-timestamp"],
            signature=headers["webhook-signature"],
            body=body,
            now=int(datetime.now(UTC).timestamp()),
        )
        assert url == "https://waypost.example/events/default/payments"
        assert headers["content-type"] == STRUCTURED
        event = decode_structured(body)
        sender = Sender(1, "payments", "enabled", (REPLIES,))
        mail = mail_of(Arrival.of(sender, headers["webhook-id"], event, body))
        assert mail.kind == "reply"
        self.bodies.append(body)
        self.said.append(json.loads(mail.data or "null"))
        return 202


def taken(bank: ModuleType, body: bytes, post: Post) -> int:
    status: int = bank.take(
        signed(body, COMMANDS), body, command_secret=COMMANDS.text, reply_secret=REPLIES.text, post=post
    )
    return status


def test_a_command_looks_as_the_page_shows_it() -> None:
    [shown_there] = [json.loads(block) for block in blocks(PAGE, "json")]

    made = json.loads(command("payment.charge", {"order": "order-1042", "amount": 4200}, path="charge"))

    assert list(made) == list(shown_there)
    assert made["idempotencykey"].partition("/")[2] == shown_there["idempotencykey"].partition("/")[2]
    for constant in ("specversion", "type", "subject", "datacontenttype", "replyto", "data"):
        assert made[constant] == shown_there[constant]


def test_every_attribute_of_a_command_is_explained_and_no_other() -> None:
    made = json.loads(undo_of(command("payment.charge", {}, path="charge"), "charge"))
    made |= json.loads(command("payment.charge", "x" * PAYLOAD_BYTES_MAX, path="charge", tickets=TICKETS))
    explained = [name for cells in table(PAGE, "attribute") for name in code_in(cells[0])]

    named = {*made, "probes"} - {"specversion", "time", "datacontenttype"}  # what only a probe has, too

    assert sorted(explained) == sorted(named)


@pytest.fixture
def elsewhere(tmp_path: Path) -> ModuleType:
    return loaded(tmp_path, "elsewhere.py")


@contextmanager
def giving(status: int, body: bytes) -> Generator[str]:
    """Waypost's receiver, as far as it gives data out."""

    class Give(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Location", "/data/again")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002  # its name there

    with ThreadingHTTPServer(("127.0.0.1", 0), Give) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


LARGE: Final = {"order": "x" * PAYLOAD_BYTES_MAX}
BYTES: Final = json.dumps(LARGE, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (200, BYTES, LARGE),
        (200, BYTES.replace(b"x", b"y"), ValueError),
        (200, BYTES + b" ", ValueError),
        (404, b"", OSError),
        (302, BYTES, OSError),
    ],
)
def test_data_that_are_elsewhere_are_fetched_and_compared(
    elsewhere: ModuleType, status: int, body: bytes, found: Any
) -> None:
    with giving(status, body) as url:
        made = json.loads(command("payment.charge", LARGE, path="charge", tickets=TICKETS, receiver_url=url))
        if found is LARGE:
            assert elsewhere.data_of(made, waypost=url) == LARGE
            with pytest.raises(ValueError, match="not at Waypost"):
                elsewhere.data_of(made, waypost="https://waypost.example")
        else:
            with pytest.raises(found):
                elsewhere.data_of(made, waypost=url)


def test_data_that_come_with_a_command_are_not_fetched(elsewhere: ModuleType) -> None:
    made = json.loads(command("payment.charge", {"order": "1"}, path="charge"))

    assert elsewhere.data_of(made, waypost="https://waypost.example") == {"order": "1"}


def test_every_status_of_the_receiver_is_explained() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "receiver").glob("*.py"))
    raised = {int(status) for status in re.findall(r"Refusal\(\s*(\d{3})", sources)}
    told = {error.http_status for error in (BadSignature, MalformedEvent, NotAllowed, TooLarge, Unavailable)}
    listed = {
        int(status) for row in table(PAGE, "the receiver answers") for status in re.findall(r"\d+", row[0])
    }

    assert raised, "the search finds no refusal at all"
    assert listed == raised | told | {202}


def test_the_parts_of_a_contract_s_document_are_explained() -> None:
    explained = [name for cells in table(PAGE, "of a command") for name in code_in(cells[0])]

    assert explained == list(document(Charge))


def test_the_service_by_hand_acts_once_and_repeats_its_reply(bank: ModuleType) -> None:
    charge, post = command("payment.charge", {"order": "order-1042", "amount": 4200}, path="charge"), Post()

    statuses = [taken(bank, charge, post) for _ in range(2)]

    assert statuses == [202, 202]
    assert post.bodies[0] == post.bodies[1]
    assert post.said[0] == {"outcome": "done", "value": {"charge": "charge-order-1042"}}


def test_the_service_by_hand_undoes_what_it_did_and_never_does_what_was_undone(bank: ModuleType) -> None:
    done = command("payment.charge", {"order": "order-1042", "amount": 4200}, path="charge")
    late, post = command("payment.charge", {"order": "order-1042", "amount": 1}, path="charge#2"), Post()

    for body in (done, undo_of(done, "charge"), undo_of(late, "charge#2"), late):
        assert taken(bank, body, post) == 202

    assert [said["outcome"] for said in post.said] == ["done", "done", "done", "refused"]
    assert [said["value"] for said in post.said[1:3]] == [{"refunded": True}, {"refunded": False}]
    assert post.said[3]["error"]["code"] == "undone"


def test_the_service_by_hand_refuses_a_forgery_and_says_later_when_no_reply_was_taken(
    bank: ModuleType,
) -> None:
    charge = command("payment.charge", {"order": "order-1042", "amount": 4200}, path="charge")

    def closed(_url: str, _headers: Mapping[str, str], _body: bytes) -> int:
        return 503

    secrets = {"command_secret": COMMANDS.text, "reply_secret": REPLIES.text}

    assert bank.take(signed(charge, COMMANDS), charge + b" ", **secrets, post=closed) == 401
    assert bank.take(signed(charge, COMMANDS), charge, **secrets, post=closed) == 503


def test_the_service_by_hand_does_only_what_it_knows(bank: ModuleType) -> None:
    other, post = command("payment.print", {}, path="print"), Post()

    assert (taken(bank, other, post), post.bodies) == (501, [])


# ---- in a shell ------------------------------------------------------------------------------------------------


def shell(words: str, folder: Path, **environment: str) -> str:
    """What a script prints. Skips where the programs that it is about are not installed."""
    for program in ("curl", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    inherited = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-eu", "-c", words],
        cwd=folder,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_signature_by_hand_is_that_of_the_specification(tmp_path: Path) -> None:
    [script] = [block for block in blocks(PAGE, "sh") if block.startswith("# Prints ")]

    assert shell(script, tmp_path) == script.partition("\n")[0].removeprefix("# Prints ")


def test_events_from_a_shell_are_taken_in_both_modes(dsn: str, tmp_path: Path) -> None:
    scripts = {block.partition(" ")[0]: block for block in blocks(PAGE, "sh")}
    (tmp_path / "post.sh").write_text(next(it for it in blocks(PAGE, "sh") if it.startswith("# post.sh ")))
    structured, binary = scripts["test"], scripts["sh"]
    environment = environment_of(dsn)

    with running(waypost("receiver"), environment=environment, output=tmp_path / "receiver.out") as receiver:
        port = receiver.until_said(r'"event": "receiver.started".*"port": (\d+)')[1]
        more = {"WAYPOST_RECEIVER_URL": f"http://127.0.0.1:{port}", "PATH": path_with(tmp_path)}
        said = shell(structured + binary, tmp_path, **environment, **more)
        again = shell(structured, tmp_path, **environment, **more)
    with psycopg.connect(dsn) as conn:
        rows = conn.execute(
            "select source, event_id, type, key, data from waypost.inbox order by 2"
        ).fetchall()

    assert (said, again) == ('{"answer": "event"}' * 2, '{"answer": "event"}')
    assert rows == [
        ("/shop", f"paid-{n}", "payment.succeeded", f"order-{n}", {"order": f"order-{n}", "amount": 4200})
        for n in (1042, 1043)
    ]


def test_the_service_with_the_helper_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAYMENTS_COMMAND_SECRET", COMMANDS.text)
    monkeypatch.setenv("PAYMENTS_REPLY_SECRET", REPLIES.text)

    payments = loaded(tmp_path, "payments.py").payments
    request.addfinalizer(payments._memory.close)

    assert sorted(payments._handlers) == ["payment.charge", "payment.refund"]


def test_the_service_in_node_is_the_one_that_is_tested() -> None:
    assert blocks(PAGE, "js") == [text_of(NODE)]


def test_the_service_in_node_is_short_and_needs_two_packages() -> None:
    lines = text_of(NODE).splitlines()
    packages = re.findall(r'^import .+ from "(?!node:)(.+)";$', text_of(NODE), re.MULTILINE)

    assert len(lines) < 60
    assert packages == ["cloudevents", "standardwebhooks"]
