"""Somebody who posts events to the receiver, with nothing but public packages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from standardwebhooks import Webhook

NAME = "office"


@dataclass(frozen=True, slots=True)
class Outsider:
    """Posts as the sender NAME; `secret` is what it signs with."""

    receiver_url: str
    secret: str

    async def post(self, identity: str, type: str, key: str, data: dict[str, Any]) -> tuple[int, str]:  # noqa: A002
        """Post an event once; the status of the answer, and what the receiver says the inbox made of it."""
        event = {
            "specversion": "1.0",
            "id": identity,
            "source": f"/{NAME}",
            "type": type,
            "subject": key,
            "time": "2026-01-01T00:00:00Z",  # the same bytes each time
            "datacontenttype": "application/json",
            "data": data,
        }
        body, now = json.dumps(event), datetime.now(UTC)
        headers = {
            "content-type": "application/cloudevents+json",
            "webhook-id": identity,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Webhook(self.secret).sign(identity, now, body),
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.receiver_url}/events/default/{NAME}", data=body, headers=headers) as answer,
        ):
            return answer.status, answer.headers.get("x-inbox", "")
