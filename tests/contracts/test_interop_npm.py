"""Packages of npm, others' work in another language, against ours: `standardwebhooks`, `svix`, `cloudevents`."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

from contracts.binary import decode_binary
from contracts.errors import BadSignature, MalformedEvent
from contracts.signature import Secret, sign, verify
from receiver.authenticity import Verifier
from receiver.schemes import policy_of
from tests.contracts.test_binary import canonical
from tests.npm import node_modules

SECRET: Final = Secret.of(bytes(range(32)))
VERIFIER: Final = Verifier(policy_of("svix", {}).signature, [SECRET])
ID: Final = "msg_2b6f8f"
BODY: Final = '{"order":"order-1042","name":"Zoë €"}'

SCRIPT: Final = """
import { readFileSync } from "node:fs";
const input = JSON.parse(readFileSync(0, "utf8"));
const { Webhook } = await import(input.package);
const webhook = new Webhook(input.secret);
const at = new Date(input.timestamp * 1000);
let verified = true;
try {
  webhook.verify(input.body, {
    "webhook-id": input.id,
    "webhook-timestamp": String(input.timestamp),
    "webhook-signature": input.signature,
  });
} catch (error) {
  verified = false;
}
console.log(JSON.stringify({ verified, signature: webhook.sign(input.id, at, input.body) }));
"""


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A folder where the package can be used."""
    (tmp_path / "node_modules").symlink_to(node_modules())
    (tmp_path / "exchange.mjs").write_text(SCRIPT)
    return tmp_path


PACKAGES: Final = ("standardwebhooks", "svix")


def exchange(node: Path, package: str, signature: str, timestamp: int) -> dict[str, object]:
    """What the package says of our signature, and what it signs itself."""
    message = {"package": package, "secret": SECRET.text, "id": ID, "body": BODY}
    message |= {"timestamp": timestamp, "signature": signature}
    done = subprocess.run(
        ["node", "exchange.mjs"],
        cwd=node,
        input=json.dumps(message),
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_npm_package_verifies_ours_and_we_verify_its(node: Path, package: str) -> None:
    now = int(time.time())
    ours = sign(
        [Secret.of(b"another secret, in rotation"), SECRET], message_id=ID, timestamp=now, body=BODY.encode()
    )

    theirs = exchange(node, package, ours, now)

    assert theirs["verified"] is True
    verify(
        [SECRET],
        message_id=ID,
        timestamp=str(now),
        signature=str(theirs["signature"]),
        body=BODY.encode(),
        now=now,
    )
    for names in ("webhook", "svix"):
        proof = VERIFIER.proof(
            {
                f"{names}-id": ID,
                f"{names}-timestamp": str(now),
                f"{names}-signature": str(theirs["signature"]),
            }
        )
        VERIFIER.verify(proof, BODY.encode(), now=now)
        with pytest.raises(BadSignature, match="mismatch"):
            VERIFIER.verify(proof, BODY.encode() + b" ", now=now)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_npm_package_refuses_what_we_did_not_sign(node: Path, package: str) -> None:
    now = int(time.time())
    forged = sign([Secret.of(b"a secret of somebody else")], message_id=ID, timestamp=now, body=BODY.encode())

    assert exchange(node, package, forged, now)["verified"] is False


BINARY: Final = """
const { CloudEvent, HTTP } = require("cloudevents");
const event = new CloudEvent(JSON.parse(require("fs").readFileSync(0, "utf8")));
console.log(JSON.stringify(HTTP.binary(event)));
"""


def in_headers(node: Path, **attributes: object) -> tuple[list[tuple[str, str]], bytes]:
    """Headers and body that the package makes of an event."""
    event = {"id": "1", "source": "/orders", "type": "order.placed", **attributes}
    done = subprocess.run(
        ["node", "-e", BINARY],
        cwd=node,
        input=json.dumps(event),
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    )
    message = json.loads(done.stdout)
    return [(name, canonical(value)) for name, value in message["headers"].items()], message.get(
        "body", ""
    ).encode()


def test_we_read_what_the_cloudevents_package_puts_into_headers(node: Path) -> None:
    headers, body = in_headers(node, subject="order-1042", ext=True, n=7, data={"name": "Zoë"})

    event = decode_binary(headers, body)

    assert (event.id, event.source, event.type, event.subject) == (
        "1",
        "/orders",
        "order.placed",
        "order-1042",
    )
    assert (event.data, event.datacontenttype) == ({"name": "Zoë"}, "application/json; charset=utf-8")
    assert event.extensions == {"ext": "true", "n": "7"}


@pytest.mark.parametrize("subject", ["Zoë", "100%", 'the "first"'])
def test_what_the_cloudevents_package_should_have_encoded_is_refused(node: Path, subject: str) -> None:
    headers, body = in_headers(node, subject=subject)

    with pytest.raises(MalformedEvent, match="subject: expected"):
        decode_binary(headers, body)
