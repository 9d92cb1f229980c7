"""The `standardwebhooks` package of npm, another implementation in another language, against ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

from contracts.signature import Secret, sign, verify

PACKAGE: Final = "standardwebhooks@1.0.0"
INSTALL_SECONDS: Final = 90
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


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the package is installed. Skips where npm is absent or cannot reach its registry."""
    if not (shutil.which("npm") and shutil.which("node")):
        pytest.skip("npm or node is not installed")
    folder = tmp_path_factory.mktemp("npm")
    command = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE]
    environment = os.environ | {"npm_config_update_notifier": "false", "npm_config_fetch_retries": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=INSTALL_SECONDS,
            check=False,
            text=True,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install {PACKAGE} within {INSTALL_SECONDS} s")
    if done.returncode:
        pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr.strip().splitlines()[:1]}")
    (folder / "exchange.js").write_text(SCRIPT)
    return folder


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
