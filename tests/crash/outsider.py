"""Somebody outside, with no part in any flow, who says what happened to parcels."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Mapping
from typing import Final

from contracts.envelope import STRUCTURED, Envelope, encode_structured
from contracts.signature import Secret
from tests.commands import signed
from tests.crash.contracts import Announced, Collected
from tests.crash.services import REPLIES

PATIENCE_SECONDS: Final = 5.0


def says(event: Announced | Collected, *, environment: Mapping[str, str]) -> bool:
    """Post it, the same event each time; whether the receiver has said that it has it."""
    envelope = Envelope(
        id=f"{event.type_.replace('.', '-')}-{event.order}",
        source="/stock",
        type=event.type_,
        subject=event.order,
        datacontenttype="application/json",
        data=event.model_dump(mode="json"),
    )
    body = encode_structured(envelope)
    request = urllib.request.Request(
        f"{environment['WAYPOST_RECEIVER_URL']}/events/default/stock",
        body,
        {"content-type": STRUCTURED, **signed(body, Secret.parse(environment[REPLIES]))},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return answer.status == 202
    except (OSError, http.client.HTTPException):
        return False
