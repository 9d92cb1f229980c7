"""Commands as the engine makes them and the relay signs them, for services under test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from contracts.dataref import Tickets
from contracts.envelope import decode_structured
from contracts.signature import Secret, sign
from orchestrator.core.fact import Fact
from orchestrator.engine.message import Identity, Wire, message_of

EXECUTION: Final = "0199b6a0-0000-7000-8000-000000000001"
RECEIVER: Final = "https://waypost.example"


def command(
    verb: str,
    data: Any,
    *,
    path: str,
    receiver_url: str = RECEIVER,
    tickets: Tickets | None = None,
    **more: Any,
) -> bytes:
    """A command to `payments`, five minutes before its time is over."""
    at = datetime.now(UTC)
    args = {"do": "call", "endpoint": "payments", "name": verb, "data": data}
    asked = {
        "kind": "call",
        "name": path,
        "args": args,
        "due": (at + timedelta(minutes=5)).isoformat(),
        **more,
    }
    sender = Identity(tenant=1, execution=EXECUTION, epoch=0, key="order-1042", traceparent=None)
    return message_of(
        Fact(2, "asked", path, asked, at), sender, Wire("/waypost", receiver_url, tickets=tickets)
    ).body


def undo_of(body: bytes, path: str, *, receiver_url: str = RECEIVER) -> bytes:
    """The refund of the charge in `body`, which was asked for at `path`."""
    event = decode_structured(body)
    assert event.time is not None
    undo: dict[str, Any] = {"kind": "undo", "name": path, "known": True, "undoes_at": event.time}
    data = {"order": "order-1042", "charge": None}
    return command("payment.refund", data, path=f"{path}/undo", receiver_url=receiver_url, **undo)


def signed(body: bytes, secret: Secret) -> dict[str, str]:
    """The headers that prove it."""
    now, identity = int(datetime.now(UTC).timestamp()), decode_structured(body).id
    signature = sign([secret], message_id=identity, timestamp=now, body=body)
    return {"webhook-id": identity, "webhook-timestamp": str(now), "webhook-signature": signature}
