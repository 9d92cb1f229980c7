"""Times, errors and tries in words, for sentences that people read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from orchestrator.store.reading import MessageRow

Json = Any

UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def when(moment: datetime, now: datetime) -> str:
    """`12:00:05 UTC (in 5 s)`, with the date where that is another day."""
    at, today = moment.astimezone(UTC), now.astimezone(UTC).date()
    form = "%H:%M:%S UTC" if at.date() == today else "%Y-%m-%d %H:%M:%S UTC"
    return f"{at:{form}} ({distance(moment, now)})"


def distance(moment: datetime, now: datetime) -> str:
    seconds = int((now - moment).total_seconds())
    for unit, length in UNITS:
        if abs(seconds) >= length:
            size = f"{abs(seconds) // length} {unit}"
            return f"in {size}" if seconds < 0 else f"{size} ago"
    return "now"


def failure(error: dict[str, Json] | None) -> str:
    """An error as facts carry it: its code, and what it says."""
    said = error or {}
    code, detail = str(said.get("code") or "error"), str(said.get("detail") or "")
    return f"{code} ({detail})" if detail else code


def last_try(message: MessageRow, now: datetime) -> str:
    """What the last try to send brought. That is written after its effect, and may be missing for good."""
    if message.tried is None or message.tried_at is None:
        return "no try of it is recorded" if message.attempts else "it was not tried yet"
    if message.http_status is not None:
        got = f"was answered {message.http_status}"
    else:
        got = f"got no answer ({message.error_code or message.outcome})"
    return f"try {message.tried} {got} at {when(message.tried_at, now)}"
