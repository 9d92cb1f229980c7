"""The service in Node, with nothing of ours: it does its part of an order, once, and not after its undo."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from contracts.signature import Secret
from orchestrator.cli import main
from tests.cli.conftest import environment_of
from tests.cli.processes import ROOT, Running, running, waypost
from tests.commands import command, signed, undo_of
from tests.npm import node_modules

COMMANDS: Final = Secret.of(b"c" * 32)
REPLIES: Final = Secret.of(b"r" * 32)
CHARGE: Final = {"order": "order-1042", "amount": 4200, "card": "4242424242424242"}
ORDER: Final = {"id": "order-1", "customer": "ada", "total": 4200}
STARTED: Final = r'"event": "{part}.started"'


@dataclass(slots=True)
class Stand:
    """A receiver, and the Node service as `payments`, on a database of their own."""

    environment: dict[str, str]
    folder: Path
    stack: ExitStack
    service_url: str = ""

    def start(self, name: str, program: list[str], **more: str) -> Running:
        """A process that runs until the test is over."""
        output, environment = self.folder / f"{name}.out", {**self.environment, **more}
        return self.stack.enter_context(
            running(program, environment=environment, output=output, cwd=self.folder)
        )

    def say(self, *words: str) -> int:
        """The exit code of `waypost` with these words."""
        return main(words, self.environment)

    def register(self, name: str, url: str) -> None:
        for side, secret in (("command", COMMANDS), ("reply", REPLIES)):
            (self.folder / f"{name}.{side}").write_text(secret.text)
        assert self.say("sender", "add", name, "--secret-file", str(self.folder / f"{name}.reply")) == 0
        given = ("--secret-file", str(self.folder / f"{name}.command"))
        assert self.say("endpoint", "add", name, url, *given) == 0

    def post(self, body: bytes, headers: Mapping[str, str]) -> int:
        """The status with which the service answers."""
        content = {"content-type": "application/cloudevents+json"}
        request = urllib.request.Request(self.service_url, data=body, headers={**headers, **content})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def replies(self) -> list[tuple[str, Any]]:
        """Type and data of what the receiver has stored, in the order of arrival."""
        with psycopg.connect(self.environment["WAYPOST_DATABASE_URL"]) as conn:
            rows = conn.execute("select type, body from waypost.inbox order by inbox_id").fetchall()
        return [(kind, json.loads(body).get("data")) for kind, body in rows]


@pytest.fixture
def stand(dsn: str, tmp_path: Path) -> Generator[Stand]:
    (tmp_path / "node_modules").symlink_to(node_modules())
    shutil.copy(ROOT / "examples/node/participant.mjs", tmp_path)
    secrets = {"PAYMENTS_COMMAND_SECRET": COMMANDS.text, "PAYMENTS_REPLY_SECRET": REPLIES.text}
    with ExitStack() as stack:
        stand = Stand(environment_of(dsn), tmp_path, stack)
        port = stand.start("receiver", waypost("receiver")).until_said(r'"receiver.started".*"port": (\d+)')[
            1
        ]
        stand.environment["WAYPOST_RECEIVER_URL"] = f"http://127.0.0.1:{port}"
        service = stand.start("payments", ["node", "participant.mjs"], PORT="0", **secrets)
        stand.service_url = service.until_said(r"listens on (\S+)")[1]
        stand.register("payments", stand.service_url)
        yield stand


@pytest.fixture
def receiver_url(stand: Stand) -> str:
    return stand.environment["WAYPOST_RECEIVER_URL"]


def test_an_order_is_completed_and_another_compensated_with_a_service_in_node(
    stand: Stand, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("inventory", "shipping"):
        sides = {"COMMAND": COMMANDS, "REPLY": REPLIES}
        secrets = {f"{name.upper()}_{side}_SECRET": secret.text for side, secret in sides.items()}
        service = stand.start(name, [*waypost()[:2], f"examples.shop.{name}"], **secrets)
        stand.register(name, service.until_said(r"listens on (\S+)")[1])
    for part in ("relay", "worker"):
        stand.start(part, waypost(part)).until_said(STARTED.format(part=part))
    capfd.readouterr()

    good = stand.say("start", "order", "--input", json.dumps(ORDER), "--wait", "-o", "json")
    receipt = json.loads(capfd.readouterr().out)["output"]
    declined = json.dumps({**ORDER, "id": "order-2", "card": "4000000000000002"})
    bad = stand.say("start", "order", "--input", declined, "--wait")
    end = capfd.readouterr().out

    assert (good, receipt["charge"]) == (0, "charge-order-1")
    assert bad == 8
    assert "compensated: declined" in end
    assert "payment.charge.refused" in [kind for kind, _ in stand.replies()]


def test_the_service_in_node_acts_once_and_undoes_what_it_did(stand: Stand, receiver_url: str) -> None:
    charge = command("payment.charge", CHARGE, path="charge", receiver_url=receiver_url)
    undo = undo_of(charge, "charge", receiver_url=receiver_url)

    statuses = [stand.post(body, signed(body, COMMANDS)) for body in (charge, charge, undo, charge)]

    assert statuses == [202, 202, 202, 202]
    assert stand.replies() == [
        ("payment.charge.done", {"charge": "charge-order-1042"}),
        ("payment.refund.done", {"refunded": True}),
    ]


def test_the_service_in_node_refuses_what_was_undone_before_it_came(stand: Stand, receiver_url: str) -> None:
    charge = command("payment.charge", CHARGE, path="charge", receiver_url=receiver_url)
    undo = undo_of(charge, "charge", receiver_url=receiver_url)

    statuses = [stand.post(body, signed(body, COMMANDS)) for body in (undo, charge)]

    assert statuses == [202, 202]
    assert stand.replies() == [
        ("payment.refund.done", {"refunded": False}),
        ("payment.charge.refused", {"code": "undone"}),
    ]


def test_the_service_in_node_begins_nothing_whose_time_is_over(stand: Stand, receiver_url: str) -> None:
    due = "2020-01-01T00:00:00+00:00"
    late = command("payment.charge", CHARGE, path="charge", receiver_url=receiver_url, due=due)

    assert stand.post(late, signed(late, COMMANDS)) == 202
    assert stand.replies() == [("payment.charge.refused", {"code": "expired"})]


def test_the_service_in_node_takes_only_what_is_signed_and_known_to_it(
    stand: Stand, receiver_url: str
) -> None:
    charge = command("payment.charge", CHARGE, path="charge", receiver_url=receiver_url)
    other = command("payment.print", CHARGE, path="print", receiver_url=receiver_url)

    statuses = [
        stand.post(charge, signed(charge, REPLIES)),
        stand.post(charge + b" ", signed(charge, COMMANDS)),
        stand.post(other, signed(other, COMMANDS)),
    ]

    assert statuses == [401, 401, 501]
    assert stand.replies() == []


def test_the_service_in_node_asks_to_come_again_when_nobody_takes_its_reply(stand: Stand) -> None:
    charge = command("payment.charge", CHARGE, path="charge", receiver_url="http://127.0.0.1:9")

    assert stand.post(charge, signed(charge, COMMANDS)) == 503
