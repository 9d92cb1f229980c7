"""The first try that fails at an endpoint, out of what a relay logs: the rest of them is in its log file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

FAILED: Final = {
    "retry": "it is tried again until its time is over",
    "spared": "it is tried again, and this try does not count",
    "refused": "it counts as refused, and is not tried again",
    "delivered": "it was taken, but what is in the answer is no reply to it",
}
"""What becomes of a message after a try that went wrong, by the outcome of the try."""


class Failures:
    """Hears lines of logs, and tells of each endpoint the first try that fails since one there went well."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._failing: set[str] = set()

    def __call__(self, line: str) -> None:
        if '"event": "message.tried"' not in line:
            return
        try:
            said: dict[str, Any] = json.loads(line)
            endpoint, outcome, attempt = str(said["endpoint"]), str(said["outcome"]), said["attempt"]
            status, error = said["status"], said["error"]
        except (ValueError, KeyError, TypeError):
            return  # a flow may print anything
        if outcome == "delivered" and error is None:
            self._failing.discard(endpoint)
        elif endpoint not in self._failing:
            self._failing.add(endpoint)
            answer = " ".join(str(it) for it in (status, error) if it is not None)
            self._tell(
                f"endpoint {endpoint}, try {attempt}: {answer}; {FAILED.get(outcome, outcome)}."
                " `waypost list`, then `waypost why ID` or `show ID`"
            )
