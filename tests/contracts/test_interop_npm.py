"""The `standardwebhooks` package of npm, another implementation in another language, against ours."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

from contracts.signature import Secret, sign, verify
from tests.npm import node_modules

SECRET: Final = Secret.of(bytes(range(32)))
ID: Final = "msg_2b6f8f"
BODY: Final = '{"order":"order-1042","name":"Zoë €"}'

SCRIPT: Final = """
const { Webhook } = require("standardwebhooks");
const input = JSON.parse(require("fs").readFileSync(0, "utf8"));
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
    (tmp_path / "exchange.js").write_text(SCRIPT)
    return tmp_path


def exchange(node: Path, signature: str, timestamp: int) -> dict[str, object]:
    """What the package says of our signature, and what it signs itself."""
    message = {"secret": SECRET.text, "id": ID, "timestamp": timestamp, "body": BODY, "signature": signature}
    done = subprocess.run(
        ["node", "exchange.js"],
        cwd=node,
        input=json.dumps(message),
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    )
    return json.loads(done.stdout)


def test_the_npm_package_verifies_ours_and_we_verify_its(node: Path) -> None:
    now = int(time.time())
    ours = sign(
        [Secret.of(b"another secret, in rotation"), SECRET], message_id=ID, timestamp=now, body=BODY.encode()
    )

    theirs = exchange(node, ours, now)

    assert theirs["verified"] is True
    verify(
        [SECRET],
        message_id=ID,
        timestamp=str(now),
        signature=str(theirs["signature"]),
        body=BODY.encode(),
        now=now,
    )


def test_the_npm_package_refuses_what_we_did_not_sign(node: Path) -> None:
    now = int(time.time())
    forged = sign([Secret.of(b"a secret of somebody else")], message_id=ID, timestamp=now, body=BODY.encode())

    assert exchange(node, forged, now)["verified"] is False
