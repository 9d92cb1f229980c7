"""What the three services share: where they listen, whom they trust, and knobs that make them misbehave."""

from __future__ import annotations

import os
from pathlib import Path

from contracts.signature import Secret
from receiver.memory import SqliteMemory
from receiver.participant import Participant


def participant(name: str) -> Participant:
    """The service `name`, as the environment describes it.

    WAYPOST_RECEIVER_URL       where replies go (http://127.0.0.1:8081)
    WAYPOST_SOURCE             the source of commands (/waypost)
    <NAME>_COMMAND_SECRET      what `waypost endpoint add` printed; or <NAME>_COMMAND_SECRET_FILE
    <NAME>_REPLY_SECRET        what `waypost sender add` printed; or <NAME>_REPLY_SECRET_FILE
    SHOP_DATA_DIR              where the memory is kept (the working directory)
    """
    return Participant(
        name=name,
        receiver_url=os.environ.get("WAYPOST_RECEIVER_URL", "http://127.0.0.1:8081"),
        secret=secret(f"{name.upper()}_REPLY_SECRET"),
        accepts={os.environ.get("WAYPOST_SOURCE", "/waypost"): secret(f"{name.upper()}_COMMAND_SECRET")},
        memory=SqliteMemory(Path(os.environ.get("SHOP_DATA_DIR", ".")) / f"{name}.sqlite"),
    )


def run(service: Participant) -> None:
    """Serve at SHOP_ADDR (127.0.0.1:0, a free port), until SIGTERM."""
    host, _, port = os.environ.get("SHOP_ADDR", "127.0.0.1:0").rpartition(":")
    service.run(host=host, port=int(port))


def secret(name: str) -> Secret:
    if (text := os.environ.get(name)) is not None:
        return Secret.parse(text)
    if (path := os.environ.get(f"{name}_FILE")) is not None:
        return Secret.parse(Path(path).read_text())
    raise SystemExit(f"{name}: expected a secret whsec_… here or in the file {name}_FILE, found neither")


def named(knob: str, default: str = "") -> frozenset[str]:
    """The comma-separated names in the environment variable `knob`."""
    return frozenset(name.strip() for name in os.environ.get(knob, default).split(",") if name.strip())
